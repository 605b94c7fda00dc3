"""Pipeline schedules: complete, in order, as many microbatches in flight as they should; published bubbles."""

import random
from itertools import product

import pytest

from autopar.errors import AutoparError
from autopar.solver.simulate import NAMES, Chunk, Seconds, Step, UnitTimes, in_flight, in_order, run, schedule
from autopar.solver.simulate.schedules import PARTED
from autopar.solver.simulate.zero_bubble import by_hand, span, zero_bubble

SIZES = [(p, m) for p, m in product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8, 21))]


@pytest.mark.parametrize("name", NAMES)
def test_every_action_runs_once_and_none_waits_for_ever(name):
    for (ranks, microbatches), chunks in product(SIZES, (1, 2, 3) if name == "interleaved" else (1,)):
        actions = schedule(name, ranks, microbatches, chunks)
        letters = "FIW" if name in PARTED else "FB"
        expected = sorted(product(letters, range(chunks), range(microbatches)))
        assert len(actions) == ranks
        assert all(sorted(rank) == expected for rank in actions)
        assert len(list(in_order(actions))) == ranks * len(expected)


def test_in_order_puts_each_action_after_what_it_needs():
    done = set()
    for rank, (letter, chunk, m) in in_order(schedule("interleaved", 4, 8, 2)):
        stage = chunk * 4 + rank
        if letter == "F":
            assert stage == 0 or ("F", stage - 1, m) in done
        else:
            assert ("F", stage, m) in done
            assert stage == 7 or ("B", stage + 1, m) in done
        done.add((letter, stage, m))


def test_a_schedule_that_gets_stuck_is_named():
    backward_first = [[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)], [("F", 0, 1), ("F", 0, 0), ("B", 0, 0)]]
    with pytest.raises(AutoparError, match="rank 0 waits for ever to run B of chunk 0, microbatch 0"):
        list(in_order(backward_first))
    with pytest.raises(AutoparError, match="rank 0 waits for ever to run W"):
        list(in_order([[("F", 0, 0), ("W", 0, 0), ("I", 0, 0)]]))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_microbatches_in_flight(ranks, microbatches):
    def flying(name, chunks=1):
        return [in_flight(rank) for rank in schedule(name, ranks, microbatches, chunks)]

    assert flying("gpipe") == [microbatches] * ranks
    assert flying("1f1b") == [min(ranks - r, microbatches) for r in range(ranks)]
    for v in (2, 3):
        if microbatches % ranks == 0:
            ahead = [2 * (ranks - r - 1) + (v - 1) * ranks + 1 for r in range(ranks)]
            assert flying("interleaved", v) == [min(a, v * microbatches) for a in ahead]
    assert flying("zb-h1") == [min(ranks, microbatches)] * ranks
    assert flying("zb-h2") == [min(2 * ranks - 1, microbatches)] * ranks
    assert max(flying("zb-1p")) <= ranks
    assert max(flying("zb-2p")) <= 2 * ranks


def test_interleaved_is_megatrons_order():
    """Narayanan et al. 2021, figure 4: 4 ranks, 8 microbatches, 2 chunks; the last rank."""
    rank = schedule("interleaved", 4, 8, 2)[3]
    shown = " ".join(f"{letter}{chunk}.{m}" for letter, chunk, m in rank)
    assert shown.startswith("F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F0.4 B0.0 F0.5 B0.1")


def test_what_is_not_a_schedule_is_refused():
    for arguments, why in (
        (("1f1b1", 2, 2), "schedule '1f1b1' is not known. Legal: none, gpipe"),
        (("1f1b", 2, 2, 2), "schedule 1f1b: has one chunk a rank, not 2"),
        (("gpipe", 2, 0), "0 microbatches"),
    ):
        with pytest.raises(AutoparError, match=why):
            schedule(*arguments)


def bubble(name, ranks, microbatches, forward, inputs, weights, send=0.0, held=None):
    """(seconds beyond those of work, their share, the bytes of how many microbatches are held at most)."""
    unit = UnitTimes("layer", forward, inputs, weights, saved_bytes=1.0, weight_bytes=held)
    chunks = tuple((Chunk(((unit, 1),), send if r < ranks - 1 else 0.0),) for r in range(ranks))
    line = run(Step(chunks, microbatches, name, overlap_p2p=True))
    beyond = line.seconds - microbatches * (forward + inputs + weights)
    return beyond, beyond / line.seconds, line.worst[1].nbytes


@pytest.mark.parametrize(("ranks", "times"), list(product((2, 4, 8), (1, 2, 3, 8))))
def test_zero_bubble_forms(ranks, times):
    """(p-1)(F+I-W) and (p-1)(F+I-2W), Qi et al. 2023, which stand for enough microbatches."""
    for f, i, w in ((1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (4.0, 5.0, 2.0)):
        enough = ranks * times
        assert bubble("zb-h1", ranks, enough, f, i, w)[0] == pytest.approx((ranks - 1) * (f + i - w))
        if times > 1:
            assert bubble("zb-h2", ranks, enough, f, i, w)[0] == pytest.approx((ranks - 1) * (f + i - 2 * w))
        for made, hand in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")):
            assert bubble(made, ranks, enough, f, i, w)[0] <= bubble(hand, ranks, enough, f, i, w)[0] + 1e-9
    assert bubble("zb-2p", ranks, max(2, times) * ranks, 1.0, 1.0, 1.0)[0] == pytest.approx(0.0)


# Times (ms) and bubble rates of 1F1B, ZB-H1, ZB-H2 and ZB-1p of GPT-1.5B, 6.2B and 14.6B, from Qi et al. 2023. `held`:
# the activations of a layer that a weight gradient needs over all of them, 32 / (34 + 5 a s / h).
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 32 / (34 + 5 * 24 * 1024 / 2304), (0.2431, 0.1585, 0.1083, 0.1585)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 32 / (34 + 5 * 32 * 1024 / 4096), (0.2347, 0.1323, 0.0698, 0.1323)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 32 / (34 + 5 * 40 * 1024 / 5120), (0.2552, 0.1397, 0.0672, 0.1397)),
]


@pytest.mark.parametrize(("ranks", "microbatches", "times", "held", "rates"), PUBLISHED)
def test_published_bubble_rates(ranks, microbatches, times, held, rates):
    found = [bubble(n, ranks, microbatches, *times, held)[1] for n in ("1f1b", "zb-h1", "zb-h2", "zb-1p")]
    assert [round(rate, 4) for rate in found] == list(rates)


@pytest.mark.parametrize(("size", "microbatches", "published"), [(0, 32, 0.0039), (1, 24, 0.0029), (1, 64, 0.0010)])
def test_published_near_zero_bubbles(size, microbatches, published):
    ranks, _, times, held, _ = PUBLISHED[size]
    _, rate, most = bubble("zb-2p", ranks, microbatches, *times, held)
    assert rate == pytest.approx(published, abs=0.0003)
    assert most <= 2 * ranks


def test_made_schedules_keep_to_their_memory_and_beat_those_made_by_hand():
    rng = random.Random(0)
    for _ in range(60):
        ranks, microbatches, twice = rng.choice((2, 3, 5, 8)), rng.choice((1, 4, 9, 24)), rng.choice((False, True))
        slow = [rng.choice((1.0, 1.0, rng.uniform(0.5, 2.0))) for _ in range(ranks)]
        i, w, c, held = rng.uniform(0.5, 2.0), rng.uniform(0.0, 1.5), rng.choice((0.0, 0.1, 1.0)), rng.uniform(0.1, 1)
        seconds = [Seconds(s, s * i, s * w, c, held) for s in slow]
        limit = ranks * (1 + twice)
        actions = zero_bubble(microbatches, seconds, limit)
        assert sum(1 for _ in in_order(actions)) == 3 * ranks * microbatches
        assert span(actions, seconds) <= span(by_hand(ranks, microbatches, twice), seconds)
        for rank in actions:
            now = 0.0
            for letter, _, _ in rank:
                now += {"F": 1.0, "I": held - 1, "W": -held}[letter]
                assert now <= limit + 1e-6
