"""The search over candidates: best of all, bounds that hold, statuses that say why; against trying every candidate."""

import random
from dataclasses import dataclass
from math import inf

import pytest

from autopar.solver.effort import Effort, Progress
from autopar.solver.meshes import meshes, microbatch_counts
from autopar.solver.search import Candidate, Quick, search

LIMIT = 100.0
SINGLE = Candidate(((8, 1),), 1)


@dataclass(frozen=True)
class Toy:
    """A candidate's truth: seconds without and with the memory limit, least bytes."""

    free: float
    tight: float
    least: float


@dataclass(frozen=True)
class ToyAnswer:
    status: str
    objective: float
    bound: float
    multipliers: object
    least_bytes: float
    least_bound: float


def toys(seed, ranks=16, batch=12):
    """Random truths that keep what the search relies on: free seconds never fall from a count to its multiples."""
    draw = random.Random(seed)
    truth, quick = {}, {}
    for mesh in meshes(ranks):
        free = {}
        for m in microbatch_counts(batch):
            free[m] = max([free[d] for d in free if m % d == 0], default=draw.uniform(1, 3)) + draw.choice([0, 0.3])
            toy = Toy(free[m], free[m] * draw.choice([1, 1, 1.2]), draw.uniform(20, 250) / m**0.5)
            candidate = Candidate(mesh, m)
            truth[candidate] = toy
            illegal = "the loss is not a sum over rows" if draw.random() < 0.05 else None
            quick[candidate] = Quick(free[m] * draw.uniform(0.3, 1), toy.least * draw.uniform(0.5, 1), illegal)
    return truth, quick


def run(truth, quick, gap=0.0, inner=0.0, **options):
    """``inner``: the gap that each solve leaves."""

    def solve(toy, cutoff):
        if toy.least > LIMIT:
            return ToyAnswer("infeasible", inf, inf, None, toy.least, toy.least)
        bound = toy.tight * (1 - inner)
        if bound >= cutoff and round(toy.least) % 2:
            return ToyAnswer("solved", inf, bound, "m", toy.least, toy.least)  # stopped at the cutoff, without a plan
        return ToyAnswer("solved", toy.tight, bound, "m", toy.least, toy.least)

    options = {
        "quick_bound": quick.__getitem__,
        "pose": truth.__getitem__,
        "solve": solve,
        "limit": LIMIT,
        "target_gap": gap,
        "lower_bound": lambda toy, multipliers: (toy.tight * 0.9, multipliers),
        "free_bound": lambda toy, answer: (toy.free * (1 - inner), "free"),
    } | options
    return search(truth, **options)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("gap", [0.0, 0.1])
@pytest.mark.parametrize("without", [(), ("lower_bound",), ("free_bound",), ("lower_bound", "free_bound")])
def test_equal_to_trying_all(seed, gap, without):
    truth, quick = toys(seed)
    found = run(truth, quick, gap, **dict.fromkeys(without))
    fits = {c: t.tight for c, t in truth.items() if quick[c].illegal is None and t.least <= LIMIT}
    assert [o.candidate for o in found.outcomes] == list(truth)
    if not fits:
        legal = [t.least for c, t in truth.items() if quick[c].illegal is None]
        assert found.best is None and found.gap is None and found.bound == inf
        assert found.least.answer.least_bytes == min(legal)
        return
    best = min(fits.values())
    assert found.bound <= best <= found.best.seconds <= best / (1 - gap) * (1 + 1e-12)
    assert 0 <= found.gap <= gap + 1e-12 and found.best.seconds == fits[found.best.candidate]
    for o in found.outcomes:
        assert o.bound < inf or o.candidate not in fits, o
        assert (o.bound == inf) == (o.status in ("memory", "illegal"))
        if o.candidate in fits:
            assert o.bound <= fits[o.candidate] + 1e-12 and o.status in (
                "solved",
                "roofline",
                "multipliers",
                "dominated",
            )
            assert o.status == "solved" or o.bound >= found.best.seconds * (1 - gap) - 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_the_gap_of_the_solves_is_in_the_gap_of_the_search(seed):
    truth, quick = toys(seed)
    found = run(truth, quick, 0.01, inner=0.005)
    if found.best is not None:
        fits = [t.tight for c, t in truth.items() if quick[c].illegal is None and t.least <= LIMIT]
        assert found.bound <= min(fits) <= found.best.seconds and found.gap <= 0.01 + 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_the_same_whatever_the_order(seed):
    truth, quick = toys(seed)
    backwards = dict(reversed(truth.items()))
    one, two = run(truth, quick), run(backwards, quick)
    key = lambda found: {o.candidate: (o.status, o.bound, o.seconds) for o in found.outcomes}
    assert key(one) == key(two) and one.work == two.work
    assert (one.best and one.best.candidate) == (two.best and two.best.candidate)


def test_bounds_save_work():
    counts = []
    for without in ((), ("free_bound",), ("free_bound", "lower_bound")):
        counts.append(sum(run(*toys(s), 0.005, **dict.fromkeys(without)).work["solved"] for s in range(40)))
    every = sum(len(toys(s)[0]) for s in range(40))
    assert counts[0] < counts[1] < counts[2] < every


def test_a_work_limit_leaves_candidates_open_and_the_gap_honest():
    truth, quick = toys(3)
    full, short = run(truth, quick), run(truth, quick, work_limit=2)
    assert short.deterministic and short.work["posed"] == 2
    assert any(o.status == "open" for o in short.outcomes)
    assert short.bound <= full.bound and (short.best is None or short.gap >= full.gap)


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_known_elsewhere_is_to_be_beaten(seed):
    truth, quick = toys(seed)
    full = run(truth, quick)
    if full.best is None:
        return
    same = run(truth, quick, known=full.best.seconds)
    assert same.best is None and all(o.bound >= full.best.seconds for o in same.outcomes)
    assert run(truth, quick, known=full.best.seconds * 1.01).best.seconds == full.best.seconds


def test_a_best_plan_may_come_without_multipliers():
    """Where what was known before bounds it by more than its own solve."""
    best, others = Candidate(((2, 1),), 1), [Candidate(((3, 1),), m) for m in (1, 2, 4)]
    truth = {best: Toy(1.0, 1.0, 1.0), **{c: Toy(2.0, 2.0, 1.0) for c in others}}
    given = []
    free = lambda toy, multipliers: (given.append(tuple(multipliers)) or toy.free, multipliers)
    found = run(truth, dict.fromkeys(truth, Quick(1.0)) | {best: Quick(0.99)}, inner=0.1, free_bound=free, gap=-1.0)
    assert found.best.candidate == best and found.best.multipliers is None and () in given


def test_some_candidates_are_looked_at_first():
    """Once a plan is known: of candidates with equal bounds, and of those with lower ones."""
    truth = {Candidate(((n, 1),), 1): Toy(1.0, 1.0, 1.0) for n in (2, 3, 4, 5)}
    order = []
    pose = lambda candidate: order.append(candidate.mesh[0][0]) or truth[candidate]
    quick = {c: Quick(0.1 * c.mesh[0][0]) for c in truth}
    run(truth, quick, pose=pose, free_bound=None, lower_bound=None, first=lambda c: c.mesh[0][0] >= 4)
    assert order == [2, 4, 5, 3]


def test_the_clock_ends_a_search_with_a_plan_and_it_says_so():
    truth, quick = toys(3)
    found, full = run(truth, quick, effort=Effort(time_limit=0.0).begun()), run(truth, quick)
    assert not found.deterministic and found.best is not None and found.work["posed"] < full.work["posed"]
    assert found.bound <= full.bound and found.gap == pytest.approx(1 - found.bound / found.best.seconds)
    assert run(truth, quick, effort=Effort(time_limit=1e6).begun()).deterministic


def test_who_watches_a_search_sees_it_close_in_and_may_end_it():
    truth, quick = toys(3)
    seen: list[Progress] = []
    full = run(truth, quick, effort=Effort(watch=seen.append))
    assert [p.waiting for p in seen] == sorted((p.waiting for p in seen), reverse=True) and seen[-1].waiting == 0
    assert all(p.bound <= full.best.seconds <= p.seconds for p in seen) and seen[-1].gap == pytest.approx(full.gap)
    ended = run(truth, quick, effort=Effort(watch=lambda progress: progress.seconds == inf))
    assert not ended.deterministic and ended.best is not None and ended.work["posed"] < full.work["posed"]


def test_alternatives_are_the_other_plans_fastest_first():
    truth, quick = toys(5)
    found = run(truth, quick, lower_bound=None, free_bound=None)
    seconds = [o.seconds for o in found.alternatives]
    assert found.best not in found.alternatives and seconds == sorted(seconds) and min(seconds) >= found.best.seconds


def test_nothing_legal():
    found = run({SINGLE: Toy(1, 1, 1)}, {SINGLE: Quick(0, 0, "batch statistics inside the network")})
    assert found.best is None and found.least is None and found.outcomes[0].why.startswith("batch statistics")


def test_until_something_fits_it_stays_on_a_mesh():
    """Without a plan no bound can end a candidate: every mesh's first count would be posed before any second."""
    truth = {Candidate(mesh, m): Toy(1.0, 1.0, 300 / m) for mesh in meshes(16) for m in (1, 2, 4, 8)}
    posed = []
    pose = lambda candidate: posed.append(candidate) or truth[candidate]
    found = run(truth, {c: Quick(0.5) for c in truth}, pose=pose)
    assert [(len(c.mesh), c.microbatches) for c in posed[:2]] == [(1, 1), (1, 4)] and found.best.seconds == 1.0
    assert len(posed) < len(truth) / 2


def test_the_fewest_bytes_are_found_with_few_solves():
    truth = {Candidate(((8, 1),), m): Toy(1, 1, 500 / m) for m in (1, 2, 4)}
    quick = {c: Quick(1, t.least) for c, t in truth.items()}
    found = run(truth, quick)
    assert found.least.candidate.microbatches == 4 and found.work["solved"] == 1
    assert found.least.why == "needs at least 125 bytes a rank of 100"


def test_a_candidate_given_twice_is_refused():
    with pytest.raises(AssertionError, match="8@1, 1 microbatch is given twice"):
        search([SINGLE, SINGLE], quick_bound=lambda c: Quick(1), pose=id, solve=id, limit=1)
