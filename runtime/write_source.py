"""A rank's program, or a stage of it, as readable Python; `runtime.write_folder` makes files of those of all ranks.

A stage of a pipeline has what it receives and sends beside its inputs and outputs; what the stages have in common is in
the folder above them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from autopar.errors import AutoparError
from autopar.passes.facts import LAYOUT
from autopar.passes.layout import Layout
from autopar.passes.split_units import Ref, UnitCall, UnitProgram
from autopar.runtime.opaque import OPAQUE
from autopar.runtime.source_text import HOLE, WIDTH, Function, Literal, Template, alike, shape_text, short_name
from autopar.runtime.units import Explicit, Unit

if TYPE_CHECKING:
    from autopar.passes.differentiate import Saved
    from autopar.passes.lower import Local, OutputUse
    from autopar.runtime.run import Units

REFS = {"parameter": "P", "buffer": "B", "constant": "C", "input": "X", "received": "R"}


@dataclass(frozen=True)
class Source:
    """What one rank has to write: can be sent to another. ``units``: by name of the file."""

    program: Template
    units: Mapping[str, Template]
    docs: Mapping[str, str]


@dataclass(frozen=True)
class Tree:
    """Names of a model beside those in `Local`. ``also``: other names of a parameter; ``unread``: parameters that no
    unit reads; ``buffers``: all, and whether they are part of the state. The keys of ``also`` are
    all parameters as the model has them, so that optimizers number them alike."""

    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unread: Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]] = field(default_factory=dict)
    buffers: Mapping[str, bool] = field(default_factory=dict)

    @staticmethod
    def of(tensors: nn.Module, read: Collection[str]) -> Tree:
        """The names of what `runtime.parameters.place` made. ``read``: the parameters that units read."""
        names: dict[int, list[str]] = {}
        for fqn, parameter in tensors.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(fqn)
        also, unread = {}, {}
        for parameter in tensors.parameters():
            every = names[id(parameter)]
            first = next((n for n in every if n in read), every[0])
            also[first] = tuple(n for n in every if n != first)
            if first not in read:
                unread[first] = tuple(parameter.shape), parameter.dtype, parameter.requires_grad
        apart = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, m in tensors.named_modules()
            for name in m._non_persistent_buffers_set
        }
        return Tree(also, unread, {name: name not in apart for name, _ in tensors.named_buffers()})


# -- one rank --------------------------------------------------------------------------------------------------------


def source_of(
    local: Local, units: Mapping[int, Units], groups: Mapping[str, str], tree: Tree | None, parted: bool = False
) -> Source:
    """What a rank has to write. ``groups``: name of a c10d group -> its axis; ``tree``: None for a stage, whose names
    stand with those of the others; ``parted``: its backward is run in two parts."""
    return _Writer(local, groups, tree, parted).run(units)


class _Writer:
    def __init__(self, local: Local, groups: Mapping[str, str], tree: Tree | None, parted: bool) -> None:
        self.local, self.groups, self.tree, self.parted = local, groups, tree or Tree(), parted
        self.staged = tree is None
        self.names: dict[int, str] = {}  # id of a class -> its file
        self.units: dict[str, Template] = {}
        self.docs: dict[str, str] = {}
        self.out = Template()

    def run(self, units: Mapping[int, Units]) -> Source:
        shared = Counter(id(unit) for run in units.values() for unit in run.units)
        for rows, run in units.items():
            for kind, unit in enumerate(run.units):
                if id(unit) in self.names:
                    continue
                calls = [c for c in run.program.calls if c.kind == kind]
                if unit.why is not None:
                    raise AutoparError(
                        f"save: autograd runs {calls[0].fqn or 'the model'} ({unit.why}), so there is no source of its "
                        "backward. Rewrite it so that it can be traced, or run the plan by autopar.compile."
                    )
                if any(n.target in OPAQUE for n in unit.kind.graph.graph.nodes):
                    raise AutoparError(
                        f"save: {calls[0].fqn or 'the model'} calls Python of the model as it is, which a program "
                        "without the model has not. Run the plan by autopar.compile."
                    )
                self._unit(unit, calls, rows if shared[id(unit)] < len(units) else 0)
        self._parameters()
        self._ends()
        for rows, run in units.items():
            self._microbatch(run, rows if len(units) > 1 else 0)
        self._prologue()
        if self.staged:
            self._tail()
        names = ", ".join(f"{rows}: {_microbatch_name(rows if len(units) > 1 else 0)}" for rows in units)
        self.out.add(f"microbatches = {{{names}}}")
        return Source(self.out, self.units, self.docs)

    # -- a class of units

    def _unit(self, unit: Unit, calls: Sequence[UnitCall], rows: int) -> None:
        name = self._file_name(calls[0].fqn, rows)
        self.names[id(unit)] = name
        arguments = self._arguments(unit, calls[0])
        out = Template()
        if isinstance(unit, Explicit):
            self._explicit(out, unit, arguments, calls[0].fqn)
        else:
            forward = Function(unit.kind.graph, self.groups, arguments, unit=calls[0].fqn)
            out.extend(forward.write("forward"))
            out.add("")
            out.add("")
            out.add("unit = UnitSource(")
            out.add("    forward,")
            self._outputs(out, unit)
            out.add(")")
        self.units[name] = out
        self.docs[name] = _doc(unit, calls, rows)

    def _file_name(self, fqn: str, rows: int) -> str:
        word = re.sub(r"\W+", "_", fqn).strip("_") or "model"
        word = f"unit_{word}" if word[0].isdigit() else word
        word = f"{word}_of_{rows}_rows" if rows else word
        taken, n = word, 1
        while taken in self.units:
            n += 1
            taken = f"{word}_{n}"
        return taken

    def _arguments(self, unit: Unit, call: UnitCall) -> dict[int, tuple[str, str]]:
        """Names and remarks of what a unit is given, by its first call."""
        holders = unit.kind.graph.graph.find_nodes(op="placeholder")
        found = {}
        for i, (ref, holder) in enumerate(zip(call.args, holders, strict=True)):
            kind, number = ref
            if kind in ("parameter", "buffer", "constant"):
                name = self._list(kind)[number]
                remark = name if kind != "parameter" else self._parameter_remark(number)
                found[i] = name.removeprefix(f"{call.fqn}.") if call.fqn else name, remark
            elif kind == "value":
                found[i] = short_name(holder), str(holder.meta.get(LAYOUT, ""))
            else:
                remarks = {"input": "input", "hoisted": "of the prologue", "received": "of another stage"}
                found[i] = short_name(holder), remarks.get(kind, "")
        return found

    def _parameter_remark(self, number: int) -> str:
        use = self.local.parameters[number]
        return f"{use.fqn}: {use.use}" + (f", rests {use.rest}" if use.rest != use.use else "")

    def _list(self, kind: str) -> Sequence[str]:
        lists: dict[str, Sequence[str]] = {
            "parameter": [u.fqn for u in self.local.parameters],
            "buffer": self.local.buffers,
            "constant": self.local.constants,
            "input": [u.name for u in self.local.inputs],
        }
        return lists[kind]

    def _explicit(self, out: Template, unit: Explicit, arguments: Mapping[int, tuple[str, str]], fqn: str) -> None:
        made, outputs = unit.made, len(unit.kind.flows)
        forward = Function(made.forward, self.groups, arguments, unit=fqn)
        results = [_result_remark(unit, i) for i in range(outputs)]
        results += [_saved(saved, forward.outputs, fqn) for saved in made.saved]
        out.extend(forward.write("forward", results))
        given = forward.inputs
        saved = [(name, "saved") for name in forward.outputs[outputs:]]
        behind = [*saved, *((f"grad_{forward.outputs[t]}", "") for t in made.tangents)]

        def function(
            name: str, graph: fx.GraphModule, args: Sequence[int], others: Sequence[tuple[str, str]]
        ) -> Function:
            names = dict(enumerate([*((given[i], "as in forward") for i in args), *others]))
            text = Function(graph, self.groups, names, unit=fqn)
            out.add("")
            out.add("")
            out.extend(text.write(name))
            return text

        def listed(name: str, args: Sequence[int], of: Sequence[bool] | None = None) -> None:
            _tuple(out, name, [quoted(given[i]) for i in compress(args, of or repeat(True))])

        assert made.backward is not None
        parts = unit.parted if self.parted else None
        function("backward", made.backward, made.keeps, behind)
        if parts is not None and parts.inputs is not None:
            text = function("inputs", parts.inputs.graph, parts.inputs.reads, behind)
            behind = [(name, "carried") for name in text.outputs[len(parts.inputs.grads) :]]
        if parts is not None and parts.weights is not None:
            own = [] if parts.inputs is not None else [(given[i], "as in forward") for i in parts.held]
            function("weights", parts.weights.graph, parts.weights.reads, [*own, *behind])
        out.add("")
        out.add("")
        out.add("unit = UnitSource(")
        out.add("    forward,")
        out.add("    backward,")
        self._outputs(out, unit)
        listed("reads", made.keeps)
        strides = [Literal("strides", str(tuple(s))) for s in unit.strides]
        out.add(f"    tangents={{{', '.join(f'{i}: {HOLE}' for i in made.tangents)}}},", strides)
        listed("gradients", made.grads)
        listed("fresh", made.grads, made.fresh)
        if parts is not None:
            listed("held", parts.held)
        for name, part in [] if parts is None else [("inputs", parts.inputs), ("weights", parts.weights)]:
            if part is not None:
                out.add(f"    {name}=PartSource(")
                out.add(f"    {name},")
                listed("reads", part.reads)
                listed("gradients", part.grads)
                listed("fresh", part.grads, part.fresh)
                out.add("    ),")
        out.add(")")

    def _outputs(self, out: Template, unit: Unit) -> None:
        (results,) = unit.kind.graph.graph.output_node().args
        texts = [shape_text(n.meta["val"]) for n in results]  # type: ignore[union-attr]
        literals = [Literal("output", f'"{text}"') for text in texts]
        _tuple(out, "outputs", [HOLE] * len(texts), literals)

    # -- the program

    def _parameters(self) -> None:
        ways: dict[tuple[Any, ...], str] = {}
        lines: dict[str, str] = {}
        for use in self.local.parameters:
            words = [quoted(use.fqn), repr(use.shape), str(use.dtype), f'"{use.rest}"', f'"{use.use}"']
            words += [f'"{use.gather}"', f'"{use.reduce}"']
            if use.fqn in self.local.enter:
                words.append(f"enter={self._way(self.local.enter[use.fqn], ways)}")
            words += [] if use.trainable else ["trainable=False"]
            words += [f"{key}={getattr(use, key)}" for key in ("use_dtype", "reduce_dtype") if getattr(use, key)]
            lines[use.fqn] = f"    Parameter({', '.join(words + other_names(self.tree, use.fqn))}),"
        self.out.add(
            "parameters = (  # name, shape, dtype, how it rests, how units read it, gathered, gradient reduced"
        )
        for line in in_order(lines, self.tree, len(self.local.mesh.axes)):
            self.out.add(line)
        self.out.add(")")

    def _way(self, graph: Any, ways: dict[tuple[Any, ...], str]) -> str:
        """The function of a chain from rest to use; equal ones are written once."""
        body = Function(graph, self.groups, {}).write("")
        key = (*body.lines[1:], *body.literals)
        if key not in ways:
            ways[key] = f"to_use_{len(ways)}"
            self.out.extend(Function(graph, self.groups, {}).write(ways[key]))
            self.out.add("")
            self.out.add("")
        return ways[key]

    def _ends(self) -> None:
        out, local = self.out, self.local
        out.add(f"buffers = {quoted(tuple(local.buffers))}")
        out.add(f"constants = {quoted(tuple(local.constants))}")
        for line in [] if self.staged else state_lines(self.tree):
            out.add(line)
        out.add("inputs = (  # name, global shape, dtype, layout of a rank's piece of a microbatch")
        for i in local.inputs:
            out.add(f'    Input({quoted(i.name)}, {i.shape!r}, {i.dtype}, "{i.layout}"),')
        out.add(")")
        out.add("outputs = (  # the loss first")
        for o in local.outputs:
            out.add(f"    {output_text(o)},")
        out.add(")")
        out.add(f"updated = {quoted(tuple(local.buffer_updates))}")
        if self.staged:
            out.add(f"returns = {local.returns!r}  # which of the model's outputs these are")
            out.add(f"received = {tuple(c.number for c in local.received)!r}  # values of other stages")
            out.add(f"sent = {tuple(c.number for c in local.sent)!r}  # returned behind the outputs")
        out.add("")
        out.add('P = Named("parameter", tuple(p.name for p in parameters if p.use))')
        out.add('B, C = Named("buffer", buffers), Named("constant", constants)')
        out.add('X = Named("input", tuple(i.name for i in inputs))')
        if local.received:
            out.add('R = Named("received", received)')
        out.add("")
        out.add("")

    def _microbatch(self, run: Units, rows: int) -> None:
        values: dict[Ref, str] = {}
        self.out.add(f"def {_microbatch_name(rows)}():")
        what = f" of {rows} rows" if rows else ""
        self.out.add(f'    """Forward of one microbatch{what}, unit by unit. Their backwards run in reverse order."""')
        for call in run.program.calls:
            results = [self._value(("value", i), run.program, values) for i in call.results]
            args = [self._ref(ref, values) for ref in call.args]
            made = ", ".join(results)
            text = f"    {made} = {self.names[id(run.units[call.kind])]}.unit("
            closing = f', fqn="{call.fqn}")' if args else f'fqn="{call.fqn}")'
            if len(text) + sum(len(a) + 2 for a in args) + len(closing) > WIDTH:
                self.out.add(text)
                for arg in args:
                    self.out.add(f"        {arg},")
                self.out.add(f'        fqn="{call.fqn}",')
                self.out.add("    )")
            else:
                self.out.add(text + ", ".join(args) + closing)
        outs = [self._ref(ref, values) for ref in run.program.outputs]
        updates = [self._ref(ref, values) for ref in run.program.updates]
        self.out.add(f"    return [{', '.join(outs)}], [{', '.join(updates)}]")
        self.out.add("")
        self.out.add("")

    def _value(self, ref: Ref, program: UnitProgram, values: dict[Ref, str]) -> str:
        is_loss = self.local.has_loss and ref == program.outputs[0]
        values[ref] = "loss" if is_loss else f"h{ref[1]}"
        return values[ref]

    def _ref(self, ref: Ref, values: Mapping[Ref, str]) -> str:
        kind, i = ref
        if kind == "value":
            return values[ref]
        if kind == "draw":
            return f"draw({i})"
        if kind in ("microbatch", "key"):
            return kind.upper()
        if kind == "hoisted":
            return f'("hoisted", {i})'
        if kind == "received":
            return f"R[{self.local.received[i].number}]"
        return f'{REFS[kind]}["{self._list(kind)[i]}"]'

    def _prologue(self) -> None:
        prologue = self.local.prologue
        if prologue is None:
            self.out.add("prologue = None")
            return
        holders = list(prologue.graph.find_nodes(op="placeholder"))
        lists = [
            (kind, i) for kind in ("parameter", "buffer", "constant", "input") for i in range(len(self._list(kind)))
        ]
        refs = [*lists, ("key", 0)]
        used = [i for i, holder in enumerate(holders) if holder.users]
        function = Function(prologue, self.groups, {}, only=used)
        self.out.extend(function.write("once", doc="Once a step, on the whole batch: what units read as hoisted."))
        self.out.add("")
        self.out.add("")
        self.out.add(f"prologue = Prologue(once, ({''.join(self._ref(refs[i], {}) + ', ' for i in used)}))")

    def _tail(self) -> None:
        tail = self.local.tail
        if tail is None:
            self.out.add("tail = None")
            return
        doc = "Once a step, on whole tensors of all microbatches, by autograd: outputs of the model, the loss first."
        self.out.extend(Function(tail.graph, self.groups, {}).write("end", doc=doc))
        self.out.add("")
        self.out.add("")
        flows = tuple(value.grad for value in tail.inputs)
        self.out.add(f"tail = WholeBatch(end, returns={tail.returns!r}, kept={tail.kept!r}, flows={flows!r})")


# -- names -----------------------------------------------------------------------------------------------------------


def other_names(tree: Tree, fqn: str) -> list[str]:
    """The argument that says the other names of a parameter, if it has any."""
    names = tree.also.get(fqn, ())
    return [f"also={quoted(names)}"] if names else []


def in_order(lines: Mapping[str, str], tree: Tree, axes: int) -> list[str]:
    """The lines of parameters, by name, and of those that no unit reads, in its order. ``axes``: of the mesh."""
    found = dict(lines)
    for fqn, (shape, dtype, trainable) in tree.unread.items():
        rest = Layout.uniform("I", axes, len(shape))
        words = [quoted(fqn), repr(shape), str(dtype), f'"{rest}"', *([] if trainable else ["trainable=False"])]
        found[fqn] = f"    Parameter({', '.join(words + other_names(tree, fqn))}),  # read by no unit"
    return [found[fqn] for fqn in tree.also or found]


def state_lines(tree: Tree) -> list[str]:
    """The lines that say which buffers there are."""
    kept = [f"    {quoted(name)}: {kept}," for name, kept in tree.buffers.items()]
    return ["state = {  # every buffer -> whether it is in the state dict", *kept, "}"]


def output_text(use: OutputUse) -> str:
    """An output, or what crosses from stage to stage."""
    return f'Output({use.shape!r}, {use.dtype}, "{use.layout}")'


def _result_remark(unit: Unit, i: int) -> str:
    (results,) = unit.kind.graph.graph.output_node().args
    layout = results[i].meta.get(LAYOUT)  # type: ignore[index, union-attr]
    return f"result{'' if layout is None else f': {layout}'}"


def _saved(saved: Saved, outputs: Sequence[str], unit: str) -> str:
    """What a tensor is that forward keeps for backward."""
    op, where = saved.op.removesuffix(".default"), f" in {alike(saved.fqn, unit)}" if saved.fqn else ""
    return f"saved: {op}{where}" + ("" if saved.result is None else f", in the memory of {outputs[saved.result]}")


def _tuple(out: Template, name: str, parts: Sequence[str], literals: Sequence[Literal] = ()) -> None:
    """``name=(...)`` as an argument, in lines that are not too long."""
    text = f"    {name}=({', '.join(parts)}{',' * (len(parts) == 1)}),"
    if len(text) + sum(len(k.text) for k in literals) <= WIDTH:
        out.add(text, literals)
        return
    out.add(f"    {name}=(")
    for i, part in enumerate(parts):
        out.add(f"        {part},", literals[i : i + 1])
    out.add("    ),")


def quoted(a: str | tuple[str, ...]) -> str:
    """As ruff writes it: double quotes."""
    if isinstance(a, str):
        return json.dumps(a)
    return f"({', '.join(map(quoted, a))}{',' * (len(a) == 1)})"


def _microbatch_name(rows: int) -> str:
    return f"microbatch_of_{rows}" if rows else "microbatch"


def _doc(unit: Unit, calls: Sequence[UnitCall], rows: int) -> str:
    """What a file of units is about."""
    fqns = list(dict.fromkeys(c.fqn or "the model" for c in calls))
    many = f"{fqns[0]} and {len(fqns) - 1} more, to {fqns[-1]}" if len(fqns) > 2 else " and ".join(fqns)
    what = "forward and backward" if isinstance(unit, Explicit) else "forward"
    recompute = {"full": "all of it runs again in backward", "selective": "in part run again in backward"}
    again = recompute.get(unit.kind.recompute, "")
    of_rows = f", for microbatches of {rows} rows" if rows else ""
    units = f"Unit{'s' * (len(fqns) > 1)} {many}"
    return f"{units}: {what} on one rank{of_rows}" + (f"; {again}." if again else ".")


__all__ = ["Source", "Tree", "in_order", "other_names", "output_text", "quoted", "source_of", "state_lines"]
