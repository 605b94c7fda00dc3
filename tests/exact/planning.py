"""Planning now against planning at another commit, in one run: rounds by turns, CPU seconds, the ratio of medians.

``python tests/exact/planning.py --against REV`` plans Hugging Face's Llama 3 8B on 64 H100s with both and ends with
exit code 1 where the ratio is over ``--most``. ``--case`` takes other cases of ``autopar bench planner``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
CASE = "hf llama-3-8b on 8 nodes"


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with the repository at a commit, taken away at the end."""
    with tempfile.TemporaryDirectory(prefix="autopar-planning-") as folder:
        place = Path(folder) / "repository"
        subprocess.run(["git", "-C", HERE, "worktree", "add", "-q", "--detach", place, revision], check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "-C", HERE, "worktree", "remove", "--force", place], check=True)


def planned(repository: Path, case: str) -> dict[str, Any]:
    """One row of ``autopar bench planner``."""
    command = [sys.executable, "-m", "autopar", "bench", "planner", "--case", case, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)["rows"][0]["figures"]
    if "error" in figures:
        raise SystemExit(f"{repository}: {figures['error']}")
    return figures


def main() -> int:
    """Print every round and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", required=True, metavar="REV", help="the commit to compare with")
    parser.add_argument("--case", default=CASE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=float, default=1.1, help="the ratio that is still right")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"before": [], "now": []}
    with checkout(options.against) as before:
        for _ in range(options.rounds):
            for name, repository in (("before", before), ("now", HERE)):
                found = planned(repository, options.case)
                seconds[name].append(found["cpu_s"])
                print(f"{name:6s} {found['cpu_s']:.1f} CPU s, {found['total_s']:.1f} s, gap {found['gap']}", flush=True)
    ratio = statistics.median(seconds["now"]) / statistics.median(seconds["before"])
    print(f"{options.case}: {ratio:.3f} of the CPU seconds at {options.against} (at most {options.most})")
    return 1 if ratio > options.most else 0


if __name__ == "__main__":
    sys.exit(main())
