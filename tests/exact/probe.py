"""Probing against the rules: for 60 ops whose rules are hidden from it, what does it find? ``make exact-probe``.

Calls are torch's OpInfo samples, as capture has them and as PREPARE leaves them. Of each the strategies on one axis of
two ranks that its rule has (layouts of operands and results) are compared with those that probing finds. Every strategy
that it finds, on one axis and on two, over microbatches, is then judged as rules are: run whole and split in float64,
values and gradients (`rule_judge`). Strategies with a lowering of their own (specials, positions) no probe can find;
they are counted apart.

Exit code 1 where one is wrong, or less than 90 % are found. ``--ops NAME,NAME`` and ``--most`` run
a part, ``--ops all`` every op that torch has samples for.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from autopar.passes import strategy as strategies
from autopar.passes.layout import Axis, Mesh
from autopar.passes.probe import probed
from autopar.passes.rules import LOCALIZE, RULES, rule_of
from autopar.passes.strategy import at_positions, choices, strategy

sys.path.insert(0, str(Path(__file__).parent.parent))
import opinfo_calls
import rule_judge
from opinfo_calls import EVEN, ODD, Call

OPS = """
    add mul where clamp sigmoid nn.functional.gelu nn.functional.softplus lerp addcmul
    sum mean amax var std_mean logsumexp linalg.vector_norm cumsum argmax sort topk
    mm bmm matmul addmm baddbmm mv einsum nn.functional.linear
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.avg_pool2d
    nn.functional.layer_norm nn.functional.group_norm nn.functional.rms_norm
    reshape transpose permute expand unsqueeze split chunk cat stack flip unbind nn.functional.pixel_shuffle
    gather index_select nn.functional.embedding scatter_add scatter take_along_dim
    softmax log_softmax nn.functional.glu
    nn.functional.mse_loss nn.functional.cross_entropy nn.functional.binary_cross_entropy_with_logits
    nn.functional.scaled_dot_product_attention
""".split()
ENOUGH = 0.9
TWO = Mesh((Axis("a", 2),))

Ways = dict[tuple[str, ...], Any]  # layouts of operands and results -> a choice that has them


@dataclass
class Row:
    """One op. ``known``: strategies of its rule; ``found``: of these; ``more``: that the rule does not have; ``own``:
    of the rule, with a lowering of their own; ``judged``: strategies run whole and split."""

    name: str
    calls: int = 0
    known: int = 0
    found: int = 0
    more: int = 0
    own: int = 0
    judged: int = 0
    seconds: float = 0.0
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)


@contextmanager
def hidden(target: Any) -> Iterator[None]:
    """The op as if nobody had written a rule for it."""
    rule, localize = RULES.pop(target), LOCALIZE.pop(target, None)
    forget()
    try:
        yield
    finally:
        RULES[target] = rule
        LOCALIZE.pop(target, None)
        if localize:
            LOCALIZE[target] = localize
        forget()


def forget() -> None:
    """Strategies are remembered by call, whatever its rule."""
    strategies._FOUND.clear()
    strategies._LENGTHS.clear()


def ways(node: fx.Node) -> tuple[Ways, int]:
    """The strategies on two ranks by their layouts, and how many have a lowering of their own."""
    found: Ways = {}
    own = 0
    for choice in choices(node, TWO, 0):
        if choice.kind in ("I", "R"):
            continue
        made = strategy(node, TWO, (choice,), (0,))
        assert made is not None
        if choice.kind == "special" or at_positions(node, choice):
            own += 1
        else:
            found[tuple(map(str, (*made.operands, *made.results)))] = choice
    return found, own


def compare(row: Row, call: Call) -> None:
    """One call: what its rule has, what probing finds, and whether that is right."""
    node, _ = rule_judge.build(call.target, call.args, call.kwargs)
    known, own = ways(node)
    with hidden(call.target):
        node, operands = rule_judge.build(call.target, call.args, call.kwargs)
        start = time.process_time()
        what = probed(node)
        row.seconds += time.process_time() - start
        found, _ = ways(node)
        rule = what.rule
        if rule is not None:
            RULES[call.target] = lambda _: rule  # for the judge, which asks for it
            for regime in ("normal", "whole"):
                changed = opinfo_calls.in_regime(call, regime)
                node, operands = rule_judge.build(changed.target, changed.args, changed.kwargs)
                try:
                    verdict = rule_judge.judge(node, operands, rule_judge.MESHES)
                except (RuntimeError, ValueError, NotImplementedError):
                    continue  # the op does not take such numbers
                row.judged += len(verdict.tried)
                row.wrong += [f"{call.key} {regime} {w}" for w in verdict.wrong]
        else:
            RULES[call.target] = lambda _: None
    row.calls += 1
    row.known += len(known)
    row.own += own
    row.found += len(known.keys() & found.keys())
    row.more += len(found.keys() - known.keys())
    row.missed += [f"{call.key}: {known[w]} {w}" for w in known.keys() - found.keys()]
    row.why += [f"{call.key}: {what.why}"] * bool(what.why)


def calls_of(infos: list[Any], most: int) -> list[Call]:
    """Calls with a rule that an op's samples make, each once."""
    found: dict[str, Call] = {}
    for lengths in (EVEN, ODD):
        with opinfo_calls.sizes(lengths):
            for sample in opinfo_calls.samples(infos[0], most):
                try:
                    captured = [c for c in opinfo_calls.captured_calls(*sample) if opinfo_calls.judgeable(c)]
                    parts = [p for c in captured for p in opinfo_calls.prepared_calls(c)]
                except opinfo_calls.REFUSED:
                    continue
                for call in (*captured, *parts):
                    if divisible(call) and opinfo_calls.judgeable(call) and has_rule(call):
                        found.setdefault(call.key, call)
    return list(found.values())


def divisible(call: Call) -> bool:
    """Whether there is something to divide, and no operand is empty."""
    return call.large and all(t.numel() for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor))


def has_rule(call: Call) -> bool:
    """Whether there is anything to hide."""
    try:
        return rule_of(rule_judge.build(call.target, call.args, call.kwargs)[0]) is not None
    except opinfo_calls.REFUSED:
        return False


def main() -> int:
    """Print a row an op, what was missed, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="")
    parser.add_argument("--most", type=int, default=2, help="samples of an op at even lengths, and at odd ones")
    parser.add_argument("--missed", action="store_true", help="print the strategies that were not found")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["AUTOPAR_PROBE_CACHE"] = ""
    infos = opinfo_calls.op_infos()
    rows: list[Row] = []
    heads = [f"{h:>5}" for h in ("calls", "rule", "found", "more", "own", "judged", "wrong", "CPU s")]
    print(f"{'op':45} {' '.join(heads)}")
    for name in infos if args.ops == "all" else args.ops.split(",") if args.ops else OPS:
        row = Row(name)
        for call in calls_of(infos[name], args.most):
            compare(row, call)
        rows.append(row)
        counts = (row.calls, row.known, row.found, row.more, row.own, row.judged, len(row.wrong))
        print(f"{name:45} {' '.join(f'{c:5}' for c in counts)} {row.seconds:5.1f}", flush=True)
        for text in (*row.wrong, *(row.missed if args.missed else ()), *(row.why if args.missed else ())):
            print(f"    {text}")
    known, found = sum(r.known for r in rows), sum(r.found for r in rows)
    wrong = sum(len(r.wrong) for r in rows)
    calls, seconds = sum(r.calls for r in rows), sum(r.seconds for r in rows)
    judged, more, own = (sum(getattr(r, w) for r in rows) for w in ("judged", "more", "own"))
    print(f"{len(rows)} ops, {calls} calls: {found} of {known} strategies found ({found / max(known, 1):.1%}),")
    print(f"{more} that no rule has, {own} with a lowering of their own left out;")
    print(f"{judged} judged, {wrong} wrong; {seconds / max(calls, 1):.2f} CPU s a call")
    return int(wrong > 0 or found < ENOUGH * known)


if __name__ == "__main__":
    sys.exit(main())
