"""Closed forms: what they say is what is counted, in symbols and for many candidates at once."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import sympy

from autopar import AutoparError
from autopar.cli import main
from autopar.explain.closed_forms import (
    backward_flops,
    forward_flops,
    kept_by_op,
    kept_bytes,
    moved_bytes,
    totals,
    ways,
)
from autopar.explain.reference import formulas_of
from autopar.explain.step_form import evaluated, step_seconds
from autopar.pricing.symbols import SYMBOLS, compiled, reference_units
from autopar.solver.cost import collective
from autopar.solver.work import Op, Piece, Unit

b, s, h, heads, head, ffn, vocab, tp = (SYMBOLS[n] for n in ("b", "s", "h", "heads", "head", "ffn", "vocab", "tp"))
MODEL = {"h": 8192, "heads": 64, "kv_heads": 8, "head": 128, "ffn": 28672, "vocab": 128256}
FIGURES = {"F": 600e12, "L_tp": 1e-5, "W_tp": 300e9}


def test_flops_of_a_gpt_layer_are_those_of_the_papers():
    """24 b s h^2 (1 + s / 6h), Narayanan et al. 2021, section 5.1; of a causal attention the half."""
    layer = reference_units("gpt", tied=True)["layer"]
    square = {heads: h / head, ffn: 4 * h}
    found = sympy.expand(forward_flops(layer).subs(square).subs(heads, h / head))
    assert found == 24 * b * s * h**2 + 2 * b * s**2 * h
    back = sympy.expand(backward_flops(layer).subs(square).subs(heads, h / head))
    assert back == 48 * b * s * h**2 + 5 * b * s**2 * h


def test_what_a_layer_moves_is_the_same_with_and_without_a_cut_sequence():
    """Four all-reduces of an activation, or as many pairs of a gather and a scatter: Korthikanti et al. 2022."""
    assert moved_bytes(reference_units("llama", tp=True)["layer"]) == {("tp", "all_reduce"): 8 * b * s * h}
    cut = moved_bytes(reference_units("llama", tp=True, sp=True)["layer"])
    assert cut == {("tp", "all_gather"): 8 * b * s * h, ("tp", "reduce_scatter"): 8 * b * s * h}


def test_a_storage_that_two_ops_keep_counts_once_and_a_weight_never():
    one, other, weight = Piece(0, (4,), 2), Piece(1, (4,), 4), Piece(2, (9,), 2, weight=True)
    unit = Unit(
        "x", (Op("a", "", "matmul", kept=(one, weight)), Op("b", "", "pointwise", kept=(one, other))), (), frozenset()
    )
    assert [kept for _, kept in kept_by_op(unit)] == [8, 16] and kept_bytes(unit) == 24


def test_a_thousand_candidates_by_one_expression_are_what_each_costs_alone():
    units = reference_units("llama", tp=True, sp=True)
    step, count = evaluated(step_seconds(units)), compiled(units)
    kept = evaluated(kept_bytes(units["layer"]))
    grid = list(
        product((1, 2, 4, 8), (1, 2, 4, 5, 8), (1024, 2048, 4096, 8192, 3072), (1, 4), (1, 5), (8, 16, 24, 32, 64))
    )
    assert len(grid) == 2000
    sizes = [dict(zip(("tp", "b", "s", "pp", "vp", "m"), values, strict=True)) for values in grid[::2]]
    arrays = {name: np.array([own[name] for own in sizes]) for name in sizes[0]}
    seconds, nbytes = step({**MODEL, **FIGURES, **arrays, "layers": 80}), kept({**MODEL, **arrays})
    assert seconds.shape == nbytes.shape == (1000,)
    alone = [_step_alone(count({**MODEL, **own}), own) for own in sizes]
    np.testing.assert_allclose(seconds, [a for a, _ in alone], rtol=1e-12)
    np.testing.assert_allclose(nbytes, [a for _, a in alone], rtol=1e-12)


def _step_alone(units: dict[str, Unit], own: dict[str, int]) -> tuple[float, float]:
    """Seconds of a step and bytes that a layer keeps, from numbers alone."""
    found = {}
    for name, unit in units.items():
        moves = sum(
            collective(kind, own["tp"], nbytes, FIGURES["L_tp"], FIGURES["W_tp"])
            for move in unit.moves
            for kind, nbytes in ways(move)
        )
        found[name] = float(forward_flops(unit) + backward_flops(unit)) / FIGURES["F"] + moves
    stage = 80 / own["pp"] * found["layer"] + found["prefix"] + found["suffix"]
    return (own["m"] + (own["pp"] - 1) / own["vp"]) * stage, float(kept_bytes(units["layer"]))


def test_a_value_that_is_missing_is_named():
    with pytest.raises(AutoparError, match=r"^values: b not given\. Needed: b, h\.$"):
        evaluated(b * h)({"h": 1})


def test_the_page_prints_the_formula_and_the_number_behind_it(capsys):
    sizes = MODEL | {"b": 1, "s": 4096, "tp": 8}
    words = [word for name, n in sizes.items() for word in ("--set", f"{name}={n}")]
    assert main(["explain", "--formulas", "llama", "tp", "sp", *words, "--json"]) == 0
    sections = {x["title"]: x["rows"] for x in json.loads(capsys.readouterr().out)["sections"]}
    layer = totals(reference_units("llama", tp=True, sp=True)["layer"])
    assert [row[:2] for row in sections["layer, in all"]] == [[what, str(form)] for what, form in layer.items()]
    assert ["FLOPs forward", str(layer["FLOPs forward"]), "9.105e+11"] in sections["layer, in all"]
    assert ["lm_head", "linear", "2*b*h*s*vocab/tp", "4*b*h*s*vocab/tp", "2*b*h*s"] in sections["suffix, by op"]
    assert sections["step, seconds"][0] == ["step", "(m + (pp - 1)/vp)*(layer*layers/pp + prefix + suffix)"]


def test_a_sum_of_gradients_stands_in_the_column_of_backward():
    moves = next(x.rows for x in formulas_of(["llama", "tp"]).sections if x.title == "layer, moves")
    forward, backward = ("model.layers.1.self_attn.o_proj", "tp", "all_reduce 2*b*h*s", ""), ("", "all_reduce 2*b*h*s")
    assert moves[0][2:] == backward and moves[1] == forward


def test_without_sizes_there_are_no_numbers():
    assert all(row[2] == "" for x in formulas_of(["gpt"]).sections if x.title.endswith("in all") for row in x.rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--formulas", "bert"], "--formulas bert: is no reference model. Legal: gpt, llama."),
        (["--formulas", "gpt", "pp"], "--formulas gpt: 'pp' is not known. Legal: tp, sp, cp"),
        (["--formulas", "gpt", "sp"], "--formulas gpt: sp cuts the sequence along tensor ranks. Add tp."),
        (["--formulas", "gpt", "--set", "s=0"], "--set s=0: is no size of a reference model."),
        (["--formulas", "gpt", "--set", "size=2"], "--set size=2: is no size of a reference model."),
        (["--formulas", "gpt", "--pin", "tp=2"], "--pin: --formulas are of a reference model. Leave it out."),
        (["m:f", "--formulas", "gpt"], "MODEL: --formulas are of a reference model. Leave it out."),
        ([], "explain: nothing to explain. Name a MODEL or a plan.json, or --formulas llama tp."),
    ],
)
def test_what_has_no_formulas_is_refused(words, said, capsys):
    assert main(["explain", *words]) == 2
    assert said in capsys.readouterr().err
