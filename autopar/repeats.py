"""Blocks of a model that run one after another and do the same: which of them an export can leave out.

What a model does is judged by the calls that it makes at full depth (`record_calls`), never by the looks of its
modules: a block that reads its own number, or the depth, makes other calls where that matters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import nn

from autopar.record_calls import Made, Origin, Record

MANY = 6  # equal blocks; more of them are worth a record of the calls
PERIODS = 8  # blocks after which a pattern may repeat, at most
SAVED = 1 / 3  # of the calls: what leaving blocks out must save at least


@dataclass(frozen=True)
class Repeat:
    """A run of blocks of one list, of which ``removed`` are left out.

    Blocks ``first`` to ``first + period`` and the ``period`` blocks behind them are kept and do the same; those behind
    them that are left out do so too.
    """

    container: str  # FQN of the ModuleList or Sequential
    keys: tuple[str, ...]  # the names of all its blocks
    first: int
    period: int
    removed: int
    scales: tuple[tuple[float, ...], ...] = ()  # per period from ``first`` on: the floats that may differ, in order

    @property
    def gap(self) -> range:
        """The blocks that are left out."""
        start = self.first + 2 * self.period
        return range(start, start + self.removed)

    def name(self, block: int) -> str:
        """The FQN of a block."""
        return f"{self.container}.{self.keys[block]}".lstrip(".")


def may_repeat(model: nn.Module) -> bool:
    """Whether some list of modules has more than `MANY` that look alike: of one class, with parameters of one shape."""
    return any(max(Counter(map(_looks, m.children())).values()) > MANY for _, m in _lists(model))


def repeats_of(model: nn.Module, record: Record) -> tuple[Repeat, ...]:
    """The runs to shorten, by the calls of the whole model; none where that saves little."""
    found = []
    for name, container in _lists(model):
        stretches = _Stretches.of(record, name, tuple(container._modules))
        repeat = None if stretches is None else stretches.longest()
        if stretches is not None and repeat is not None:
            found.append((len(stretches.calls(repeat.gap)), repeat))
    kept: list[Repeat] = []
    for _, repeat in sorted(found, key=lambda pair: -pair[0]):
        if not any(_nested(repeat.container, other.container) for other in kept):
            kept.append(repeat)
    saved = sum(calls for calls, repeat in found if repeat in kept)
    return tuple(kept) if saved >= SAVED * len(record.calls) else ()


def with_scales(record: Record, repeats: Sequence[Repeat]) -> tuple[Repeat, ...]:
    """The same runs with the floats of another record; none where these do not tell where they go."""
    found = []
    for repeat in repeats:
        stretches = _Stretches.of(record, repeat.container, repeat.keys)
        again = stretches.with_scales(repeat) if stretches is not None and stretches.repeats(repeat) else None
        if again is None:
            return ()
        found.append(again)
    return tuple(found)


@contextmanager
def shortened(model: nn.Module, repeats: Sequence[Repeat]) -> Iterator[None]:
    """Inside, the model lacks the blocks that are left out; the others keep their names."""
    with ExitStack() as stack:
        for repeat in repeats:
            container = model.get_submodule(repeat.container)
            whole, gone = container._modules, {repeat.keys[i] for i in repeat.gap}
            stack.callback(container.__dict__.__setitem__, "_modules", whole)
            container.__dict__["_modules"] = {k: m for k, m in whole.items() if k not in gone}
        yield


def agrees(whole: Record, short: Record, repeats: Sequence[Repeat]) -> bool:
    """Whether the whole model calls what the shortened one does, with the calls of the blocks that are kept made again
    in those that are left out, and nothing else."""
    twins, removed = list(range(len(whole.calls))), set[int]()
    regions = list(range(whole.regions))
    for repeat in repeats:
        stretches = _Stretches.of(whole, repeat.container, repeat.keys)
        if stretches is None or not stretches.repeats(repeat):
            return False
        gap, again = stretches.calls(repeat.gap), stretches.calls(repeat.gap[-repeat.period :])
        source = stretches.calls(range(repeat.gap.start - repeat.period, repeat.gap.start))
        if any(o[0] in source for c in whole.calls[gap.stop :] for o in c.operands if isinstance(o[0], int)):
            return False  # one could not tell these from operands in the last block that is left out
        removed |= set(gap)
        for i in gap:
            twins[i] = source[i - again.start] if i in again else -1
        start, stop = stretches.entered[gap.start], stretches.entered[gap.stop]
        regions = [to if at < start else to - (stop - start) for at, to in enumerate(regions)]
    kept_calls = [i for i in range(len(twins)) if i not in removed]
    number = {i: n for n, i in enumerate(kept_calls)}
    at = [number.get(twin, -1) for twin in twins]
    kept = [whole.calls[i] for i in kept_calls]
    if len(kept) != len(short.calls) or not _same_outputs(whole, short):
        return False
    return all(
        a.what == b.what
        and a.module == b.module
        and list(map(repr, a.scales)) == list(map(repr, b.scales))
        and (None if a.region is None else regions[a.region]) == b.region
        and tuple((at[o[0]], o[1]) if isinstance(o[0], int) else o for o in a.operands) == b.operands
        for a, b in zip(kept, short.calls, strict=True)
    )


def _same_outputs(whole: Record, short: Record) -> bool:
    a, b = whole.outputs, short.outputs
    assert a is not None and b is not None
    return a.tree == b.tree and a.loss_leaf == b.loss_leaf and a.constants.keys() == b.constants.keys()


@dataclass(frozen=True)
class _Stretches:
    """The calls of a record by the block of a list that they belong to: from the first in a block up to the first in
    the next one, which holds what its owner does between the two. The last block has no end of its own."""

    record: Record
    container: str
    keys: tuple[str, ...]
    starts: tuple[int, ...]  # the first call of each block
    entered: tuple[int, ...]  # how many checkpointed regions were entered before a call

    @classmethod
    def of(cls, record: Record, container: str, keys: tuple[str, ...]) -> _Stretches | None:
        """None unless each block runs once, in the order of the list."""
        prefix = f"{container}." if container else ""
        number = {k: i for i, k in enumerate(keys)}
        starts: list[int] = []
        for i, call in enumerate(record.calls):
            if call.module.startswith(prefix):
                block = number.get(call.module[len(prefix) :].partition(".")[0])
                if block == len(starts):
                    starts.append(i)
                elif block is not None and block != len(starts) - 1:
                    return None
        entered = accumulate((0 if c.region is None else c.region + 1 for c in record.calls), max, initial=0)
        return cls(record, container, keys, tuple(starts), tuple(entered)) if len(starts) == len(keys) else None

    def calls(self, blocks: range) -> range:
        """The numbers of the calls of neighbouring blocks, the last one of the list not among them."""
        return range(self.starts[blocks.start], self.starts[blocks.stop])

    def longest(self) -> Repeat | None:
        """The run that leaves out most blocks: of blocks with the same floats, else of blocks that differ in these."""
        return self._longest(strict=True) or self._longest(strict=False)

    def _longest(self, strict: bool) -> Repeat | None:
        best: Repeat | None = None
        blocks = len(self.keys) - 1
        for period in range(1, min(PERIODS, blocks // 3) + 1):
            each = [(self._stretch(b, period), self._scales(b, 1) if strict else ()) for b in range(blocks)]
            start = 0
            while start + period < blocks:
                stop = start
                while stop + period < blocks and each[stop] == each[stop + period]:
                    stop += 1
                length = stop + period - start
                removed = (length - 2 * period) // period * period
                if length > MANY and removed > (0 if best is None else best.removed):
                    best = self.with_scales(Repeat(self.container, self.keys, start, period, removed)) or best
                start = stop + 1
            if best is not None and best.removed > blocks // 2:
                break
        return best

    def with_scales(self, repeat: Repeat) -> Repeat | None:
        """The run with the floats of its blocks; None where one differs, but not between the first two periods, by
        which a graph tells where it goes."""
        starts = range(repeat.first, repeat.gap.stop, repeat.period)
        scales = tuple(self._scales(block, repeat.period) for block in starts)
        for first, second, *others in zip(*scales, strict=True):
            if repr(first) == repr(second) and any(repr(other) != repr(first) for other in others):
                return None
        return replace(repeat, scales=scales)

    def _scales(self, block: int, blocks: int) -> tuple[float, ...]:
        return tuple(x for i in self.calls(range(block, block + blocks)) for x in self.record.calls[i].scales)

    def repeats(self, repeat: Repeat) -> bool:
        """Whether the blocks of a run do the same as those a period later."""
        run = range(repeat.first, repeat.gap.stop)
        if run.stop >= len(self.keys):
            return False
        each = {block: self._stretch(block, repeat.period) for block in run}
        return all(each[block] == each[block + repeat.period] for block in run[: -repeat.period])

    def _stretch(self, block: int, period: int) -> list[tuple[Any, ...]]:
        """A block's calls as they are told without its number. Operands that were made in the blocks up to ``period``
        before it are told by their place there, all others by where they are."""
        span, prefix = self.calls(range(block, block + 1)), f"{self.container}.{self.keys[block]}".lstrip(".")
        before = self.entered[span.start]

        def told(origin: Origin) -> Origin:
            if isinstance(origin[0], int):
                of = bisect_right(self.starts, origin[0]) - 1
                if of < 0 or block - of > period:
                    return origin
                return ("in", block - of, origin[0] - self.starts[of], origin[1])
            return (_within(origin[0], prefix), origin[1])

        def one(call: Made) -> tuple[Any, ...]:
            region = None if call.region is None else call.region - before
            return call.what, _within(call.module, prefix), region, tuple(map(told, call.operands))

        return [one(self.record.calls[i]) for i in span]


def _within(name: str, block: str) -> tuple[bool, str]:
    """Whether a name is in a block, and the name there."""
    return (True, name[len(block) :]) if name == block or name.startswith(f"{block}.") else (False, name)


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The lists of enough modules, none of which stands in the model twice."""
    seen = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for name, module in model.named_modules():
        many = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > MANY + 1
        if many and all(m is not None and seen[id(m)] == 1 for m in module._modules.values()):
            yield name, module


def _looks(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((n, p.shape, p.dtype) for n, p in module.named_parameters())


def _nested(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.") or "" in (a, b)
