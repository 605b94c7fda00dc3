"""Buckets on real ranks: bit for bit what the enter graphs do one by one, with one collective a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.lower import Local, ParameterUse, enter_graph
from autopar.runtime import buckets as buckets_module
from autopar.runtime.buckets import Alone, Bucket, Cast, Gather, Recut, Replicate, buckets
from autopar.runtime.mesh import connect
from autopar.runtime.pool import RankPool

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
MESH = Mesh((Axis("dp", 2), Axis("tp", 2)))
# name, shape, dtype, trainable, rest, use, reduce: over (dp, tp)
USES: list[tuple[str, tuple[int, ...], torch.dtype, bool, str, str, str]] = [
    ("a.weight", (6, 4), FP32, True, "I I", "R I", "step"),
    ("a.bias", (6,), FP32, True, "I I", "R I", "step"),
    ("a.half", (3, 5), BF16, True, "I I", "R I", "step"),
    ("b.cut", (6, 4), FP32, True, "I S1", "R S1", "step"),
    ("b.frozen", (4,), FP32, False, "I I", "I I", "step"),
    ("z.weight", (8, 3), FP32, True, "S0 I", "R I", "step"),
    ("z.uneven", (5, 3), FP32, True, "S0 I", "R I", "step"),
    ("z.frozen", (5, 2), FP32, False, "S0 I", "I I", "step"),
    ("z.one", (1,), FP32, True, "S0 I", "R I", "step"),
    ("z.none", (0, 3), FP32, True, "S0 I", "R I", "step"),
    ("z.whole", (7, 2), FP32, True, "S0 I", "I I", "step"),
    ("z.each", (8, 3), FP32, True, "S0 I", "R I", "microbatch"),
    ("z.half", (7, 2), BF16, True, "S0 I", "R I", "step"),
    ("z.rows", (6, 4), FP32, True, "S1 S0", "R S0", "step"),
    ("z.other", (6, 4), FP32, True, "S1 S0", "R S0", "step"),
    ("t.parts", (12, 2), FP32, True, "I S0", "R S0(4+4+4)", "step"),
    ("t.uneven", (9,), FP32, True, "I S0", "R S0(3+3+3)", "step"),
    ("t.items", (20, 2), FP32, True, "I S0", "R S0/5", "step"),
    ("t.fused", (30,), FP32, True, "I S0", "R S0(10+10+10)/5", "step"),
    ("z.items", (3, 20), FP32, True, "I S1/5", "R I", "step"),
    ("t.both", (8, 3), FP32, True, "S0 S1", "R R", "step"),
    ("t.odd", (5, 3), FP32, True, "S0 S1", "R R", "step"),
    ("g.shared", (4, 4), FP32, True, "I I", "R R", "step"),
    ("a.last", (2, 2, 2), FP32, True, "I I", "R I", "step"),
    ("a.scalar", (), FP32, True, "I I", "R I", "step"),
    ("p.partial", (6,), FP32, True, "I I", "R P", "step"),
    ("p.cut", (5, 3), FP32, True, "I I", "R S0", "step"),
    ("p.other", (4, 6), FP32, True, "I S0", "R S1", "step"),
]
UNUSED = ("a.bias", "z.uneven", "t.odd")


Dtypes = tuple[torch.dtype | None, torch.dtype | None]  # as those in fp32 are used, and their gradients reduced
MIXED: tuple[Dtypes, ...] = ((BF16, None), (BF16, torch.float16), (None, BF16))


def local_of(mesh: Mesh, rank: int, groups: dict[str, str], mixed: Dtypes = (None, None)) -> Local:
    uses = []
    for fqn, shape, dtype, trainable, rest, used, reduce in USES:
        before, after = (Layout.parse(text, len(shape)) for text in (rest, used))
        dtypes = mixed if dtype == FP32 else (None, None)
        uses.append(ParameterUse(fqn, shape, dtype, trainable, before, after, reduce, "step", *dtypes))
    enter = {u.fqn: enter_graph(u, mesh, rank, groups) for u in uses if u.rest != u.use or u.use_dtype}
    return Local(mesh, mesh.coordinates(rank), tuple(uses), (), (), (), (), (), {}, None, enter)


def named(local: Local, made: tuple[Bucket, ...]) -> list[list[str]]:
    return [[local.parameters[i].fqn for i in bucket.members] for bucket in made]


def all_buckets(local: Local, cap: int = buckets_module.CAP) -> tuple[Bucket, ...]:
    return buckets(local, range(len(local.parameters)), cap, lambda use: use.reduce)


# what the ranks run


def together_and_apart(rank: int) -> None:
    ranks = connect(MESH)
    local = local_of(MESH, rank, ranks.group_names)
    generator = torch.Generator().manual_seed(rank)
    rests = []
    for use in local.parameters:
        shape = use.rest.local_shape(use.shape, MESH, local.coordinates)
        rests.append(torch.randn(shape, generator=generator).to(use.dtype).requires_grad_(use.trainable))
    for cap in (0, 100, buckets_module.CAP):
        for bucket in all_buckets(local, cap):
            uses, own = [local.parameters[i] for i in bucket.members], [rests[i] for i in bucket.members]
            alone = [local.enter[use.fqn](rest) for use, rest in zip(uses, own, strict=True)]
            with torch.no_grad():
                entries = [t for _, t in bucket.enter(own).land()]
            gradients: list[Tensor | None] = []
            for use, x, y in zip(uses, alone, entries, strict=True):
                assert torch.equal(x, y) and x.dtype == y.dtype and y.is_contiguous(), use.fqn
                gradient = (
                    torch.randn(y.shape[::-1], generator=generator).to(y.dtype).permute(tuple(range(y.ndim))[::-1])
                )
                gradients.append(gradient if use.trainable and use.fqn not in UNUSED else None)
            brought = dict(bucket.leave(gradients).land())
            for i, use, x, rest, given in zip(bucket.members, uses, alone, own, gradients, strict=True):
                back = brought.get(i)
                if given is None:
                    assert back is None
                    continue
                (expected,) = torch.autograd.grad(x, rest, given)
                assert back is not None and back.is_contiguous() and back.dtype == expected.dtype, use.fqn
                assert torch.equal(back, expected), use.fqn


def in_other_dtypes(rank: int) -> None:
    """Values as the plain graphs have them in the dtype of use, gradients as in that of the reduction; what has added
    up in fp32 is reduced as well as what has not."""
    ranks = connect(MESH)
    for used, reduced in MIXED:
        local = local_of(MESH, rank, ranks.group_names, (used, reduced))
        generator = torch.Generator().manual_seed(rank)
        for bucket in all_buckets(local):
            uses = [local.parameters[i] for i in bucket.members]
            shapes = [use.rest.local_shape(use.shape, MESH, local.coordinates) for use in uses]
            own = [torch.randn(s, generator=generator).to(u.dtype) for s, u in zip(shapes, uses, strict=True)]
            with torch.no_grad():
                entries = [t for _, t in bucket.enter(own).land()]
            for use, rest, entry in zip(uses, own, entries, strict=True):
                there = plain(use, rank, ranks.group_names, use.value.dtype)
                assert entry.dtype == use.value.dtype and torch.equal(entry, there(rest.to(entry.dtype))), use.fqn
            for i, (dtype, use) in enumerate((d, use) for d in ("rest", "use") for use in uses if use.trainable):
                entry = entries[uses.index(use)]
                gradient = torch.randn(entry.shape, generator=generator)
                gradient = gradient.to(use.dtype if dtype == "rest" else entry.dtype)
                given = [gradient if other is use else None for other in uses]
                ((_, back),) = bucket.leave(given).land()
                rest = own[uses.index(use)].to(use.value.reduced.dtype).requires_grad_()
                through = plain(use, rank, ranks.group_names, rest.dtype)(rest)
                (expected,) = torch.autograd.grad(through, rest, gradient.to(rest.dtype))
                assert back.dtype == use.dtype and torch.equal(back, expected.to(use.dtype)), (use.fqn, i)


def plain(use: ParameterUse, rank: int, groups: dict[str, str], dtype: torch.dtype) -> Any:
    """The way of a parameter that has one dtype; nothing where it does not move."""
    same = replace(use, dtype=dtype, use_dtype=None, reduce_dtype=None)
    return enter_graph(same, MESH, rank, groups) if use.rest != use.use else lambda t: t


# the tests


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout=60) as made:
        yield made


def test_a_bucket_does_what_its_members_do_alone(pool: RankPool) -> None:
    pool.run(together_and_apart)


def test_a_bucket_of_mixed_precision_casts_before_it_gathers_and_reduces(pool: RankPool) -> None:
    pool.run(in_other_dtypes)
    local = local_of(MESH, 0, {"dp": "dp", "tp": "tp"}, (BF16, None))
    first = all_buckets(local)[0]
    assert [type(link) for link in first.chains[0]] == [Cast, Replicate, Cast]
    assert ["b.frozen"] in named(local, all_buckets(local)), "cast where it does not move"


def test_who_shares_a_bucket() -> None:
    local = local_of(MESH, 0, {"dp": "dp", "tp": "tp"})
    made = all_buckets(local)
    assert named(local, made) == [
        ["a.weight", "a.bias", "b.cut", "a.last", "a.scalar"],
        ["a.half"],
        ["z.weight", "z.uneven", "z.frozen", "z.one", "z.none", "z.rows", "z.other"],
        ["z.whole"],
        ["z.each"],
        ["z.half"],
        ["t.parts", "t.uneven", "t.items", "t.fused"],
        ["z.items"],
        ["t.both", "t.odd"],
        ["g.shared"],
        ["p.partial"],
        ["p.cut"],
        ["p.other"],
    ]
    kinds = [tuple(type(link) for link in bucket.chains[0]) for bucket in made]
    assert kinds[0] == (Replicate,) and kinds[2] == (Gather,) and set(kinds[6]) == {Recut, Replicate}
    assert all(Alone in of for of in kinds[-3:]) and not any(Alone in of for of in kinds[:-3])


def test_buckets_are_the_same_on_all_ranks() -> None:
    groups = {"dp": "dp", "tp": "tp"}
    for cap in (0, 100, 300):
        every = [[b.members for b in all_buckets(local_of(MESH, rank, groups), cap)] for rank in range(4)]
        assert every == [every[0]] * 4


def test_a_full_bucket_is_closed() -> None:
    local = local_of(MESH, 0, {"dp": "dp", "tp": "tp"})
    assert named(local, all_buckets(local, 0)) == [[u.fqn] for u in local.parameters if u.fqn in local.enter]
    sizes = [6 * 4 * 4, 6 * 4, 6 * 2 * 4, 8 * 4, 4]  # bytes of the first bucket's members
    assert named(local, all_buckets(local, sum(sizes[:3])))[0] == ["a.weight", "a.bias", "b.cut"]
    assert ["a.last", "a.scalar"] in named(local, all_buckets(local, sum(sizes[:3])))
