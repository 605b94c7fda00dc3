"""Plans completed from pins are those an expert would write: what is divided, how many collectives a layer takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.build import Prepared, apply
from autopar.capture import Capture, capture
from autopar.choosing.plan_training import plan_training
from autopar.divided import divided
from autopar.errors import AutoparError
from autopar.models import gpt2, llama, mlp, vit
from autopar.passes.lower import Local, lower, with_changes
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.runtime.run import units_of
from autopar.runtime.weights import ways_of
from tests.limits import figures

aten = torch.ops.aten
Factory = Callable[..., tuple[nn.Module, Any, Any]]


def captured_of(factory: Factory, options: tuple[tuple[str, Any], ...]) -> Capture:
    model, args, kwargs = factory(**dict(options))
    return capture(model, args, kwargs, check=False)


captured_once = cache(captured_of)


def planned(
    factory: Factory, ranks: int, pins: dict[str, Any], cluster: str = "h100", anew: bool = False, **options: Any
) -> tuple[Plan, Prepared, Local]:
    """``anew``: of a capture of its own."""
    captured = (captured_of if anew else captured_once)(factory, tuple(options.items()))
    made = plan_training(captured, Pins.parse(pins), figures(cluster, ranks), {})
    axes = {a.name: a.name for a in made.plan.axes}
    return made.plan, made.prepared, lower(with_changes(apply(made.plan, made.prepared)), 0, axes)


def collectives(local: Local) -> Counter[str]:
    """Ops of the body that communicate, by name; ``replicate`` is an all-reduce in backward."""
    graph = next(iter(local.body.values())).graph
    names = (getattr(getattr(n.target, "_schema", None), "name", "") for n in graph.nodes if n.op == "call_function")
    moving = (
        "autopar::start_",
        "autopar::shard",
        "autopar::replicate",
        "autopar::cross_entropy_sum_sh",
    )
    return Counter(name.removeprefix("autopar::") for name in names if name.startswith(moving))


def per_layer(factory: Factory, ranks: int, pins: dict[str, Any], cluster: str = "h100") -> dict[str, int]:
    """What two more layers add, halved."""
    few, many = (collectives(planned(factory, ranks, pins, cluster, layers=n)[2]) for n in (2, 4))
    assert all((many[k] - few[k]) % 2 == 0 for k in many | few)
    return {k: (many[k] - few[k]) // 2 for k in many | few if many[k] != few[k]}


@pytest.mark.parametrize(
    ("factory", "cluster"),
    [(gpt2.make, "h100"), (llama.make, "h100"), (vit.make, "h100"), (llama.make, "local")],
    ids=["gpt2", "llama", "vit", "llama-local"],
)
def test_tensor_parallel_is_megatrons_pattern(factory: Factory, cluster: str) -> None:
    """Two all-reduces forward (after attention and MLP) and two backward (before them) a layer, and nothing else."""
    assert per_layer(factory, 2, {"tp": 2}, cluster) == {"start_all_reduce": 2, "replicate": 2}


def test_along_the_sequence_all_reduces_fall_apart() -> None:
    """A gather before attention and MLP, a reduce-scatter after them; backward the other way round. (Where figures say
    that a reduce-scatter takes longer than an all-reduce, as between local ranks, the program has that and a slice.)"""
    found = per_layer(gpt2.make, 2, {"tp": 2, "sp": True})
    assert found == {"start_all_gather": 2, "start_reduce_scatter": 2}


@pytest.mark.parametrize("factory", [gpt2.make, llama.make], ids=["gpt2", "llama"])
def test_data_parallel_has_no_collective_inside_layers(factory: Factory) -> None:
    assert per_layer(factory, 2, {"dp": 2}) == {}


def test_zero_3_gathers_every_parameter_of_a_layer_once_each_way() -> None:
    plan, _, local = planned(llama.make, 2, {"dp": 2, "zero": 3}, layers=2)
    ways = ways_of(local, units_of(local))
    in_layers = {n for n in plan.parameters if {"0", "1"} & {*n.split(".")}}
    for gathers in (ways.forward, ways.backward):
        every = Counter(local.parameters[i].fqn for call in gathers for bucket in call for i in bucket.members)
        assert {n: every[n] for n in in_layers} == dict.fromkeys(in_layers, 1)
        assert max(len(call) for call in gathers) == 1, "one bucket a unit"
    assert per_layer(llama.make, 2, {"dp": 2, "zero": 3}) == {}


def test_both_axes_together_add_up() -> None:
    assert per_layer(llama.make, 4, {"dp": 2, "tp": 2, "zero": 3}) == {"start_all_reduce": 2, "replicate": 2}


@pytest.mark.parametrize("factory", [gpt2.make, llama.make, vit.make], ids=["gpt2", "llama", "vit"])
def test_tp_divides_flops_and_parameters(factory: Factory) -> None:
    plan, prepared, _ = planned(factory, 2, {"tp": 2})
    share = divided(plan, prepared)["tp"]
    assert share.flops is not None and 1 - share.flops <= 0.52
    assert share.param_bytes is not None and 1 - share.param_bytes <= 0.55
    assert share.saved_bytes is not None and share.saved_bytes > 0.25
    assert plan.predicted.whole == () and plan.predicted.fallback == ()


@pytest.mark.parametrize(("zero", "rests"), [(0, 1.0), (1, 0.5), (2, 0.5), (3, 0.5)])
def test_dp_divides_flops_and_zero_divides_parameters(zero: int, rests: float) -> None:
    plan, prepared, _ = planned(gpt2.make, 2, {"dp": 2, "zero": zero})
    (share,) = divided(plan, prepared).values()
    assert share.flops is not None and 1 - share.flops <= 1.02 / 2
    assert share.param_bytes is not None and rests <= 1 - share.param_bytes <= 1.05 * rests


def test_nothing_is_moved_between_the_fused_projection_and_attention() -> None:
    _, _, local = planned(gpt2.make, 2, {"tp": 2})
    graph = next(iter(local.body.values())).graph
    attentions = [n for n in graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    assert len(attentions) >= 2
    for attention in attentions:
        behind: list[fx.Node] = list(attention.all_input_nodes)
        while behind:
            node = behind.pop()
            if node.target in (aten.linear.default, aten.addmm.default):
                continue
            assert node.op == "call_function" and "autopar" not in str(node.target), f"{node} before {attention}"
            behind += node.all_input_nodes


def test_a_tp_that_divides_nothing_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"tp=3 divides no matmul"):
        planned(mlp.make, 3, {"tp": 3}, inputs=4, width=4, classes=4)


def test_what_tp_leaves_whole_is_named() -> None:
    plan, _, _ = planned(mlp.make, 4, {"tp": 4}, inputs=5, width=5, classes=4)
    (whole,) = plan.predicted.whole
    assert (whole.axis, whole.fqn) == (
        "tp",
        "layers.0",
    ) and "for each of 4 ranks (legal: tp=2, tp=3, tp=5)" in whole.why


def test_plans_are_the_same_every_time() -> None:
    texts = {planned(llama.make, 4, {"dp": 2, "tp": 2, "microbatches": 2}, anew=True)[0].dumps() for _ in range(2)}
    assert len(texts) == 1


class Dense(nn.Module):
    """Every layer reads all that came before it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * (i + 1), 4) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)).relu())
        return torch.cat(seen, 1).square().mean()


@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}])
def test_a_dense_net_is_planned(pins: dict[str, Any]) -> None:
    """Pins leave most tensors one layout: 24 layers made tables of 70 dims of length one, more than NumPy has."""
    plan, _, _ = planned(lambda: (Dense(24), (torch.randn(8, 4),), {}), 2, pins)
    assert plan.proof.gap is not None and 0 <= plan.proof.gap < 0.01
