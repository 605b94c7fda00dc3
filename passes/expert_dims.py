"""expert_dims: which parameters hold one weight for each of several experts, and are cut so on a pinned axis ``ep``.

A parameter of three dims or more that a product of matrices or a lookup reads as it is, or after ops on parameters
alone (casts, transposes), has its experts along dim 0: so does everybody's, Megatron's, transformers' and torchtitan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.passes.completion import is_op, result_slots
from autopar.passes.facts import Choice, Strategy, fact, operand_nodes, value
from autopar.passes.insert_changes import is_getitem
from autopar.passes.layout import Axis, Layout

Offered = tuple[Choice, Strategy]
EXPERTS = "ep"
DIM = 0
READERS = frozenset(
    {
        *(torch.ops.aten.einsum.default, torch.ops.aten.bmm.default, torch.ops.aten.matmul.default),
        *(torch.ops.aten.baddbmm.default, torch.ops.autopar.experts_mm.default),
        *(torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default, torch.ops.aten.embedding.default),
    }
)


def experts_of(gm: fx.GraphModule, parameters: frozenset[str], ranks: int) -> dict[str, int]:
    """The parameters with experts, and how many. Raises AutoparError where there are none, or too few for an axis of
    so many ranks."""
    roots: dict[fx.Node, frozenset[str]] = {}  # of what depends on parameters alone
    found: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and str(node.target) in parameters:
            roots[node] = frozenset({str(node.target)} if len(value(node).shape) > 2 else ())
            continue
        operands = operand_nodes(node) if is_op(node) else list(node.all_input_nodes) if is_getitem(node) else []
        if operands and all(o in roots for o in operands):
            roots[node] = frozenset().union(*(roots[o] for o in operands))
        elif node.target in READERS:
            for name in sorted(frozenset().union(*(roots.get(o, frozenset()) for o in operands))):
                found[name] = 0
    for node in gm.graph.find_nodes(op="get_attr"):
        if str(node.target) in found:
            found[str(node.target)] = value(node).shape[DIM]
    _refuse(found, ranks)
    return found


def _refuse(found: Mapping[str, int], ranks: int) -> None:
    if not found:
        raise AutoparError(
            f"pin {EXPERTS}={ranks}: no parameter of this model holds the weights of several experts (three dims or "
            "more, read by a product of matrices or a lookup). Leave it out."
        )
    for name, experts in found.items():
        if not Axis(EXPERTS, ranks).fills(experts):
            legal = ", ".join(f"{EXPERTS}={n}" for n in range(1, experts + 1) if Axis(EXPERTS, n).fills(experts))
            raise AutoparError(
                f"pin {EXPERTS}={ranks}: {name} has {experts} experts, which leaves a rank without one. Legal: {legal}."
            )


class Held:
    """What an axis cuts by experts as ops are decided in order: parameters, and what depends on parameters alone; all
    else is cut by the batch, what experts have made for each other's rows included, as soon as it is put together.
    ``experts``: the parameters that it cuts; ``rows``: the dim of each tensor along which the batch lies."""

    def __init__(self, experts: Mapping[str, int], rows: Mapping[fx.Node, int]) -> None:
        self.experts, self.rows = experts, rows
        self._alone: set[fx.Node] = set()
        self._cut: set[fx.Node] = set()

    def leaf(self, node: fx.Node) -> bool:
        """Whether a leaf is cut along `DIM`."""
        if node.op == "get_attr":
            self._alone.add(node)
            if str(node.target) in self.experts:
                self._cut.add(node)
        return node in self._cut

    def cuts(self, op: fx.Node, have: Sequence[Layout], axis: int) -> tuple[tuple[int, int | None], ...]:
        """The operands that an op must read as they are cut, by slot, and their dims."""
        operands = operand_nodes(op)
        cut = [i for i, o in enumerate(operands) if o in self._cut and have[i].kinds[axis] == "S"]
        if operands and all(o in self._alone for o in operands):
            made = {op, *(user for user in op.users if is_getitem(user))}
            self._alone |= made
            self._cut |= made if cut else set()
        return tuple((i, have[i].dim_of(axis)) for i in cut)

    def _by_rows(self, op: fx.Node, strategy: Strategy, axis: int) -> bool:
        """Whether all that the op makes is cut by the batch."""
        pairs = zip(result_slots(op), strategy.results, strict=True)
        found = [(self.rows.get(node), layout.dim_of(axis)) for node, layout in pairs if node is not None and layout]
        return bool(found) and all(dim is not None and dim == cut for dim, cut in found)

    def of(self, op: fx.Node, offered: list[Offered], have: Sequence[Layout], axis: int) -> list[Offered]:
        """What an op may do there, of what it could, with operands as it has them. Raises AutoparError for an op that
        cannot read experts in pieces."""
        cut = self.cuts(op, have, axis)
        kept = [o for o in offered if all(o[1].operands[i].dim_of(axis) == dim for i, dim in cut)]
        if not cut and any(x.kinds[axis] == "P" for x in have):
            return [o for o in kept if self._by_rows(op, o[1], axis)] or kept
        if cut and not kept:
            known = fact(op)
            raise AutoparError(
                f"pin {EXPERTS}: {known.fqn or op.name}: {op.target} ({known.source}) cannot read the weights of "
                "experts in pieces. Leave it out."
            )
        return kept


__all__ = ["DIM", "EXPERTS", "Held", "experts_of"]
