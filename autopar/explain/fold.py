"""Names of repeated layers as one: ``h.{0-11}.fc.weight``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable


def fold(fqns: list[str]) -> str:
    """Names that differ in numbers only as one, every number that differs as its range; others side by side.

    >>> fold(["h.0.fc.weight", "h.1.fc.weight"]), fold(["h.0.w", "h.2.w", "h.3.w"]), fold(["a", "b"])
    ('h.{0-1}.fc.weight', 'h.{0,2-3}.w', 'a, b')
    """
    groups: dict[str, list[str]] = {}
    for fqn in fqns:
        groups.setdefault(pattern(fqn), []).append(fqn)
    return ", ".join(_fold(group) for group in groups.values())


def pattern(fqn: str) -> str:
    """The name with every layer number replaced, so that repeated layers look alike.

    >>> pattern("h.11.fc1.weight")
    'h.*.fc1.weight'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn)


def _fold(fqns: list[str]) -> str:
    words = [sorted(set(column), key=_numeric) for column in zip(*(fqn.split(".") for fqn in fqns), strict=True)]
    if math.prod(map(len, words)) != len(set(fqns)):
        return ", ".join(fqns)
    return ".".join(column[0] if len(column) == 1 else f"{{{_ranges(map(int, column))}}}" for column in words)


def _numeric(word: str) -> tuple[int, str]:
    return (int(word), "") if word.isdigit() else (-1, word)


def _ranges(numbers: Iterable[int]) -> str:
    """``0, 1, 2, 5`` -> ``0-2,5``."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
