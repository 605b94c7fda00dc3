"""The fastest configuration that fits: what pruning leaves out is no better, against pricing every one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.bench.published_choice import beside, of_plan, problem, text, to_json
from autopar.bench.published_rows import Row, row_of
from autopar.errors import AutoparError
from autopar.plan import ClusterId, ModelId, Plan, PlanAxis
from autopar.pricing import choose as choosing
from autopar.pricing import price_row
from autopar.pricing.choose import Space, choose, least_bytes, least_seconds
from autopar.pricing.compose import Layout, step_of
from autopar.pricing.configuration import layout_of, priced_units, recipe_of, summary
from autopar.solver.simulate.step import run

STATED = {
    "id": "a-1", "source": "a", "model": "M", "tier": "A", "gpu": "H100", "gpus": 4, "gpus_per_node": 2, "layers": 6,
    "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "ffn_type": "swiglu", "vocab": 32000, "seq": 4096,
    "tp": 1, "pp": 2, "dp": 2, "mbs": 1, "gbs": 8, "zero_stage": 1, "precision": "bf16", "recompute": "full",
    "run": {"source_kind": "nemo"},
}  # fmt: skip


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Row:
    """A wide model on two small nodes: some layouts fit, others do not. No context ranks, to capture less."""
    monkeypatch.setattr(choosing, "CONTEXT", (1,))
    return row_of(STATED, "rows.json", "$[0]")


def layouts(space: Space) -> Iterator[tuple[Layout, Layout]]:
    """Every configuration, with the layout that it is a variant of."""
    for place in space.places():
        for layout in space.layouts(place):
            yield from ((variant, layout) for variant in space.variants(layout))


def test_nothing_that_is_left_out_is_faster_and_fits(row: Row) -> None:
    space, recipe = Space(problem(row)), recipe_of(row)
    units, best, unfit, count = {}, float("inf"), 0, 0
    for layout, first in layouts(space):
        count += 1
        key = layout.tp, layout.sequence_parallel, layout.rows
        if key not in units:
            units[key] = priced_units(replace(row, mbs=layout.rows), layout, recipe, space.cluster)
        found = summary(run(step_of(layout, units[key])), space.cluster)
        assert least_seconds(first, units[key], alone=True) <= least_seconds(layout, units[key]) <= found.step_s, layout
        kept, peak = least_bytes(first, units[key], static=False), found.peak_gib * 2**30
        assert kept <= peak * (1 + 1e-9) and least_bytes(layout, units[key]) <= peak * (1 + 1e-9), layout
        unfit += not found.fits
        best = min(best, found.step_s) if found.fits else best
    chosen = choose(problem(row))
    assert chosen.priced.step_s == best and chosen.priced.fits
    assert chosen.configurations == count and chosen.simulated < count / 10 and 0 < unfit < count


def test_beside_a_published_one(row: Row, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([STATED, {**STATED, "id": "a-2"}, {**STATED, "id": "a-3", "tier": "B"}]))
    one, two = beside(file)
    assert (one.id, two.id) == ("a-1", "a-2") and one.chosen_s == two.chosen_s
    assert one.dominates and one.in_space and "recompute full > none" in one.decisions
    assert Space(problem(row)).contains(layout_of(row))
    assert "2 of 2 published configurations are no faster than the chosen one" in text([one, two])
    assert to_json([one])["rows"][0]["dominates"] is True


def test_a_plan_is_priced_by_the_same_prices(row: Row, tmp_path: Path) -> None:
    axis = PlanAxis("a", 4, "host", 1, ("dp_replicate",))
    plan = Plan(ModelId("x"), ClusterId(ranks_per_node=4), axes=(axis,), mesh={"dp_replicate": 4}, batch=8)
    plan.save(tmp_path / "plan.json")
    theirs = replace(row, pp=1, dp=4, mbs=2, zero_stage=0, recompute="none")
    assert of_plan(tmp_path / "plan.json", row).step_s == price_row(theirs).step_s
    replace(plan, batch=16).save(tmp_path / "other.json")
    with pytest.raises(AutoparError, match="16 rows, is no configuration of row a-1"):
        of_plan(tmp_path / "other.json", row)
