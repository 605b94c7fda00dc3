"""The whole model as safetensors files in the layout of Hugging Face, written a tensor at a time.

Rank 0 writes; it is sent the pieces of a tensor when its turn comes, so that it holds no more than one whole, and the
other ranks none. The header of a file follows from shapes alone. A tied weight stands once, under its first name; the
header says which other names it has, as that of `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.whole import on_rank_0, room_for
from autopar.weights import DTYPES

WORDS = {dtype: word for word, dtype in DTYPES.items()}
ALIGNED = 8  # bytes; a header ends so
SHARD = 5 * 10**9  # bytes of one file, as Hugging Face has it
INDEX = "model.safetensors.index.json"


def save_weights(model: nn.Module, folder: str | os.PathLike[str], shard_bytes: int = SHARD) -> None:
    """Write parameters and persistent buffers into ``folder``, which is made: ``model.safetensors``, or with more than
    ``shard_bytes`` several and their index. Earlier ones there are replaced. Collective.

    ``model``: a `Parallel`, or a plain module. Raises AutoparError, on every rank, where rank 0 cannot write.
    """
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    first: dict[int, str] = {}
    aliases = {name: first[id(t)] for name, t in state.items() if first.setdefault(id(t), name) != name}
    named = {name: t for name, t in state.items() if name not in aliases}
    for name, tensor in named.items():
        if tensor.dtype not in WORDS:
            raise AutoparError(f"save_weights: {name} is {tensor.dtype}, which safetensors has not. Cast it.")
    shards = list(_shards(named, shard_bytes))
    files = [_file(i, len(shards)) for i in range(len(shards))]
    writes = not dist.is_initialized() or dist.get_rank() == 0
    failure = _replace(Path(folder)) if writes else None
    for file, shard in zip(files, shards, strict=True):
        target = Path(folder) / file if writes and failure is None else None
        failure = _write(target, shard, {a: name for a, name in aliases.items() if name in shard}) or failure
    if len(files) > 1 and writes and failure is None:
        failure = _index(Path(folder), files, shards)
    said = [failure]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise AutoparError(f"save_weights {folder}: rank 0 cannot write there ({said[0]}). Name another folder.")


def _shards(named: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, as many together as ``most`` bytes take, and at least one."""
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in named.items():
        size = tensor.numel() * tensor.dtype.itemsize
        if shard and held + size > most:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += size
    yield shard


def _file(i: int, n: int) -> str:
    """
    >>> _file(0, 1), _file(1, 3)
    ('model.safetensors', 'model-00002-of-00003.safetensors')
    """
    return "model.safetensors" if n == 1 else f"model-{i + 1:05d}-of-{n:05d}.safetensors"


def _replace(folder: Path) -> str | None:
    """Make the folder and take away what an earlier call left, which a reader might prefer; or why that failed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in [folder / "model.safetensors", folder / INDEX, *folder.glob("model-*-of-*.safetensors")]:
            old.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _index(folder: Path, files: Sequence[str], shards: Sequence[Mapping[str, Tensor]]) -> str | None:
    """Say which file has which tensor; or why that failed."""
    total = sum(t.numel() * t.dtype.itemsize for shard in shards for t in shard.values())
    homes = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=2, sort_keys=True)
    try:
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _write(path: Path | None, shard: Mapping[str, Tensor], aliases: Mapping[str, str]) -> str | None:
    """One file, or (None) this rank's part in gathering it; why it failed, once all is gathered."""
    room = room_for(shard.values())
    wholes = (on_rank_0(t, room) for t in shard.values())
    try:
        if path is not None:
            with path.open("wb") as file:
                file.write(_header(shard, aliases))
                for whole in wholes:
                    assert whole is not None
                    file.write(whole.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().data)
                    del whole  # before the next is gathered
    except OSError as error:
        for _ in wholes:  # the other ranks gather the rest
            pass
        return error.strerror or str(error)
    for _ in wholes:
        pass
    return None


def _header(shard: Mapping[str, Tensor], aliases: Mapping[str, str]) -> bytes:
    """Its length, and JSON that says where in the file each tensor lies."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **aliases}}
    at = 0
    for name, tensor in shard.items():
        end = at + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {"dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


__all__ = ["save_weights"]
