"""``autopar profile``: measure the ranks that it is started on, and write a cluster file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.flags import DONE, write_file
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

TIMEOUT = 1800.0  # seconds that the ranks may take
WHAT = """\
Measure matmuls by shape, attention by length, memory-bound kernels and collectives by bytes, with all ranks busy at
once, and write them as a cluster file (a few minutes). Under torchrun on the ranks that it started (NCCL where each has
a GPU, else gloo); else on N CPU processes of this machine."""


def add(commands: _SubParsersAction[ArgumentParser]) -> None:
    """The command and its flags."""
    parser = commands.add_parser(
        "profile", help="measure this machine or cluster", description=WHAT, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="CPU processes to start (default: one a core)")
    parser.add_argument("--out", metavar="FILE", help="the cluster file to write (default: profiled-N.json)")
    parser.add_argument("--json", action="store_true", help="print the cluster file too, and nothing else")
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> tuple[str, int]:
    import os

    from autopar.cluster import from_json
    from autopar.runtime.mesh import join

    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if torchrun and options.ranks is not None:
        raise AutoparError(f"--ranks {options.ranks}: torchrun says how many ranks there are. Leave it out.")
    rank, ranks = join() if torchrun else (0, options.ranks if options.ranks is not None else os.cpu_count() or 1)
    if ranks < 1:
        raise AutoparError(f"--ranks {ranks}: is not a number of ranks. Legal: 1 or more.")
    path = Path(options.out or f"profiled-{ranks}.json")
    if path.suffix != ".json" or path.is_dir() or not path.parent.is_dir():
        raise AutoparError(f"--out {path}: not a file in a folder that exists. Name one that ends in .json.")
    found = _here(rank, path.stem) if torchrun else _started(ranks, path.stem)
    if found is None:
        return "", DONE
    cluster = from_json(found, where=str(path))
    text = json.dumps(found, indent=1)
    write_file("out", path, text)
    return text if options.json else f"{path}: {_line(cluster)}", DONE


def _here(rank: int, name: str) -> dict[str, Any] | None:
    from autopar.profiling.measure import measure

    return measure(rank, name)


def _started(ranks: int, name: str) -> dict[str, Any] | None:
    from autopar.profiling.measure import measure
    from autopar.runtime.pool import RankPool

    with RankPool(ranks, timeout=TIMEOUT) as pool:
        return pool.run(measure, name)[0]


def _line(cluster: Any) -> str:
    chip, rate = cluster.chip, cluster.chip.matmul_rate("fp32")
    words = f"{cluster.ranks} rank{'s' * (cluster.ranks != 1)} of {chip.name}, {rate / 1e9:.0f} GFLOP/s in fp32"
    if cluster.ranks > 1:
        latency, bandwidth = cluster.link("all_reduce", cluster.ranks, 1)
        words += f", all-reduce {latency * 1e6:.0f} us and {bandwidth / 1e9:.2f} GB/s"
    return f"{words}, copies {chip.memory_rate / 1e9:.1f} GB/s"
