"""Long chains of equal layers, as real models pose them, with few or many states."""

from __future__ import annotations

import numpy as np

from autopar.solver.problem import (
    COMPUTE,
    EXPOSED,
    RESOURCES,
    SAVED,
    STATIC,
    TRANSIENT,
    Class,
    Factor,
    Pipeline,
    Problem,
    Unit,
    Variable,
)


def chain(
    layers: int, ranks: int, microbatches: int, limit: float, *, states: int = 4, virtual: int = 1, seed: int = 0
) -> Problem:
    """An embedding, two units a layer (one with a last class of its own), and a heavy head, coupled by tensors with
    ``states`` layouts; every op is fast or lean. 1F1B."""
    rng = np.random.default_rng(seed)
    every = np.arange(states)
    free = np.zeros((states, len(RESOURCES)))
    change = np.zeros((states, states, len(RESOURCES)))
    change[..., EXPOSED] = 0.02 * rng.random((states, states))
    change[every, every] = 0.0

    def unit(name: str, seconds: float, saved: float, static: float, borders: int) -> Class:
        costs = np.zeros((2 * states, len(RESOURCES)))
        slow = 1 + 0.3 * rng.random(states)
        costs[:states, COMPUTE], costs[states:, COMPUTE] = seconds * slow, seconds * slow * 1.3
        costs[:states, SAVED], costs[states:, SAVED] = saved, 0.2 * saved
        costs[:, STATIC], costs[:, TRANSIENT] = static * (1 + rng.random(2 * states)), 0.3 * saved
        op = Variable("op", "op", tuple(str(i) for i in range(2 * states)), costs)
        factors = tuple(Factor((0, 1 + b), (np.tile(every, 2), every), change) for b in range(borders))
        return Class(name, (op,), factors, tuple(f"b{b}" for b in range(borders)))

    classes = (
        unit("embed", 0.1, 0.1, 3.0, 1),
        unit("attention", 0.7, 1.0, 1.0, 2),
        unit("mlp", 1.0, 0.8, 2.0, 2),
        unit("last mlp", 1.1, 0.8, 2.0, 2),
        unit("head", 2.0, 0.5, 3.0, 1),
    )
    kinds = [0, *[1, 2] * (layers - 1), 1, 3, 4]
    units = [Unit(k, tuple(b for b in (i - 1, i) if 0 <= b < len(kinds) - 1)) for i, k in enumerate(kinds)]
    shared = (Variable("x", "tensor", tuple(str(i) for i in range(states)), free),) * (len(units) - 1)
    stages = ranks * virtual
    pipeline = Pipeline(
        ranks,
        virtual,
        microbatches,
        fill=1 / virtual,
        in_flight=tuple(float(min(microbatches, max(1, (stages - s) / virtual))) for s in range(stages)),
        sends=(np.full(states, 1e-3),) * len(shared),
    )
    return Problem("chain", shared, classes, tuple(units), limit, pipeline=pipeline)
