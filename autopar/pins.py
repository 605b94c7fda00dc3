"""Pins: what the user fixes of a plan. A pin is an obligation, never a hint.

All keys are reserved from the start; a key or value that is not supported yet is refused in one line that says so.
Ranks that no pin names go to data parallelism. ``pp=N`` gives as many ranks to every stage of a pipeline; the other
degrees are those of one stage.

>>> pins = Pins.parse(["tp=2", "zero=3", "microbatches=3"])
>>> found = resolve(pins, ranks=4, batch=12)
>>> found.dp, found.tp, found.zero, found.rows
(2, 2, 3, (4, 4, 4))
>>> Pins.parse(["tpp=2"])
Traceback (most recent call last):
autopar.errors.AutoparError: pin tpp=2: unknown key 'tpp', did you mean 'tp'? Legal: dp, tp, pp, cp, ep, sp, zero, \
microbatches, recompute, schedule, vp, param_dtype, reduce_dtype, cut, layout.<FQN>.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from autopar.errors import AutoparError
from autopar.orders import Words, read_words, size_of
from autopar.schema import nearest

SEQUENCE = "cp"  # the axis of the sequence; ``sp=N`` is another word for ``cp=N``
WORDS = {
    "recompute": ("none", "selective", "full"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble"),
    "param_dtype": ("fp32", "bf16", "fp16"),
    "reduce_dtype": ("fp32", "bf16", "fp16"),
}
LAYOUT = "layout."
HOLDING = ("dp", "ep", SEQUENCE, "tp")  # axes of one stage's ranks, over which parameters may rest in pieces
OWN = ".json"  # how the name of a file ends that lists a schedule of the user's own
AT_REST = re.compile(r"R|S\d+")  # how a parameter rests on an axis, as its DTensor has it: Replicate() or Shard(dim)


@dataclass(frozen=True)
class Pins:
    """What the user fixed; None (or empty) where nothing was said. ``cp``: ranks of the sequence's own axis; ``sp``:
    True along the tensor axis, N as ``cp``; ``ep``: ranks that share experts, each with rows of its own. ``schedule``:
    a word of `WORDS`, or the path of a user's own (`autopar.orders`). ``cut``: modules that each begin a new stage.

    ``layouts``: FQN of a parameter, in which ``*`` stands for any text -> how it rests, one word a pinned axis,
    ``{"tp": "S0"}``.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    sp: bool | int | None = None
    zero: int | None = None
    microbatches: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    vp: int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    cut: tuple[str, ...] = ()
    layouts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()

    @staticmethod
    def parse(pins: Pins | Mapping[str, Any] | Iterable[str] | None) -> Pins:
        """Pins from a mapping ``{"tp": 2}``, from ``KEY=VALUE`` strings, or from pins (unchanged).

        Raises AutoparError for an unknown key, an illegal value, or a key given twice. Says nothing of what is
        supported: that is `resolve`'s.
        """
        if pins is None:
            return Pins()
        if isinstance(pins, Pins):
            return pins
        if isinstance(pins, str):
            pins = pins.split()
        found: dict[str, Any] = {}
        layouts: dict[str, tuple[tuple[str, str], ...]] = {}
        for key, value in pins.items() if isinstance(pins, Mapping) else _split(pins):
            if not isinstance(key, str):
                raise AutoparError(f"pin {key!r}: a key is a string. Legal: {_legal()}.")
            if key.startswith(LAYOUT):
                layouts[key.removeprefix(LAYOUT)] = _layout(key, value)
            elif key in KEYS:
                found[key] = _value(key, value)
            else:
                raise AutoparError(
                    f"pin {key}={value}: unknown key {key!r}{nearest(key, KEYS) or '.'} Legal: {_legal()}."
                )
        return Pins(**found, layouts=tuple(sorted(layouts.items())))

    def given(self) -> dict[str, str]:
        """What the user gave, each key with its value as it is typed: ``{"tp": "2", "sp": "false"}``."""
        words = {key: _word(getattr(self, key)) for key in KEYS if getattr(self, key) not in (None, ())}
        return words | {LAYOUT + fqn: ",".join(f"{a}:{w}" for a, w in axes) for fqn, axes in self.layouts}

    def text(self) -> str:
        """The same on one line, ``tp=2 zero=3``; ``no pins`` with nothing pinned."""
        return " ".join(f"{key}={value}" for key, value in self.given().items()) or "no pins"

    def named(self) -> frozenset[str]:
        """The keys that the user gave: each is an obligation."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) not in (None, ()))

    @property
    def sequence(self) -> int:
        """Ranks of the axis over which ``cp=N`` or ``sp=N`` cuts the sequence; 1 where there is none."""
        return max(self.cp or 1, self.sp if isinstance(self.sp, int) else 1)  # True is 1

    @property
    def axes(self) -> bool:
        """Whether they say what the axes are for: ``dp``, ``tp``, ``cp=N``, ``ep=N`` or a layout is given."""
        given = self.dp is not None or self.tp is not None or bool(self.layouts)
        return given or self.sequence > 1 or (self.ep or 1) > 1

    @property
    def in_pieces(self) -> bool:
        """Whether a layout has a parameter rest in pieces over an axis that cuts data, as stages of ZeRO do."""
        return any(axis != "tp" and word != "R" for _, words in self.layouts for axis, word in words)

    def at_rest(self, names: Iterable[str]) -> dict[str, str]:
        """How a parameter of these names must rest, by axis: of several pins that mean it, the last one's word."""
        found: dict[str, str] = {}
        for pattern, words in self.layouts:
            if any(is_named(name, pattern) for name in names):
                found |= dict(words)
        return found


def is_named(name: str, pattern: str) -> bool:
    """Whether a pattern means a name: ``*`` stands for any text.

    >>> is_named("h.0.fc.weight", "h.*.fc.weight"), is_named("h.0.fc.bias", "h.*.fc.weight")
    (True, False)
    """
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


KEYS = tuple(f.name for f in fields(Pins) if f.name != "layouts")


@dataclass(frozen=True)
class ResolvedPins:
    """Pins with nothing left open: every rank has its place. ``cp``: ranks of the sequence's own axis; ``rows``: batch
    rows of each microbatch (over all of dp), empty where the batch was not given. ``virtual``: chunks that every rank
    of the pipeline has; ``words``: the user's own schedule, by rank, where there is one."""

    dp: int
    cp: int
    tp: int
    zero: int
    microbatches: int
    rows: tuple[int, ...]
    pins: Pins
    pp: int = 1
    virtual: int = 1
    words: Words = ()
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.data_ranks * self.cp * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks of one stage that have rows of their own."""
        return self.dp * self.ep

    def axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of the axes of more than one rank, outermost first; the last one's ranks are neighbours. Those
        of one stage: its ranks stand side by side."""
        found = (("dp", self.dp), ("ep", self.ep), (SEQUENCE, self.cp), ("tp", self.tp))
        return tuple((name, size) for name, size in found if size > 1)

    @property
    def recompute(self) -> str:
        """What backward makes again."""
        return self.pins.recompute or "none"

    @property
    def schedule(self) -> str:
        """The schedule's name, as `autopar.plan.Schedule` has it."""
        if self.words:
            return "custom"
        return self.pins.schedule or ("accumulate" if self.pp == 1 else "interleaved" if self.virtual > 1 else "1f1b")

    def one_line(self) -> str:
        """``dp=2 tp=2 zero=3 microbatches=3``, with ``pp=2`` in a pipeline, ``cp=2`` where the sequence has an axis and
        ``ep=2`` where experts have."""
        pp = f"pp={self.pp} " if self.pp > 1 else ""
        order = f" schedule={self.schedule}" if self.pp > 1 else ""
        cp = "".join(f" {key}={n}" for key, n in (("ep", self.ep), ("cp", self.cp)) if n > 1)
        again = f" recompute={self.recompute}" if self.recompute != "none" else ""
        return f"{pp}dp={self.dp}{cp} tp={self.tp} zero={self.zero} microbatches={self.microbatches}{order}{again}"


def resolve(pins: Pins, ranks: int, batch: int | None = None) -> ResolvedPins:
    """Give every rank a place: ranks that no pin names go to dp. ``batch``: rows of the global batch (None: unchecked).

    Raises AutoparError where a pin is not supported yet, the degrees do not fit the ranks, or the batch does not
    divide.
    """
    _refuse_unsupported(pins)
    if ranks < 1:
        raise AutoparError(f"ranks: {ranks} is not a number of ranks. Legal: 1 or more.")
    virtual, words = _pipeline(pins, ranks)
    whole, pp = ranks, pins.pp or 1
    ranks //= pp  # of one stage
    ep, cp, tp = pins.ep or 1, pins.sequence, pins.tp or 1
    where = _n(ranks, "rank") + (f" of a stage (pp={pp} of {whole})" if pp > 1 else "")
    if ranks % ep:
        raise AutoparError(
            f"pins: ep={ep} does not divide {where}. Legal: {', '.join(f'ep={n}' for n in divisors(ranks))}."
        )
    where = f"the {_n(ranks // ep, 'rank')} beside ep={ep}" if ep > 1 else where
    ranks //= ep  # that hold the same experts
    inner = " ".join(f"{k}={v}" for k, v in (("cp", cp), ("tp", tp)) if v > 1) or "tp=1"
    if ranks % (cp * tp):
        pairs = [(s, d) for d in divisors(ranks) for s in (divisors(ranks // d) if cp > 1 else [1])]
        legal = ", ".join(f"cp={s} tp={d}" if cp > 1 else f"tp={d}" for s, d in pairs if s > 1 or cp == 1)
        raise AutoparError(f"pins: {inner} does not divide {where}. Legal: {legal or 'no cp'}.")
    dp = pins.dp if pins.dp is not None else ranks // (cp * tp)
    if dp * cp * tp != ranks:
        named = (("pp", pins.pp), ("dp", pins.dp), ("ep", pins.ep), ("cp", cp if cp > 1 else None), ("tp", pins.tp))
        given = " ".join(f"{k}={v}" for k, v in named if v is not None)
        legal = ", ".join(_places(ranks, cp))
        more = "".join(f" with {key}={n}" for key, n in (("pp", pp), ("ep", ep)) if n > 1)
        made = _n(pp * dp * ep * cp * tp, "rank")
        raise AutoparError(f"pins: {given} makes {made}, there are {whole}. Legal{more}: {legal}.")
    count = pins.microbatches or (size_of(words)[1] if words else 1)
    rows = _divide_batch(batch, ranks, dp, ep, cp, count) if batch is not None else ()
    found = ResolvedPins(dp, cp, tp, pins.zero or 0, count, rows, pins, pp, virtual=virtual, words=words, ep=ep)
    _refuse_absent_axes(pins, [name for name, _ in found.axes()])
    return found


def _refuse_absent_axes(pins: Pins, axes: Sequence[str]) -> None:
    for fqn, words in pins.layouts:
        for axis, word in words:
            if axis not in axes:
                legal = f"Legal: {', '.join(axes)}" if axes else "There is one rank"
                raise AutoparError(
                    f"pin {LAYOUT}{fqn}={axis}:{word}: no axis {axis!r} holds parameters here. {legal}; "
                    f"or pin {axis}=2."
                )


def _pipeline(pins: Pins, ranks: int) -> tuple[int, Words]:
    """Chunks of each rank of the pipeline, and the user's own schedule. Raises AutoparError for pins of a pipeline that
    do not go together."""
    pp = pins.pp or 1
    if ranks % pp:
        legal = ", ".join(f"pp={d}" for d in divisors(ranks))
        raise AutoparError(f"pins: pp={pp} does not divide {_n(ranks, 'rank')}. Legal: {legal}.")
    if pp == 1:
        for key, value in (("schedule", pins.schedule), ("vp", pins.vp), ("cut", pins.cut)):
            if value not in (None, (), 1):
                raise AutoparError(f"pin {key}={_word(value)}: needs stages of a pipeline. Pin pp=2 or more.")
        return 1, ()
    words = read_words(pins.schedule) if pins.schedule is not None and pins.schedule.endswith(OWN) else ()
    virtual = pins.vp or 1
    if words:
        virtual = _own_chunks(pins, words, pp)
    elif pins.schedule == "interleaved" and virtual == 1:
        raise AutoparError("pin schedule=interleaved: needs several stages a rank. Pin vp=2 or more, or schedule=1f1b.")
    elif virtual > 1 and pins.schedule not in (None, "interleaved"):
        raise AutoparError(
            f"pin vp={virtual}: schedule={pins.schedule} has one stage a rank. Pin schedule=interleaved."
        )
    if pins.cut and len(pins.cut) != pp * virtual - 1:
        need = f"pp={pp}{f' vp={virtual}' if virtual > 1 else ''} needs {_n(pp * virtual - 1, 'module')}"
        raise AutoparError(f"pin cut={_word(pins.cut)}: names {_n(len(pins.cut), 'module')}, {need}.")
    return virtual, words


def _own_chunks(pins: Pins, words: Words, pp: int) -> int:
    """Chunks of each rank in a user's own schedule, which must be for these pins."""
    chunks, count = size_of(words)
    pinned = (("pp", pp, len(words), "ranks"), ("vp", pins.vp, chunks, "chunks a rank"))
    for key, value, has, what in (*pinned, ("microbatches", pins.microbatches, count, "microbatches")):
        if value is not None and value != has:
            raise AutoparError(f"pin {key}={value}: the order in {pins.schedule} has {has} {what}. Pin {key}={has}.")
    return chunks


def _places(ranks: int, cp: int, batch: int = 0) -> list[str]:
    """The legal degrees with so many ranks along the sequence, those that divide ``batch``."""
    if ranks % cp:
        return [f"{_n(cp, 'rank')} or a multiple"]
    each, word = ranks // cp, f" cp={cp}" if cp > 1 else ""
    return [f"dp={each // d}{word} tp={d}" for d in divisors(each) if batch % (each // d) == 0]


def microbatch_rows(batch: int, dp: int, count: int) -> tuple[int, ...]:
    """Rows of ``count`` microbatches of ``batch`` rows: each divisible by ``dp``, larger ones first, apart by at
    most ``dp``.

    >>> microbatch_rows(14, 2, 3)
    (6, 4, 4)
    """
    assert batch % dp == 0 and batch >= dp * count
    each, more = divmod(batch // dp, count)
    return tuple((each + (i < more)) * dp for i in range(count))


def divisors(n: int) -> list[int]:
    """The divisors of ``n``, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _divide_batch(batch: int, ranks: int, dp: int, ep: int, cp: int, count: int) -> tuple[int, ...]:
    if batch < 1:
        raise AutoparError(f"batch: {batch} is not a number of rows. Legal: 1 or more.")
    data, word = dp * ep, f"dp={dp} ep={ep}" if ep > 1 else f"dp={dp}"
    if batch % data:
        pairs = ", ".join([*reversed(_places(ranks, cp, batch // ep if batch % ep == 0 else 1)), *["ep=1"] * (ep > 1)])
        raise AutoparError(
            f"pins: {word} does not divide the batch of {_n(batch, 'row')}. "
            f"Legal on {_n(ranks, 'rank')}: {pairs}; or a batch that is a multiple of {data}."
        )
    if batch < data * count:
        raise AutoparError(
            f"pins: microbatches={count} over {word} needs a batch of at least {data * count} rows, it has {batch}. "
            f"Legal: microbatches=1{f' to {batch // data}' if batch > data else ''}."
        )
    return microbatch_rows(batch, data, count)


def _refuse_unsupported(pins: Pins) -> None:
    if pins.sp is True and (pins.tp or 1) == 1:
        raise AutoparError("pin sp=true: needs tensor ranks to cut the sequence over. Pin tp=2 or more, or cp=N.")
    both = (pins.cp, pins.sp)
    if None not in both and not isinstance(pins.sp, bool) and pins.cp != pins.sp:
        raise AutoparError(f"pins: cp={pins.cp} and sp={pins.sp} both give the sequence an axis. Keep one of them.")


def _split(pairs: Iterable[str]) -> Iterable[tuple[str, str]]:
    seen = set()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise AutoparError(f"pin {pair!r}: is not KEY=VALUE. Example: tp=2. Legal keys: {_legal()}.")
        if key in seen:
            raise AutoparError(f"pin {pair}: {key!r} is pinned twice. Keep one of them.")
        seen.add(key)
        yield key, value


def _value(key: str, value: Any) -> Any:
    if key in WORDS:
        own = key == "schedule" and isinstance(value, str) and value.endswith(OWN)
        if value not in WORDS[key] and not own:
            more = f", or a file of your own (its name ends in {OWN})" if key == "schedule" else ""
            raise AutoparError(f"pin {key}={value}: not a legal value. Legal: {', '.join(WORDS[key])}{more}.")
        return value
    if key == "cut":
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n for n in names):
            raise AutoparError(f"pin cut={value}: is not a list of module names. Example: cut=layers.4,layers.8.")
        return tuple(names)
    if key == "sp" and (isinstance(value, bool) or value in ("true", "false")):
        return value in (True, "true")
    number = _integer(value)
    low, high = (0, 3) if key == "zero" else (2 if key == "sp" else 1, None)
    if number is None or number < low or (high is not None and number > high):
        legal = "0, 1, 2, 3" if key == "zero" else f"{'true, false, or ' * (key == 'sp')}an integer of at least {low}"
        raise AutoparError(f"pin {key}={value}: not a legal value. Legal: {legal}.")
    return number


def _integer(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value) else None


def _layout(key: str, value: Any) -> tuple[tuple[str, str], ...]:
    """``"tp:S0,dp:R"`` or ``{"tp": "S0"}`` -> axis and word, sorted."""
    words = [tuple(w.split(":", 1)) for w in value.split(",")] if isinstance(value, str) else value
    pairs = list(words.items()) if isinstance(words, Mapping) else list(words) if isinstance(words, list) else []
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in HOLDING or not AT_REST.fullmatch(str(pair[1])):
            pairs = []
    if not pairs or key == LAYOUT:
        raise AutoparError(
            f"pin {key}={value}: is not AXIS:LAYOUT. Legal: an axis of {', '.join(HOLDING)}, and R or S<dim>. "
            f"Example: {LAYOUT}fc1.weight=tp:S0."
        )
    return tuple(sorted((str(a), str(w)) for a, w in pairs))


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _legal() -> str:
    return ", ".join((*KEYS, "layout.<FQN>"))


def _n(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
