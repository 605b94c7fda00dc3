"""A rank's graphs as Python text, and the texts of all ranks as one.

A graph becomes one function, an op a line, its names dropped after their last reader as the graph's own code does.
What may differ among ranks is kept apart as `Literal`: `merge` writes a literal that all ranks share in its place, and
one that differs as a name that is set, above the functions, from the rank's coordinates. Ranks whose functions differ
in their ops have files of their own.

>>> import torch
>>> graph = fx.Graph()
>>> x = graph.placeholder("x")
>>> x.meta["val"] = torch.empty(4, 8, device="meta")
>>> y = graph.create_node("call_function", torch.ops.aten.mul.Tensor, (x, 2.0), name="mul")
>>> y.meta["val"] = x.meta["val"]
>>> _ = graph.output((y,))
>>> (only,) = merge([function("double", fx.GraphModule({}, graph))], [(0,)], ("tp",))
>>> print(only.text)
def double(x):
    mul = aten.mul.Tensor(x, 2.0)  # f32[4, 8]
    del x
    return (mul,)
"""

from __future__ import annotations

import itertools
import keyword
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.facts import _source as source_of

WIDTH = 120
DEEP = 2
HOLE, NEXT = "\0", "\n"
SPACES = {"aten": "aten", "autopar": "ours", "_c10d_functional": "c10d"}  # namespace of ops -> its name in the text
GROUPS = ("group", "group_name")  # arguments that name a process group
SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b1",
}  # fmt: skip


@dataclass(frozen=True)
class Literal:
    """A part of the text that may differ among ranks. ``word``: the name of the argument that it is; ``kind``:
    ``value``, ``group`` (then ``text`` is an axis), ``device``, or ``note`` (in a comment, where the first rank's will
    do)."""

    word: str
    text: str
    kind: str = "value"


@dataclass
class Template:
    """Lines with a `HOLE` for each literal, in order. ``tensors``: what the text reads by name from the file of
    tensors."""

    lines: list[str] = field(default_factory=list)
    literals: list[Literal] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def extend(self, other: Template) -> None:
        """The lines of another after these."""
        self.lines += other.lines
        self.literals += other.literals
        self.tensors |= other.tensors

    def add(self, line: str, literals: Sequence[Literal] = ()) -> None:
        """One line."""
        assert line.count(HOLE) == len(literals), line
        self.lines.append(line)
        self.literals += literals


@dataclass(frozen=True)
class Merged:
    """The text for these ranks, and the names that it needs set: name -> expression, in order."""

    ranks: tuple[int, ...]
    text: str
    names: Mapping[str, str]


def function(
    name: str,
    graph: fx.GraphModule,
    groups: Mapping[str, str] | None = None,
    *,
    arguments: Mapping[int, tuple[str, str]] | None = None,
    results: Sequence[str] = (),
    doc: str = "",
) -> Template:
    """``graph`` as the function ``name``. ``groups``: name of a c10d group -> axis; ``arguments``: index -> (name,
    remark), by default the placeholder's; ``results``: a remark for each output."""
    return Function(graph, groups or {}, arguments or {}).write(name, results, doc)


class Function:
    """One graph as text. ``only``: the arguments, by index, that are written (all others must have no reader);
    ``unit``: the module that it is the graph of, by which remarks call what may have been traced for its like."""

    def __init__(
        self,
        graph: fx.GraphModule,
        groups: Mapping[str, str],
        arguments: Mapping[int, tuple[str, str]],
        only: Sequence[int] | None = None,
        unit: str = "",
    ) -> None:
        self.only, self.unit = only, unit
        self.graph, self.groups, self.out = graph, groups, Template()
        self.nodes = list(graph.graph.nodes)
        self.inline = _inside(self.nodes)
        self.names: dict[fx.Node, str] = {}
        self.remarks: dict[fx.Node, str] = {}
        taken: set[str] = set()
        for i, node in enumerate(self.nodes):
            given = node.op == "placeholder"
            wanted, self.remarks[node] = arguments.get(i, (node.name, "")) if given else (short_name(node), "")
            if node.op != "output" and node not in self.inline:
                self.names[node] = _word(wanted, taken)

    @property
    def inputs(self) -> list[str]:
        """The names of the arguments."""
        return [self.names[n] for n in self.nodes if n.op == "placeholder"]

    @property
    def outputs(self) -> list[str]:
        """The names of what is returned."""
        (found,) = self.nodes[-1].args
        return ["None" if n is None else self.names[n] for n in found]

    def write(self, name: str, results: Sequence[str] = (), doc: str = "") -> Template:
        """As a function of that name."""
        holders = [n for n in self.nodes if n.op == "placeholder"]
        self._signature(name, holders if self.only is None else [holders[i] for i in self.only])
        if doc:
            self.out.add(f'    """{doc}"""')
        where, last = "", self._last_uses()
        for node in self.nodes:
            if node.op == "output":
                self._return(node.args[0], results)
            elif node in self.names and node.op != "placeholder" and not self._unpacked(node):
                if (at := _where(node, self.unit)) and at != where:
                    self.out.add(f"    # {at}")
                    where = at
                self._line(node)
                if dead := [self.names[n] for n in self.nodes if n in last.get(node, ())]:
                    self.out.add(f"    del {', '.join(dead)}")
        return self.out

    def _signature(self, name: str, holders: Sequence[fx.Node]) -> None:
        if not any(self.remarks[n] for n in holders):
            short = f"def {name}({', '.join(self.names[n] for n in holders)}):"
            if len(short) <= WIDTH:
                self.out.add(short)
                return
        self.out.add(f"def {name}(")
        for node in holders:
            shape = shape_text(node.meta.get("val")) or "int"
            remark = f"  {self.remarks[node]}" if self.remarks[node] else ""
            self.out.add(f"    {self.names[node]},  # {HOLE}{remark}", [Literal("shape", shape, "note")])
        self.out.add("):")

    def _line(self, node: fx.Node) -> None:
        literals: list[Literal] = []
        parts = self._parts(node)
        name = self.names[node]
        shape = shape_text(node.meta.get("val"))
        if parts:
            name = ", ".join(self.names[n] for n in parts) + "," * (len(parts) == 1)
            shape = ", ".join(shape_text(n.meta.get("val")) or "-" for n in parts)
        note = [Literal("shape", shape, "note")] if shape else []
        text = self._call(node, literals, len(name) + 7 + (len(shape) + 4 if shape else 0))
        self.out.add(f"    {name} = {text}" + (f"  # {HOLE}" if note else ""), [*literals, *note])

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        """The results of a node that is only ever taken apart, in order and all of them; else none."""
        val = node.meta.get("val")
        by = {n.args[1]: n for n in node.users if n.target is operator.getitem}
        whole = isinstance(val, (tuple, list)) and len(by) == len(node.users) == len(val)
        return [by[i] for i in range(len(by))] if whole else []

    def _unpacked(self, node: fx.Node) -> bool:
        return node.target is operator.getitem and bool(self._parts(node.args[0]))  # type: ignore[arg-type]

    def _call(self, node: fx.Node, literals: list[Literal], before: int = 0) -> str:
        """The expression of a node; ``before``: columns in front of it, 0 where it stands inside another."""
        if node.op == "get_attr":
            key = str(node.target)
            self.out.tensors[key] = getattr(self.graph, key).detach()
            return f'tensor("{key}")'
        if node.target is operator.getitem:
            source, index = node.args
            return f"{self._value(source, '', literals)}[{index!r}]"
        words, start = _words(node), len(literals)
        parts = [self._value(a, w, literals) for a, w in zip(node.args, words, strict=False)]
        parts += [f"{k}={self._value(a, k, literals)}" for k, a in node.kwargs.items()]
        text = f"{_target(node.target)}({', '.join(parts)})"
        hidden = sum(len(k.text) - 1 for k in literals[start:])
        if before and before + len(text) + hidden > WIDTH:
            inside = ", ".join(parts)
            lines = [inside] if len(inside) + hidden + 8 <= WIDTH else [f"{part}," for part in parts]
            text = f"{_target(node.target)}({''.join(f'{NEXT}        {line}' for line in lines)}{NEXT}    )"
        return text

    def _return(self, outputs: Any, remarks: Sequence[str]) -> None:
        if not any(remarks):
            self.out.add(f"    return {self._tree(outputs)}")
            return
        self.out.add("    return (")
        for name, remark in itertools.zip_longest(map(self._tree, outputs), remarks, fillvalue=""):
            self.out.add(f"        {name},  # {remark}" if remark else f"        {name},")
        self.out.add("    )")

    def _tree(self, outputs: Any) -> str:
        """Names, in tuples as they are returned."""
        if isinstance(outputs, (tuple, list)):
            inner = ", ".join(map(self._tree, outputs))
            return f"({inner}{',' * (len(outputs) == 1)})"
        return "None" if outputs is None else self.names[outputs]

    def _value(self, a: Any, word: str, literals: list[Literal]) -> str:
        if isinstance(a, fx.Node):
            return self._call(a, literals) if a in self.inline else self.names[a]
        if isinstance(a, (list, tuple)) and any(isinstance(x, fx.Node) for x in a):
            inner = ", ".join(self._value(x, word, literals) for x in a)
            return f"[{inner}]"
        if word in GROUPS:
            literals.append(Literal(word, self.groups.get(a, a), "group"))
            return HOLE
        if isinstance(a, (bool, torch.dtype, torch.layout, torch.memory_format)) or a is None:
            return repr(a)
        literals.append(Literal(word, "here", "device") if isinstance(a, torch.device) else Literal(word, _text(a)))
        return HOLE

    def _last_uses(self) -> dict[fx.Node, set[fx.Node]]:
        """The names to drop after each line, as generated code does: those that it reads last, its own if none does."""
        last: dict[fx.Node, set[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node in self.inline or self._unpacked(node):
                continue
            parts = self._parts(node)
            for read in (*self._read(node), *(parts or [node])):
                if read not in seen:
                    seen.add(read)
                    if node.op not in ("placeholder", "output"):
                        last.setdefault(node, set()).add(read)
        return last

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """The names that stand in a node's line."""
        found: list[fx.Node] = []
        for n in node.all_input_nodes:
            found += self._read(n) if n in self.inline else [n]
        return found


def _is_view(node: fx.Node) -> bool:
    """Whether a node only looks at its operand in another shape."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    return node.target is torch.ops.aten._unsafe_view.default or (
        alias is not None and not alias.is_write and str(returns[0].type) == "Tensor"
    )


def _inside(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The views that stand in the line of their only reader, at most `DEEP` in one another -> how deep they reach."""
    found: dict[fx.Node, int] = {}
    for node in nodes:
        if _is_view(node) and len(node.users) == 1 and _stands_alone(node):
            depth = 1 + max((found.get(n, 0) for n in node.all_input_nodes), default=0)
            if depth <= DEEP:
                found[node] = depth
    return found


def _stands_alone(node: fx.Node) -> bool:
    """Whether what reads a node has it as an argument of its own, not in a list."""
    return all(node in user.args or node in user.kwargs.values() for user in node.users)


def short_name(node: fx.Node) -> str:
    """A short name, without the number that it has among all nodes of the model."""
    if node.target is operator.getitem:
        source, index = node.args
        return f"{short_name(source)}_{index}"  # type: ignore[arg-type]
    name = re.sub(r"scaled_dot_product_\w*attention(_for_cpu)?", "attention", node.name)
    return re.sub(r"(_(default|Tensor|Scalar))?(_\d+)?$", "", name) or name


def _text(a: Any) -> str:
    if isinstance(a, (list, tuple)):
        return f"[{', '.join(_text(x) for x in a)}]"
    if isinstance(a, float) and not math.isfinite(a):
        return f'float("{a}")'
    if isinstance(a, str):
        return f'"{a}"'
    assert isinstance(a, (bool, int, float, torch.dtype)) or a is None, f"{a!r} of {type(a)} cannot be written"
    return repr(a)


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        return f"{SPACES.get(space, f'torch.ops.{space}')}.{name}.{target._overloadname}"
    if getattr(target, "__module__", "") in ("_operator", "operator"):
        return f"operator.{target.__name__}"
    raise TypeError(f"{target} is no op of a library")


def _words(node: fx.Node) -> list[str]:
    """The names of the positional arguments."""
    schema = getattr(node.target, "_schema", None)
    return [a.name for a in schema.arguments] if schema is not None else ["" for _ in node.args]


def shape_text(val: Any) -> str:
    """``f32[4, 8]``."""
    if isinstance(val, Tensor):
        return f"{SHORT.get(val.dtype, str(val.dtype))}{list(val.shape)}"
    return ""


def alike(fqn: str, unit: str) -> str:
    """The name that a module of another unit has in its like ``unit``.

    >>> alike("layers.0.mlp.up", "layers.12")
    'layers.12.mlp.up'
    """
    pattern = r"\d+".join(map(re.escape, re.split(r"\d+", unit)))
    return re.sub(rf"^{pattern}(?=\.|$)", lambda _: unit, fqn) if unit else fqn


def _where(node: fx.Node, unit: str) -> str:
    """The module that an op lies in, and the line of the model that it came from."""
    stack = node.meta.get("nn_module_stack") or {}
    fqn = alike(str(list(stack.values())[-1][0]), unit) if stack else ""
    return "  ".join(filter(None, (fqn, source_of(node))))


RESERVED = {*SPACES.values(), "torch", "operator", "tensor", "device", "unit"}


def _word(name: str, taken: set[str]) -> str:
    """``name`` as a Python name of its own."""
    word = re.sub(r"\W+", "_", name).strip("_") or "x"
    if not word.isidentifier() or keyword.iskeyword(word) or word in RESERVED:
        word = f"x_{word}"
    names = itertools.chain([word], (f"{word}_{i}" for i in itertools.count(2)))
    free = next(n for n in names if n not in taken)
    taken.add(free)
    return free


# -- all ranks -------------------------------------------------------------------------------------------------------


def merge(
    templates: Sequence[Template], coordinates: Sequence[tuple[int, ...]], axes: Sequence[str]
) -> tuple[Merged, ...]:
    """One text for all ranks whose lines are the same but for literals. ``templates[r]``, ``coordinates[r]``: of rank
    r; ``axes``: names of the mesh's axes."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, template in enumerate(templates):
        alike.setdefault(tuple(template.lines), []).append(rank)
    made = []
    for lines, ranks in alike.items():
        names = _Names([coordinates[r] for r in ranks], axes)
        columns = zip(*(templates[r].literals for r in ranks), strict=True)
        words = [names.write(column) for column in columns]
        pieces = "\n".join(lines).split(HOLE)
        text = "".join(itertools.chain(*zip(pieces, [*words, ""], strict=True)))
        made.append(Merged(tuple(ranks), text, names.expressions()))
    return tuple(made)


class _Names:
    """Names for literals that differ among ranks."""

    def __init__(self, coordinates: Sequence[tuple[int, ...]], axes: Sequence[str]) -> None:
        self.coordinates, self.axes = coordinates, axes
        self.known: dict[tuple[str, ...], str] = {}
        self.set: dict[str, str] = {}
        self.used: set[str] = set()

    def write(self, column: Sequence[Literal]) -> str:
        """What stands in the place of a literal; ``column``: that of each rank."""
        first, texts = column[0], tuple(literal.text for literal in column)
        if first.kind == "note":
            return first.text
        if first.kind == "group":
            assert len(set(texts)) == 1, f"{texts}: one collective over several axes"
            name = f"{first.text}_group"
            self.set[name] = f'group("{first.text}")'
            return name
        if first.kind == "device":
            self.set[first.text] = "device()"
        if len(set(texts)) == 1:
            return first.text
        for i, axis in enumerate(self.axes):
            if texts == tuple(str(c[i]) for c in self.coordinates):
                self.used.add(axis)
                return axis
        if texts not in self.known:
            self.known[texts] = name = self._free(first.word.upper() or "LITERAL")
            self.set[name] = self._by_coordinates(texts)
        return self.known[texts]

    def _free(self, word: str) -> str:
        return next(
            n for n in itertools.chain([word], (f"{word}_{i}" for i in itertools.count(2))) if n not in self.set
        )

    def _by_coordinates(self, texts: Sequence[str]) -> str:
        """An expression of as few coordinates as decide the literal."""
        for n in range(1, len(self.axes) + 1):
            for some in itertools.combinations(range(len(self.axes)), n):
                by: dict[tuple[int, ...], str] = {}
                if all(
                    by.setdefault(tuple(c[i] for i in some), t) == t
                    for c, t in zip(self.coordinates, texts, strict=True)
                ):
                    self.used |= {self.axes[i] for i in some}
                    if n == 1 and sorted(by) == [(i,) for i in range(len(by))]:
                        return f"({', '.join(by[i,] for i in range(len(by)))})[{self.axes[some[0]]}]"
                    key = ", ".join(self.axes[i] for i in some)
                    items = (f"{k[0] if n == 1 else k}: {t}" for k, t in by.items())
                    return f"{{{', '.join(items)}}}[{key}]"
        raise AssertionError("two ranks have the same coordinates")

    def expressions(self) -> dict[str, str]:
        """The names that the text needs, in the order in which they may be set."""
        return {axis: f'coordinate("{axis}")' for axis in self.axes if axis in self.used} | self.set


__all__ = ["Function", "Literal", "Merged", "Template", "alike", "function", "merge", "shape_text", "short_name"]
