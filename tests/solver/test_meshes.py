"""Meshes: all of them, none that straddles a tier, none twice."""

import math
from itertools import pairwise, product

import pytest

from autopar.cluster import Cluster
from autopar.solver.meshes import meshes, microbatch_counts
from autopar.wires import wire_of


@pytest.mark.parametrize("ranks", [1, 2, 6, 7, 8, 12, 24, 64, 96])
@pytest.mark.parametrize("spans", [(), (8,), (4, 16)])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_equal_to_counting(ranks, spans, most):
    """Brute force over tuples of sizes."""
    expected = set()
    for count in range(most + 1):
        for sizes in product(range(2, ranks + 1), repeat=count):
            if math.prod(sizes) != ranks:
                continue
            mesh = tuple((s, math.prod(sizes[i + 1 :])) for i, s in enumerate(sizes))
            ends = {stride for _, stride in mesh}
            if all(e % span == 0 or span % e == 0 for e in ends for span in spans):
                expected.add(mesh)
    found = meshes(ranks, spans, most=most)
    assert len(found) == len(set(found)) and set(found) == expected


def test_the_axes_make_the_ranks():
    for mesh in meshes(256, (8,), most=3):
        assert math.prod(size for size, _ in mesh) == 256 and mesh[-1][1] == 1
        assert all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(mesh))


def test_one_rank_has_no_axis():
    assert meshes(1) == ((),)


def test_ranks_that_fill_no_node_still_have_a_mesh():
    assert meshes(6, (8,)) == (((6, 1),), ((3, 2), (2, 1)))
    assert meshes(12, (8,))[0] == ((12, 1),)


def test_axes_on_equal_wires_are_tried_in_one_order():
    one, many = Cluster.load("h100-dgx"), Cluster.load("h100-dgx", nodes=8)
    wire = lambda cluster: lambda size, stride: wire_of(cluster, size, stride)
    assert meshes(8, (8,), wire=wire(one)) == (((8, 1),), ((2, 4), (4, 1)))
    assert len(meshes(64, (8,), wire=wire(many))) == 6  # (8, 8), (8, 1) crosses nodes on one axis: none equal
    assert len(meshes(64, (), wire=lambda size, stride: 0)) == 4


def test_microbatch_counts():
    assert microbatch_counts(1) == (1,) and microbatch_counts(1024) == tuple(2**i for i in range(11))
