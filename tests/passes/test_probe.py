"""What probing finds, on ops that are hard to get right: right forward and wrong backward, coupled only sometimes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rule_judge
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.passes import probe, probe_apart, strategy
from autopar.passes.facts import Choice
from autopar.passes.layout import Axis, Mesh
from autopar.passes.probe import Probed, probed
from autopar.passes.rules import core
from autopar.passes.rules.core import LOCALIZE, Rule, dims, factors
from autopar.passes.strategy import choices

TWO = Mesh((Axis("tp", 2),))
F64 = torch.float64


def custom(
    name: str, forward: Any, backward: Any = None, fake: Any = None, takes: str = "Tensor x", tags: Any = None
) -> Any:
    """A custom op; its gradient is that of ``forward`` unless ``backward`` says another."""
    schema = f"({takes}) -> Tensor"
    op = torch.library.custom_op(f"probe_tests::{name}", forward, mutates_args=(), schema=schema, tags=tags)
    op.register_fake(fake or (lambda *args: torch.empty_like(args[0])))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.others = tuple(x for x in inputs if not isinstance(x, Tensor))

    def derivative(ctx: Any, grad: Tensor) -> Any:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
        with torch.enable_grad():
            grads = torch.autograd.grad(forward(*leaves, *ctx.others), [x for x in leaves if x.requires_grad], grad)
        found = iter(grads)
        return (*(next(found) if x.requires_grad else None for x in leaves), *(None for _ in ctx.others))

    op.register_autograd(backward or derivative, setup_context=setup)
    return op._opoverload


def _scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w / (x * x).mean(-1, keepdim=True).add(1e-6).sqrt()


def _mean_of_rows(ctx: Any, grad: Tensor) -> Tensor:
    return grad / grad.shape[0]


def _clip(ctx: Any, grad: Tensor) -> Tensor:
    return grad.clamp(-1, 1)


scale = custom("scale", _scale, takes="Tensor x, Tensor w")
per_row = custom("per_row", lambda x: x.clone(), _mean_of_rows)
clip = custom("clip", lambda x: x.clone(), _clip)
pairs = custom("pairs", lambda x: x + x.view(-1, 2, x.shape[1]).flip(1).reshape(x.shape) if len(x) % 2 == 0 else x * 1)
tile = custom(
    "tile",
    lambda x, n: x.unsqueeze(0).repeat(n, 1),
    fake=lambda x, n: x.new_empty(n, *x.shape),
    takes="Tensor x, int n",
)
noisy = custom("noisy", lambda x: x + torch.rand_like(x))
liar = custom("liar", lambda x: x[:, :1].clone(), fake=torch.empty_like)
reads = custom("reads", lambda x: x * 1, tags=[torch.Tag.data_dependent_output])
in_place = custom("in_place", lambda x: x.mul_(2) * 1)
total = custom("total", lambda x, b: x.sum(0) + b, fake=lambda x, b: torch.empty_like(b), takes="Tensor x, Tensor b")


def ask(op: Any, *args: Any) -> Probed:
    """What probing says of a call; the cache is off."""
    node, _ = rule_judge.build(op, args, {})
    return probed(node)


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AUTOPAR_PROBE_CACHE", "")
    yield


def cuts(found: Probed) -> set[str]:
    """Its factors, which are named by the dims that they cut."""
    return set(found.rule.factors()) if found.rule else set()


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def test_a_custom_op_is_split_as_its_rule_would_say() -> None:
    found = ask(scale, x(8, 3, 768), x(768)).rule
    assert found is not None
    assert set(found.factors()) == {"x0d0", "x0d1"} and found.addends
    assert found.linear == (frozenset({1}),)  # in the weight


def test_what_stands_outside_of_a_sum_is_given_as_addends() -> None:
    found = ask(total, x(8, 6), x(6)).rule
    assert found is not None and set(found.factors()) == {"x0d0", "x0d1_x1d0"}
    assert found.outside == {1: {"x0d0"}} and found.linear == (frozenset({0, 1}),)


def test_a_gradient_that_hangs_on_the_rows_there_are_is_seen() -> None:
    assert cuts(ask(per_row, x(8, 6))) == {"x0d1"}


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("large", lambda x: x - x.mean(0) if float(x.detach().abs().max()) > 50 else x.clone()),
        ("sparse", lambda x: x * (1 + (x == 0).double().mean(0).gt(0.9))),
        ("infinite", lambda x: torch.where(x.isfinite().all(), x, 0.0 * x.detach().nan_to_num(0, 0, 0))),
        ("equal", lambda x: x * (1 + (x.max(0).values - x.min(0).values).abs().lt(0.1))),
        ("long", lambda x: x * (2 if x.shape[0] > 30 else 1)),
    ],
)
def test_rows_that_are_coupled_in_one_regime_only_are_seen(name: str, forward: Any) -> None:
    found = cuts(ask(custom(name, forward), x(64, 6)))
    assert "x0d0" not in found


def test_rows_that_are_coupled_with_their_neighbours_are_seen() -> None:
    assert cuts(ask(pairs, x(8, 6))) == {"x0d1"}


def test_gradients_that_are_clipped_do_not_come_as_addends() -> None:
    node, _ = rule_judge.build(clip, (x(8, 6),), {})
    assert cuts(probed(node)) == {"x0d0", "x0d1"}
    assert Choice("R") not in choices(node, TWO, 0) and Choice("I") in choices(node, TWO, 0)


def test_numbers_that_are_sizes_are_scaled() -> None:
    node, operands = rule_judge.build(tile, (x(6), 8), {})
    found = strategy.rule(node)
    assert found is not None and set(found.factors()) == {"y0d0", "x0d0"}
    held, core.RULES[tile] = core.RULES.get(tile), lambda _: found
    try:
        verdict = rule_judge.judge(node, operands, rule_judge.MESHES)
    finally:
        del core.RULES[tile]
        LOCALIZE.pop(tile)
    assert held is None and verdict.tried and not verdict.wrong


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (noisy, "draws random numbers"),
        (liar, "something else than its fake kernel"),
        (reads, "reads values"),
        (in_place, "writes into its operands"),
    ],
)
def test_what_cannot_be_trusted_is_not_probed(op: Any, why: str) -> None:
    found = ask(op, x(8, 6))
    assert why in found.why and cuts(found) == set()


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.ops.aten.linear.default, (x(8, 3, 12), x(20, 12), x(20))),
        (torch.ops.aten.reshape.default, (x(8, 6), [48])),
        (torch.ops.aten.embedding.default, (x(50, 12), torch.randint(50, (8, 3)))),
    ],
)
def test_hidden_rules_are_found(target: Any, args: tuple[Any, ...]) -> None:
    """A few of those of ``make exact-probe``, judged as rules are."""
    node, operands = rule_judge.build(target, args, {})
    wanted = {c.kind for c in choices(node, TWO, 0)} | {len(choices(node, TWO, 0))}
    rule, localize = core.RULES[target], LOCALIZE.pop(target, None)
    forget()
    try:
        node, operands = rule_judge.build(target, args, {})
        found = probed(node).rule
        core.RULES[target] = lambda _: found
        offered = [c for c in choices(node, TWO, 0) if c.kind != "special"]
        verdict = rule_judge.judge(node, operands, rule_judge.MESHES[:1])
    finally:
        core.RULES[target] = rule
        LOCALIZE.pop(target, None)
        if localize:
            LOCALIZE[target] = localize
        forget()
    assert not verdict.wrong
    own = 2 if target is torch.ops.aten.embedding.default else 0  # specials, which no probe finds
    assert len(offered) >= max(w for w in wanted if isinstance(w, int)) - own


def forget() -> None:
    strategy._FOUND.clear()
    strategy._LENGTHS.clear()


def test_what_was_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's ops; a warm cache says what a cold one does, and one that is broken is as none."""
    monkeypatch.setenv("AUTOPAR_PROBE_CACHE", str(tmp_path))
    det = torch.ops.aten.linalg_det.default
    answers: list[Probed] = []
    for broken in (False, False, True):
        probe._KNOWN.clear()
        for file in tmp_path.iterdir() if broken else ():
            file.write_text("{")
        answers.append(ask(det, x(8, 4, 4)))
        assert len(list(tmp_path.iterdir())) == 1
    assert answers[0] == answers[1] == answers[2] and cuts(answers[0]) == {"x0d0"}
    probe._KNOWN.clear()
    ask(scale, x(4, 6), x(6))
    assert len(list(tmp_path.iterdir())) == 1  # of no installed package: its code may change


def test_a_kernel_that_breaks_the_process_breaks_a_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_apart, "PATIENCE", 0.5)
    assert probe_apart.apart(lambda: 5) == 5
    assert probe_apart.apart(os.abort) is None
    assert probe_apart.apart(lambda: time.sleep(60)) is None
    assert probe_apart.checks_sizes(scale) and probe_apart.checks_sizes(torch.ops.aten.relu.default)
    assert not probe_apart.checks_sizes(torch.ops.aten._fft_c2r.default)


# -- users' rules ------------------------------------------------------------------------------------------------------


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "USERS", {})


def test_a_users_rule_goes_first(users: None) -> None:
    @factors(torch.ops.aten.relu.default, scale)
    def rows(node: Any) -> Rule | None:
        n = len(rule_judge.operand_nodes(node))
        return Rule((dims("rows ."), dims("."))[:n], (dims("rows ."),)) if node.meta["val"].ndim == 2 else None

    for op, args in ((torch.ops.aten.relu.default, (x(4, 6),)), (scale, (x(4, 6), x(6)))):
        node, _ = rule_judge.build(op, args, {})
        assert [c.name for c in choices(node, TWO, 0) if c.kind == "factor"] == ["rows"]
    node, _ = rule_judge.build(torch.ops.aten.relu.default, (x(4, 6, 2),), {})  # None: as if it were not there
    assert [c.name for c in choices(node, TWO, 0) if c.kind == "factor"] == ["d0", "d1", "d2"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Rule((dims("a b"),), (dims("a b"),)), "names 1 operands, the op has 2"),
        (Rule((dims("a"), dims("b")), (dims("a b"),)), "names 1 dims of operand 0, which has 2"),
        (Rule((dims("a b"), dims("a")), (dims("a b"),)), "factor a is 6 long in dim 0 of operand 1 and 4 in dim 0"),
        (7, "returns a int instead of a Rule"),
        (ZeroDivisionError("oh"), "raises ZeroDivisionError: oh"),
    ],
)
def test_a_users_mistake_is_one_line(users: None, made: Any, said: str) -> None:
    @factors(scale)
    def mine(node: Any) -> Any:
        if isinstance(made, Exception):
            raise made
        return made

    node, _ = rule_judge.build(scale, (x(4, 6), x(6)), {})
    with pytest.raises(AutoparError, match=f"mine of probe_tests.scale.default: {said}"):
        strategy.rule(node)


def test_a_second_rule_and_what_is_no_op_are_refused(users: None) -> None:
    factors(scale)(lambda node: None)
    with pytest.raises(AutoparError, match="has the rule"):
        factors(scale)(lambda node: None)
    with pytest.raises(AutoparError, match="is no op"):
        factors(torch.relu)(lambda node: None)


def test_packages_bring_rules_along(users: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from importlib import metadata

    (tmp_path / "rules_of_a_package.py").write_text("raise ImportError('no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    point = metadata.EntryPoint("mine", "rules_of_a_package", "autopar.rules")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    core._load_entry_points.cache_clear()
    node, _ = rule_judge.build(scale, (x(4, 6), x(6)), {})
    try:
        with pytest.raises(AutoparError, match="entry point mine = rules_of_a_package of autopar.rules: ImportError"):
            strategy.rule(node)
        (tmp_path / "rules_of_a_package.py").write_text(
            "import autopar, torch\n"
            "@autopar.factors(torch.ops.probe_tests.scale)\n"
            "def rows(node): return autopar.Rule((autopar.dims('r .'), autopar.dims('.')), (autopar.dims('r .'),))\n"
        )
        found = strategy.rule(node)
        assert found is not None and found.factors() == ("r",)
    finally:
        core._load_entry_points.cache_clear()


# -- a whole model -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return clip(self.down(scale(self.up(x), self.weight))).square().sum()


def test_a_model_with_such_ops_is_exact_and_divided() -> None:
    from stacked_judge import StackedJudge

    from autopar.build import choose
    from autopar.cluster import Cluster
    from autopar.explain.doubts import doubts
    from autopar.pins import Pins, resolve

    judge = StackedJudge(Model().train(), (torch.randn(8, 8),), {})
    judge.pinned(dp=2, microbatches=2)
    for seed in range(3):
        judge.random(seed)
    plan = choose(judge.prepared(1), resolve(Pins.parse({"dp": 2}), 2, 8), Cluster.local(ranks=2))
    assert plan.predicted.probed == ("probe_tests.clip.default", "probe_tests.scale.default")
    assert plan.predicted.fallback == ()
    ours = [op for c in plan.classes for op in c.ops if op.op.startswith("probe_tests")]
    assert len(ours) == 2 and all(op.choices[0].startswith("factor:") for op in ours)
    assert ("probed, not proved", "probe_tests.clip.default") in doubts(plan).rows
