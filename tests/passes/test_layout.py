"""Layouts: pieces tile the tensor, texts read back, uneven cuts are torch.chunk's."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.passes.layout import Axis, Layout, Mesh, parts_before

MESH = Mesh((Axis("dp", 2), Axis("tp", 3)))


@pytest.mark.parametrize(
    "text", ["R I", "P R", "S0 I", "S1 S0", "S0 S0", "S0@1 S0@0", "S0(6+6) R", "S0(3+3+6) S1", "S0(6+6)@1 S0(6+6)@0"]
)
def test_text_reads_back(text: str) -> None:
    layout = Layout.parse(text, 2)
    assert str(layout) == text
    assert Layout.parse(str(layout), 2) == layout


@pytest.mark.parametrize("text", ["S2", "X", "S0(2+)", "s0", "S-1"])
def test_words_that_are_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match="is not a layout"):
        Layout.parse(text, 2)


@pytest.mark.parametrize("text", ["S0 S1", "S0 S0", "S0@1 S0@0", "S0(6+6) S1", "S0(6+6) S0(6+6)", "R S0"])
def test_pieces_tile_the_tensor(text: str) -> None:
    layout, shape = Layout.parse(text, 2), (12, 6)
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in range(MESH.ranks):
        rows, columns = layout.runs(shape, MESH, MESH.coordinates(rank))
        for (a, n), (b, m) in itertools.product(rows, columns):
            seen[a : a + n, b : b + m] += 1
    copies = MESH.ranks // (2 ** ("S" in text.split()[0]) * 3 ** ("S" in text.split()[1]))
    assert torch.equal(seen, torch.full(shape, copies))
    assert layout.is_even(shape, MESH)


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_uneven_pieces_are_those_of_chunk(size: int) -> None:
    mesh, layout = Mesh((Axis("dp", 3),)), Layout.parse("S0", 1)
    chunks = [*torch.arange(size).chunk(3), *[torch.arange(0)] * 3]
    for rank in range(3):
        ((start, n),) = layout.runs((size,), mesh, (rank,))[0:1][0]
        assert torch.equal(torch.arange(size)[start : start + n], chunks[rank])
    assert layout.is_even((size,), mesh) == (size % 3 == 0)


@pytest.mark.parametrize("text", ["S0/5", "S0(10+20)/5", "S0(10+10+10)/5"])
def test_items_stay_together(text: str) -> None:
    """Five items over two ranks are three and two, in every part; their elements lie where chunk leaves them."""
    mesh, layout = Mesh((Axis("tp", 2),)), Layout.parse(text, 1)
    assert str(layout) == text and not layout.is_even((30,), mesh)
    parts = torch.arange(30).split(layout.dims[0].parts or 30)
    for rank in range(2):
        held = torch.cat([p.reshape(5, -1).chunk(2)[rank].flatten() for p in parts])
        (runs,) = layout.runs((30,), mesh, (rank,))
        assert torch.equal(torch.cat([torch.arange(lo, lo + n) for lo, n in runs]), held)


def test_items_that_are_cut_again() -> None:
    mesh, layout = Mesh((Axis("a", 2), Axis("b", 2))), Layout.parse("S0/5 S0/5", 1)
    assert [layout.local_shape((40,), mesh, at) for at in [(0, 0), (0, 1), (1, 0), (1, 1)]] == [(16,), (8,), (8,), (8,)]
    assert parts_before(1, 40, layout.dims[0], mesh, (0, 0)) == ((24,), 3)
    assert parts_before(0, 40, layout.dims[0], mesh, (0, 0)) == ((40,), 5)


def test_parts_that_are_not_so_many_items() -> None:
    with pytest.raises(ValueError, match="12 elements are not 5 equal items"):
        Layout.parse("S0/5", 1).runs((12,), Mesh((Axis("tp", 2),)), (0,))


def test_order_of_nesting_decides_who_holds_what() -> None:
    mesh = Mesh((Axis("a", 2), Axis("b", 2)))
    outer, inner = Layout.parse("S0 S0", 1), Layout.parse("S0@1 S0@0", 1)
    assert outer.runs((4,), mesh, (0, 1)) == (((1, 1),),)
    assert inner.runs((4,), mesh, (0, 1)) == (((2, 1),),)


def test_time_cuts_in_proportion_to_the_rows_of_a_microbatch() -> None:
    mesh = Mesh((Axis("dp", 2), Axis("time", 2, (4, 2))))
    layout = Layout.parse("S0@1 S0@0", 1)
    assert [layout.local_shape((18,), mesh, mesh.coordinates(1, m)) for m in (0, 1)] == [(6,), (3,)]
    assert layout.runs((6,), mesh, mesh.coordinates(1, 0)) == (((2, 2),),)
    assert layout.is_even((6,), mesh) and not layout.is_even((4,), mesh)


def test_one_dim_is_cut_in_one_way_only() -> None:
    cut = Layout.parse("S0(4+2) I", 1)
    with pytest.raises(ValueError, match="cut in parts"):
        cut.with_shard(1, 0)
    assert cut.with_shard(0, 0) == Layout.parse("S0 I", 1)
