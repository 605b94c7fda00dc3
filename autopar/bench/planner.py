"""How long planning takes and what it proves: models on clusters, a fresh process each, so that memory is its own."""

from __future__ import annotations

import math
import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.bench.rows import Figure, bench, chosen
from autopar.errors import AutoparError
from autopar.solver.proof import each


@dataclass(frozen=True)
class Case:
    """``target`` and ``options`` as on the command line; ``batch``: rows of the global batch. ``mesh``: only this one,
    of axes (size, stride), with ``microbatches``."""

    target: str
    cluster: str
    nodes: int
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[tuple[int, int], ...] = ()
    microbatches: int = 1


HF = "tests/exact/hf.py"  # needs transformers; run from a clone
CASES = {
    "mlp on 1 node": Case("autopar.models.mlp:make", "h100-dgx", 1, 64),
    "gpt2 on 1 node": Case("autopar.models.gpt2:make", "h100-dgx", 1, 64, {"size": "gpt2"}),
    "gpt2-xl on 4 A100 nodes": Case("autopar.models.gpt2:make", "a100-dgx", 4, 256, {"size": "gpt2-xl"}),
    "vit on 1 node": Case("autopar.models.vit:make", "h100-dgx", 1, 256),
    "llama-3-8b on 8 nodes": Case("autopar.models.llama:make", "h100-dgx", 8, 512, {"size": "llama-3-8b"}),
    "hf llama-3-8b on 1 node": Case(f"{HF}:llama", "h100-dgx", 1, 64),
    "hf llama-3-8b on 8 nodes": Case(f"{HF}:llama", "h100-dgx", 8, 512),
    "hf llama-3-8b on 32 nodes": Case(f"{HF}:llama", "h100-dgx", 32, 1024),
    "hf llama-3-70b on 64 nodes": Case(f"{HF}:llama", "h100-dgx", 64, 1024, {"size": "70b"}),
    "hf llama-3-405b on 2,048 nodes": Case(f"{HF}:llama", "h100-dgx", 2048, 2048, {"size": "405b"}),
    "hf gpt-3-175b on 16 nodes": Case(f"{HF}:gpt", "h100-dgx", 16, 1536),
    "hf gpt-3-175b on 128 nodes": Case(f"{HF}:gpt", "h100-dgx", 128, 1536),
    "hf gpt-530b on 64 nodes": Case(f"{HF}:gpt", "h100-dgx", 64, 1920, {"size": "530b"}),
    "hf mixtral-8x7b on 8 nodes": Case(f"{HF}:mixtral", "h100-dgx", 8, 512),
    "hf t5-11b on 8 nodes": Case(f"{HF}:t5", "h100-dgx", 8, 2048),
    "hf vit-22b-like on 32 nodes": Case(f"{HF}:vit", "h100-dgx", 32, 4096),
    "hf wide resnet-50 x8 on 2 nodes": Case(f"{HF}:resnet", "h100-dgx", 2, 1024),
    "hf llama-3-8b on a mesh of 32 x 8": Case(
        f"{HF}:llama", "h100-dgx", 32, 1024, mesh=((32, 8), (8, 1)), microbatches=4
    ),
}


@bench("planner")
def planner(cases: Sequence[str]) -> Iterator[tuple[str, dict[str, Figure]]]:
    """Seconds by phase, memory, size of the problem, how its candidates ended, the plan and the gap of each case."""
    context = multiprocessing.get_context("spawn")
    for name in chosen(cases, CASES, "planner"):
        ours, theirs = context.Pipe()
        process = context.Process(target=_answer, args=(theirs, CASES[name]))
        process.start()
        theirs.close()
        try:
            figures: dict[str, Figure] = ours.recv()
        except EOFError:
            figures = {"error": "the process ended without an answer"}
        process.join()
        yield name, figures


def _answer(connection: Any, case: Case) -> None:
    try:
        connection.send(_one_mesh(case) if case.mesh else _measure(case))
    except AutoparError as error:
        connection.send({"error": str(error)})


def _measure(case: Case) -> dict[str, Figure]:
    import autopar
    from autopar.cluster import Cluster
    from autopar.loading import ModelSpec

    started = time.perf_counter()
    loaded = ModelSpec(case.target, case.options).load()
    built = time.perf_counter() - started
    parallel = autopar.compile(
        loaded.model,
        Cluster.load(case.cluster, case.nodes),
        args=loaded.args,
        kwargs=loaded.kwargs,
        global_batch=case.batch,
    )
    plan = parallel.plan
    total = time.perf_counter() - started
    scope = plan.proof.scope
    figures: dict[str, Figure] = {"gpus": plan.ranks, "total_s": total, "build_s": built}
    figures |= {f"{phase}_s": seconds for phase, seconds in plan.timings.items()}
    figures["cpu_s"] = time.process_time()
    figures["rss_gib"] = _rss()
    figures["strategies"] = scope.get("generated")
    figures["candidates"] = _ends(scope.get("pruned", ()))
    figures["plan"] = plan.one_line()
    figures["step_s"] = plan.predicted.step_time_s
    figures["peak_gib"] = plan.predicted.peak_mem_gib
    figures["gap"] = plan.proof.gap if plan.proof.gap is None or math.isfinite(plan.proof.gap) else None
    return figures


def _ends(pruned: Iterable[Mapping[str, Any]]) -> str:
    """How many candidates there were, and how they ended.

    >>> _ends([{"by": "roofline"}, {"by": "solved"}, {"by": "roofline"}])
    '3: 2 roofline, 1 solved'
    """
    ends = Counter(entry["by"] for entry in each(pruned))
    return f"{ends.total()}: {', '.join(f'{count} {by}' for by, count in ends.most_common())}"


def _one_mesh(case: Case) -> dict[str, Figure]:
    """The best per-op layouts of one mesh and one number of microbatches, from a capture on."""
    from autopar.build import prepare
    from autopar.capture import capture
    from autopar.choosing.solve import Solver
    from autopar.cluster import Cluster
    from autopar.loading import ModelSpec
    from autopar.pins import Pins
    from autopar.solver.search import Candidate

    cluster, clock = Cluster.load(case.cluster, case.nodes), [time.perf_counter()]
    loaded = ModelSpec(case.target, case.options).load()
    captured = capture(
        loaded.model.train(), loaded.args, loaded.kwargs, check=False, loss=loaded.loss, global_batch=case.batch
    )
    clock.append(time.perf_counter())
    worked = time.process_time()
    solver = Solver(captured, cluster, Pins(microbatches=case.microbatches), prepared=prepare(captured, 1))
    clock.append(time.perf_counter())
    posed, answer = solver.one(Candidate(case.mesh, case.microbatches), float(cluster.limit))
    clock.append(time.perf_counter())
    return {
        "capture_s": clock[1] - clock[0],
        "prepare_s": clock[2] - clock[1],
        "pose_and_solve_s": clock[3] - clock[2],
        "after_capture_s": clock[3] - clock[1],
        "after_capture_cpu_s": time.process_time() - worked,
        "rss_gib": _rss(),
        "strategies": posed.problem.counts.get("generated"),
        "step_s": answer.objective,
        "gap": answer.gap,
    }


def _rss() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (20 if sys.platform != "darwin" else 30))
