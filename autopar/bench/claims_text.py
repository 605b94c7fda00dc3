"""The page of `autopar.bench.claims` in Markdown: every figure on it is computed when it is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.bench.claims import (
    CLAIMED_FLOPS,
    CLAIMED_MFU,
    GPUS,
    MODELS,
    STATES,
    ZERO_BYTES,
    ZERO_PAPER,
    Claims,
    Priced,
    model_flops,
    model_parameters,
    spared_flops,
    zero_bytes,
)
from autopar.cluster import Cluster

TERA, GIGA, GIB = 1e12, 1e9, 2**30
KINDS = ("forward", "backward", "recompute", "tp", "p2p", "gather", "reduce", "optimizer", "bubble")

HEAD = """# Claims, priced

Written by `autopar bench claims --write docs/claims.md`; a test holds it to what the command prints. *Model* is what
`autopar.pricing` predicts from measured figures of kernels and collectives (`autopar bench published` says how well it
does on published runs). *Roofline* is the same step with every kernel at the peak of the data sheet or at the bandwidth
of memory, whichever takes longer, collectives at the rate of the wires, no latency and no throttling: a bound, not a
prediction. FLOPs are the model's own, attention counted in full, nothing recomputed."""


def page(claims: Claims) -> str:
    """The whole page."""
    parts = [HEAD, *_throughput(claims), *_tensor(claims), *_recomputation(claims), *_zero(claims)]
    return "\n\n".join(map(_filled, parts))


def _filled(text: str) -> str:
    """Prose in lines of at most 120 characters; tables and lists as they are."""
    if text[0] in "|-":
        return text
    return "\n\n".join(
        textwrap.fill(p, 120, break_long_words=False, break_on_hyphens=False) for p in text.split("\n\n")
    )


def _throughput(claims: Claims) -> Iterable[str]:
    """The claim, the models, the configurations, what is reached."""
    chip = Cluster.load("h100-dgx").chip
    peak, burst, held = chip.peak("bf16"), chip.burst_rate("bf16"), chip.matmul_rate("bf16")
    spared = ", ".join(f"{name} {spared_flops(row) / model_flops(row):.1%}" for name, row in MODELS.items())
    yield f"""## {CLAIMED_MFU:.1%} MFU and {CLAIMED_FLOPS / TERA:.0f} TFLOP/s on {GPUS} H100s

Claimed for dense models of 70B, 175B and 500B parameters on {GPUS // 8} nodes of 8 H100s with 3.2 Tb/s of InfiniBand a
node, TP=8 PP=4 DP=16, sequence parallelism.

**The two figures do not agree.** At {peak / TERA:.0f} TFLOP/s peak (H100 SXM, dense bf16) {CLAIMED_FLOPS / TERA:.0f}
TFLOP/s are {CLAIMED_FLOPS / peak:.1%}, and {CLAIMED_MFU:.1%} are {CLAIMED_MFU * peak / TERA:.0f} TFLOP/s. Both
hold at a peak of {CLAIMED_FLOPS / CLAIMED_MFU / TERA:.0f} TFLOP/s, which no H100 has.

**Neither leaves room for much but matmuls.** The best matmul of any shape reaches {burst / TERA:.0f} TFLOP/s for a
moment ({burst / peak:.1%} of the peak), and a run that lasts holds {held / TERA:.0f} of them at 700 W
({held / peak:.1%}). {CLAIMED_FLOPS / TERA:.0f} is {CLAIMED_FLOPS / held:.1%} of that, which norms, attention,
collectives, bubble and optimizer would have to share; what helps is that a causal mask spares FLOPs which
are counted ({spared}).

What was not stated is taken as follows: batch {claims.throughput[0].row.gbs} of {claims.throughput[0].row.seq} tokens,
one sequence a microbatch, ZeRO-1, kernels as in NeMo (cuDNN attention, fused norms), fp32 gradients."""
    yield _table(
        ("model", "layers", "width", "heads (kv)", "MLP", "vocabulary", "parameters"),
        [
            (
                name,
                r.layers,
                r.hidden,
                f"{r.heads} ({r.kv_heads or r.heads})",
                f"{r.ffn_type} {r.ffn}",
                r.vocab,
                f"{model_parameters(r) / GIGA:.1f}B",
            )
            for name, r in MODELS.items()
        ],
    )
    yield _table(
        ("model", "how", "s a step", "TFLOP/s", "MFU", "roofline TFLOP/s", "roofline MFU", "GiB", "fits 80 GB"),
        [
            (
                p.model,
                p.words,
                f"{p.found.step_s:.2f}",
                f"{p.rate / TERA:.0f}",
                f"{p.mfu:.1%}",
                f"{p.bound / TERA:.0f}",
                f"{p.bound / p.peak:.1%}",
                f"{p.found.peak_gib:.1f}",
                "yes" if p.found.fits else "no",
            )
            for p in claims.throughput
        ],
    )
    best = claims.reached()
    yield "\n".join([*(f"- {_reached(model, p)}" for model, p in best.items()), *_too_large(claims)])
    yield "Seconds of these steps by what they go to, on the stage that holds most memory:"
    yield _table(("model", *KINDS), [(p.model, *(f"{p.seconds(k):.2f}" for k in KINDS)) for p in best.values() if p])


def _reached(model: str, best: Priced | None) -> str:
    if best is None:
        return f"**{model}** fits in none of these ways."
    bound = "exceeds even the roofline of that step" if best.bound < CLAIMED_FLOPS else "lies below its roofline"
    return (
        f"**{model}** reaches {best.rate / TERA:.0f} TFLOP/s, {best.mfu:.1%}, at best of what fits here "
        f"({best.row_words}). {CLAIMED_FLOPS / TERA:.0f} TFLOP/s is {CLAIMED_FLOPS / best.rate:.2f} times that, and "
        f"{bound} ({best.bound / TERA:.0f})."
    )


def _too_large(claims: Claims) -> Iterable[str]:
    """What of a model does not fit whatever is recomputed."""
    room = Cluster.load("h100-dgx").memory / GIB
    for p in claims.throughput:
        resting = p.gib("parameters", "gradients")
        if p.words == "1F1B" and resting > room:
            yield (
                f"- Of **{p.model}** the weights and fp32 gradients of a rank alone take {resting:.1f} GiB, of "
                f"{room:.1f}: in this layout it runs with smaller gradients only."
            )


def _tensor(claims: Claims) -> Iterable[str]:
    yield """## "Tensor parallelism only inside a node"

The same GPUs, batch and model, 1F1B. Across nodes every collective of a layer crosses InfiniBand, and waits for it."""
    yield _table(
        ("model", "layout", "s a step", "TFLOP/s", "s waiting for tensor collectives", "share", "GiB", "fits 80 GB"),
        [
            (
                p.model,
                p.words,
                f"{p.found.step_s:.2f}",
                f"{p.rate / TERA:.0f}",
                f"{p.seconds('tp'):.2f}",
                f"{p.seconds('tp') / p.found.step_s:.0%}",
                f"{p.found.peak_gib:.1f}",
                "yes" if p.found.fits else "no",
            )
            for p in claims.tensor
        ],
    )
    inside, across = (
        {p.model: p.found.step_s for p in claims.tensor if p.words.startswith(f"tp={n} pp=4")} for n in (8, 16)
    )
    said = ", ".join(f"{across[model] / inside[model]:.2f} times as long ({model})" for model in inside)
    yield f"True: from tp=8 to tp=16, across two nodes, the step takes {said}."


def _recomputation(claims: Claims) -> Iterable[str]:
    yield f"""## "Recomputation costs 20-30 % of time for 70 % of activations"

GPT-3 175B at length {claims.recomputed[0].row.seq}, TP=8 PP=4 DP=16, 1F1B."""
    first: dict[str, Priced] = {}
    rows = []
    for p in claims.recomputed:
        base = first.setdefault(p.model, p)
        rows.append(
            (
                p.model,
                p.words,
                f"{p.found.step_s:.2f}",
                f"{p.found.step_s / base.found.step_s - 1:+.1%}",
                f"{_activations(p):.1f}",
                f"{_activations(p) / _activations(base) - 1:+.0%}",
            )
        )
    yield _table(("attention", "recomputed", "s a step", "time", "GiB of activations", "activations"), rows)
    yield """The rule mixes two. Recomputing only the attention's core takes off most of what scores keep for little
time, where scores are kept; flash attention has taken that off already. Recomputing everything takes off nearly all
and costs a forward, collectives included."""


def _activations(p: Priced) -> float:
    return p.gib("activations", "recompute")


def _zero(claims: Claims) -> Iterable[str]:
    ranks = claims.zero[0].row.dp
    elements = model_parameters(claims.zero[0].row)
    yield f"""## ZeRO: 16 bytes a parameter, and what of them is divided

Weights and gradients in bf16, AdamW's two moments and the master copy in fp32: 2 + 2 + 12 bytes. The case of the paper
(Rajbhandari et al. 2020, figure 1): 7.5 billion parameters on {ranks} GPUs. Here {elements / GIGA:.2f} billion on
{ranks} H100s, all recomputed; n = {ranks}. *Model* is what a rank holds of states at its peak, the weights that are
gathered at their use and the buffers of their gradients included; the peak has activations too."""
    yield _table(
        ("stage", "bytes a parameter", "of 7.5B, GB", "paper, GB", "model, GB", "peak, GiB", "s a step"),
        [
            (
                stage,
                f"{ZERO_BYTES[stage]} = {zero_bytes(stage, ranks):.4g}",
                f"{7.5 * zero_bytes(stage, ranks):.1f}",
                f"{ZERO_PAPER[stage]:g}",
                f"{p.gib(*STATES) * GIB / GIGA:.1f}",
                f"{p.found.peak_gib:.1f}",
                f"{p.found.step_s:.3f}",
            )
            for stage, p in enumerate(claims.zero)
        ],
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table.

    >>> print(_table(("a", "b"), [(1, "x")]))
    | a | b |
    |---|---|
    | 1 | x |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        f"|{'|'.join(line)}|" if line[0] == "---" else f"| {' | '.join(map(str, line))} |" for line in lines
    )
