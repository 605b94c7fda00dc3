"""The plan: all that crosses from choosing to lowering, as plain JSON that is reviewed, edited by hand, diffed and
loaded again.

Layouts are keyed by class, op index and FQN, never by names of graph nodes. A layout is one word a mesh axis
(`passes.layout.Layout`), a choice is the text of a `passes.facts.Choice`. `Plan.dumps` is byte-stable; timings stay
out of it.

>>> axis = PlanAxis("tp", 2, tier="host", stride=1, display=("tp",))
>>> plan = Plan(ModelId("sha256:0"), ClusterId(ranks_per_node=2), axes=(axis,), mesh={"tp": 2})
>>> loads(plan.dumps()) == plan
True
>>> plan.one_line()
'tp=2 on 2 ranks'
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.check_plan import CHOICE, CHOICES, check
from autopar.errors import AutoparError
from autopar.orders import actions, forwards_first
from autopar.schema import fail, read, read_file, write

if TYPE_CHECKING:
    from autopar.passes.facts import Choice

SCHEMA = 1
TIME = "time"  # tier of the axis of microbatches


@dataclass(frozen=True)
class ModelId:
    """Which model the plan is for. ``graph``: hash of the captured graph, FQNs and shapes. ``checked``: whether
    captured gradients were compared with eager (not on the meta device). ``hints``: what capture left out or fixed
    that the user should know."""

    graph: str
    name: str = ""
    checked: bool = False
    hints: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterId:
    """The cluster planned for: the name of its file, and what of it the plan relies on."""

    name: str = "local"
    nodes: int = 1
    ranks_per_node: int = 1
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class PlanAxis:
    """One mesh axis. ``stride``: distance between neighbours in ranks (0 in time); ``tier``: slowest link it
    crosses, or ``time`` for the axis of microbatches (then last); ``display``: what its use is called, several where
    it has several; ``wire``: for each of `check_plan.WIRES` (latency in s, s per byte), by which changes of layout take
    their cheapest ways (empty: figures of no cluster)."""

    name: str
    size: int
    tier: str
    stride: int
    display: tuple[str, ...] = ()
    wire: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_time(self) -> bool:
        return self.tier == TIME


@dataclass(frozen=True)
class Op:
    """What one op of a class does: one choice a mesh axis, and the order in which the axes nest. ``index``: its place
    in the class, from 0."""

    index: int
    op: str
    fqn: str
    choices: tuple[str, ...]
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Extra:
    """A second copy of a result that consumers share, in layouts of its own. ``of``: op index, ``result``: which
    output."""

    of: int
    layout: str
    result: int = 0


@dataclass(frozen=True)
class PlanClass:
    """Equal units (``fqn``: the first one's) share one assignment. ``extra``: materialised extra layouts.

    ``recompute``: what backward makes again: ``none`` (all that backward reads is kept), ``selective`` (results of
    matmuls, convolutions, attention and collectives are kept), ``full`` (only what the units read of others is kept).
    """

    fqn: str
    ops: tuple[Op, ...] = ()
    extra: tuple[Extra, ...] = ()
    recompute: Literal["none", "selective", "full"] = "none"


@dataclass(frozen=True)
class Unit:
    """A piece of the graph between cuts; ``kind`` is the index of its class. The ops of all units' classes, one unit
    after another, are the ops of the graph."""

    fqn: str
    kind: int


@dataclass(frozen=True)
class Stage:
    """Units of one pipeline stage, as a half-open range ``[first, last)``. Stage ``c * pp + r`` is chunk ``c`` of rank
    ``r`` of the pipeline."""

    first: int
    last: int


@dataclass(frozen=True)
class Schedule:
    """In which order a rank runs the microbatches of its ``virtual`` stages (chunks). ``accumulate``: forward and
    backward of each microbatch in turn, on one stage; ``custom``: as ``words`` list them for each rank of the pipeline
    (`autopar.orders`). ``tier``: the slowest link between stages."""

    name: Literal["accumulate", "gpipe", "1f1b", "interleaved", "zero_bubble", "custom"] = "accumulate"
    virtual: int = 1
    words: tuple[tuple[str, ...], ...] = ()
    tier: str = ""


@dataclass(frozen=True)
class Precision:
    """Mixed precision, of real floating parameters: the dtype they are cast to, gathered and computed with in, and the
    one that their gradients are reduced in. None: the parameter's own."""

    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None


OWN = Precision()


@dataclass(frozen=True)
class Optimizer:
    """What trains, as far as bytes go. ``states``: the tensors that it keeps for a parameter, by dtype and number of
    dims (``"fp32 2"``; ``"*"``: any), in the words of `autopar.optimizer_states`."""

    name: str = "AdamW"
    states: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"*": ("param", "param")})


ADAMW = Optimizer()


@dataclass(frozen=True)
class Parameter:
    """Where a parameter rests and how it is used. ``use``: the layout in which the graph reads it.

    ``gather``: when ``rest`` becomes ``use``, once a ``step`` or at each ``use``: for the forward of every unit that
    reads it, and again for its backward where that does; it is let go of in between. ``reduce``: when its gradient is
    reduced (``never``: frozen, or nothing to reduce). ``shape`` in elements; ``aliases``: other names of a tied weight.
    ``dtype``: as it rests, and its gradient and optimizer states; ``use_dtype``: as it is gathered and read;
    ``grad_dtype``: as its gradient is reduced.
    """

    shape: tuple[int, ...]
    rest: str
    use: str
    gather: Literal["never", "step", "use"] = "never"
    reduce: Literal["never", "step", "microbatch"] = "never"
    dtype: str = "fp32"
    use_dtype: str = "fp32"
    grad_dtype: str = "fp32"
    trainable: bool = True
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Padding:
    """A parameter dim that an axis does not divide: uneven at rest, padded inside collectives only."""

    fqn: str
    dim: int
    size: int
    padded: int


@dataclass(frozen=True)
class Rng:
    """How random ops draw; ``none``: the program has none, ``counter``: by seed, step and place, as every plan does.
    ``seed``: None, where that is given when the plan runs."""

    kind: Literal["none", "counter"] = "none"
    seed: int | None = None


@dataclass(frozen=True)
class Collective:
    """``count`` times a step each rank moves ``bytes`` in all over ``axis``; ``phase``: forward, backward or
    parameters. ``seconds`` of all of them; ``hidden``: whether they run beside compute (None: not predicted)."""

    kind: str
    axis: str
    count: int
    bytes: int
    phase: str = ""
    seconds: float | None = None
    hidden: bool | None = None


@dataclass(frozen=True)
class Share:
    """The share that an axis takes off the busiest rank: ideal is 1 - 1/N."""

    flops: float | None = None
    param_bytes: float | None = None
    saved_bytes: float | None = None


@dataclass(frozen=True)
class Whole:
    """An op that ``axis`` does not divide, and why."""

    axis: str
    fqn: str
    op: str
    why: str


@dataclass(frozen=True)
class StageFigures:
    """What a stage of a pipeline should take for a microbatch, on each of its ranks: seconds of ``forward_s`` and
    ``backward_s``, bytes that cross to later stages (``sent``) and of gradients that come back (``returned``).
    ``in_flight``: the most microbatches between their forward and the end of their backward; ``peak_bytes``: of a rank,
    with all its stages, whose they are in ``owners``; ``parameters``: elements that the stage reads, of the whole
    model."""

    forward_s: float
    backward_s: float
    parameters: int
    in_flight: int
    sent: int
    returned: int
    peak_bytes: float
    owners: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Predicted:
    """What the plan should cost and do: seconds a step, GiB of a rank at its fullest moment (``peak_at``: which unit's
    turn that is, and the op), and facts counted from the emitted program. Never read back when the plan is applied."""

    step_time_s: float | None = None
    peak_mem_gib: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    divided: Mapping[str, Share] = field(default_factory=dict)
    whole: tuple[Whole, ...] = ()
    fallback: tuple[str, ...] = ()  # ops without a rule that run whole, and why: "op: reason"
    probed: tuple[str, ...] = ()  # ops without a rule whose strategies were found by running them: not proved
    autograd: tuple[str, ...] = ()  # units that have no graph of their backward, and why: "module: reason"
    peak_at: str = ""
    stages: tuple[StageFigures, ...] = ()  # of a pipeline; seconds in ``parts`` are those of the mean rank then


@dataclass(frozen=True)
class Proof:
    """``gap`` = 1 - bound / objective, a fraction; None where nothing is proved. ``scope``: what the bound covers."""

    objective: float | None = None
    bound: float | None = None
    gap: float | None = None
    scope: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Alternative:
    """Another plan in one line: the ``next`` best of its kind, or the ``nearest`` that fits where nothing did.

    ``change``: what differs (``tp=2 zero=3``, ``nodes=2``); ``pins``: how to ask for it; ``why``: in a few words.
    """

    kind: Literal["next", "nearest"]
    change: str
    pins: Mapping[str, str] = field(default_factory=dict)
    step_time_s: float | None = None
    peak_mem_gib: float | None = None
    fits: bool = True
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """A plan; see the module. ``axes``: those of one stage's ranks, which stand side by side; ranks of the pipeline are
    as many ranks apart as a stage has. ``batch``: rows of the global batch; ``inputs``: the layout in which each input
    (and what the prologue made) is read; ``pins``: what the user fixed, as typed.

    Raises AutoparError, in `load` and `loads`, with the JSON path and the legal values.
    """

    model: ModelId
    cluster: ClusterId = ClusterId()
    axes: tuple[PlanAxis, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)
    units: tuple[Unit, ...] = ()
    classes: tuple[PlanClass, ...] = ()
    stages: tuple[Stage, ...] = ()
    microbatches: int = 1
    batch: int | None = None
    schedule: Schedule = Schedule()
    inputs: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    relaxations: Mapping[str, str] = field(default_factory=dict)
    precision: Precision = OWN
    optimizer: Optimizer = ADAMW
    padding: tuple[Padding, ...] = ()
    rng: Rng = Rng()
    predicted: Predicted = Predicted()
    proof: Proof = Proof()
    alternatives: tuple[Alternative, ...] = ()
    deterministic: bool = True
    pins: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)  # seconds by phase

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage."""
        return math.prod(a.size for a in self.axes if not a.is_time)

    @property
    def pp(self) -> int:
        """Ranks of the pipeline; 1 where there is none."""
        return max(1, len(self.stages) // max(1, self.schedule.virtual))

    @property
    def forwards_first(self) -> bool:
        """Whether all microbatches run forward before the first runs backward, so that a loss may need all of them."""
        return self.pp > 1 and forwards_first(self.schedule.name, self.schedule.words)

    def orders(self) -> list[list[tuple[str, int, int]]]:
        """For each rank of the pipeline its actions in order: letter, chunk, microbatch."""
        schedule = self.schedule
        return actions(schedule.name, self.pp, self.microbatches, schedule.virtual, schedule.words)

    @property
    def zero(self) -> int:
        """The highest ZeRO stage that any trainable parameter's rest, use, gather and reduce amount to."""
        return max((_zero(p) for p in self.parameters.values()), default=0)

    @property
    def data(self) -> tuple[int, ...]:
        """The axes of ranks, by index, that cut the batch: dim 0 of inputs (of those that microbatches cut, if any)."""
        return tuple(sorted({i for found in rows_cut(self.axes, self.inputs) for i in found}))

    @property
    def row_unit(self) -> int:
        """What the rows of every microbatch must be a multiple of, so that all ranks that cut them get as many."""
        return math.lcm(*(math.prod(self.axes[i].size for i in found) for found in rows_cut(self.axes, self.inputs)))

    @property
    def has_even_rows(self) -> bool:
        """Whether every microbatch gives all ranks that cut its rows as many."""
        return self.batch is None or (
            self.batch % self.row_unit == 0 and self.batch >= self.row_unit * self.microbatches
        )

    @property
    def fits(self) -> bool | None:
        """Whether the predicted peak is within the memory of a rank; None where one of them is not known."""
        peak, limit = self.predicted.peak_mem_gib, self.predicted.parts.get("memory_limit_bytes")
        return None if peak is None or limit is None else peak * 2**30 <= limit

    @property
    def recompute(self) -> str:
        """What the units make again in backward: the one word of all of them, or ``mixed``."""
        found = {self.classes[u.kind].recompute for u in self.units}
        return "mixed" if len(found) > 1 else next(iter(found), "none")

    def one_line(self) -> str:
        """``dp=2 tp=2 zero=3 microbatches=3 on 4 ranks``: axes, then what is not the default."""
        words = [f"pp={self.pp}"] * (self.pp > 1) + [f"{a.name}={a.size}" for a in self.axes if not a.is_time]
        words += [f"zero={self.zero}"] * (self.zero > 0) + [f"microbatches={self.microbatches}"] * (
            self.microbatches > 1
        )
        words += [f"schedule={self.schedule.name}"] * (self.schedule.name != "accumulate")
        words += [f"vp={self.schedule.virtual}"] * (self.schedule.virtual > 1)
        words += [f"recompute={self.recompute}"] * (self.recompute != "none")
        words += [f"{key}={word}" for key, word in write(self.precision).items() if word is not None]
        return f"{' '.join(words) or 'dp=1'} on {self.ranks} rank{'s' * (self.ranks != 1)}"

    def to_json(self, *, timings: bool = False) -> dict[str, Any]:
        """Plain JSON values, and ``fits``, which is not read back. Without ``timings`` (seconds by phase) equal plans
        give equal values."""
        data = {"fits": self.fits, **write(self)}
        if not timings:
            del data["timings"]
        return data

    def dumps(self) -> str:
        """The byte-stable text of the plan: sorted keys, shortest floats that read back equal, no timings."""
        return json.dumps(self.to_json(), sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write `dumps` to a file. Raises AutoparError where that is not possible."""
        try:
            Path(path).write_text(self.dumps(), encoding="utf-8")
        except OSError as error:
            raise AutoparError(f"plan: cannot write {path} ({error.strerror}).") from None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read and validate a plan file."""
        return from_json(read_file(path, who="plan"), where=str(path))


def loads(text: str, *, where: str = "plan") -> Plan:
    """A plan from its text."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise AutoparError(f"{where}: is not JSON ({error}).") from None
    return from_json(data, where=where)


def from_json(data: object, *, where: str = "plan") -> Plan:
    """A plan from plain JSON values, validated. Raises AutoparError with the JSON path of what is wrong."""
    if not isinstance(data, dict) or "schema" not in data:
        raise AutoparError(
            f"{where}: is not a plan (a JSON object with the key 'schema'). Write one with `autopar plan MODEL --out`."
        )
    version = data["schema"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise fail(where, "$.schema", f"{json.dumps(version)} is not a schema version. Legal: {SCHEMA}.")
    if version > SCHEMA:
        raise fail(where, "$.schema", f"{version} is newer than this autopar reads. Legal: {SCHEMA}; update autopar.")
    if data.get("fits") not in (None, True, False):
        raise fail(where, "$.fits", f"{json.dumps(data['fits'])} is not legal. Legal: true, false, null.")
    plan = read(Plan, {key: value for key, value in data.items() if key != "fits"}, where=where)
    check(plan, where)
    return plan


def choice_to_text(choice: Choice) -> str:
    """``I``, ``R``, ``factor:o``, ``factor:o(8+4+4)``, ``factor:o/5``, ``linear:0``, ``special:vocabulary``."""
    if choice.kind in ("I", "R"):
        return choice.kind
    parts = f"({'+'.join(map(str, choice.parts))})" if choice.parts else ""
    return f"{choice.kind}:{choice.name}{parts}{f'/{choice.items}' if choice.items else ''}"


def choice_from_text(text: str) -> Choice:
    """Read what `choice_to_text` writes. Raises AutoparError. (Needs torch, as the passes do.)"""
    from autopar.passes.facts import Choice

    match = CHOICE.fullmatch(text)
    if match is None:
        raise AutoparError(f"choice {text!r}: is not legal. Legal: {CHOICES}.")
    parts = tuple(map(int, match[4].split("+"))) if match[4] else ()
    return Choice(match[1] or match[2], match[3] or "", parts, int(match[5] or 0))


def rows_cut(axes: Sequence[PlanAxis], inputs: Mapping[str, str]) -> list[tuple[int, ...]]:
    """For each input with the batch, the axes of ranks, by index, that cut its dim 0. Where there is an axis in time
    the inputs that it cuts have the batch, else every input whose dim 0 is cut counts.

    >>> axes = (PlanAxis("a", 2, "host", 2), PlanAxis("b", 2, "host", 1), PlanAxis("time", 3, "time", 0))
    >>> rows_cut(axes, {"ids": "S0@1 R S0@0", "positions": "R S0 R"})
    [(0,)]
    """
    times = [i for i, a in enumerate(axes) if a.is_time]
    batched = [words for words in (text.split() for text in inputs.values()) if all(is_rows(words[t]) for t in times)]
    return [tuple(i for i, a in enumerate(axes) if not a.is_time and is_rows(words[i])) for words in batched]


def is_rows(word: str) -> bool:
    """Whether a word of a layout cuts dim 0."""
    return re.match(r"S0\b", word) is not None


def _zero(parameter: Parameter) -> int:
    """By how it rests where it is not used in pieces."""
    pairs = zip(parameter.rest.split(), parameter.use.split(), strict=False)
    if not parameter.trainable or not any(rest[0] == "S" != use[0] for rest, use in pairs):
        return 0
    if parameter.gather == "use":
        return 3
    return 2 if parameter.reduce == "microbatch" else 1
