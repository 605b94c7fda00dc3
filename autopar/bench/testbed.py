"""The chosen plan beside others on a cluster of two link tiers: hosts of this machine, with links of a given rate.

A cell is a workload at a rate on hosts x ranks. ``regret`` is how much slower the chosen plan is than the fastest that
ran; a cell is ``judged`` where links are shaped or every rank has a core of its own, else ranks wait for cores.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from autopar.bench.hosts import Hosts
from autopar.bench.regret import WORKLOADS, Ran, regret
from autopar.bench.rows import Figure, bench, chosen

Json = dict[str, Any]
TIMEOUT = 3600.0  # seconds that all workloads may take at one rate


@bench("testbed")
def on_hosts(
    cases: Sequence[str], hosts: int = 2, ranks: int = 2, rates: Sequence[str] = ("200mbit",)
) -> Iterator[tuple[str, dict[str, Figure], list[tuple[str, float, float]]]]:
    """Regret, and the rank correlation of predicted and measured seconds, of each workload at each rate."""
    names = chosen(cases, WORKLOADS, "testbed")
    chip: Json | None = None  # the same at every rate
    for rate in rates:
        ran, chip = _measured(names, hosts, ranks, rate, chip)
        for name, plans in ran.items():
            found = regret(plans)
            figures: dict[str, Figure] = {"workload": name, "rate": rate, "ranks": f"{hosts}x{ranks}"}
            figures |= asdict(found)
            figures["judged"] = rate != "none" or hosts * ranks <= (os.cpu_count() or 1)
            points = [(plan.plan, plan.predicted, float(np.median(plan.seconds))) for plan in plans]
            yield f"{name}, {rate}, {hosts}x{ranks}", figures, points


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Over the judged cells: median and 90th percentile of the regret, median of the rank correlation.

    >>> summary([{"judged": True, "regret": 0.01, "spearman": 0.9}, {"judged": False, "regret": 1.0, "spearman": 0.0}])
    {'median_regret': 0.01, 'p90_regret': 0.01, 'median_spearman': 0.9}
    """
    judged = [cell for cell in cells if cell["judged"]]
    if not judged:
        return dict.fromkeys(("median_regret", "p90_regret", "median_spearman"))
    regrets = [cell["regret"] for cell in judged]
    ranked = [cell["spearman"] for cell in judged if cell["spearman"] is not None]
    return {
        "median_regret": float(np.median(regrets)),
        "p90_regret": float(np.quantile(regrets, 0.9)),
        "median_spearman": float(np.median(ranked)) if ranked else None,
    }


def _measured(
    names: Sequence[str], hosts: int, ranks: int, rate: str, chip: Json | None
) -> tuple[dict[str, list[Ran]], Json]:
    """The plans of every workload, and what the profile says of a rank."""
    with Hosts(hosts, ranks, rate) as made, tempfile.TemporaryDirectory(prefix="autopar-testbed-") as folder:
        spec = Path(folder) / "spec.json"
        spec.write_text(json.dumps({"cases": list(names), "chip": chip}))
        printed = made.run(["-m", "autopar.bench.regret", str(spec)], TIMEOUT)
    found = json.loads(printed.strip().splitlines()[-1])
    ran = {name: [Ran(**plan) for plan in plans] for name, plans in found["workloads"].items()}
    return ran, found["cluster"]["chip"]
