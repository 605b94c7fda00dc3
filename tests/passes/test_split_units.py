"""A rank's body in unit programs: text, classes, who reads what, where gradients flow, and the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.build import apply, choose, prepare
from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.passes.lower import Local, lower, with_changes
from autopar.passes.split_units import UnitProgram, split_units
from autopar.passes.text import text
from autopar.pins import Pins, resolve
from autopar.runtime import counter_random  # noqa: F401  registers random ops

aten = torch.ops.aten


class Blocks(nn.Module):
    """Equal residual blocks with dropout, scaled by a table that all of them read; the last one's bias is frozen."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 16) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(16, 8) for _ in range(blocks))
        self.downs[-1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(8, dtype=x.dtype).cos()
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + nn.functional.dropout(down(up(x * table).relu()), 0.5)
        return x.square().mean()


def lowered(model: nn.Module, *args: Tensor, ranks: int = 2, **pins: Any) -> Local:
    captured = capture(model, args, {}, check=False)
    resolved = resolve(Pins.parse(pins), ranks, captured.batch)
    prepared = prepare(captured, resolved.microbatches)
    lowerable = with_changes(apply(choose(prepared, resolved, Cluster.local(ranks=ranks)), prepared))
    return lower(lowerable, 0, {a.name: a.name for a in lowerable.mesh.axes})


def words(program: UnitProgram) -> str:
    lines = []
    for i, kind in enumerate(program.classes):
        needs = ", ".join(k for k, n in zip(kind.kinds, kind.needs, strict=True) if n)
        lines += [f"class {i}: needs {needs or 'nothing'}; flows {list(kind.flows)}", text(kind.graph), ""]
    for call in program.calls:
        args = ", ".join(f"{k} {i}" for k, i in call.args)
        lines.append(
            f"{call.fqn or '-'}: class {call.kind} ({args}) -> {', '.join(f'value {i}' for i in call.results)}"
        )
    return "\n".join([*lines, f"returns {program.outputs}"])


@pytest.fixture(scope="module")
def blocks() -> Local:
    torch.manual_seed(0)
    return lowered(Blocks(), torch.randn(4, 8), tp=2)


def test_text(tools: Any, blocks: Local) -> None:
    (body,), (program,) = blocks.body.values(), blocks.units.values()
    tools.golden_text("split_units", f"before:\n{text(body)}\n\nafter:\n{words(program)}\n")


def test_equal_units_share_a_class_and_draw_otherwise(blocks: Local) -> None:
    (program,) = blocks.units.values()
    front, *inner = program.calls
    assert all(kind == "value" for call in inner for kind, i in call.args if i in front.results and kind == "value")
    assert not any(program.classes[front.kind].flows) and not program.classes[front.kind].trains
    kinds = [call.kind for call in inner]
    assert kinds[1] == kinds[2] and len(set(kinds)) == 3, "an input needs no gradient; the last bias is frozen"
    draws = [[i for kind, i in call.args if kind == "draw"] for call in inner[1:3]]
    assert draws[0] != draws[1] and len(draws[0]) == 1
    assert [("key", 0) in call.args for call in inner[1:3]] == [True, True]


def run(program: UnitProgram, leaves: dict[Any, Any]) -> list[Tensor]:
    known = dict(leaves)
    for call in program.calls:
        args = [ref[1] if ref[0] == "draw" else known[ref] for ref in call.args]
        known.update(
            (("value", i), t) for i, t in zip(call.results, program.classes[call.kind].graph(*args), strict=True)
        )
    return [known[ref] for ref in program.outputs]


def test_the_calls_are_the_body() -> None:
    """One rank in two microbatches: the same loss and gradients, bit for bit."""
    torch.manual_seed(0)
    model = Blocks()
    local = lowered(model, torch.randn(4, 8), ranks=1, microbatches=2)
    (rows,) = local.body
    values = [model.get_parameter(u.fqn) for u in local.parameters]
    leaves = {("parameter", i): p for i, p in enumerate(values)} | {("input", 0): torch.randn(2, 8)}
    leaves |= {("microbatch", 0): 1, ("key", 0): 7}
    (hoisted,) = (len(local.body[rows].graph.find_nodes(op="placeholder")) - len(values) - 3,)
    leaves |= {("hoisted", i): torch.tensor(32.0) for i in range(hoisted)}
    (mine,) = run(local.units[rows], leaves)
    ((theirs,), _) = local.body[rows](*leaves.values())
    grads = [torch.autograd.grad(loss, [p for p in values if p.requires_grad]) for loss in (mine, theirs)]
    assert torch.equal(mine, theirs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def unit_of(forward: Any, *shapes: tuple[int, ...], frozen: bool = False) -> UnitProgram:
    """A body of one unit that ``forward(parameter, *inputs)`` gives, traced op by op."""
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(forward)(*(torch.rand(s) for s in shapes))
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ((tuple(output.args[0]) if isinstance(output.args[0], (tuple, list)) else (output.args[0],), ()),)
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        node.meta["val"] = val.to("meta") if isinstance(val, Tensor) else val
    refs = [("parameter", 0), *(("input", i) for i in range(len(shapes) - 1))]
    return split_units(fx.GraphModule(gm, gm.graph), refs, () if frozen else {("parameter", 0)})


def test_gradients_flow_where_autograd_lets_them() -> None:
    def forward(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drawn = torch.ops.autopar.uniform_like(w)  # takes its shape and no more
        codes = aten.detach(w * 2).argmax(0)
        return (w * drawn + aten.detach(w) * x).sum(), w * 3, codes

    program = unit_of(forward, (3, 3), (3, 3))
    (call,), (kind,) = program.calls, program.classes
    flows = dict(zip(call.results, kind.flows, strict=True))
    assert kind.needs == (True, False) and kind.trains
    assert [flows[i] for _, i in program.outputs] == [True, False, False], "the loss alone"
    assert call.args == (("parameter", 0), ("input", 0))
    (kind,) = unit_of(forward, (3, 3), (3, 3), frozen=True).classes
    assert not kind.trains and kind.needs == (False, False)
    (kind,) = unit_of(lambda w, x: (aten.detach(w) * x).sum(), (3,), (3,)).classes
    assert kind.needs == (False, False), "what is detached needs nothing"


def test_a_change_goes_with_its_first_reader_and_no_unit_reads_ahead(blocks: Local) -> None:
    (program,) = blocks.units.values()
    made: set[int] = set()
    for call in program.calls:
        assert {i for kind, i in call.args if kind == "value"} <= made
        made |= set(call.results)
    starts = [[str(n.target) for n in k.graph.graph.nodes if ".wait_" in str(n.target)] for k in program.classes]
    assert sum(map(len, starts)) >= 2 and not starts[program.calls[0].kind]


def test_policies_are_of_units(blocks: Local) -> None:
    n = max(m for m in (n.meta.get("autopar_unit") for n in blocks.body[0].graph.nodes) if m is not None) + 1
    (mixed,) = replace(blocks, recompute=("full", *["none"] * (n - 1))).units.values()
    assert [mixed.classes[c.kind].recompute for c in mixed.calls][:3] == ["none", "full", "none"]
    assert mixed.calls[2].kind == mixed.calls[3].kind
