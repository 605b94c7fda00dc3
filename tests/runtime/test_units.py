"""Units on real ranks: steps of one process, however parameters rest, whatever is recomputed or left to autograd."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.build import apply, choose, prepare
from autopar.capture import Capture, capture
from autopar.cluster import Cluster
from autopar.count_collectives import count_collectives
from autopar.passes.complete_layouts import treat_by_stage
from autopar.passes.completion import is_op
from autopar.passes.facts import KEY, fact
from autopar.passes.insert_changes import produced_layout
from autopar.passes.lower import Local, Lowerable, lower, with_changes
from autopar.pins import Pins, resolve
from autopar.runtime import collectives, ops, stage, units
from autopar.runtime.buckets import Bucket, Flight
from autopar.runtime.collectives import settle
from autopar.runtime.counter_random import random_key
from autopar.runtime.mesh import connect
from autopar.runtime.parameters import place
from autopar.runtime.pool import RankPool
from autopar.runtime.program import Program
from autopar.runtime.units import Autograd, Explicit
from autopar.runtime.weights import UNDER_WAY, Weights, ways_of

Pools = Callable[[int], RankPool]
BATCH, WORDS, WIDTH, HIDDEN = 12, 10, 6, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Ids ``[batch, 3]`` to a loss. The head is tied to the embedding, the gain frozen, ``spare`` unused, ``last`` not
    reached by the loss; ``calls`` counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)
        self.spare, self.last = nn.Parameter(torch.randn(3)), nn.Linear(WIDTH, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        x = self.blocks(self.embed(ids)) * self.gain
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), self.last(x.detach())


@dataclass(frozen=True)
class Case:
    """``zero``: the stage of each parameter in turn; ``recompute``: of each unit in turn; ``autograd``: whether units
    are left to it, all or every second one."""

    pins: tuple[tuple[str, int], ...]
    zero: tuple[int, ...] = (0,)
    recompute: tuple[str, ...] = ("none",)
    pieces: int = 5
    autograd: str = ""

    def __str__(self) -> str:
        words = [f"{name}={n}" for name, n in self.pins] + [
            "zero",
            *map(str, self.zero),
            *self.recompute,
            self.autograd,
        ]
        return " ".join(w for w in words if w)

    @property
    def ranks(self) -> int:
        return dict(self.pins)["dp"] * dict(self.pins).get("tp", 1)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (BATCH, 3), generator=g) for _ in range(2))
    labels[seed % BATCH, 1:] = -100
    return ids, labels


@cache
def captured_net() -> Capture:
    return capture(Net().train(), batch(0), check=False)


def lowerable(case: Case) -> tuple[Lowerable, Capture]:
    """The model with its ops cut in so many units, and its parameters treated as the case says."""
    captured = captured_net()
    resolved = resolve(Pins.parse({"microbatches": 1, "zero": 0} | dict(case.pins)), case.ranks, BATCH)
    prepared = prepare(captured, resolved.microbatches)
    plan = choose(prepared, resolved, Cluster.local(ranks=case.ranks))
    model = apply(plan, prepared)
    ops = [n for n in model.body.graph.nodes if is_op(n)]
    for place_, node in enumerate(ops):
        node.meta[KEY] = replace(fact(node), unit=place_ * case.pieces // len(ops))
    over = [i for i, axis in enumerate(model.mesh.axes) if axis.name == "dp"]
    leaves = (n for n in model.body.graph.nodes if n.op == "get_attr" and n.target in model.parameters)
    for node, zero in zip(leaves, itertools.cycle(case.zero), strict=False):
        treat_by_stage(node, produced_layout(node), zero, over, model.mesh)
    recompute = tuple(itertools.islice(itertools.cycle(case.recompute), case.pieces))
    return with_changes(replace(model, recompute=recompute)), captured


def made(case: Case) -> tuple[Program, nn.Module, Local]:
    model, captured = lowerable(case)
    ranks = connect(model.mesh)
    local = lower(model, ranks.rank, ranks.group_names)
    tensors = place(Net(), local.parameters, ranks)
    units._UNITS.clear()
    if case.autograd:
        for number, kind in enumerate(k for p in local.units.values() for k in p.classes):
            if kind.trains and (case.autograd == "all" or number % 2):
                units._UNITS[kind.key, ranks.device] = Autograd(kind, "asked for")
    return Program([local], tensors, ranks, captured.constants), tensors, local


def results(program: Program, tensors: nn.Module, steps: int = 2) -> dict[str, Any]:
    losses = [program.step(batch(s), outputs=True) for s in range(steps)]
    grads = {n: None if p.grad is None else p.grad.full_tensor() for n, p in tensors.named_parameters()}  # type: ignore[attr-defined]
    return {"losses": losses, "grads": grads, "calls": tensors.get_buffer("calls")}


# what the ranks run


def two_steps(rank: int, case: Case) -> tuple[dict[str, Any], list[str], Counter[str], int]:
    """What they give, what was sent in which order, what of it is predicted, and how many units autograd runs."""
    program, tensors, local = made(case)
    with pytest.MonkeyPatch.context() as patch:
        sent = Sent(patch)
        found = results(program, tensors)
    counted: Counter[str] = Counter()
    for row in count_collectives(local, {name: axis for axis, name in connect(local.mesh).group_names.items()}):
        counted[row.kind] += 2 * row.count
    return found, sent.kinds, counted, len(program.fallbacks)


def weights_alive(rank: int, case: Case) -> list[tuple[int, int]]:
    """For forward and backward of every unit: bytes of gathered weights that are alive, and of those that it reads."""
    program, _, local = made(case)
    refs: list[tuple[StorageWeakRef, int]] = []
    found: list[tuple[int, int]] = []
    sizes = [math.prod(u.use.local_shape(u.shape, local.mesh, local.coordinates)) * 8 for u in local.parameters]
    land, arrive = Weights._land, Weights.arrive

    def landed(self: Weights, flight: Flight) -> None:
        land(self, flight)
        for i in flight.members:
            read = self.read[i]
            assert read is not None
            refs.append((StorageWeakRef(read.untyped_storage()), sizes[i]))

    def arrived(self: Weights) -> None:
        arrive(self)
        here, end = sum(sizes[i] for i in self._here), time.monotonic() + 1.0
        alive = lambda: sum(n for ref, n in refs if not ref.expired())
        while alive() > here and time.monotonic() < end:  # a thread of gloo may let go a moment later
            time.sleep(0.001)
        found.append((alive(), here))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "_land", landed)
        patch.setattr(Weights, "arrive", arrived)
        program.step(batch(0))
    assert all(ref.expired() for ref, _ in refs)
    return found


def order_of_work(rank: int, case: Case) -> list[str]:
    """Backwards of units, and reductions as they start and as they have been waited for."""
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "ways_of", lambda local, units, parted: ways_of(local, units, cap=500))
        program, _, _ = made(case)
        for owner, name, word in ((Explicit, "backward", "backward"), (Weights, "_bring", "brought")):
            patch.setattr(owner, name, noted(done, word, getattr(owner, name)))
        patch.setattr(Bucket, "leave", noted(done, "reduce", Bucket.leave, before=True))
        program.step(batch(0))
    return done


def noted(done: list[str], word: str, function: Callable[..., Any], before: bool = False) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        done.extend([word] * before)
        result = function(*args)
        done.extend([word] * (not before))
        return result

    return call


def alive_after_steps(rank: int, case: Case) -> tuple[list[tuple[int, int]], bool]:
    """(tensors, bytes of their storages) after some steps, and whether a parameter frozen by now has no gradient."""
    program, tensors, _ = made(case)
    found = []
    for step in range(12):
        program.step(batch(step % 2))
        if step in (3, 11):
            settle()
            gc.collect()
            tensors_ = [o for o in gc.get_objects() if isinstance(o, Tensor)]
            found.append((len(tensors_), sum(t.untyped_storage().nbytes() for t in tensors_ if not t.is_meta)))
    for parameter in tensors.parameters():
        parameter.grad = None
    frozen = tensors.get_parameter("blocks.1.up.weight").requires_grad_(False)
    program.step(batch(0))
    return found, frozen.grad is None and tensors.get_parameter("blocks.1.up.bias").grad is not None


class Sent:
    """The kinds of collectives in the order in which they are launched."""

    KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kinds: list[str] = []
        launch = collectives.launch

        def counted(name: str, group: str, *args: Any) -> Tensor:
            self.kinds.append(next(kind for kind in self.KINDS if name.startswith(kind)))
            return launch(name, group, *args)

        for module in (collectives, ops):
            patch.setattr(module, "launch", counted)


# the same in one process


def reference() -> dict[str, Any]:
    """The whole graph under autograd, with the same random numbers."""
    model, captured = lowerable(Case((("dp", 1),)))
    local = lower(model, 0, {})
    net = Net()
    named = dict(net.named_parameters())
    losses = []
    for step in range(2):
        given = [named[u.fqn] for u in local.parameters]
        inputs = [batch(step)[i] for i, _ in enumerate(local.inputs)]
        outs, updates = local.body[0](
            *given, *(net.get_buffer(b) for b in local.buffers), *(captured.constants[c] for c in local.constants),
            *inputs, 0, random_key(0, step),
        )  # fmt: skip
        outs[0].backward()
        losses.append(tuple(o.detach() for o in outs))
        net.calls.copy_(updates[0])
    return {"losses": losses, "grads": {n: p.grad for n, p in named.items()}, "calls": net.calls}


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Pools by size, started when first asked for."""
    started: dict[int, RankPool] = {}
    yield lambda size: started.setdefault(size, RankPool(size, timeout=120))
    for pool in started.values():
        pool.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return reference()


TWO, TP, FOUR = (("dp", 2),), (("dp", 1), ("tp", 2)), (("dp", 2), ("tp", 2))
THREE = ("microbatches", 3)
CASES = [
    Case((("dp", 1),), autograd="all"),
    Case(TWO),
    Case(TWO, (3,), ("selective",)),
    Case((*TWO, THREE), (0, 1, 2, 3)),
    Case((*TWO, THREE), (3, 2, 1, 0), ("full", "none", "selective")),
    Case(TWO, (3,), ("none",), autograd="all"),
    Case((*TWO, THREE), (1, 3), ("none", "full"), autograd="some"),
    Case(TP),
    Case((*TP, THREE), (0,), ("full",)),
    Case(FOUR, (1, 3)),
    Case((*FOUR, THREE), (3, 0, 2), ("selective", "full")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_steps_equal_one_process(case: Case, pools: Pools, expected: dict[str, Any]) -> None:
    every = pools(case.ranks).run(two_steps, case)
    for found, sent, counted, fallbacks in every:
        same(found, expected)
        assert sent == every[0][1], "collectives come in the same order on all ranks"
        assert Counter(sent) == counted
        assert bool(fallbacks) == bool(case.autograd)


@pytest.mark.parametrize("autograd", ["", "all"])
def test_weights_are_there_while_they_are_read(autograd: str, pools: Pools) -> None:
    for found in pools(2).run(weights_alive, Case((*TWO, ("microbatches", 2)), (3,), autograd=autograd)):
        assert found[0] == (0, 0)
        for alive, read in found:
            assert alive <= read
        assert max(read for _, read in found) > 0


def test_reductions_run_beside_backward(pools: Pools) -> None:
    for done in pools(2).run(order_of_work, Case((*TWO, ("microbatches", 2)), (1, 2))):
        first, last = done.index("reduce"), len(done) - done[::-1].index("backward")
        assert first < last
        assert done[-1] == "brought" and done.count("reduce") == done.count("brought") > 4
        under_way = [done[:i].count("reduce") - done[:i].count("brought") for i in range(len(done))]
        assert max(under_way) == UNDER_WAY


def test_nothing_piles_up(pools: Pools) -> None:
    for found, frozen in pools(2).run(alive_after_steps, Case((*TWO, THREE), (3, 1), ("full", "none"))):
        assert found[0] == found[1]
        assert frozen
