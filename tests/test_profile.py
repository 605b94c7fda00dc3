"""A profile at the smallest sizes is a cluster file, and plans are priced by it kernel by kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import AutoparError
from autopar.bench.local import _profiled
from autopar.cli import main
from autopar.cluster import Cluster, from_json
from autopar.models import mlp
from autopar.profiling.clock import typical
from autopar.profiling.collectives import groups
from autopar.profiling.measure import measure
from autopar.profiling.sizes import LEAST
from autopar.runtime.pool import RankPool
from autopar.solver.cost import KINDS


@pytest.fixture(scope="module")
def profiled() -> dict[str, Any]:
    with RankPool(2, timeout=120) as pool:
        found, other = pool.run(measure, "two", LEAST)
    assert found is not None and other is None
    return found


def test_it_is_a_cluster_file(profiled: dict[str, Any]) -> None:
    cluster = from_json(profiled, where="two")
    assert cluster.ranks == 2 and cluster.device == "cpu" and cluster.chip.launch is not None
    assert 0 < cluster.chip.launch.value < 1e-3
    assert {*cluster.tiers[0].collectives} == {*KINDS}
    assert "measured by autopar profile" in cluster.chip.memory_bandwidth.source
    assert cluster.chip.kernels["aten.gelu"].points[0][0] == 2 * LEAST.nbytes[0]


def test_a_plan_is_priced_by_its_kernels(profiled: dict[str, Any]) -> None:
    model, args, _ = mlp.make(width=64)
    cluster = from_json(profiled, where="two")
    parts = autopar.compile(model, cluster, args=args, pins={"dp": 2, "zero": 0}).plan.predicted.parts
    beside = cluster.tiers[0].overlap
    moved = parts["hidden_s"] + parts["exposed_s"]
    assert beside is not None and 0 < parts["hidden_s"] <= beside.value * moved * 1.01
    bare = autopar.compile(model, Cluster.local(2), args=args, pins={"dp": 2, "zero": 0}).plan.predicted.parts
    assert parts["compute_s"] > bare["compute_s"]  # launches count
    slow = json.loads(json.dumps(profiled))
    for point in slow["chip"]["kernels"]["aten._fused_adamw_"]["points"]:
        point[1] += 1.0
    found = autopar.compile(model, from_json(slow, where="slow"), args=args, pins={"dp": 2, "zero": 0}).plan.predicted
    assert found.parts["optimizer_s"] > parts["optimizer_s"] + 0.9


def test_files_are_told_apart_by_their_ranks(profiled: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(json.dumps(profiled))
    assert [*_profiled([str(path)])] == [2]
    with pytest.raises(AutoparError, match="a second file for 2 ranks"):
        _profiled([str(path), str(path)])
    with pytest.raises(AutoparError, match="CPU processes"):
        _profiled(["h100-dgx"])


def test_bad_output_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--out", "nowhere/x.json"]) == 2
    assert "Name one that ends in .json" in capsys.readouterr().err


def test_groups_and_quartile() -> None:
    assert groups(8) == [2, 4, 8] and groups(3) == [3]
    assert typical([5.0]) == 5.0 and typical([4.0, 1.0, 2.0, 3.0]) == 2.0
