"""First values: of models that are built without any, computed or read by each rank where it owns them.

Two ways lead to a model without values. `deferred_init` runs its constructor and notes what it does; `compile` then
computes each rank's pieces. Or it is built under ``torch.device("meta")``, and `Parallel.init_weights` runs a function
of the module, or `Parallel.load_weights` reads a checkpoint. Either way values are those of one process, and no rank
holds the model.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from autopar.errors import AutoparError
from autopar.placed import Placed
from autopar.runtime.deferred import Value, record, remember
from autopar.runtime.mesh import Ranks
from autopar.runtime.parameters import compute, digest, lacking
from autopar.save_weights import SHARD
from autopar.weights import Loaded, read_weights, some

Init = Callable[[nn.Module], object]


def deferred_init(factory: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> nn.Module:
    """The model that ``factory(*args, **kwargs)`` makes, on the meta device; `compile` gives it the values that it
    would have after ``torch.manual_seed(seed)``, bit for bit, each rank computing its own pieces.

    The constructor runs once, unmodified, on every rank alike; it may draw, overwrite, cast, copy tensors from outside
    and ask for values. No generator of this process moves. Change the model inside ``factory``
    (``lambda: Net().bfloat16()``): what is done to it afterwards is refused. Numbers are those of a CPU, also where the
    ranks have GPUs.

    Raises AutoparError, one line, for a constructor that cannot be run so, and whatever the constructor raises.

    Example:
        >>> model = deferred_init(nn.Linear, 4, 2, seed=3)
        >>> model.weight.device.type, model.weight.shape
        ('meta', torch.Size([2, 4]))
    """
    model, recorder = record(lambda: factory(*args, **kwargs), seed)
    if not isinstance(model, nn.Module):
        raise AutoparError(f"deferred_init: the factory returned a {type(model).__name__}, not an nn.Module.")
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            value = recorder.value(tensor)
            if not tensor.is_meta:
                tensor.data = torch.empty_like(tensor.data, device="meta")
            remember(tensor, value)
    for module in model.modules():
        for name, held in vars(module).items():
            beside = name not in ("_parameters", "_buffers", "_modules") and any(_is_meta(a) for a in tree_iter(held))
            if beside:  # parameters and buffers: computed at once
                vars(module)[name] = tree_map(lambda a: recorder.real(a) if _is_meta(a) else a, held)
    return model


def _is_meta(a: object) -> bool:
    return isinstance(a, Tensor) and a.is_meta


def reset_parameters(model: nn.Module) -> None:
    """Initialise a model by what its modules offer, children first: ``reset_parameters`` or ``_reset_parameters``, as
    torch's own have; of a Hugging Face model its ``initialize_weights``, or an ``init_weights`` that needs no argument.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    >>> _ = nn.init.zeros_(model[0].weight)
    >>> reset_parameters(model)
    >>> bool(model[0].weight.any())
    True
    """
    for module in model.modules():
        for flagged in (module, *module.parameters(recurse=False), *module.buffers(recurse=False)):
            if getattr(flagged, "_is_hf_initialized", False):
                vars(flagged)["_is_hf_initialized"] = False
    seen: set[nn.Module] = set()
    for method in _resets(model, seen):
        method()


def _resets(module: nn.Module, seen: set[nn.Module]) -> Iterator[Callable[[], object]]:
    if module in seen:
        return
    seen.add(module)
    for name in ("initialize_weights", "init_weights"):
        method = getattr(module, name, None)
        if callable(method) and _takes_nothing(method):
            seen.update(module.modules())
            yield method
            return
    for child in module.children():
        yield from _resets(child, seen)
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method) and _takes_nothing(method):
            yield method
            return


def _takes_nothing(method: Callable[..., object]) -> bool:
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True


class Initialised(Placed):
    """Placed tensors that may have no values yet, and the ways to give them some."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        super().__init__(ranks)
        self._model = [model]  # in a list, so that nn.Module does not count it as its own
        self._ranks: Ranks | None = None
        self._complete = False

    def init_weights(self, init: Init | None = None, seed: int = 0) -> dict[str, str]:
        """Give every parameter and buffer the value that ``init(model)`` gives it in one process after
        ``torch.manual_seed(seed)``; each rank computes its own pieces.

        For a model on the meta device, in place. ``init`` (default: `autopar.initialise.reset_parameters`) works on the
        model itself, whose tensors have no values; what it does to them is noted, as by `deferred_init`. Returns the
        tensors of more than a megabyte that a rank had to make whole for a while, with the op that needs it
        (``orthogonal_``). Collective. Raises AutoparError for a model that has values, for a tensor that ``init``
        leaves without one, and where ranks differ.
        """
        names = self._names("init_weights")
        assert self._ranks is not None
        values = self._recorded("init_weights", init or reset_parameters, seed)
        noted = b"".join(value.recording.digest for value in values.values())
        every = self._ranks.gather_numbers([digest(noted)])
        other = next((rank for rank, number in enumerate(every) if number != every[0]), None)
        if other is not None:
            raise AutoparError(
                f"init_weights: init does something else on rank {other} than on rank 0 (another seed, or values of "
                "numpy). Make it the same on every rank."
            )
        return compute(names, values)

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> Loaded:
        """Read parameters and buffers from a checkpoint of the model alone, in place; every rank reads what it owns.

        ``path``: a ``.safetensors`` file, a Hugging Face folder (``model.safetensors``, or several with their index) or
        a folder of torch.distributed.checkpoint. Tied weights may be missing, and the prefix of a model's base may be.
        Buffers that no checkpoint holds are computed by `autopar.initialise.reset_parameters` where they have no value.
        With ``strict=False`` names may be missing or unexpected, and other dtypes are cast.

        Returns what was missing and unexpected, as ``load_state_dict`` does. Collective. Raises AutoparError, with the
        names, for what does not fit, and then nothing is changed.
        """
        names = self._names("load_weights")
        assert self._ranks is not None
        failed: Exception | None = None
        try:
            loaded = read_weights(path, names, getattr(self._model[0], "base_model_prefix", ""), strict)
            self._compute_buffers("load_weights")
        except Exception as error:
            failed = error
        every = self._ranks.gather_numbers([int(failed is not None)])
        if failed is not None:
            raise failed
        other = next((rank for rank, (bad,) in enumerate(every) if bad), None)
        if other is not None:
            raise AutoparError(f"load_weights {path}: rank {other} failed. Look at its own error first.")
        return loaded

    def _compute_buffers(self, what: str) -> None:
        """Give values to buffers that no checkpoint holds."""
        names = self._names(what)
        left = set(lacking(names)) - names.state_dict().keys()
        if left:
            values = self._recorded(what, reset_parameters, 0)
            compute(names, {name: values[name] for name in values if name in left})

    def _recorded(self, what: str, init: Init, seed: int) -> Mapping[str, Value]:
        model = self._model[0]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        real = next((name for name, t in tensors.items() if not t.is_meta), None)
        if real is not None:
            raise AutoparError(
                f"{what}: {real} has a value already (the model was not on the meta device). Initialise it before "
                "compile, or build it under torch.device('meta')."
            )
        _, recorder = record(lambda: init(model), seed)
        now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, was in tensors.items():
            if name not in now or (now[name].shape, now[name].dtype) != (was.shape, was.dtype):
                raise AutoparError(
                    f"{what}: init changes the shape or dtype of {name}. Write values into what is there."
                )
        return {name: recorder.value(now[name]) for name in tensors}

    def save_weights(self, folder: str | os.PathLike[str], shard_bytes: int = SHARD) -> None:
        """As `Placed.save_weights`. Raises AutoparError, too, where a tensor has no value yet."""
        self.refuse_without_values("save_weights")
        super().save_weights(folder, shard_bytes)

    def refuse_without_values(self, what: str) -> None:
        """Raise AutoparError where a tensor has no value yet. Once all have, it costs nothing to ask again.
        Collective where there is a pipeline."""
        if self._complete or not self._held:
            return
        names = self._held[0]
        if not set(lacking(names)) & names.state_dict().keys():
            self._compute_buffers(what)
        left = lacking(names, self._ranks)
        if left:
            raise AutoparError(
                f"{what}: {some(left)} {'has' if len(left) == 1 else 'have'} no value yet (the model was built on the "
                "meta device). Call parallel.init_weights() or parallel.load_weights(path), or build it with "
                "autopar.deferred_init."
            )
        self._complete = True
