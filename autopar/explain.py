"""What a plan means, made from a `Plan` alone: a page is data (sections of rows), printed by rich or as JSON.

>>> from autopar.plan import ModelId, Plan
>>> [section.title for section in explain(Plan(ModelId("sha256:0"))).sections]
['Plan', 'Not vouched for']
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopar.plan import Parameter, Plan
from autopar.schema import write

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A titled table; without ``columns`` its rows are name and value."""

    title: str
    rows: tuple[Row, ...]
    columns: Row = ()
    note: str = ""


@dataclass(frozen=True)
class Page:
    """``fits``: whether the plan fits the devices; None where that is not predicted."""

    plan: str
    sections: tuple[Section, ...]
    fits: bool | None = None
    head: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """``fits``, ``mesh``, ``microbatches``, ``predicted`` and ``proof`` on top, then the sections."""
        return {"plan": self.plan, "fits": self.fits, **self.head, "sections": write(self.sections)}

    def text(self, width: int = 160) -> str:
        """The page as plain text, at most ``width`` characters a line."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width)
        with console.capture() as capture:
            render(self, console)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()


def explain(plan: Plan) -> Page:
    """The page of a plan. Empty sections are left out."""
    sections = (
        _summary(plan),
        _parameters(plan),
        _divided(plan),
        _whole(plan),
        _collectives(plan),
        _doubts(plan),
    )
    head = {
        "mesh": dict(plan.mesh),
        "microbatches": plan.microbatches,
        "predicted": write(plan.predicted),
        "proof": write(plan.proof),
    }
    return Page(plan.one_line(), tuple(s for s in sections if s.rows), head=head)


def render(page: Page, console: Console) -> None:
    """Print the page."""
    from rich.table import Table
    from rich.text import Text

    for section in page.sections:
        console.print(Text(section.title, style="bold"))
        table = Table(show_header=bool(section.columns), box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for i in range(max(map(len, section.rows))):
            table.add_column(section.columns[i] if section.columns else "", overflow="fold")
        for row in section.rows:
            table.add_row(*map(Text, row))
        console.print(table)
        if section.note:
            console.print(Text(section.note, style="dim"))
        console.print()


def _summary(plan: Plan) -> Section:
    cluster = plan.cluster
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.ranks_per_node}"
    rows = [("plan", plan.one_line()), ("cluster", f"{cluster.name}, {nodes} {cluster.device} ranks")]
    if plan.mesh:
        rows.append(("mesh", " x ".join(f"{name} {size}" for name, size in plan.mesh.items())))
    if plan.batch is not None:
        rows.append(
            ("global batch", f"{plan.batch} rows in {plan.microbatches} microbatch{'es' * (plan.microbatches > 1)}")
        )
    if plan.pins:
        rows.append(("pinned", " ".join(f"{k}={v}" for k, v in plan.pins.items())))
    rows.append(("model", " ".join(filter(None, (plan.model.name, plan.model.graph[:19])))))
    gradients = "checked against eager" if plan.model.checked else "unchecked (not compared with eager)"
    rows.append(("captured gradients", gradients))
    if plan.predicted.step_time_s is not None:
        rows.append(("predicted step", f"{plan.predicted.step_time_s:.3g} s"))
    if plan.predicted.peak_mem_gib is not None:
        rows.append(("predicted peak", f"{plan.predicted.peak_mem_gib:.1f} GiB a rank"))
    if plan.proof.gap is not None:
        rows.append(("within", f"{100 * plan.proof.gap:.2g} % of the optimum"))
    return Section("Plan", tuple(rows))


def _parameters(plan: Plan) -> Section:
    """Parameters of repeated layers that are treated alike are one row."""
    folded: dict[tuple[str, Row], list[str]] = {}
    for fqn, parameter in plan.parameters.items():
        folded.setdefault((_pattern(fqn), _treatment(parameter)), []).append(fqn)
    rows = tuple((_fold(fqns), *row) for (_, row), fqns in folded.items())
    axes = " ".join(a.name for a in plan.axes)
    note = f"Layouts: a word an axis ({axes}). S<dim> shard, R replicated, I invariant, P partial." if plan.axes else ""
    return Section(
        "Parameters", rows, ("name", "shape", "rests", "used", "gathered", "gradient reduced", "dtype"), note
    )


def _treatment(parameter: Parameter) -> Row:
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    gather = {"never": "never", "step": "once a step", "use": "at each use"}[parameter.gather]
    reduce = {"never": "never", "step": "once a step", "microbatch": "each microbatch"}[parameter.reduce]
    dtype = parameter.dtype if parameter.trainable else f"{parameter.dtype}, frozen"
    return (shape, parameter.rest, parameter.use, gather, reduce if parameter.trainable else "frozen", dtype)


def _fold(fqns: list[str]) -> str:
    """``h.0.fc.weight``, ``h.1.fc.weight`` -> ``h.{0-1}.fc.weight``: every number that differs becomes its range."""
    words = [sorted(set(column), key=_numeric) for column in zip(*(fqn.split(".") for fqn in fqns), strict=False)]
    if math.prod(map(len, words)) != len(set(fqns)):
        return ", ".join(fqns)
    return ".".join(column[0] if len(column) == 1 else f"{{{_ranges(map(int, column))}}}" for column in words)


def _numeric(word: str) -> tuple[int, str]:
    return (int(word), "") if word.isdigit() else (-1, word)


def _ranges(numbers: Iterable[int]) -> str:
    """``0, 1, 2, 5`` -> ``0-2,5``."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _divided(plan: Plan) -> Section:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    sizes = {a.name: a.size for a in plan.axes} | dict(plan.mesh)
    rows = tuple(
        (
            name,
            share(s.flops),
            share(s.param_bytes),
            share(s.saved_bytes),
            share(1 - 1 / sizes[name]) if name in sizes else "",
        )
        for name, s in plan.predicted.divided.items()
    )
    columns = ("axis", "FLOPs", "parameter bytes", "saved bytes", "ideal")
    return Section("Share that each axis takes off the busiest rank", rows, columns)


def _whole(plan: Plan) -> Section:
    """Modules whose ops a tensor axis does not divide; repeated layers left whole for one reason are one row."""
    left = [(w.axis, w.fqn, _short(w.op), w.why) for w in plan.predicted.whole]
    for axis, fqn, ops in _undivided(plan):
        left.append((axis, fqn, ops, "no matmul, attention or convolution: every rank does it"))
    folded: dict[tuple[str, ...], list[str]] = {}
    for axis, fqn, op, why in left:
        folded.setdefault((axis, _pattern(fqn), op, why), []).append(fqn)
    rows = tuple((axis, _fold(fqns) or "(model)", op, why) for (axis, _, op, why), fqns in folded.items())
    return Section("What stays whole", rows, ("axis", "module", "ops", "why"))


def _undivided(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(axis, module, ops) of what every rank of a tensor axis does alike, beyond the ops that `Predicted` names."""
    told = {(w.axis, w.fqn, w.op) for w in plan.predicted.whole}
    for a, axis in enumerate(plan.axes):
        found: dict[str, list[str]] = {}
        for op in (op for group in plan.classes for op in group.ops if "tp" in axis.display):
            if op.choices[a] in ("I", "R") and (axis.name, op.fqn, op.op) not in told:
                found.setdefault(op.fqn, []).append(_short(op.op))
        for fqn, ops in found.items():
            yield axis.name, fqn, ", ".join(dict.fromkeys(ops))


def _short(op: str) -> str:
    """``aten.layer_norm.default`` -> ``layer_norm``."""
    return op.split(".")[1] if op.count(".") else op


def _pattern(fqn: str) -> str:
    """The name with every layer number replaced, so that repeated layers look alike."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn)


def _collectives(plan: Plan) -> Section:
    rows = tuple((c.kind, c.axis, c.phase, str(c.count), bytes_text(c.bytes)) for c in plan.predicted.collectives)
    note = f"In all {bytes_text(sum(c.bytes for c in plan.predicted.collectives))} a rank."
    return Section("Collectives a step", rows, ("kind", "axis", "phase", "count", "bytes"), note)


def _doubts(plan: Plan) -> Section:
    """All that the reader must not take for granted."""
    rows = [("relaxed", f"{name}={value}") for name, value in plan.relaxations.items()]
    rows += [("padded", f"{p.fqn} dim {p.dim}: {p.size} as {p.padded}") for p in plan.padding]
    rows += [("no rule, runs whole", op) for op in plan.predicted.fallback]
    if not plan.model.checked:
        rows.append(("unchecked", "captured gradients were not compared with eager"))
    rows += [("captured", hint) for hint in plan.model.hints]
    if plan.predicted.step_time_s is None:
        rows.append(("not predicted", "time and memory (the plan was pinned, not solved)"))
    if plan.proof.gap is None:
        rows.append(("not proved", "no bound: other plans may be better"))
    if not plan.deterministic:
        rows.append(("not deterministic", "the search stopped at a time limit"))
    return Section("Not vouched for", tuple(rows))


def bytes_text(n: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
