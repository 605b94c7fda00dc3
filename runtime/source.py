"""The words that a written program (`Program.save`) is made of, and how its folder is read.

``program.py`` and the files of the units are plain Python over these. While `read_source` imports them, `coordinate`,
`group` and `device` answer for this rank; afterwards everything is in the functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.passes.facts import Value
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.lower import InputUse, Local, OutputUse, ParameterUse
from autopar.passes.split_tail import Tail
from autopar.passes.split_units import Ref, UnitCall, UnitClass, UnitProgram
from autopar.runtime.mesh import Ranks
from autopar.runtime.pipeline import Crossing
from autopar.runtime.run import Units
from autopar.runtime.source_text import SHORT
from autopar.runtime.stage import Stages
from autopar.runtime.units import Gradient, Unit, laid_out

PROGRAM, TENSORS = "program.py", "tensors.pt"
_numbers = itertools.count()


# -- this rank -------------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    ranks: Ranks
    tensors: Mapping[str, Tensor]
    calls: list[tuple[UnitSource, str, tuple[Ref, ...], tuple[int, ...]]] = field(default_factory=list)


_reading: list[_Reading] = []


def _now() -> _Reading:
    if not _reading:
        raise AutoparError("program.py: is not run by itself. Read its folder with autopar.load_program(folder).")
    return _reading[-1]


def coordinate(axis: str) -> int:
    """This rank's coordinate on an axis."""
    ranks = _now().ranks
    return ranks.coordinates[ranks.mesh.index(axis)]


def group(axis: str) -> str:
    """The c10d group of the ranks that differ from this one in their coordinate on an axis only, as ops take it."""
    return _now().ranks.group_names[axis]


def device() -> torch.device:
    """Where this rank computes."""
    return _now().ranks.device


def tensor(name: str) -> Tensor:
    """A tensor that the program came with."""
    return _now().tensors[name].to(device())


def for_rank(package: str, files: Mapping[str, Sequence[int]]) -> ModuleType:
    """The file of units that was written for this rank. ``files``: name -> ranks (of a pipeline those of a stage)."""
    rank = _now().ranks.place
    name = next(name for name, own in files.items() if rank in own)
    return importlib.import_module(f"{package}.units.{name}")


# -- units -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PartSource:
    """One of two parts of a backward: ``function`` takes the arguments that it ``reads``, then what it is handed, and
    returns the gradients of the arguments ``gradients``, of which those ``fresh`` have memory of their own; then, if
    it is the first part, what the second is handed."""

    function: Callable[..., tuple[Any, ...]]
    reads: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class UnitSource:
    """The functions of one class of units. ``forward(*args)``: its ``outputs`` (``f32[4, 8]``: dtype and local shape of
    each), then what is saved; ``backward``: takes the arguments that it ``reads``, what was saved, and gradients of
    outputs (``tangents``: index -> strides), and returns the gradients of the arguments ``gradients``, of which those
    ``fresh`` have memory of their own. One without backward runs forward only. Where backward is run in two parts,
    ``inputs`` takes the arguments ``held``, what was saved and gradients of outputs, and ``weights`` what that carries
    on; without ``inputs`` all of it is."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]] | None = None
    outputs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    tangents: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    held: tuple[str, ...] | None = None
    inputs: PartSource | None = None
    weights: PartSource | None = None

    def __call__(self, *args: Ref, fqn: str = "") -> Any:
        """Note a call; its results as refs."""
        calls = _now().calls
        first = sum(len(results) for _, _, _, results in calls)
        results = tuple(range(first, first + len(self.outputs)))
        calls.append((self, fqn, args, results))
        refs = tuple(("value", i) for i in results)
        return refs[0] if len(refs) == 1 else refs


class Written(Unit):
    """Runs the functions of a file."""

    def __init__(self, source: UnitSource, args: Sequence[Ref]) -> None:
        names = list(inspect.signature(source.forward).parameters)
        tangents, gradients = tuple(source.tangents), source.gradients
        super().__init__(
            UnitClass(
                graph=_call(source, names),
                kinds=tuple(kind for kind, _ in args),
                needs=tuple(name in gradients for name in names),
                flows=tuple(i in tangents for i in range(len(source.outputs))),
            )
        )
        self.source, self.names, self.outputs = source, names, len(source.outputs)
        self.reads, self.tangents = tuple(map(names.index, source.reads)), tangents
        self.grads = tuple(map(names.index, gradients))
        self._forward, self._backward = emptying(source.forward), source.backward and emptying(source.backward)
        self._inputs = emptying(source.inputs.function) if source.inputs else None
        self._weights = emptying(source.weights.function) if source.weights else None

    def run(self, args: list[Any]) -> Sequence[Tensor]:
        made: tuple[Tensor, ...] = self._forward(args)
        return made[: self.outputs]

    def forward(self, args: list[Any]) -> tuple[Sequence[Tensor], Any]:
        made = self._forward(args)
        return made[: self.outputs], list(made[self.outputs :])

    def backward(self, read: list[Any], held: Any, tangents: list[Tensor]) -> list[Gradient]:
        assert self._backward is not None
        return self._gradients(self.source, self._backward(self._given(read, held, tangents)))

    @property
    def input_reads(self) -> tuple[int, ...]:
        return self.reads if self.source.held is None else tuple(map(self.names.index, self.source.held))

    @property
    def weight_reads(self) -> tuple[int, ...]:
        return () if self.source.weights is None else tuple(map(self.names.index, self.source.weights.reads))

    def inputs(self, read: list[Any], held: Any, tangents: list[Tensor]) -> tuple[list[Gradient], Any]:
        part = self.source.inputs
        if self.source.held is None:
            return super().inputs(read, held, tangents)
        given = self._given(read, held, tangents)
        if part is None:
            return [], given
        assert self._inputs is not None
        made = self._inputs(given)
        n = len(part.gradients)
        return self._gradients(part, made[:n]), list(made[n:])

    def weights(self, read: list[Any], carried: Any) -> list[Gradient]:
        if self.source.held is None:
            return super().weights(read, carried)
        part, given = self.source.weights, [*read, *carried]
        read.clear()
        carried.clear()
        return [] if part is None or self._weights is None else self._gradients(part, self._weights(given))

    def _given(self, read: list[Any], held: Any, tangents: list[Tensor]) -> list[Any]:
        strides = self.source.tangents.values()
        given = [*read, *held, *(laid_out(g, s) for g, s in zip(tangents, strides, strict=True))]
        for emptied in (read, held, tangents):
            emptied.clear()
        return given

    def _gradients(self, of: UnitSource | PartSource, made: Sequence[Any]) -> list[Gradient]:
        found = zip(of.gradients, made, strict=True)
        return [Gradient(self.names.index(name), g, name in of.fresh) for name, g in found if g is not None]


def emptying(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """``function`` of one list of its arguments, which it empties: only its own names hold them, and ``del`` lets go.

    >>> emptying(lambda a, b: a - b)([3, 2])
    1
    """
    n = len(inspect.signature(function).parameters)
    taken = ", ".join(["args.pop()"] * n)
    call = eval(f"lambda args: function({taken})", {"function": function})

    def run(args: list[Any]) -> Any:
        args.reverse()
        return call(args)

    return run


def _call(source: UnitSource, names: Sequence[str]) -> fx.GraphModule:
    """A forward as a graph of one call, whose outputs have their shapes and dtypes."""
    graph = fx.Graph()
    made = graph.call_function(source.forward, tuple(graph.placeholder(name) for name in names))
    outputs = [graph.call_function(operator.getitem, (made, i)) for i in range(len(source.outputs))]
    for node, text in zip(outputs, source.outputs, strict=True):
        node.meta["val"] = _empty(text)
    graph.output(tuple(outputs))
    return fx.GraphModule({}, graph)


def _empty(text: str) -> Tensor:
    """A tensor without data as ``f32[4, 8]`` says."""
    word, _, sizes = text.rstrip("]").partition("[")
    dtype = next(d for d, short in SHORT.items() if short == word)
    return torch.empty([int(n) for n in sizes.split(",") if n], dtype=dtype, device="meta")


@dataclass(frozen=True)
class Named:
    """Refs by name, for ``program.py``: ``Named("parameter", ("w", "b"))["b"]`` is ``("parameter", 1)``."""

    kind: str
    names: tuple[Any, ...]

    def __getitem__(self, name: str | int) -> Ref:
        return self.kind, self.names.index(name)


MICROBATCH: Ref = ("microbatch", 0)
KEY: Ref = ("key", 0)


def draw(number: int) -> Ref:
    """The number of a random op."""
    return "draw", number


# -- parameters, inputs, outputs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """``rest``: its layout between steps, ``use``: in the units that read it, ``enter``: the way between the two (none:
    it is used as it rests); ``also``: other names of it. One that no unit reads has no ``use``. ``use_dtype`` and
    ``reduce_dtype``: as it is gathered and read, and as its gradient is reduced, where that is another one;
    ``places``: along a pipeline, where it is held."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rest: str
    use: str | None = None
    gather: str = "never"
    reduce: str = "never"
    enter: Callable[[Tensor], Tensor] | None = None
    trainable: bool = True
    also: tuple[str, ...] = ()
    use_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    places: tuple[int, ...] = (0,)

    def layout(self, text: str) -> Layout:
        """The layout that a text says."""
        return Layout.parse(text, len(self.shape))


@dataclass(frozen=True)
class Input:
    """An input of the step: its global shape, and its layout over ranks and microbatches."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str


@dataclass(frozen=True)
class Output:
    """An output of the step, likewise; the first is the loss. Or what crosses from stage to stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str

    @property
    def use(self) -> OutputUse:
        """As programs have it."""
        return OutputUse(self.shape, self.dtype, Layout.parse(self.layout, len(self.shape)))


@dataclass(frozen=True)
class Prologue:
    """What runs once a step on the whole batch: ``function(*args)`` returns what units read as ``hoisted``."""

    function: Callable[..., Any]
    args: tuple[Ref, ...]


@dataclass(frozen=True)
class WholeBatch:
    """What a stage runs once a step on whole tensors of all microbatches: ``function`` returns the model's outputs
    ``returns``. Its arguments come behind the outputs ``kept``; ``flows``: whether a gradient comes back to each."""

    function: Callable[..., Any]
    returns: tuple[int, ...]
    kept: tuple[int, ...]
    flows: tuple[bool, ...]


# -- reading a folder ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """A folder for one rank. ``locals``, ``units``: of each of its stages, for `Program`, as ``pipeline`` is;
    ``parameters``: of the model; ``state``: its buffers, and whether they are in the state dict."""

    locals: tuple[Local, ...]
    units: tuple[Mapping[int, Units], ...]
    pipeline: Stages | None
    parameters: tuple[Parameter, ...]
    state: Mapping[str, bool]
    tensors: Mapping[str, Tensor]


def mesh_of(folder: Path) -> tuple[Mesh, int]:
    """The mesh that a folder was written for, and how often it stands along a pipeline; reads the lines of
    ``program.py`` that say so."""
    path = folder / PROGRAM
    if not path.is_file():
        raise AutoparError(f"load_program: {folder} has no {PROGRAM}. Give a folder that Program.save wrote.")
    lines = path.read_text().splitlines()
    line = next(line for line in lines if line.startswith("mesh = "))
    staged = next((line for line in lines if line.startswith("stages = ")), "stages = 1, 1")
    found: Mesh = eval(line.removeprefix("mesh = "), {"Mesh": Mesh, "Axis": Axis})
    return found, eval(staged.removeprefix("stages = "))[1]


def read_source(folder: Path, ranks: Ranks) -> Read:
    """Import a folder for this rank."""
    tensors: dict[str, Tensor] = torch.load(folder / TENSORS, weights_only=True)
    with _read(_Reading(ranks, tensors)) as reading:
        module = _import(folder)
        if not hasattr(module, "schedule"):
            local, units = _stage(module, reading, ())
            return Read((local,), (units,), None, module.parameters, module.state, tensors)
    made = []
    for stage in range(ranks.stage, module.stages[0], ranks.stages):
        own: dict[str, Tensor] = torch.load(folder / f"stage_{stage}" / TENSORS, weights_only=True)
        with _read(_Reading(ranks, own)) as reading:
            made.append(_stage(_import(folder / f"stage_{stage}"), reading, module.crossings))
    return Read(
        tuple(local for local, _ in made),
        tuple(units for _, units in made),
        Stages(
            [[_action(word) for word in rank.split()] for rank in module.schedule],
            module.crossings,
            tuple(output.use for output in module.crossed),
            tuple((output.use, stage) for output, stage in module.outputs),
            module.updated,
            module.ties,
        ),
        module.parameters,
        module.state,
        tensors,
    )


def _action(word: str) -> tuple[str, int, int]:
    chunk, microbatch = word[1:].split(".")
    return word[0], int(chunk), int(microbatch)


def _stage(module: ModuleType, reading: _Reading, crossings: tuple[Crossing, ...]) -> tuple[Local, Mapping[int, Units]]:
    made: dict[UnitSource, Written] = {}
    units = {rows: _units(function, reading, made) for rows, function in module.microbatches.items()}
    return _local(module, reading.ranks, {rows: run.program for rows, run in units.items()}, crossings), units


@contextmanager
def _read(reading: _Reading) -> Iterator[_Reading]:
    _reading.append(reading)
    try:
        yield reading
    finally:
        _reading.pop()


def _import(folder: Path) -> ModuleType:
    """The folder as a package of a name of its own."""
    name = f"autopar_written_{next(_numbers)}"
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    spec = importlib.util.spec_from_file_location(f"{name}.program", folder / PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _units(function: Callable[[], Any], reading: _Reading, made: dict[UnitSource, Written]) -> Units:
    """What the calls of one microbatch are."""
    reading.calls.clear()
    outputs, updates = function()
    places: dict[UnitSource, int] = {}
    calls = []
    for source, fqn, args, results in reading.calls:
        if source not in made:
            made[source] = Written(source, args)
        calls.append(UnitCall(places.setdefault(source, len(places)), fqn, args, results))
    units = [made[source] for source in places]
    program = UnitProgram(tuple(u.kind for u in units), tuple(calls), tuple(outputs), tuple(updates))
    return Units.of(program, units)


def _local(
    module: ModuleType, ranks: Ranks, units: Mapping[int, UnitProgram], crossings: tuple[Crossing, ...]
) -> Local:
    used = [p for p in module.parameters if p.use is not None]
    local = Local(
        mesh=module.mesh,
        coordinates=ranks.coordinates,
        parameters=tuple(_use(p) for p in used),
        buffers=module.buffers,
        constants=module.constants,
        inputs=tuple(InputUse(i.name, i.shape, i.dtype, Layout.parse(i.layout, len(i.shape))) for i in module.inputs),
        outputs=tuple(output.use for output in module.outputs),
        buffer_updates=module.updated,
        body={},
        prologue=None if module.prologue is None else _prologue(module),
        enter={p.name: _enter(p, ranks, module.mesh) for p in used if p.enter is not None},
        returns=getattr(module, "returns", None),
        received=tuple(crossings[number] for number in getattr(module, "received", ())),
        sent=tuple(crossings[number] for number in getattr(module, "sent", ())),
        tail=_tail(getattr(module, "tail", None)),
    )
    vars(local)["units"] = units  # which else are made of the body
    return local


def _use(p: Parameter) -> ParameterUse:
    assert p.use is not None
    rest, use = p.layout(p.rest), p.layout(p.use)
    dtypes = p.use_dtype, p.reduce_dtype
    return ParameterUse(p.name, p.shape, p.dtype, p.trainable, rest, use, p.reduce, p.gather, *dtypes)


def _enter(p: Parameter, ranks: Ranks, mesh: Mesh) -> fx.GraphModule:
    """The way of a parameter from rest to use as a graph, with local shapes."""
    assert p.enter is not None
    made = fx.symbolic_trace(p.enter)
    for node in made.graph.nodes:
        if node.op == "placeholder":
            shape = p.layout(p.rest).local_shape(p.shape, mesh, ranks.coordinates)
            node.meta["val"] = torch.empty(shape, dtype=p.dtype, device="meta")
        elif node.op == "call_function":
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
    return made


def _tail(whole: WholeBatch | None) -> Tail | None:
    if whole is None:
        return None
    graph = fx.Graph()
    holders = tuple(graph.placeholder(f"whole_{i}") for i in range(len(whole.flows)))
    graph.output(graph.call_function(whole.function, holders))
    inputs = tuple(Value((), torch.float32, flows) for flows in whole.flows)  # of which only that is asked
    return Tail(fx.GraphModule({}, graph), whole.returns, whole.kept, inputs)


def _prologue(module: ModuleType) -> fx.GraphModule:
    """The prologue as `Program` calls it: of all parameters, buffers, constants and inputs, and the key."""
    graph = fx.Graph()
    used = [p.name for p in module.parameters if p.use is not None]
    lists = {"parameter": used, "buffer": module.buffers, "constant": module.constants, "input": module.inputs}
    holders = {(kind, i): graph.placeholder(f"{kind}_{i}") for kind, names in lists.items() for i in range(len(names))}
    holders[KEY] = graph.placeholder("key")
    graph.output(graph.call_function(module.prologue.function, tuple(holders[ref] for ref in module.prologue.args)))
    return fx.GraphModule({}, graph)


__all__ = [
    "KEY",
    "MICROBATCH",
    "PROGRAM",
    "TENSORS",
    "Axis",
    "Crossing",
    "Input",
    "Mesh",
    "Named",
    "Output",
    "Parameter",
    "PartSource",
    "Prologue",
    "Read",
    "UnitSource",
    "WholeBatch",
    "Written",
    "coordinate",
    "device",
    "draw",
    "emptying",
    "for_rank",
    "group",
    "mesh_of",
    "read_source",
    "tensor",
]
