"""``autopar check --proof``: bounds found again from a saved search, and what was edited is found."""

import json
from dataclasses import replace

import numpy as np
import pytest

from autopar.check_figures import Checked
from autopar.cli import main
from autopar.plan import ModelId, Plan, Proof
from autopar.solver.file import Record, Saved, save
from autopar.solver.problem import Assignment, Class, Problem, Unit, Variable
from autopar.solver.proof import proof_of
from autopar.solver.search import Candidate, Quick


@pytest.fixture
def proved(tmp_path):
    """A plan with the proof of a search of two candidates, and that search, as files."""
    x = Variable("x", "op", ("fast", "lean"), np.array([[1.0, 0, 0, 0, 8, 0, 0], [2.0, 0, 0, 0, 4, 0, 0]]))
    problem = Problem("toy", (), (Class("c", (x,), (), ()),), (Unit(0, ()),), memory_limit=8.0)
    free = ((1.0, 0.0, 0.0, float("inf"), 1.0),)
    solved = Record(
        Candidate(((2, 1),), 1), "solved", 1.0, 1.0, problem=problem, multipliers=free,
        assignment=Assignment((), ((0,),)),
    )  # fmt: skip
    slow = Quick.of(seconds=[[("matmuls", 8e12, 4e12)]])
    search = Saved((solved, Record(Candidate(((2, 1),), 2), "roofline", 2.0, quick=slow)), memory_limit=8.0)
    save(tmp_path / "search.npz", search)
    plan = Plan(ModelId("sha256:0"), proof=Proof(**proof_of(search)))
    plan.save(tmp_path / "plan.json")
    return tmp_path


def _check(folder, capsys, *more):
    words = ["check", str(folder / "plan.json"), "--proof", "--problem", str(folder / "search.npz"), *more]
    return main(words), capsys.readouterr().out


def test_a_proof_that_holds(proved, capsys):
    code, out = _check(proved, capsys)
    assert code == 0 and "2 bounds, objective and gap: found again from" in out
    code, out = _check(proved, capsys, "--json")
    assert code == 0 and json.loads(out)["ok"] is True


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("bound",), 0.5, "bound 0.5 s in the plan, 1 s is the least of the file"),
        (("objective",), 1.5, "objective 1.5 s in the plan, 1 s in the file"),
        (("scope", "pruned", 1, "bound"), 3.0, "bound 3 s in the plan, 2 s in the file"),
        (("scope", "pruned", 1, "by"), "memory", "memory in the plan, roofline in the file"),
        (("scope", "pruned"), [], "in the file, not in the plan"),
    ],
)
def test_a_proof_that_was_edited(path, value, said, proved, capsys):
    data = json.loads((proved / "plan.json").read_text())
    at = data["proof"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    (proved / "plan.json").write_text(json.dumps(data))
    code, out = _check(proved, capsys)
    assert code == 1 and said in out and "DIFFERS" in out
    code, out = _check(proved, capsys, "--json")
    assert code == 1 and json.loads(out)["ok"] is False


def test_a_damaged_search(proved, capsys):
    file = proved / "search.npz"
    file.write_bytes(file.read_bytes()[:100])
    words = ["check", str(proved / "plan.json"), "--proof", "--problem", str(file)]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"autopar: problem file {file}: cannot be read")


def test_figures_are_compared_up_to_rounding():
    assert Checked("x", 1.0, 1.0 + 1e-9).ok and not Checked("x", 1.0, 1.001).ok
    assert Checked("x", None, None).ok and not Checked("x", None, 1.0).ok and not Checked("x", 1.0, None).ok
    assert str(Checked("x", 2.0, None)) == "x: 2, but that is unknown"
    assert replace(Checked("x", 2.0, None), expected=2.0).ok


def test_the_proof_of_a_solved_model(tmp_path, capsys):
    from autopar.capture import capture
    from autopar.choosing.solve import solved
    from autopar.cluster import Cluster
    from autopar.models import mlp

    model, args, kwargs = mlp.make()
    found = solved(capture(model, args, kwargs, check=False), Cluster.local(ranks=4))
    found.plan.save(tmp_path / "plan.json")
    save(tmp_path / "search.npz", found.search)
    code, out = _check(tmp_path, capsys)
    assert code == 0 and "8 bounds, objective and gap: found again" in out, out
