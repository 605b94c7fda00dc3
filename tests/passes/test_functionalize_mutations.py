"""In-place ops give way to functional ones; views, buffers and batch norm read and leave the right values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.passes.functionalize_mutations import functionalize_mutations
from autopar.passes.spec import check


class Net(nn.Module):
    """A weight, a counter and batch norms for the bodies below."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("average", torch.zeros(6))
        self.norm = nn.BatchNorm1d(6)
        self.stateless = nn.BatchNorm1d(6, track_running_stats=False)
        self.instances = nn.InstanceNorm1d(3, momentum=0.3, affine=True, track_running_stats=True)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x @ self.weight)


def through_views(net: Net, y: Tensor) -> Any:
    view, row = y[:, 1:3], y.t()[0]
    view.mul_(2.0)
    row.add_(1)
    y[:, 4:] = y[:, :2]
    return y.sigmoid().sum() + view.sum() * 3 + row.sum(), y


def flat_views(net: Net, y: Tensor) -> Any:
    flat = y.view(2, -1)
    flat[0].zero_()
    y.unsqueeze_(0)
    y.add_(1)
    y[y < 0.3] = 0.1
    return (y.sum() + flat.exp().sum(),)


def transposed(net: Net, y: Tensor) -> Any:
    turned = (y * 1).permute(1, 0)
    turned[2].mul_(3)
    turned.narrow(0, 3, 2).clamp_(max=0.5)
    a = turned.unsqueeze(0).squeeze(0)
    a.sub_(1, alpha=2)
    return turned.sin().sum(), a


def promotes(net: Net, y: Tensor) -> Any:
    k = torch.zeros(3)
    k[0].fill_(2)
    k[1] = 5.0
    y = y.clone()
    y.copy_(torch.arange(6))
    z = y.half()
    z.mul_(torch.ones(6))
    z[:, 0] = z[:, 1]
    torch.relu_(z)
    return (k.sum() + y.sum() + z.float().sum() + net.weight.sum(),)


def counts(net: Net, y: Tensor) -> Any:
    net.count.add_(1)
    y = y * net.count
    net.average.lerp_(y.detach().mean(0), 0.25)
    net.average[0] = 7
    return (y.sum() + net.average.sum(),)


def normalises(net: Net, y: Tensor) -> Any:
    return (net.stateless(net.norm(y).relu_() + net.norm(y * 2)).square().sum(),)


def normalises_instances(net: Net, y: Tensor) -> Any:
    places = y.reshape(8, 3, 2)
    return ((net.instances(places).relu_() + net.instances(places * 2)).square().sum(),)


def gives_out(net: Net, y: Tensor) -> Any:
    half = torch.div(net.average, 2.0, out=net.average)
    row = y.detach()[:3] * 0
    torch.sum(y.detach(), 0, out=row[1])
    return (y.sum() + half.sum() + net.average.sum() + row.sin().sum(),)


@pytest.mark.parametrize(
    "body", [through_views, flat_views, transposed, promotes, counts, normalises, normalises_instances, gives_out]
)
def test_equals_in_place(tools: Any, body: Callable[[Net, Tensor], Any]) -> None:
    net, x = Net(body), torch.randn(8, 4)
    gm = tools.export(net, (x,))
    after = functionalize_mutations(tools.export(net, (x,)))
    check(after, "functionalize_mutations")
    tools.same_numbers(gm, after, (x,))


def test_buffers_are_outputs(tools: Any) -> None:
    net, x = Net(normalises), torch.randn(8, 4)
    gm = functionalize_mutations(tools.export(net, (x,)))
    found = gm(x)["buffers"]
    net(x)
    held = dict(net.named_buffers())
    assert set(found) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert found["norm.num_batches_tracked"] == 2
    for name, value in found.items():
        torch.testing.assert_close(value, held[name])


def test_momentum_none_is_a_cumulative_average(tools: Any) -> None:
    net, x = Net(normalises), torch.randn(8, 4)
    net.norm.momentum = float("nan")  # as capture writes None
    gm = functionalize_mutations(tools.export(net, (x,)))
    found = gm(x)["buffers"]
    net.norm.momentum = None
    net(x)
    torch.testing.assert_close(found["norm.running_mean"], net.norm.running_mean)
    torch.testing.assert_close(found["norm.running_var"], net.norm.running_var)


def test_golden(tools: Any) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y[:, 2:4].mul_(3)
            return y.relu_().sum()

    x = torch.randn(4, 6)
    gm = tools.export(Small(), (x,))
    check(gm, "capture")
    after = tools.golden(functionalize_mutations, "functionalize_mutations", gm)
    check(after, "functionalize_mutations")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda net, y: (y * 1).expand(2, 8, 6)[0].add_(1).sum(), "writes through a view"),
        (lambda net, y: y.detach().mul_(2).sum() + y.sum(), "writes through detach"),
        (lambda net, y: torch.add(y.detach(), 1, out=torch.empty(0)).sum(), "gives out= another shape"),
        (lambda net, y: torch.max(y.detach(), 0, out=(torch.empty(6), torch.ones(6).long()))[0].sum(), "its arguments"),
        (lambda net, y: y.fill_diagonal_(0.0).sum(), "has no form that does not"),
    ],
)
def test_refused_in_one_line(tools: Any, body: Callable[[Net, Tensor], Any], words: str) -> None:
    with torch.no_grad():
        gm = tools.export(Net(body), (torch.randn(8, 4),))
    with pytest.raises(AutoparError, match=words) as error:
        functionalize_mutations(gm)
    assert "\n" not in str(error.value) and ".py:" in str(error.value)


@pytest.mark.parametrize("which", ["input 'x'", "parameter 'weight'", "constant 'table'"])
def test_only_buffers_are_written(tools: Any, which: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.table = nn.Parameter(torch.ones(3)), torch.ones(3)

        def forward(self, x: Tensor) -> Tensor:
            held = {"input 'x'": x, "parameter 'weight'": self.weight.detach(), "constant 'table'": self.table}
            held[which].add_(1)
            return (x * self.weight * self.table).sum()

    gm = tools.export(Writes(), (torch.randn(2, 3),))
    table = gm._buffers.pop("table")
    gm.table = table
    with pytest.raises(AutoparError, match=f"writes into the {which}"):
        functionalize_mutations(gm)
