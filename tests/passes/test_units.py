"""Where a graph is cut into units, and which of them are equal."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.build import prepare
from autopar.capture import capture
from autopar.passes.units import LONGEST, Units, core_ops, cut_units


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


class Cross(nn.Module):
    """A block, and what it reads of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.query, self.key = Block(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, y: Tensor, memory: Tensor) -> Tensor:
        y = self.own(y)
        return y + torch.sigmoid(self.query(y)) * self.key(memory)


class Expert(nn.Module):
    """Two blocks, mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.first, self.second = nn.Linear(8, 2), Block(8, 16), Block(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.softmax(self.router(x), 1).unbind(1)
        return x + first[:, None] * self.first(x) + second[:, None] * self.second(x)


class Mixed(nn.Module):
    """One of several structures, ``depth`` deep."""

    def __init__(self, what: str, depth: int) -> None:
        super().__init__()
        self.what, layers = what, range(depth)
        if what == "encoder and decoder":
            made: list[nn.Module] = [Block(8, 16) for _ in layers] + [Cross() for _ in layers]
        elif what == "alternating widths":
            made = [Block(8, 16 if i % 2 else 24) for i in layers]
        elif what == "dense, then every other expert":
            made = [Block(8, 16), Block(8, 16), *(Expert() if i % 2 else Block(8, 16) for i in layers)]
        else:
            made = [Block(8, 16) for _ in layers]
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        y = memory = torch.tanh(x)
        near = torch.arange(8).float()
        for i, layer in enumerate(self.layers):
            if self.what == "alternating masks":
                y = layer(y + (near if i % 2 else near.mul(2.0).cos()))
            elif self.what == "rates of depth":
                y = y + layer(y) / (1.0 - 0.1 * (i + 1) / len(self.layers))
            elif isinstance(layer, Cross):
                memory = y if i == len(self.layers) // 2 else memory
                y = layer(y, memory)
            else:
                y = layer(y)
        return y.square().mean()


@pytest.mark.parametrize(
    ("what", "classes"),
    [
        ("encoder and decoder", 4),
        ("alternating widths", 4),
        ("alternating masks", 3),
        ("dense, then every other expert", 4),
        ("rates of depth", 3),
    ],
)
def test_classes_are_as_many_at_any_depth(what: str, classes: int) -> None:
    shallow, deep = (units_of(Mixed(what, depth), torch.ones(4, 8)) for depth in (10, 14))
    assert len(deep.units) >= len(shallow.units) + 4
    assert len(shallow.first) == len(deep.first) == classes


class UNet(nn.Module):
    """``depth`` blocks down, as many up; each skips to the one opposite, or (``queue``) in the order they were made.
    All read a condition."""

    def __init__(self, depth: int, queue: bool) -> None:
        super().__init__()
        self.queue = queue
        self.down = nn.ModuleList(Cross() for _ in range(depth))
        self.up = nn.ModuleList(Cross() for _ in range(depth))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        condition, skips = torch.tanh(condition), []
        for block in self.down:
            x = torch.tanh(block(x, condition))
            skips.append(x)
        for block in self.up:
            x = block(x * torch.sigmoid(skips.pop(0 if self.queue else -1)), condition)
        return x.square().mean()


def test_skips_that_end_in_the_opposite_order_are_set_aside() -> None:
    units = units_of(UNet(12, queue=False), torch.ones(4, 8), torch.ones(4, 8))
    assert max(len(u.ops) for u in units.units) <= LONGEST and len(units.first) == 6
    queued = units_of(UNet(12, queue=True), torch.ones(4, 8), torch.ones(4, 8))
    assert max(len(u.ops) for u in queued.units) > LONGEST


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
