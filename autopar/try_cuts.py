"""Whether an opaque call may be cut: the whole and its pieces are run on samples, and must agree, gradients included.

What is found so is not proved. Where Python asks whether something holds of a tensor, a piece must have been seen to
answer otherwise than the whole, or nothing is known of what the other way does. Where it reads numbers, or has tensors
whose length depends on values, nobody sees what it decides by them: it is cut only where they are the same for every
row of the sample (the sizes of images, say), and whoever runs a piece holds it to those, and to the truths that no
piece answered otherwise (`Held`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autopar.decisions import READS
from autopar.errors import AutoparError
from autopar.runtime.opaque import Cut

CLOSE = 1e-10  # of the largest value, in float64
SPREADS = (1.0, 8.0, 0.05, 0.0)  # of float operands that are cut: usual, where functions saturate, near zero, zero
SEED = 21

Run = Callable[[Sequence[Tensor]], list[Tensor]]
Site = tuple[str, int, int, bool]  # file, line, place in it, whether a number is read there, or a length
Read = tuple[frozenset[str], frozenset[str]]  # what one run reads at a site: as it is, and for each row
DYNAMIC = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave"}


@dataclass(frozen=True)
class Held:
    """The numbers that a call reads of every row alike, by where it does: what its pieces are exact for."""

    numbers: Mapping[Site, Read]

    @contextmanager
    def checked(self, where: str, rows: int) -> Iterator[None]:
        """Raises AutoparError where what runs inside, on so many rows, has read other numbers."""
        with _Watch(rows) as watch:
            yield
        read = watch.read
        for site, (plain, by_row) in self.numbers.items():
            got = read.get(site, (frozenset(), frozenset()))
            if (plain and got[0] != plain) or (by_row and got[1] != by_row):
                want, have = (_text(plain), _text(got[0])) if plain else (_text(by_row), _text(got[1]))
                raise AutoparError(
                    f"{where}: reads {have} at {Path(site[0]).name}:{site[1]}, at capture {want} of every row (it is "
                    "divided, as all rows were alike). Compile with rows that differ, and each rank calls it whole."
                )


def may_cut(run: Run, cut: Cut, samples: Iterable[Sequence[Tensor]]) -> Held | None:
    """Whether ``run`` on pieces is what it is on the whole, on every sample and variations of it, and for what."""
    seen, crossed = set[Site](), set[Site]()
    numbers = list[dict[Site, Read]]()
    try:
        with torch.random.fork_rng([]):
            for sample in samples:
                for operands in _variations(cut, sample):
                    torch.manual_seed(SEED)
                    if not _agrees(run, cut, operands, seen, crossed, numbers):
                        return None
    except Exception:  # what cannot be run in pieces is not cut
        return None
    if not any(is_number for run in numbers for *_, is_number in run):
        return Held({}) if seen == crossed else None
    return _alike(numbers, crossed)


def _alike(runs: Sequence[dict[Site, Read]], crossed: Collection[Site]) -> Held | None:
    """What all runs read alike, but for truths that were ``crossed``; None where one reads something else, or not."""
    found = dict[Site, Read]()
    for site in dict.fromkeys(site for run in runs for site in run if site not in crossed):
        if not all(site in run for run in runs):
            return None
        plain, by_row = ({run[site][i] for run in runs} for i in range(2))
        if len(plain) > 1 and (len(by_row) > 1 or not all(by_row)):
            return None
        found[site] = (*plain, frozenset()) if len(plain) == 1 else (frozenset(), *by_row)  # type: ignore[assignment]
    return Held(found)


def takes_addends(run: Run, operands: Sequence[Tensor]) -> bool:
    """Whether backward is linear in the gradients of the results, as it is of what autograd differentiates."""
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        results = run(operands)
        for spread in (1e-3, 1.0, 1e3):
            one, other = (_weights(results, spread) for _ in range(2))
            both = [None if a is None or b is None else a + b for a, b in zip(one, other, strict=True)]
            parts = [_gradients(run, operands, one), _gradients(run, operands, other)]
            if not _same(_gradients(run, operands, both), parts, [None] * len(operands)):
                return False
    return True


def _weights(results: Sequence[Tensor], spread: float) -> list[Tensor | None]:
    return [torch.randn_like(r) * spread if r.is_floating_point() else None for r in results]


def _variations(cut: Cut, operands: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Other scales, one row unlike the others, rows in another order, and all rows alike."""

    def of_cut(change: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        return [t if d is None else change(t, d) for t, d in zip(operands, cut.operands, strict=True)]

    for spread in SPREADS:
        yield of_cut(lambda t, d, s=spread: t * s if t.is_floating_point() else t)  # type: ignore[misc]
    for spread in (0.05, 20.0):
        yield of_cut(lambda t, d, s=spread: _first_scaled(t, d, s))  # type: ignore[misc]
    yield of_cut(lambda t, d: t.flip(d))
    yield of_cut(lambda t, d: t.narrow(d, 0, 1).expand_as(t).contiguous())


def _first_scaled(t: Tensor, dim: int, by: float) -> Tensor:
    rest = t.narrow(dim, 1, t.shape[dim] - 1)
    return torch.cat([t.narrow(dim, 0, 1) * by, rest], dim) if t.is_floating_point() else t


def _agrees(
    run: Run,
    cut: Cut,
    operands: Sequence[Tensor],
    seen: set[Site],
    crossed: set[Site],
    numbers: list[dict[Site, Read]],
) -> bool:
    lengths = {t.shape[d] for t, d in zip(operands, cut.operands, strict=True) if d is not None}
    shortest = min(lengths)
    if shortest < 2 or any(n % shortest for n in lengths):
        return False
    with _Watch(shortest) as watch:
        results = run(operands)
    whole = watch.truths
    numbers.append(watch.read)
    weights = _weights(results, 1.0)
    gradients = _gradients(run, operands, weights)
    for first in {1, shortest // 2}:
        shares = (first, shortest - first)
        pieces = [_piece(operands, cut.operands, shortest, at, n) for at, n in zip((0, first), shares)]
        given, grads = [], []
        for piece, at, n in zip(pieces, (0, first), shares):
            with _Watch(n) as watch:
                given.append(run(piece))
            numbers.append(watch.read)
            seen.update(whole, watch.truths)
            crossed.update(s for s in {*whole, *watch.truths} if whole.get(s) != watch.truths.get(s))
            lots = _piece(weights, cut.results, shortest, at, n)
            grads.append(_gradients(run, piece, lots))
        if not _same(results, given, cut.results) or not _same(gradients, grads, cut.operands):
            return False
    return True


def _piece(tensors: Sequence[Any], dims: Sequence[int | None], parts: int, at: int, n: int) -> list[Any]:
    """Of the tensors that are cut, parts ``at`` to ``at + n`` of ``parts``."""
    made: list[Any] = []
    for t, d in zip(tensors, dims, strict=True):
        each = 0 if t is None or d is None else t.shape[d] // parts
        made.append(t if t is None or d is None else t.narrow(d, at * each, n * each))
    return made


def _gradients(run: Run, operands: Sequence[Tensor], weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of a fixed combination of the results, by operand; zeros where there is none."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in operands]
    with torch.enable_grad():
        results = run(leaves)
        passed = [(r, w) for r, w in zip(results, weights, strict=True) if w is not None and r.requires_grad]
        asked = [t for t in leaves if t.requires_grad]
        found = iter(
            torch.autograd.grad([r for r, _ in passed], asked, [w for _, w in passed], allow_unused=True)
            if passed and asked
            else [None] * len(asked)
        )
    made: list[Tensor | None] = []
    for leaf in leaves:
        grad = next(found) if leaf.requires_grad else None
        made.append(torch.zeros_like(leaf) if grad is None and leaf.requires_grad else grad)
    return made


def _same(whole: Sequence[Any], pieces: Sequence[Sequence[Any]], dims: Sequence[int | None]) -> bool:
    """Whether the tensors are those of the pieces, one after the other where a dim is given, else added up."""
    for want, dim, *parts in zip(whole, dims, *pieces, strict=True):
        if want is None:
            continue
        got = torch.cat(parts, dim) if dim is not None else torch.stack(parts).sum(0)
        if got.shape != want.shape:
            return False
        wide = want.detach().double()
        largest = float(wide.abs().nan_to_num().max()) if want.numel() else 0.0
        if not torch.allclose(got.detach().double(), wide, rtol=0.0, atol=CLOSE * largest, equal_nan=True):
            return False
    return True


class _Watch(TorchFunctionMode):
    """Notes where values are read in a run of so many rows, and what was read there: truths, and numbers or lengths."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.truths = rows, dict[Site, list[bool]]()
        self.numbers: dict[Site, Read] = {}

    @property
    def read(self) -> dict[Site, Read]:
        """All that was read."""
        truths = {site: frozenset(map(str, found)) for site, found in self.truths.items()}
        return self.numbers | {site: (found, found) for site, found in truths.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        dynamic = _is_dynamic(name, args)
        if name in READS or dynamic:
            frame = _caller()
            number = dynamic or not isinstance(result, bool)
            site = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti, number
            if number:
                plain, by_row = self.numbers.get(site, (frozenset(), frozenset()))
                one, other = (_lengths if dynamic else _answers)(result, self.rows)
                self.numbers[site] = plain | one, by_row | other
            else:
                self.truths.setdefault(site, []).append(result)
        return result


def _answers(result: Any, rows: int) -> Read:
    """The numbers that were read, of a list those in it; and how many that is for each of the rows."""
    result = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(result, list):
        return frozenset(map(str, result)), frozenset(map(str, result))
    text = str(result)
    each = frozenset([f"{int(text) // rows} a row"]) if text.isdecimal() and int(text) % rows == 0 else frozenset[str]()
    return frozenset([text]), each


def _lengths(result: Any, rows: int) -> Read:
    """The shapes of tensors, and the same with what there is for each of the rows."""
    shapes = [tuple(t.shape) for t in tree_leaves(result) if isinstance(t, Tensor) and t.ndim]
    each = frozenset(f"{s[0] // rows} a row of {s[1:]}" for s in shapes if s[0] % rows == 0)
    return frozenset(map(str, shapes)), each if len(each) == len(set(shapes)) else frozenset()


def _text(read: frozenset[str]) -> str:
    return ", ".join(sorted(read)[:4]) or "nothing"


def _caller() -> FrameType:
    """Where the model's code is, outside of modes and of what torch does in Python for methods of tensors."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" or frame.f_globals["__name__"] in (
        "torch.overrides",
        "torch._tensor",
    ):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def _is_dynamic(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the length of what a function gives depends on values."""
    if name == "__getitem__":
        return any(isinstance(t, Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1]))
    return name in DYNAMIC or (name == "where" and len(args) == 1)
