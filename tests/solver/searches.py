"""Small searches over random problems, for the tests of files and proofs."""

from dataclasses import replace

import numpy as np
from random_problems import Counted, random_problem

from autopar.solver.file import Saved, of_search
from autopar.solver.problem import COMPUTE, EXPOSED, HIDDEN, SAVED, Class, Factor, Problem, Variable
from autopar.solver.search import Candidate, Quick
from autopar.solver.search_problems import search_problems

MESHES = (((4, 1),), ((2, 2), (2, 1)))


def scaled(problem: Problem, m: int, limit: float) -> Problem:
    """The problem with m times the seconds of compute and 1/m of the saved bytes, as more microbatches have."""
    factors = np.ones(7)
    factors[[COMPUTE, EXPOSED, HIDDEN]] = 1 + (m - 1) / 8
    factors[SAVED] = 1 / m
    variable = lambda v: Variable(v.name, v.kind, v.states, v.costs * factors)
    factor = lambda f: Factor(f.over, f.reads, f.table * factors)
    classes = tuple(
        Class(c.name, tuple(map(variable, c.variables)), tuple(map(factor, c.factors)), c.borders)
        for c in problem.classes
    )
    shared = tuple(map(variable, problem.shared))
    return replace(problem, shared=shared, classes=classes, memory_limit=limit)


def problems(seed: int) -> tuple[dict[Candidate, Problem], float]:
    """Two meshes, four counts of microbatches; the limit of the first mesh's problem for all."""
    bases = [random_problem(seed * 2 + i) for i in range(2)]
    limit = bases[0].memory_limit
    return {Candidate(x, m): scaled(p, m, limit) for x, p in zip(MESHES, bases) for m in (1, 2, 4, 8)}, limit


def quick(problem: Problem, m: int) -> Quick:
    """Half of what the fastest and the leanest assignments take; no legal assignment: illegal."""
    counted = Counted(problem)
    if not len(counted.times):
        return Quick(0.0, illegal="no legal assignment")
    return Quick.of(
        seconds=[[("compute", float(counted.times.min()), 2.0)]],
        bytes=[[("parameters", float(counted.peaks.min()), 1.5)]],
    )


def searched(seed: int, gap: float = 0.005) -> Saved:
    posed, limit = problems(seed)
    cheap = {c: quick(p, c.microbatches) for c, p in posed.items()}
    found = search_problems(posed, quick_bound=cheap.__getitem__, pose=posed.__getitem__, limit=limit, target_gap=gap)
    return of_search(found, limit)
