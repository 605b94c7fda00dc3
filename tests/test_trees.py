"""Flattening of nested values."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import pytest

from autopar.trees import flatten, ordered_like, unflatten


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any = None


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (5, ["v"]),
        (None, ["v"]),
        ([], []),
        ({"x": [1, 2]}, ["v['x'][0]", "v['x'][1]"]),
        (Pair(1, {"k": [1, Pair(3, 4)]}), ["v.a", "v.b['k'][0]", "v.b['k'][1].a", "v.b['k'][1].b"]),
        ((Point(1, None), [Pair(1)]), ["v[0].x", "v[0].y", "v[1][0].a", "v[1][0].b"]),
        (Pair([], []), []),
    ],
)
def test_flatten_and_back(value: Any, paths: list[str]) -> None:
    leaves, tree = flatten(value, "v")
    assert [path for path, _ in leaves] == paths
    assert unflatten([leaf for _, leaf in leaves], tree) == value
    assert flatten(value, "other")[1] == tree


def test_ordered_like() -> None:
    like = {"a": 0, "b": [{"c": 0, "d": 0}]}
    assert list(ordered_like({"b": [{"d": 1, "c": 2}], "a": 3}, like)) == ["a", "b"]
    assert list(ordered_like({"b": [{"d": 1, "c": 2}], "a": 3}, like)["b"][0]) == ["c", "d"]
    assert list(ordered_like({"b": 1}, like)) == ["b"]
