"""The inputs of a captured model: which leaves are tensors, which have the batch, and the checks of later calls."""

from __future__ import annotations

import builtins
import enum
import inspect
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.trees import Tree, flatten, ordered_like, unflatten

CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    torch.dtype,
    torch.device,
    enum.Enum,
    type(...),
)


@dataclass(frozen=True)
class InputSpec:
    """One tensor input. ``name``: its placeholder; ``path``: as the user gave it, ``args[0]`` or ``kwargs['labels']``;
    ``batch``: whether dim 0 is the batch, with ``each`` places for each row (the patches of an image)."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch: bool
    each: int = 1
    told: bool = False  # by the user

    def at(self, rows: int) -> InputSpec:
        """The same input with ``rows`` rows, where dim 0 is the batch."""
        return replace(self, shape=(rows * self.each, *self.shape[1:])) if self.batch else self

    def taken(self, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """These rows of a tensor whose dim 0 is the batch, ``order``: their numbers."""
        rows = order.to(tensor.device)
        if self.each == 1:
            return tensor[rows]
        return tensor.reshape(-1, self.each, *tensor.shape[1:])[rows].flatten(0, 1)


@dataclass(frozen=True)
class _Argument:
    """One argument of forward (or of the loss): its key, where it goes, its structure and its leaves."""

    key: str
    kind: str  # positional | keyword | loss
    word: str  # the keyword, or the parameter's name
    tree: Tree
    constants: tuple[tuple[bool, Any], ...]  # per leaf (is a tensor, else the constant)
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Signature:
    """How one call's arguments map to tensors. Built by `of` from the example call."""

    parameters: inspect.Signature
    arguments: tuple[_Argument, ...]
    inputs: tuple[InputSpec, ...]
    rows: int  # rows of the example
    examples: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        batch_dims: Mapping[str, int | None],
        with_loss: bool,
    ) -> Signature:
        """From an example call; keyword inputs that forward does not take go to the loss where there is one."""
        parameters = inspect.signature(model.forward)
        given = _bind(parameters, args, kwargs, with_loss)
        arguments, found = [], []
        for key, kind, word, path, value in given:
            leaves, tree = flatten(value, path)
            for where, leaf in leaves:
                _refuse_leaf(where, leaf)
            tensors = [isinstance(leaf, torch.Tensor) for _, leaf in leaves]
            constants = tuple((t, None if t else leaf) for t, (_, leaf) in zip(tensors, leaves, strict=True))
            arguments.append(_Argument(key, kind, word, tree, constants, tuple(w for w, _ in leaves)))
            found += [(word + w[len(path) :], w, leaf) for w, leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not found:
            raise AutoparError(
                "inputs: hold no tensor (there is no batch to split). Give example inputs in args= or kwargs=."
            )
        inputs, rows = _with_batch(_named(found), batch_dims)
        return cls(parameters, tuple(arguments), inputs, rows, tuple(leaf for _, _, leaf in found))

    @property
    def real(self) -> bool:
        """Whether the examples have values."""
        fake = torch._subclasses.fake_tensor.FakeTensor
        return all(not t.is_meta and not isinstance(t, fake) for t in self.examples)

    def example(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Copies of the first ``rows`` rows of the examples, repeated where there are fewer."""
        order = torch.arange(rows) % self.rows
        return tuple(
            s.taken(t, order) if s.batch else t.clone() for s, t in zip(self.inputs, self.examples, strict=True)
        )

    def with_lists(self) -> Signature | None:
        """The same where dim 0 of inputs without a batch may be places of its rows, equally many of each; None where
        there is no such input."""
        inputs = tuple(_listed(s, self.rows) for s in self.inputs)
        return None if inputs == self.inputs else replace(self, inputs=inputs)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Positional and keyword arguments of forward, and keywords that only the loss takes."""
        feed = iter(tensors)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for a in self.arguments:
            value = unflatten([next(feed) if tensor else constant for tensor, constant in a.constants], a.tree)
            if a.kind == "positional":
                args.append(value)
            else:
                (kwargs if a.kind == "keyword" else extra)[a.word] = value
        return tuple(args), kwargs, extra

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, rows: int | None) -> tuple[torch.Tensor, ...]:
        """The tensors of another call, checked against the example, but for shapes where ``rows`` is None; see
        `Capture.flatten_inputs`."""
        loss_only = any(a.kind == "loss" for a in self.arguments)
        given = {key: (path, value) for key, _, _, path, value in _bind(self.parameters, args, kwargs, loss_only)}
        specs, tensors = iter(self.inputs), []
        for a in self.arguments:
            if a.key not in given:
                raise AutoparError(f"{a.word}: is missing (the model was captured with it). Pass it.")
            path, value = given.pop(a.key)
            leaves, tree = flatten(ordered_like(value, unflatten(range(a.tree.size), a.tree)), path)
            if tree != a.tree:
                raise AutoparError(
                    f"{path}: has another structure than at capture ({_leaf_names(a.paths)}). Pass the same."
                )
            for (where, leaf), (tensor, constant) in zip(leaves, a.constants, strict=True):
                if tensor:
                    tensors.append(_checked(where, leaf, next(specs), rows))
                elif isinstance(leaf, torch.Tensor) or type(leaf) is not type(constant) or leaf != constant:
                    raise AutoparError(
                        f"{where}: is {_short(leaf)}, at capture it was {constant!r} (what is no tensor is a constant "
                        "of the graph). Pass the same, or capture again."
                    )
        if given:
            path, _ = next(iter(given.values()))
            raise AutoparError(f"{path}: was not given at capture. Leave it out, or capture with it.")
        return tuple(tensors)


def _bind(
    parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], with_loss: bool
) -> list[tuple[str, str, str, str, Any]]:
    """(key, kind, word, path, value) per argument. The key is the same whether it came by position or by keyword, and
    arguments equal to their default are left out."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.parameters.values())
    named = {n for n, p in parameters.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    extra = {k: v for k, v in kwargs.items() if with_loss and not takes_any and k not in named}
    try:
        bound = parameters.bind(*args, **{k: v for k, v in kwargs.items() if k not in extra})
    except TypeError as error:
        raise AutoparError(f"inputs: {error} (forward is {_short(parameters)}). Pass what forward takes.") from error
    given: list[tuple[str, str, str, str, Any]] = []
    names = [p for p in parameters.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for i, value in enumerate(args):
        word = names[i].name if i < len(names) else f"arg{i}"
        given.append((word, "positional", word, f"args[{i}]", value))
    for word, value in kwargs.items():
        given.append((word, "loss" if word in extra else "keyword", word, f"kwargs[{word!r}]", value))
    last = max((i for i, g in enumerate(given) if g[1] == "positional" and not _is_default(parameters, g)), default=-1)
    assert bound is not None
    return [g for i, g in enumerate(given) if (g[1] == "positional" and i <= last) or not _is_default(parameters, g)]


def _is_default(parameters: inspect.Signature, given: tuple[str, str, str, str, Any]) -> bool:
    parameter = parameters.parameters.get(given[0])
    value = given[4]
    return parameter is not None and type(value) in (type(None), bool, int, float, str) and value == parameter.default


def _named(found: list[tuple[str, str, torch.Tensor]]) -> list[InputSpec]:
    taken: set[str] = set()
    specs = []
    for word, path, tensor in found:
        base = "_".join(part for part in "".join(c if c.isalnum() else " " for c in word).split()) or "input"
        base = base if base[0].isalpha() else f"input_{base}"
        base += "_" if keyword.iskeyword(base) or hasattr(builtins, base) else ""  # as fx would rename it
        name, n = base, 0
        while name in taken:
            n += 1
            name = f"{base}_{n}"
        taken.add(name)
        specs.append(InputSpec(name, path, tuple(tensor.shape), tensor.dtype, False))
    return specs


def _with_batch(specs: list[InputSpec], batch_dims: Mapping[str, int | None]) -> tuple[tuple[InputSpec, ...], int]:
    for key, dim in batch_dims.items():
        if not any(key in _names(s) for s in specs):
            raise AutoparError(
                f"batch_dims: {key!r} is no tensor input. Inputs are {_leaf_names([s.name for s in specs])}."
            )
        if dim not in (0, None) or isinstance(dim, bool):
            raise AutoparError(
                f"batch_dims: {key!r} has dim {dim!r} (only dim 0 can be the batch). Give 0, or None for no batch."
            )
    told = {s.name: next((batch_dims[k] for k in _names(s) if k in batch_dims), "rule") for s in specs}
    first = next((s for s in specs if told[s.name] == 0), None)
    first = first or next((s for s in specs if told[s.name] == "rule" and s.shape), None)
    if first is None or not first.shape:
        raise AutoparError(
            "inputs: none has a batch dim (there is no batch to split). Give one, or name it in batch_dims=."
        )
    rows, done = first.shape[0], []
    for s in specs:
        batch = told[s.name] == 0 or (told[s.name] == "rule" and bool(s.shape) and s.shape[0] == rows)
        if batch and (not s.shape or s.shape[0] != rows):
            raise AutoparError(
                f"{s.path}: has shape {s.shape}, {first.path} has {rows} rows. Give all batch inputs the same rows."
            )
        done.append(replace(s, batch=batch, told=told[s.name] != "rule"))
    if rows < 1:
        raise AutoparError(f"{first.path}: has no rows. Give at least one.")
    return tuple(done), rows


def _listed(spec: InputSpec, rows: int) -> InputSpec:
    length = spec.shape[0] if spec.shape else 0
    if spec.batch or spec.told or not length or length % rows or rows < 2:
        return spec
    return replace(spec, batch=True, each=length // rows)


def _names(spec: InputSpec) -> tuple[str, ...]:
    return spec.name, spec.name.removesuffix("_"), spec.path


def _refuse_leaf(where: str, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            raise AutoparError(f"{where}: is not a dense tensor ({leaf.layout}). Make it dense.")
        if leaf.requires_grad:
            raise AutoparError(f"{where}: requires a gradient (a step gives gradients of parameters only). Detach it.")
        if torch.utils._python_dispatch.is_traceable_wrapper_subclass(leaf):
            raise AutoparError(f"{where}: is a {type(leaf).__name__} (not a plain tensor). Pass its full tensor.")
    elif not isinstance(leaf, CONSTANTS):
        kind = type(leaf).__name__
        raise AutoparError(
            f"{where}: is a {kind} (not a tensor, a number, a string or a container of them). Convert it."
        )


def _checked(where: str, leaf: Any, spec: InputSpec, rows: int | None) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise AutoparError(f"{where}: is {_short(leaf)} (at capture it was a tensor). Pass a tensor.")
    want = tuple(leaf.shape) if rows is None else spec.at(rows).shape
    if tuple(leaf.shape) != want:
        places = f", {spec.each} places each" if spec.each > 1 else ""
        more = f" ({rows} rows of the batch{places})" if spec.batch else ""
        raise AutoparError(
            f"{where}: has shape {tuple(leaf.shape)}, the captured graph takes {want}{more}. Pass that shape."
        )
    if leaf.dtype != spec.dtype:
        raise AutoparError(f"{where}: has dtype {leaf.dtype}, the captured graph takes {spec.dtype}. Convert it.")
    return leaf.contiguous()


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _leaf_names(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "empty"
