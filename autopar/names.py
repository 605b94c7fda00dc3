"""What each axis of a finished plan is called: predicates on what its ops do (``docs/design.md`` section 7).

An axis that cuts the batch is data parallelism, ``dp_shard`` where a parameter rests in pieces over it that is used
whole, else ``dp_replicate``; one that cuts the sequence of an attention, or that cuts other rows beside whole weights
and nothing else, is ``cp``; one that cuts the batch around experts, and these one from another, is ``ep``; any other is
``tp``, and ``idle`` where it divides no op. An axis used in several ways has all their names, ``ep`` first, then those
with the most FLOPs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Literal

from torch import fx

from autopar.passes.complete_layouts import Cut, batch_cuts
from autopar.passes.completion import is_op, result_slots
from autopar.passes.divide_work import flops
from autopar.passes.expert_dims import DIM, EXPERTS
from autopar.passes.facts import Strategy, fact, is_tensor, operand_nodes, value
from autopar.passes.insert_changes import produced_layout
from autopar.passes.layout import Layout, Mesh
from autopar.passes.sequence import DIVIDE, Along, along_sequence

Use = Literal[
    "batch", "list", "sequence", "beside", "work", "experts"
]  # list: of all tokens; beside: other rows, the weight whole


def displays(gm: fx.GraphModule, mesh: Mesh, batch_inputs: frozenset[str], batch: int) -> tuple[tuple[str, ...], ...]:
    """The names of each axis, by the strategies of ``gm``; none for the axis in time.

    ``batch_inputs``: the placeholders whose dim 0 is the batch, of ``batch`` rows.
    """
    cuts, weights = batch_cuts(gm, batch_inputs, batch), _weights(gm)

    @cache
    def along() -> Mapping[fx.Node, Along]:
        parameters = frozenset(str(n.target) for n in gm.graph.nodes if n.op == "get_attr" and fact(n).rest is not None)
        return along_sequence(gm, parameters, weights, batch_inputs, batch)

    return tuple(
        () if a.is_time else _display(gm, axis, cuts, weights, batch, along) for axis, a in enumerate(mesh.axes)
    )


def axis_names(shown: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A name of its own for every axis: what it is called first, numbered from the second on.

    >>> axis_names([("dp_shard",), ("dp_replicate", "tp"), ("tp",), ()])
    ('dp', 'dp2', 'tp', 'time')
    """
    seen: Counter[str] = Counter()
    found = []
    for words in shown:
        word = words[0].partition("_")[0] if words else "time"
        seen[word] += 1
        found.append(word if seen[word] == 1 else f"{word}{seen[word]}")
    return tuple(found)


def sizes_by_name(shown: Sequence[Sequence[str]], sizes: Sequence[int]) -> dict[str, int]:
    """The mesh by display name: axes with the same first name multiply.

    >>> sizes_by_name([("dp_shard",), ("dp_shard",), ("tp", "cp"), ()], [2, 3, 4, 8])
    {'dp_shard': 6, 'tp': 4}
    """
    found: dict[str, int] = {}
    for words, size in zip(shown, sizes, strict=True):
        if words:
            found[words[0]] = found.get(words[0], 1) * size
    return found


def _display(
    gm: fx.GraphModule,
    axis: int,
    cuts: Mapping[fx.Node, Cut],
    weights: Collection[fx.Node],
    batch: int,
    along: Callable[[], Mapping[fx.Node, Along]],
) -> tuple[str, ...]:
    """The axis's names, most FLOPs first; where it divides nothing that has any, by the bytes of results."""
    work: Counter[Use] = Counter()
    copied: Counter[Use] = Counter()
    for node in gm.graph.nodes:
        found = fact(node).strategy if is_op(node) else None
        if found is None or found.choices[axis].kind not in DIVIDE:
            continue
        read = _read(node, found, axis, weights)
        use = _use(node, found, axis, cuts, read, batch)
        if use == "work" and not read and flops(node) and node in along() and along()[node].cuts(found, axis):
            use = "beside"  # a product of activations alone: scores, and what they weigh
        copied[use] += sum(v.nbytes for v in fact(node).values if v is not None)
        if flops(node) or "cut" in read:
            work[use] += int(flops(node))
    uses = work or copied
    beside: Use = "sequence" if uses["sequence"] or not uses["work"] else "work"
    listed: Use = "sequence" if uses["sequence"] and not uses["batch"] else "batch"
    names = {"batch": "dp_shard" if _rests_in_pieces(gm, axis) else "dp_replicate", "sequence": "cp", "work": "tp"}
    names["experts"] = EXPERTS if uses["batch"] or uses["list"] else "tp"
    named: Counter[str] = Counter()
    for use, count in uses.items():
        named[names[{"beside": beside, "list": listed}.get(use, use)]] += count
    return tuple(sorted(named, key=lambda name: (name != EXPERTS, -named[name], name))) or ("idle",)


def _use(node: fx.Node, found: Strategy, axis: int, cuts: Mapping[fx.Node, Cut], read: set[str], batch: int) -> Use:
    """How an op that the axis divides is divided."""
    tensors = [*zip(operand_nodes(node), found.operands, strict=True)]
    tensors += [(n, x) for n, x in zip(result_slots(node), found.results, strict=True) if n is not None and x]
    along_batch = [n for n, layout in tensors if _cut(layout, axis) == cuts.get(n, ())]
    if along_batch:
        return "list" if any(value(n).shape[cuts[n][0]] > batch for n in along_batch) else "batch"
    if "attention" in str(node.target) and any(layout.dim_of(axis) == layout.ndim - 2 for _, layout in tensors[:2]):
        return "sequence"
    return "beside" if read == {"whole"} else "experts" if "experts" in read else "work"


def _weights(gm: fx.GraphModule) -> set[fx.Node]:
    """Parameters of two dims or more, and what is made of parameters alone (casts, transposes)."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        made = is_op(node) and node.all_input_nodes and all(n in found for n in node.all_input_nodes)
        if made or (node.op == "get_attr" and fact(node).rest is not None):
            found.add(node)
    return {n for n in found if is_tensor(n) and len(value(n).shape) > 1}


def _read(node: fx.Node, found: Strategy, axis: int, weights: Collection[fx.Node]) -> set[str]:
    """Whether the axis leaves weights that the op reads ``cut``, ``whole``, or both; cut by ``experts``."""
    pairs = [(n, x) for n, x in zip(operand_nodes(node), found.operands, strict=True) if n in weights]
    experts = {"experts" for _, layout in pairs if layout.ndim > 2 and layout.dim_of(axis) == DIM}
    return {"cut" if layout.kinds[axis] == "S" else "whole" for _, layout in pairs} | experts


def _cut(layout: Layout, axis: int) -> Cut | None:
    dim = layout.dim_of(axis)
    return None if dim is None else (dim, layout.dims[dim].parts)


def _rests_in_pieces(gm: fx.GraphModule, axis: int) -> bool:
    leaves = [n for n in gm.graph.nodes if n.op == "get_attr"]
    pairs = [(fact(n).rest, produced_layout(n)) for n in leaves if fact(n).strategy is not None]
    return any(rest is not None and rest.kinds[axis] == "S" != use.kinds[axis] for rest, use in pairs)
