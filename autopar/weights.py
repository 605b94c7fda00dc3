"""Weights from checkpoints of a model alone: every rank reads the slices that it owns.

A source says which tensors it has (`Entry`) and reads runs of one. Names are matched once for the whole checkpoint: as
they are, or with the prefix of the model's base added or taken off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_state

from autopar.errors import AutoparError
from autopar.runtime.parameters import is_here, local, runs_of
from autopar.runtime.runs import CHUNK, Runs

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class Loaded(NamedTuple):
    """What a checkpoint had not, and had besides, as ``load_state_dict`` names it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: one that torch has not


class Source(Protocol):
    """An opened checkpoint. ``read`` fills the placed tensors, given by the checkpoint's names."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def read(self, into: Mapping[str, Tensor]) -> None: ...


def read_weights(path: str | os.PathLike[str], names: nn.Module, base: str, strict: bool) -> Loaded:
    """Fill the tensors of ``names``, which `autopar.runtime.parameters.place` made; see `Parallel.load_weights`.

    ``base``: the prefix under which a Hugging Face model has its base model, or "".
    """
    source = opened(Path(path))
    own = {name: t for name, t in names.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    rename = best_renaming(source.entries, own, base)
    theirs = {name: key for key in source.entries for name in [rename(key)] if name is not None}
    found = {name: theirs[name] for name in own if name in theirs}
    filled = {id(own[name]) for name in found}
    missing = [name for name, tensor in own.items() if id(tensor) not in filled]
    computed = {name for name, _ in names.named_buffers()} - own.keys()
    unexpected = [key for name, key in theirs.items() if name not in own and name not in computed]
    if strict and (missing or unexpected):
        parts = [f"it has no {some(missing)}"] * bool(missing) + [f"the model has no {some(unexpected)}"] * bool(
            unexpected
        )
        raise AutoparError(f"load_weights {path}: {', and '.join(parts)}. Name its checkpoint, or say strict=False.")
    if not found:
        raise AutoparError(f"load_weights {path}: has nothing of this model (it has {some(list(source.entries))}).")
    for name, key in found.items():
        _check(path, name, own[name], source.entries[key], strict)
    first = {id(own[name]): name for name in reversed(found)}  # a tied tensor is read once
    source.read({found[name]: own[name] for name in first.values()})
    return Loaded(missing, unexpected)


def opened(path: Path) -> Source:
    """What lies at ``path``. Raises AutoparError where it is no checkpoint that can be read in slices."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return Safetensors([path])
        raise AutoparError(
            f"load_weights {path}: is no .safetensors file. Convert it with safetensors.torch.save_file."
        )
    if (path / ".metadata").is_file():
        return Distributed(path)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise AutoparError(f"load_weights {index}: is no index of a checkpoint ({error}).") from error
        lost = [file for file in files if not (path / file).is_file()]
        if lost:
            raise AutoparError(f"load_weights {path}: its index names {some(lost)}, which is not there. Download it.")
        return Safetensors([path / file for file in files])
    if (path / "model.safetensors").is_file():
        return Safetensors([path / "model.safetensors"])
    if not path.exists():
        raise AutoparError(f"load_weights {path}: there is no such file or folder.")
    pickled = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    why = f" ({pickled[0]} cannot be read in slices: save it as safetensors)" if pickled else ""
    raise AutoparError(
        f"load_weights {path}: has no model.safetensors, no index of several, and no .metadata of "
        f"torch.distributed.checkpoint{why}."
    )


class Safetensors:
    """One or several safetensors files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.homes: dict[str, Path] = {}
        self._entries: dict[str, Entry] = {}
        for file in files:
            with _open(file) as opened:
                for key in opened.keys():  # noqa: SIM118  it is no mapping
                    part = opened.get_slice(key)
                    self.homes[key] = file
                    self._entries[key] = Entry(tuple(part.get_shape()), DTYPES.get(part.get_dtype()))

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def read(self, into: Mapping[str, Tensor]) -> None:
        """File by file, some megabytes at a time."""
        into = {key: tensor for key, tensor in into.items() if is_here(tensor)}
        for file in dict.fromkeys(self.homes[key] for key in into):
            with _open(file) as opened:
                for key, tensor in into.items():
                    if self.homes[key] == file:
                        part = opened.get_slice(key)
                        for theirs, own in _slabs(runs_of(tensor), tensor.dtype.itemsize):
                            local(tensor.detach())[own] = part[theirs].to(tensor.device)


class Distributed:
    """A folder of torch.distributed.checkpoint: a state dict alone, or one under ``model``."""

    def __init__(self, path: Path) -> None:
        self.reader = FileSystemReader(path)
        try:
            metadata = self.reader.read_metadata()
        except Exception as error:
            raise AutoparError(f"load_weights {path}: its .metadata cannot be read ({error}).") from error
        paths = {
            key: metadata.planner_data.get(key, (key,)) if metadata.planner_data else (key,)
            for key in metadata.state_dict_metadata
        }
        under = any(where[0] == "model" and len(where) == 2 for where in paths.values())
        self.keys: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        for key, found in metadata.state_dict_metadata.items():
            where = paths[key]
            if isinstance(found, TensorStorageMetadata) and (not under or where[0] == "model"):
                name = str(where[-1]) if under or len(where) == 1 else key
                self.keys[name] = key
                self._entries[name] = Entry(tuple(found.size), found.properties.dtype)

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def read(self, into: Mapping[str, Tensor]) -> None:
        """All at once; what has another dtype, one by one."""
        same = {self.keys[n]: t.detach() for n, t in into.items() if t.dtype == self.entries[n].dtype}
        self._read(same)
        for name, tensor in into.items():
            if self.keys[name] not in same:
                other = torch.empty_like(tensor.detach(), dtype=self.entries[name].dtype)
                self._read({self.keys[name]: other})
                local(tensor.detach()).copy_(local(other))

    def _read(self, template: dict[str, Any]) -> None:
        if not template:
            return
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            read_state(template, storage_reader=self.reader, planner=planner, no_dist=not dist.is_initialized())
        except (CheckpointException, OSError) as error:
            said = " ".join(str(error).split())[:200]
            raise AutoparError(
                f"load_weights {self.reader.path}: cannot be read ({said}). Look at the folder."
            ) from error


def best_renaming(keys: Mapping[str, object], own: Mapping[str, object], base: str) -> Callable[[str], str | None]:
    """How names of the checkpoint become the model's: of the ways there are, the one that finds most of them.

    >>> rename = best_renaming({"layer.weight": 0}, {"bert.layer.weight": 0, "head.weight": 0}, "bert")
    >>> rename("layer.weight")
    'bert.layer.weight'
    """
    prefixes = [p for p in (base, "model", "module") if p]
    ways: list[Callable[[str], str | None]] = [lambda key: key]
    ways += [lambda key, p=p: f"{p}.{key}" for p in prefixes]  # type: ignore[misc]
    ways += [lambda key, p=p: key.removeprefix(f"{p}.") for p in prefixes]  # type: ignore[misc]
    return max(ways, key=lambda way: sum(way(key) in own for key in keys))


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _check(path: str | os.PathLike[str], name: str, own: Tensor, entry: Entry, strict: bool) -> None:
    if entry.shape != tuple(own.shape):
        raise AutoparError(f"load_weights {path}: {name} has shape {entry.shape} there, {tuple(own.shape)} here.")
    if entry.dtype is None or (strict and entry.dtype != own.dtype):
        raise AutoparError(
            f"load_weights {path}: {name} is {entry.dtype or 'of a dtype that torch has not'} there, {own.dtype} here. "
            "Build the model in that dtype, or say strict=False to cast."
        )


def _slabs(runs: Runs, itemsize: int) -> Iterator[tuple[Any, Any]]:
    """Indices (there, here) of parts of at most `CHUNK` bytes; one run a dim."""
    bounds = [run for (run,) in runs]
    if not bounds:
        yield ..., ...
        return
    (start, length), rest = bounds[0], tuple(slice(s, s + n) for s, n in bounds[1:])
    row = itemsize
    for _, n in bounds[1:]:
        row *= n
    step = max(1, CHUNK // max(row, 1))
    for at in range(0, length, step):
        n = min(step, length - at)
        yield (slice(start + at, start + at + n), *rest), slice(at, at + n)


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise AutoparError(f"load_weights {file}: needs safetensors. Install autopar[safetensors].") from None
    try:
        return safe_open(file, "pt")
    except Exception as error:
        raise AutoparError(f"load_weights {file}: is no safetensors file that can be read ({error}).") from error
