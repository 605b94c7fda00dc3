"""Clusters: shipped files, figures with sources, errors by JSON path."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from autopar.cluster import FOLDER, Cluster, from_json, shipped
from autopar.errors import AutoparError
from autopar.solver.cost import KINDS


def _h100():
    return json.loads((FOLDER / "h100-dgx.json").read_text())


def test_shipped_names():
    assert shipped() == ["a100-40gb", "a100-dgx", "h100-dgx", "h100-grandteton", "h200-dgx", "local"]


def test_nodes_of_another_size():
    """Between nodes the ranks of a node reach together what their own wires carry; inside, nothing changes."""
    cluster = Cluster.load("h100-dgx", nodes=4)
    half = cluster.with_node(4)
    assert half.ranks == 16 and cluster.with_node(8) == cluster
    assert half.network().seconds("all_gather", 1e9, 4) == cluster.network().seconds("all_gather", 1e9, 4)
    assert half.network().seconds("all_gather", 1e9, 8) > 3 * cluster.network().seconds("all_gather", 1e9, 8)
    assert half.link("all_reduce", 16, 1)[1] == pytest.approx(cluster.link("all_reduce", 16, 1)[1] / 2)


@pytest.mark.parametrize("name", shipped())
def test_every_number_has_a_source(name):
    def walk(value, path):
        if isinstance(value, dict) and {"value", "points", "source"} & set(value):
            assert len(value["source"]) > 10, path
            return
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert path.rsplit(".", 1)[1] in ("schema", "nodes", "ranks_per_node", "spans"), f"{path} has no source"
        for key, item in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            walk(item, f"{path}.{key}")

    walk(json.loads((FOLDER / f"{name}.json").read_text()), "$")
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert all(set(t.collectives) == set(KINDS) for t in cluster.tiers)


def test_h100_figures_are_those_of_the_data_sheet():
    cluster = Cluster.load("h100-dgx", nodes=64)
    assert (cluster.ranks, cluster.nodes, cluster.ranks_per_node, cluster.device) == (512, 64, 8, "cuda")
    assert cluster.chip.flops["bf16"].value == 989e12
    assert cluster.tiers[0].bandwidth.value == 450e9
    assert cluster.tiers[1].bandwidth.value * 8 == 400e9
    assert cluster.memory == int(79.11 * 2**30)


@pytest.mark.parametrize(
    ("size", "stride", "tier"),
    [(2, 1, "nvlink"), (8, 1, "nvlink"), (2, 4, "nvlink"), (4, 4, "network"), (64, 8, "network")],
)
def test_tier_of_an_axis(size, stride, tier):
    assert Cluster.load("h100-dgx", nodes=64).tier_of(size, stride).name == tier


@pytest.mark.parametrize(
    ("kind", "size", "stride", "bandwidth"),
    [
        ("all_gather", 8, 1, 351.7e9),  # inside a node: as measured
        ("all_gather", 2, 4, 275.0e9),
        ("all_reduce", 8, 1, 480e9),  # NVLS
        ("all_reduce", 4, 1, 363.3e9),
        ("all_reduce", 512, 1, 370e9),  # 8 ranks a node: 8 NICs
        ("all_gather", 512, 1, 200e9),  # as reported of full groups
        ("all_gather", 256, 2, 185e9),  # 4 ranks a node
        ("all_reduce", 128, 4, 92.5e9),
        ("reduce_scatter", 64, 8, 46.25e9),  # one rank a node: one NIC
        ("reduce_scatter", 2, 8, 46.25e9),
        ("reduce_scatter", 4, 128, 46.25e9),
        ("all_to_all", 64, 8, 48e9),  # never more than measured
        ("all_to_all", 512, 1, 48e9),
    ],
)
def test_a_group_gets_the_nics_of_its_ranks(kind, size, stride, bandwidth):
    cluster = Cluster.load("h100-dgx", nodes=64)
    assert cluster.link(kind, size, stride)[1] == pytest.approx(bandwidth, rel=2e-3)


def test_a_message_has_no_tree():
    assert Cluster.load("h100-dgx", nodes=64).link("send", 64, 8) == (2.24e-5, 46e9)


@pytest.mark.parametrize(
    ("size", "stride", "bandwidth", "nodes"),
    [
        (8, 1, 351.7e9, 1),
        (32, 1, 320e9, 4),  # inside a rack: 8 NICs of 40 GB/s a node
        (4, 8, 40e9, 4),
        (128, 1, 320e9, 16),  # across racks: 32 x 10 GB/s a rack, and no more than a node's NICs
        (16, 8, 40e9, 16),  # 4 ranks a rack: 4 x 10 GB/s
        (4, 32, 10e9, 4),  # one rank a rack
        (8, 16, 20e9, 8),
    ],
)
def test_three_tiers(size, stride, bandwidth, nodes):
    cluster = from_json(_three(rack=32) | {"nodes": 16, "protocols": []}, where="three")
    latency = cluster.tier_of(size, stride).collectives["all_gather"].latency.value
    found = cluster.link("all_gather", size, stride)
    assert found == pytest.approx((latency * max(1, math.log2(nodes)), bandwidth), rel=2e-3)


def test_a_kind_without_a_figure():
    cluster = from_json(_without("tiers", 1, "collectives", "send") | {"nodes": 2}, where="mine")
    with pytest.raises(AutoparError, match="tier network has no figure for 'send'. Legal: all_reduce, all_gather"):
        cluster.link("send", 2, 8)


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [("bf16", 989e12), ("fp16", 989e12), ("fp8", 1979e12), ("tf32", 494.5e12), ("fp32", 67e12), ("fp64", 33.5e12)],
)
def test_the_peak_of_a_dtype(dtype, peak):
    chip = Cluster.load("h100-dgx").chip
    assert chip.peak(dtype) == peak and chip.matmul_rate(dtype) == pytest.approx(
        (0.709 if dtype == "fp8" else 0.803) * chip.sustained * peak
    )


def test_a_missing_dtype_takes_the_next():
    data = _set(["chip", "flops"], {"fp32": HALF | {"value": 10.0}})
    chip = from_json(data, where="mine").chip
    assert [chip.peak(d) for d in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")] == [5, 10, 10, 10, 10, 10]
    data["chip"]["flops"] |= {"fp16": HALF | {"value": 40.0}, "fp64": HALF | {"value": 7.0}}
    chip = from_json(data, where="mine").chip
    assert [chip.peak(d) for d in ("fp64", "bf16", "fp8")] == [7, 40, 40]
    with pytest.raises(AutoparError, match="chip H100 SXM5 80GB: no FLOP/s for 'int4'. Legal: fp64, fp32"):
        chip.peak("int4")


def test_the_limit_is_what_tensors_may_take():
    cluster = Cluster.load("h100-dgx")
    assert cluster.chip.held(cluster.limit) == pytest.approx(cluster.memory, abs=2)
    assert cluster.chip.memory_rate == pytest.approx(0.9 * 3350e9)
    local = Cluster.local(ranks=2)
    assert local.limit == local.memory


@pytest.mark.parametrize("name", shipped())
def test_what_is_assumed_says_so(name):
    chip = Cluster.load(name).chip
    assert not chip.efficiency["memory"].verified
    assert chip.reserved is None or not chip.reserved.context.verified


def test_local_shares_the_memory_of_this_machine():
    two, four = Cluster.local(ranks=2), Cluster.local(ranks=4)
    assert (four.ranks, four.device) == (4, "cpu")
    assert abs(two.memory - 2 * four.memory) <= 2
    assert Cluster.local().ranks >= 1


def test_a_file_and_what_users_may_give(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(_h100() | {"name": "mine", "nodes": 3}))
    assert Cluster.load(file).ranks == 24
    assert Cluster.of(str(file)) == Cluster.load(str(file))
    assert Cluster.of("h100-dgx") == Cluster.of(Cluster.load("h100-dgx"))
    with pytest.raises(AutoparError, match="a int is no cluster"):
        Cluster.of(4)


def _set(path, value):
    data = _h100()
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


def _without(*path):
    data = _h100()
    at = data
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return data


def _three(rack):
    """Nodes of 8, racks of ``rack`` ranks on 40 GB/s NICs, racks joined at 10 GB/s a rank."""
    data = _h100()
    node, network = data["tiers"]
    racks = copy.deepcopy(network) | {"name": "rack", "spans": rack}
    racks["bandwidth"] = {"value": 40e9, "source": "a test of ours"}
    network["bandwidth"] = {"value": 10e9, "source": "a test of ours"}
    for tier in (racks, network):
        tier["collectives"]["all_gather"] = tier["collectives"]["all_reduce"]
    return data | {"tiers": [node, racks, network]}


HALF = {"value": 0.5, "source": "a test of ours"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_set(["chip", "kind"], "gpu"), r'mine: at \$.chip.kind: "gpu" is not legal. Legal: "cpu", "cuda".'),
        (_set(["chip", "memory", "value"], "80 GB"), r'mine: at \$.chip.memory.value: "80 GB" is not a number.'),
        (_set(["chip", "memory", "source"], " "), r"mine: at \$.chip.memory.source: is empty."),
        (_set(["chip", "memory", "value"], -1), r"mine: at \$.chip.memory.value: -1.0 is not legal."),
        (_set(["chip", "flops", "bf61"], {"value": 1, "source": "x"}), r"unknown key 'bf61', did you mean 'bf16'\?"),
        (
            _set(["tiers", 0, "collectives", "allreduce"], {}),
            r"at \$.tiers\[0\].collectives.allreduce: the key 'bandwidth'",
        ),
        (_set(["tiers", 1, "spans"], 16), r"at \$.tiers: must end in a tier that reaches every rank"),
        (_set(["ranks_per_node"], 0), r"at \$.ranks_per_node: 0 is not legal"),
        (_set(["ranks_per_nodes"], 8), r"unknown key 'ranks_per_nodes', did you mean 'ranks_per_node'\?"),
        (_set(["schema"], 9), r"at \$.schema: 9 is newer"),
        (
            _set(["chip", "efficiency", "matmul", "value"], 1.2),
            r"at \$.chip.efficiency.matmul.value: 1.2 is not a fraction. Legal: above 0, at most 1.",
        ),
        (_set(["chip", "efficiency", "memory", "value"], 0), r"at \$.chip.efficiency.memory.value: 0.0 is not legal"),
        (_set(["chip", "efficiency", "memory", "value"], -0.5), r"at \$.chip.efficiency.memory.value: -0.5 is not"),
        (_set(["chip", "efficiency", "memory", "source"], ""), r"at \$.chip.efficiency.memory.source: is empty"),
        (
            _set(["chip", "efficiency"], {"matmul": HALF}),
            r"efficiency: the key 'memory' is missing. Legal: matmul, mem",
        ),
        (_set(["chip", "efficiency"], {}), r"at \$.chip.efficiency: the key 'matmul' is missing"),
        (_set(["chip", "efficiency"], 0.5), r"at \$.chip.efficiency: 0.5 is not an object"),
        (_set(["chip", "efficiency", "hbm"], HALF), r"efficiency: unknown key 'hbm'. Legal: matmul, memory"),
        (_without("chip", "efficiency"), r"at \$.chip: the key 'efficiency' is missing"),
        (
            _set(["chip", "reserved", "context", "value"], 90e9),
            r"chip.reserved.context.value: 9e\+10 leaves nothing. Legal: less than 8.49437e\+10",
        ),
        (_set(["chip", "reserved", "context", "value"], 0), r"at \$.chip.reserved.context.value: 0.0 is not legal"),
        (_set(["chip", "reserved", "context", "value"], "3 GB"), r'reserved.context.value: "3 GB" is not a number'),
        (_set(["chip", "reserved"], 3e9), r"at \$.chip.reserved: 3000000000.0 is not an object"),
        (
            _without("chip", "reserved", "context", "source"),
            r"at \$.chip.reserved.context: the key 'source' is missing",
        ),
        (
            _set(["chip", "power", "sustained"], {}),
            r"at \$.chip.power.sustained: is empty. Legal: a fraction for one cap",
        ),
        (_set(["chip", "power", "sustained"], {"x": HALF}), r"at \$.chip.power.sustained.x: is no power cap"),
        (
            _set(["chip", "power", "idle", "value"], 700),
            r"at \$.chip.power.idle.value: is not legal. Legal: less than 700",
        ),
        (
            _set(["chip", "matmul", "bf16", "k"], [256, 512]),
            r"bf16.points: has 375 items. Legal: 150, one for each shape",
        ),
        (
            _set(["chip", "matmul", "bf16", "k"], [512, 256]),
            r"at \$.chip.matmul.bf16.k: is not legal. Legal: ascending",
        ),
        (_set(["chip", "attention", 0, "points"], []), r"at \$.chip.attention\[0\].points: is empty"),
        (_set(["chip", "attention", 0, "source"], ""), r"at \$.chip.attention\[0\].source: is empty"),
        (
            _set(["tiers", 0, "collectives", "all_gather", "curves", "8", "points"], [[2, 1e-6], [2, 2e-6]]),
            r"collectives.all_gather.curves.8.points: is not legal. Legal: ascending, and more than 0",
        ),
        (
            _set(["tiers", 0, "collectives", "all_gather", "curves"], {"one": {"points": [[1, 1]], "source": "x"}}),
            r"all_gather.curves: 'one' is not a number of ranks. Legal: 2 or more",
        ),
        (
            _set(["tiers", 1, "oversubscription"], HALF),
            r"at \$.tiers\[1\].oversubscription.value: 0.5 is not legal. Legal: 1 or more",
        ),
        (_set(["protocols", 0, "base"], 0), r"at \$.protocols\[0\].base: is not legal. Legal: more than 0"),
        (_without("chip", "flops", "fp32"), r"at \$.chip.flops: the key 'fp32' is missing. Legal: fp64, fp32"),
        (
            _without("tiers", 1, "collectives", "all_gather"),
            r"at \$.tiers\[1\].collectives: the key 'all_gather' is missing",
        ),
        (_set(["tiers", 0, "spans"], None), r"at \$.tiers\[0\].spans: null is for the last tier"),
        (_set(["tiers", 0, "spans"], 1), r"at \$.tiers\[0\].spans: 1 is not legal. Legal: 2 or more"),
        (_three(rack=12), r"at \$.tiers\[1\].spans: 12 is not legal. Legal: a multiple of 8, the tier inside it"),
        (_three(rack=8), r"at \$.tiers\[1\].spans: 8 is not legal"),
        (_set(["tiers"], []), r"at \$.tiers: must end in a tier that reaches every rank"),
        ([], r"mine: at \$: a JSON list is not an object."),
    ],
)
def test_errors_name_the_path(data, message):
    with pytest.raises(AutoparError, match=message):
        from_json(data, where="mine")


@pytest.mark.parametrize(
    ("name", "nodes", "message"),
    [
        ("h100-dxg", 1, "cluster h100-dxg: unknown, did you mean 'h100-dgx'"),
        ("h100-dgx", 0, "nodes=0 is not a number of nodes"),
        ("nowhere.json", 1, "cluster: no such file: nowhere.json."),
    ],
)
def test_load_errors(name, nodes, message):
    with pytest.raises(AutoparError, match=message):
        Cluster.load(name, nodes=nodes)


def test_local_errors():
    with pytest.raises(AutoparError, match="ranks=0"):
        Cluster.local(ranks=0)


def test_pins_plan_and_cluster_do_not_import_torch():
    code = "import sys, autopar.pins, autopar.plan, autopar.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_part_of_one_stage():
    cluster = Cluster.load("h100-dgx", nodes=4)
    found = [(part.nodes, part.ranks_per_node) for part in map(cluster.part, (32, 16, 8, 4, 1))]
    assert found == [(4, 8), (2, 8), (1, 8), (1, 4), (1, 1)]
    assert cluster.part(4).tier_of(4, 1).name == "nvlink" and cluster.part(16).tier_of(2, 8).name == "network"
    with pytest.raises(AutoparError, match=r"a stage of 12 ranks would straddle nodes of 8. Legal: pp=1, pp=3, pp=6,"):
        replace(cluster, nodes=3).part(12)
    assert Cluster.local(6).part(3).ranks == 3


def test_more_memory_is_that_many_bytes_of_tensors():
    for cluster in (Cluster.load("h100-dgx"), Cluster.local(2)):
        assert abs(cluster.with_memory(12345678901).limit - 12345678901) <= 1
