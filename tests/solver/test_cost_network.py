"""Seconds of collectives: measured points come back, other sources agree, groups share NICs as they do."""

from dataclasses import replace

import numpy as np
import pytest
import sympy

from autopar.cluster import Cluster, from_json
from autopar.errors import AutoparError
from autopar.hardware import Figure
from autopar.solver.cost import KINDS, share

H100 = Cluster.load("h100-dgx", nodes=64).network()
A100 = Cluster.load("a100-dgx", nodes=64).network()
SIZES = np.array([8, 2**10, 2**15, 2**20, 3e6, 2**24, 2**27, 2**30, 2**33])
GROUPS = [(2, 1), (4, 1), (6, 1), (8, 1), (2, 4), (16, 1), (512, 1), (64, 8), (2, 8), (128, 4), (12, 2)]


def bus(network, kind, nbytes, size, stride=1, **more):
    """Bus bandwidth in GB/s."""
    return share(kind, size) * nbytes / network.seconds(kind, nbytes, size, stride, **more) / 1e9


@pytest.mark.parametrize("name", ["h100-dgx", "a100-dgx"])
def test_the_measured_curves_come_back(name):
    cluster = Cluster.load(name)
    network = cluster.network()
    for kind, link in cluster.tiers[0].collectives.items():
        for ranks, curve in link.curves.items():
            nbytes, seconds = np.array(curve.points).T
            assert (np.diff(seconds) >= 0).all(), (kind, ranks)
            assert network.seconds(kind, nbytes, int(ranks)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "stride"), GROUPS)
@pytest.mark.parametrize("network", [H100, A100, Cluster.local(ranks=2).network()], ids=["h100", "a100", "local"])
def test_more_bytes_never_take_less_nor_jump(network, kind, size, stride):
    nbytes = np.geomspace(1, 2e10, 500)
    seconds = network.seconds(kind, nbytes, size, stride)
    assert (np.diff(seconds) >= 0).all() and (seconds > 0).all()
    assert (seconds[1:] / seconds[:-1] < (nbytes[1] / nbytes[0]) ** 1.6).all()
    assert network.seconds(kind, nbytes[7], size, stride) == seconds[7]
    assert network.seconds(kind, 0, size, stride) == 0 and network.seconds(kind, 1e9, 1, stride) == 0
    twice = network.seconds(kind, nbytes, size, stride, concurrent=2)
    assert twice == pytest.approx(network.seconds(kind, 2 * nbytes, size, stride))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "stride"), GROUPS)
def test_the_line_is_the_ends_of_the_seconds(kind, size, stride):
    latency, bandwidth = H100.line(kind, size, stride)
    assert H100.seconds(kind, 1, size, stride) == pytest.approx(latency, rel=0.6)
    if kind not in ("all_to_all", "send"):
        assert H100.seconds(kind, 1e11, size, stride) == pytest.approx(share(kind, size) * 1e11 / bandwidth, rel=0.15)
    nbytes = sympy.Symbol("nbytes", positive=True)
    assert float(H100.seconds(kind, nbytes, size, stride).subs(nbytes, 0)) == pytest.approx(latency)


@pytest.mark.parametrize(("gpus", "gbps"), [(4, 363.3), (5, 414.2), (6, 435.6), (7, 460.0), (8, 473.1)])
def test_nvls_from_five_gpus(gpus, gbps):
    """8 GiB all-reduce on H200, the same links (stas00/ml-engineering network/README.md)."""
    assert bus(H100, "all_reduce", 2**33, gpus) == pytest.approx(gbps, rel=0.07)


def test_gathers_and_scatters_have_no_nvls():
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert all(bus(H100, kind, 2**33, n) < 370 for n in (2, 4, 8))
    assert [round(bus(H100, "all_gather", 2**31, n)) for n in (2, 4, 8)] == [275, 333, 352]


@pytest.mark.parametrize(
    ("nbytes", "us"), [(2**21, 113.2), (2**22, 154.4), (2**23, 231.4), (2**24, 420.5), (2**25, 812.3)]
)
def test_two_nodes_of_one_h100(nbytes, us):
    """All-reduce by NCCL's tree over RoCE, nccl-tests#232."""
    assert H100.seconds("all_reduce", nbytes, 2, 8) * 1e6 == pytest.approx(us, rel=0.2 if nbytes == 2**21 else 0.1)


@pytest.mark.parametrize(
    ("nbytes", "us"), [(2**23, 146.5), (2**24, 203.0), (2**25, 298.5), (2**26, 467.9), (2**29, 3218.6)]
)
def test_two_full_nodes(nbytes, us):
    """All-reduce of 16 H20, whose links are those of H100 (nccl#1244); 1 MiB reads 122 us where this says 76."""
    assert H100.seconds("all_reduce", nbytes, 16) * 1e6 == pytest.approx(us, rel=0.25)


def test_plateaus_between_nodes():
    for nodes in (2, 8, 64):
        assert bus(H100, "all_reduce", 2**34, 8 * nodes) == pytest.approx(370, rel=0.03)
        assert bus(A100, "all_reduce", 2**34, 8 * nodes) == pytest.approx(192, rel=0.03)
        assert 46 < bus(H100, "all_reduce", 2**34, nodes, 8) < 48  # one NIC
        assert bus(A100, "reduce_scatter", 2**34, nodes, 8) == pytest.approx(24, rel=0.02)
    assert bus(H100, "all_reduce", 2**34, 128, 4) == pytest.approx(2 * 46.25, rel=0.02)  # two ranks a node: two NICs
    assert bus(H100, "send", 2**30, 2, 8) == pytest.approx(46, rel=0.02)
    assert bus(A100, "send", 2**30, 2, 64) == pytest.approx(24, rel=0.02)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_an_all_to_all_does_not_share_nics(nodes):
    """Bus bandwidth N/(N-1) of a NIC for N full nodes (nccl-tests#130)."""
    assert bus(H100, "all_to_all", 2**32, 8 * nodes) == pytest.approx(48 * nodes / (nodes - 1), rel=0.09)
    assert bus(H100, "all_to_all", 2**32, nodes, 8) == pytest.approx(48, rel=0.02)


def test_rings_grow_with_their_ranks_and_trees_with_their_depth():
    small = [H100.seconds("all_gather", 1e6, 8 * n) for n in (2, 8, 64)]
    assert small[2] > 3.5 * small[1] > 3.5 * small[0] * 0.9
    trees = [H100.seconds("all_reduce", 1e6, 8 * n) for n in (2, 8, 64)]
    assert trees[2] < 3 * trees[0]


def test_a_fabric_scales_what_crosses_nodes():
    cluster = Cluster.load("a100-dgx", nodes=8)
    half = cluster.with_fabric(800)
    assert half.tiers[1].bandwidth.value == 12.5e9
    for kind in KINDS:
        assert bus(half.network(), kind, 2**34, 8, 8) == pytest.approx(
            bus(cluster.network(), kind, 2**34, 8, 8) / 2, rel=1e-3
        )
    assert half.network().seconds("all_reduce", 1e9, 8) == cluster.network().seconds("all_reduce", 1e9, 8)
    assert cluster.with_fabric(1600).link("all_gather", 8, 8) == cluster.link("all_gather", 8, 8)
    with pytest.raises(AutoparError, match="cluster a100-dgx: a fabric of 0 Gbit/s. Legal: more than 0."):
        cluster.with_fabric(0)


def _network_with(**fields):
    cluster = Cluster.load("h100-dgx", nodes=8)
    return replace(cluster, tiers=(cluster.tiers[0], replace(cluster.tiers[1], **fields))).network()


def test_oversubscription_divides_the_wires():
    four = _network_with(oversubscription=Figure(4.0, "a test of ours"))
    for kind in KINDS:
        assert bus(four, kind, 2**34, 8, 8) == pytest.approx(bus(H100, kind, 2**34, 8, 8) / 4, rel=1e-2)


def test_rails_make_an_all_to_all_cross_its_node_first():
    rails = _network_with(rail_only=True)
    assert rails.seconds("all_reduce", 1e9, 64) == H100.seconds("all_reduce", 1e9, 64)
    slow = replace(rails, lanes=(replace(rails.lanes[0], bandwidth=dict.fromkeys(KINDS, 10e9)), rails.lanes[1]))
    free = replace(slow, lanes=(slow.lanes[0], replace(slow.lanes[1], rail_only=False)))
    assert slow.seconds("all_to_all", 1e9, 64) > 2 * free.seconds("all_to_all", 1e9, 64)


def test_a_kind_without_a_figure():
    with pytest.raises(
        AutoparError, match="cluster h100-dgx: tier network has no figure for 'gather'. Legal: all_reduce"
    ):
        H100.seconds("gather", 1e6, 16)


def test_a_cluster_without_protocols_counts_latency_by_its_nodes():
    cluster = replace(Cluster.load("h100-dgx", nodes=8), protocols=())
    assert cluster.network().seconds("all_gather", 8e9, 64) == pytest.approx(3 * 4.7e-5 + 63 / 64 * 8e9 / 200e9)
    assert cluster.link("all_gather", 64, 1) == pytest.approx((3 * 4.7e-5, 200e9))


def test_files_may_say_how_they_differ_from_a_shipped_cluster():
    mine = {"schema": 2, "name": "mine", "like": "h100-dgx", "nodes": 4, "chip": {"name": "slow"}}
    base = Cluster.load("h100-dgx", nodes=4)
    assert from_json(mine, where="mine") == replace(base, name="mine", chip=replace(base.chip, name="slow"))
    with pytest.raises(
        AutoparError, match=r"mine: at \$.like: 'h200' is no shipped cluster. Legal: a100-40gb, a100-dgx"
    ):
        from_json(mine | {"like": "h200"}, where="mine")
