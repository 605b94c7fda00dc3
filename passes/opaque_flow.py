"""Through which operands of opaque calls gradients come to each parameter.

Whether such a call uses an operand is known when it runs; a parameter that none used has no gradient in that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import fx

from autopar.passes.facts import fact, operand_nodes
from autopar.runtime.opaque import OPAQUE, Flow

if TYPE_CHECKING:
    from autopar.passes.lower import Lowerable


def opaque_flow(model: Lowerable) -> Flow | None:
    """Of a completed model; None where it has no opaque calls."""
    graph, parameters = model.body.graph, frozenset(model.parameters)
    calls = [n for n in graph.nodes if n.target in OPAQUE]
    if not calls:
        return None
    (result,) = graph.output_node().args
    outputs = result["outputs"]  # type: ignore[index, call-overload]
    ends = outputs[:1] if model.tail is None else outputs[len(model.tail.kept) :]  # type: ignore[index]
    found: dict[tuple[str, int, int], frozenset[str | tuple[str, int]]] = {}
    for call in calls:
        for i, operand in enumerate(operand_nodes(call)):
            if _flows(operand):
                slot = (*_named(call), i)
                found[slot] = found.get(slot, frozenset()) | _reached([operand], parameters)
    return Flow(_reached(ends, parameters), found)  # type: ignore[arg-type]


def _reached(ends: Iterable[fx.Node], parameters: frozenset[str]) -> frozenset[str | tuple[str, int]]:
    """The parameters and the calls to which a gradient comes from ``ends`` through no call between."""
    seen, waiting, found = set[fx.Node](), list(ends), set[str | tuple[str, int]]()
    while waiting:
        node = waiting.pop()
        if node in seen or not _flows(node):
            continue
        seen.add(node)
        if node.target in OPAQUE:
            found.add(_named(node))
        elif node.op == "get_attr" and str(node.target) in parameters:
            found.add(str(node.target))
        else:
            waiting += node.all_input_nodes
    return frozenset(found)


def _flows(node: fx.Node) -> bool:
    return any(v is not None and v.grad for v in fact(node).values)


def _named(call: fx.Node) -> tuple[str, int]:
    name, number = call.args[1:3]
    return str(name), int(number)  # type: ignore[arg-type]


__all__ = ["opaque_flow"]
