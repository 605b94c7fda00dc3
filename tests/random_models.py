"""Small models drawn at random: ``make(seed)`` is (model, args, kwargs), the same for the same seed.

A model is a list of steps, each an op of ``random_ops.py`` or ``random_parts.py`` on values made before, and the sum
of several losses. While it is drawn every step runs at two batch sizes, so that shapes, what grows with the batch, and
what is too large or not finite are read off values and need no code per op.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.build import apply
from autopar.capture import run_graph
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.equality import FP64, Difference, Run, distances
from autopar.errors import AutoparError
from autopar.pins import Pins

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
LARGEST, MOST_ELEMENTS, MOST_STEPS = 20.0, 2500, 14
FEW = 3  # rows of the second run


class Steps(nn.Module):
    """What was drawn: ``steps`` are (function of the model and operands, their places); the last value is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable[..., Any], tuple[int, ...]]] = []
        self.kept: int | None = None

    def forward(self, *inputs: Tensor) -> Any:
        """The loss ``[]``, or a dict of it and one more value."""
        known: list[Tensor] = []
        for function, places in self.steps:
            made = function(self, *(known[i] if i >= 0 else inputs[-1 - i] for i in places))
            known.extend(made if isinstance(made, (tuple, list)) else (made,))
        return known[-1] if self.kept is None else {"loss": known[-1], "kept": known[self.kept]}


@dataclass(frozen=True)
class Var:
    """A value of the model: its place (an input's below 0), and what it is at both batch sizes. ``dims``: (length,
    whether it grows); what grows is counted in rows."""

    at: int
    values: tuple[Tensor, Tensor]
    dims: tuple[tuple[int, bool], ...]
    grad: bool = False

    def example(self, i: int) -> Tensor:
        return self.values[i].detach().requires_grad_(self.grad)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values[0].shape)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def float(self) -> bool:
        return self.values[0].is_floating_point()

    @property
    def fixed(self) -> list[int]:
        """Dims that do not grow with the batch."""
        return [d for d, (_, grows) in enumerate(self.dims) if not grows]

    @property
    def rows_first(self) -> bool:
        """Dim 0 is the batch, no other grows."""
        return bool(self.dims) and self.dims[0] == (1, True) and len(self.fixed) == self.ndim - 1


class Maker:
    """The model so far. Ops ask it for operands, parameters and inputs, and `emit` what they compute."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rows = self.one([8, 8, 8, 12, 6])
        self.crossing = self.rng.random() < 0.15  # whether ops may mix rows of the batch
        self.model = Steps()
        self.inputs: list[Tensor] = []
        self.vars: list[Var] = []
        self.places = 0  # values that steps made
        self.used: set[int] = set()
        self._parameters: list[str] = []
        self._modules: dict[Any, list[str]] = {}

    # -- draws

    def one(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(list(options))

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def width(self) -> int:
        return int(self.one([2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 12]))

    def pick(self, legal: Callable[[Var], bool] = lambda v: True) -> Var | None:
        """A float value, a recent or unread one more likely."""
        found = [v for v in self.vars if v.float and legal(v)]
        if not found:
            return None
        weights = [1.0 + 3.0 * (v.at not in self.used) + 4.0 * (i + 3 > len(found)) for i, v in enumerate(found)]
        return self.rng.choices(found, weights)[0]

    def dim(self, v: Var, least: int = 1) -> int | None:
        """A dim that an op may work along: not the batch, unless the model mixes rows."""
        legal = [d for d in range(v.ndim) if v.shape[d] >= least and (not v.dims[d][1] or self.crossing)]
        return self.one(legal) if legal else None

    # -- what a model holds

    def parameter(self, *shape: int, scale: float = 0.4) -> Callable[[nn.Module], Tensor]:
        """A parameter of this shape, now and then one that is there already."""
        known = [n for n in self._parameters if tuple(getattr(self.model, n).shape) == shape]
        if known and self.chance(0.3):
            name = self.one(known)
        else:
            name = f"p{len(self._parameters)}"
            self._parameters.append(name)
            trains = not self.chance(0.1)
            self.model.register_parameter(name, nn.Parameter(torch.randn(shape) * scale, requires_grad=trains))
        return lambda m: getattr(m, name)

    def module(self, key: Any, make: Callable[[], nn.Module]) -> Callable[[nn.Module], Any]:
        """A submodule, now and then one that was made with the same key."""
        known = self._modules.setdefault((key), [])
        if known and self.chance(0.4):
            name = self.one(known)
        else:
            name = f"m{sum(map(len, self._modules.values()))}"
            known.append(name)
            part = make()
            if self.chance(0.1):
                part.requires_grad_(False)
            self.model.add_module(name, part)
        return lambda m: getattr(m, name)

    def buffer(self, value: Tensor) -> Callable[[nn.Module], Tensor]:
        name = f"b{sum(1 for _ in self.model.buffers())}_{len(self.model.steps)}"
        self.model.register_buffer(name, value)
        return lambda m: getattr(m, name)

    def input(self, value: Tensor) -> Var:
        """A further input, its rows first, or one that is there already."""
        same = [v for v in self.vars if v.at < 0 and v.shape == tuple(value.shape)]
        same = [v for v in same if v.values[0].dtype == value.dtype]
        if value.is_floating_point() and same and self.chance(0.5):
            found: Var = self.one(same)
            return found
        self.inputs.append(value)
        dims = ((1, True), *((n, False) for n in value.shape[1:]))
        self.vars.append(Var(-len(self.inputs), (value, value[:FEW]), dims))
        return self.vars[-1]

    def emit(self, function: Callable[..., Any], *operands: Var, sharp: bool = False) -> list[Var] | None:
        """Add a step; its values, or None where they are not fit to go on with. ``sharp``: the op jumps where an
        operand is zero, so that rounding must not decide."""
        if sharp and any(_almost_zero(o.values[0]) for o in operands if o.float):
            return None
        try:
            made = [function(self.model, *(o.example(i) for o in operands)) for i in (0, 1)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise AssertionError(f"an op drew operands it cannot take: {[o.shape for o in operands]}") from error
        first, second = (m if isinstance(m, (tuple, list)) else (m,) for m in made)
        found = [self._var(self.places + i, *pair) for i, pair in enumerate(zip(first, second))]
        if any(v is None for v in found):
            return None
        self.model.steps.append((function, tuple(o.at for o in operands)))
        self.used.update(o.at for o in operands)
        self.places += len(found)
        self.vars.extend(v for v in found if v is not None)
        return [v for v in found if v is not None]

    def _var(self, at: int, large: Tensor, small: Tensor) -> Var | None:
        dims = tuple((n, False) if n == few else (n // self.rows, True) for n, few in zip(large.shape, small.shape))
        for n, few, (length, grows) in zip(large.shape, small.shape, dims):
            if grows and (n, few) != (length * self.rows, length * FEW):
                return None
        if large.numel() > MOST_ELEMENTS or not large.numel():
            return None
        if large.is_floating_point() and not (torch.isfinite(large).all() and large.abs().max() < LARGEST):
            return None
        return Var(at, (large.detach(), small.detach()), dims, large.requires_grad)


def _almost_zero(x: Tensor) -> bool:
    return bool(((x != 0) & (x.abs() < 1e-4)).any())


def make(seed: int) -> Built:
    """The model of ``seed`` in training mode, its inputs."""
    import random_losses as losses
    import random_ops as ops
    import random_parts as parts

    table = {group: [*ops.OPS.get(group, ()), *parts.PARTS.get(group, ())] for group in (*ops.OPS, *parts.PARTS)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        m = Maker(seed)
        for source in m.rng.sample(list(ops.SOURCES), m.one([1, 1, 2])):
            source(m)
        wanted, tries = len(m.model.steps) + m.rng.randint(4, MOST_STEPS), 0
        while len(m.model.steps) < wanted and tries < 200:
            tries += 1
            m.one(m.one(list(table.values())))(m)
        if m.chance(0.15):
            m.parameter(m.width(), m.width())  # nobody reads it
        losses.finish(m)
        if not _moves(m.model, m.inputs):
            losses.add_plain_loss(m)
        if m.chance(0.2):
            m.model.kept = m.one([v.at for v in m.vars if 0 <= v.at < m.places - 1])
    return m.model.train(), tuple(m.inputs), {}


def _moves(model: Steps, inputs: Sequence[Tensor]) -> bool:
    """Whether some gradient is more than rounding (the sum of a softmax has none)."""
    copy = deepcopy(model.train())
    copy(*inputs).backward()
    return any(p.grad is not None and p.grad.abs().max() > 1e-3 for p in copy.parameters())


# -- plans

MESHES: list[tuple[int, ...]] = [(2,), (3,), (2, 2), (4,), (2, 3), (4, 2)]
PINS: list[dict[str, int]] = [
    {"tp": 2}, {"tp": 3}, {"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "microbatches": 2},
    {"dp": 2, "zero": 2, "microbatches": 2}, {"tp": 4},
]  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One plan for the model of ``seed``: layouts drawn at random, pins, or (on ``mesh`` ranks) the solver's own."""

    seed: int
    kind: str  # "random", "pinned" or "solved"
    layouts: int = 0
    mesh: tuple[int, ...] = (2,)
    microbatches: int = 1
    pins: tuple[tuple[str, int], ...] = ()


def plans(seed: int, count: int = 3) -> list[Drawn]:
    """``count`` random layouts, and now and then a plan for pins and the solver's."""
    rng = random.Random(~seed)
    found = [
        Drawn(seed, "random", 100 * seed + i, rng.choice(MESHES), rng.choice([1, 1, 2, 3]) if i else 1)
        for i in range(count)
    ]
    if rng.random() < 0.3:
        found.append(Drawn(seed, "pinned", pins=tuple(rng.choice(PINS).items())))
    if rng.random() < 0.1:
        found.append(Drawn(seed, "solved", mesh=rng.choice([(2,), (4,)])))
    return found


def judged(judge: Any, plan: Drawn) -> str:
    """``equal``, ``refused: ...`` (one line for the user), or what is wrong. ``judge``: the model's `StackedJudge`."""
    try:
        lowerable = _lowerable(judge, plan)
        worst = judge.distances(lowerable)[0]
    except AutoparError as error:
        return f"refused: {error}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {str(error)[:300]}"
    return verdict(judge, worst)


def verdict(judge: Any, worst: Difference) -> str:
    """``equal`` within the fp64 limits, or within ten times what rounding does to one process."""
    near = worst.rel <= FP64.limits[worst.kind] or worst.rel <= 10 * _noise(judge)
    return "equal" if near else f"not equal: {worst}"


def _lowerable(judge: Any, plan: Drawn) -> Any:
    if plan.kind == "random":
        return judge.drawn(plan.layouts, plan.mesh, plan.microbatches)
    captured, given = judge.captured, dict(plan.pins)
    cluster = Cluster.local(ranks=given.get("dp", 1) * given.get("tp", 1) if given else plan.mesh[0])
    made = plan_training(captured, Pins.parse(given), cluster, {}).plan
    return apply(made, judge.prepared(made.microbatches))


def _noise(judge: Any) -> float:
    """How far the gradients of one process move with the last bits of its parameters and inputs."""
    reference, held = judge.reference, {n: t.detach().clone() for n, t in judge.attributes.items()}
    generator = torch.Generator().manual_seed(0)
    for t in held.values():
        if t.is_floating_point():
            t.mul_(1 + 4e-16 * torch.randn(t.shape, generator=generator, dtype=t.dtype))
    for name in judge.captured.parameters:
        held[name].requires_grad_(judge.captured.parameters[name].requires_grad)
    loss = run_graph(judge.graph, [t.clone() for t in judge.inputs], held, judge.key)["outputs"][0]
    loss.backward()
    grads = {n: held[n].grad for n in judge.captured.parameters}
    found = distances(Run(loss.detach(), grads, {}, {}), Run(reference.loss, reference.grads, {}, {}), lr=1.0)
    return found[0].rel
