"""Statistics, losses and normalisers of the whole batch (``batch_models.py``): those of one process for every plan, and
for every number of microbatches that is legal; else refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stacked_judge import StackedJudge
from torch import Tensor, nn

from autopar.capture import capture
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.errors import AutoparError
from autopar.passes.complete_layouts import complete_layouts
from autopar.passes.facts import fact
from autopar.passes.layout import Axis, Mesh
from autopar.passes.lower import Lowerable
from autopar.passes.split_prologue import copy_graph
from autopar.pins import Pins

MODELS = Path(__file__).with_name("batch_models.py")
FACTORIES = re.findall(r"^@(batch|whole)\ndef (\w+)", MODELS.read_text(), re.MULTILINE)
PLANS: list[dict[str, int]] = [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "zero": 3}, {"dp": 4, "zero": 1}]
IN_MICROBATCHES: list[dict[str, int]] = [
    {"dp": 2, "microbatches": 2},
    {"tp": 2, "microbatches": 3},
    {"dp": 2, "zero": 3, "microbatches": 3},
]

Judges = Callable[[str], Any]


@pytest.mark.parametrize(("kind", "name"), FACTORIES, ids=[name for _, name in FACTORIES])
def test_equal_to_one_process(kind: str, name: str, judge_of: Judges) -> None:
    judge, index = judge_of(f"{MODELS}:{name}"), [n for _, n in FACTORIES].index(name)
    judge.spec()
    for plan in (PLANS[index % 5], PLANS[(index + 2) % 5]):
        judge.pinned(**plan)
    judge.random(index)
    plan = IN_MICROBATCHES[index % 3]
    if kind == "batch":
        judge.pinned(**plan)
        return
    with pytest.raises(AutoparError, match=rf"{MODELS.name}:\d+.*needs the whole batch at once.*Set microbatches=1\."):
        judge.pinned(**plan)


def test_no_valid_token_is_nan_as_in_eager(judge_of: Judges) -> None:
    for name in ("no_valid_token", "nothing_in_the_mask", "classes_without_weight"):
        assert judge_of(f"{MODELS}:{name}").reference.loss.isnan()
    assert judge_of(f"{MODELS}:valid_token_in_one_row_only").reference.loss.isfinite()


@pytest.mark.parametrize(
    "plan", [{"dp": 4}, {"dp": 4, "microbatches": 3}, {"dp": 2, "tp": 2, "microbatches": 6}], ids=str
)
def test_ranks_and_microbatches_without_a_valid_token(plan: dict[str, int], judge_of: Judges) -> None:
    for name in ("valid_token_in_one_row_only", "no_valid_token", "classes_without_weight", "mean_over_a_mask"):
        judge_of(f"{MODELS}:{name}").pinned(**plan)


@pytest.mark.parametrize("name", [n for _, n in FACTORIES if n.startswith("batch_norm")])
def test_two_axes_cut_what_batch_norm_takes_statistics_of(name: str, judge_of: Judges) -> None:
    judge = judge_of(f"{MODELS}:{name}")
    prepared, captured = judge.prepared(1), judge.captured
    inputs = frozenset(i.name for i in captured.inputs if i.batch)
    gm, _ = complete_layouts(
        copy_graph(prepared.body),
        Mesh((Axis("a", 2), Axis("b", 3))),
        parameters=frozenset(captured.parameters),
        batch_inputs=inputs,
        batch=captured.batch,
        divided=(),
    )
    norms = [n for n in gm.graph.nodes if n.target is torch.ops.autopar.batch_norm.default]
    assert norms and all(c.kind == "special" for n in norms for c in fact(n).strategy.choices)
    used = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    held = (
        tuple(n for n in known if n in used) for known in (captured.parameters, captured.buffers, captured.constants)
    )
    judge.assert_equal(Lowerable(gm, Mesh((Axis("a", 2), Axis("b", 3))), *held, tuple(sorted(inputs))), name)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        scores = F.log_softmax(self.fc(x), -1).transpose(0, 1)
        return F.ctc_loss(scores, y, torch.full_like(lengths, x.shape[1]), lengths)


def test_ctc_is_captured_whatever_its_labels_are() -> None:
    args = (torch.randn(4, 5, 6), torch.randint(1, 8, (4, 2)), torch.tensor([2, 1, 2, 1]))
    assert capture(Speech(), args, {}).checked == "equal"


def test_counters_of_batch_norm_count_a_step_once(judge_of: Judges) -> None:
    buffers = judge_of(f"{MODELS}:batch_norm_1d_of_sequences_cumulative").reference.buffers
    assert buffers["norm.num_batches_tracked"] == 1


class Patched(nn.Module):
    """Token ids ``[batch, 5]``, and ``[batch * 4, 6]`` patches of the images before them, all in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.word, self.out = nn.Linear(6, 8), nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, patches: Tensor, ids: Tensor) -> Tensor:
        x = self.embed(patches).tanh().view(len(ids), 4, 8)
        h = torch.cat([x, self.word(ids)], 1)
        h = h + nn.functional.scaled_dot_product_attention(h, h, h)
        return nn.functional.cross_entropy(self.out(h)[:, 4:].flatten(0, 1), ids.flatten())


def patched(rows: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(11, (rows, 5)), "patches": torch.randn(rows * 4, 6)}


def test_a_list_of_places_of_the_rows_is_cut_as_they_are() -> None:
    model = Patched()
    of = StackedJudge(model, (), patched(8))
    assert [(i.name, i.batch, i.each) for i in of.captured.inputs] == [("ids", True, 1), ("patches", True, 4)]
    of.eager()
    for pins in ({"dp": 4}, {"dp": 2, "microbatches": 2}):
        of.pinned(**pins)
    made = plan_training(of.captured, Pins(dp=2), Cluster.local(ranks=2), {})
    assert [share.flops for share in divided(made.plan, made.prepared).values()] == [0.5]
    StackedJudge(model, (), patched(5)).along(made.plan)
    with pytest.raises(AutoparError, match="8 rows of the batch, 4 places each"):
        of.captured.flatten_inputs((), {**patched(8), "patches": torch.randn(24, 6)})


def test_one_row_may_take_a_way_of_its_own() -> None:
    class Packed(Patched):
        def forward(self, patches: Tensor, ids: Tensor) -> Tensor:
            return super().forward(patches if len(ids) > 1 else patches.roll(1, 0), ids)

    model = Packed()
    of = StackedJudge(model, (), patched(1))
    of.eager()
    of.pinned(tp=2)
    with pytest.raises(AutoparError, match="dp=2 does not divide the batch of 1 row"):
        of.pinned(dp=2)
