"""The wire of an axis says what `solver.cost` and the cluster say."""

import pytest

from autopar.cluster import Cluster
from autopar.passes.layout import neutral
from autopar.solver.cost import collective
from autopar.wires import wire_of

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "stride"), [(8, 1), (2, 4), (64, 8), (512, 1), (256, 2)])
def test_a_wire_is_the_formula_on_the_cluster(kind, size, stride):
    cluster = Cluster.load("h100-dgx", nodes=64)
    wire = wire_of(cluster, size, stride)
    for nbytes in (1, 10**6, 10**9):
        assert wire.seconds(kind, nbytes) == pytest.approx(
            collective(kind, size, nbytes, *cluster.link(kind, size, stride)), rel=1e-12
        )


def test_a_local_copy_reads_and_writes():
    cluster = Cluster.load("h100-dgx")
    assert wire_of(cluster, 8, 1).copy * cluster.chip.memory_bandwidth.value * 0.9 == pytest.approx(2)


def test_an_axis_of_one_rank_takes_no_time():
    wire = wire_of(Cluster.local(ranks=2), 1, 1)
    assert [wire.seconds(kind, 1e9) for kind in KINDS] == [0.0] * 4


def test_what_is_equal_far_away_is_equal():
    cluster = Cluster.load("h100-dgx", nodes=64)
    assert wire_of(cluster, 8, 8) == wire_of(cluster, 8, 64) != wire_of(cluster, 8, 1)


def test_every_collective_of_a_wire_is_there():
    assert all(hasattr(neutral(4), kind) for kind in KINDS)
