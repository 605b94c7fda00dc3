"""The planner's own configuration beside each published one: same model, cluster, batch and kernels, same simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from autopar.bench.published import chosen_rows, priced
from autopar.bench.published_report import Result
from autopar.bench.published_rows import Row, Use
from autopar.bench.rows import grid
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.pricing import PricedRow
    from autopar.pricing.choose import Chosen

DECISIONS = (
    "tp", "sequence_parallel", "cp", "dp", "pp", "vp", "schedule", "rows", "microbatches", "zero", "reshard",
    "recompute", "recomputed",
)  # fmt: skip
RECOMPUTED = {"none": "none", "selective": "ops", "full": "full"}  # of a plan -> of a configuration
SCHEDULES = {"accumulate": "1f1b", "zero_bubble": "zb-1p"}  # likewise
TELLING = 0.15  # faster by more: the reason is to be looked for
NAMED = 3  # kinds of seconds that are named as the reason


@dataclass(frozen=True)
class Beside:
    """A published configuration and the one chosen for its model, cluster and batch. Seconds are predicted;
    ``faster``: as a fraction of the published; ``decisions``: what differs, ``tp 4 > 2``; ``seconds``: by how much
    each kind of the fullest rank's seconds does, the largest first; ``in_space``: whether the published one was among
    what was chosen from; ``fits``: whether it is predicted to fit."""

    id: str
    source: str
    model: str
    gpus: int
    published_s: float
    chosen_s: float
    fits: bool
    in_space: bool
    decisions: tuple[str, ...]
    seconds: tuple[tuple[str, float], ...]
    configurations: int
    simulated: int

    @property
    def faster(self) -> float:
        """The share of the published seconds that the chosen one saves."""
        return 1 - self.chosen_s / self.published_s

    @property
    def dominates(self) -> bool:
        """Whether the chosen one is predicted no slower."""
        return self.chosen_s <= self.published_s * (1 + 1e-9)


def beside(path: str | Path, cases: Sequence[str] = ()) -> list[Beside]:
    """Every distinct tier-A H100 configuration of a file, or of ``cases``. Raises AutoparError where there is none."""
    from autopar.pricing import price_row

    wanted = [row for row in chosen_rows(path, cases)[0] if row.tier == "A" and "H100" in row.gpu]
    results = [r for r in (priced(row, price_row) for row in wanted) if r.priced]
    distinct = {(r.row.layout_key, problem(r.row)): r for r in reversed(results)}
    if not distinct:
        raise AutoparError("bench published --choose: no row of tier A on H100s that can be priced. Leave --case out.")
    return list(_beside(list(distinct.values())[::-1]))


def _beside(results: Sequence[Result]) -> Iterator[Beside]:
    from autopar.pricing.choose import Space, choose
    from autopar.pricing.configuration import layout_of

    known: dict[Row, Chosen] = {}
    for result in results:
        asked, row = problem(result.row), result.row
        if asked not in known:
            known[asked] = choose(asked)
        assert result.priced is not None
        found, theirs = known[asked], layout_of(row)
        theirs = theirs if theirs.zero >= 3 else replace(theirs, reshard=True)
        changes = ((name, getattr(theirs, name), getattr(found.layout, name)) for name in DECISIONS)
        parts = {**dict.fromkeys(found.priced.parts, 0.0), **result.priced.parts}
        saved = [(k[:-2], parts[k] - found.priced.parts.get(k, 0.0)) for k in parts if k.endswith("_s")]
        yield Beside(
            row.id,
            row.source,
            row.model,
            row.gpus,
            result.priced.step_s,
            found.priced.step_s,
            result.priced.fits,
            Space(asked).contains(theirs),
            tuple(f"{name} {old} > {new}" for name, old, new in changes if old != new),
            tuple(sorted(saved, key=lambda kind: -abs(kind[1]))),
            found.configurations,
            found.simulated,
        )


def of_plan(path: str | Path, row: Row) -> PricedRow:
    """The configuration of a plan of the search over layouts, for a row's model and batch, priced as the row is: what a
    plan has beyond it (layouts of single ops) is not. Raises AutoparError where its mesh is no configuration."""
    from autopar.plan import Plan
    from autopar.pricing.configuration import layout_of, price_layout

    plan = Plan.load(path)
    sizes = {key: prod(n for name, n in plan.mesh.items() if name.startswith(key)) for key in ("dp", "cp", "tp", "pp")}
    ranks, recompute = prod(sizes.values()), RECOMPUTED.get(plan.recompute)
    if ranks != row.gpus or plan.batch != row.gbs or recompute is None:
        raise AutoparError(
            f"plan {path}: {plan.one_line()}, {plan.batch} rows, is no configuration of row {row.id} ({row.gpus} GPUs, "
            f"{row.gbs} rows). Plan for these, with one recompute for all units."
        )
    layout = replace(
        layout_of(row), dp=sizes["dp"], cp=sizes["cp"], tp=sizes["tp"], pp=sizes["pp"], vp=plan.schedule.virtual,
        zero=plan.zero, microbatches=plan.microbatches, rows=max(1, row.gbs // (sizes["dp"] * plan.microbatches)),
        recompute=recompute, recomputed=0, reshard=True, sequence_parallel=sizes["tp"] > 1,
        schedule=SCHEDULES.get(plan.schedule.name, plan.schedule.name),
    )  # fmt: skip
    return price_layout(row, layout)


def problem(row: Row) -> Row:
    """A run without what its configuration decides and what was measured: equal where the question is."""
    return replace(
        row, id="", kind="pretrain", status="ok", tp=1, pp=1, vp=0, cp=1, dp=row.gpus, mbs=1, grad_accum=0,
        zero_stage=0, recompute=None, sequence_parallel=None, pp_schedule=None, step_time_s=None, peak_mem_gib=None,
        mem_kind="", use=Use(), layout_key="", run=replace(row.run, fsdp_reshard_after_forward=None),
    )  # fmt: skip


def plan_beside(path: str | Path, rows: str | Path, cases: Sequence[str]) -> str:
    """What a plan of ``autopar plan`` takes by the same prices, in a line."""
    found, _ = chosen_rows(rows, cases)
    if len(found) != 1:
        raise AutoparError(f"--plan {path}: is beside one run. Name its row by --case ID.")
    priced_plan = of_plan(path, found[0])
    fits = "fits" if priced_plan.fits else "does not fit"
    return f"{path}: {priced_plan.step_s:.4g} s, {priced_plan.peak_gib:.3g} GiB, {fits}, by the same prices."


def to_json(found: Sequence[Beside]) -> dict[str, Any]:
    """``rows`` and ``space``: what was chosen from."""
    from autopar.pricing.choose import SPACE

    return {"space": SPACE, "rows": [{**asdict(b), "faster": b.faster, "dominates": b.dominates} for b in found]}


def text(found: Sequence[Beside]) -> str:
    """The table, and how many of the published configurations are no faster."""
    from autopar.pricing.choose import SPACE

    lines = grid(
        ("row", "GPUs", "published s", "chosen s", "faster %", "of", "simulated", "what differs", "and its seconds"),
        (
            (
                b.id, b.gpus, b.published_s, b.chosen_s, round(100 * b.faster, 1), b.configurations, b.simulated,
                ", ".join(b.decisions) or "nothing", _reason(b),
            )
            for b in found
        ),
    )  # fmt: skip
    groups: dict[tuple[str, str], list[float]] = {}
    for b in found:
        groups.setdefault((b.source, b.model), []).append(round(100 * b.faster, 1))
    models = grid(
        ("source", "model", "runs", "faster %, least", "median", "most"),
        ((*key, len(own), min(own), median(own), max(own)) for key, own in groups.items()),
    )
    won, outside = sum(b.dominates for b in found), sum(not b.in_space for b in found)
    unfit, far = sum(not b.fits for b in found), sum(b.faster > TELLING for b in found)
    ends = (
        f"{won} of {len(found)} published configurations are no faster than the chosen one; {far} are slower by more "
        f"than {100 * TELLING:.0f} %. {outside} are not in the space, {unfit} are predicted not to fit."
    )
    return f"{lines}\n\n{models}\n\n{ends}\nChosen from: {SPACE}."


def _reason(b: Beside) -> str:
    """The kinds of seconds that differ most, of the fullest rank."""
    told = [(kind, saved) for kind, saved in b.seconds if abs(saved) > 0.01 * b.published_s][:NAMED]
    return ", ".join(f"{kind} {100 * -saved / b.published_s:+.1f} %" for kind, saved in told)


__all__ = ["Beside", "beside", "of_plan", "plan_beside", "problem", "text", "to_json"]
