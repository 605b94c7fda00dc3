"""The benchmark harness: one registry, one row format. ``autopar bench NAME`` runs one; see ``docs/benchmarks.md``.

A benchmark is a function from case names to rows. Speeds are ratios of runs of one launch, in turns, because absolute
times of a shared machine mean little.
"""

from __future__ import annotations

from autopar.bench.rows import BENCHES, Row, bench, run, table

__all__ = ["BENCHES", "Row", "bench", "run", "table"]
