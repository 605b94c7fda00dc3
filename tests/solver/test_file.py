"""Searches in files: equal when loaded, compact, and one clear line for a file that is none."""

import json
import time
import zipfile
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from random_problems import random_problem
from searches import searched

from autopar.errors import AutoparError
from autopar.solver.file import Record, Saved, digest, load, save
from autopar.solver.problem import Class, Factor, Problem, Unit, Variable
from autopar.solver.search import Candidate


def same(a, b):
    """Equal, arrays included, and of equal types."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "search.npz"
    save(path, searched(3))
    return path


@pytest.mark.parametrize("seed", range(8))
def test_what_is_loaded_is_what_was_saved(seed, tmp_path):
    saved = searched(seed)
    save(tmp_path / "s.npz", saved)
    assert same(load(tmp_path / "s.npz"), saved)


@pytest.mark.parametrize("seed", range(30))
def test_problems_survive(seed, tmp_path):
    problem = replace(random_problem(seed), counts={"generated": 7, "dominated": 2})
    record = Record(Candidate(((2, 1),), 1), "open", 0.0, problem=problem)
    save(tmp_path / "s.npz", Saved((record,), np.inf))
    again = load(tmp_path / "s.npz").records[0].problem
    assert same(again, problem) and digest(again) == digest(problem)


def test_the_same_search_makes_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / f"{name}.npz", searched(2))
    with zipfile.ZipFile(tmp_path / "a.npz") as one, zipfile.ZipFile(tmp_path / "b.npz") as two:
        assert all(one.read(n) == two.read(n) for n in one.namelist())


def test_a_digest_sees_every_number():
    problem = random_problem(1)
    variable = problem.classes[0].variables[0]
    seen = {digest(problem), digest(replace(problem, memory_limit=1.0)), digest(replace(problem, name="other"))}
    for r in range(7):
        costs = variable.costs.copy()
        costs[-1, r] += 1e-9
        kind = replace(
            problem.classes[0], variables=(replace(variable, costs=costs), *problem.classes[0].variables[1:])
        )
        seen.add(digest(replace(problem, classes=(kind, *problem.classes[1:]))))
    assert len(seen) == 10


def _header(path, change, tmp_path):
    """A copy of the file with its header changed."""
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(bytes(arrays["header"]))
    change(header)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(tmp_path / "changed.npz", **arrays)
    return tmp_path / "changed.npz"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(version=1), "version 1 is not readable. Legal: 3; save anew."),
        (lambda h: h.pop("version"), "is no saved search"),
        (lambda h: h.pop("records"), "is no saved search"),
        (lambda h: h["records"][0].pop("candidate"), "is no saved search"),
        (lambda h: h["records"][0].update(candidate=[[[1]], 1]), "is no saved search"),
        (lambda h: h.update(records=[3]), "is no saved search"),
        (lambda h: h.update(texts=[]), "is no saved search"),
        (lambda h: h.update(memory_limit="much"), "is no saved search"),
    ],
)
def test_a_header_that_is_wrong(path, tmp_path, change, message):
    with pytest.raises(AutoparError, match=message) as error:
        load(_header(path, change, tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read|is no saved search"),
        (b"not a zip file at all", "is no saved search"),
        (b"PK\x03\x04 but then nothing", "cannot be read|is no saved search"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, message):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(AutoparError, match=message):
        load(tmp_path / "x.npz")


def test_a_damaged_file(path, tmp_path):
    data = bytearray(path.read_bytes())
    with pytest.raises(AutoparError, match="cannot be read|is no saved search"):
        (tmp_path / "x.npz").write_bytes(data[: len(data) // 2])
        load(tmp_path / "x.npz")
    data[len(data) // 3 : len(data) // 3 + 40] = b"\x00" * 40
    (tmp_path / "y.npz").write_bytes(data)
    with pytest.raises(AutoparError, match="cannot be read|is no saved search"):
        load(tmp_path / "y.npz")


def test_pickles_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", header=np.array([{"a": 1}], dtype=object))
    with pytest.raises(AutoparError, match="is no saved search"):
        load(tmp_path / "x.npz")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(AutoparError, match="no such file"):
        load(tmp_path / "x.npz")
    with pytest.raises(AutoparError, match="cannot write"):
        save(tmp_path / "no" / "x.npz", Saved((), 1.0))
    with pytest.raises(AutoparError, match="cannot be read"):
        load(tmp_path)


def _large(seed, classes=5, ops=30, states=41):
    """A problem of the size of a Llama layer's: sums of few prices, most resources free."""
    rng = np.random.default_rng(seed)
    free = lambda *shape: np.zeros((*shape, 7))

    def variable(name):
        costs = free(states)
        costs[:, 0], costs[:, 4] = rng.choice(rng.random(12), states), rng.choice(rng.random(12), states)
        return Variable(name, "op", tuple(f"S{i} R" for i in range(states)), costs)

    def factor(i):
        table = free(states, states)
        table[..., 1] = rng.choice(np.append(rng.random(200), np.inf), (states, states))
        return Factor((i, i + 1), (np.arange(states), np.arange(states)), table)

    layers = tuple(
        Class(f"c{k}", tuple(variable(f"{k}.{i}") for i in range(ops)), tuple(map(factor, range(ops - 1))), ())
        for k in range(classes)
    )
    return Problem(f"large {seed}", (), layers, tuple(Unit(k, ()) for k in range(classes)), 1e10)


def test_fifteen_large_candidates_stay_small(tmp_path):
    records = tuple(Record(Candidate(((8, 1),), i + 1), "solved", 1.0, problem=_large(i)) for i in range(15))
    save(tmp_path / "x.npz", Saved(records, 1e10))
    assert (tmp_path / "x.npz").stat().st_size < 20e6
    started = time.process_time()
    assert len(load(tmp_path / "x.npz").records) == 15
    assert time.process_time() - started < 5
