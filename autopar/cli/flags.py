"""What the commands share: exit codes, the flags of models and clusters, and the cluster that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.cluster import Cluster

DONE, NO, REFUSED, CRASHED, INTERRUPTED = 0, 1, 2, 70, 130
FORM = "path/to/file.py:factory or package.module:factory; the factory returns (model, args, kwargs)"


def common_flags(parser: argparse.ArgumentParser) -> None:
    """Pins, options of the factory, loss, JSON."""
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="fix a part of the plan: tp=2, zero=3, recompute=full",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the factory: layers=4"
    )
    parser.add_argument("--loss", metavar="module:function", help="makes the loss of what the model returns")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def cluster_flags(parser: argparse.ArgumentParser) -> None:
    """The cluster to plan for, and the batch."""
    parser.add_argument("--cluster", metavar="NAME|FILE", help="h100-dgx, a100-dgx, local (default), or a JSON file")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks of the local cluster")
    parser.add_argument(
        "--global-batch", type=int, metavar="B", help="rows of the global batch (default: those of the inputs)"
    )


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the flags name. Raises AutoparError for flags that do not go together."""
    from autopar.cluster import Cluster

    name = options.cluster or "local"
    if name == "local":
        if options.nodes not in (None, 1):
            raise AutoparError(
                f"--nodes {options.nodes}: the local cluster is this machine. Use --ranks, or another --cluster."
            )
        return Cluster.local(options.ranks)
    if options.ranks is not None:
        raise AutoparError(f"--ranks {options.ranks}: the cluster {name} says how many ranks a node has. Use --nodes.")
    return Cluster.load(name, nodes=1 if options.nodes is None else options.nodes)


def check_folder(flag: str, path: str | None) -> None:
    """What cannot be written is refused before anything is computed."""
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise AutoparError(f"--{flag} {path}: not a file in a folder that exists. Name one.")


def write_file(flag: str, path: str | Path, text: str) -> None:
    """The text and a line break into a file that a flag names."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise AutoparError(
            f"--{flag} {path}: cannot be written ({error.strerror or error}). Name another file."
        ) from None
