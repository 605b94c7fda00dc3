"""Any `torch.optim.Optimizer` on parameters that rest in pieces, with the numbers of one process.

DTensors give an optimizer the meaning of the whole model, but every op of theirs goes through a dispatch of its own,
and some ops are missing. `local_optimizer` makes the same optimizer, DTensors in its groups and states, whose step
works on plain tensors. Which ones depends on what it does, and that is found by running it on small tensors
(`way_of`): an elementwise one on this rank's pieces as they are, one that needs the whole tensor (Muon, Adafactor) on
one tensor at a time, gathered. One that mixes tensors, or draws random numbers, is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.errors import AutoparError
from autopar.runtime.parameters import is_here
from autopar.runtime.whole import room_for, whole

Way = Literal["pieces", "whole"]
Groups = Iterable[Any]  # parameters, (name, parameter) pairs, or groups: dicts with "params"

STEPS = (1.0, 1e-3, 1e2, 1.0)  # sizes of the gradients of the steps that `way_of` tries
SMALL = ((6, 4), (5, 3))  # shapes of its tensors


def local_optimizer(kind: type[torch.optim.Optimizer], params: Groups, **options: Any) -> torch.optim.Optimizer:
    """``kind(params, **options)``, a subclass of ``kind`` whose step runs on plain tensors; the numbers of one process.

    ``params``: as for ``kind``: parameters, ``named_parameters()``, or groups of them; DTensors or plain. The state is
    one of DTensors placed as their parameters, so ``state_dict``, `torch.distributed.checkpoint` and schedulers see
    what they would see of ``kind``. Where the whole tensor counts the step is collective, in a pipeline over the ranks
    of each stage, and holds one tensor at a time; what it keeps beside tensors of the parameter's shape every rank has
    whole.

    Raises AutoparError where the step of ``kind`` mixes tensors or draws random numbers.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> optimizer = local_optimizer(torch.optim.SGD, [("weight", weight)], lr=0.5)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist(), isinstance(optimizer, torch.optim.SGD)
        ([0.5, 0.5], True)
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise AutoparError(f"optimizer: {kind!r} is not a class of optimizers. Example: torch.optim.AdamW.")
    given = list(params)
    groups = [g for g in given if isinstance(g, Mapping)]
    ways = {way_of(kind, options, {k: v for k, v in g.items() if k != "params"}) for g in groups or [{}]}
    way: Way = "whole" if "whole" in ways else "pieces"
    return _class(kind, way)(given, **options)


def way_of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], group: Mapping[str, Any] = {}) -> Way:
    """What the step of an optimizer needs: ``pieces``, however a tensor is cut, or each ``whole`` tensor.

    Raises AutoparError where it needs more than one tensor, the loss, or chance, and where it cannot be tried.

    >>> way_of(torch.optim.AdamW, {"lr": 1e-3}), way_of(torch.optim.Muon, {"lr": 1e-3})
    ('pieces', 'whole')
    """
    options = {k: v for k, v in options.items() if k != "capturable"}  # a way to launch kernels, on GPUs alone
    try:
        joint = _tried(kind, options, group, lambda tensors: [list(tensors)])
        apart = _tried(kind, options, group, lambda tensors: [[t] for t in tensors])
    except Exception as error:
        said = " ".join(str(error).split())
        raise AutoparError(
            f"optimizer: {kind.__name__} cannot step on small tensors ({type(error).__name__}: {said[:160]}), so what "
            f"it needs is not known. Give parallel.parameters() to {kind.__name__} itself, which works on DTensors."
        ) from error
    if not _same(joint, apart):
        raise AutoparError(
            f"optimizer: the step of {kind.__name__} on one tensor depends on others, or on chance. Give "
            f"parallel.parameters() to {kind.__name__} itself, which works on DTensors."
        )
    try:
        pieces = _tried(kind, options, group, lambda tensors: [[p for t in tensors for p in _quarters(t)]])
    except Exception:  # it does not take such pieces
        return "whole"
    return "pieces" if _same([p for t in joint for p in _quarters(t)], pieces) else "whole"


def _tried(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    cut: Callable[[Sequence[Tensor]], list[list[Tensor]]],
) -> list[Tensor]:
    """Small tensors, cut, after some steps; every list that ``cut`` makes of them has an optimizer of its own."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SMALL]
    lists = [[nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in part] for part in cut(values)]
    optimizers = [kind([{**group, "params": part}], **options) for part in lists]
    for size in STEPS:
        gradients = cut([size * torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in values])
        for optimizer, part, own in zip(optimizers, lists, gradients, strict=True):
            for parameter, gradient in zip(part, own, strict=True):
                parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
            optimizer.step()
    return [p.detach() for part in lists for p in part]


def _quarters(t: Tensor) -> list[Tensor]:
    return [part for half in t.tensor_split([t.shape[0] // 3]) for part in half.tensor_split([1], 1)]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-12, atol=1e-14) for x, y in zip(a, b, strict=True))


_classes: dict[tuple[type, Way], type[torch.optim.Optimizer]] = {}


def _class(kind: type[torch.optim.Optimizer], way: Way) -> type[torch.optim.Optimizer]:
    if (kind, way) not in _classes:
        bases = (_OnPieces if way == "pieces" else _OnWhole, kind)
        _classes[kind, way] = type(kind.__name__, bases, {"__module__": kind.__module__, "kind": kind})
    return _classes[kind, way]


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that the user named."""
    found = getattr(optimizer, "kind", type(optimizer))
    assert isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    return found


class _OnPlain(torch.optim.Optimizer):
    """Beside ``kind``: its step sees plain tensors in place of the DTensors of the groups and the state."""

    kind: type[torch.optim.Optimizer]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of ``kind``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner: Any = self.kind.step
        if getattr(inner, "hooked", False):  # by torch, once an instance of it exists; hooks run around this step
            inner = inner.__wrapped__
        self._update(lambda: inner(self))
        return loss

    def _update(self, step: Callable[[], Any]) -> None:
        raise NotImplementedError

    @contextmanager
    def _holding(self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> Iterator[None]:
        """Meanwhile these are the optimizer's groups and state."""
        outer = self.param_groups, self.state
        self.param_groups, self.state = groups, defaultdict(dict, state)
        try:
            yield
        finally:
            state.update(self.state)
            self.param_groups, self.state = outer


class _OnPieces(_OnPlain):
    """One step over the pieces of all parameters."""

    def _update(self, step: Callable[[], Any]) -> None:
        groups, plain = [], list[tuple[Tensor, Tensor]]()
        for group in self.param_groups:
            held = [p for p in group["params"] if is_here(p)]
            own = [_leaf(_piece(p), p.grad) for p in held]
            plain += zip(held, own, strict=True)
            groups.append({**group, "params": own})
        outer = self.state
        state = {leaf: {k: _piece(v) for k, v in outer[p].items()} for p, leaf in plain if p in outer}
        with self._holding(groups, state):
            step()
        for p, leaf in plain:
            if leaf in state:
                before, after = outer[p], state[leaf]
                for k in [k for k in before if k not in after]:
                    del before[k]
                for k, v in after.items():
                    if _piece(before.get(k)) is not v:
                        before[k] = _placed(v, p, leaf.shape)
        _options_back(groups, self.param_groups)


class _OnWhole(_OnPlain):
    """A step per tensor, gathered; each rank keeps its piece of what comes out."""

    def _update(self, step: Callable[[], Any]) -> None:
        states = (v for state in self.state.values() for v in state.values() if isinstance(v, DTensor))
        room = room_for([*(p for group in self.param_groups for p in group["params"] if is_here(p)), *states])
        for group in self.param_groups:
            before = {k: v for k, v in group.items() if k != "params"}
            for p in group["params"]:
                if p.grad is None:
                    continue
                own = _leaf(whole(p.detach(), room), whole(p.grad, room))
                held = self.state.get(p, {})
                kept = {k: whole(v, room) if isinstance(v, DTensor) else v for k, v in held.items()}
                alone, state = {**before, "params": [own]}, {own: kept}
                with self._holding([alone], state):
                    step()
                _piece(p.detach()).copy_(_piece(_cut(own.detach(), p)))
                self.state[p] = {k: _cut(v, p) for k, v in state[own].items()}
                _options_back([alone], [group])


def _leaf(value: Tensor, gradient: Tensor | None) -> Tensor:
    leaf = value.detach().requires_grad_()
    if gradient is not None:
        leaf.grad = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    return leaf


def _piece(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _placed(value: Any, p: Tensor, shape: torch.Size) -> Any:
    """A state of the piece of ``p`` (``shape``) as a DTensor placed as ``p``."""
    if not isinstance(p, DTensor) or not isinstance(value, Tensor) or not value.ndim or value.shape != shape:
        return value  # numbers of the tensor as a whole, as a count of its steps
    size, stride = p.shape, p.stride()
    return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False, shape=size, stride=stride)


def _cut(value: Any, p: Tensor) -> Any:
    """A whole tensor of the shape of ``p`` placed as ``p``; anything else as it is."""
    if not isinstance(p, DTensor) or not isinstance(value, Tensor) or not value.ndim or value.shape != p.shape:
        return value
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


def _options_back(inner: list[dict[str, Any]], outer: list[dict[str, Any]]) -> None:
    """What a step writes into its groups (a counter, a rate) stays in them."""
    for own, group in zip(inner, outer, strict=True):
        group.update((k, v) for k, v in own.items() if k != "params")


def by_name(named: Iterable[tuple[str, nn.Parameter]], params: Groups | None) -> list[Any]:
    """What an optimizer takes as ``params``, with every parameter as a (name, parameter) pair.

    ``named``: the parameters of the model; ``params``: parameters, their names, pairs, or groups of these; None: all
    that require gradients. Raises AutoparError for a name or a tensor that is no parameter of the model.
    """
    names = dict(named)
    if params is None:
        return [(name, p) for name, p in names.items() if p.requires_grad]
    found = {id(p): name for name, p in names.items()}

    def pair(given: Any) -> tuple[str, nn.Parameter]:
        given = given[1] if isinstance(given, tuple) else given
        name = given if isinstance(given, str) else found.get(id(given))
        if name not in names:
            what = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
            raise AutoparError(
                f"optimizer: {what} is no parameter of the model. Use parallel.named_parameters(), or names of it."
            )
        return name, names[name]

    listed = [params] if isinstance(params, (Mapping, str, Tensor)) else list(params)
    made: list[Any] = []
    for given in listed:
        if isinstance(given, Mapping):
            own = given["params"]
            members = [own] if isinstance(own, (str, Tensor)) else list(own)
            made.append({**given, "params": [pair(p) for p in members]})
        else:
            made.append(pair(given))
    return made


__all__ = ["by_name", "kind_of", "local_optimizer", "way_of"]
