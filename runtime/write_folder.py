"""Programs of all ranks as a folder of readable Python: `Program.save`.

``units/*.py`` have the forward and backward of each class of units, ``program.py`` the parameters and their ways, the
calls of the units and what comes in and out; ``tensors.pt`` has constants and buffers. `autopar.load_program` runs it
without the model's code and without planning. Ranks share files: what differs among them is a literal that is looked
up by the rank's coordinates, and only units whose ops differ (a rank that keeps a value where others write zeros) are
files of their own, named by their ranks.

Of a pipeline every stage has such a folder, ``stage_0`` and so on, and ``program.py`` above them says what each rank
does in which order, what crosses from stage to stage, and where parameters are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.passes.layout import Mesh
from autopar.runtime.source import PROGRAM, TENSORS
from autopar.runtime.source_text import WIDTH, Merged, merge
from autopar.runtime.write_source import (
    Source,
    Tree,
    in_order,
    other_names,
    output_text,
    quoted,
    source_of,
    state_lines,
)

if TYPE_CHECKING:
    from autopar.passes.lower import ParameterUse
    from autopar.runtime.program import Program
    from autopar.runtime.stage import Stages


@dataclass(frozen=True)
class Piece:
    """What a rank tells of one of its stages. ``constants``: of the first rank of a stage."""

    source: Source
    uses: tuple[ParameterUse, ...]
    constants: Mapping[str, Tensor]


def save(program: Program, folder: Path) -> None:
    """Write the programs of all ranks; collective. Rank 0 writes."""
    ranks, uses = program.ranks, program.stages[0].local.parameters
    groups = {name: axis for axis, name in ranks.group_names.items()}
    tree = Tree.of(program.tensors, {use.fqn for use in uses}) if ranks.stages == 1 else None
    own = []
    for stage in program.stages:
        constants = {
            f"constant/{name}": tensor.detach().cpu()
            for name, tensor in zip(stage.local.constants, stage.constants, strict=True)
            if ranks.place == 0
        }
        source = source_of(stage.local, stage.units, groups, tree, stage.parted)
        own.append(Piece(source, stage.local.parameters, constants))
    every: list[Any] = [None] * ranks.count
    dist.all_gather_object(every, own, group=ranks.world)
    if ranks.rank == 0:
        tensors = {f"buffer/{name}": buffer.detach().cpu() for name, buffer in program.tensors.named_buffers()}
        for pieces in every:
            tensors |= {name: tensor for piece in pieces for name, tensor in piece.constants.items()}
        if tree is not None:
            write(folder, [piece.source for (piece,) in every], program.mesh, tensors)
        else:
            n = len(program.stages) * ranks.stages
            stages = [every[s % ranks.stages * program.mesh.ranks :][: program.mesh.ranks] for s in range(n)]
            pieces = [[own[s // ranks.stages] for own in stage] for s, stage in enumerate(stages)]
            whole = Tree.of(program.tensors, {use.fqn for stage in pieces for use in stage[0].uses})
            write_stages(folder, pieces, program.pipeline, whole, program.mesh, tensors)
    ranks.gather_numbers([0])  # nobody reads what is not written


def write(
    folder: Path, sources: Sequence[Source], mesh: Mesh, tensors: Mapping[str, Tensor], title: str | None = None
) -> None:
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
    (folder / PROGRAM).write_text(_program_file(program, mesh, files, title or _title(mesh)))
    torch.save(held, folder / TENSORS)


def write_stages(
    folder: Path,
    stages: Sequence[Sequence[Piece]],
    pipeline: Stages,
    tree: Tree,
    mesh: Mesh,
    tensors: Mapping[str, Tensor],
) -> None:
    """Write the folder of a pipeline. ``stages``: of each, all ranks in order; ``tensors``: buffers and constants."""
    pp = len(pipeline.schedule)
    for number, pieces in enumerate(stages):
        where = f"Stage {number}, of {len(stages)}, on one of its {mesh.ranks} ranks. ../{PROGRAM} says when it is run."
        write(folder / f"stage_{number}", [piece.source for piece in pieces], mesh, {}, where)
    held: dict[str, tuple[ParameterUse, list[int]]] = {}
    for number, pieces in enumerate(stages):
        for use in pieces[0].uses:
            held.setdefault(use.fqn, (use, []))[1].append(number % pp)
    parameters = {}
    for use, places in held.values():
        words = [quoted(use.fqn), repr(use.shape), str(use.dtype), f'"{use.rest}"']
        words += [] if use.trainable else ["trainable=False"]
        words += [*other_names(tree, use.fqn), f"places={tuple(sorted(set(places)))!r}"]
        parameters[use.fqn] = f"    Parameter({', '.join(words)}),"
    lines = ["parameters = (  # name, shape, dtype, how it rests, and at which places along the pipeline"]
    lines += [*in_order(parameters, tree, len(mesh.axes)), ")", *state_lines(tree)]
    lines += ["schedule = (  # by place along the pipeline: a letter, which of the stages there, and a microbatch"]
    for actions in pipeline.schedule:
        lines += _folded([f"{letter}{chunk}.{microbatch}" for letter, chunk, microbatch in actions])
    lines += [
        ")",
        "crossings = (  # number, the stage that makes it, those that read it, and whether a gradient comes",
    ]
    lines += [f"    Crossing({c.number}, {c.source}, {c.targets!r}, {c.grad})," for c in pipeline.crossings]
    lines += [")", "crossed = (  # what they are", *(f"    {output_text(use)}," for use in pipeline.crossed)]
    lines += [")", "outputs = (  # the loss first, and the stage that makes each"]
    lines += [f"    ({output_text(use)}, {stage})," for use, stage in pipeline.outputs]
    lines += [")", f"updated = {_pairs(pipeline.updates)}  # buffers, and the stage that knows the new value"]
    lines += [f"ties = {_pairs(pipeline.ties)}  # parameters that several places hold: gradients are summed"]
    axes = ", ".join(_axis_text(a) for a in mesh.axes)
    lines = [
        f"mesh = Mesh(({axes}{',' * bool(axes)}))  # of one stage",
        f"stages = {len(stages)}, {pp}  # all, and places along the pipeline",
        "",
        *lines,
    ]
    text = Merged((), "\n".join(lines), {})
    words = _called(text, "Axis", "Crossing", "Mesh", "Output", "Parameter")
    file = [f'"""{_title(mesh, pp)}"""', "", *_imports(text, words)[:-2], *lines, ""]
    (folder / PROGRAM).write_text("\n".join(file))
    torch.save(dict(tensors), folder / TENSORS)


def _folded(words: Sequence[str]) -> list[str]:
    """Words as one string in brackets, over several lines where they are many."""
    lines, width = [""], WIDTH - 12
    for word in words:
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] += f"{word} "
    if len(lines) == 1:
        return [f'    "{lines[0].strip()}",']
    return ["    (", *(f'        "{line}"' for line in lines), "    ),"]


def _pairs(pairs: Sequence[tuple[str, Any]]) -> str:
    return f"({''.join(f'({quoted(name)}, {what!r}), ' for name, what in pairs).strip()})"


def _files(by: Mapping[str, tuple[int, ...]]) -> str:
    return "{" + ", ".join(f"{quoted(name)}: {ranks!r}" for name, ranks in by.items()) + "}"


# -- files -----------------------------------------------------------------------------------------------------------


def _unit_file(doc: str, ranks: Sequence[int], merged: Merged) -> str:
    only = f" Of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}." if ranks else ""
    words = ["UnitSource", *_called(merged, "PartSource", "coordinate", "device", "group", "tensor")]
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


def _program_file(merged: Merged, mesh: Mesh, files: Mapping[str, Mapping[str, tuple[int, ...]]], title: str) -> str:
    text = merged.text
    axes = ", ".join(_axis_text(a) for a in mesh.axes)
    words = ["Mesh", *["Axis"] * bool(axes), *(w for w in ("KEY", "MICROBATCH") if re.search(rf"\b{w}\b", text))]
    words += _called(merged, "Input", "Named", "Output", "Parameter", "Prologue", "WholeBatch")
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
    return "\n".join([
        f'"""{title}"""',
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


def _title(mesh: Mesh, stages: int = 1) -> str:
    words = [f"pp={stages}"] * (stages > 1) + [f"{mesh.axes[a].name}={mesh.axes[a].size}" for a in mesh.space]
    time = "" if mesh.time is None else f", {mesh.axes[mesh.time].size} microbatches"
    ranks = " x ".join(words) or "one rank"
    return f"One step of training on one rank of {ranks}{time}. Run it with autopar.load_program."


__all__ = ["Piece", "save", "write", "write_stages"]
