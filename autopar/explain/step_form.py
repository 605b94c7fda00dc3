"""Seconds of a step in the symbols of model, mesh and hardware, and many candidates by one compiled expression.

The form is the roofline by hand: FLOPs at one rate, collectives of activations exposed, a full pipeline. It ranks
candidates and says what a number is made of; `autopar.pricing` is what predicts it.

>>> import numpy as np
>>> from autopar.pricing.symbols import reference_units
>>> step = step_seconds(reference_units("llama", tp=True))
>>> sizes = {"b": 1, "s": 4096, "h": 8192, "heads": 64, "kv_heads": 8, "head": 128, "ffn": 28672, "vocab": 128256}
>>> mesh = {"tp": np.array([4, 8]), "pp": np.array([8, 4]), "layers": 80, "vp": 1, "m": 64}
>>> figures = {"F": 600e12, "L_tp": 1e-5, "W_tp": 300e9}
>>> [f"{s:.2f} s" for s in evaluated(step)({**sizes, **mesh, **figures})]
['8.30 s', '8.71 s']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy

from autopar.errors import AutoparError
from autopar.explain.closed_forms import backward_flops, forward_flops, ways
from autopar.pricing.symbols import SYMBOLS
from autopar.solver.cost import collective
from autopar.solver.work import Unit

RATE = sympy.Symbol("F", positive=True)
LAYERS, STAGES, CHUNKS, MICROBATCHES = sympy.symbols("layers pp vp m", positive=True, integer=True)


def unit_seconds(unit: Unit) -> sympy.Expr:
    """Seconds of a unit and one microbatch, forward and backward."""
    seconds: sympy.Expr = (forward_flops(unit) + backward_flops(unit)) / RATE
    for move in unit.moves:
        latency, rate = (sympy.Symbol(f"{name}_{move.axis}", positive=True) for name in "LW")
        for kind, nbytes in ways(move):
            seconds += collective(kind, SYMBOLS[move.axis], nbytes, latency, rate)
    return seconds


def step_seconds(units: Mapping[str, Unit]) -> sympy.Expr:
    """Seconds of a step: a stage's layers, embedding and head for every microbatch, and the bubble of pp stages."""
    layer, ends = unit_seconds(units["layer"]), unit_seconds(units["prefix"]) + unit_seconds(units["suffix"])
    return pipelined(layer, ends)


def pipelined(layer: Any, ends: Any) -> Any:
    """Of one microbatch's seconds of a layer, and of embedding and head, on the longest stage: those of the step.

    Source: Narayanan et al. 2021, section 2.2: the bubble is (pp - 1) / vp microbatches.
    """
    return (MICROBATCHES + (STAGES - 1) / CHUNKS) * (LAYERS / STAGES * layer + ends)


def evaluated(form: sympy.Expr) -> Callable[[Mapping[str, Any]], Any]:
    """One compiled function of the values of all symbols by name, numbers or arrays of candidates.

    The function raises AutoparError where one is missing.
    """
    names = sorted(str(symbol) for symbol in form.free_symbols)
    compiled = sympy.lambdify(sorted(form.free_symbols, key=str), form, "numpy", cse=True)

    def evaluate(values: Mapping[str, Any]) -> Any:
        missing = [name for name in names if name not in values]
        if missing:
            raise AutoparError(f"values: {', '.join(missing)} not given. Needed: {', '.join(names)}.")
        return compiled(*(values[name] for name in names))

    return evaluate
