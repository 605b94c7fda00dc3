"""The changes of layout as library ops ``torch.ops.autopar.*``: forward and declared dual (design section 3).

Collectives come as pairs: ``start_x`` launches and returns a raw tensor that must not be read, ``wait_x`` waits and
puts the elements in order; a pass may move the two apart. The backward of a pair does the whole dual where the start
stands, by ops of this file, so that a traced backward sends by no others. Every op is one node under fx, has fake and
autograd kernels, takes any dtype and never writes to its input; ``keep``, ``time_keep``, ``replicate`` and
``invariant`` may return it.

Common arguments: ``group`` name of a c10d process group; ``n`` its size and ``c`` the rank's place in it; ``dim`` the
tensor dim that is cut; ``parts`` the lengths of the parts of ``dim`` before this axis cuts it, never empty; ``items``
in how many equal pieces, none of which is cut, each part comes (0: every element). Each part is cut as `Axis.cut` does:
pieces may be uneven or empty, they are padded on the wire and never in a value.

| op | change | dual |
|---|---|---|
| ``start_all_reduce``, ``wait_all_reduce`` | P->I ``none``, P->R ``all_reduce`` | nothing, all-reduce |
| ``start_all_gather``, ``wait_all_gather`` | S->R ``reduce_scatter``, S->I ``slice`` | reduce-scatter, slice |
| ``start_reduce_scatter``, ``wait_reduce_scatter`` | P->S | all-gather |
| ``start_all_to_all``, ``wait_all_to_all`` | S->S' | all-to-all |
| ``shard`` | I->S ``all_gather``, R->S ``pad`` | all-gather, zero-pad |
| ``pad`` | S->P | slice |
| ``keep`` | I->P ``none``, R->P ``keep`` | nothing, keep on coordinate 0 |
| ``replicate`` | I->R | all-reduce |
| ``invariant`` | R->I | keep on coordinate 0 |
| ``time_shard``, ``time_pad``, ``time_keep`` | R->S, S->P, R->P over time | zero-pad, slice, keep |

``start_scatter`` and ``start_swap`` with ``wait_stacked`` are the reduce-scatter and the all-to-all of what lies
stacked as a raw tensor does, ``[n, ...]``: they are met in backward only.

>>> import torch
>>> torch.ops.autopar.shard(torch.arange(6), "tp", 2, 1, 0, [4, 2], "pad")
tensor([2, 3, 5])
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the functional collectives with the dispatcher
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from autopar.passes.layout import Axis
from autopar.runtime.library import differentiable, kernels
from autopar.runtime.pieces import Run, Runs, exchange, join, pieces, put, split, take, total, widen, with_size

_C10D = torch.ops._c10d_functional
Held = tuple[str, tuple[Any, ...]]
_IN_FLIGHT: dict[int, Held] = {}  # data pointer of a raw tensor -> group and what the backend works on, until the wait
_LATELY: deque[tuple[Any, ...]] = deque(maxlen=4)  # see launch
_MENDED: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]  # lives with the process


# On the wire


def _describe(group: str) -> str:
    try:
        ranks = dist.get_process_group_ranks(_resolve_process_group(group))  # type: ignore[arg-type]
    except Exception:
        return f"group {group!r} (not known in this process)"
    return f"group {group!r} of ranks {ranks}"


def launch(name: str, group: str, *args: Any) -> Tensor:
    """Start a functional collective; an error names the group.

    gloo's threads hold the tensors that they work on, and let go of them a little after the wait. So that their memory
    goes at set places of a step, they are kept until then (`settle`), and what is returned is another tensor of the
    same memory.
    """
    try:
        raw: Tensor = getattr(_C10D, name)(*args, group)
    except RuntimeError as error:
        raise RuntimeError(f"{name} over {_describe(group)}: {error}") from error
    keep_until_settled((raw, args))
    return _alias(raw, list(raw.shape))


def _gather_on_cpu(x: Tensor, n: int, group: str) -> Tensor:
    """torch's ``all_gather_into_tensor`` for gloo, DTensor's too, as the collective that it is.

    torch 2.13 runs it as a list of one gather, ``ALLGATHER_COALESCED``. Both threads of a gloo group write the name of
    what they finished last into one string, without a lock: a name of more than 15 characters lies on the heap, which
    breaks where both free it. No other collective here has a name so long. tests/runtime/broken_heap.py shows it.
    """
    out = x.new_empty([n * x.shape[0], *x.shape[1:]])
    gathered: Tensor = _C10D.all_gather_into_tensor_out(x.contiguous(), n, group, out=out)
    return gathered


_MENDED.impl("all_gather_into_tensor", _gather_on_cpu, "CPU")


def keep_until_settled(tensors: tuple[Any, ...]) -> None:
    """Keep what a collective works on; at most the last few, as others may hold them for reasons of their own."""
    settle()
    _LATELY.append(tensors)


def settle() -> None:
    """Let go of tensors that no thread of a communication backend holds any more, with their memory."""
    held = [kept for kept in _LATELY if any(t._use_count() > 1 for t in tree_leaves(kept) if isinstance(t, Tensor))]  # type: ignore[attr-defined]
    if len(held) < len(_LATELY):
        _LATELY.clear()
        _LATELY.extend(held)


@contextmanager
def kept_apart() -> Iterator[deque[tuple[Any, ...]]]:
    """Begin with nothing of what `launch` keeps, and forget at the end what was kept since: for runs that look at
    memory. What it keeps inside."""
    before = tuple(_LATELY)
    _LATELY.clear()
    try:
        yield _LATELY
    finally:
        _LATELY.clear()
        _LATELY.extend(before)


def wait(raw: Tensor, group: str) -> Tensor:
    """The tensor, once it may be read; an error names the group."""
    try:
        done: Tensor = _C10D.wait_tensor(raw)
    except RuntimeError as error:
        raise RuntimeError(f"waiting for {_describe(group)}: {error}") from error
    return done


def sent(name: str, group: str, *args: Any) -> Generator[None, None, Tensor]:
    """A functional collective under way: it is launched, and yields once; then it is waited for and returned."""
    raw = launch(name, group, *args)
    held = _LATELY[-1]
    yield
    keep_until_settled(held)
    return wait(raw, group)


def _alias(raw: Tensor, shape: list[int]) -> Tensor:
    """The same memory as a tensor of its own. Not view(): gloo's thread writes while autograd looks, and an output that
    is a view written in place is refused."""
    alias: Tensor = torch.ops.aten._unsafe_view.default(raw, shape)
    return alias


def _flying(raw: Tensor, group: str) -> Tensor:
    _IN_FLIGHT[raw.data_ptr()] = (group, _LATELY[-1] if _LATELY else ())
    return raw


def _land(raw: Tensor) -> Tensor:
    group, held = _IN_FLIGHT.pop(raw.data_ptr(), ("?", ()))
    keep_until_settled(held)
    return wait(raw, group)


def _gather(x: Tensor, group: str, n: int) -> Tensor:
    return _alias(launch("all_gather_into_tensor", group, x, n), [n, *x.shape])


def _reduce(x: Tensor, group: str) -> Tensor:
    return launch("all_reduce", group, x.contiguous(), "sum")


def _scatter(stacked: Tensor, group: str, n: int) -> Tensor:
    return launch("reduce_scatter_tensor", group, stacked.contiguous().flatten(0, 1), "sum", n)


def _swap(stacked: Tensor, group: str, n: int) -> Tensor:
    return launch("all_to_all_single", group, stacked.contiguous(), [1] * n, [1] * n)


def _keep(x: Tensor, coordinate: int) -> Tensor:
    """Zeros are written: multiplying by 0 makes nan of inf."""
    return x if coordinate == 0 else torch.zeros_like(x, memory_format=torch.contiguous_format)


def _sized(x: Tensor, dim: int, size: int) -> Tensor:
    assert x.shape[dim] == size, f"dim {dim} of {tuple(x.shape)} is not {size} long"
    return x


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_OPS = torch.ops.autopar

# of stacked tensors, in backward

kernels(
    "start_scatter(Tensor stacked, str group, int n) -> Tensor",
    lambda stacked, group, n: _flying(_scatter(stacked, group, n), group),
    lambda stacked, group, n: stacked.new_empty(stacked.shape[1:]),
)
kernels(
    "start_swap(Tensor stacked, str group, int n) -> Tensor",
    lambda stacked, group, n: _flying(_swap(stacked, group, n), group),
    lambda stacked, group, n: stacked.new_empty(stacked.shape),
)
kernels("wait_stacked(Tensor raw) -> Tensor", lambda raw: _land(raw), _same)


def _summed(x: Tensor, group: str) -> Tensor:
    done: Tensor = _OPS.wait_all_reduce(_OPS.start_all_reduce(x, group, "none"))
    return done


def _gathered(x: Tensor, group: str, *cut: Any) -> Tensor:
    """``cut``: n, c, dim, parts, items."""
    n, c, dim, parts, items = cut
    done: Tensor = _OPS.wait_all_gather(
        _OPS.start_all_gather(x, group, n, c, dim, parts, "slice", items), n, c, dim, parts, items
    )
    return done


# all-reduce

start_all_reduce = differentiable(
    "start_all_reduce(Tensor x, str group, str dual) -> Tensor",
    lambda x, group, dual: _flying(_reduce(x, group), group),
    _same,
    lambda grad, shape, group, dual: _summed(grad, group) if dual == "all_reduce" else grad.contiguous(),
)
wait_all_reduce = differentiable(
    "wait_all_reduce(Tensor raw) -> Tensor", _land, _same, lambda grad, shape: grad.contiguous()
)


# all-gather


def _start_all_gather(
    x: Tensor, group: str, n: int, c: int, dim: int, parts: list[int], dual: str, items: int = 0
) -> Tensor:
    held = pieces(parts, n, items)
    return _flying(_gather(widen(_sized(x, dim, total(held[c])), dim, total(held[0])), group, n), group)


def _start_all_gather_fake(
    x: Tensor, group: str, n: int, c: int, dim: int, parts: list[int], dual: str, items: int = 0
) -> Tensor:
    return x.new_empty([n, *with_size(x, dim, total(pieces(parts, n, items)[0]))])


def _start_all_gather_adjoint(
    grad: Tensor, shape: torch.Size, group: str, n: int, c: int, dim: int, parts: list[int], dual: str, items: int = 0
) -> Tensor:
    own = grad[c] if dual == "slice" else _OPS.wait_stacked(_OPS.start_scatter(grad, group, n))
    return own.narrow(dim, 0, shape[dim]).clone(memory_format=torch.contiguous_format)


start_all_gather = differentiable(
    "start_all_gather(Tensor x, str group, int n, int c, int dim, int[] parts, str dual, int items=0) -> Tensor",
    _start_all_gather,
    _start_all_gather_fake,
    _start_all_gather_adjoint,
)
wait_all_gather = differentiable(
    "wait_all_gather(Tensor raw, int n, int c, int dim, int[] parts, int items=0) -> Tensor",
    lambda raw, n, c, dim, parts, items=0: join(_land(raw), dim, pieces(parts, n, items)),
    lambda raw, n, c, dim, parts, items=0: raw.new_empty(with_size(raw[0], dim, sum(parts))),
    lambda grad, shape, n, c, dim, parts, items=0: split(grad, dim, pieces(parts, n, items), shape[dim + 1]),
)


# reduce-scatter


def _start_reduce_scatter(x: Tensor, group: str, n: int, c: int, dim: int, parts: list[int], items: int = 0) -> Tensor:
    held = pieces(parts, n, items)
    return _flying(_scatter(split(_sized(x, dim, sum(parts)), dim, held, total(held[0])), group, n), group)


start_reduce_scatter = differentiable(
    "start_reduce_scatter(Tensor x, str group, int n, int c, int dim, int[] parts, int items=0) -> Tensor",
    _start_reduce_scatter,
    lambda x, group, n, c, dim, parts, items=0: x.new_empty(with_size(x, dim, total(pieces(parts, n, items)[0]))),
    lambda grad, shape, group, n, c, dim, parts, items=0: _gathered(
        grad.narrow(dim, 0, total(pieces(parts, n, items)[c])), group, n, c, dim, parts, items
    ),
)
wait_reduce_scatter = differentiable(
    "wait_reduce_scatter(Tensor raw, int n, int c, int dim, int[] parts, int items=0) -> Tensor",
    lambda raw, n, c, dim, parts, items=0: _land(raw).narrow(dim, 0, total(pieces(parts, n, items)[c])).contiguous(),
    lambda raw, n, c, dim, parts, items=0: raw.new_empty(with_size(raw, dim, total(pieces(parts, n, items)[c]))),
    lambda grad, shape, n, c, dim, parts, items=0: widen(grad, dim, shape[dim]),
)


# all-to-all


@dataclass(frozen=True)
class _Recut:
    """The literals of an all-to-all on one rank."""

    n: int
    c: int
    dim: int
    parts: list[int]
    to_dim: int
    to_parts: list[int]
    items: int = 0
    to_items: int = 0

    @property
    def held(self) -> tuple[Runs, ...]:
        """What each coordinate has of ``dim`` before."""
        return pieces(self.parts, self.n, self.items)

    @property
    def wanted(self) -> tuple[Runs, ...]:
        """What each coordinate has of ``to_dim`` afterwards."""
        return pieces(self.to_parts, self.n, self.to_items)

    @property
    def messages(self) -> tuple[tuple[Runs, ...], tuple[Runs, ...], int]:
        """`exchange`, where it is one dim that is cut anew."""
        parts, to_parts = tuple(self.parts), tuple(self.to_parts)
        return exchange(parts, to_parts, self.n, self.c, self.items, self.to_items)


def _start_all_to_all(x: Tensor, group: str, *literals: Any) -> Tensor:
    a = _Recut(*literals)
    _sized(x, a.dim, total(a.held[a.c]))
    if a.dim == a.to_dim:
        send, _, width = a.messages
        stacked = split(x, a.dim, send, width)
    else:
        _sized(x, a.to_dim, sum(a.to_parts))
        stacked = split(widen(x, a.dim, total(a.held[0])), a.to_dim, a.wanted, total(a.wanted[0]))
    return _flying(_swap(stacked, group, a.n), group)


def _start_all_to_all_fake(x: Tensor, group: str, *literals: Any) -> Tensor:
    a = _Recut(*literals)
    if a.dim == a.to_dim:
        return x.new_empty([a.n, *with_size(x, a.dim, a.messages[2])])
    shape = with_size(x, a.dim, total(a.held[0]))
    shape[a.to_dim] = total(a.wanted[0])
    return x.new_empty([a.n, *shape])


def _start_all_to_all_adjoint(grad: Tensor, shape: torch.Size, group: str, *literals: Any) -> Tensor:
    a = _Recut(*literals)
    back = _OPS.wait_stacked(_OPS.start_swap(grad, group, a.n))
    if a.dim == a.to_dim:
        return join(back, a.dim, a.messages[0])
    return join(back.narrow(a.dim + 1, 0, shape[a.dim]), a.to_dim, a.wanted)


def _wait_all_to_all(raw: Tensor, *literals: Any) -> Tensor:
    done, a = _land(raw), _Recut(*literals)
    if a.dim == a.to_dim:
        return join(done, a.dim, a.messages[1])
    return join(done.narrow(a.to_dim + 1, 0, total(a.wanted[a.c])), a.dim, a.held)


def _wait_all_to_all_fake(raw: Tensor, *literals: Any) -> Tensor:
    a = _Recut(*literals)
    shape = with_size(raw[0], a.dim, sum(a.parts))
    shape[a.to_dim] = total(a.wanted[a.c])
    return raw.new_empty(shape)


def _wait_all_to_all_adjoint(grad: Tensor, shape: torch.Size, *literals: Any) -> Tensor:
    a = _Recut(*literals)
    if a.dim == a.to_dim:
        return split(grad, a.dim, a.messages[1], shape[a.dim + 1])
    return split(widen(grad, a.to_dim, shape[a.to_dim + 1]), a.dim, a.held, shape[a.dim + 1])


start_all_to_all = differentiable(
    "start_all_to_all(Tensor x, str group, int n, int c, int dim, int[] parts, int to_dim, int[] to_parts, "
    "int items=0, int to_items=0) -> Tensor",
    _start_all_to_all,
    _start_all_to_all_fake,
    _start_all_to_all_adjoint,
)
wait_all_to_all = differentiable(
    "wait_all_to_all(Tensor raw, int n, int c, int dim, int[] parts, int to_dim, int[] to_parts, "
    "int items=0, int to_items=0) -> Tensor",
    _wait_all_to_all,
    _wait_all_to_all_fake,
    _wait_all_to_all_adjoint,
)


# Without communication in forward


def _shard_adjoint(
    grad: Tensor, shape: torch.Size, group: str, n: int, c: int, dim: int, parts: list[int], dual: str, items: int = 0
) -> Tensor:
    if dual == "pad":
        whole: Tensor = _OPS.pad(grad, group, n, c, dim, parts, items)
        return whole
    return _gathered(grad, group, n, c, dim, parts, items)


shard = differentiable(
    "shard(Tensor x, str group, int n, int c, int dim, int[] parts, str dual, int items=0) -> Tensor",
    lambda x, group, n, c, dim, parts, dual, items=0: take(_sized(x, dim, sum(parts)), dim, pieces(parts, n, items)[c]),
    lambda x, group, n, c, dim, parts, dual, items=0: x.new_empty(with_size(x, dim, total(pieces(parts, n, items)[c]))),
    _shard_adjoint,
)
pad = differentiable(
    "pad(Tensor x, str group, int n, int c, int dim, int[] parts, int items=0) -> Tensor",
    lambda x, group, n, c, dim, parts, items=0: put(
        _sized(x, dim, total(pieces(parts, n, items)[c])), dim, pieces(parts, n, items)[c], sum(parts)
    ),
    lambda x, group, n, c, dim, parts, items=0: x.new_empty(with_size(x, dim, sum(parts))),
    lambda grad, shape, group, n, c, dim, parts, items=0: _OPS.shard(grad, group, n, c, dim, parts, "pad", items),
)
keep = differentiable(
    "keep(Tensor x, int c, str dual) -> Tensor",
    lambda x, c, dual: _keep(x, c).contiguous(),
    _same,
    lambda grad, shape, c, dual: _OPS.keep(grad, c, "none") if dual == "keep" else grad.contiguous(),
)
replicate = differentiable(
    "replicate(Tensor x, str group) -> Tensor",
    lambda x, group: x.contiguous(),
    _same,
    lambda grad, shape, group: _summed(grad, group),
)
invariant = differentiable(
    "invariant(Tensor x, int c) -> Tensor",
    lambda x, c: x.contiguous(),
    _same,
    lambda grad, shape, c: _OPS.keep(grad, c, "none"),
)


# Over time: the coordinates run one after another, nothing is sent


def _rows(size: int, microbatch: int, rows: list[int]) -> Run:
    return Axis("time", len(rows), tuple(rows)).cut(0, size, microbatch)


def _whole(size: int, microbatch: int, rows: list[int]) -> int:
    return size * sum(rows) // rows[microbatch]


time_shard = differentiable(
    "time_shard(Tensor x, int microbatch, int[] rows, int dim) -> Tensor",
    lambda x, microbatch, rows, dim: take(x, dim, (_rows(x.shape[dim], microbatch, rows),)),
    lambda x, microbatch, rows, dim: x.new_empty(with_size(x, dim, _rows(x.shape[dim], microbatch, rows)[1])),
    lambda grad, shape, microbatch, rows, dim: _OPS.time_pad(grad, microbatch, rows, dim),
)
time_pad = differentiable(
    "time_pad(Tensor x, int microbatch, int[] rows, int dim) -> Tensor",
    lambda x, microbatch, rows, dim: put(
        x,
        dim,
        (_rows(_whole(x.shape[dim], microbatch, rows), microbatch, rows),),
        _whole(x.shape[dim], microbatch, rows),
    ),
    lambda x, microbatch, rows, dim: x.new_empty(with_size(x, dim, _whole(x.shape[dim], microbatch, rows))),
    lambda grad, shape, microbatch, rows, dim: _OPS.time_shard(grad, microbatch, rows, dim),
)
time_keep = differentiable(
    "time_keep(Tensor x, int microbatch) -> Tensor",
    lambda x, microbatch: _keep(x, microbatch).contiguous(),
    _same,
    lambda grad, shape, microbatch: _OPS.time_keep(grad, microbatch),
)
