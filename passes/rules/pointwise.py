"""Elementwise ops: every dim of the result is a factor, and of each operand that is broadcast to it.

The ops are those that torch itself tags as pointwise, and the casts, copies and composite forms it does not tag.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.facts import RELAXED
from autopar.passes.rules.core import Dims, Rule, factors
from autopar.passes.rules.signature import NEVER, Call, broadcast, plain, read, shape_of

aten = torch.ops.aten

# Jointly linear groups of argument names. An op that is not here is linear in none of its operands.
LINEAR: dict[str, tuple[tuple[str, ...], ...]] = {
    "add.Tensor": (("self", "other"),),
    "sub.Tensor": (("self", "other"),),
    "rsub.Tensor": (("self", "other"),),
    "subtract.Tensor": (("self", "other"),),
    "mul.Tensor": (("self",), ("other",)),
    "multiply.Tensor": (("self",), ("other",)),
    "mul.Scalar": (("self",),),
    "div.Tensor": (("self",),),
    "div.Scalar": (("self",),),
    "true_divide.Tensor": (("self",),),
    "divide.Tensor": (("self",),),
    "neg.default": (("self",),),
    "negative.default": (("self",),),
    "positive.default": (("self",),),
    "deg2rad.default": (("self",),),
    "rad2deg.default": (("self",),),
    "lerp.Scalar": (("self", "end"),),
    "lerp.Tensor": (("self", "end"),),
    "addcmul.default": (("self", "tensor1"), ("self", "tensor2")),
    "addcdiv.default": (("self", "tensor1"),),
    "where.self": (("self", "other"),),
    "masked_fill.Tensor": (("self", "value"),),
    "copy.default": (("src",),),
    "fill.Tensor": (("value",),),
    "to.dtype": (("self",),),
    "to.dtype_layout": (("self",),),
    "to.device": (("self",),),
    "to.other": (("self",),),
    "type_as.default": (("self",),),
    "_to_copy.default": (("self",),),
    "clone.default": (("self",),),
    "contiguous.default": (("self",),),
    "alias.default": (("self",),),
    "detach.default": (("self",),),
    "lift_fresh_copy.default": (("self",),),
    "dropout.default": (("input",),),
    "alpha_dropout.default": (("input",),),
    "feature_dropout.default": (("input",),),
    "conj.default": (("self",),),
    "conj_physical.default": (("self",),),
    "_conj.default": (("self",),),
    "resolve_conj.default": (("self",),),
    "resolve_neg.default": (("self",),),
    "real.default": (("self",),),
    "imag.default": (("self",),),
    "complex.default": (("real", "imag"),),
    "alias_copy.default": (("self",),),
    "detach_copy.default": (("self",),),
}

# Elementwise, and not tagged so.
UNTAGGED = """
    rsub.Tensor subtract.Tensor subtract.Scalar multiply.Tensor multiply.Scalar divide.Tensor divide.Scalar
    negative.default absolute.default masked_fill.Tensor copy.default to.dtype to.dtype_layout to.device to.other
    type_as.default _to_copy.default contiguous.default alias.default detach.default lift_fresh_copy.default
    conj.default _conj.default resolve_conj.default resolve_neg.default real.default imag.default
    where.ScalarOther where.ScalarSelf where.Scalar __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar
    floor_divide.default floor_divide.Scalar maximum.default minimum.default max.other min.other fmax.default
    fmin.default silu.default hardswish.default log_sigmoid.default relu6.default prelu.default isclose.default
    float_power.Tensor_Tensor float_power.Tensor_Scalar float_power.Scalar not_equal.Tensor not_equal.Scalar
    greater.Tensor greater.Scalar greater_equal.Tensor greater_equal.Scalar less.Tensor less.Scalar
    less_equal.Tensor less_equal.Scalar arctan2.default bucketize.Tensor nan_to_num.default isreal.default
    special_expit.default special_erf.default special_erfc.default special_log1p.default special_expm1.default
    special_exp2.default special_logit.default special_gammaln.default special_digamma.default
    special_xlogy.default special_sinc.default special_round.default fill.Scalar fill.Tensor zero.default
    threshold.default fix.default
    erfinv.default clamp.default clamp.Tensor complex.default polar.default alias_copy.default detach_copy.default
    isin.Tensor_Tensor isin.Tensor_Scalar
"""

DROPOUTS = ("dropout.default", "alpha_dropout.default", "feature_dropout.default")


def pointwise(node: fx.Node) -> Rule | None:
    """``x[a b], y[b] -> z[a b]``."""
    call = read(node)
    name = _name(node.target)
    if name in DROPOUTS and call["train"] and call["p"] > 0 and RELAXED not in node.meta:
        return None  # draws random numbers
    outs = call.results()
    out = outs[0]
    if out is None or any(o is None or o.shape != out.shape for o in outs):
        return None
    result = plain("d", out.shape)
    named = {n: _operand(name, n, call, result, tuple(out.shape)) for n in call.slots if call.has(n)}
    return call.rule([result] * len(outs), named, linear=_linear(name, call))


def _operand(name: str, argument: str, call: Call, result: Dims, shape: tuple[int, ...]) -> Dims:
    own = shape_of(call[argument])
    if name in ("type_as.default", "to.other") and argument == "other":  # only its type is read
        return result if own == shape else (NEVER,) * len(own)
    if name == "prelu.default" and argument == "weight":
        return (result[1],) if own and own[0] > 1 else (NEVER,) * len(own)
    if (name, argument) in (("bucketize.Tensor", "boundaries"), ("isin.Tensor_Tensor", "test_elements")):
        return (NEVER,) * len(own)
    return broadcast(own, result, shape)


def _linear(name: str, call: Call) -> list[frozenset[int]]:
    if name == "where.ScalarOther" and call["other"] == 0:
        return [call.group("self")]
    if name == "where.ScalarSelf" and call["self"] == 0:
        return [call.group("other")]
    if name == "masked_fill.Scalar" and call["value"] == 0:
        return [call.group("self")]
    if name == "add.Tensor" and not call.has("other") and call["other"] == 0:
        return [call.group("self")]  # Python's sum(losses) begins with 0 + the first
    groups = []
    for names in LINEAR.get(name, ()):
        if all(call.has(n) for n in names):  # x + 1 is not linear in x
            groups.append(call.group(*names))
    return groups


def _name(target: Any) -> str:
    return f"{target._schema.name.split('::')[1]}.{target._schema.overload_name or 'default'}"


def _overloads() -> list[Any]:
    """The functional aten ops that torch tags pointwise, then those of `UNTAGGED` and eval-mode dropouts."""
    found: dict[Any, None] = {}
    for packet in (getattr(aten, n) for n in dir(aten)):
        for op in _all(packet):
            if torch.Tag.pointwise in op.tags and _plain_schema(op):
                found[op] = None
    for name in (*UNTAGGED.split(), *DROPOUTS):
        packet_name, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet_name, None), overload, None)
        if op is not None:
            found[op] = None
    return list(found)


def _all(packet: object) -> list[Any]:
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, name or "default") for name in packet._overload_names]


def _plain_schema(op: Any) -> bool:
    random = torch.Tag.nondeterministic_seeded in op.tags
    return not op._schema.is_mutable and not random and "out" not in op._schema.overload_name


factors(*_overloads())(pointwise)
