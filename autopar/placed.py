"""A model's names with their tensors placed on the ranks: what optimizers, checkpoints and users see of `Parallel`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.errors import AutoparError
from autopar.runtime.optimizer import by_name, local_optimizer
from autopar.runtime.parameters import is_here, local
from autopar.save_weights import SHARD, save_weights


class Placed(nn.Module):
    """Holds, once they are placed on ``ranks`` processes, the parameters and buffers of a model under its own names.

    Before that, whatever would show none of them raises AutoparError.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._for_ranks = ranks
        self._held: list[nn.Module] = []  # one: the tree of names; in a list, so that it is no submodule

    def _adopt(self, names: nn.Module) -> None:
        """Take over the names, so that they are this module's own; its methods keep precedence."""
        self._held.append(names.train(self.training))
        self._modules.update(names._modules)
        self._parameters.update(names._parameters)
        self._buffers.update(names._buffers)
        self._non_persistent_buffers_set |= names._non_persistent_buffers_set

    def _names(self, what: str) -> nn.Module:
        if not self._held:
            raise AutoparError(
                f"{what}: parameters exist once the model is captured on its ranks. Give compile args=, and launch "
                f"with torchrun --standalone --nproc-per-node {self._for_ranks} your_script.py"
            )
        return self._held[0]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters, DTensors. Raises AutoparError where the model is not captured on its ranks."""
        self._names("parameters")
        return super().parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with the model's own names. Raises AutoparError as `parameters` does."""
        self._names("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def optimizer(
        self, kind: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """``kind`` over these parameters, at the speed of plain tensors: see `autopar.runtime.optimizer`.

        ``params``: parameters, their names, or groups with these as ``"params"`` (default: all that train); ``options``
        as ``kind`` takes them. An elementwise optimizer works on this rank's pieces; one that needs the whole tensor
        (Muon, Adafactor) gathers one at a time, and its step is collective. Raises AutoparError for one whose step of
        one tensor depends on others; ``kind(parallel.parameters())`` then computes on DTensors.

        Example: ``parallel.optimizer(torch.optim.AdamW, [{"params": ["head.weight"], "lr": 1e-4}, ...], lr=1e-3)``.
        """
        self._names("optimizer")
        return local_optimizer(kind, by_name(self.named_parameters(), params), **options)

    def save_weights(self, folder: str | os.PathLike[str], shard_bytes: int = SHARD) -> None:
        """Write the whole model as safetensors, in the layout of Hugging Face: see `autopar.save_weights`. Collective.

        No rank holds more than one tensor whole. ``load_weights``, ``safetensors`` and ``from_pretrained`` (beside a
        ``config.json``) read it. Raises AutoparError where rank 0 cannot write.
        """
        self._names("save_weights")
        save_weights(self, folder, shard_bytes)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's keys; parameters as DTensors, which torch.distributed.checkpoint saves and loads under any plan.
        Raises AutoparError as `parameters` does."""
        self._names("state_dict")
        made: dict[str, Any] = super().state_dict(*args, **kwargs)
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load values in place: DTensors placed as here, or full tensors (of one process), the same on every rank."""
        if assign:
            raise AutoparError("load_state_dict: assign=True would take parameters from where they rest. Leave it out.")
        own = self._names("load_state_dict").state_dict()
        pieces = {name: _placed_as(own.get(name), value) for name, value in state_dict.items()}
        return super().load_state_dict(pieces, strict=strict)

    def get_submodule(self, target: str) -> nn.Module:
        """The submodule of that name in the model (it holds names, not code)."""
        return self._held[0].get_submodule(target) if target and self._held else super().get_submodule(target)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Placed:
        """``to``, ``cuda``, ``half`` and the like: nothing to do, or refused."""
        tensors = [*self.parameters(), *self.buffers()] if self._held else []
        for tensor in tensors:
            own = local(tensor.detach()) if isinstance(tensor, DTensor) else tensor
            if fn(own) is not own:
                raise AutoparError(
                    "to: parameters are placed by compile already, on their device and in the plan's dtypes. Cast the "
                    "model before compile."
                )
        return self


def _placed_as(own: object, value: Any) -> Any:
    """A full tensor as the piece of it that a parameter holds here; anything else as it is."""
    if not isinstance(own, DTensor) or isinstance(value, DTensor) or own.shape != getattr(value, "shape", None):
        return value
    if not is_here(own):
        return own
    return distribute_tensor(value.detach().to(own.device), own.device_mesh, own.placements, src_data_rank=None)
