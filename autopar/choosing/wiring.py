"""The wiring of a class of units: which ops read and make which tensors, and which of these are variables.

It depends on the graph alone, so it is found once for all meshes and microbatch counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.choosing.again import POLICIES, Again, Style, again
from autopar.passes.completion import result_slots
from autopar.passes.facts import Value, operand_nodes, value
from autopar.passes.insert_changes import is_getitem
from autopar.passes.keepers import Keepers
from autopar.passes.saves import saves
from autopar.passes.units import Unit, Units, is_parameter, producer_of


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
    ``sides``: likewise of a tensor of the side that one op of the core makes autograd keep; ``again``: by policy.
    Variables of the class are the ops, then the tensors that are hubs of its own, then its own parameters, and last
    what it makes again."""

    name: str
    ops: tuple[fx.Node, ...]
    core: tuple[tuple[int, ...], ...]
    tensors: tuple[Tensor, ...]
    borders: tuple[fx.Node, ...]
    inputs: tuple[tuple[int, int, fx.Node], ...] = ()
    sides: tuple[tuple[int, int, fx.Node], ...] = ()
    again: Mapping[str, Again] = field(default_factory=dict)

    @property
    def keeps(self) -> bool:
        """Whether backward reads anything that making it again could spare."""
        kept = any(r.keeps for t in self.tensors if not t.parameter for r in t.readers)
        return kept or any(t.own for t in self.tensors) or any(saves(op).new for op in self.ops)

    def policies(self, given: Sequence[str]) -> tuple[str, ...]:
        """Of the given policies those that are open to the unit: what keeps nothing has nothing to make again."""
        return tuple(given) if self.keeps or "none" not in given else ("none",)

    def needs(self, t: Tensor, policy: str) -> bool:
        """Whether backward, or what runs again in it, reads a tensor that a reader of the unit reads."""
        if policy == "none" or t.weight:
            return any(r.keeps for r in t.readers)
        return any((r.op, r.slot) in self.again[policy].read for r in t.readers)

    def holds(self, t: Tensor, policy: str) -> bool:
        """Whether the unit keeps a tensor that other units touch as well, in the layout in which it is shared."""
        if t.made is None or policy == "none" or t.weight:
            return self.needs(t, policy) or (t.made is not None and t.own)
        return t.made in self.again[policy].stays

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
    made_by = {(r.op, r.slot): t.made for t in tensors if t.made is not None for r in t.readers}
    policies = {p: again(unit.ops, made_by, selective=p == "selective") for p in POLICIES[1:]}
    return Wiring(_name(unit), unit.ops, tuple(core), tensors, unit.borders, inputs, sides, policies)


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


def styles(units: Units, wirings: Sequence[Wiring], policies: Sequence[str]) -> dict[int, Style]:
    """Where the bytes of each shared tensor count, by the number of its group (`groups_of`)."""
    at: dict[tuple[int, int], tuple[Tensor, tuple[bool, ...]]] = {}
    for kind, wiring in enumerate(wirings):
        for t in wiring.tensors:
            if t.border is not None and not t.parameter:
                at[kind, t.border] = t, tuple(wiring.holds(t, p) for p in wiring.policies(policies))
    holders: dict[fx.Node, list[tuple[bool, ...]]] = {node: [] for node in units.shared}
    seen: dict[fx.Node, Tensor] = {}
    for unit in units.units:
        for b, node in enumerate(unit.borders):
            if (unit.kind, b) in at:
                seen[node], held = at[unit.kind, b]
                holders[node].append(held)
    found: dict[int, Style] = {}
    for group, members in _members(units).items():
        tensors = [node for node in members if node in seen]
        kept = [[h for h in holders[node] if any(h)] for node in tensors]
        if not any(kept):
            found[group] = "never"
        elif any(seen[node].view and seen[node].kept for node in tensors):
            found[group] = "view"
        elif all(len(h) <= 1 for h in kept):
            found[group] = "one"
        elif all(any(all(x) for x in h) for h in kept):
            found[group] = "always"
        else:
            found[group] = "both"
    return found


def groups_of(units: Units) -> list[int]:
    """Shared variables that play the same part in equal units have the same states: a number a group."""
    place = {node: i for i, node in enumerate(units.shared)}
    parent = list(range(len(units.shared)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    first: dict[tuple[int, int], int] = {}
    for unit in units.units:
        for b, node in enumerate(unit.borders):
            known = first.setdefault((unit.kind, b), place[node])
            low, high = sorted((root(known), root(place[node])))
            parent[high] = low
    return [root(i) for i in range(len(parent))]


def _members(units: Units) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for node, group in zip(units.shared, groups_of(units), strict=True):
        found.setdefault(group, []).append(node)
    return found


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
