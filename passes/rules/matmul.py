"""Products: linear, matmul and its relatives, einsum. A contracted factor leaves a partial result, and what is added to
the product (a bias) stands outside that sum."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.rules.core import Dim, Dims, Rule, factors
from autopar.passes.rules.signature import NEVER, broadcast, plain, read

aten = torch.ops.aten


@factors(aten.linear.default)
def linear(node: fx.Node) -> Rule:
    """``x[... i], w[o i], b[o] -> y[... o]``."""
    call = read(node)
    x, w = call.shape("input"), call.shape("weight")
    lead = plain("b", x[:-1])
    i, out = _one("i", w[-1]), tuple(_one("o", n) for n in w[:-1])
    return call.rule(
        (*lead, *out),
        {"input": (*lead, i), "weight": (*out, i), "bias": out},
        outside={"bias": ("i",)},
        linear=[call.group("input", "bias"), call.group("weight", "bias")],
    )


@factors(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default, aten.vdot.default)
def matmul(node: fx.Node) -> Rule:
    """``x[... m k], y[... k n] -> z[... m n]``, batch dims broadcast, vectors without m or n."""
    call = read(node)
    left = "self"
    right = next(n for n in ("other", "mat2", "vec", "tensor") if n in call.slots)
    x, y = call.shape(left), call.shape(right)
    out = tuple(call.results()[0].shape)  # type: ignore[union-attr]
    k = _one("k", x[-1])
    m = (_one("m", x[-2]),) if len(x) > 1 else ()
    n = (_one("n", y[-1]),) if len(y) > 1 else ()
    batch_shape = out[: len(out) - len(m) - len(n)]
    batch = plain("b", batch_shape)
    return call.rule(
        (*batch, *m, *n),
        {
            left: (*broadcast(x[:-2], batch, batch_shape), *m, k),
            right: (*broadcast(y[:-2], batch, batch_shape), k, *n),
        },
        linear=[call.group(left), call.group(right)],
    )


@factors(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def product_and_sum(node: fx.Node) -> Rule:
    """``c[b m n], x[b m k], y[b k n] -> z[b m n]``; c is broadcast and outside the sum over k."""
    call = read(node)
    left = next(n for n in ("mat1", "batch1", "mat") if n in call.slots)
    right = next(n for n in ("mat2", "batch2", "vec") if n in call.slots)
    x, y = call.shape(left), call.shape(right)
    b = plain("b", x[:-2])
    m, k = _one("m", x[-2]), _one("k", x[-1])
    n = (_one("n", y[-1]),) if right != "vec" else ()
    result = (*b, m, *n)
    out = tuple(call.results()[0].shape)  # type: ignore[union-attr]
    return call.rule(
        result,
        {"self": broadcast(call.shape("self"), result, out), left: (*b, m, k), right: (*b, k, *n)},
        outside={"self": ("k",)},
        linear=[call.group("self", left), call.group("self", right)],
    )


@factors(aten.addbmm.default)
def summed_products(node: fx.Node) -> Rule:
    """``c[m n], x[b m k], y[b k n] -> z[m n]``; c is broadcast and outside the sums over b and k."""
    call = read(node)
    (b, m, k), n = call.shape("batch1"), call.shape("batch2")[-1]
    left, right = (_one("b", b), _one("m", m), _one("k", k)), (_one("b", b), _one("k", k), _one("n", n))
    result = (_one("m", m), _one("n", n))
    return call.rule(
        result,
        {"self": broadcast(call.shape("self"), result, (m, n)), "batch1": left, "batch2": right},
        outside={"self": ("b", "k")},
        linear=[call.group("self", "batch1"), call.group("self", "batch2")],
    )


@factors(aten.addr.default)
def outer_and_sum(node: fx.Node) -> Rule:
    """``c[m n], x[m], y[n] -> z[m n]``; c is broadcast."""
    call = read(node)
    (m,), (n,) = call.shape("vec1"), call.shape("vec2")
    result = (_one("m", m), _one("n", n))
    return call.rule(
        result,
        {"self": broadcast(call.shape("self"), result, (m, n)), "vec1": result[:1], "vec2": result[1:]},
        linear=[call.group("self", "vec1"), call.group("self", "vec2")],
    )


@factors(aten.outer.default, aten.ger.default)
def outer(node: fx.Node) -> Rule:
    """``x[m], y[n] -> z[m n]``."""
    call = read(node)
    m, n = _one("m", *call.shape("self")), _one("n", *call.shape("vec2"))
    return call.rule((m, n), {"self": (m,), "vec2": (n,)}, linear=[call.group("self"), call.group("vec2")])


@factors(aten.einsum.default)
def einsum(node: fx.Node) -> Rule | None:
    """What the equation says: every letter is a factor; one that stands twice in a term (a diagonal) is whole."""
    call = read(node)
    terms, _, out = call["equation"].replace(" ", "").partition("->")
    inputs = terms.split(",")
    if "->" not in call["equation"]:
        letters = sorted({c for t in inputs for c in t if c != "."})
        out = ("..." if "..." in terms else "") + "".join(c for c in letters if terms.count(c) == 1)
    shapes = [tuple(n.meta["val"].shape) for n in call["tensors"]]
    spread = max((len(s) - len(t.replace("...", "")) for t, s in zip(inputs, shapes)), default=0)
    dims = [_term(t, s, spread) for t, s in zip(inputs, shapes)]
    result_shape = tuple(call.results()[0].shape)  # type: ignore[union-attr]
    result = _term(out, result_shape, spread if "..." in out else 0)
    if "..." in terms and "..." not in out:
        return None
    repeated = {c for t in inputs for c in t if c != "." and t.count(c) > 1}
    return call.rule(result, {"tensors": dims}, linear=[frozenset({i}) for i in range(len(dims))], whole=repeated)


@factors(aten.bilinear.default)
def bilinear(node: fx.Node) -> Rule:
    """``x[... i], y[... j], w[o i j], b[o] -> z[... o]``."""
    call = read(node)
    w = call.shape("weight")
    lead, o, i, j = plain("b", call.shape("input1")[:-1]), _one("o", w[0]), _one("i", w[1]), _one("j", w[2])
    return call.rule(
        (*lead, o),
        {"input1": (*lead, i), "input2": (*lead, j), "weight": (o, i, j), "bias": (o,)},
        outside={"bias": ("i", "j")},
        linear=[call.group(n, "bias") for n in ("input1", "input2", "weight")],
    )


def _term(term: str, shape: tuple[int, ...], spread: int) -> Dims:
    """Dims of one term of an equation; the dims of an ellipsis are aligned on the right and named by their place."""
    names: list[str] = []
    before, dots, after = term.partition("...")
    count = len(shape) - len(before) - len(after)
    names = [*before, *(f"_{spread - count + j}" for j in range(count if dots else 0)), *after]
    return tuple(_one(name, n) for name, n in zip(names, shape, strict=True))


def _one(name: str, n: int) -> Dim:
    return Dim((name,)) if n > 1 else NEVER
