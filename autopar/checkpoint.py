"""Checkpoints by `torch.distributed.checkpoint`: saved under one plan, loaded under any other, or by one process.

A checkpoint is a folder in the form that DCP's own users write: ``model`` is the state dict, ``optimizer`` the state by
FQN and the parameter groups (as `get_optimizer_state_dict` makes them), so plain ``dcp.load`` reads it. Beside them lie
``autopar``, the number of steps and the seed that random ops draw by, and ``extra``, what the user adds.

Example:
    ``autopar.save(path, parallel, optimizer, extra={"schedule": schedule.state_dict()})``, and in the next run, on
    other ranks, ``extra = autopar.load(path, parallel, optimizer)``.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.initialise import Initialised
from autopar.runtime.optimizer import kind_of
from autopar.runtime.parameters import is_here
from autopar.weights import some

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Path_ = str | os.PathLike[str]
Where = tuple[str | int, ...]  # a path inside the state dict
Saved = dict[Where, str]  # -> key in the checkpoint
Read = Mapping[Where, Any]


def save(path: Path_, model: nn.Module, optimizer: Optimizers = None, *, extra: Any = None) -> None:
    """Write a checkpoint into the folder ``path``, which is made, or whose checkpoint is replaced. Collective.

    ``model``: a `Parallel`, or a plain module in one process; ``optimizer``: one or several on its parameters;
    ``extra``: anything that `torch.save` takes, of which rank 0's counts (a schedule's state, a sampler's place). Every
    rank writes its own pieces. Raises AutoparError where the folder cannot be written, and for an optimizer of another
    model.
    """
    if isinstance(model, Initialised):
        model.refuse_without_values("save")
    optimizers = _listed(optimizer)
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    state: dict[str, Any] = {"model": model.state_dict(), "extra": buffer.getvalue()}
    if optimizers:
        state["optimizer"] = _optimizer_state(model, optimizers)
    kinds = ", ".join(kind_of(o).__name__ for o in optimizers)
    state["autopar"] = {"optimizer": kinds, **{name: getattr(model, name) for name in _drawn_by(model)}}
    with _one_line("save", path):
        write_state(state, storage_writer=FileSystemWriter(path), no_dist=not dist.is_initialized())


def load(path: Path_, model: nn.Module, optimizer: Optimizers = None) -> Any:
    """Read a checkpoint in place: parameters, buffers, states and options of the optimizer, steps and seed; returns
    ``extra``. Collective.

    Each rank reads its own pieces, whatever the plan, the number of ranks and the process that saved them. Without
    ``optimizer`` what is saved of one is left. Raises AutoparError, and leaves everything as it is, where there is no
    checkpoint, or it is one of another model or of another optimizer.
    """
    optimizers = _listed(optimizer)
    reader, metadata = _opened(path)
    saved: Saved = {tuple(where): key for key, where in (metadata.planner_data or {}).items()}
    own, names = model.state_dict(), _names(model)
    _check_model(path, own, saved, metadata)
    small = [key for where, key in saved.items() if where[0] in ("autopar", "extra") or where[1:2] == ("param_groups",)]
    facts = {key: _room(metadata, key, torch.device("cpu")) for key in small}
    template: dict[str, Any] = {saved["model", name]: value for name, value in own.items()}
    with _one_line("load", path):
        _read(facts, reader)
        found = {where: facts[key] for where, key in saved.items() if key in facts}
        groups = _groups(path, optimizers, names, found)
        states = _states(model, optimizers, saved, metadata)
        _read(template := template | {saved[where]: room for where, room in states.items()}, reader)
    if any(not isinstance(value, Tensor) for value in own.values()):  # a module with extra state of its own
        model.load_state_dict({name: template[saved["model", name]] for name in own})
    for each, options in zip(optimizers, groups, strict=True):
        _into(each, options, names, {where: template[saved[where]] for where in states})
    for name in _drawn_by(model):
        if ("autopar", name) in found:
            setattr(model, name, found["autopar", name])
    return torch.load(io.BytesIO(found["extra",]), weights_only=False) if ("extra",) in found else None


def _drawn_by(model: nn.Module) -> tuple[str, ...]:
    """What random ops of a `Parallel` draw by; a plain module draws from torch's own streams."""
    return tuple(name for name in ("steps", "seed") if isinstance(getattr(type(model), name, None), property))


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


# -- saving -----------------------------------------------------------------------------------------------------------


def _optimizer_state(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """The state by FQN and the groups of all optimizers, one after another."""
    names = _names(model)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held = [_name(names, p, "save", kind_of(optimizer)) for p in group["params"]]
            state |= {
                name: dict(optimizer.state[p])
                for name, p in zip(held, group["params"], strict=True)
                if p in optimizer.state and is_here(p)
            }
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({**options, "params": held})
    return {"state": state, "param_groups": groups}


def _name(names: Mapping[int, str], p: Tensor, who: str, kind: type) -> str:
    if id(p) not in names:
        raise AutoparError(
            f"{who}: {kind.__name__} has a parameter of shape {tuple(p.shape)} that is not the model's. Make it of "
            "model.parameters()."
        )
    return names[id(p)]


@contextmanager
def _one_line(who: str, path: Path_) -> Iterator[None]:
    """DCP without its warnings (no process group; an older checkpoint is replaced); its failures as one line."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.distributed is disabled, unavailable or uninitialized.*")
            warnings.filterwarnings("ignore", ".*Detected an existing checkpoint.*")
            yield
    except (CheckpointException, OSError) as error:
        failures = getattr(error, "failures", None) or {0: (error, None)}
        rank, (first, _) = min(failures.items())
        said = " ".join(str(first).split())[:200]
        raise AutoparError(
            f"{who} {path}: rank {rank} failed with {type(first).__name__}: {said}. Look at the folder and its disk."
        ) from error


# -- loading ----------------------------------------------------------------------------------------------------------


def _opened(path: Path_) -> tuple[FileSystemReader, Metadata]:
    if not (Path(path) / ".metadata").is_file():
        what = "is no checkpoint (it has no .metadata)" if Path(path).exists() else "there is no such folder"
        raise AutoparError(f"load {path}: {what}. Name a folder that autopar.save or torch's dcp.save has finished.")
    reader = FileSystemReader(path)
    with _one_line("load", path):
        return reader, reader.read_metadata()


def _read(template: dict[str, Any], reader: FileSystemReader) -> None:
    """Fill ``template``, by keys of the checkpoint."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    read_state(template, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())


def _room(metadata: Metadata, key: str, device: torch.device) -> Any:
    """A tensor to read ``key`` into; None where it is no tensor."""
    found = metadata.state_dict_metadata[key]
    if not isinstance(found, TensorStorageMetadata):
        return None
    return torch.empty(found.size, dtype=found.properties.dtype, device=device)


def _check_model(path: Path_, own: Mapping[str, Any], saved: Saved, metadata: Metadata) -> None:
    theirs = {str(where[1]): key for where, key in saved.items() if where[0] == "model"}
    another = f"load {path}: is a checkpoint of another model: "
    for names, others, has in ((own, theirs, "it has no"), (theirs, own, "the model has no")):
        absent = [name for name in names if name not in others]
        if absent:
            raise AutoparError(f"{another}{has} {some(absent)}. Build the model that was saved.")
    for name, value in own.items():
        found = metadata.state_dict_metadata[theirs[name]]
        if not isinstance(value, Tensor) or not isinstance(found, TensorStorageMetadata):
            continue
        if tuple(found.size) != tuple(value.shape):
            raise AutoparError(f"{another}{name} has shape {tuple(found.size)} there, {tuple(value.shape)} here.")
        if found.properties.dtype != value.dtype:
            raise AutoparError(
                f"load {path}: {name} is {found.properties.dtype} there and {value.dtype} here, which would round it. "
                "Cast the model before compile."
            )


def _groups(
    path: Path_, optimizers: list[torch.optim.Optimizer], names: Mapping[int, str], found: Read
) -> list[list[dict[str, Any]]]:
    """For every group of every optimizer the saved options, found by the parameters that it holds."""
    there: dict[int, dict[str, Any]] = {}
    for where, value in found.items():
        if where[:2] == ("optimizer", "param_groups"):
            there.setdefault(int(where[2]), {})[str(where[3])] = value
    if optimizers and not there:
        raise AutoparError(f"load {path}: holds no optimizer (it was saved without one). Leave the optimizer out.")
    kinds = ", ".join(kind_of(o).__name__ for o in optimizers)
    theirs = found.get(("autopar", "optimizer"), kinds)
    if optimizers and kinds != theirs:
        raise AutoparError(f"load {path}: was saved with {theirs}, here is {kinds}. Make the optimizer that was saved.")
    of = {name: i for i, group in there.items() for name in group["params"]}
    made: list[list[dict[str, Any]]] = []
    for optimizer in optimizers:
        made.append([])
        for group in optimizer.param_groups:
            held = [_name(names, p, "load", kind_of(optimizer)) for p in group["params"]]
            places = {of.get(name, -1) for name in held}
            place = min(places)
            if len(places) != 1 or place < 0 or len(there[place]["params"]) != len(held):
                raise AutoparError(
                    f"load {path}: the group of {kind_of(optimizer).__name__} with {held[0]} has other parameters than "
                    "when it was saved. Make the same groups."
                )
            made[-1].append(there[place])
    return made


def _states(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], saved: Saved, metadata: Metadata
) -> dict[Where, Any]:
    """Room for the saved states: tensors of a parameter's shape are placed as it is. None of parameters of other
    stages."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"] if is_here(p)}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in held}
    made: dict[Where, Any] = {}
    for where, key in saved.items():
        if where[:2] != ("optimizer", "state") or where[2] not in parameters:
            continue
        p, found = parameters[str(where[2])], metadata.state_dict_metadata[key]
        if isinstance(found, TensorStorageMetadata) and found.size and found.size == p.shape:
            made[where] = torch.empty_like(p, dtype=found.properties.dtype, requires_grad=False)
        else:  # a count of steps stays where optimizers make it
            made[where] = _room(metadata, key, torch.device("cpu") if where[3] == "step" else _device(p))
    return made


def _device(p: Tensor) -> torch.device:
    return p._local_tensor.device if isinstance(p, DTensor) else p.device


def _into(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    names: Mapping[int, str],
    read: Read,
) -> None:
    """Give an optimizer the states by FQN and the options of its groups, as torch's own ``load_state_dict`` does."""
    state: dict[str, dict[str, Any]] = {}
    for where, value in read.items():
        state.setdefault(str(where[2]), {})[str(where[3])] = value
    own = optimizer.state_dict()
    numbered: dict[int, dict[str, Any]] = {}
    for numbers, group in zip(own["param_groups"], optimizer.param_groups, strict=True):
        for number, p in zip(numbers["params"], group["params"], strict=True):
            if names[id(p)] in state:
                numbered[number] = state[names[id(p)]]
    listed = [
        {**there, **{k: here[k] for k in ("params", "param_names") if k in here}}
        for there, here in zip(groups, own["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": numbered, "param_groups": listed})


__all__ = ["load", "save"]
