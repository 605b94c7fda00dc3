"""Where a pipeline is cut, and what its plan predicts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import predict_stages
from autopar.build import prepare
from autopar.capture import capture
from autopar.check_figures import check_figures
from autopar.choosing.stages import Work, balanced
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.models import mlp
from autopar.plan import Plan, loads
from autopar.predict import predict
from autopar.predict_memory import predict_rank


class Chain(nn.Module):
    """An embedding, residual layers, and a head over a vocabulary."""

    def __init__(self, layers: int = 6, width: int = 16, vocabulary: int = 32, wide: int = 1) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 32 * wide)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.emb(ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


IDS = torch.zeros(8, 4, dtype=torch.int64)


def planned(model: nn.Module, pins: str, ranks: int = 2, cluster: Cluster | None = None) -> Plan:
    return autopar.compile(model, cluster or Cluster.local(ranks), args=(IDS, IDS), pins=pins).plan


@cache
def chain(pins: str, ranks: int = 2) -> Plan:
    return planned(Chain(), pins, ranks)


def begins(plan: Plan) -> list[str]:
    """The first unit of every stage but the first."""
    return [plan.units[stage.first].fqn for stage in plan.stages[1:]]


# -- where to cut ----------------------------------------------------------------------------------------------------


def test_the_largest_stage_is_as_small_as_any_cut_makes_it():
    random = np.random.default_rng(0)
    for _ in range(60):
        n = int(random.integers(3, 9))
        work = Work(random.integers(0, 5, n).astype(float), np.zeros(n - 1), random.integers(1, 4, n - 1))
        work = replace(work, send=random.integers(0, 3, n - 1).astype(float))
        legal = sorted(random.choice(np.arange(1, n), int(random.integers(1, n)), replace=False).tolist())
        stages = int(random.integers(2, len(legal) + 2))

        def of(at: tuple[int, ...], work: Work = work, n: int = n) -> tuple[float, int, float]:
            edges, send = [0, *at, n], [0.0, *work.send, 0.0]
            costs = [work.seconds[a:b].sum() + send[a] + send[b] for a, b in itertools.pairwise(edges)]
            return max(costs), int(sum(work.nbytes[p - 1] for p in at)), sum(c * c for c in costs)

        best = min(map(of, itertools.combinations(legal, stages - 1)))
        assert of(tuple(balanced(work, legal, stages))) == pytest.approx(best)


def test_cuts_that_are_not_allowed_are_not_made():
    work = Work(np.ones(6), np.zeros(5), np.ones(5, np.int64))
    assert balanced(work, [1, 2, 3, 4, 5], 2) == [3]
    narrow = [np.ones((7, 7), bool), np.tri(7, 7, -2, bool).T]
    narrow[0][0, 2:] = False  # the first stage has room for one op
    assert balanced(work, [1, 2, 3, 4, 5], 2, lambda stage: narrow[stage]) == [1]
    assert balanced(replace(work, reads=np.array([1, 1, 0, 0, 0, 0], bool)), [1, 2, 3, 4, 5], 2) == [1]
    narrow[1][:] = False
    assert balanced(work, [1, 2, 3, 4, 5], 2, lambda stage: narrow[stage]) == []


def test_layers_that_cost_the_same_are_shared_out():
    for stages in (2, 4):
        plan = planned(Chain(7, vocabulary=4), f"pp={stages} microbatches=1", stages)
        counts = [sum("layers" in plan.units[u].fqn for u in range(s.first, s.last)) for s in plan.stages]
        assert plan.pp == stages and sum(counts) == 7 and max(counts) - min(counts) <= 2, counts


def test_a_head_that_costs_more_than_all_layers_is_a_stage():
    assert begins(planned(Chain(wide=64), "pp=2 microbatches=1")) == ["head"]


def test_a_model_of_one_unit_is_cut_inside_of_it():
    model, args, kwargs = mlp.make()
    whole = autopar.compile(model, Cluster.local(1), args=args, kwargs=kwargs, pins="microbatches=2").plan
    plan = autopar.compile(model, Cluster.local(2), args=args, kwargs=kwargs, pins="pp=2 microbatches=2").plan
    assert (len(whole.units), len(plan.units)) == (1, 2) and begins(plan) == ["layers.1"]
    assert sum(len(plan.classes[u.kind].ops) for u in plan.units) == len(whole.classes[0].ops)
    with pytest.raises(AutoparError, match=r"pins: 3 stages are more than the model has pieces with parameters"):
        autopar.compile(model, Cluster.local(3), args=args, kwargs=kwargs, pins="pp=3 microbatches=1")


def test_pinned_modules_begin_stages():
    plan = chain("pp=3 cut=layers.1,head microbatches=1", 3)
    assert begins(plan) == ["layers.1", "head"] and plan.pins["cut"] == "layers.1,head"
    assert begins(chain("pp=2 vp=2 cut=layers.1,layers.2,layers.3 microbatches=2")) == [
        f"layers.{i}" for i in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ("layer.1", "pin cut: no op of the model is in a module 'layer.1', did you mean 'layers.1'?"),
        ("nothing", "pin cut: no op of the model is in a module 'nothing'. There are emb, layers, layers.0,"),
        ("emb", "pin cut: emb does not come after the beginning of the model."),
    ],
)
def test_pinned_modules_that_are_no_cut(cut, message):
    with pytest.raises(AutoparError) as error:
        planned(Chain(), f"pp=2 cut={cut}")
    assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(AutoparError, match=r"pin cut: layers.1 does not come after head"):
        planned(Chain(), "pp=3 cut=head,layers.1", 3)


def test_stages_of_ranks_that_straddle_nodes_are_refused():
    cluster = replace(Cluster.local(2), nodes=3)
    with pytest.raises(AutoparError, match=r"a stage of 3 ranks would straddle nodes of 2"):
        planned(Chain(), "pp=2", cluster=cluster)


# -- microbatches ----------------------------------------------------------------------------------------------------


def test_the_number_of_microbatches_is_the_one_with_the_shortest_step():
    cluster = Cluster.load("h100-dgx")
    cluster = replace(cluster, ranks_per_node=2)
    found = {m: planned(Chain(), f"pp=2 microbatches={m}", cluster=cluster).predicted.step_time_s for m in (1, 2)}
    chosen = planned(Chain(), "pp=2", cluster=cluster)
    assert chosen.microbatches == min(found, key=lambda m: found[m] or 0.0)
    assert chosen.pins == {"pp": "2"}


def test_what_needs_the_whole_batch_has_one_microbatch():
    class Normed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.head(self.layers[1](self.norm(self.layers[0](self.emb(ids))))).square().sum()

    assert planned(Normed(), "pp=2").microbatches == 1
    with pytest.raises(AutoparError, match="needs the whole batch at once"):
        planned(Normed(), "pp=2 microbatches=2")


# -- what is predicted -----------------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_to_it():
    plan = chain("pp=2 microbatches=4")
    assert [str(c) for c in check_figures(plan) if not c.ok] == []
    assert any("bubble" in c.what for c in check_figures(plan))
    parts = plan.predicted.parts
    assert parts["bubble_s"] > 0 and plan.fits and loads(plan.dumps()) == plan
    assert parts["model_flops"] == chain("pp=2 microbatches=1").predicted.parts["model_flops"]


def test_messages_are_those_of_the_program():
    """Each of 4 microbatches of 2 rows sends [2, 4, 16] floats one way and their gradient back."""
    plan = chain("pp=2 microbatches=4")
    nbytes = 2 * 4 * 16 * 4
    assert [(s.sent, s.returned) for s in plan.predicted.stages] == [(nbytes, nbytes), (0, 0)]
    rows = {(c.kind, c.phase): (c.count, c.bytes) for c in plan.predicted.collectives if c.axis == "pp"}
    there, back = (("send", "forward"), ("receive", "backward")), (("receive", "forward"), ("send", "backward"))
    assert rows in (dict.fromkeys(there, (4, 4 * nbytes)), dict.fromkeys(back, (4, 4 * nbytes)))


def test_microbatches_in_flight_take_memory():
    """GPipe keeps all, 1F1B as many as stages are to come."""
    gpipe, alternating = chain("pp=2 microbatches=8 schedule=gpipe"), chain("pp=2 microbatches=8 schedule=1f1b")
    assert [s.in_flight for s in gpipe.predicted.stages] == [8, 8]
    assert [s.in_flight for s in alternating.predicted.stages] == [2, 1]
    for more, less in zip(gpipe.predicted.stages, alternating.predicted.stages, strict=True):
        assert more.peak_bytes > less.peak_bytes
    worst = max(s.peak_bytes for s in gpipe.predicted.stages)
    assert gpipe.predicted.peak_mem_gib == pytest.approx(worst / 2**30)


@pytest.mark.parametrize("pins", ["pp=2 dp=2 zero=2", "pp=2 dp=2 schedule=zero_bubble", "pp=2 vp=2 dp=2"])
def test_few_microbatches_have_the_peak_of_all(pins, monkeypatch):
    ids = torch.zeros(48, 4, dtype=torch.int64)

    def predicted():
        plan = autopar.compile(Chain(), Cluster.local(4), args=(ids, ids), pins=f"{pins} microbatches=24").plan
        return plan.predicted

    few = predicted()
    monkeypatch.setattr(predict_stages, "enough", lambda name, ranks, virtual, microbatches: microbatches)
    every = predicted()
    assert (few.step_time_s, few.peak_mem_gib, few.peak_at) == (every.step_time_s, every.peak_mem_gib, every.peak_at)
    for one, other in zip(few.stages, every.stages, strict=True):
        assert 0 <= other.peak_bytes - one.peak_bytes <= 24 * 4  # the losses
        assert {**one.owners, "values": 0} == {**other.owners, "values": 0}


def test_every_schedule_is_predicted(tmp_path):
    assert {letter for rank in chain("pp=2 microbatches=4 schedule=zero_bubble").orders() for letter, *_ in rank} == {
        *"FIW"
    }
    wide = chain("pp=2 vp=2 microbatches=4")
    assert (len(wide.stages), wide.schedule.name) == (4, "interleaved")
    first, _, third, _ = wide.predicted.stages
    assert first.peak_bytes == third.peak_bytes  # of one rank
    file = tmp_path / "order.json"
    file.write_text(json.dumps([[f"{a}0.{m}" for a in "FB" for m in range(4)]] * 2))
    own, gpipe = planned(Chain(), f"pp=2 schedule={file}"), chain("pp=2 microbatches=4 schedule=gpipe")
    assert (own.schedule.name, own.microbatches) == ("custom", 4)
    assert own.predicted.stages == gpipe.predicted.stages
    assert own.predicted.step_time_s == gpipe.predicted.step_time_s


def test_what_is_gathered_once_a_step_is_not_waited_for_each_time():
    """Of 8 parameters one is gathered at its use: the others' seconds count once a step, not once a microbatch."""
    captured, cluster = capture(Chain().train(), (IDS, IDS)), Cluster.local(4)
    every = planned(Chain(), "pp=2 dp=2 microbatches=4 zero=3", 4)
    prepared = prepare(captured, 4)

    def hidden(gathered: tuple[str, ...]) -> float:
        parameters = {
            name: p if name in gathered else replace(p, gather="step", reduce="step")
            for name, p in every.parameters.items()
        }
        return predict(replace(every, parameters=parameters), prepared, cluster).predicted.parts["hidden_s"]

    names = tuple(every.parameters)
    assert all(p.gather == "use" for p in every.parameters.values())
    none, one, all_ = hidden(()), hidden(names[1:2]), hidden(names)
    assert none < one < none + (all_ - none) / 3


def test_of_many_ranks_those_that_need_most_are_replayed(monkeypatch):
    looked = []
    every = planned(Chain(), "pp=4 dp=1 microbatches=4", 4)
    monkeypatch.setattr(predict_stages, "FEW", 1)
    monkeypatch.setattr(predict_stages, "predict_rank", lambda *a: looked.append(a[4]) or predict_rank(*a))
    few = planned(Chain(), "pp=4 dp=1 microbatches=4", 4)
    assert len(looked) < 4
    assert few.predicted.peak_mem_gib == every.predicted.peak_mem_gib
    assert all(s.peak_bytes <= few.predicted.peak_mem_gib * 2**30 for s in few.predicted.stages)


def test_tied_weights_count_on_every_stage_that_reads_them():
    class Tied(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.emb.weight

    plan = planned(Tied(), "pp=2 microbatches=2")
    both = sum(s.parameters for s in plan.predicted.stages)
    assert both == sum(p.numel() for p in Tied().parameters()) + 32 * 16


# -- memory ----------------------------------------------------------------------------------------------------------


def _with(nbytes: float) -> Cluster:
    return Cluster.local(2).with_memory(int(nbytes))


def test_cuts_move_where_a_stage_does_not_fit():
    """A table of 2 MiB with its gradient and states has no seconds, but leaves no room for layers beside it."""
    model = Chain(layers=8, width=128, vocabulary=4096)
    free = planned(model, "pp=2 dp=1 microbatches=2")
    first, second = (s.peak_bytes for s in free.predicted.stages)
    assert first > second
    tight = planned(model, "pp=2 dp=1 microbatches=2", cluster=_with(0.97 * first))
    assert tight.fits and tight.stages[0].last < free.stages[0].last
    assert max(s.peak_bytes for s in tight.predicted.stages) <= 0.97 * first


def test_nothing_fits_names_the_stage():
    with pytest.raises(NothingFits, match=r"no plan fits: pp=2 .* needs .* \(rank 0 of the pipeline") as error:
        planned(Chain(layers=2, width=8, vocabulary=65536), "pp=2 dp=1 microbatches=1", cluster=_with(2**22))
    plan: Any = error.value.plan
    assert plan.pp == 2 and plan.fits is False
