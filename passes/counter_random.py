"""PREPARE: random numbers are drawn by a counter, so that they do not depend on the plan."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.passes.facts import RELAXED, _source, call
from autopar.passes.means_to_sums import NARROW, arguments
from autopar.runtime.counter_random import SEEDED
from autopar.runtime.opaque import seeded

aten, ops = torch.ops.aten, torch.ops.autopar
Made = fx.Node | Sequence[fx.Node]

ALPHA = 1.7580993408473766  # what selu comes to at minus infinity, without its sign
DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def counter_random(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every active random op by ``autopar.dropout`` or ``autopar.uniform`` and ordinary ops. Each has a number
    ``draw``, counted in the order of the captured graph, by which it draws whatever becomes of the graph.

    Attention with dropout is taken apart into its products, for a fused kernel cannot know the place of an element in
    the whole; recurrent layers are taken apart between layers. Ops that write in place write what was drawn.

    Where ``gm.meta["dropout"]`` is ``"per-rank"``, dropout and attention stay as they are, marked `RELAXED`.

    Raises:
        AutoparError: an op that draws random numbers in a way that is not known here.

    Example:
        ``dropout(x, 0.1, True)`` -> ``autopar.dropout(x, 0.1, draw=0)``
    """
    graph, numbers = gm.graph, itertools.count()
    relaxed, masks = gm.meta.get("dropout") == "per-rank", dict[tuple[int, int], fx.Node]()
    for node in list(graph.nodes):
        if not is_random(node):
            continue
        if relaxed and node.target in SEEDED:
            node.meta[RELAXED] = True
            continue
        with graph.inserting_before(node):
            made = _rewrite(Draw(graph, node, numbers, masks))
        if isinstance(made, fx.Node):
            node.replace_all_uses_with(made)
        for user in list(node.users):
            assert user.target is operator.getitem and not isinstance(made, fx.Node)
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    graph.lint()
    gm.recompile()
    return gm


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers: dropout with p > 0 in training does, attention without dropout does not."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments(node)
    off = "drop" in target._schema.name and given.get("p") == 0
    off = off or given.get("dropout") == 0 or given.get("dropout_p") == 0
    return not off and given.get("train") is not False and given.get("training") is not False


class Draw:
    """Makes nodes in the place of ``node``; ``given``: its arguments by name; ``name``: its own, without underscore;
    ``masks``: causal ones of the graph so far, by numbers of queries and keys."""

    def __init__(
        self, graph: fx.Graph, node: fx.Node, numbers: Iterator[int], masks: dict[tuple[int, int], fx.Node]
    ) -> None:
        self.graph, self.node, self.numbers, self.masks = graph, node, numbers, masks
        self.given = arguments(node)
        self.name = node.target._schema.name.split("::")[1].rstrip("_")  # type: ignore[union-attr]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, target, args, kwargs, like=self.node)

    @property
    def first(self) -> fx.Node:
        """The first argument, which has another name where it is written."""
        assert isinstance(self.node.args[0], fx.Node)
        return self.node.args[0]

    def item(self, of: fx.Node, index: int) -> fx.Node:
        """One result of an op that has several."""
        return self(operator.getitem, of, index)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``x`` in another type, where it has not this one."""
        return x if x.meta["val"].dtype == dtype else self(aten.to.dtype, x, dtype)

    def dropout(self, x: fx.Node, p: float) -> fx.Node:
        return self(ops.dropout.default, x, float(p), draw=next(self.numbers))

    def uniform(self, size: Sequence[int], dtype: torch.dtype = torch.float32, like: fx.Node | None = None) -> fx.Node:
        """Numbers in [0, 1), float32 or float64; ``like``: a tensor of this size, whose layouts they may follow."""
        if like is not None:
            like = self(aten.detach.default, like)
        device = torch.device("cpu") if like is None else None
        draw = next(self.numbers)
        return self(ops.uniform.default, list(size), like, dtype=dtype, device=device, draw=draw)

    def kept(self, size: Sequence[int], probability: float, like: fx.Node | None = None) -> fx.Node:
        """Booleans that are true with a probability; the same ones whatever the precision of the graph."""
        return self(aten.lt.Scalar, self.uniform(size, like=like), probability)


# -- dropout ---------------------------------------------------------------------------------------------------------


def _dropout(draw: Draw) -> fx.Node:
    return draw.dropout(draw.first, draw.given["p"])


def _native_dropout(draw: Draw) -> Made:
    x, p = draw.first, draw.given["p"]
    kept = draw.kept(_shape(x), 1 - p, x)
    return draw(aten.mul.Tensor, x, _noise(draw, kept, p)), kept


def _feature_dropout(draw: Draw) -> fx.Node:
    x, p = draw.first, draw.given["p"]
    return draw(aten.mul.Tensor, x, _noise(draw, draw.kept(_features(x), 1 - p), p))


def _noise(draw: Draw, kept: fx.Node, p: float) -> fx.Node:
    """What dropout multiplies by: 0, or 1 / (1 - p)."""
    noise = draw.cast(kept, draw.first.meta["val"].dtype)
    return draw(aten.div.Tensor, noise, 1 - p) if p < 1 else noise


def _alpha_dropout(draw: Draw) -> fx.Node:
    """What is dropped becomes -ALPHA; then mean and variance are put back."""
    x, p = draw.first, draw.given["p"]
    if p == 1:
        return draw(aten.mul.Tensor, x, 0)
    scale = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p))
    kept = draw.kept(_features(x), 1 - p) if draw.name.startswith("feature") else draw.kept(_shape(x), 1 - p, x)
    noise = draw.cast(kept, x.meta["val"].dtype)
    shift = draw(aten.mul.Tensor, draw(aten.sub.Tensor, noise, 1), ALPHA * scale)
    shift = draw(aten.add.Tensor, shift, ALPHA * scale * p)
    return draw(aten.add.Tensor, draw(aten.mul.Tensor, x, draw(aten.mul.Tensor, noise, scale)), shift)


def _features(x: fx.Node) -> list[int]:
    """One number a row and channel."""
    shape = _shape(x)
    return [*shape[:2], *(1 for _ in shape[2:])]


def _rrelu(draw: Draw) -> fx.Node:
    x, lower, upper = (draw.given[name] for name in ("self", "lower", "upper"))
    slope = _spread(draw, _unit(draw, _shape(x), x.meta["val"].dtype, x), lower, upper)
    return draw(aten.where.self, draw(aten.gt.Scalar, x, 0), x, draw(aten.mul.Tensor, x, slope))


# -- tensors of random numbers ---------------------------------------------------------------------------------------


def _unit(draw: Draw, size: Sequence[int], dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
    """Numbers in [0, 1) of any float type; a narrow one has as many digits as it holds."""
    if dtype not in NARROW:
        return draw.uniform(size, dtype, like)
    steps = 2 ** DIGITS[dtype]
    whole = draw(aten.floor.default, draw(aten.mul.Tensor, draw.uniform(size, like=like), steps))
    return draw.cast(draw(aten.div.Tensor, whole, steps), dtype)


def _spread(draw: Draw, unit: fx.Node, low: float, high: float) -> fx.Node:
    """From [0, 1) to [low, high)."""
    return draw(aten.add.Tensor, draw(aten.mul.Tensor, unit, high - low), low)


def _positive(draw: Draw, size: Sequence[int], dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
    """Numbers in (0, 1), float32 or float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return draw(aten.clamp.default, draw.uniform(size, wide, like), 2.0 ** (-1 - DIGITS[wide]))


def _gauss(draw: Draw, size: Sequence[int], dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
    """Numbers of the standard normal distribution, float32 or float64."""
    centred = _spread(draw, _positive(draw, size, dtype, like), -1, 1)
    return draw(aten.mul.Tensor, draw(aten.erfinv.default, centred), math.sqrt(2))


def _what(draw: Draw) -> tuple[list[int], torch.dtype, fx.Node | None]:
    """Size and type of what is drawn, and a tensor of that size, where there is one."""
    val, own = draw.node.meta["val"], draw.given.get("self")
    same = isinstance(own, fx.Node) and _shape(own) == list(val.shape)
    return list(val.shape), val.dtype, own if same else None


def _rand(draw: Draw) -> fx.Node:
    return _unit(draw, *_what(draw))


def _uniform(draw: Draw) -> fx.Node:
    return _spread(draw, _unit(draw, *_what(draw)), draw.given["from"], draw.given["to"])


def _randn(draw: Draw) -> fx.Node:
    return _gauss(draw, *_what(draw))


def _normal(draw: Draw) -> fx.Node:
    mean, std = draw.given["mean"], draw.given["std"]
    return draw(aten.add.Tensor, draw(aten.mul.Tensor, _gauss(draw, *_what(draw)), std), mean)


def _log_normal(draw: Draw) -> fx.Node:
    return draw(aten.exp.default, _normal(draw))


def _exponential(draw: Draw) -> fx.Node:
    minus = draw(aten.log.default, _positive(draw, *_what(draw)))
    return draw(aten.div.Tensor, minus, -draw.given["lambd"])


def _geometric(draw: Draw) -> fx.Node:
    trials = draw(aten.div.Tensor, draw(aten.log.default, _positive(draw, *_what(draw))), math.log1p(-draw.given["p"]))
    return draw(aten.clamp.default, draw(aten.ceil.default, trials), 1)


def _cauchy(draw: Draw) -> fx.Node:
    angle = _spread(draw, _positive(draw, *_what(draw)), -math.pi / 2, math.pi / 2)
    return draw(
        aten.add.Tensor, draw(aten.mul.Tensor, draw(aten.tan.default, angle), draw.given["sigma"]), draw.given["median"]
    )


def _bernoulli(draw: Draw) -> fx.Node:
    own = draw.given["self"]
    p = draw.given.get("p", own)
    if not isinstance(p, fx.Node):
        return draw.kept(_shape(own), p, own)
    wide = torch.float64 if p.meta["val"].dtype == torch.float64 else torch.float32
    return draw(aten.lt.Tensor, draw.uniform(_shape(own), wide, own), p)


def _randint(draw: Draw) -> fx.Node:
    """Whole numbers in [low, high), of 53 bits. ``random_`` calls the bound ``to``; a ``from`` cannot be traced."""
    size, _, like = _what(draw)
    low = draw.given.get("low", 0)
    high = draw.given.get("high", draw.given.get("to"))
    if not isinstance(high, int):
        raise _refusal(draw.node, "without bounds that are numbers", "Use torch.randint(low, high, size)")
    steps = draw(aten.mul.Tensor, draw.uniform(size, torch.float64, like), high - low)
    return draw(aten.add.Tensor, draw(aten.floor.default, steps), low)


def _randperm(draw: Draw) -> fx.Node:
    return draw(aten.argsort.default, draw.uniform([draw.given["n"]], torch.float64))


def _multinomial(draw: Draw) -> fx.Node:
    """Without replacement the largest of p / exponential; with it where the running sum passes a uniform number."""
    p, count = draw.given["self"], draw.given["num_samples"]
    shape, dtype = _shape(p), p.meta["val"].dtype
    if not draw.given["replacement"]:
        log = draw(aten.log.default, _positive(draw, shape, dtype, p))
        return draw.item(draw(aten.topk.default, draw(aten.div.Tensor, p, draw(aten.neg.default, log)), count), 1)
    sums = draw(aten.cumsum.default, p, -1)
    wanted = draw.uniform([*shape[:-1], count], torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = draw(aten.mul.Tensor, wanted, draw(aten.slice.Tensor, sums, -1, shape[-1] - 1, shape[-1]))
    found = draw(aten.searchsorted.Tensor, sums, draw.cast(wanted, sums.meta["val"].dtype), right=True)
    return draw(aten.clamp.default, found, None, shape[-1] - 1)


# -- dropout inside of larger ops ------------------------------------------------------------------------------------


def _attention(draw: Draw) -> fx.Node:
    """``dropout(softmax(q k^T scale + mask)) v``, the softmax of half precision in float32."""
    q, k, v = (draw.given[name] for name in ("query", "key", "value"))
    shape, dtype = _shape(q), q.meta["val"].dtype
    if draw.given["enable_gqa"]:
        k, v = (_repeated(draw, x, shape[-3]) for x in (k, v))
    scale = draw.given["scale"]
    q = draw(aten.mul.Tensor, q, 1 / math.sqrt(shape[-1]) if scale is None else scale)
    scores = draw(aten.matmul.default, q, draw(aten.transpose.int, k, -2, -1))
    mask, softmax = draw.given["attn_mask"], aten.softmax.int
    if draw.given["is_causal"]:
        scores = _masked(draw, scores, _causal(draw, shape[-2], _shape(k)[-2]))
    elif mask is not None:
        scores, softmax = _masked(draw, scores, mask), aten._safe_softmax.default  # a row that sees nothing is zeros
    scores = draw.cast(scores, torch.float32) if dtype in NARROW else scores
    weights = draw.cast(draw(softmax, scores, -1), dtype)
    return draw(aten.matmul.default, draw.dropout(weights, draw.given["dropout_p"]), v)


def _masked(draw: Draw, scores: fx.Node, mask: fx.Node) -> fx.Node:
    if mask.meta["val"].dtype != torch.bool:
        return draw(aten.add.Tensor, scores, mask)
    return draw(aten.where.ScalarOther, mask, scores, -math.inf)


def _causal(draw: Draw, queries: int, keys: int) -> fx.Node:
    """Whether a query sees a key: those up to its own number."""
    if (queries, keys) not in draw.masks:
        i, j = (draw(aten.arange.default, n, device=torch.device("cpu")) for n in (queries, keys))
        draw.masks[queries, keys] = draw(aten.ge.Tensor, draw(aten.unsqueeze.default, i, 1), j)
    return draw.masks[queries, keys]


def _repeated(draw: Draw, x: fx.Node, heads: int) -> fx.Node:
    """Every key or value head once for each query head that reads it."""
    *lead, own, length, width = _shape(x)
    if own == heads:
        return x
    spread = draw(aten.unsqueeze.default, x, -3)
    spread = draw(aten.expand.default, spread, [*lead, own, heads // own, length, width])
    return draw(aten.reshape.default, spread, [*lead, heads, length, width])


def _recurrent(draw: Draw) -> Made:
    """Layer by layer, with dropout between."""
    given, layers = draw.given, draw.given["num_layers"]
    if "input" not in given:
        raise _refusal(draw.node, "between layers on packed sequences", "Use padded ones")
    directions = 2 if given["bidirectional"] else 1
    states = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
    per_layer = len(given["params"]) // layers
    x, last = given["input"], []
    for layer in range(layers):
        if layer:
            x = draw.dropout(x, given["dropout"])
        hx = [draw(aten.slice.Tensor, s, 0, layer * directions, (layer + 1) * directions) for s in states]
        params = list(given["params"][layer * per_layer : (layer + 1) * per_layer])
        how = (given["has_biases"], 1, 0.0, given["train"], given["bidirectional"], given["batch_first"])
        made = draw(draw.node.target, x, hx if draw.name == "lstm" else hx[0], params, *how)
        x = draw.item(made, 0)
        last.append([draw.item(made, 1 + i) for i in range(len(states))])
    return x, *(draw(aten.cat.default, list(each)) for each in zip(*last, strict=True))


def _opaque(draw: Draw) -> Made:
    """All numbers of a call follow from its own, whatever they are for."""
    made = draw(seeded, *draw.node.args, draw=next(draw.numbers))
    return [draw.item(made, i) for i in range(len(draw.node.meta["val"]))]


REWRITES: dict[str, Callable[[Draw], Made]] = {
    "dropout": _dropout, "native_dropout": _native_dropout, "feature_dropout": _feature_dropout,
    "alpha_dropout": _alpha_dropout, "feature_alpha_dropout": _alpha_dropout, "rrelu": _rrelu,
    "rand": _rand, "rand_like": _rand, "uniform": _uniform, "randn": _randn, "randn_like": _randn,
    "normal": _normal, "log_normal": _log_normal, "exponential": _exponential, "geometric": _geometric,
    "cauchy": _cauchy, "bernoulli": _bernoulli, "randint": _randint, "randint_like": _randint, "random": _randint,
    "randperm": _randperm, "multinomial": _multinomial, "scaled_dot_product_attention": _attention,
    "lstm": _recurrent, "gru": _recurrent, "rnn_tanh": _recurrent, "rnn_relu": _recurrent,
    "opaque_drawing": _opaque,
}  # fmt: skip


def _rewrite(draw: Draw) -> Made:
    rewrite = REWRITES.get(draw.name)
    if rewrite is None:
        raise _refusal(draw.node, "in a way that cannot be divided", "Draw with torch.rand and plain ops")
    made = rewrite(draw)
    if not isinstance(made, fx.Node):
        return made
    made = draw.cast(made, draw.node.meta["val"].dtype)
    if draw.node.target._schema.is_mutable:  # type: ignore[union-attr]
        return draw(aten.copy_.default, draw.node.args[0], made)
    return made


def _refusal(node: fx.Node, why: str, way_out: str) -> AutoparError:
    return AutoparError(f"{_source(node) or node.name}: {node.target} draws random numbers {why}. {way_out}.")


def _shape(x: fx.Node) -> list[int]:
    return list(x.meta["val"].shape)
