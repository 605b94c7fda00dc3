"""The checker finds the bounds of problems with stages again by code of its own, and what was tampered with."""

import json
from dataclasses import replace

import numpy as np
import pytest
from random_stages import CountedStages, random_stages

from autopar.solver.check_proof import check, dual_bound
from autopar.solver.evaluate import Evaluation
from autopar.solver.file import Record, Saved, digest, load, of_search, save
from autopar.solver.pipes import Pipe
from autopar.solver.problem import Assignment
from autopar.solver.proof import proof_of
from autopar.solver.recompute_integer_stages import integer_stages_bound
from autopar.solver.recompute_stages import fullest_anew, stage_bytes_bound, stages_bound_anew, taken
from autopar.solver.search import Candidate, Found, Outcome, Quick
from autopar.solver.solve import solve
from autopar.solver.stage_bound import Prices, stages_bound
from autopar.solver.stages import peak_bytes, step_seconds

SEEDS = range(40)


def solved(seed, **given):
    """A search of one candidate, as saved."""
    problem = random_stages(seed)
    pipe = problem.pipeline
    schedule = "1f1b" if pipe.virtual == 1 else "interleaved"
    candidate = Candidate(((2, 1),), pipe.microbatches, Pipe(pipe.ranks, pipe.virtual, schedule, pipe.fill))
    answer = solve(problem, target_gap=0.0, **given)
    fits = answer.assignment is not None
    proven = answer.bound == np.inf
    outcome = Outcome(
        candidate,
        Quick(0.0),
        "solved" if fits else "memory" if proven else "open",
        answer.bound,
        answer.objective,
        problem=problem,
        answer=answer,
        multipliers=answer.multipliers,
    )
    best = outcome if fits else None
    return of_search(Found(best, (outcome,), answer.bound, answer.gap, None), problem.memory_limit)


def plain(saved):
    return json.loads(json.dumps(proof_of(saved), allow_nan=False))


@pytest.mark.parametrize("seed", range(80))
def test_what_is_recomputed_holds_against_counting(seed):
    problem = random_stages(seed)
    counted = CountedStages(problem)
    answer = solve(problem, target_gap=0.0, ilp_columns=0)
    multipliers = solved(seed, ilp_columns=0).records[0].multipliers
    shown = stages_bound_anew(problem, multipliers)
    assert answer.multipliers_bound * (1 - 1e-9) <= shown <= counted.optimum * (1 + 1e-9)
    nbytes = stage_bytes_bound(problem)
    assert nbytes <= counted.least_bytes * (1 + 1e-9)
    assert answer.status != "infeasible" or nbytes >= answer.least_bound * (1 - 1e-9)
    for assignment in filter(None, (answer.assignment, answer.least_assignment)):
        seconds, peak = taken(problem, assignment)
        assert seconds == pytest.approx(step_seconds(problem, assignment), rel=1e-12)
        assert peak == peak_bytes(problem, assignment)


@pytest.mark.parametrize("seed", range(12))
def test_branching_ends_at_the_optimum(seed):
    problem = random_stages(seed)
    multipliers = solved(seed).records[0].multipliers
    shown, optimum = integer_stages_bound(problem, multipliers), CountedStages(problem).optimum
    assert shown == optimum == np.inf or optimum * (1 - 1e-5) <= shown <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_proof_holds_and_survives_a_file(seed, tmp_path):
    saved = solved(seed)
    save(tmp_path / "s.npz", saved)
    again = load(tmp_path / "s.npz")
    one, other = saved.records[0], again.records[0]
    assert (one.candidate, one.multipliers, one.assignment) == (other.candidate, other.multipliers, other.assignment)
    assert digest(one.problem) == digest(other.problem)
    assert check(plain(saved), again) == []


def changed(record, **given):
    return Saved((replace(record, **given),), record.problem.memory_limit)


def test_what_was_tampered_with_is_found():
    """A bound too high, other cuts, another pipeline, multipliers that are none."""
    seen = {"bound": 0, "cuts": 0, "sends": 0, "multipliers": 0, "seconds": 0}
    for seed in SEEDS:
        record = solved(seed).records[0]
        if record.assignment is None or record.seconds <= 0:
            continue
        found = check(plain(changed(record, bound=record.bound * 1.01)), changed(record, bound=record.bound * 1.01))
        assert found
        seen["bound"] += 1
        faster = changed(record, seconds=record.seconds * 0.99)
        assert any("its assignment takes" in line for line in check(plain(faster), faster))
        seen["seconds"] += 1
        moved = replace(record.assignment, cuts=tuple(c - 1 for c in record.assignment.cuts))
        other = taken(record.problem, moved)
        if not np.isclose(other[0], record.seconds) or other[1] > record.problem.memory_limit:
            assert check(plain(changed(record, assignment=moved)), changed(record, assignment=moved))
            seen["cuts"] += 1
        pipeline = replace(record.problem.pipeline, fill=0.9 * record.problem.pipeline.fill)
        problem = replace(record.problem, pipeline=pipeline)
        assert digest(problem) != digest(record.problem)
        assert any("problem" in line for line in check(plain(solved(seed)), changed(record, problem=problem)))
        seen["sends"] += 1
        if record.multipliers:
            wrong = tuple((2.0, *m[1:]) for m in record.multipliers)
            lines = check(plain(changed(record, multipliers=wrong)), changed(record, multipliers=wrong))
            seen["multipliers"] += bool(lines)
    assert min(seen.values()) > 5


def test_units_dominate_no_pipeline_of_fewer_stages():
    """What waits at the beginning of a stage may be priced in the problem of more stages."""
    home = next(r for r in (solved(seed).records[0] for seed in range(9)) if r.candidate.pipe.ranks > 1)
    mesh, m, free = home.candidate.mesh, home.candidate.microbatches, ((1.0, 0.0, 0.0, np.inf, 1.0),)
    whole = dual_bound(replace(home.problem, pipeline=None), free)
    assert whole > 0
    for pipe, found in ((Pipe(1), 1), (Pipe(home.candidate.pipe.stages, fill=1.0, schedule="other"), 0)):
        other = Candidate(mesh, m, pipe)
        record = Record(other, "dominated", whole * other.share, multipliers=free, source=home.candidate)
        saved = Saved((home, record), home.problem.memory_limit)
        shown = [line for line in check(plain(saved), saved) if "can be shown" in line and str(other) in line]
        assert len(shown) == found


def test_a_digest_sees_the_pipeline():
    problem = next(p for p in map(random_stages, range(40)) if any(s.any() for s in p.pipeline.sends))
    pipe = problem.pipeline
    others = [
        replace(pipe, microbatches=pipe.microbatches + 1),
        replace(pipe, in_flight=tuple(n + 1 for n in pipe.in_flight)),
        replace(pipe, sends=tuple(2 * s for s in pipe.sends)),
        replace(pipe, schedule="other"),
        None,
    ]
    digests = {digest(replace(problem, pipeline=p)) for p in (pipe, *others)}
    assert len(digests) == len(others) + 1


def test_an_assignment_with_cuts_that_are_none_takes_forever():
    problem = random_stages(1)
    states = tuple((0,) * len(problem.classes[u.kind].variables) for u in problem.units)
    for cuts in ((), (0,) * (problem.pipeline.stages - 1), (99,) * (problem.pipeline.stages - 1)):
        assert taken(problem, Assignment((0,) * len(problem.shared), states, cuts)) == (np.inf, np.inf)


@pytest.mark.parametrize("seed", range(40))
def test_the_fullest_rank_over_all_cuts(seed):
    """What many microbatches without messages take is what the fullest rank does."""
    problem = random_stages(seed)
    pipe = problem.pipeline
    endless = replace(pipe, microbatches=10**9, fill=1.0, sends=tuple(0 * s for s in pipe.sends))
    problem = replace(problem, pipeline=endless, memory_limit=np.inf)
    multipliers = [Prices(0.6, 0.0)] * pipe.stages
    found = stages_bound(Evaluation(problem), multipliers, even=True) * (1 - 1e-6)
    shown = fullest_anew(problem, pipe.ranks, pipe.virtual, 0.6)
    assert found <= shown <= CountedStages(problem).times.min(initial=np.inf) * (1 + 1e-6)
