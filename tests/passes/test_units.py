"""Where a graph is cut into units, and which of them are equal."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.build import prepare
from autopar.capture import capture
from autopar.passes.units import Units, core_ops, cut_units


def units_of(model: nn.Module, *args: Any) -> Units:
    captured = capture(model.train(), args, check=False)
    return cut_units(prepare(captured, 1).body, frozenset(captured.parameters))


def kinds(units: Units) -> list[int]:
    return [u.kind for u in units.units]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", [0]),
        ("gpt2", [0, 1, 2, 1, 3]),
        ("llama", [0, 1, 2, 1, 2, 3]),
        ("vit", [0, 1, 2, 1, 3]),
        ("resnet", [0, 1, 2]),
    ],
)
def test_halves_of_blocks_are_classes(name: str, expected: list[int]) -> None:
    model, args, kwargs = importlib.import_module(f"autopar.models.{name}").make()
    captured = capture(model, args, kwargs, check=False)
    gm, parameters = prepare(captured, 1).body, frozenset(captured.parameters)
    units = cut_units(gm, parameters)
    assert kinds(units) == expected
    assert [op for u in units.units for op in u.ops] == core_ops(gm, parameters)


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Residual blocks; ``tied``: the last one is the first one again."""

    def __init__(self, *inner: int, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, n) for n in inner)
        if tied:
            self.blocks.append(self.blocks[0])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_names_do_not_count_and_shapes_do() -> None:
    units = units_of(Stack(16, 16, 12, 16), torch.ones(4, 8))
    first, second, other, last = units.units
    assert first.kind != second.kind  # the first reads an input, the second what the first made
    assert other.kind not in (first.kind, second.kind)
    assert last.kind not in (first.kind, second.kind, other.kind)  # it has the loss
    assert len(units.first) == 4


def test_a_tied_parameter_is_a_border() -> None:
    units = units_of(Stack(16, 16, tied=True), torch.ones(4, 8))
    tied = [n for n in units.shared if n.op == "get_attr"]
    assert sorted(str(n.target) for n in tied) == [
        "blocks.0.down.bias",
        "blocks.0.down.weight",
        "blocks.0.up.bias",
        "blocks.0.up.weight",
    ]
    assert all(n in units.units[0].borders and n in units.units[-1].borders for n in tied)


def test_frozen_parameters_make_another_class() -> None:
    model = Stack(16, 16, 16, 16)
    for p in model.blocks[2].parameters():
        p.requires_grad_(False)
    assert kinds(units_of(model, torch.ones(4, 8))) == [0, 1, 2, 3]


class Decoder(nn.Module):
    """Every layer reads what an encoder made: no place has one live tensor."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block(8, 8) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory = torch.relu(self.encoder(x))
        for layer in self.layers:
            y = layer(y) * torch.sigmoid(memory + y)
            y = torch.tanh(y) + torch.sin(y)
        return y.square().mean()


def test_a_tensor_that_all_layers_read_is_set_aside() -> None:
    units = units_of(Decoder(24), torch.ones(4, 8), torch.ones(4, 8))
    assert len(units.units) > 12
    assert len(units.first) <= 6
    memory = next(n for n in units.shared if sum(n in u.borders for u in units.units) > 12)
    assert memory.op == "call_function"


class Dense(nn.Module):
    """Every layer reads all before it: no narrow place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * (i + 1), 4) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(torch.relu(layer(torch.cat(found, 1))))
        return torch.cat(found, 1).square().mean()


def test_no_cut_where_a_graph_is_not_narrow() -> None:
    linears = [
        sum(str(op.target) == "aten.linear.default" for op in u.ops) for u in units_of(Dense(), torch.ones(4, 4)).units
    ]
    assert max(linears) == 5 and sum(linears) == 6


def test_the_side_belongs_to_no_unit() -> None:
    class Masked(Stack):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.arange(8).float().mul(2.0).sub(1.0)
            return super().forward(x * 2.0 + mask)

    units = units_of(Masked(16, 16), torch.ones(4, 8))
    targets = {str(op.target) for u in units.units for op in u.ops}
    assert "aten.arange.default" not in targets and "aten.linear.default" in targets
