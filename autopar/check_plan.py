"""What a plan must fulfil beyond its types: axes, classes and layouts agree. Errors name the JSON path and the legal
values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.orders import check_order
from autopar.schema import fail, nearest

if TYPE_CHECKING:
    from autopar.plan import Op, Plan

DISPLAY_NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "idle")  # torchtitan's; of an axis without work
PIPELINES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "custom")  # schedules of several stages
ROUNDING = 1e-6  # what a bound may be above the objective that it meets
WIRES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "copy")
CAST = ("fp64", "fp32", "bf16", "fp16")  # what mixed precision casts
WORD = re.compile(r"[RIP]|S(\d+)(\(\d+(\+\d+)*\))?(/[1-9]\d*)?(@\d+)?")  # passes.layout.Layout, without importing torch
CHOICE = re.compile(r"(I|R)|(factor|linear|special):([^()/\s]+)(?:\((\d+(?:\+\d+)*)\))?(?:/([1-9]\d*))?")
KIND = re.compile(r"\*|\w+ \d+")  # of parameters, with the tensors that an optimizer keeps of one (`optimizer_states`)
STATE = re.compile(r"param(:\w+)?|(d\d+|\d+)(\*(d\d+|\d+))*:\w+")
CHOICES = "I, R, factor:<name>, factor:<name>(4+2+2), factor:<name>/3, linear:<index>, special:<name>"


def check(plan: Plan, where: str) -> None:
    """Raises AutoparError, naming ``where`` and the JSON path, for the first thing that is wrong."""
    _check_schedule(plan, where)
    _check_axes(plan, where)
    _check_classes(plan, where)
    _check_units(plan, where)
    _check_parameters(plan, where)
    _check_optimizer(plan, where)
    _check_prediction(plan, where)
    _check_proof(plan, where)
    _check_alternatives(plan, where)


def _check_axes(plan: Plan, where: str) -> None:
    names = [a.name for a in plan.axes]
    for i, axis in enumerate(plan.axes):
        path = f"$.axes[{i}]"
        if axis.size < 1:
            raise fail(where, f"{path}.size", f"{axis.size} is not a size. Legal: 1 or more.")
        if names.index(axis.name) != i:
            raise fail(where, f"{path}.name", f"the axis {axis.name!r} stands twice.")
        for name in axis.display:
            if name not in DISPLAY_NAMES and not axis.is_time:
                raise fail(where, f"{path}.display", f"{name!r} is not legal. Legal: {', '.join(DISPLAY_NAMES)}.")
        if axis.is_time and i != len(plan.axes) - 1:
            raise fail(where, f"{path}.tier", "the axis in time must be the last one.")
        if axis.is_time and axis.size != plan.microbatches:
            raise fail(where, f"{path}.size", f"{axis.size} is not the number of microbatches, {plan.microbatches}.")
    if plan.microbatches < 1:
        raise fail(where, "$.microbatches", f"{plan.microbatches} is not a count. Legal: 1 or more.")
    for name, layout in plan.inputs.items():
        _check_layout(layout, len(plan.axes), None, where, f"$.inputs[{json.dumps(name)}]")
    _check_batch(plan, where)
    _check_wires(plan, where)
    if math.prod(plan.mesh.values()) != plan.ranks:
        raise fail(where, "$.mesh", f"makes {math.prod(plan.mesh.values())} ranks, the axes make {plan.ranks}.")
    if plan.ranks > (room := plan.cluster.nodes * plan.cluster.ranks_per_node):
        raise fail(where, "$.axes", f"make {plan.ranks} ranks, the cluster has {room}.")


def _check_batch(plan: Plan, where: str) -> None:
    """Every microbatch gives all ranks that cut the batch as many rows, or, where one axis cuts it, each some."""
    if plan.batch is None:
        if plan.microbatches > 1:
            raise fail(where, "$.batch", f"is null, but {plan.microbatches} microbatches need to know their rows.")
        return
    data = plan.row_unit if plan.microbatches > 1 else 1
    even = plan.batch % data == 0 and plan.batch >= data * plan.microbatches
    if plan.batch < 1 or not (
        even or fills_rows(plan.batch, plan.microbatches, [plan.axes[i].size for i in plan.data])
    ):
        need = f"a multiple of {data}, at least {data * plan.microbatches} (data ranks x microbatches)"
        raise fail(where, "$.batch", f"{plan.batch} is not legal. Legal: {need}.")


def fills_rows(batch: int, microbatches: int, ranks: Sequence[int]) -> bool:
    """Whether rows that the data ranks do not divide give every rank some of every microbatch: one axis alone may cut
    them, as ``torch.chunk`` does. ``ranks``: of each axis that cuts them.

    >>> fills_rows(7, 2, [2]), fills_rows(5, 1, [4]), fills_rows(7, 1, [2, 2])
    (True, False, False)
    """
    rows = {batch // microbatches, -(-batch // microbatches)}
    return len(ranks) == 1 and all(r and -(-r // ranks[0]) * (ranks[0] - 1) < r for r in rows)


def _check_wires(plan: Plan, where: str) -> None:
    for i, axis in enumerate(plan.axes):
        path = f"$.axes[{i}].wire"
        if axis.wire and set(axis.wire) != set(WIRES):
            raise fail(where, path, f"has the keys {sorted(axis.wire)}. Legal: {', '.join(WIRES)}; or none of them.")
        for key, (latency, per_byte) in axis.wire.items():
            if latency < 0 or per_byte < 0:
                raise fail(where, f"{path}.{key}", f"{[latency, per_byte]} has a negative time. Legal: 0 s or more.")


def _check_classes(plan: Plan, where: str) -> None:
    every = sorted(range(len(plan.axes)))
    for c, group in enumerate(plan.classes):
        for k, op in enumerate(group.ops):
            path = f"$.classes[{c}].ops[{k}]"
            if op.index != k:
                raise fail(where, f"{path}.index", f"{op.index} is not the op's place in its class. Legal: {k}.")
            if len(op.choices) != len(every):
                raise fail(where, f"{path}.choices", f"has {len(op.choices)} choices for {len(every)} axes.")
            for a, text in enumerate(op.choices):
                if not CHOICE.fullmatch(text):
                    raise fail(where, f"{path}.choices[{a}]", f"{text!r} is not legal. Legal: {CHOICES}.")
            if op.order and sorted(op.order) != every:
                raise fail(where, f"{path}.order", f"{list(op.order)} does not name each of {every} once.")
        for k, extra in enumerate(group.extra):
            path = f"$.classes[{c}].extra[{k}]"
            _check_layout(extra.layout, len(every), None, where, f"{path}.layout")
            _check_place(extra.of, group.ops, where, f"{path}.of")


def _check_place(index: int, ops: tuple[Op, ...], where: str, path: str) -> None:
    if not 0 <= index < len(ops):
        raise fail(where, path, f"there is no op {index}. Legal: 0 to {len(ops) - 1}.")


def _check_units(plan: Plan, where: str) -> None:
    for u, unit in enumerate(plan.units):
        if not 0 <= unit.kind < len(plan.classes):
            raise fail(
                where, f"$.units[{u}].kind", f"there is no class {unit.kind}. Legal: 0 to {len(plan.classes) - 1}."
            )
    for s, stage in enumerate(plan.stages):
        begin = plan.stages[s - 1].last if s else 0
        if stage.first != begin or not begin <= stage.last <= len(plan.units):
            raise fail(where, f"$.stages[{s}]", f"[{stage.first}, {stage.last}) does not continue at unit {begin}.")
        if stage.last == begin and len(plan.stages) > 1:
            raise fail(where, f"$.stages[{s}]", f"[{stage.first}, {stage.last}) has no unit. Legal: one or more.")
    if plan.stages and plan.stages[-1].last != len(plan.units):
        last, units = plan.stages[-1].last, len(plan.units)
        raise fail(where, f"$.stages[{len(plan.stages) - 1}].last", f"{last} leaves units out. Legal: {units}.")


def _check_schedule(plan: Plan, where: str) -> None:
    """A schedule goes with the number of stages, and a user's own can run."""
    schedule, stages = plan.schedule, max(1, len(plan.stages))
    name, virtual, path = schedule.name, schedule.virtual, "$.schedule"
    if virtual < 1 or stages % virtual:
        raise fail(where, f"{path}.virtual", f"{virtual} does not divide {stages} stages. Legal: a divisor.")
    if (name == "accumulate") != (stages == 1):
        legal = '"accumulate"' if stages == 1 else ", ".join(f'"{n}"' for n in PIPELINES)
        raise fail(where, f"{path}.name", f"{json.dumps(name)} is not legal for {stages} stages. Legal: {legal}.")
    if plan.pp == 1 and stages > 1:
        raise fail(where, f"{path}.virtual", f"{virtual} leaves all stages to one rank. Legal: at most {stages // 2}.")
    if (virtual > 1) != (name == "interleaved") and name != "custom":
        legal = "2 or more" if name == "interleaved" else "1"
        raise fail(where, f"{path}.virtual", f"{virtual} is not legal for {json.dumps(name)}. Legal: {legal}.")
    if bool(schedule.words) != (name == "custom"):
        legal = "the order of every rank" if name == "custom" else 'nothing but for "custom"'
        raise fail(where, f"{path}.words", f"does not go with {json.dumps(name)}. Legal: {legal}.")
    if schedule.words:
        try:
            check_order(plan.orders(), plan.pp, plan.microbatches, virtual)
        except AutoparError as error:
            raise fail(where, f"{path}.words", str(error)) from None


def _check_parameters(plan: Plan, where: str) -> None:
    for fqn, parameter in plan.parameters.items():
        path = f"$.parameters[{json.dumps(fqn)}]"
        for name in ("rest", "use"):
            _check_layout(getattr(parameter, name), len(plan.axes), len(parameter.shape), where, f"{path}.{name}")
        if parameter.gather == "never" and parameter.rest.replace("R", "I") != parameter.use.replace("R", "I"):
            raise fail(
                where,
                f"{path}.gather",
                f'"never", but rest {parameter.rest!r} is not use {parameter.use!r}. Legal: "step", "use".',
            )
        cast, asked = parameter.dtype in CAST, plan.precision
        used = {parameter.dtype, asked.param_dtype if cast and asked.param_dtype else parameter.dtype}
        reduced = {asked.reduce_dtype if cast and asked.reduce_dtype else parameter.dtype}
        for name, legal in (("use_dtype", used), ("grad_dtype", reduced)):  # batch norms are used as they rest
            if getattr(parameter, name) not in legal:
                why = f"{getattr(parameter, name)!r} is not what $.precision makes of {parameter.dtype!r}"
                raise fail(where, f"{path}.{name}", f"{why}. Legal: {', '.join(sorted(legal))}.")


def _check_optimizer(plan: Plan, where: str) -> None:
    for key, words in plan.optimizer.states.items():
        path = f"$.optimizer.states[{json.dumps(key)}]"
        if not KIND.fullmatch(key):
            raise fail(where, path, 'is no kind of parameters. Legal: "*", or dtype and number of dims as "fp32 2".')
        ndim = 0 if key == "*" else int(key.split()[1])
        for word in words:
            dims = [int(d) for d in re.findall(r"\bd(\d+)", word)]
            if not STATE.fullmatch(word) or any(d >= ndim for d in dims):
                of = f', "d{ndim - 1}:fp32"' if ndim else ""
                raise fail(where, path, f'{word!r} is not legal. Legal: "param", "param:fp32"{of}.')


def _check_layout(text: str, axes: int, ndim: int | None, where: str, path: str) -> None:
    words = text.split()
    if len(words) != axes:
        raise fail(where, path, f"{text!r} has {len(words)} words for {axes} axes.")
    for word in words:
        match = WORD.fullmatch(word)
        if not match or (ndim is not None and match[1] and int(match[1]) >= ndim):
            legal = "S<dim>" if ndim is None else f"S0 to S{ndim - 1}" if ndim else "but no S, as it has no dims"
            raise fail(where, path, f"{word!r} is not legal. Legal: R, I, P, {legal}.")


def _check_prediction(plan: Plan, where: str) -> None:
    predicted, names = plan.predicted, [*(a.name for a in plan.axes), *["pp"] * (plan.pp > 1)]
    figures: dict[str, float | None] = {"step_time_s": predicted.step_time_s, "peak_mem_gib": predicted.peak_mem_gib}
    figures |= {f"parts.{key}": value for key, value in predicted.parts.items()}
    for i, c in enumerate(predicted.collectives):
        path = f"collectives[{i}]"
        if c.axis not in names:
            raise fail(where, f"$.predicted.{path}.axis", f"there is no axis {c.axis!r}. Legal: {', '.join(names)}.")
        figures |= {f"{path}.count": c.count, f"{path}.bytes": c.bytes, f"{path}.seconds": c.seconds}
    _check_positive(figures, where, "$.predicted")


def _check_proof(plan: Plan, where: str) -> None:
    proof = plan.proof
    _check_positive({"objective": proof.objective, "bound": proof.bound}, where, "$.proof")
    if proof.gap is not None and not -ROUNDING <= proof.gap <= 1:
        raise fail(
            where, "$.proof.gap", f"{proof.gap} is no gap. Legal: a fraction from 0 to 1 (0.01 is 1 %), or null."
        )
    if proof.objective is not None and proof.bound is not None and proof.bound > proof.objective * (1 + ROUNDING):
        raise fail(where, "$.proof.bound", f"{proof.bound} is above the objective, {proof.objective}.")


def _check_alternatives(plan: Plan, where: str) -> None:
    from autopar.pins import KEYS, LAYOUT

    for i, other in enumerate(plan.alternatives):
        path = f"$.alternatives[{i}]"
        _check_positive({"step_time_s": other.step_time_s, "peak_mem_gib": other.peak_mem_gib}, where, path)
        for key in other.pins:
            if key not in KEYS and not key.startswith(LAYOUT):
                legal = f"Legal: {', '.join(KEYS)}, {LAYOUT}<FQN>."
                raise fail(where, f"{path}.pins", f"unknown pin {key!r}{nearest(key, KEYS) or '.'} {legal}")


def _check_positive(figures: dict[str, float | None], where: str, path: str) -> None:
    for name, value in figures.items():
        if value is not None and value < 0:
            raise fail(where, f"{path}.{name}", f"{value} is less than nothing. Legal: 0 or more.")
