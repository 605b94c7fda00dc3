"""The checker finds nothing wrong with what the solver proves, and every number that was tampered with."""

import json
from dataclasses import replace

import numpy as np
import pytest
from random_problems import Counted, random_problem
from searches import problems, quick, searched

from autopar.solver.check_proof import bytes_bound, check, dual_bound
from autopar.solver.file import Saved, load, save
from autopar.solver.problem import Class, Variable
from autopar.solver.proof import proof_of
from autopar.solver.recompute import least, transients
from autopar.solver.recompute_integer import integer_bound, state_leasts
from autopar.solver.search import Candidate

SEEDS = range(25)


def plain(saved):
    """The proof as a plan file has it."""
    return json.loads(json.dumps(proof_of(saved), allow_nan=False))


@pytest.fixture(scope="module")
def every():
    return {seed: searched(seed) for seed in SEEDS}


@pytest.mark.parametrize("seed", range(60))
def test_the_least_is_that_of_counting(seed):
    problem = random_problem(seed)
    counted = Counted(problem)
    rng = np.random.default_rng(seed)
    floor, sizes = transients(problem)
    assert floor <= counted.total[:, 5].min(initial=np.inf)
    assert set(counted.total[:, 5]) <= set(sizes) | {0.0}
    for high in (np.inf, float(rng.choice(sizes))):
        weights = np.append(rng.uniform(0, 2, 5), [0.0, 0.0])
        allowed = counted.total[counted.total[:, 5] <= high]
        assert least(problem, weights, high) == pytest.approx((allowed @ weights).min(initial=np.inf), rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_the_least_with_a_state_is_that_of_counting(seed):
    problem = random_problem(seed)
    counted = Counted(problem)
    rng = np.random.default_rng(seed)
    for high in (np.inf, float(rng.choice(transients(problem)[1]))):
        weights = np.append(rng.uniform(0, 2, 5), [0.0, 0.0])
        found = state_leasts(problem, weights, high)
        values = np.where(counted.total[:, 5] <= high, counted.total @ weights, np.inf)
        for place, states in enumerate(found):
            for v, least_with in enumerate(states):
                picked = counted.picked(place, v)
                for s, value in enumerate(least_with):
                    assert value == pytest.approx(values[picked == s].min(initial=np.inf), rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_bounds_hold_against_counting(seed):
    problem = random_problem(seed)
    counted = Counted(problem)
    assert integer_bound(problem) <= counted.optimum
    assert bytes_bound(problem, problem.memory_limit) <= counted.least_bytes
    if not counted.again:
        assert (bytes_bound(problem, problem.memory_limit) > problem.memory_limit) == (counted.optimum == np.inf)
    assert dual_bound(problem, ((0.5, 0.1, 0.0, np.inf, 1.0),)) <= counted.optimum
    assert dual_bound(problem, ((0.5, 0.1, 1e6, np.inf, 1.0),)) in (-np.inf, counted.optimum)  # covers no transient


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_is_right_and_its_proof_holds(seed, every, tmp_path):
    saved = every[seed]
    posed, _ = problems(seed)
    best = min(Counted(p).optimum for p in posed.values())
    proof = plain(saved)
    if saved.best is None:
        assert best == np.inf
    else:
        assert saved.best.seconds * (1 - 0.006) <= best <= saved.best.seconds and proof["bound"] <= best
    assert check(proof, saved) == []
    save(tmp_path / "search.npz", saved)
    assert check(proof, tmp_path / "search.npz") == []


def test_every_way_to_end_occurs(every):
    seen = {r.status for saved in every.values() for r in saved.records}
    assert seen >= {"solved", "roofline", "memory", "illegal", "dominated"}, seen


def solved(every):
    """A search whose best plan rests on multipliers alone, and that record's place."""
    for saved in every.values():
        best = saved.best
        if best is not None and not best.integer and best.multipliers and best.source is None:
            return saved, saved.records.index(best)
    raise AssertionError("no such search")


def with_record(saved, place, **changes):
    records = list(saved.records)
    records[place] = replace(records[place], **changes)
    return Saved(tuple(records), saved.memory_limit)


def cheaper(problem):
    """The problem with the seconds of all states halved."""

    def variable(v):
        costs = v.costs.copy()
        costs[:, :3] *= 0.5
        return Variable(v.name, v.kind, v.states, costs)

    classes = tuple(Class(c.name, tuple(map(variable, c.variables)), c.factors, c.borders) for c in problem.classes)
    return replace(problem, classes=classes, shared=tuple(map(variable, problem.shared)))


def test_a_raised_bound_is_found(every):
    saved, place = solved(every)
    record = saved.records[place]
    raised = with_record(saved, place, bound=record.bound * 1.01)
    assert any("can be shown" in line for line in check(plain(raised), raised))
    assert any("in the plan" in line for line in check(plain(raised), saved))


def test_a_raised_roofline_bound_is_found(every):
    for saved in every.values():
        for i, record in enumerate(saved.records):
            if record.status == "roofline":
                raised = with_record(saved, i, bound=record.bound * 1.01)
                assert any(f"{record.candidate}: bound" in line for line in check(plain(raised), raised))
                return
    raise AssertionError("no such candidate")


def test_a_raised_dominated_bound_and_a_wrong_source_are_found(every):
    for saved in every.values():
        for i, record in enumerate(saved.records):
            if record.status == "dominated":
                raised = with_record(saved, i, bound=record.bound * 1.01)
                assert any("can be shown" in line for line in check(plain(raised), raised))
                priced = tuple((m[0], 0.5, *m[2:]) for m in record.multipliers)
                wrong = with_record(saved, i, multipliers=priced)
                assert any("can be shown" in line for line in check(plain(wrong), wrong))
                wrong = with_record(saved, i, source=Candidate(((7, 1),), 1))
                assert any("can be shown" in line for line in check(plain(wrong), wrong))
                return
    raise AssertionError("no such candidate")


@pytest.mark.parametrize("change", ["alpha", "per_byte", "low", "high"])
def test_a_changed_multiplier_is_found(every, change):
    saved, place = solved(every)
    alpha, per_byte, low, high, time = saved.records[place].multipliers[0]
    new = {
        "alpha": (1 - alpha if alpha != 0.5 else 0.9, per_byte, low, high, time),
        "per_byte": (alpha, per_byte + 10, low, high, time),
        "low": (alpha, per_byte, low + 1e6, high, time),
        "high": (alpha, per_byte, low, -1.0, time),
    }[change]
    changed = with_record(saved, place, multipliers=(new, *saved.records[place].multipliers[1:]))
    assert "the plan and the file have other multipliers" in "\n".join(check(plain(saved), changed))
    if change != "alpha":
        assert any("can be shown" in line for line in check(plain(changed), changed))


def test_a_lowered_cost_is_found(every):
    saved, place = solved(every)
    record = saved.records[place]
    lowered = with_record(saved, place, problem=cheaper(record.problem))
    lines = check(plain(lowered), lowered)
    assert any("its assignment takes" in line for line in lines) or any("can be shown" in line for line in lines)
    assert any("problem" in line for line in check(plain(saved), lowered))


def test_a_candidate_removed_is_found(every):
    saved, _ = solved(every)
    fewer = Saved(saved.records[:-1], saved.memory_limit)
    assert any("in the plan, not in the file" in line for line in check(plain(saved), fewer))
    assert any("in the file, not in the plan" in line for line in check(plain(fewer), saved))
    assert any("is not among the candidates" in line for line in check(plain(fewer), fewer))


def test_a_changed_assignment_or_objective_is_found(every):
    saved, place = solved(every)
    record = saved.records[place]
    faster = with_record(saved, place, seconds=record.seconds * 0.99)
    assert any("its assignment takes" in line for line in check(plain(faster), faster))
    nothing = with_record(saved, place, assignment=None)
    assert any("without an assignment" in line for line in check(plain(nothing), nothing))
    broken = with_record(saved, place, assignment=replace(record.assignment, shared=()))
    assert any("its assignment takes none" in line for line in check(plain(broken), broken))
    proof = plain(saved)
    assert any("objective" in line for line in check(proof | {"objective": 0.5 * proof["objective"]}, saved))


def test_what_is_wrong_with_the_whole_is_found(every):
    saved, _ = solved(every)
    proof = plain(saved)
    assert any("gap" in line for line in check(proof | {"gap": proof["gap"] + 0.001}, saved))
    assert any("is the least of the file" in line for line in check(proof | {"bound": proof["bound"] * 1.001}, saved))
    assert check(proof | {"gap": None}, saved) == []  # nothing claimed
    assert any("in the file, not in the plan" in line for line in check({"scope": {}}, saved))
    proof["scope"]["pruned"].append({"mesh": 3})
    assert any("an entry without mesh" in line for line in check(proof, saved))


def test_a_smaller_limit_is_found(every):
    saved, _ = solved(every)
    less = Saved(saved.records, saved.memory_limit * 0.5)
    assert any("has a limit of" in line for line in check(plain(less), less))


def test_one_called_too_large_that_fits_is_found(every):
    saved, place = solved(every)
    record = saved.records[place]
    out = with_record(saved, place, status="memory", bound=np.inf, seconds=np.inf, assignment=None)
    assert any("left out for its bytes" in line for line in check(plain(out), out))
    bare = with_record(
        saved, place, status="memory", bound=np.inf, problem=None, quick=record.quick._replace(bytes=1e9)
    )
    assert any("nothing shows that it cannot fit" in line for line in check(plain(bare), bare))
    illegal = with_record(saved, place, status="illegal", bound=np.inf)
    assert any("called illegal without a reason" in line for line in check(plain(illegal), illegal))


def test_the_quick_bounds_of_the_tests_are_bounds():
    posed, _ = problems(0)
    for candidate, problem in posed.items():
        assert quick(problem, candidate.microbatches).seconds <= Counted(problem).optimum


def test_it_loads_what_was_saved(every, tmp_path):
    saved, _ = solved(every)
    save(tmp_path / "search.npz", saved)
    assert proof_of(load(tmp_path / "search.npz")) == proof_of(saved)


@pytest.mark.parametrize("change", [{"meshes": []}, {"microbatches": [99]}])
def test_a_changed_scope_is_found(every, change):
    saved, _ = solved(every)
    proof = plain(saved)
    proof["scope"].update(change)
    assert any(line.startswith("scope: other") for line in check(proof, saved))


def test_a_bound_for_less_memory_is_found(every):
    saved, _ = solved(every)
    proof, limit = plain(saved), saved.memory_limit
    proof["scope"]["memory"] = {"limit": limit, "bound_for": limit, "plan_within": limit}
    assert check(proof, saved) == []
    proof["scope"]["memory"]["limit"] = 2 * limit
    assert any("are none for" in line for line in check(proof, saved))
    proof["scope"]["memory"]["bound_for"] = 2 * limit
    assert any("in the file" in line for line in check(proof, saved))
