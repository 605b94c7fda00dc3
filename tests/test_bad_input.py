"""Every kind of bad input ends in one clear line and exit code 2, never in a traceback."""

import json
import re
import sys

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.pins import Pins, resolve
from autopar.plan import (
    Alternative,
    ClusterId,
    Collective,
    Extra,
    ModelId,
    Op,
    Parameter,
    Plan,
    PlanAxis,
    PlanClass,
    Predicted,
    Proof,
    Stage,
    Unit,
    from_json,
)

MLP = "autopar.models.mlp:make"
MODELS = {
    "good.py": """
        import torch
        def make(layers=2, *, width=4):
            return torch.nn.Linear(width, 1), (torch.ones(2, width),), {}
        def _private(): ...
        size = 3
        """,
    "syntax.py": "def make(:\n",
    "broken.py": """
        import torch
        raise RuntimeError("no data here")
        """,
    "imports.py": "import a_module_that_nobody_has\ndef make(): ...\n",
    "raises.py": """
        import torch
        def make(width=4):
            layer = torch.nn.Linear(width, 1)
            return layer.weight.view(3, 3), (), {}
        def exits():
            raise SystemExit(3)
        def needs(width):
            return None
        """,
    "returns.py": """
        import torch
        layer = torch.nn.Linear(2, 1)
        def model(): return layer
        def two(): return layer, (torch.ones(1, 2),)
        def none(): return None
        def args(): return layer, torch.ones(1, 2), {}
        def kwargs(): return layer, (), None
        def other(): return "layer", (), {}
        """,
    "empty.py": "x = 1\n",
    "refused.py": """
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self, between, width=4):
                super().__init__()
                self.fc, self.between = nn.Linear(width, width), between
            def forward(self, x):
                return self.between(self.fc(x)).pow(2).mean()

        def make(between=None, width=4):
            return Net(between or nn.Identity(), width), (torch.ones(6, width),), {}
        def poisson(): return make(lambda x: torch.poisson(x.abs()))
        def norm(): return make(nn.BatchNorm1d(4))
        def hook():
            made = make()
            made[0].fc.register_full_backward_hook(print)
            return made
        def wrapped(): return nn.DataParallel(make()[0]), (torch.ones(6, 4),), {}
        def frozen():
            made = make()
            made[0].requires_grad_(False)
            return made
        def shape(): return make(lambda x: x @ torch.ones(7, 7))
        def no_loss(): return nn.Linear(4, 4), (torch.ones(6, 4),), {}
        def no_tensor(): return make()[0], (3,), {}
        def keyword(): return make()[0], (torch.ones(6, 4),), {"y": 2}
        def nothing(*outputs): return None
        """,
}


WIRE = {"all_reduce": (1e-5, 1e-11), "all_gather": (1e-5, 1e-11), "reduce_scatter": (1e-5, 1e-11)}
WIRE |= {"all_to_all": (1e-5, 1e-11), "copy": (0.0, 1e-12)}
WHOLE = Plan(  # something in every field that is edited below
    ModelId("sha256:0"),
    ClusterId(ranks_per_node=2),
    axes=(PlanAxis("a0", 2, "host", 1, ("tp",), WIRE),),
    mesh={"tp": 2},
    units=(Unit("h.0", 0), Unit("h.1", 0)),
    classes=(PlanClass("h.0", (Op(0, "aten.linear.default", "h.0.fc", ("factor:o",), (0,)),), (Extra(0, "S0"),)),),
    stages=(Stage(0, 2),),
    batch=8,
    parameters={"h.0.fc.weight": Parameter((4, 4), "S0", "S0")},
    predicted=Predicted(1.0, 2.0, {"saved_bytes": 2.0**31}, (Collective("all_reduce", "a0", 2, 64),)),
    proof=Proof(1.0, 0.99, 0.01, {"axes": "at most 2", "pruned": []}),
    alternatives=(Alternative("next", "tp=1", {"tp": "1"}, 1.5, 3.0),),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    import textwrap

    for name, text in MODELS.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    plan = json.loads(Plan(ModelId("sha256:0")).dumps())
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "whole.json").write_text(WHOLE.dumps())
    (tmp_path / "half.json").write_text(WHOLE.dumps()[:700])
    (tmp_path / "twice.json").write_text('{"schema": 1, "schema": 1}')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "problem.npz").write_text("no zip")
    (tmp_path / "newer.json").write_text(json.dumps(plan | {"schema": 99}))
    (tmp_path / "typo.json").write_text(json.dumps(plan | {"microbatch": 2}))
    (tmp_path / "value.json").write_text(json.dumps(plan | {"microbatches": "two"}))
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "pins.json").write_text('[{"tp": 2}, {"tpp": 2}]')
    (tmp_path / "pin.json").write_text('[{"tp": 2}]')
    (tmp_path / "entry.json").write_text('[{"model": "good.py:make", "pin": {"tp": 2}}]')
    (tmp_path / "type.json").write_text('[{"model": "good.py:make", "ranks": "2"}]')
    (tmp_path / "cluster.json").write_text('{"name": "x"}')
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("autopar_model_")]:
        del sys.modules[name]


def _refused(words, capsys):
    """The one line that a command is refused with."""
    code = main(words)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err, captured.err
    assert code == 2 and captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("autopar: ") and line.endswith("."), line
    return line


COMMANDS = {
    "no command": ("", "required: COMMAND"),
    "an unknown command": ("verfy", "invalid choice: 'verfy'"),
    "an unknown flag": (f"verify {MLP} --ranks 2 --rank 2", "unrecognized arguments: --rank 2"),
    "two pins in one flag": (f"verify {MLP} --ranks 2 --pin tp=2 dp=1", "unrecognized arguments: dp=1 (one --pin"),
    "no ranks": (f"verify {MLP}", "verify: --ranks is required"),
    "ranks that are no number": (f"verify {MLP} --ranks two", "invalid int value: 'two'"),
    "no model": ("verify --ranks 2", "verify: MODEL is required"),
    "no ranks at all": (f"verify {MLP} --ranks 0", "ranks: 0 is not a number of ranks"),
    "negative ranks": (f"verify {MLP} --ranks -2", "ranks: -2 is not a number of ranks"),
    "a batch of nothing": (f"verify {MLP} --ranks 2 --batch 0", "global_batch: is 0"),
    # pins
    "a misspelt pin": (f"verify {MLP} --ranks 2 --pin zreo=3", "unknown key 'zreo', did you mean 'zero'?"),
    "a pin without value": (f"verify {MLP} --ranks 2 --pin tp", "pin 'tp': is not KEY=VALUE"),
    "a pin that is no number": (f"verify {MLP} --ranks 2 --pin tp=two", "Legal: an integer of at least 1"),
    "a zero stage there is not": (f"verify {MLP} --ranks 2 --pin zero=4", "Legal: 0, 1, 2, 3"),
    "a pin given twice": (f"verify {MLP} --ranks 2 --pin tp=2 --pin tp=1", "'tp' is pinned twice"),
    "a schedule there is not": (
        f"verify {MLP} --ranks 2 --pin schedule=x",
        "Legal: gpipe, 1f1b, interleaved, zero_bubble",
    ),
    "a gap that is no share": (f"plan {MLP} --ranks 2 --gap 5", "gap: 5.0 is no share of the step time. Legal: 0 to 1"),
    "a time limit before now": (f"explain {MLP} --ranks 2 --time-limit -3", "time limit: -3.0 is no number of seconds"),
    "experts of a model without": (f"verify {MLP} --ranks 2 --pin ep=2", "pin ep=2: no parameter of this model holds"),
    "a problem of a plan with stages": (
        f"plan {MLP} --ranks 2 --pin pp=2 --pin schedule=gpipe --problem p.npz",
        "--problem p.npz: nothing is proved where cuts, order or axes of stages are pinned. Leave it out.",
    ),
    "a sequence over no axis": (f"verify {MLP} --ranks 2 --pin sp=true", "pin sp=true: needs tensor ranks"),
    "more ranks along the sequence than there are": (
        f"verify {MLP} --ranks 2 --pin tp=2 --pin sp=2",
        "pins: cp=2 tp=2 does not divide 2 ranks. Legal: cp=2 tp=1.",
    ),
    "a sequence that does not divide": (
        "verify autopar.models.gpt2:make --ranks 5 --pin sp=5",
        "pins: cp=5 divides no matmul, attention or convolution of this model along its sequence of 16. Legal: cp=2",
    ),
    "a degree that does not fit": (
        f"verify {MLP} --ranks 4 --pin tp=3",
        "tp=3 does not divide 4 ranks. Legal: tp=1, tp=2",
    ),
    "degrees that leave ranks over": (f"verify {MLP} --ranks 4 --pin dp=2", "makes 2 ranks, there are 4"),
    "a batch that dp does not divide": (
        f"verify {MLP} --ranks 4 --batch 6 --pin dp=4",
        "dp=4 does not divide the batch of 6 rows",
    ),
    "too many microbatches": (
        f"verify {MLP} --ranks 2 --batch 4 --pin microbatches=3 --pin dp=2",
        "needs a batch of at least 6 rows, it has 4. Legal: microbatches=1 to 2",
    ),
    # models
    "a model without factory": (
        "verify good.py --ranks 2",
        "MODEL 'good.py': names no function. Write path/to/file.py:factory",
    ),
    "a setting without value": ("verify good.py:make --ranks 2 --set layers", "--set 'layers': is not KEY=VALUE"),
    "a setting given twice": ("verify good.py:make --ranks 2 --set a=1 --set a=2", "'a' is set twice"),
    "a loss without function": ("verify good.py:make --ranks 2 --loss good.py", "--loss 'good.py': names no function"),
    "no such file": ("plan nowhere.py:make", "nowhere.py:make: no such file: nowhere.py"),
    "no such module": ("plan nowhere.models:make", "nowhere.models:make: no module 'nowhere'"),
    "no such submodule": ("plan autopar.nowhere:make", "no module 'autopar.nowhere'"),
    "neither file nor module": ("plan good.txt/x:make", "is neither a file ending in .py nor a module"),
    "a misspelt factory": ("plan good.py:mkae", "good.py has no 'mkae', did you mean 'make'? Functions there: make."),
    "a file without functions": ("plan empty.py:make", "empty.py has no 'make'. It has no functions."),
    "a factory that is no function": ("plan good.py:size", "'size' is a int, not a function. Legal: make."),
    "an unexpected option": (
        "plan good.py:make --set layer=2",
        "has no option 'layer', did you mean 'layers'? Legal: layers, width.",
    ),
    "a missing option": ("plan raises.py:needs", "needs the option 'width'. Pass --set width=VALUE."),
    "a file with a syntax error": ("plan syntax.py:make", r"importing it raised SyntaxError: .* \(.*syntax.py:1\)"),
    "a file that raises": ("plan broken.py:make", r"RuntimeError: no data here \(.*broken.py:3\)"),
    "a file whose import is missing": (
        "plan imports.py:make",
        r"No module named 'a_module_that_nobody_has' \(.*imports.py:1\)",
    ),
    "a factory that raises": (
        "plan raises.py:make",
        r"the factory raised RuntimeError: .*invalid for input.*\(.*raises.py:5\)",
    ),
    "a factory that exits": ("plan raises.py:exits", r"the factory raised SystemExit: 3 \(.*raises.py:7\)"),
    "a factory that returns a model": (
        "plan returns.py:model",
        "returned a Linear. Return three: (model, args, kwargs).",
    ),
    "a factory that returns two": ("plan returns.py:two", "the factory returned 2 values"),
    "a factory that returns nothing": ("plan returns.py:none", "the factory returned a NoneType"),
    "args that are a tensor": ("plan returns.py:args", "the factory's args are a Tensor. Return a tuple: (x,)."),
    "kwargs that are none": ("plan returns.py:kwargs", "kwargs are no dict"),
    "a model that is no module": ("plan returns.py:other", "first value is a str, not an nn.Module"),
    "a misspelt loss": ("plan good.py:make --loss good.py:lsos", "--loss good.py:lsos: good.py has no 'lsos'"),
    "an unknown random op": ("plan refused.py:poisson", r"refused.py:10: aten.poisson.default draws random numbers"),
    "a backward hook": ("plan refused.py:hook", "fc: has a backward hook"),
    "a model that is wrapped": ("plan refused.py:wrapped", "is wrapped by DataParallel"),
    "a model without gradient": ("plan refused.py:frozen", "depends on no parameter that requires a gradient"),
    "a model that raises": ("plan refused.py:shape", r"refused.py:25\): cannot be captured at batch size"),
    "a model without loss": ("plan refused.py:no_loss", "returns no loss"),
    "a loss that is none": ("plan refused.py:no_loss --loss refused.py:nothing", "returns no loss"),
    "inputs without tensor": ("plan refused.py:no_tensor", "inputs: hold no tensor"),
    "an input that forward does not take": ("plan refused.py:keyword", "got an unexpected keyword argument 'y'"),
    "rows that dp does not divide": (
        "plan refused.py:make --ranks 4 --pin dp=4",
        "dp=4 does not divide the batch of 6 rows",
    ),
    "tp that divides nothing": (
        "plan refused.py:make --set width=5 --ranks 4 --pin tp=4",
        r"tp=4 divides no matmul, .* of this model \(fc \(linear.* \(legal: tp=2, tp=3, tp=5\)",
    ),
    "batch statistics in microbatches": (
        "plan refused.py:norm --ranks 1 --global-batch 6 --pin microbatches=2",
        "needs the whole batch at once, so it cannot run in microbatches",
    ),
    # clusters
    "a misspelt cluster": (
        "plan good.py:make --cluster h100-dxg",
        "unknown, did you mean 'h100-dgx'? Legal: a100-40gb, a100-dgx, h100-dgx, h100-grandteton, h200-dgx, local",
    ),
    "no such cluster file": ("plan good.py:make --cluster x.json", "cluster: no such file: x.json"),
    "a cluster file that is none": (
        "plan good.py:make --cluster cluster.json",
        "at $: the key 'ranks_per_node' is missing",
    ),
    "no nodes": ("plan good.py:make --cluster h100-dgx --nodes 0", "nodes=0 is not a number of nodes"),
    "nodes of the local cluster": ("plan good.py:make --nodes 2", "the local cluster is this machine"),
    "ranks of another cluster": ("plan good.py:make --cluster h100-dgx --ranks 4", "says how many ranks a node has"),
    # plans
    "no such plan": ("explain nowhere.json", "plan: no such file: nowhere.json"),
    "a plan that is not JSON": ("explain text.json", "plan: text.json is not JSON"),
    "JSON that is no plan": ("explain list.json", "list.json: is not a plan"),
    "a newer plan": ("explain newer.json", "newer.json: at $.schema: 99 is newer than this autopar reads"),
    "a plan with an unknown key": (
        "explain typo.json",
        "typo.json: at $: unknown key 'microbatch', did you mean 'microbatches'?",
    ),
    "a plan with a wrong value": ("explain value.json", 'value.json: at $.microbatches: "two" is not an integer'),
    "a pin for a finished plan": ("explain plan.json --pin tp=2", "--pin: plan.json is a finished plan"),
    "half a plan": ("check half.json", "plan: half.json is not JSON"),
    "a plan with a key twice": ("check twice.json", "the key 'schema' stands twice"),
    "a plan of bytes": ("check bytes.json", "plan: cannot read bytes.json"),
    "a folder for a plan": ("check .", "plan: cannot read . (Is a directory)"),
    "a cluster for a finished plan": (
        "explain plan.json --cluster h100-dgx",
        "--cluster: plan.json is a finished plan",
    ),
    "nodes for a finished plan": ("explain plan.json --nodes 2", "--nodes: plan.json is a finished plan"),
    # check
    "check of nothing": ("check", "the following arguments are required: PLAN"),
    "check of no file": ("check nowhere.json", "plan: no such file: nowhere.json"),
    "check of a model": (f"check {MLP}", f"plan: no such file: {MLP}"),
    "a proof without problem": ("check whole.json --proof", "--proof: needs --problem"),
    "a proof of a pinned plan": ("check plan.json --proof --problem problem.npz", "--proof: the plan has no bound"),
    "a problem without proof": ("check whole.json --problem problem.npz", "--problem: needs --proof"),
    "no such problem": ("check whole.json --proof --problem nowhere.npz", "no such file: nowhere.npz"),
    "a problem that is none": (
        "check whole.json --proof --problem problem.npz",
        "problem file problem.npz: is no saved search",
    ),
    # other plans, problems and files to write
    "more of a finished plan": (
        "explain plan.json --also next",
        "--also: plan.json is a finished plan. Leave it out, or",
    ),
    "a plan beside no choice": (
        "bench published rows.json --plan plan.json",
        "--plan plan.json: is priced beside a choice.",
    ),
    "why not a misspelt pin of a finished plan": (
        "explain plan.json --why-not tpp=2",
        "unknown key 'tpp', did you mean",
    ),
    "why not nothing": (f"explain {MLP} --ranks 2 --why-not", "argument --why-not: expected one argument"),
    "why not an empty word": (
        ["explain", MLP, "--ranks", "2", "--why-not", " , "],
        "--why-not: names no pin. Example:",
    ),
    "why not a word": (f"explain {MLP} --ranks 2 --why-not tensor", "pin 'tensor': is not KEY=VALUE"),
    "why not a misspelt pin": (f"explain {MLP} --ranks 2 --why-not tpp=2", "unknown key 'tpp', did you mean 'tp'?"),
    "why not no number": (f"explain {MLP} --ranks 2 --why-not zero=x,tp=2", "pin zero=x: not a legal value"),
    "why not a pin twice": (f"explain {MLP} --ranks 2 --why-not tp=1,tp=2", "'tp' is pinned twice"),
    "why not for plan": (f"plan {MLP} --why-not tp=2", "unrecognized arguments: --why-not tp=2"),
    "a problem in no folder": (f"plan {MLP} --problem no/where.npz", "--problem no/where.npz: there is no folder no"),
    "a problem of another ending": (f"plan {MLP} --problem x.json", "--problem x.json: must end in .npz"),
    "a plan in no folder": (f"plan {MLP} --out no/plan.json", "--out no/plan.json: there is no folder no"),
    "a plan that is a folder": (f"plan {MLP} --out .", "--out .: is a folder"),
    "a batch of no rows": (f"plan {MLP} --ranks 2 --global-batch 0", "batch: 0 is not a number of rows"),
    "a negative batch": (f"explain {MLP} --ranks 2 --global-batch -8", "batch: -8 is not a number of rows"),
    "a batch that is no number": (f"plan {MLP} --global-batch many", "invalid int value: 'many'"),
    "a batch that pinned dp does not divide": (
        f"plan {MLP} --cluster h100-dgx --pin dp=8 --global-batch 12",
        "dp=8 does not divide the batch of 12 rows",
    ),
    "negative nodes": (f"plan {MLP} --cluster h100-dgx --nodes -1", "nodes=-1 is not a number of nodes"),
    "nodes that are no number": (f"plan {MLP} --cluster h100-dgx --nodes 1.5", "invalid int value: '1.5'"),
    "tp that the cluster does not have": (
        f"plan {MLP} --cluster h100-dgx --pin tp=16",
        "tp=16 does not divide 8 ranks. Legal: tp=1, tp=2, tp=4, tp=8",
    ),
    "plans that are no list": (
        f"verify {MLP} --ranks 2 --plans plan.json",
        "--plans plan.json: is not a list of objects",
    ),
    "an empty list of plans": (f"verify {MLP} --ranks 2 --plans empty.json", "is not a list of objects"),
    "a misspelt pin in a list": (
        f"verify {MLP} --ranks 2 --plans pins.json",
        "pins.json: at $[1]: pin tpp=2: unknown key 'tpp'",
    ),
    "a misspelt key in a list": (
        f"verify {MLP} --ranks 2 --plans entry.json",
        "entry.json: at $[0]: unknown key 'pin', did you mean 'pins'?",
    ),
    "a list that names no model": ("verify --ranks 2 --plans pin.json", "pin.json: at $[0]: names no model"),
    "a wrong type in a list": (
        f"verify {MLP} --ranks 2 --plans type.json",
        'type.json: at $[0].ranks: "2" is not a int',
    ),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_command(kind, folder, capsys):
    words, expected = COMMANDS[kind]
    line = _refused(words.split() if isinstance(words, str) else words, capsys)
    assert expected in line or re.search(expected, line), line


EDITS = {  # where, what stands there afterwards (KeyError: nothing), what is said
    "a negative wire": ("axes.0.wire.copy", [0, -1.0], '$.axes[0].wire.copy: [0.0, -1.0] has a negative time'),
    "a wire too few": ("axes.0.wire.copy", KeyError, "$.axes[0].wire: has the keys ['all_gather', 'all_reduce'"),
    "a wire of three numbers": ("axes.0.wire.copy", [0, 0, 0], "$.axes[0].wire.copy: "),
    "a wire that is text": ("axes.0.wire.copy", ["0", 0], '$.axes[0].wire.copy[0]: "0" is not a number'),
    "an unknown use of an axis": ("axes.0.display", ["zp"], "$.axes[0].display: 'zp' is not legal. Legal: pp,"),
    "ranks that the cluster lacks": ("cluster.ranks_per_node", 1, "$.axes: make 2 ranks, the cluster has 1"),
    "a mesh of other sizes": ("mesh.tp", 4, "$.mesh: makes 4 ranks, the axes make 2"),
    "a unit of no class": ("units.1.kind", 7, "$.units[1].kind: there is no class 7. Legal: 0 to 0"),
    "stages that leave units out": ("stages.0.first", 1, "$.stages[0]: [1, 2) does not continue at unit 0"),
    "stages beyond the units": ("stages.0.last", 9, "$.stages[0]: [0, 9) does not continue"),
    "an op out of place": ("classes.0.ops.0.index", 4, "$.classes[0].ops[0].index: 4 is not the op's place"),
    "a choice too many": ("classes.0.ops.0.choices", ["I", "I"], "ops[0].choices: has 2 choices for 1 axes"),
    "a choice there is not": ("classes.0.ops.0.choices.0", "cut", "ops[0].choices[0]: 'cut' is not legal"),
    "a copy of no op": ("classes.0.extra.0.of", 3, "$.classes[0].extra[0].of: there is no op 3. Legal: 0 to 0"),
    "a copy in no layout": ("classes.0.extra.0.layout", "S", "$.classes[0].extra[0].layout: 'S' is not legal"),
    "a lifetime there is not": ("parameters.h.gather", "often", '.gather: "often" is not legal. Legal: "never",'),
    "a rest that is not use": ("parameters.h.rest", "I", '.gather: "never", but rest \'I\' is not use \'S0\''),
    "a batch of no rows": ("batch", 0, "$.batch: 0 is not legal. Legal: a multiple of 1"),
    "microbatches of nothing": ("microbatches", 0, "$.microbatches: 0 is not a count"),
    "a step in no time": ("predicted.step_time_s", -1, "$.predicted.step_time_s: -1.0 is less than nothing"),
    "a peak that is text": ("predicted.peak_mem_gib", "2", '$.predicted.peak_mem_gib: "2" is not'),
    "bytes below zero": ("predicted.parts.saved_bytes", -1, "$.predicted.parts.saved_bytes: -1.0 is less than"),
    "a collective on no axis": ("predicted.collectives.0.axis", "z", "[0].axis: there is no axis 'z'. Legal: a0"),
    "half a collective": ("predicted.collectives.0.count", 0.5, "$.predicted.collectives[0].count: 0.5 is not an int"),
    "a gap in percent": ("proof.gap", 99.0, "$.proof.gap: 99.0 is no gap. Legal: a fraction from 0 to 1"),
    "a bound above the objective": ("proof.bound", 1.5, "$.proof.bound: 1.5 is above the objective, 1.0"),
    "a scope that is a list": ("proof.scope", [], "$.proof.scope: a JSON list is not an object"),
    "an unknown key of the proof": ("proof.gaps", 0, "$.proof: unknown key 'gaps', did you mean 'gap'?"),
    "an alternative of no kind": ("alternatives.0.kind", "best", '"best" is not legal. Legal: "next", "nearest"'),
    "an alternative with no pin": ("alternatives.0.pins.tpp", "2", "alternatives[0].pins: unknown pin 'tpp', did you"),
    "an alternative in no time": ("alternatives.0.step_time_s", -2, "$.alternatives[0].step_time_s: -2.0 is less"),
    "fits in words": ("fits", "yes", '$.fits: "yes" is not legal. Legal: true, false, null'),
}  # fmt: skip


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("command", ["check", "explain"])
def test_edited_plan(kind, command, folder, capsys):
    where, value, expected = EDITS[kind]
    data = at = WHOLE.to_json()
    *path, last = [int(key) if key.isdecimal() else key for key in where.split(".")]
    for key in path:
        at = at["h.0.fc.weight"] if key == "h" else at[key]
    if value is KeyError:
        del at[last]
    else:
        at[last] = value
    (folder / "edited.json").write_text(json.dumps(data))
    line = _refused([command, "edited.json"], capsys)
    assert line.startswith("autopar: edited.json: at $") and expected in line, line


def test_the_plan_that_is_edited_is_legal(folder, capsys):
    assert main(["check", "whole.json"]) == 0 and main(["explain", "whole.json"]) == 0


def _net(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Flatten(0), nn.LogSoftmax(0))


def _loss(outputs):
    return outputs.sum()


def _compile(width=4, cluster=None, **options):
    """A parallel model on one rank, planned and with its program."""
    cluster = cluster or Cluster.local(ranks=1)
    return autopar.compile(_net(width), cluster, args=(torch.ones(6, width),), loss=_loss, **options)


def _edited(change):
    """The plan of a model for two ranks, edited by hand, given for the same model."""
    data = _compile(cluster=Cluster.local(ranks=2), pins={"dp": 2}).plan.to_json()
    change(data)
    return _compile(cluster=Cluster.local(ranks=2), plan=from_json(data))


def _step(*args, **kwargs):
    return _compile().step(*args, **kwargs)


CALLS = {
    "pins of the wrong type": (lambda: Pins.parse({"tp": 2.5}), "pin tp=2.5: not a legal value"),
    "pins that do not fit": (lambda: resolve(Pins.parse({"tp": 5}), 4), "tp=5 does not divide 4 ranks"),
    "a cluster that is a number": (lambda: Cluster.of(4), "a int is no cluster"),
    "a local cluster of no ranks": (lambda: Cluster.local(ranks=0), "ranks=0"),
    "a model that is a class": (lambda: autopar.compile(nn.Linear, "local"), "model is a type, not an nn.Module"),
    "a cluster name": (lambda: autopar.compile(_net(), "h100"), "cluster h100: unknown, did you mean 'h100-dgx'"),
    "a misspelt pin": (lambda: autopar.compile(_net(), "local", pins={"tpp": 2}), "unknown key 'tpp'"),
    "inputs of another kind": (lambda: autopar.compile(_net(), "local", inputs="mine"), "inputs='mine' is not known"),
    "no such plan": (lambda: autopar.compile(_net(), "local", plan="nowhere.json"), "plan: no such file: nowhere.json"),
    "a plan of another model": (lambda: _compile(plan=_compile(width=8).plan), "was made for another model"),
    "a plan with an illegal choice": (
        lambda: _edited(lambda p: p["classes"][0]["ops"][0].update(choices=["factor:nowhere"])),
        "$.classes[0].ops[0].choices: ['factor:nowhere'] is not legal for aten.linear.default",
    ),
    "a plan with an illegal layout": (
        lambda: _edited(lambda p: p["parameters"]["0.bias"].update(rest="S3")),
        """$.parameters["0.bias"].rest: 'S3' is not legal. Legal: R, I, P, S0""",
    ),
    "a plan before there is one": (lambda: autopar.compile(_net(), "local").plan, "not captured yet"),
    "ranks that do not run": (
        lambda: _compile(cluster=Cluster.local(ranks=2)).step(torch.ones(6, 4)),
        "needs 2 processes",
    ),
    "an input of another width": (lambda: _step(torch.ones(6, 5)), "cannot be captured at batch size 6"),
    "an input of another dtype": (lambda: _step(torch.ones(6, 4, dtype=torch.int64)), "has dtype torch.int64"),
    "no input": (lambda: _step(), "missing a required argument"),
    "an input too many": (lambda: _step(torch.ones(6, 4), torch.ones(6, 4)), "too many positional arguments"),
    "a step in eval mode": (lambda: _compile().train(False).step(torch.ones(6, 4)), "step: the model is in eval mode"),
    "a number for an input": (lambda: _step(3), "at capture it was a tensor"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_call(kind):
    call, expected = CALLS[kind]
    with pytest.raises(AutoparError) as error:
        call()
    assert expected in str(error.value) and "\n" not in str(error.value)


class WithoutMetaKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.fake_quantize_per_tensor_affine(self.fc(x), 0.1, 0, -128, 127).sum()


def test_an_op_of_which_torch_does_not_say_what_it_makes():
    with pytest.raises(AutoparError, match=r"fake_quantize.*test_bad_input\.py:\d+.*register_fake") as caught:
        autopar.compile(WithoutMetaKernel(), Cluster.local(ranks=2), args=(torch.randn(8, 4),)).plan  # noqa: B018
    assert "\n" not in str(caught.value)
