"""Further public architectures (`further_models.py`) under the solver's own plan and tp=2 on 2 ranks.

The captured graph is held against eager, and each plan, all its ranks in one process, against one process in float64.
Prints a row a model; ``--write`` puts them into docs/models.md. Exit code 1 where a plan is not equal, or a model is
refused. ``--models opt,beit`` and ``--minutes 10`` run a part; ``--ranks`` runs plans on real ranks (`autopar.verify`).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.runtime.pool import RankPool
from autopar.verify import Subject, VerifyResult, verify_many

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import further_models  # noqa: E402
import ops  # noqa: E402
from stacked_judge import StackedJudge  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PLANS: tuple[dict[str, int], ...] = ({}, {"tp": 2})
CLUSTER = Cluster.local(ranks=2)
HEAD = """# Further public models

Unmodified classes of transformers and timm that no rule was written for, tiny, with random weights. The captured graph
is held against eager; the solver's own plan and tp=2 for 2 ranks, run in one process, against one process in float64
by the definition of `design.md` section 9. Made by `make exact-further`.

| model | own plan | tp=2 | tp=2 takes off a rank, of FLOPs | not equal, or refused |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """Of one model: what each of `PLANS` came to."""

    name: str
    said: tuple[str, ...]
    share: float | None = None
    why: str = ""

    def markdown(self) -> str:
        """A row of the page."""
        share = "" if self.share is None else f"{self.share:.0%}"
        return f"| {self.name} | {' | '.join(self.said)} | {share} | {' '.join(self.why.replace('|', '/').split())} |"


def stacked(name: str) -> Row:
    """All ranks in one process."""
    model, args, kwargs = further_models.make(name)
    said, why, share = list[str](), list[str](), None
    try:
        judge = StackedJudge(model, args, kwargs)
        judge.eager()
    except Exception as error:  # whatever it is, the other models are still run
        return Row(name, ("",) * len(PLANS), why=f"{type(error).__name__}: {error}"[:300])
    for pins in PLANS:
        try:
            planned = plan_training(judge.captured, Pins.parse(pins), CLUSTER, {})
            judge.along(planned.plan)
            said.append(f"equal: {planned.plan.one_line().split(' on ')[0]}")
            if "tp" in pins:
                share = divided(planned.plan, planned.prepared)["tp"].flops
        except Exception as error:
            said.append("not equal" if isinstance(error, AssertionError) else "refused")
            why.append(f"{pins}: {type(error).__name__}: {error}"[:300])
    return Row(name, tuple(said), share, "; ".join(why))


def on_ranks(name: str, pool: RankPool) -> Row:
    """On real ranks, in float64 and float32."""
    spec = ModelSpec(f"{Path(further_models.__file__)}:make", {"name": name})
    try:
        subject = Subject.of(spec, None)
    except AutoparError as error:
        return Row(name, ("",) * len(PLANS), why=f"refused: {error}"[:300])
    results = verify_many(spec, 2, [Pins.parse(pins) for pins in PLANS], pool=pool, subject=subject)
    wrong = [ops.complaint(pins, result) for pins, result in zip(PLANS, results, strict=True)]
    said = [
        f"equal: {r.plan.split(' on ')[0]}" if not w and isinstance(r, VerifyResult) else "no"
        for r, w in zip(results, wrong)
    ]
    shares = results[-1].divided.get("tp") if isinstance(results[-1], VerifyResult) else None
    return Row(name, tuple(said), shares.flops if shares else None, "; ".join(w for w in wrong if w))


def page(rows: Sequence[Row]) -> str:
    """docs/models.md with these rows; those of models that did not run stay."""
    known = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    found = {line.split("|")[1].strip(): line for line in known if line.startswith("| ")}
    found |= {row.name: row.markdown() for row in rows}
    lines = [found[name] for name in further_models.MODELS if name in found]
    equal = sum(line.endswith("|  |") for line in lines)
    return HEAD + "\n".join(lines) + f"\n\n{equal} of {len(lines)} models are equal under both plans.\n"


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(further_models.MODELS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no model after so long")
    parser.add_argument("--ranks", action="store_true", help="run the plans on real ranks")
    parser.add_argument("--write", action="store_true", help="make docs/models.md of the rows")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, rows, left = time.perf_counter(), list[Row](), list[str]()
    with RankPool(2, timeout=ops.TIMEOUT) if options.ranks else nullcontext() as pool:
        for name in options.models.split(","):
            late = time.perf_counter() - started > 60 * options.minutes
            if late or (name.startswith("timm/") and not ops._has("timm")):
                left.append(name)
                continue
            rows.append(stacked(name) if pool is None else on_ranks(name, pool))
            print(f"{'WRONG' if rows[-1].why else 'equal'} {rows[-1].markdown()}", flush=True)
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    print(f"{sum(not r.why for r in rows)} of {len(rows)} models are equal under both plans")
    print(f"{(time.perf_counter() - started) / 60:.0f} minutes" + (f"; left out: {', '.join(left)}" if left else ""))
    return 1 if any(r.why for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
