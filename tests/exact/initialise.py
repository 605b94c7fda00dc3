"""A model of a billion parameters gets its first values on 4 ranks: equal to one process, and in how many bytes.

``make exact-init``. For the reference Llama (deferred_init, then init_weights on plain meta) and Hugging Face's (whose
constructor draws every linear twice) each rank's peak over what it holds in the end may be at most 1.3 times, measured
by the kernel as anonymous memory, captured graphs and buffers of collectives included; a hash of every piece equals
that of the same piece in one process. Then the weights are read from a safetensors file under the same limit. Ends with
exit code 1 where a row is wrong. ``--size tiny`` is a check of the script alone.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import Cluster, Figure
from autopar.initialise import reset_parameters
from autopar.models.llama import SIZES, Llama
from autopar.runtime.parameters import local, runs_of
from autopar.runtime.pool import RankPool
from autopar.runtime.runs import Runs, take

RANKS, SEED, LIMIT = 4, 7, 1.3
TIMEOUT = 900.0
Pieces = dict[str, tuple[Runs, str]]  # by name: which piece, and its hash


@dataclass(frozen=True)
class Row:
    """What one rank did: bytes that it holds in the end, the most it held above what it had before, seconds."""

    rest: int
    peak: int
    seconds: float
    pieces: Pieces


ROWS = (
    ("reference", "deferred_init", "dp=4 zero=3"),
    ("hf", "deferred_init", "dp=2 tp=2 zero=3"),
    ("hf", "init_weights", "dp=4 zero=3"),
    ("hf", "load_weights", "dp=2 tp=2 zero=3"),
)


def factory(name: str, size: str) -> Callable[[], nn.Module]:
    """``reference`` or ``hf``."""
    config = SIZES[size]
    if name == "reference":
        return lambda: Llama(config)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": config.vocabulary, "hidden_size": config.width}
    sizes |= {"intermediate_size": config.hidden, "num_hidden_layers": config.layers, "max_position_embeddings": 128}
    sizes |= {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}
    return lambda: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=config.tied))


def example(name: str, vocabulary: int) -> dict[str, Any]:
    """Inputs, which only capture looks at."""
    ids = torch.randint(vocabulary, (4, 8), generator=torch.Generator().manual_seed(0))
    return {"kwargs": {"input_ids": ids, "labels": ids}} if name == "hf" else {"args": (ids, ids)}


def anonymous() -> int:
    """Bytes of this process that are in memory and in no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/self/status")


@contextmanager
def watched() -> Iterator[list[int]]:
    """The most anonymous memory at any time within, in a list of one, looked at every few milliseconds."""
    most, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.003):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
        most[0] = max(most[0], anonymous())


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy() if flat.numel() else b"", digest_size=16).hexdigest()


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def on_ranks(rank: int, name: str, size: str, way: str, pins: str, path: str) -> Row:
    """First values by ``way``: deferred_init, init_weights or load_weights."""
    make, inputs = factory(name, size), example(name, SIZES[size].vocabulary)
    cluster = Cluster.local(RANKS)
    cluster = replace(cluster, chip=replace(cluster.chip, memory=Figure(1 << 40, "no step is run")))
    small = autopar.deferred_init(factory(name, "tiny"))  # what is imported and cached once does not count
    autopar.compile(small, cluster, **example(name, 256), pins=pins)
    before, started = anonymous(), time.perf_counter()
    with watched() as most:
        if way == "deferred_init":
            model = autopar.deferred_init(make, seed=SEED)
        else:
            with torch.device("meta"):
                model = make()
        parallel = autopar.compile(model, cluster, **inputs, pins=pins)
        if way == "init_weights":
            parallel.init_weights(seed=SEED)
        elif way == "load_weights":
            parallel.load_weights(path)
    seconds = time.perf_counter() - started
    tensors = named(parallel)
    rest = sum(local(t).untyped_storage().nbytes() for t in tensors.values())
    pieces = {n: (runs_of(t), digest(local(t))) for n, t in tensors.items()}
    return Row(rest, most[0] - before, seconds, pieces)


def alone(rank: int, name: str, size: str, way: str, every: list[Pieces], path: str) -> list[str]:
    """One process: whose pieces are other ones, by rank and name."""
    torch.manual_seed(SEED)
    model = factory(name, size)()
    if way == "init_weights":
        torch.manual_seed(SEED)
        reset_parameters(model)
    tensors = named(model)
    if path:
        from safetensors.torch import save_file

        save_file({n: t.detach() for n, t in model.named_parameters()}, path)
    wrong = [n for pieces in every for n in tensors.keys() ^ pieces.keys()]
    for r, pieces in enumerate(every):
        wrong += [f"rank {r} {n}" for n, (runs, hashed) in pieces.items() if digest(take(tensors[n], runs)) != hashed]
    return wrong


def main() -> int:
    """Run the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="llama-3.2-1b", choices=tuple(SIZES))
    parser.add_argument("--rows", default="0,1,2,3", help="which of the four")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        for name, way, pins in (ROWS[int(i)] for i in options.rows.split(",")):
            if way == "load_weights":
                with RankPool(1, timeout=TIMEOUT) as pool:
                    pool.run(alone, name, options.size, way, [], path)
            with RankPool(RANKS, timeout=TIMEOUT) as pool:
                rows = pool.run(on_ranks, name, options.size, way, pins, path)
            with RankPool(1, timeout=TIMEOUT) as pool:
                (wrong,) = pool.run(alone, name, options.size, way, [row.pieces for row in rows], "")
            worst = max(row.peak / row.rest for row in rows)
            bad = bool(wrong) or (worst > LIMIT and options.size != "tiny")
            failures += bad
            held = " ".join(f"{row.rest / 1e6:,.0f}" for row in rows)
            print(
                f"{'WRONG' if bad else 'equal'} {name:9s} {way:13s} {pins:16s} {len(rows[0].pieces)} tensors, rests "
                f"{held} MB, peak {worst:.3f} of it, {max(row.seconds for row in rows):.0f} s"
                f"{': ' + ', '.join(wrong[:3]) if wrong else ''}",
                flush=True,
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
