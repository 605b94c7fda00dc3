"""Where latencies count, the solver's plan is not predicted slower than patterns that treat all parameters alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autopar.build import Prepared, choose, prepare
from autopar.capture import Capture, capture
from autopar.choosing.solve import Solved, solved
from autopar.cli import main
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.models import gpt2, mlp
from autopar.pins import Pins, divisors, resolve
from autopar.plan import Plan
from autopar.predict import predict
from autopar.solver.file import save

MODELS: dict[str, Any] = {"gpt2": gpt2.make, "mlp": mlp.make}


@cache
def captured_of(name: str) -> tuple[Capture, Prepared]:
    model, args, kwargs = MODELS[name](batch=24)
    captured = capture(model, args, kwargs, check=False)
    return captured, prepare(captured, 1)


@cache
def found_of(name: str, ranks: int) -> Solved:
    captured, prepared = captured_of(name)
    return solved(captured, Cluster.local(ranks=ranks), prepared=prepared)


def pattern(name: str, ranks: int, dp: int) -> Plan | None:
    """``dp`` x ``tp`` with ZeRO 0, if it is legal."""
    captured, prepared = captured_of(name)
    cluster = Cluster.local(ranks=ranks)
    try:
        pins = resolve(Pins(dp=dp, tp=ranks // dp, zero=0, microbatches=1), ranks, captured.batch)
        return predict(choose(prepared, pins, cluster), prepared, cluster)
    except AutoparError:
        return None


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_no_pattern_is_predicted_faster(name: str, ranks: int) -> None:
    plan = found_of(name, ranks).plan
    rivals = [r for dp in divisors(ranks) if (r := pattern(name, ranks, dp)) is not None]
    assert rivals and plan.predicted.step_time_s is not None
    for rival in rivals:
        assert rival.predicted.step_time_s is not None
        assert plan.predicted.step_time_s <= 1.005 * rival.predicted.step_time_s, rival.one_line()


def test_the_proof_of_a_finalist_is_found_again(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_of("gpt2", 4)
    assert found.plan.zero == 0 and "finalists" in found.seconds
    assert found.plan.proof.objective is not None and found.plan.proof.bound is not None
    assert found.plan.proof.bound <= found.plan.proof.objective
    found.plan.save(tmp_path / "plan.json")
    save(tmp_path / "search.npz", found.search)
    words = ["check", str(tmp_path / "plan.json"), "--proof", "--problem", str(tmp_path / "search.npz")]
    code = main(words)
    assert code == 0, capsys.readouterr().out
