"""Every rule against torch's OpInfo samples, and DTensor's strategies on the same samples. ``make exact-rules``.

Each call that a sample makes, as capture has it and as PREPARE leaves it, is run whole and split in float64: value and
gradient, every strategy of its rule on one axis of 2, 3 and 4 ranks and of unequal microbatches, pairs of strategies on
two axes, lengths that divide and that do not, ordinary numbers, large, small and whole ones.

The comparison tries, on two ranks, every way to hold each operand (replicated, cut along a dim, as addends) and looks
what the results then are: those are the strategies that there are. What a side claims and is not among them is wrong,
what it leaves out is missing. DTensor is asked through `torch.distributed.tensor._ops.strategy_validation`, for the ops
that reach its dispatcher; ours for the ops of a captured graph. Addends that are combined by ``avg``, ``min`` or
``max`` are left out: only DTensor has them.

``--ops relu,add``, ``--most 2`` and ``--minutes 5`` run a part; ``--write`` writes ``docs/rules.md``. Exit code 1 where
a strategy of ours is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor._ops import strategy_validation as dtensor
from torch.utils._pytree import tree_leaves

from autopar.passes.facts import Strategy, fact
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.rules import rule_of
from autopar.passes.strategy import choices, strategy

sys.path.insert(0, str(Path(__file__).parent.parent))
import opinfo_calls
import rule_judge
from opinfo_calls import BY_THREE, EVEN, ODD, REGIMES, Call

TWO = Mesh((Axis("a", 2),))
ALL = (*rule_judge.MESHES, Mesh((Axis("a", 4),)))
MOST_WAYS = 150  # ways to hold the operands that are tried for one call in the comparison
PAGE = Path(__file__).parents[2] / "docs" / "rules.md"

Combination = tuple[tuple[str, ...], tuple[str, ...]]  # words of the operands and of the results: R, S(0), P(sum)


@dataclass
class Side:
    """What one system claims for the calls of one op."""

    calls: int = 0
    divided: int = 0  # calls that some strategy splits
    claimed: int = 0
    wrong: list[str] = field(default_factory=list)
    missing: int = 0
    seen: set[str] = field(default_factory=set)  # calls that were counted


@dataclass
class Row:
    """One op of OpInfo."""

    name: str
    judged: int = 0  # calls
    tried: int = 0  # strategies, all meshes and regimes
    wrong: list[str] = field(default_factory=list)
    ours: Side = field(default_factory=Side)
    theirs: Side = field(default_factory=Side)


def judged(row: Row, infos: list[Any], most: int, seen: set[str]) -> None:
    """The property test and the comparison for one op."""
    for info in infos:
        for lengths in (EVEN, BY_THREE, ODD):
            with opinfo_calls.sizes(lengths):
                found = list(opinfo_calls.samples(info, most if lengths is EVEN else -(-most // 2)))
            for sample in found:
                _judge_sample(row, sample, seen, compare=lengths is EVEN)


def _judge_sample(row: Row, sample: Any, seen: set[str], *, compare: bool) -> None:
    try:
        captured = [c for c in opinfo_calls.captured_calls(*sample) if opinfo_calls.judgeable(c) and c.large]
    except opinfo_calls.REFUSED:
        return
    prepared: list[Call] = []
    for call in captured:
        try:
            parts = [p for p in opinfo_calls.prepared_calls(call) if opinfo_calls.judgeable(p) and p.large]
        except opinfo_calls.REFUSED:
            return
        prepared += parts
        for each in (call, *parts):
            if each.key not in seen:
                seen.add(each.key)
                _judge_call(row, each)
    if compare:
        _compare(row.ours, prepared, _ours)
        _compare(row.theirs, opinfo_calls.dispatched_calls(*sample), _theirs)


def _judge_call(row: Row, call: Call) -> None:
    node, operands = rule_judge.build(call.target, call.args, call.kwargs)
    if rule_of(node) is None:
        return
    row.judged += 1
    for regime in REGIMES:
        changed = opinfo_calls.in_regime(call, regime)
        node, operands = rule_judge.build(changed.target, changed.args, changed.kwargs)
        try:
            verdict = rule_judge.judge(node, operands, ALL if regime == "normal" else (TWO,))
        except (RuntimeError, ValueError, NotImplementedError):
            continue  # the op does not take such numbers
        row.tried += len(verdict.tried)
        row.wrong += [f"{call.key} {regime} {w}" for w in verdict.wrong]


def _compare(side: Side, calls: list[Call], claims: Any) -> None:
    """Count what ``claims`` says of the calls; each call counts once an op."""
    for call in calls:
        given = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
        if call.key in side.seen or not call.large or not opinfo_calls.judgeable(call):
            continue
        if any(not t.numel() for t in given):
            continue
        side.seen.add(call.key)
        side.calls += 1
        key = (claims.__name__, call.key)
        if key not in KNOWN:
            claimed, others = claims(call)
            truth = _truth(call)
            doubtful = sorted(claimed - truth) if truth is not None else []
            wrong = [f"{call.key} {c}" for c in doubtful if not _holds(call, c)]
            KNOWN[key] = (len(claimed) + others, wrong, 0 if truth is None else len(truth - claimed))
        count, wrong, missing = KNOWN[key]
        side.divided += bool(count)
        side.claimed += count
        side.wrong += wrong
        side.missing += missing


KNOWN: dict[tuple[str, str], tuple[int, list[str], int]] = {}  # strategies, wrong and missing ones of a call


def _ours(call: Call) -> tuple[set[Combination], int]:
    """Our strategies on two ranks: in DTensor's words, and how many have none there (parts, specials)."""
    node, operands = rule_judge.build(call.target, call.args, call.kwargs)
    shapes = (*(tuple(x.shape) for x in operands), *(v.shape for v in fact(node).values if v is not None))
    found, others = set[Combination](), 0
    for choice in choices(node, TWO, 0):
        if choice.kind in ("I", "R"):
            continue
        chosen = strategy(node, TWO, (choice,), (0,))
        assert chosen is not None
        layouts = [*chosen.operands, *(r for r in chosen.results if r is not None)]
        if choice.kind == "special" or any(s.parts for layout in layouts for s in layout.dims):
            others += 1
            continue
        words = [_word(layout) for layout in layouts]
        given, made = tuple(words[: len(operands)]), tuple(words[len(operands) :])
        if all(word == "R" for word in given):
            others += 1  # what only the result has, is cut: no operand is
        elif _counts(given, operands) and _plain(made, shapes[len(operands) :]):
            found.add((given, made))
    return found, others


def _word(layout: Layout) -> str:
    return {"S": f"S({layout.dim_of(0)})", "P": "P(sum)"}.get(layout.kinds, "R")


def _theirs(call: Call) -> tuple[set[Combination], int]:
    """DTensor's strategies on two ranks, those with even cuts and plain sums; the others are not counted."""
    tensors = dtensor.extract_tensors_from_args(call.args, call.kwargs)
    results = [t for t in tree_leaves(_run(call)) if isinstance(t, Tensor)]
    shapes = tuple(tuple(t.shape) for _, t in tensors), tuple(tuple(t.shape) for t in results)
    with LocalTensorMode(frozenset(range(2))):
        found = dtensor._query_dtensor_rules(call.target, tensors, call.args, call.kwargs, *shapes, 2, False)
    return {c for c in found if _counts(c[0], [t for _, t in tensors]) and _plain(c[1], shapes[1])}, 0


def _counts(words: tuple[str, ...], operands: list[Tensor]) -> bool:
    """Whether a strategy is compared: even cuts, plain sums, addends of numbers only."""
    if any(w == "P(sum)" and not _is_number(x) for w, x in zip(words, operands)):
        return False
    return _plain(words, tuple(tuple(x.shape) for x in operands))


def _plain(words: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether all cuts are even and all addends plain ones."""
    for word, shape in zip(words, shapes):
        if word.startswith("S(") and (word[2:-1].startswith("-") or shape[int(word[2:-1])] % 2):
            return False
        if word not in ("R", "P(sum)") and not word.startswith("S("):
            return False
    return True


def _run(call: Call) -> Any:
    with torch.no_grad():
        return call.target(*call.args, **call.kwargs)


def _truth(call: Call) -> set[Combination] | None:
    """All strategies with some operand not replicated that give the right values; None where there are too many."""
    found: set[Combination] | None = None
    for regime in ("normal", "whole"):
        changed = opinfo_calls.in_regime(call, regime)
        node, operands = rule_judge.build(changed.target, changed.args, changed.kwargs)
        ways = [[Layout.uniform("R", 1, x.dim()), *_others(x, True)] for x in operands]
        if not ways or torch.Size([len(w) for w in ways]).numel() > MOST_WAYS:
            return None
        try:
            whole = rule_judge.run(node, operands)
        except (RuntimeError, ValueError):
            continue
        right = {c for held in itertools.product(*ways) for c in _right(node, held, operands, whole)}
        found = right if found is None else found & right
    return found


def _others(x: Tensor, given: bool) -> Iterator[Layout]:
    """Ways to hold a tensor but whole. Addends of an index point anywhere, which kernels do not survive: where a tensor
    is ``given``, only numbers are held so."""
    for d, n in enumerate(x.shape):
        if n % 2 == 0 and n:
            yield Layout.uniform("R", 1, x.dim()).with_shard(0, d)
    if (not given and x.dtype != torch.bool) or _is_number(x):
        yield Layout.uniform("P", 1, x.dim())


def _is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _right(node: Any, held: tuple[Layout, ...], operands: list[Tensor], whole: list[Tensor]) -> Iterator[Combination]:
    """What the results are where the operands are held so: every word for each that makes the whole one, several
    results in the same way."""
    if all(layout.kinds == "R" for layout in held):
        return
    pieces = [rule_judge.distribute(x, layout, TWO) for x, layout in zip(operands, held)]
    each = [[Layout.uniform("R", 1, r.dim()), *_others(r, False)] for r in whole]
    for results in itertools.product(*each) if len(each) == 1 else zip(*_alike(each)):
        if _makes(node, held, results, pieces, whole):
            yield tuple(map(_word, held)), tuple(map(_word, results))


def _makes(
    node: Any, held: tuple[Layout, ...], results: tuple[Layout, ...], pieces: list[Any], whole: list[Tensor]
) -> bool:
    """Whether the pieces of the results, so held, are the whole ones."""
    chosen = Strategy((), (0,), held, tuple(results))
    try:
        outs = {(c,): rule_judge.run_local(node, chosen, TWO, (c,), [p[(c,)] for p in pieces]) for c in (0, 1)}
        for i, (layout, want) in enumerate(zip(results, whole)):
            made = {at: o[i] for at, o in outs.items()}
            rule_judge.close(rule_judge.assemble(made, layout, TWO, want), want, "", adds=layout.kinds == "P")
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError):
        return False
    return True


def _holds(call: Call, combination: Combination) -> bool:
    """Whether one strategy gives the right values: each result may be held in a way of its own."""
    for regime in ("normal", "whole"):
        changed = opinfo_calls.in_regime(call, regime)
        node, operands = rule_judge.build(changed.target, changed.args, changed.kwargs)
        try:
            whole = rule_judge.run(node, operands)
        except (RuntimeError, ValueError):
            continue
        given = tuple(_layout(w, x) for w, x in zip(combination[0], operands))
        made = tuple(_layout(w, x) for w, x in zip(combination[1], whole))
        pieces = [rule_judge.distribute(x, layout, TWO) for x, layout in zip(operands, given)]
        if not _makes(node, given, made, pieces, whole):
            return False
    return True


def _layout(word: str, x: Tensor) -> Layout:
    held = Layout.uniform("P" if word == "P(sum)" else "R", 1, x.dim())
    return held.with_shard(0, int(word[2:-1])) if word.startswith("S(") else held


def _alike(each: list[list[Layout]]) -> list[list[Layout]]:
    """Several results: all held in the same way."""
    words = dict.fromkeys(_word(layout) for ways in each for layout in ways)
    held = [[next((x for x in ways if _word(x) == word), None) for ways in each] for word in words]
    return [list(x) for x in zip(*([y for y in h if y] for h in held if all(h)))]


def summary(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(what, ours, DTensor's)."""
    sides = [r.ours for r in rows], [r.theirs for r in rows]
    count = lambda of: tuple(str(sum(map(of, side))) for side in sides)
    return [
        ("ops with a strategy that splits", *count(lambda s: s.divided > 0)),
        ("calls compared", *count(lambda s: s.calls)),
        ("calls with a strategy that splits", *count(lambda s: s.divided)),
        ("strategies", *count(lambda s: s.claimed)),
        ("wrong strategies", *count(lambda s: len(s.wrong))),
        ("missing strategies", *count(lambda s: s.missing)),
    ]


def page(rows: list[Row], most: int) -> str:
    """``docs/rules.md``."""
    judged = sum(r.judged for r in rows)
    tried = sum(r.tried for r in rows)
    version = torch.__version__.split("+")[0]
    lines = [
        "# Rules, op by op",
        "",
        "A rule names the dims of an op's operands and results; all ways to split the op follow from it (section 4",
        "of [the design](design.md)). This page is written by `python tests/exact/rules.py --write`, which runs every",
        f"rule on the samples with which torch {version} tests its own ops.",
        "",
        f"**The property test**: {judged:,} calls, {tried:,} strategies run whole and split, value and gradient in",
        "float64, on one axis of 2, 3 and 4 ranks, on two axes and over microbatches, lengths that divide and that do",
        f"not, ordinary numbers, large, small and whole ones: {sum(len(r.wrong) for r in rows)} wrong.",
        "",
        "**Beside DTensor**, on two ranks. All ways to hold the operands are tried: those that give the right values",
        "are the strategies that there are. A strategy of one side that is not among them is wrong, one that it",
        "leaves out is missing. DTensor's are those that `torch.distributed.tensor._ops.strategy_validation` reads,",
        "for ops that reach its dispatcher; ours are those of the ops of a captured graph. Cuts are even and addends",
        "plain sums: uneven cuts, averages and minima have no counterpart on the other side. Only values are compared",
        "here: what gives the right value and a wrong gradient is missing on our side, on purpose. Of calls whose",
        f"operands can be held in more than {MOST_WAYS} ways neither wrong nor missing strategies are counted. An op",
        "whose samples draw random numbers, or that only copies and so is no op of a prepared graph, has none on our",
        "side. Addends that are cast to a lower precision before they are added up count as wrong.",
        "",
        "| | autopar | DTensor |",
        "|---|---:|---:|",
        *(f"| {what} | {ours} | {theirs} |" for what, ours, theirs in summary(rows)),
        "",
        f"By op, {most} samples of each of its forms: strategies, wrong ones, missing ones.",
        "",
        "| op | autopar | wrong | missing | DTensor | wrong | missing |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(_line(r) for r in rows if r.ours.calls or r.theirs.calls),
        "",
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    cells = [str(c) for s in (row.ours, row.theirs) for c in (s.claimed, len(s.wrong), s.missing)]
    return f"| {row.name} | {' | '.join(cells)} |"


def main() -> int:
    """Print a row an op and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="")
    parser.add_argument(
        "--most", type=int, default=2, help="samples of an OpInfo at even lengths (half of it at others)"
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--theirs", action="store_true", help="print DTensor's wrong strategies too")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", rank=0, world_size=2)
    infos = opinfo_calls.op_infos()
    names = args.ops.split(",") if args.ops else list(infos)
    rows, seen, start = [], set[str](), time.monotonic()
    for name in names:
        if time.monotonic() - start > args.minutes * 60:
            print(f"left out for time: {', '.join(names[len(rows) :])}")
            break
        row = Row(name)
        try:
            judged(row, infos[name], args.most, seen)
        except Exception as error:  # a rule that raises is a wrong one; the others are still judged
            row.wrong.append(f"{name}: {type(error).__name__}: {error}")
        rows.append(row)
        cells = [f"{s.claimed:5} {len(s.wrong):3} {s.missing:5}" for s in (row.ours, row.theirs)]
        print(f"{name:45} {row.judged:4} {row.tried:6} {len(row.wrong):3} | {' | '.join(cells)}", flush=True)
        for wrong in (*row.wrong, *row.ours.wrong):
            print(f"    wrong: {wrong}")
        for wrong in row.theirs.wrong if args.theirs else ():
            print(f"    DTensor: {wrong}")
    for what, ours, theirs in summary(rows):
        print(f"{what:40} {ours:>8} {theirs:>8}")
    wrong = sum(len(r.wrong) + len(r.ours.wrong) for r in rows)
    print(f"{sum(r.tried for r in rows)} strategies tried, {wrong} wrong, {time.monotonic() - start:.0f} s")
    if args.write:
        PAGE.write_text(page(rows, args.most))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
