"""From an ``nn.Module`` and example inputs to one fx graph of the whole global batch.

`capture` runs torch.export (training IR, ``strict=False``) on fake inputs, so nothing is computed, at two batch sizes:
the global batch, whose graph is kept, and a tiny one, which shows that the model does the same ops at any batch and is
compared with eager where weights are real.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from autopar.clean_graph import place
from autopar.compare_with_eager import compare_with_eager
from autopar.custom_functions import other_backwards
from autopar.errors import AutoparError
from autopar.evaluate import double, run_graph, to_float64
from autopar.export_model import Call, Exported, Loss, Outputs, aliases_of, export_model
from autopar.export_repeats import export_short
from autopar.mixed_precision import param_dtype as cast_to
from autopar.mixed_precision import precision
from autopar.plan import ADAMW, OWN, Optimizer, Precision
from autopar.repeats import may_repeat
from autopar.runtime.opaque import OPAQUE
from autopar.signature import InputSpec, Signature
from autopar.traps import Failed, refuse_model
from autopar.trees import lists_of_rows, parted, unflatten

__all__ = ["Capture", "InputSpec", "capture", "double", "run_graph", "to_float64"]

TINY = 2  # rows of the second export; never 1, where broadcasting hides what depends on the batch


@dataclass(frozen=True)
class Capture:
    """A model as one graph at the global batch, and everything that is not in the graph.

    In ``graph`` placeholders are the tensor inputs, ``get_attr`` targets canonical FQNs (keys of `attributes`), the
    output node holds ``{"outputs": (loss, *other tensor leaves), "buffers": {}}`` (no loss where ``has_loss`` is
    false), and ``meta["val"]`` are meta tensors of global shapes. The graph module owns no memory.
    """

    graph: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    parameters: dict[str, nn.Parameter]  # canonical FQN -> the model's own object, also where the graph does not use it
    aliases: dict[str, str]  # further FQN of a tied parameter or buffer -> canonical FQN
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]  # buffers that state_dict() holds
    constants: dict[str, torch.Tensor]  # tensors that tracing lifted out of the code
    batch: int  # rows of the global batch
    checked: str  # "equal" to eager in loss, gradients and buffers | "unchecked"
    training: bool
    has_loss: bool
    hash: str  # sha256 of ops, literals, FQNs, shapes and dtypes
    model_name: str
    signature: Signature
    outputs: Outputs
    hints: tuple[str, ...] = ()  # what the user should know, one line each
    relaxations: Mapping[str, str] = field(default_factory=dict)  # what plans need not keep, as the user said
    precision: Precision = OWN  # what parameters, which rest in their own dtypes, are computed and reduced in
    optimizer: Optimizer = ADAMW  # what will train it; says what bytes a plan needs

    @property
    def attributes(self) -> dict[str, torch.Tensor]:
        """Every tensor that a ``get_attr`` node may name."""
        return {**self.constants, **self.buffers, **self.parameters}

    def trainable(self, fqn: str) -> bool:
        """Whether ``fqn`` is a parameter that wants a gradient (what ``annotate`` asks)."""
        return fqn in self.parameters and self.parameters[fqn].requires_grad

    def flatten_inputs(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, rows: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The tensors for the placeholders, contiguous; arguments by position or by keyword in any order.

        ``rows`` (default: the global batch) is what dim 0 of batch inputs must be. Raises AutoparError where structure,
        shape, dtype or a constant differs from the capture.
        """
        return self.signature.flatten(args, kwargs or {}, rows=self.batch if rows is None else rows)

    def unflatten_outputs(self, leaves: Sequence[Any]) -> Any:
        """The model's own output structure around the graph's ``outputs``; with ``loss=`` it is ``(loss, output)``."""
        out, feed = self.outputs, iter(leaves[1:] if self.has_loss else leaves)
        values: list[Any] = []
        while (i := len(values)) < out.tree.size:
            if i in out.constants:
                values.append(out.constants[i])
            elif i in out.lists:
                values += parted(next(feed), *out.lists[i])
            else:
                values.append(leaves[0] if i == out.loss_leaf else next(feed))
        value = unflatten(values, out.tree)
        return (leaves[0], value) if self.has_loss and out.loss_leaf is None else value


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    global_batch: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    loss: Loss | None = None,
    loss_required: bool = True,
    check: bool = True,
    dropout: str = "exact",
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    _whole: bool = False,
) -> Capture:
    """Capture ``model(*args, **kwargs)`` in its current train or eval mode.

    Args:
        args, kwargs: example inputs, real or meta, tensors in any nesting of containers; all else is a constant of the
            graph.
        global_batch: rows of the graph; default: those of the examples.
        batch_dims: input name or path to 0 or None (no batch). By default dim 0 is the batch wherever it equals that
            of the first tensor input; where that cannot be, a multiple of it may be (patches: equally many each row).
        loss: makes the loss where the model returns none, a 0-d float tensor. Keyword inputs that forward does not
            take go to it alone: ``loss(output, **those)``. Without such it is called ``loss(output)`` where it has one
            required parameter, else ``loss(output, *args, **kwargs)``. A model returns its loss as a scalar, as
            ``.loss`` or ``["loss"]`` of the output, or as a scalar that is first in a tuple.
        loss_required: False for forward only; nothing about gradients is then asked of the model.
        check: compare with eager on two rows where weights and inputs are real; leaves no trace on the model.
        dropout: "exact": what is dropped is the same for every plan; "per-rank": a relaxation, under which torch's own
            kernels, attention's fused ones too, drop otherwise on ranks that hold other pieces.
        param_dtype: "fp32", "bf16" or "fp16": the graph is that of the model with its parameters, and the floating
            inputs of its forward, in this dtype (`mixed_precision`); the model keeps its own.
        reduce_dtype: what plans reduce gradients in, by default the dtype that the parameter rests in.

    Raises:
        AutoparError: the model or its inputs cannot be captured exactly; names the module and file:line.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
        >>> captured = capture(model, (x,), {"target": y}, loss=torch.nn.functional.cross_entropy)
        >>> captured.batch, captured.checked
        (8, 'equal')
    """
    if dropout not in ("exact", "per-rank"):
        raise AutoparError(f"dropout: {dropout!r} is not known. Legal: 'exact', 'per-rank'.")
    asked = precision(param_dtype, reduce_dtype)
    refuse_model(model, backward=loss_required)
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise AutoparError(
            "loss: has parameters that require a gradient (only the model's train). Make them the model's."
        )
    signature = Signature.of(model, args, kwargs or {}, batch_dims or {}, with_loss=loss is not None)
    batch = signature.rows if global_batch is None else global_batch
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise AutoparError(f"global_batch: is {batch!r} (it counts the rows of a step). Give an integer of at least 1.")
    call = Call(model, signature, loss, loss_required, cast_to(asked))
    judged = check and signature.real and not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    call, (whole, rows, other) = _export(call, batch, judged, _whole)
    signature = call.signature
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if judged:
        attributes = {**whole.constants, **buffers, **parameters}
        fewer, graph = (rows, other.graph) if rows < batch else (batch, whole.graph)
        compare_with_eager(call, graph, fewer, attributes, twice=bool(whole.changed))
    hints = whole.hints + call.ways.hints(whole.graph)
    if loss_required and "fp16" in (param_dtype, reduce_dtype):
        hints += ("param_dtype, reduce_dtype: gradients under 6e-8 vanish in fp16, and nothing scales the loss.",)
    if whole.changed and not judged:
        hints += (f"{', '.join(whole.changed)}: changed by forward; the graph keeps what it computed at capture.",)
    return Capture(
        graph=whole.graph,
        inputs=tuple(spec.at(batch) for spec in signature.inputs),
        parameters=parameters,
        aliases=aliases_of(model),
        buffers=buffers,
        persistent=frozenset(set(model.state_dict(keep_vars=True)) & set(buffers)),
        constants=whole.constants,
        batch=batch,
        checked="equal" if judged else "unchecked",
        training=model.training,
        has_loss=whole.has_loss,
        hash=_hash(whole.graph, parameters, model.training),
        model_name=type(model).__name__,
        signature=signature,
        outputs=whole.outputs,
        hints=hints,
        relaxations={} if dropout == "exact" else {"dropout": dropout},
        precision=asked,
    )


class _ListsOfRows(Exception):
    """The model returns ``lists``, by path, that are as long as there are rows."""

    def __init__(self, lists: frozenset[str]) -> None:
        super().__init__(*lists)
        self.lists = lists


def _export(call: Call, batch: int, judged: bool, whole: bool) -> tuple[Call, tuple[Exported, int, Exported]]:
    """The call by the first of its `Ways` that succeeds, and what `_export_whole` gives. Where other rows are what
    fails, inputs that may be lists of places of the rows are tried as such."""
    valued = call.signature.real and not any(t.is_meta for t in (*call.model.parameters(), *call.model.buffers()))
    lists, start = call.signature.with_lists(), call
    while True:
        exports, failed = None, None
        try:
            if call.ways.plain and not whole:
                exports = _export_repeats(call, batch, judged)
            exports = exports or _export_whole(call, batch)
        except _ListsOfRows as found:
            call = replace(call, lists=call.lists | found.lists)
            continue
        except AutoparError as error:
            failed = error
        if exports is None and call.ways.has_found_lists():
            continue
        if exports is None:  # outside of the handler: what fails from here on is not the error's doing
            assert failed is not None
            if lists is not None and not (isinstance(failed, Failed) and failed.values):
                again, lists = replace(start, signature=lists, ways=replace(start.ways, numbers={})), None
                with contextlib.suppress(AutoparError):
                    return _export(again, batch, judged, whole)
            if not valued or not isinstance(failed, Failed):
                raise failed
            call = replace(call, ways=call.ways.next(call.model, failed))
            continue
        functions = other_backwards(exports[2].applied)
        if not functions:
            return call, exports
        call = replace(call, ways=replace(call.ways, functions={**call.ways.functions, **functions}))


def _export_repeats(call: Call, batch: int, judged: bool) -> tuple[Exported, int, Exported] | None:
    """What `_export_whole` gives, from exports with fewer blocks of those that repeat; None where they do not show
    all that the model does. The second graph is a whole one only where it is run (``judged``)."""
    if not may_repeat(call.model):
        return None
    short = export_short(call, batch)
    if short is None:
        return None
    if batch == 1:
        alone = short.unrolled()
        return None if alone is None else (alone, batch, alone)
    rows = _another(batch)
    other = export_short(call, rows, short.repeats) or export_short(call, rows := 2 * batch, short.repeats)
    if other is None or not _same_program(short.exported.graph, other.exported.graph):
        return None
    whole = short.unrolled()
    second = other.unrolled() if judged and rows < batch else other.exported
    return None if whole is None or second is None else (whole, rows, second)


def _export_whole(call: Call, batch: int) -> tuple[Exported, int, Exported]:
    """The export at ``batch`` rows, another number of rows and the export with so many; of one row, which no plan
    cuts, the same again."""
    whole = export_model(call, batch)
    if batch == 1:
        return whole, batch, whole
    rows, other = _export_at_another(call, batch)
    lists = lists_of_rows(whole.outputs.paths, batch, other.outputs.paths, rows)
    if lists - call.lists:
        raise _ListsOfRows(lists)
    _refuse_other_program(whole.graph, other.graph, batch)
    return whole, rows, other


def _another(batch: int) -> int:
    return TINY if batch != TINY else TINY + 1


def _export_at_another(call: Call, batch: int) -> tuple[int, Exported]:
    """A number of rows other than ``batch``, and the model exported with so many: few, or twice as many where the
    model cannot do with few (it takes the 4 rows of largest loss)."""
    rows = _another(batch)
    try:
        return rows, export_model(call, rows)
    except AutoparError as error:
        failed = error
    with contextlib.suppress(AutoparError):
        return 2 * batch, export_model(call, 2 * batch)
    raise failed


def _refuse_other_program(whole: fx.GraphModule, tiny: fx.GraphModule, batch: int) -> None:
    """Raise unless the two graphs are the same ops on the same operands; sizes may differ."""
    other, last = _first_difference(whole, tiny)
    if other is None and len(whole.graph.nodes) == len(tiny.graph.nodes):
        return
    raise AutoparError(
        f"{place(other or last)}: does other ops at batch size {batch} than at another (a plan needs one "
        "program for any number of rows). Make the code independent of the batch size, or name the inputs that have no "
        "batch: batch_dims={'mask': None}."
    )


def _same_program(whole: fx.GraphModule, tiny: fx.GraphModule) -> bool:
    return _first_difference(whole, tiny)[0] is None and len(whole.graph.nodes) == len(tiny.graph.nodes)


def _first_difference(whole: fx.GraphModule, tiny: fx.GraphModule) -> tuple[fx.Node | None, fx.Node]:
    """The first op of ``whole`` that is another one in ``tiny``, and the last that was compared."""
    pairs = list(zip(whole.graph.nodes, tiny.graph.nodes, strict=False))
    index = {n: i for i, pair in enumerate(pairs) for n in pair}
    return next((a for a, b in pairs if not _same_op(a, b, index)), None), pairs[-1][0]


def _same_op(a: fx.Node, b: fx.Node, index: Mapping[fx.Node, int]) -> bool:
    a_flat, a_spec = tree_flatten((a.args, a.kwargs))
    b_flat, b_spec = tree_flatten((b.args, b.kwargs))
    if a.op != b.op or a.target != b.target or a_spec != b_spec:
        return False
    nodes = [(x, y) for x, y in zip(a_flat, b_flat, strict=True) if isinstance(x, fx.Node) or isinstance(y, fx.Node)]
    return all(index.get(x, -1) == index.get(y, -2) for x, y in nodes)


def _hash(graph: fx.GraphModule, parameters: Mapping[str, nn.Parameter], training: bool) -> str:
    """sha256 over ops, operands, literals, FQNs, shapes and dtypes; free of node names, devices and processes."""
    index: dict[fx.Node, int] = {}
    digest = hashlib.sha256(f"train={training}".encode())
    for name, p in parameters.items():
        digest.update(f"\n{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}".encode())
    for i, node in enumerate(graph.graph.nodes):
        index[node] = i
        kwargs = {k: v for k, v in sorted(node.kwargs.items()) if k != "device"}
        args = node.args[:-1] if node.target in OPAQUE else node.args  # its number is this process's
        flat, spec = tree_flatten((args, kwargs))
        words = [f"%{index[a]}" if isinstance(a, fx.Node) else repr(a) for a in flat if not isinstance(a, torch.device)]
        vals, _ = tree_flatten(node.meta.get("val"))
        words += [f"{v.dtype}{tuple(v.shape)}" for v in vals if isinstance(v, torch.Tensor)]
        digest.update(f"\n{node.op} {node.target} {' '.join(words)} {spec}".encode())
    return digest.hexdigest()
