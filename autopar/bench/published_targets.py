"""What the prices of published rows are to reach, as one table of data. Nothing here is read by the pricing.

>>> [t.label for t in TARGETS][0], TARGETS[0].limit
('step time, H100 bf16 Megatron and NeMo, tier A: median', 0.04)
>>> check(TARGETS[0], [])  # doctest: +ELLIPSIS
Reached(label='step time, ...: median', target='at most 0.04', measured=None, count=0, reached=None)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autopar.bench.published_report import (
    Errors,
    Result,
    Sweep,
    fits,
    memory_errors,
    sweeps,
    time_errors,
    time_errors_of_rows,
)
from autopar.bench.published_rows import Row

Of = Callable[[Row], bool]
Kind = Callable[[Sequence[Result]], Errors | None]
Figure = tuple[float | None, int]  # the figure, None where nothing is measured, and of how many layouts or sweeps


@dataclass(frozen=True)
class Target:
    """``limit``: a fraction that ``figure`` of the rows in ``of`` may not exceed, or with ``at_least`` must reach."""

    label: str
    of: Of
    figure: Callable[[Sequence[Result]], Figure]
    limit: float | None  # None: reported only
    at_least: bool = False


@dataclass(frozen=True)
class Reached:
    """A target in words beside what is measured; ``reached``: None where nothing is, or where it is reported only."""

    label: str
    target: str | None
    measured: float | None
    count: int
    reached: bool | None


def check(target: Target, results: Sequence[Result]) -> Reached:
    """One target against the priced rows."""
    measured, count = target.figure([r for r in results if r.priced and target.of(r.row)])
    reached = None
    if measured is not None and target.limit is not None:
        reached = measured >= target.limit if target.at_least else abs(measured) <= target.limit
    words = None if target.limit is None else f"at {'least' if target.at_least else 'most'} {target.limit:g}"
    return Reached(target.label, words, measured, count, reached)


def _of_errors(kind: Kind, name: str, results: Sequence[Result]) -> Figure:
    found = kind(results)
    return (None, 0) if found is None else (getattr(found, name), found.layouts)


def _of_fits(name: str, results: Sequence[Result]) -> Figure:
    found = fits(results)
    return found.right[name], found.counts[name]


def _of_sweeps(worst: Callable[[Sweep], float | None], lowest: bool, results: Sequence[Result]) -> Figure:
    found = [x for x in map(worst, sweeps(results)) if x is not None]
    return ((min if lowest else max)(found) if found else None), len(found)


def _of(
    *kinds: str, but: str = "-", gpu: str = "", model: str = "", tier: str = "", gpus: Callable[[int], bool] = bool
) -> Of:
    """Rows by framework (``source_kind``), device, model, tier and number of GPUs; fp8 apart."""
    return lambda row: (
        (not kinds or row.run.source_kind in kinds)
        and row.run.source_kind != but
        and gpu in row.gpu
        and model in row.model
        and tier in ("", row.tier)
        and gpus(row.gpus)
        and "fp8" not in row.precision
    )


MEGATRON = ("nemo", "megatron", "nanotron")
A100 = partial(_of, gpu="A100", but="aleph_alpha")
WITHOUT_LIMIT = {"median": None, "p90": None, "bias": None}
ERRORS: tuple[tuple[str, Kind, Of, Mapping[str, float | None]], ...] = (
    (
        "step time, H100 bf16 Megatron and NeMo, tier A",
        time_errors,
        _of(*MEGATRON, gpu="H100", tier="A"),
        {"median": 0.04, "p90": 0.08, "bias": 0.03},
    ),
    (
        "step time, H100 FSDP, tier A",
        time_errors,
        _of("fsdp1", "torchtitan", gpu="H100", tier="A"),
        {"median": 0.06, "p90": 0.16, "bias": 0.04},
    ),
    (
        "step time, A100 without AlephAlpha, tier A",
        time_errors,
        A100(tier="A"),
        {"median": 0.05, "p90": 0.13, "bias": 0.04},
    ),
    (
        "step time, AlephAlpha, tier A",
        time_errors,
        _of("aleph_alpha", tier="A"),
        {"median": 0.12, "p90": 0.25, "bias": None},
    ),
    (
        "step time, H100 bf16 Megatron and NeMo, tier A, each row",
        time_errors_of_rows,
        _of(*MEGATRON, gpu="H100", tier="A"),
        WITHOUT_LIMIT,
    ),
    ("step time, H100 bf16 Megatron and NeMo, every tier", time_errors, _of(*MEGATRON, gpu="H100"), WITHOUT_LIMIT),
    ("step time, A100 without AlephAlpha, every tier", time_errors, A100(), WITHOUT_LIMIT),
    (
        "peak memory, ZeroBubble and torchtitan",
        memory_errors,
        _of("zerobubble", "torchtitan"),
        {"median": 0.03, "worst": 0.10},
    ),
    ("peak memory, nanotron", memory_errors, _of("nanotron"), {"median": 0.12, "worst": None}),
)
FITS = {"all": 0.90, "ran": 0.85, "failed": 0.85}
SPEARMAN = (
    ("AlephAlpha 13B, more than 32 GPUs", _of("aleph_alpha", model="13B", gpus=lambda n: n > 32), 0.92),
    ("AlephAlpha 13B, 32 GPUs", _of("aleph_alpha", model="13B", gpus=lambda n: n == 32), 0.85),
    ("vTrain 18.4B", _of("vtrain", model="18.4B"), 0.82),
)
TARGETS = (
    *(
        Target(f"{group}: {name}", of, partial(_of_errors, kind, name), limit)
        for group, kind, of, limits in ERRORS
        for name, limit in limits.items()
    ),
    *(
        Target(f"fits, AlephAlpha 13B: {name}", _of("aleph_alpha", model="13B"), partial(_of_fits, name), limit, True)
        for name, limit in FITS.items()
    ),
    *(
        Target(f"Spearman, {group}: lowest", of, partial(_of_sweeps, lambda s: s.spearman, True), limit, True)
        for group, of, limit in SPEARMAN
    ),
    Target("regret, every sweep: worst", _of(), partial(_of_sweeps, lambda s: s.regret, False), 0.05),
    Target(
        "place of the fastest measured over the best tenth's last: worst",
        _of(),
        partial(_of_sweeps, lambda s: s.place / s.within, False),
        1.0,
    ),
)
