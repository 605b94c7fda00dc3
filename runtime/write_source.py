"""A program as a folder of readable Python: `Program.save`.

``units/*.py`` have the forward and backward of each class of units, ``program.py`` the parameters and their ways, the
calls of the units and what comes in and out; ``tensors.pt`` has constants and buffers. `autopar.load_program` runs it
without the model's code and without planning. Ranks share files: what differs among them is a literal that is looked
up by the rank's coordinates, and only units whose ops differ (a rank that keeps a value where others write zeros) are
files of their own, named by their ranks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.passes.facts import LAYOUT
from autopar.passes.layout import Layout, Mesh
from autopar.passes.split_units import Ref, UnitCall, UnitProgram
from autopar.runtime.opaque import OPAQUE
from autopar.runtime.source import PROGRAM, TENSORS
from autopar.runtime.source_text import HOLE, WIDTH, Function, Literal, Merged, Template, merge, shape_text
from autopar.runtime.units import Explicit, Unit

if TYPE_CHECKING:
    from autopar.passes.differentiate import Saved
    from autopar.passes.lower import Local
    from autopar.runtime.program import Program
    from autopar.runtime.run import Units

PIPELINE = "save_source: a pipeline is not written as source yet. Pin pp=1."
REFS = {"parameter": "P", "buffer": "B", "constant": "C", "input": "X", "hoisted": "H"}


@dataclass(frozen=True)
class Source:
    """What one rank has to write: can be sent to another. ``units``: by name of the file."""

    program: Template
    units: Mapping[str, Template]
    docs: Mapping[str, str]


@dataclass(frozen=True)
class Tree:
    """Names of a model beside those in `Local`. ``also``: other names of a parameter; ``unread``: parameters that no
    unit reads; ``buffers``: all, and whether they are part of the state."""

    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unread: Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]] = field(default_factory=dict)
    buffers: Mapping[str, bool] = field(default_factory=dict)

    @staticmethod
    def of(tensors: nn.Module, local: Local) -> Tree:
        """The names of what `runtime.parameters.place` made."""
        names: dict[int, list[str]] = {}
        for fqn, parameter in tensors.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(fqn)
        read, also, unread = {use.fqn for use in local.parameters}, {}, {}
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


def save(program: Program, folder: Path) -> None:
    """Write the programs of all ranks; collective. Rank 0 writes."""
    ranks = program.ranks
    if ranks.stages > 1 or len(program.stages) > 1:
        raise AutoparError(PIPELINE)
    groups = {name: axis for axis, name in ranks.group_names.items()}
    (stage,) = program.stages
    own = source_of(stage.local, stage.units, groups, Tree.of(program.tensors, stage.local))
    every: list[Any] = [None] * ranks.count
    dist.all_gather_object(every, own, group=ranks.world)
    if ranks.rank == 0:
        buffers = {f"buffer/{n}": b.detach().cpu() for n, b in program.tensors.named_buffers()}
        constants = zip(stage.local.constants, stage.constants, strict=True)
        tensors = buffers | {f"constant/{n}": c.detach().cpu() for n, c in constants}
        write(folder, every, program.mesh, tensors)
    ranks.gather_numbers([0])  # nobody reads what is not written


def write(folder: Path, sources: Sequence[Source], mesh: Mesh, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder. ``sources``: of all ranks in order."""
    coordinates = [mesh.coordinates(r) for r in range(mesh.ranks)]
    axes = [mesh.axes[a].name for a in mesh.space]
    (folder / "units").mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    every, held = sources[0], dict(tensors)
    for name in dict.fromkeys(n for s in sources for n in s.units):
        ranks = [r for r, s in enumerate(sources) if name in s.units]
        merged = merge([sources[r].units[name] for r in ranks], [coordinates[r] for r in ranks], axes)
        for text in merged:
            own = tuple(ranks[r] for r in text.ranks)
            file = name if len(merged) == 1 else f"{name}_at_{'_'.join(map(str, own))}"
            files.setdefault(name, {})[file] = own
            (folder / "units" / f"{file}.py").write_text(
                _unit_file(every.docs[name], own if len(merged) > 1 else (), text)
            )
        for r in ranks:
            held |= sources[r].units[name].tensors
    (program,) = merge([s.program for s in sources], coordinates, axes)
    (folder / PROGRAM).write_text(_program_file(program, mesh, files))
    torch.save(held, folder / TENSORS)


# -- one rank --------------------------------------------------------------------------------------------------------


def source_of(local: Local, units: Mapping[int, Units], groups: Mapping[str, str], tree: Tree) -> Source:
    """What a rank has to write. ``groups``: name of a c10d group -> its axis."""
    return _Writer(local, groups, tree).run(units)


class _Writer:
    def __init__(self, local: Local, groups: Mapping[str, str], tree: Tree) -> None:
        self.local, self.groups, self.tree = local, groups, tree
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
            self._explicit(out, unit, arguments)
        else:
            forward = Function(unit.kind.graph, self.groups, arguments)
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
                found[i] = holder.name, str(holder.meta.get(LAYOUT, ""))
            else:
                found[i] = holder.name, {"input": "input", "hoisted": "of the prologue"}.get(kind, "")
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

    def _explicit(self, out: Template, unit: Explicit, arguments: Mapping[int, tuple[str, str]]) -> None:
        made, outputs = unit.made, len(unit.kind.flows)
        forward = Function(made.forward, self.groups, arguments)
        results = [_result_remark(unit, i) for i in range(outputs)]
        results += [_saved(saved, forward.outputs) for saved in made.saved]
        out.extend(forward.write("forward", results))
        given = forward.inputs
        names = {
            **{i: (given[k], "as in forward") for i, k in enumerate(made.keeps)},
            **{
                len(made.keeps) + i: (forward.outputs[outputs + i], "saved")
                for i in range(len(forward.outputs) - outputs)
            },
        }
        names |= {len(names) + i: (f"grad_{forward.outputs[t]}", "") for i, t in enumerate(made.tangents)}
        assert made.backward is not None
        out.add("")
        out.add("")
        out.extend(Function(made.backward, self.groups, names).write("backward"))
        out.add("")
        out.add("")
        out.add("unit = UnitSource(")
        out.add("    forward,")
        out.add("    backward,")
        self._outputs(out, unit)
        of = [given[i] for i in made.grads]
        _tuple(out, "reads", [quoted(given[i]) for i in made.keeps])
        strides = [Literal("strides", str(tuple(s))) for s in unit.strides]
        out.add(f"    tangents={{{', '.join(f'{i}: {HOLE}' for i in made.tangents)}}},", strides)
        _tuple(out, "gradients", [quoted(name) for name in of])
        _tuple(out, "fresh", [quoted(name) for name, fresh in zip(of, made.fresh, strict=True) if fresh])
        out.add(")")

    def _outputs(self, out: Template, unit: Unit) -> None:
        (results,) = unit.kind.graph.graph.output_node().args
        texts = [shape_text(n.meta["val"]) for n in results]  # type: ignore[union-attr]
        literals = [Literal("output", f'"{text}"') for text in texts]
        _tuple(out, "outputs", [HOLE] * len(texts), literals)

    # -- the program

    def _parameters(self) -> None:
        ways: dict[tuple[Any, ...], str] = {}
        lines: list[str] = []
        for use in self.local.parameters:
            words = [quoted(use.fqn), repr(use.shape), str(use.dtype), f'"{use.rest}"', f'"{use.use}"']
            words += [f'"{use.gather}"', f'"{use.reduce}"']
            if use.fqn in self.local.enter:
                words.append(f"enter={self._way(self.local.enter[use.fqn], ways)}")
            words += [] if use.trainable else ["trainable=False"]
            words += [f"{key}={getattr(use, key)}" for key in ("use_dtype", "reduce_dtype") if getattr(use, key)]
            lines.append(f"    Parameter({', '.join(words + self._also(use.fqn))}),")
        for fqn, (shape, dtype, trainable) in self.tree.unread.items():
            rest = Layout.uniform("I", len(self.local.mesh.axes), len(shape))
            words = [quoted(fqn), repr(shape), str(dtype), f'"{rest}"', *([] if trainable else ["trainable=False"])]
            lines.append(f"    Parameter({', '.join(words + self._also(fqn))}),  # read by no unit")
        self.out.add(
            "parameters = (  # name, shape, dtype, how it rests, how units read it, gathered, gradient reduced"
        )
        for line in lines:
            self.out.add(line)
        self.out.add(")")

    def _also(self, fqn: str) -> list[str]:
        also = self.tree.also.get(fqn, ())
        return [f"also={quoted(also)}"] if also else []

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
        out.add("state = {  # every buffer -> whether it is in the state dict")
        for name, kept in self.tree.buffers.items():
            out.add(f"    {quoted(name)}: {kept},")
        out.add("}")
        out.add("inputs = (  # name, global shape, dtype, layout of a rank's piece of a microbatch")
        for i in local.inputs:
            out.add(f'    Input({quoted(i.name)}, {i.shape!r}, {i.dtype}, "{i.layout}"),')
        out.add(")")
        out.add("outputs = (  # the loss first")
        for o in local.outputs:
            out.add(f'    Output({o.shape!r}, {o.dtype}, "{o.layout}"),')
        out.add(")")
        out.add(f"updated = {quoted(tuple(local.buffer_updates))}")
        out.add("")
        out.add('P = Named("parameter", tuple(p.name for p in parameters))')
        out.add('B, C = Named("buffer", buffers), Named("constant", constants)')
        out.add('X = Named("input", tuple(i.name for i in inputs))')
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
        is_loss = bool(program.outputs) and ref == program.outputs[0]
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


def _result_remark(unit: Unit, i: int) -> str:
    (results,) = unit.kind.graph.graph.output_node().args
    layout = results[i].meta.get(LAYOUT)  # type: ignore[index, union-attr]
    return f"result{'' if layout is None else f': {layout}'}"


def _saved(saved: Saved, outputs: Sequence[str]) -> str:
    """What a tensor is that forward keeps for backward."""
    op, where = saved.op.removesuffix(".default"), f" in {saved.fqn}" if saved.fqn else ""
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


def _files(by: Mapping[str, tuple[int, ...]]) -> str:
    return "{" + ", ".join(f"{quoted(name)}: {ranks!r}" for name, ranks in by.items()) + "}"


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


# -- files -----------------------------------------------------------------------------------------------------------


def _unit_file(doc: str, ranks: Sequence[int], merged: Merged) -> str:
    only = f" Of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}." if ranks else ""
    words = ["UnitSource", *_called(merged, "coordinate", "device", "group", "tensor")]
    return "\n".join([
        f'"""{doc}{only}"""',
        "",
        *_imports(merged, words),
        merged.text,
        "",
    ])  # fmt: skip


def _called(merged: Merged, *words: str) -> list[str]:
    """Those of the functions that the text calls."""
    text = "\n".join([merged.text, *merged.names.values()])
    return [word for word in words if re.search(rf"\b{word}\(", text)]


def _imports(merged: Merged, words: Sequence[str]) -> list[str]:
    spaces = {"aten": "torch.ops.aten", "ours": "torch.ops.autopar", "c10d": "torch.ops._c10d_functional"}
    used = [s for s in spaces if re.search(rf"\b{s}\.", merged.text)]
    lines = ["import operator\n"] if re.search(r"\boperator\.", merged.text) else []
    lines += ["import torch", "", f"from autopar.runtime.source import {', '.join(sorted(words))}", ""]
    if used:
        lines += [f"{', '.join(used)} = {', '.join(spaces[s] for s in used)}"]
    lines += [f"{name} = {text}" for name, text in merged.names.items()]
    return [*lines, "", ""]


def _program_file(merged: Merged, mesh: Mesh, files: Mapping[str, Mapping[str, tuple[int, ...]]]) -> str:
    text = merged.text
    words = ["Axis", "Input", "Mesh", "Named", "Output", "Parameter"]
    words += [w for w in ("KEY", "MICROBATCH", "Prologue") if re.search(rf"\b{w}\b", text)]
    words += _called(merged, "coordinate", "device", "draw", "group")
    apart = {name: by for name, by in files.items() if len(by) > 1}
    words += ["for_rank"] * bool(apart)
    shared = sorted(name for name in files if name not in apart)
    head, rest = _imports(merged, words), []
    at = head.index("")  # units are imported after autopar
    place = head.index("", at + 1)
    imported = [f"from .units import {', '.join(shared)}"] if shared else []
    if imported and len(imported[0]) > WIDTH:
        imported = ["from .units import (", *(f"    {name}," for name in shared), ")"]
    for name, by in apart.items():
        rest.append(f"{name} = for_rank(__package__, {_files(by)})  # other ops on some ranks")
    axes = ", ".join(_axis_text(a) for a in mesh.axes)
    return "\n".join([
        f'"""{_title(mesh)}"""',
        "",
        *head[: place],
        *imported,
        *head[place:-1],
        *rest,
        f"mesh = Mesh(({axes}{',' * bool(axes)}))",
        "",
        text,
        "",
    ])  # fmt: skip


def _axis_text(axis: Any) -> str:
    return f'Axis("{axis.name}", {axis.size}, {axis.rows!r})' if axis.is_time else f'Axis("{axis.name}", {axis.size})'


def _title(mesh: Mesh) -> str:
    ranks = " x ".join(f"{mesh.axes[a].name}={mesh.axes[a].size}" for a in mesh.space) or "one rank"
    time = "" if mesh.time is None else f", {mesh.axes[mesh.time].size} microbatches"
    return f"One step of training on one rank of {ranks}{time}. Run it with autopar.load_program."


__all__ = ["PIPELINE", "Source", "Tree", "save", "source_of", "write"]
