"""How a model in train mode gets its plan: from the solver, to which pins are constraints.

Only where an eval program came first, and parameters rest already, are layouts completed from the pins. Every plan is
predicted (`predict`), and one that does not fit the cluster's memory is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.build import Prepared, choose, prepare, with_way_out
from autopar.capture import Capture
from autopar.choosing.in_stages import NothingToTry
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NeedsWholeBatch, NothingFits
from autopar.orders import forwards_first
from autopar.passes.layout import Layout
from autopar.pins import LAYOUT, OWN, Pins, is_named, resolve
from autopar.plan import Alternative, Plan
from autopar.predict import predict
from autopar.rests import resting
from autopar.schema import nearest
from autopar.solver.effort import Effort
from autopar.solver.file import Saved

GIB = 2**30


@dataclass(frozen=True)
class Planned:
    """A plan, predicted, and the graph it is for. ``search``: what the solver went through (None: it was not asked);
    ``seconds``: by phase."""

    plan: Plan
    prepared: Prepared
    search: Saved | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def solves(pins: Pins) -> bool:
    """Whether the solver finds the mesh: nobody has said what the axes are for."""
    return not pins.axes


def plan_training(
    captured: Capture,
    pins: Pins,
    cluster: Cluster,
    rests: Mapping[str, Layout],
    effort: Effort | None = None,
    **options: Any,
) -> Planned:
    """The plan for a captured model in train mode. ``rests``: where parameters rest already, empty before they do;
    ``effort``, ``options``: of the search, where the solver finds the mesh (`choosing.solve.solved`).

    Raises NothingFits where no plan that keeps the pins fits the memory of a rank, AutoparError where a pin cannot be
    kept.
    """
    _refuse_unknown(captured, pins)
    if rests:  # by an eval program that came first, whose ranks are these
        return _pinned(captured, pins, cluster, rests)
    try:
        if is_searched(pins):
            with suppress(NothingToTry):
                return _solved(captured, pins, cluster, effort=effort, **options)
        if (pins.pp or 1) > 1:
            return _pipelined(captured, pins, cluster)
        return _solved_with_axes(captured, pins, cluster)
    except NeedsWholeBatch as error:
        raise with_way_out(error, captured) from None


def _refuse_unknown(captured: Capture, pins: Pins) -> None:
    """A pinned layout must be of a parameter."""
    names = [*captured.parameters, *captured.aliases]
    for pattern, _ in pins.layouts:
        if not any(is_named(name, pattern) for name in names):
            close = nearest(pattern, names) or "."
            raise AutoparError(
                f"pin {LAYOUT}{pattern}: no parameter of {captured.model_name} has that name{close} "
                "Legal: a name of its state_dict, in which * stands for any text."
            )


def is_searched(pins: Pins) -> bool:
    """Whether mesh, stages and their order are all the solver's, within pins: no axes, cuts or order of microbatches
    are the user's own, and not all forwards come before the first backward."""
    given = bool(pins.cut) or pins.schedule == "gpipe" or (pins.schedule or "").endswith(OWN)
    return solves(pins) and not given


def _pipelined(captured: Capture, pins: Pins, cluster: Cluster) -> Planned:
    """With stages on pinned axes, at cuts or in an order that are given: layouts are looked for on the ranks of one
    stage, then it is cut."""
    from autopar.choosing.pipelines import pipelined

    resolved = resolve(pins, cluster.ranks, captured.batch if pins.axes else None)
    first = forwards_first(resolved.schedule, resolved.words)
    return Planned(*pipelined(pins, resolved, cluster, captured.batch, _Layouts(captured, first)))


class _Layouts:
    """Layouts on the ranks of one stage, for `choosing.pipelines`."""

    def __init__(self, captured: Capture, forwards_first: bool) -> None:
        self.captured, self.first = captured, forwards_first
        self.whole = prepare(captured, 1, forwards_first=forwards_first)

    def plan(self, pins: Pins, part: Cluster) -> tuple[Plan, Prepared]:
        """As without stages."""
        if solves(pins):
            made = _solved(self.captured, replace(pins, pp=1), part, prepared=self.whole, nearest=False)
        else:
            made = _solved_with_axes(self.captured, pins, part, self.whole)
        return made.plan, made.prepared

    def prepared(self, microbatches: int) -> Prepared:
        """The graph for so many microbatches."""
        return self.whole if microbatches == 1 else prepare(self.captured, microbatches, forwards_first=self.first)


def _solved(captured: Capture, pins: Pins, cluster: Cluster, **options: Any) -> Planned:
    from autopar.choosing.solve import solved

    found = solved(captured, cluster, pins, **options)
    return Planned(found.plan, found.prepared, found.search, found.seconds)


def _solved_with_axes(captured: Capture, pins: Pins, cluster: Cluster, prepared: Prepared | None = None) -> Planned:
    """On pinned axes: ZeRO stage 0, one microbatch and nothing made again where open and where that fits, else the
    fastest that fits."""
    resolve(pins, cluster.ranks, captured.batch)
    prepared = prepared or prepare(captured, 1)
    zero = pins.zero if pins.in_pieces else pins.zero or 0
    plain = replace(pins, zero=zero, microbatches=pins.microbatches or 1, recompute=pins.recompute or "none")
    try:
        made = _attempt(captured, plain, cluster, prepared)
    except NothingFits as error:
        if plain == pins:
            raise _refusal(captured, pins, cluster, prepared, error) from None
        try:
            made = _attempt(captured, pins, cluster, prepared)
        except NothingFits as still:
            raise _refusal(captured, pins, cluster, prepared, still) from None
    return replace(made, plan=replace(made.plan, pins=pins.given()))


def _attempt(captured: Capture, pins: Pins, cluster: Cluster, prepared: Prepared) -> Planned:
    return _solved(captured, pins, cluster, prepared=prepared, nearest=False, effort=Effort(1e-4))


def _pinned(captured: Capture, pins: Pins, cluster: Cluster, rests: Mapping[str, Layout]) -> Planned:
    resolved = resolve(pins, cluster.ranks, captured.batch)
    prepared = prepare(captured, resolved.microbatches)
    if pins.layouts:
        fqn, words = pins.layouts[0]
        raise AutoparError(
            f"pin {LAYOUT}{fqn}={','.join(map(':'.join, words))}: an eval program came first, which said where "
            "parameters rest. Train first, or leave the pin out."
        )
    plan = choose(prepared, resolved, cluster)
    return Planned(predict(resting(plan, rests) if rests else plan, prepared, cluster), prepared)


def _refusal(captured: Capture, pins: Pins, cluster: Cluster, prepared: Prepared, refused: NothingFits) -> NothingFits:
    """The error where nothing fits, with what would if ZeRO stage, microbatches and recomputation were not pinned."""
    if refused.plan is None:
        return refused
    nearest: list[Alternative] = []
    if {"zero", "microbatches", "recompute"} & pins.named():
        resolved = resolve(pins, cluster.ranks, captured.batch)
        for zero in range(4) if resolved.data_ranks * resolved.cp > 1 else (0,):
            with suppress(AutoparError):
                open_pins = replace(pins, zero=zero, microbatches=None, recompute=None)
                made = _attempt(captured, open_pins, cluster, prepared)
                nearest.append(_alternative(made.plan, zero))
    nearest.sort(key=lambda a: a.step_time_s or 0.0)
    plan = replace(refused.plan, pins=pins.given(), alternatives=tuple(nearest))
    return NothingFits(_message(plan, nearest), plan)


def _alternative(plan: Plan, zero: int) -> Alternative:
    pins = {"zero": str(zero), "microbatches": str(plan.microbatches)}
    change = " ".join([*(f"{key}={value}" for key, value in pins.items()), *again_words(plan)])
    found = plan.predicted
    return Alternative("nearest", change, {**plan.pins, **pins}, found.step_time_s, found.peak_mem_gib, fits=True)


def again_words(plan: Plan) -> list[str]:
    """How a change says what a plan makes again: nothing where that is nothing."""
    return {"none": [], "mixed": ["recompute not pinned"]}.get(plan.recompute, [f"recompute={plan.recompute}"])


def _message(plan: Plan, nearest: list[Alternative]) -> str:
    """``no plan fits: dp=2 zero=3 needs 91.2 GiB of 76.0 a rank (saved activations 60.1). Nearest: ...``"""
    from autopar.explain.memory import owners

    limit = plan.predicted.parts.get("memory_limit_bytes", 0.0) / GIB
    named = ", ".join(f"{name} {_size(size / GIB)}" for name, _, size in owners(plan)[:2])
    way = f"Nearest: {nearest[0].change}" if nearest else "Use more ranks, a smaller batch, or other pins"
    need = _size(plan.predicted.peak_mem_gib or 0.0)
    return f"no plan fits: {plan.one_line()} needs {need} GiB of {_size(limit)} a rank ({named}). {way}."


def _size(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 100 else f"{gib:.3g}"
