"""Tensors in a file: what `verify` keeps of many runs, so that memory holds one tensor at a time.

>>> import tempfile, torch
>>> with tempfile.TemporaryDirectory() as folder:
...     kept = store(Path(folder) / "run", [("w", torch.tensor([1.0, 2.0])), ("b", None)])
...     list(kept), kept["w"], kept["b"]
(['w', 'b'], tensor([1., 2.]), None)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Stored(Mapping[str, Tensor | None]):
    """The tensors that `store` wrote, in their order, each read anew when asked for. Pickles as the file's name."""

    def __init__(self, path: Path, index: Mapping[str, tuple[int, torch.dtype, tuple[int, ...]] | None]) -> None:
        self._path, self._index = path, index

    def __getitem__(self, name: str) -> Tensor | None:
        found = self._index[name]
        if found is None:
            return None
        offset, dtype, shape = found
        tensor = torch.empty(shape, dtype=dtype)
        with self._path.open("rb") as file:
            file.seek(offset)
            file.readinto(_bytes(tensor))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def store(path: Path, named: Iterable[tuple[str, Tensor | None]]) -> Stored:
    """Writes the tensors one after the other to ``path``, a new file or an old one that is written over."""
    index: dict[str, tuple[int, torch.dtype, tuple[int, ...]] | None] = {}
    with path.open("wb") as file:
        for name, tensor in named:
            index[name] = None
            if tensor is not None:
                here = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                index[name] = file.tell(), here.dtype, tuple(here.shape)
                file.write(_bytes(here))
    return Stored(path, index)


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
