"""DTensors of a pipeline's stages: what would silently be of one stage alone, where the model is meant, is refused.

A rank has the gradients of its own stage. A norm over "all" of them, as `torch.nn.utils.clip_grad_norm_` takes it, is
that of one stage, so a `Gradient` has no norm. A parameter of another stage is an `Elsewhere`: a name and a shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError

aten = torch.ops.aten
NORMS = frozenset({aten.linalg_vector_norm, aten.norm, aten._foreach_norm})


class _OfStage(DTensor):
    """Computes as a DTensor; what is detached of one (``.data``) stays one."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            (own,) = args
            return type(own)(own._local_tensor.detach(), own._spec, requires_grad=False)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class Gradient(_OfStage):
    """The gradient of a parameter, of a pipeline. A norm over it raises AutoparError, but for one along dims."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        dims = (kwargs or {}).get("dim", args[2] if len(args) > 2 else None)
        if getattr(func, "overloadpacket", None) in NORMS and not (isinstance(dims, (list, tuple)) and dims):
            raise AutoparError(
                "norm of a gradient: of a pipeline a rank has the gradients of its own stage alone, so the norm would "
                "not be the model's. Use parallel.clip_grad_norm_(max_norm), or .grad.to_local() for one piece."
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


class Elsewhere(_OfStage):
    """A parameter that other stages hold. It has no gradient, whatever is assigned, so optimizers keep no state of it:
    one that no step moves on would be saved beside the true one."""

    @property
    def grad(self) -> Tensor | None:
        """None."""
        return None

    @grad.setter
    def grad(self, _: Tensor | None) -> None:
        """Nothing: here it has none."""


__all__ = ["Elsewhere", "Gradient"]
