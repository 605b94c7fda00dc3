"""What the fullest rank of a pipeline has at least, over all cuts, whatever the memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from autopar.solver.evaluate import Evaluation
from autopar.solver.pipes import Pipe
from autopar.solver.problem import Pipeline, Problem
from autopar.solver.stage_bound import Prices, stages_bound

MANY = 1e9
"""Microbatches beside which a pipeline fills at once: the step is the fullest rank's."""


def fullest(evaluation: Evaluation, pipe: Pipe, alpha: float) -> float:
    """Seconds of all microbatches on that rank. ``alpha``: the weight of compute against hidden communication."""
    prices = [Prices(alpha, 0.0)] * pipe.stages
    found = stages_bound(evaluation.of_limit(without_fill(evaluation, pipe)), prices, even=True)
    return found * (1 - 2 * pipe.stages / MANY)


def without_fill(evaluation: Evaluation, pipe: Pipe) -> Problem:
    """The problem in such a pipeline, which sends nothing and has no end of microbatches and memory."""
    problem = evaluation.problem
    sends = tuple(np.zeros(len(v.states)) for v in problem.shared)
    flying = (1.0,) * pipe.stages
    pipeline = Pipeline(pipe.ranks, pipe.virtual, int(MANY), 1.0, flying, sends, pipe.schedule)
    return replace(problem, pipeline=pipeline, memory_limit=inf)


__all__ = ["fullest"]
