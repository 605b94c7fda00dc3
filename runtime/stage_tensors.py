"""DTensors of a pipeline's stages: what would silently be of one stage, where the model is meant, is refused.

A rank has parameters and gradients of its own stages. A norm over "all" of them, as `torch.nn.utils.clip_grad_norm_`
takes it, would be that of a part of the model. A parameter of another stage is an `Elsewhere`: a name and a shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError

aten = torch.ops.aten
NORMS = frozenset({aten.linalg_vector_norm, aten.norm, aten._foreach_norm})


class _OfStage(DTensor):
    """Computes as a DTensor, but for a norm, which raises AutoparError unless it is along dims; what is detached of one
    (``.data``) stays one."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            (own,) = args
            return type(own)(own._local_tensor.detach(), own._spec, requires_grad=False)
        if getattr(func, "overloadpacket", None) in NORMS:
            dims = (kwargs or {}).get("dim", args[2] if len(args) > 2 else None)
            if not (isinstance(dims, (list, tuple)) and dims):
                raise AutoparError(
                    "norm: in a pipeline a rank has parameters and gradients of its own stage alone, so this would not "
                    "be the model's. Use parallel.clip_grad_norm_(max_norm), or to_local() for a piece."
                )
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = type(self)(self._local_tensor.detach().clone(), self._spec, requires_grad=self.requires_grad)
        memo[id(self)] = made
        return made


class Gradient(_OfStage):
    """The gradient of a parameter of a pipeline."""


class Elsewhere(_OfStage):
    """A parameter that other stages hold: it cannot be made whole here. It has no gradient, whatever is assigned, so
    optimizers keep no state of it: one that no step moves on would be saved beside the true one."""

    @property
    def grad(self) -> Tensor | None:
        """None."""
        return None

    @grad.setter
    def grad(self, _: Tensor | None) -> None:
        """Nothing: here it has none."""

    def full_tensor(self, *_: Any, **__: Any) -> NoReturn:
        """Raises AutoparError: the ranks that have pieces are others."""
        self._refuse("full_tensor")

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        """Raises AutoparError: the ranks that have pieces are others."""
        self._refuse("redistribute")

    def _refuse(self, what: str) -> NoReturn:
        raise AutoparError(
            f"{what}: a parameter of shape {tuple(self.shape)} is of another stage of the pipeline, and this rank has "
            "nothing of it. Use parallel.save_weights(folder) or autopar.save(path, parallel) for the whole model."
        )


__all__ = ["Elsewhere", "Gradient"]
