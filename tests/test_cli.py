"""The command line: exit codes, streams, and what it hands to verify and compile (stood in for here)."""

import json
import subprocess
import sys
import types
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.cluster import FOLDER
from autopar.errors import AutoparError, NothingFits
from autopar.plan import Alternative, ClusterId, ModelId, Plan, PlanAxis, Predicted, Proof

MLP = "autopar.models.mlp:make"


@dataclass(frozen=True)
class Worst:
    name: str
    kind: str
    abs: float
    rel: float


@dataclass(frozen=True)
class Share:
    flops: float
    param_bytes: float
    saved_bytes: float


@dataclass(frozen=True)
class Result:
    """The shape of `autopar.verify.VerifyResult`."""

    ok: bool
    ranks: int
    plan: str
    worst: tuple[Worst, ...] = (Worst("fc.weight", "grad", 1e-12, 3e-12),)
    divided: dict[str, Share] = field(default_factory=lambda: {"tp": Share(0.5, 0.49, 0.25)})
    seconds: float = 1.5
    limits: tuple[str, ...] = ("fp64 1e-10",)
    probed: tuple[str, ...] = ()


@pytest.fixture
def verify(monkeypatch):
    """`verify_many` answers from ``answers`` in turn (a result, or an exception to raise) and keeps its ``calls``."""
    stub = types.ModuleType("autopar.verify")
    stub.calls, stub.clusters, stub.answers = [], [], {}

    def verify_many(spec, ranks, plans, *, batch=None, cluster=None):
        stub.calls.append((spec, ranks, [p.text() for p in plans], batch))
        stub.clusters.append(cluster)
        print("a library prints to stdout")
        found = [stub.answers.get(p.text(), Result(True, ranks, p.text())) for p in plans]
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, AutoparError):
                raise answer
        return found

    stub.verify_many = verify_many
    monkeypatch.setitem(sys.modules, "autopar.verify", stub)
    return stub


@pytest.fixture
def compiled(monkeypatch):
    """`autopar.compile` gives ``plan`` and keeps its ``calls``; other ``answers`` by the text of the pins: a plan, or
    an exception to raise."""
    plan = Plan(
        ModelId("sha256:ab", "MLP"), ClusterId(ranks_per_node=2), (PlanAxis("tp", 2, "host", 1, ("tp",)),), {"tp": 2}
    )
    found = types.SimpleNamespace(calls=[], plan=plan, answers={}, search=None, emitted=[])

    def compile(model, cluster, **options):
        found.calls.append((model, cluster, options))
        answer = found.answers.get(options["pins"].text(), plan)
        if isinstance(answer, BaseException):
            raise answer
        return types.SimpleNamespace(
            detailed_plan=lambda: answer,
            plan=answer,
            search=found.search,
            captured=None,
            save_source=found.emitted.append,
        )

    monkeypatch.setitem(vars(autopar), "compile", compile)
    return found


def _predicted(plan, step, gib, limit=4.0, **seconds):
    """The plan with a prediction: seconds a step, GiB of ``limit``."""
    kinds = {"compute_s": step, "exposed_s": 0.0, "hidden_s": 0.0, "optimizer_s": 0.0} | seconds
    parts = kinds | {"peak_saved_bytes": gib * 2**30, "memory_limit_bytes": limit * 2**30}
    return replace(plan, predicted=Predicted(step, gib, parts))


def test_verify_that_is_equal(verify, capsys):
    assert (
        main(
            [
                "verify",
                MLP,
                "--ranks",
                "2",
                "--pin",
                "tp=2",
                "--pin",
                "microbatches=2",
                "--batch",
                "8",
                "--set",
                "layers=3",
            ]
        )
        == 0
    )
    ((spec, ranks, plans, batch),) = verify.calls
    assert (spec.target, spec.options, spec.loss, ranks, plans, batch) == (
        MLP,
        {"layers": 3},
        None,
        2,
        ["tp=2 microbatches=2"],
        8,
    )
    out = capsys.readouterr().out
    assert "equal to one process: tp=2 microbatches=2" in out and "fc.weight" in out and "50.0% of flops" in out


def test_verify_that_differs_exits_1(verify, capsys):
    verify.answers["tp=2"] = Result(False, 2, "tp=2 on 2 ranks")
    assert main(["verify", MLP, "--ranks", "2", "--pin", "tp=2"]) == 1
    assert "DIFFERS FROM one process: tp=2 on 2 ranks" in capsys.readouterr().out


def test_verify_that_is_refused_exits_2(verify, capsys):
    verify.answers["tp=2"] = AutoparError("pins: tp=2 divides nothing.")
    assert main(["verify", MLP, "--ranks", "2", "--pin", "tp=2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "autopar: pins: tp=2 divides nothing."


def test_verify_plans_for_another_cluster(verify, tmp_path, capsys):
    file = tmp_path / "small.json"
    small = json.loads((FOLDER / "h100-dgx.json").read_text())
    small["chip"]["memory"]["value"] = 16e9
    file.write_text(json.dumps(small))
    assert main(["verify", MLP, "--ranks", "8", "--batch", "3", "--cluster", str(file)]) == 0
    assert main(["verify", MLP, "--ranks", "8", "--cluster", "local"]) == 0
    own, local = verify.clusters
    assert own.memory == 16e9 and own.ranks == 8 and local is None
    assert main(["verify", MLP, "--ranks", "8", "--cluster", "nowhere"]) == 2
    assert "cluster nowhere: unknown" in capsys.readouterr().err


def test_verify_json_is_alone_on_stdout(verify, capfd):
    assert main(["verify", MLP, "--ranks", "2", "--json"]) == 0
    captured = capfd.readouterr()
    found = json.loads(captured.out)
    assert found["ok"] is True and found["ranks"] == 2 and found["seconds"] == 1.5
    assert found["worst"] == [{"name": "fc.weight", "kind": "grad", "abs": 1e-12, "rel": 3e-12}]
    assert found["divided"] == {"tp": {"flops": 0.5, "param_bytes": 0.49, "saved_bytes": 0.25}}
    assert "a library prints" in captured.err


def test_json_of_an_error(verify, capsys):
    assert main(["verify", MLP, "--ranks", "2", "--pin", "tpp=2", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"ok": False, "error": captured.err.removeprefix("autopar: ").rstrip("\n")}


def test_plans_share_a_launch(verify, tmp_path, capsys):
    file = tmp_path / "plans.json"
    entries = [
        {"tp": 2},
        {"zero": 3},
        {"model": "autopar.models.gpt2:make", "pins": {"tp": 2}, "set": {"causal": True}, "batch": 4},
    ]
    file.write_text(json.dumps(entries))
    verify.answers["zero=3"] = Result(False, 2, "dp=2 zero=3 on 2 ranks")
    assert main(["verify", MLP, "--ranks", "2", "--plans", str(file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and [r["ok"] for r in found["results"]] == [True, False, True]
    assert [r["model"] for r in found["results"]] == [MLP, MLP, "autopar.models.gpt2:make"]
    assert [(c[0].target, c[2], c[3]) for c in verify.calls] == [
        (MLP, ["tp=2", "zero=3"], None),
        ("autopar.models.gpt2:make", ["tp=2"], 4),
    ]
    assert verify.calls[1][0].options == {"causal": True}


def test_plans_of_which_one_is_refused(verify, tmp_path, capsys):
    file = tmp_path / "plans.json"
    file.write_text('[{"tp": 2}, {"dp": 2}]')
    verify.answers["tp=2"] = AutoparError("pins: tp=2 divides nothing.")
    assert main(["verify", MLP, "--ranks", "2", "--plans", str(file)]) == 2
    out = capsys.readouterr().out
    assert "refused  " in out and "equal  " in out and "1 of 2 plans equal one process" in out


def test_plans_that_name_everything_themselves(verify, tmp_path, capsys):
    file = tmp_path / "plans.json"
    one = {"model": MLP, "ranks": 2, "pins": {"tp": 2}, "set": {"layers": 4, "width": 8}}
    file.write_text(json.dumps([one, {**one, "ranks": 4, "batch": None}]))
    assert main(["verify", "--plans", str(file), "--set", "layers=3", "--pin", "microbatches=2", "--json"]) == 0
    assert [(c[1], c[2], c[3]) for c in verify.calls] == [(n, ["tp=2 microbatches=2"], None) for n in (2, 4)]
    assert verify.calls[0][0].options == {"layers": 4, "width": 8}


def test_a_refused_model_does_not_stop_the_others(verify, tmp_path, capsys, monkeypatch):
    file = tmp_path / "plans.json"
    file.write_text(json.dumps([{"model": "a.b:c", "pins": {"tp": 2}}, {"model": MLP, "pins": {"tp": 2}}]))
    answer = verify.verify_many

    def verify_many(spec, *args, **kwargs):
        if spec.target == "a.b:c":
            raise AutoparError("a.b:c: no module 'a'.")
        return answer(spec, *args, **kwargs)

    monkeypatch.setattr(verify, "verify_many", verify_many)
    assert main(["verify", "--ranks", "2", "--plans", str(file), "--json"]) == 2
    first, second = json.loads(capsys.readouterr().out)["results"]
    assert first == {"model": "a.b:c", "pins": "tp=2", "ok": False, "ranks": 2, "error": "a.b:c: no module 'a'."}
    assert second["ok"] and second["model"] == MLP


def test_a_crash_of_ours_is_never_2(verify, capsys):
    verify.answers["tp=2"] = RuntimeError("boom")
    assert main(["verify", MLP, "--ranks", "2", "--pin", "tp=2"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "boom" in err and "a bug of autopar" in err


def test_interrupted(verify, capsys):
    verify.answers["tp=2"] = KeyboardInterrupt()
    assert main(["verify", MLP, "--ranks", "2", "--pin", "tp=2"]) == 130
    assert capsys.readouterr().err == "autopar: interrupted.\n"


def test_plan_writes_a_file_that_loads(compiled, tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["plan", MLP, "--ranks", "2", "--pin", "tp=2", "--global-batch", "16", "--out", str(out)]
    assert main(words) == 0
    assert Plan.load(out) == compiled.plan
    (((_, cluster, options)),) = compiled.calls
    assert cluster.ranks == 2 and options["global_batch"] == 16 and options["pins"].tp == 2 and options["loss"] is None
    assert str(out) in capsys.readouterr().out


def test_plan_json_prints_the_plan_and_writes_no_file(compiled, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", MLP, "--ranks", "2", "--pin", "tp=2", "--json", "--out", "plan.json"]) == 0
    assert autopar.plan.from_json(json.loads(capsys.readouterr().out)) == compiled.plan
    assert not list(tmp_path.iterdir())


def test_plan_saves_the_search(compiled, tmp_path, capsys):
    from autopar.solver.file import Record, Saved, load
    from autopar.solver.search import Candidate

    compiled.search = Saved((Record(Candidate(((2, 1),), 1), "roofline", 2.0),), 8.0)
    assert main(["plan", MLP, "--ranks", "2", "--json", "--problem", str(tmp_path / "search.npz")]) == 0
    assert load(tmp_path / "search.npz").records[0].bound == 2.0


def test_plan_emits_the_program(compiled, tmp_path, capsys):
    folder = str(tmp_path / "program")
    assert main(["plan", MLP, "--ranks", "2", "--emit", folder]) == 0
    assert compiled.emitted == [folder] and f"written to {folder}" in capsys.readouterr().out
    for wrong in (tmp_path / "none" / "program", Path(__file__)):
        assert main(["plan", MLP, "--ranks", "2", "--emit", str(wrong)]) == 2
        assert f"--emit {wrong}: not a folder" in capsys.readouterr().err
    assert len(compiled.calls) == 1


def test_plan_on_another_cluster(compiled):
    assert main(["plan", MLP, "--cluster", "h100-dgx", "--nodes", "2", "--pin", "tp=8", "--json"]) == 0
    assert compiled.calls[0][1].name == "h100-dgx" and compiled.calls[0][1].ranks == 16


def test_explain_a_model_and_a_file(compiled, tmp_path, capsys):
    assert main(["explain", MLP, "--ranks", "2", "--pin", "tp=2"]) == 0
    from_model = capsys.readouterr().out
    compiled.plan.save(tmp_path / "plan.json")
    assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == from_model
    assert "tp=2 on 2 ranks" in from_model and "unchecked" in from_model
    assert main(["explain", str(tmp_path / "plan.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is None and found["mesh"] == {"tp": 2} and found["microbatches"] == 1
    assert set(found["proof"]) == {"objective", "bound", "gap", "scope"}
    assert {"step_time_s", "peak_mem_gib", "parts"} <= set(found["predicted"])


KEYS = {"fits", "mesh", "microbatches", "predicted", "proof"}


def test_plan_and_explain_have_the_same_keys_on_top(compiled, capsys):
    compiled.answers["no pins"] = _predicted(compiled.plan, 1.0, 2.0)
    for command in ("plan", "explain"):
        assert main([command, MLP, "--ranks", "2", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert set(found) >= KEYS and found["fits"] is True and found["predicted"]["peak_mem_gib"] == 2.0


def test_why_not_prices_other_plans(compiled, capsys):
    base = compiled.plan
    compiled.answers["zero=1"] = _predicted(base, 1.0, 2.0)
    dp = replace(base, axes=(PlanAxis("dp", 2, "host", 1, ("dp_shard",)),), mesh={"dp_shard": 2})
    compiled.answers["dp=2 zero=3"] = _predicted(dp, 1.25, 3.0, compute_s=1.0, exposed_s=0.25)
    compiled.answers["tp=2 zero=2"] = NothingFits("no plan fits: 5.0 GiB of 4.0.", _predicted(dp, 1.5, 5.0))
    words = ["explain", MLP, "--ranks", "2", "--pin", "zero=1"]
    words += ["--why-not", "dp=2,zero=3", "--why-not", "tp=2 zero=2", "--why-not", "tp=3", "--why-not", "zero=1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert [line.split()[:2] for line in text.split("Why not\n")[1].splitlines()[1:5]] == [
        ["dp=2", "zero=3"], ["tp=2", "zero=2"], ["tp=3", "illegal"], ["zero=1", "fits"],
    ]  # fmt: skip
    for expected in (
        "+25.0 %",
        "compute, 80.0 % of the step; exposed +250 ms",
        "memory: 1.0 GiB too much",
        "too large",
    ):
        assert expected in text
    assert "tp=3 does not divide 2 ranks. Legal: tp=1, tp=2." in text and "this is the chosen plan" in text
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["why_not"]
    assert [r["answer"] for r in rows] == ["fits", "too large", "illegal", "fits"]
    assert [r["difference"] for r in rows] == [0.25, 0.5, None, 0.0]
    assert rows[0]["step_time_s"] == 1.25 and rows[1]["error"] == "no plan fits: 5.0 GiB of 4.0."
    assert [c[2]["pins"].text() for c in compiled.calls[:3]] == ["zero=1", "dp=2 zero=3", "tp=2 zero=2"]


def test_why_not_takes_pins_whose_values_have_commas(compiled, capsys):
    from autopar.cli.plan import _pins

    assert _pins("layout.fc.weight=tp:S0,dp:R tp=2,  zero=3") == ["layout.fc.weight=tp:S0,dp:R", "tp=2", "zero=3"]


def test_nothing_fits(compiled, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    closest = replace(
        _predicted(compiled.plan, 1.0, 5.0), alternatives=(Alternative("nearest", "nodes=2", {}, 0.5, 3.0),)
    )
    compiled.answers["no pins"] = NothingFits("no plan fits: 5.0 GiB of 4.0 (saved). Nearest: nodes=2.", closest)
    line = "autopar: no plan fits: 5.0 GiB of 4.0 (saved). Nearest: nodes=2.\n"
    assert main(["plan", MLP, "--ranks", "2", "--out", "plan.json"]) == 1
    assert capsys.readouterr() == ("", line) and not list(tmp_path.iterdir())
    assert main(["explain", MLP, "--ranks", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.err == line and "NO: 5.0 GiB of 4.0 GiB a rank" in captured.out
    assert "Nearest changes that fit" in captured.out and "nodes=2" in captured.out
    for command in ("plan", "explain"):
        assert main([command, MLP, "--ranks", "2", "--json"]) == 1
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        assert set(found) >= {*KEYS, "error"} and found["fits"] is False and captured.err == line
        assert found["predicted"]["peak_mem_gib"] == 5.0 and line == f"autopar: {found['error']}\n"


def test_nothing_fits_and_there_is_no_closest_plan(compiled, capsys):
    compiled.answers["no pins"] = NothingFits("no plan fits: parameters alone need 5.0 GiB of 4.0.", None)
    for command in ("plan", "explain"):
        assert main([command, MLP, "--ranks", "2", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["fits"] is False and set(found) >= {*KEYS, "error"}
        assert set(found["predicted"]) >= {"step_time_s", "peak_mem_gib", "parts"}


def test_check_a_plan(compiled, tmp_path, capsys):
    plan = replace(_predicted(compiled.plan, 1.0, 2.0), proof=Proof(1.0, 0.99, 1 - 0.99))
    plan.save(tmp_path / "plan.json")
    assert main(["check", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "every check passed" in out and "gap = 1 - bound / objective: 0.01" in out and "sum of bytes" in out
    assert main(["check", str(tmp_path / "plan.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and all(row["ok"] for row in found["checked"]) and len(found["checked"]) == 7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"predicted": {"peak_mem_gib": 1.0}}, "peak_mem_gib = sum of bytes / 2**30: 1, but that is 2"),
        ({"predicted": {"step_time_s": 0.5}}, "max(compute + optimizer, hidden): 0.5, but that is 1"),
        ({"predicted": {"step_time_s": None}}, "max(compute + optimizer, hidden): unknown, but that is 1"),
        ({"proof": {"gap": 0.001}}, "gap = 1 - bound / objective: 0.001, but that is 0.01"),
        ({"proof": {"bound": None}}, "gap = 1 - bound / objective: 0.01, but that is unknown"),
    ],
)
def test_check_finds_edited_figures(change, said, compiled, tmp_path, capsys):
    data = replace(_predicted(compiled.plan, 1.0, 2.0), proof=Proof(1.0, 0.99, 1 - 0.99)).to_json()
    for key, values in change.items():
        data[key] |= values
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert main(["check", str(tmp_path / "plan.json")]) == 1
    out = capsys.readouterr().out
    assert "NOT what it says" in out and "DIFFERS  " in out and said in out


def test_a_model_of_meta_tensors(compiled):
    words = ["--set", "size=llama-3-8b", "--set", "meta=true", "--set", "dtype=bf16", "--set", "sequence=8192"]
    assert main(["plan", "autopar.models.llama:make", "--ranks", "2", "--json", *words]) == 0
    model, _, options = compiled.calls[0]
    assert {p.device.type for p in model.parameters()} == {"meta"} and options["args"][0].shape == (8, 8192)
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248


def test_the_real_llama_of_transformers(compiled):
    factory = Path(__file__).parent / "exact" / "hf.py"
    assert main(["plan", f"{factory}:llama", "--cluster", "h100-dgx", "--global-batch", "64", "--json"]) == 0
    model, cluster, options = compiled.calls[0]
    assert type(model).__name__ == "LlamaForCausalLM" and model.training and model.config.use_cache
    assert {(p.device.type, str(p.dtype)) for p in model.parameters()} == {("meta", "torch.bfloat16")}
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert options["kwargs"]["input_ids"].shape == (8, 8192) and options["global_batch"] == 64 and cluster.ranks == 8


@pytest.mark.parametrize(
    "words",
    [["--help"], ["verify", "--help"], ["plan", "--help"], ["explain", "--help"], ["check", "--help"], ["--version"]],
)
def test_help_exits_0(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0 and "autopar" in capsys.readouterr().out


def test_help_does_not_import_torch():
    code = "import sys, autopar.cli.command as c; c._parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_as_a_module_a_bad_word_is_one_line():
    done = subprocess.run([sys.executable, "-m", "autopar", "verfy"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("autopar: argument COMMAND: invalid choice: 'verfy'")


def test_a_model_on_devices_too_small_for_it(tmp_path, capsys):
    from autopar.cluster import FOLDER

    data = json.loads((FOLDER / "h100-dgx.json").read_text())
    data["chip"]["memory"]["value"] = 27_000.0
    data["chip"].pop("reserved", None)
    file = tmp_path / "small.json"
    file.write_text(json.dumps(data | {"ranks_per_node": 4}))
    words = [MLP, "--cluster", str(file), "--pin", "tp=2"]
    assert main(["explain", *words, "--pin", "zero=0", "--pin", "microbatches=1"]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("autopar: no plan fits: ") and "Nearest: " in line
    assert "NO: " in captured.out and "Nearest changes that fit" in captured.out and "binds " in captured.out
    change = line.split("Nearest: ")[1].rstrip(".").split(";")[0].split()
    assert main(["plan", *words, *(word for pin in change for word in ("--pin", pin)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
