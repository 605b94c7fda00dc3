"""Clusters: shipped files, figures with sources, errors by JSON path."""

import json
import subprocess
import sys

import pytest

from autopar.cluster import COLLECTIVES, FOLDER, Cluster, from_json, shipped
from autopar.errors import AutoparError


def _h100():
    return json.loads((FOLDER / "h100-dgx.json").read_text())


def test_shipped_names():
    assert shipped() == ["a100-dgx", "h100-dgx", "local"]


@pytest.mark.parametrize("name", shipped())
def test_every_number_has_a_source(name):
    def walk(value, path):
        if isinstance(value, dict) and "value" in value:
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
    assert all(set(t.collectives) == set(COLLECTIVES) for t in cluster.tiers)


def test_h100_figures_are_those_of_the_data_sheet():
    cluster = Cluster.load("h100-dgx", nodes=64)
    assert (cluster.ranks, cluster.nodes, cluster.ranks_per_node, cluster.device) == (512, 64, 8, "cuda")
    assert cluster.chip.flops["bf16"].value == 989e12
    assert cluster.tiers[0].bandwidth.value == 450e9
    assert cluster.tiers[1].bandwidth.value * 8 == 400e9
    assert cluster.memory == 80_000_000_000


@pytest.mark.parametrize(
    ("size", "stride", "tier"),
    [(2, 1, "nvlink"), (8, 1, "nvlink"), (2, 4, "nvlink"), (4, 4, "network"), (64, 8, "network")],
)
def test_tier_of_an_axis(size, stride, tier):
    assert Cluster.load("h100-dgx", nodes=64).tier_of(size, stride).name == tier


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
