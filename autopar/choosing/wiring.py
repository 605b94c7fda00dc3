"""The wiring of a class of units: which ops read and make which tensors, and which of these are variables.

It depends on the graph alone, so it is found once for all meshes and microbatch counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.passes.completion import result_slots
from autopar.passes.facts import Value, operand_nodes, value
from autopar.passes.insert_changes import is_getitem
from autopar.passes.keepers import Keepers
from autopar.passes.saves import saves
from autopar.passes.units import Unit, is_parameter, producer_of


@dataclass(frozen=True)
class Reader:
    """One operand slot of an op of the unit. ``keeps``: autograd keeps what it reads."""

    op: int
    slot: int
    keeps: bool


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the core, or a parameter, as one unit sees it.

    ``made``: (op, result) where the unit makes it. ``border``: its number among the unit's borders. ``hub``: it is a
    variable. ``kept``: slots of the whole graph that keep it; ``own``: the op that makes it keeps it; ``view``: it
    shares its operand's storage. ``output``: ``loss`` or ``buffer`` where the program returns it so. ``weight``: it
    depends on parameters alone, so that its changes run beside the compute. ``slots``: that read it (2: or more)."""

    node: fx.Node
    value: Value
    made: tuple[int, int] | None
    readers: tuple[Reader, ...]
    border: int | None
    hub: bool
    parameter: bool
    kept: int
    own: bool
    view: bool
    output: str | None
    weight: bool
    slots: int


@dataclass(frozen=True, eq=False)
class Wiring:
    """A class: the ops and tensors of its first unit. ``core``: per op, the operand slots that the core fills.

    ``inputs``: (op, slot, input) where the first op of the core that reads an input is one of these;
    ``sides``: likewise of a tensor of the side that one op of the core makes autograd keep.
    Variables of the class are the ops, then the tensors that are hubs of its own, then its own parameters."""

    name: str
    ops: tuple[fx.Node, ...]
    core: tuple[tuple[int, ...], ...]
    tensors: tuple[Tensor, ...]
    borders: tuple[fx.Node, ...]
    inputs: tuple[tuple[int, int, fx.Node], ...] = ()
    sides: tuple[tuple[int, int, fx.Node], ...] = ()

    def own(self, *, parameters: bool) -> list[Tensor]:
        """The hubs (or parameters) that no other unit touches, in the order of their variables."""
        return [t for t in self.tensors if t.hub and t.border is None and t.parameter == parameters]


@dataclass(frozen=True, eq=False)
class Known:
    """What `wire` needs of the whole graph."""

    parameters: frozenset[str]
    keepers: Keepers
    outputs: Mapping[fx.Node, str]
    weights: frozenset[fx.Node]
    core: frozenset[fx.Node]  # ops
    inputs: Mapping[fx.Node, tuple[fx.Node, int]]  # first op of the core that reads each, and its slot
    sides: Mapping[fx.Node, tuple[fx.Node, int]]  # the op of the core that keeps each, and its slot


def wire(unit: Unit, known: Known) -> Wiring:
    """The wiring of a unit."""
    place = {op: i for i, op in enumerate(unit.ops)}
    border = {t: i for i, t in enumerate(unit.borders)}
    readers: dict[fx.Node, list[Reader]] = {}
    made: dict[fx.Node, tuple[int, int]] = {}
    core = []
    for i, op in enumerate(unit.ops):
        slots = []
        for slot, operand in enumerate(operand_nodes(op)):
            if producer_of(operand) in known.core or is_parameter(operand, known.parameters):
                readers.setdefault(operand, []).append(Reader(i, slot, slot in known.keepers.slots[op]))
                slots.append(slot)
        core.append(tuple(slots))
        for r, tensor in enumerate(result_slots(op)):
            if tensor is not None:
                made[tensor] = (i, r)
                readers.setdefault(tensor, [])
    tensors = tuple(
        _tensor(node, made.get(node), tuple(read), border.get(node), known) for node, read in readers.items()
    )
    assert all(t.made is not None or t.parameter or t.border is not None for t in tensors), place
    inputs = tuple((place[op], slot, node) for node, (op, slot) in known.inputs.items() if op in place)
    sides = tuple((place[op], slot, node) for node, (op, slot) in known.sides.items() if op in place)
    return Wiring(_name(unit), unit.ops, tuple(core), tensors, unit.borders, inputs, sides)


def _tensor(
    node: fx.Node, made: tuple[int, int] | None, readers: tuple[Reader, ...], border: int | None, known: Known
) -> Tensor:
    parameter, output = is_parameter(node, known.parameters), known.outputs.get(node)
    return Tensor(
        node,
        value(node),
        made,
        readers,
        border,
        hub=parameter or border is not None or len(readers) + (output is not None) > 1,
        parameter=parameter,
        kept=known.keepers.count.get(node, 0),
        own=node in known.keepers.own,
        view=node in known.keepers.views or parameter,
        output=output,
        weight=node in known.weights,
        slots=len(readers) + (border is not None),
    )


def _name(unit: Unit) -> str:
    from autopar.passes.facts import fact

    names = [fact(op).fqn for op in unit.ops if fact(op).fqn]
    first, last = (names[0], names[-1]) if names else (unit.ops[0].name, unit.ops[-1].name)
    return first if first == last else f"{first} .. {last}"


def first_reads(ops: Sequence[fx.Node], names: Collection[str]) -> dict[fx.Node, tuple[fx.Node, int]]:
    """For each input that ops read: the first that does, and in which slot."""
    found: dict[fx.Node, tuple[fx.Node, int]] = {}
    for op in ops:
        for slot, operand in enumerate(operand_nodes(op)):
            if operand.op == "placeholder" and operand.name in names:
                found.setdefault(operand, (op, slot))
    return found


def kept_sides(ops: Sequence[fx.Node], held: Keepers) -> dict[fx.Node, tuple[fx.Node, int]]:
    """The computed tensors of the side that one op of the core keeps, alone: by which op, and in which slot. (Those
    that many layers keep, masks and tables, count once and are left to the end.)"""
    core = set(ops)
    by: dict[fx.Node, list[tuple[fx.Node, fx.Node, int]]] = {}
    for op in ops:
        operands = operand_nodes(op)
        for slot in held.slots[op]:
            made = producer_of(operands[slot])
            if made not in core and made.op == "call_function":
                by.setdefault(_storage(operands[slot]), []).append((operands[slot], op, slot))
    return {
        tensor: (op, slot)
        for root, ((tensor, op, slot), *others) in by.items()
        if not others and root.op == "call_function"
    }


def _storage(tensor: fx.Node) -> fx.Node:
    """The tensor whose storage a view of the side shares."""
    while producer_of(tensor).op == "call_function":
        made = producer_of(tensor)
        found = saves(made).aliases
        index = int(tensor.args[1]) if is_getitem(tensor) else 0  # type: ignore[arg-type]
        slot = found[index] if index < len(found) else None
        if slot is None:
            break
        tensor = operand_nodes(made)[slot]
    return tensor


def weights_of(gm: fx.GraphModule, parameters: frozenset[str]) -> frozenset[fx.Node]:
    """The tensors that depend on parameters and on no input."""
    found, constant = set[fx.Node](), set[fx.Node]()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            (found if str(node.target) in parameters else constant).add(node)
        elif node.op == "call_function":
            if any(n in found for n in node.all_input_nodes):
                if all(n in found or n in constant for n in node.all_input_nodes):
                    found.add(node)
            elif all(n in constant for n in node.all_input_nodes):
                constant.add(node)
    return frozenset(n for n in found if not is_getitem(n) or n.args[0] in found)
