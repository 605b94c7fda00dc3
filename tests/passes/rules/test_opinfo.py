"""Every rule on the samples with which torch tests its ops: one of each here, all of them in ``make exact-rules``."""

from __future__ import annotations

import warnings

import pytest
import rule_judge
import torch

from autopar.passes.layout import Axis, Mesh
from autopar.passes.rules import rule_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's samples look for packages that are not there
    import opinfo_calls

MESHES = (Mesh((Axis("a", 2),)), Mesh((Axis("a", 2), Axis("b", 2))))
LEAST = 400  # ops with a rule that the samples reach
PARTS = 4  # tests, so that the slowest is known


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_strategy_is_wrong(part: int) -> None:
    wrong, ops = [], set()
    for infos in list(opinfo_calls.op_infos().values())[part::PARTS]:
        for call in calls(infos[0]):
            node, operands = rule_judge.build(call.target, call.args, call.kwargs)
            if rule_of(node) is None:
                continue
            ops.add(call.target)
            wrong += [f"{call.key}: {w}" for w in rule_judge.judge(node, operands, MESHES).wrong]
    assert not wrong
    assert len(ops) > LEAST / PARTS / 2


def calls(info: object) -> list[object]:
    """What one sample calls, as captured and as prepared."""
    found = {}
    with opinfo_calls.sizes(opinfo_calls.EVEN):
        given = list(opinfo_calls.samples(info, 1))
    for sample in given:
        try:
            captured = [c for c in opinfo_calls.captured_calls(*sample) if opinfo_calls.judgeable(c) and c.large]
            for call in captured:
                found |= {c.key: c for c in (call, *opinfo_calls.prepared_calls(call))}
        except opinfo_calls.REFUSED:
            continue
    return [c for c in found.values() if opinfo_calls.judgeable(c) and c.large]


def test_the_judge_sees_wrong_strategies() -> None:
    """A sum that is called elementwise, and a product in which both may be addends."""
    from autopar.passes.rules.core import RULES, Rule, dims

    total, product = torch.ops.aten.sum.dim_IntList, torch.ops.aten.mul.Tensor
    x = torch.randn(4, 6, dtype=torch.float64)
    claims = {
        total: (Rule((dims("a b"),), (dims("b"),)), (x, [1])),
        product: (Rule((dims("a b"), dims("a b")), (dims("a b"),), linear=(frozenset({0, 1}),)), (x, x)),
    }
    for target, (claim, args) in claims.items():
        node, operands = rule_judge.build(target, args, {})
        held = RULES[target]
        RULES[target] = lambda _, claim=claim: claim
        try:
            assert rule_judge.judge(node, operands, MESHES[:1]).wrong
        finally:
            RULES[target] = held
