"""The two operations that numbers, arrays and symbols do not share."""

from __future__ import annotations

from typing import Any

import numpy as np


def larger(a: Any, b: Any) -> Any:
    """The larger of two, elementwise for arrays, ``Max`` for symbols.

    >>> larger(1, 2), larger(np.array([1, 5]), 2).tolist()
    (2, [2, 5])
    """
    if symbolic(a, b):
        import sympy

        return sympy.Max(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)


def where_several(ranks: Any, value: Any) -> Any:
    """``value`` where there is more than one rank, else 0.

    >>> where_several(1, 3.0), where_several(np.array([1, 2]), 3.0).tolist()
    (0.0, [0.0, 3.0])
    """
    if symbolic(ranks):
        import sympy

        return sympy.Piecewise((value, ranks > 1), (0, True))
    if isinstance(ranks, np.ndarray):
        return np.where(ranks > 1, value, 0.0)
    return value if ranks > 1 else value * 0.0


def symbolic(*values: Any) -> bool:
    """Whether any of the values is made of symbols."""
    return any(getattr(value, "free_symbols", ()) for value in values)
