"""Programs written as Python: what they say, and that they train alike without the model, a capture or a plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

import autopar
from autopar.cluster import Cluster
from autopar.loading import ModelSpec
from autopar.runtime.pool import RankPool
from autopar.runtime.source import emptying
from autopar.runtime.source_text import function, merge

ATEN = torch.ops.aten
MODELS = Path(__file__).with_name("small_models.py")


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=240) as ranks:
        yield ranks


# -- graphs as text ----------------------------------------------------------------------------------------------------


def graph_of(start, sign):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 4, device="meta")
    cut = graph.call_function(ATEN.slice.Tensor, (x, 0, start, start + 4))
    first, second = (graph.call_function(op, (cut,)) for op in (ATEN.relu.default, sign))
    graph.output((graph.call_function(ATEN.add.Tensor, (first, second)),))
    return fx.GraphModule({}, graph)


def test_literals_of_ranks_are_looked_up_by_coordinates():
    ranks = [(dp, tp) for dp in range(2) for tp in range(2)]
    templates = [function("f", graph_of(4 * tp, ATEN.neg.default)) for _, tp in ranks]
    (merged,) = merge(templates, ranks, ("dp", "tp"))
    assert merged.ranks == (0, 1, 2, 3)
    assert dict(merged.names) == {"tp": 'coordinate("tp")', "START": "(0, 4)[tp]", "END": "(4, 8)[tp]"}
    assert "aten.slice.Tensor(x, 0, START, END)" in merged.text
    for tp in range(2):
        names = {"aten": ATEN, "START": 4 * tp, "END": 4 * tp + 4}
        exec(merged.text, names)
        x = torch.randn(8, 4)
        assert torch.equal(names["f"](x)[0], graph_of(4 * tp, ATEN.neg.default)(x)[0])


def test_other_ops_are_other_texts():
    templates = [function("f", graph_of(0, op)) for op in (ATEN.neg.default, ATEN.abs.default, ATEN.neg.default)]
    assert [m.ranks for m in merge(templates, [(0,), (1,), (2,)], ("tp",))] == [(0, 2), (1,)]


def test_a_call_holds_none_of_its_arguments():
    seen = []

    def look(x, y):
        del x
        seen.append(y._use_count())
        return y

    args = [torch.ones(1), torch.ones(1)]
    first = args[0]
    before = sys.getrefcount(first)
    emptying(look)(args)
    assert not args
    assert sys.getrefcount(first) == before - 1
    assert seen == [1]


# -- programs ----------------------------------------------------------------------------------------------------------


def train(step, parameters, args):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(step(*args).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def write(rank, target, pins, folder):
    """Write the program, then train with it: the losses, the first values and the inputs."""
    torch.manual_seed(0)
    loaded = ModelSpec(target).load()
    model, args = loaded.model.train(), loaded.args
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallel = autopar.compile(model, Cluster.local(2), args=args, pins=pins, loss=loaded.loss, seed=3)
    parallel.save_source(folder)
    return train(parallel.step, parallel.parameters(), args), values, args


def emit(target, pins, folder):
    """Write the programs of both ranks from here, where there are none."""
    torch.manual_seed(0)
    loaded = ModelSpec(target).load()
    parallel = autopar.compile(loaded.model.train(), Cluster.local(2), args=loaded.args, pins=pins, loss=loaded.loss)
    parallel.save_source(folder)


def read(rank, folder, values, args):
    """Train with what is written: the losses, the names, and what of autopar that took."""
    from autopar.load_program import load_program

    program = load_program(folder, seed=3)
    program.load_state_dict(values)
    losses = train(program.step, program.parameters(), args)
    return losses, list(program.state_dict()), [name for name in sys.modules if name.startswith(folder.name)]


@pytest.mark.parametrize(
    ("target", "pins"),
    [
        ("autopar.models.llama:make", {"dp": 2, "zero": 3, "microbatches": 3, "recompute": "selective"}),
        (f"{MODELS}:attention_dropout_causal_grouped", {"tp": 2}),
        ("autopar.models.llama:make", {"pp": 2, "microbatches": 3}),
        (f"{MODELS.with_name('pipeline_models.py')}:tied", {"pp": 2, "microbatches": 2, "schedule": "zero_bubble"}),
    ],
)
def test_a_written_program_trains_alike(pool, tmp_path, target, pins):
    losses, values, args = pool.run(write, target, pins, tmp_path)[0]
    for found, names, _ in pool.run(read, tmp_path, values, args):
        assert found == losses
        assert names == list(values) if "tied" not in target else set(names) == set(values)
    assert (tmp_path / "plan.json").is_file()
    emit(target, pins, tmp_path / "emitted")
    for path in [p for p in tmp_path.rglob("*.py") if "emitted" not in p.parts]:
        assert (tmp_path / "emitted" / path.relative_to(tmp_path)).read_text() == path.read_text()
    assert set(torch.load(tmp_path / "emitted" / "tensors.pt")) == set(torch.load(tmp_path / "tensors.pt"))
    lint = ["ruff", "check", "--isolated", "--line-length", "160", "--select", "E,F,W,B", tmp_path]
    made = subprocess.run([sys.executable, "-m", *lint], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout


def test_what_one_process_cannot_write(tmp_path):
    def planned(cluster, device="cpu", **pins):
        with torch.device(device):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
            x = torch.randn(8, 4)
        return autopar.compile(model, cluster, args=(x,), pins=pins, loss=torch.mean)

    with pytest.raises(autopar.AutoparError, match=r"save_source: 1.running_mean has no value"):
        planned(Cluster.local(2), "meta", dp=2).save_source(tmp_path / "b")
    if torch.version.cuda is None:
        with pytest.raises(autopar.AutoparError, match=r"save_source: the ranks compute on cuda"):
            planned(Cluster.load("h100-dgx"), dp=8).save_source(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_reading_takes_no_planner():
    code = (
        "import sys, autopar.load_program\n"
        "planner = ('ortools', 'autopar.solver', 'autopar.choosing', 'autopar.capture', 'autopar.plan')\n"
        "sys.exit(any(m == p or m.startswith(p + '.') for m in sys.modules for p in planner))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_folder_without_a_program(tmp_path):
    with pytest.raises(autopar.AutoparError, match=r"has no program.py. Give a folder that Program.save wrote"):
        autopar.load_program(tmp_path)
