"""The page of claims: what is committed is what the command prints, and what it says holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.bench import claims as module
from autopar.bench.claims import (
    CLAIMED_FLOPS,
    MODELS,
    ZERO_PAPER,
    Claims,
    at_data_sheet,
    claims,
    model_flops,
    model_parameters,
    zero_bytes,
)
from autopar.bench.claims_text import page
from autopar.cli import main
from autopar.cluster import Cluster

PAGE = Path(__file__).parent.parent / "docs" / "claims.md"
GIB, GIGA = 2**30, 1e9


@pytest.fixture(scope="module")
def found() -> Claims:
    return claims()


def test_the_committed_page_is_what_is_printed(found: Claims) -> None:
    assert page(found) + "\n" == PAGE.read_text(), "autopar bench claims --write docs/claims.md"


def test_nothing_exceeds_the_roofline_and_the_claim_exceeds_all_that_fits(found: Claims) -> None:
    assert all(p.rate < p.bound < p.peak for p in found.throughput)
    best = found.reached()
    assert set(best) == set(MODELS)
    assert all(p is not None and p.found.fits and p.rate < CLAIMED_FLOPS for p in best.values())


def test_recomputing_the_core_saves_what_the_paper_says(found: Claims) -> None:
    """5as/h of 34 + 5as/h, as/h = 16: Korthikanti et al. 2022, table 2, for GPT-3. All of a layer costs a forward."""
    nothing, core, everything = found.recomputed[:3]
    first, second, third = (p.gib("activations") for p in (nothing, core, everything))
    assert second / first == pytest.approx(1 - 80 / 114, abs=0.01) and third < second / 10
    assert 1.0 < core.found.step_s / nothing.found.step_s < 1.05 < 1.3 < everything.found.step_s / nothing.found.step_s


def test_a_tensor_axis_across_nodes_waits(found: Claims) -> None:
    for model in ("70B", "175B"):
        inside, across = (
            next(p for p in found.tensor if p.model == model and f"tp={n} pp=4" in p.words) for n in (8, 16)
        )
        assert across.found.step_s > 1.3 * inside.found.step_s and across.seconds("tp") > 3 * inside.seconds("tp")


def test_states_are_divided_as_zero_says(found: Claims) -> None:
    for stage, (p, paper) in enumerate(zip(found.zero, ZERO_PAPER, strict=True)):
        assert 7.5 * zero_bytes(stage, 64) == pytest.approx(paper, abs=0.05)
        resting = zero_bytes(stage, 64) * model_parameters(p.row)
        assert p.gib("parameters", "gradients", "optimizer", "gathered") * GIB >= 0.99 * resting
        if stage < 2:  # nothing is gathered on top
            assert p.gib("parameters", "gradients", "optimizer") * GIB == pytest.approx(resting)


def test_flops_are_six_a_parameter_and_token_and_attention() -> None:
    row = MODELS["175B"]
    blocks = 12 * row.layers * row.hidden**2 + row.vocab * row.hidden
    attention = 2 * row.layers * row.seq * row.hidden
    assert model_flops(row) == pytest.approx(6 * row.gbs * row.seq * (blocks + attention), rel=1e-9)
    assert model_parameters(row) == pytest.approx(blocks, rel=2e-3)


def test_at_data_sheet_only_figures_of_the_sheet_count() -> None:
    cluster = at_data_sheet(Cluster.load("h100-dgx", nodes=2))
    device, network = cluster.chip.device(), cluster.network()
    assert device.matmul_s(1, 8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 989e12)
    assert device.memory_s(3.35e12) == pytest.approx(1.0)
    assert network.seconds("all_gather", 8e9, 8, 1) == pytest.approx(7e9 / 450e9)
    assert network.seconds("all_gather", 2e9, 2, 8) == pytest.approx(1e9 / 50e9)
    assert network.seconds("all_gather", 16e9, 16, 1) == pytest.approx(15e9 / 400e9)


def test_the_command_writes_and_prints(found: Claims, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "claims", lambda: found)
    assert main(["bench", "claims", "--write", str(tmp_path / "claims.md")]) == 0
    assert capsys.readouterr().out == (tmp_path / "claims.md").read_text() == PAGE.read_text()
    assert main(["bench", "claims", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["claimed"]["mfu"] == 0.642 and len(figures["throughput"]) == len(found.throughput)
    assert main(["bench", "claims", "--write", str(tmp_path / "no" / "claims.md")]) == 2
    assert "not a file in a folder that exists" in capsys.readouterr().err


def test_what_does_not_fit_is_not_reached(found: Claims) -> None:
    full = replace(found, throughput=tuple(p for p in found.throughput if p.words == "1F1B"))
    assert full.reached()["500B"] is None and "**500B** fits in none of these ways" in page(full)
