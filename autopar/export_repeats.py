"""An export of a model whose blocks repeat, at the cost of a few of them.

The whole model is run once without a graph (`record_calls`), which shows what every block does. It is exported with
most of the equal blocks left out, and the graph is unrolled to the full depth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from autopar.clean_graph import holder
from autopar.export_model import Call, Exported, export_model, without_opaque
from autopar.passes.graph_module import graph_module
from autopar.record_calls import record_calls
from autopar.repeats import Repeat, agrees, repeats_of, shortened, with_scales
from autopar.unroll import NotAlike, unroll


@dataclass(frozen=True)
class ShortExport:
    """``exported``: graph and constants of the model with fewer blocks; all else in it is of the whole model."""

    call: Call
    exported: Exported
    repeats: tuple[Repeat, ...]

    def unrolled(self) -> Exported | None:
        """The export of the whole model; None where the graph does not repeat as the calls do."""
        try:
            graph, constants = unroll(self.exported.graph.graph, self.exported.constants, self._held, self.repeats)
        except NotAlike:
            return None
        module = graph_module(graph, holder(graph, self.call.kinds))
        return replace(self.exported, graph=module, constants=constants)

    def _held(self, name: str) -> torch.Tensor | None:
        path, _, last = name.rpartition(".")
        found = getattr(self.call.model.get_submodule(path), last, None)
        return found if isinstance(found, torch.Tensor) else None


def export_short(call: Call, rows: int, repeats: Sequence[Repeat] = ()) -> ShortExport | None:
    """The export at ``rows`` rows with blocks left out: those of ``repeats``, or as many as the model's calls allow.

    None where there are none, where the shortened model does anything but what the whole one does, and where either
    cannot be run: the export of the whole model then says why.
    """
    with contextlib.suppress(Exception):
        whole = record_calls(call, rows)
        found = with_scales(whole, repeats) if repeats else repeats_of(call.model, whole)
        if not found:
            return None
        with shortened(call.model, found):
            if not agrees(whole, record_calls(call, rows), found):
                return None
            exported = export_model(call, rows)
        assert whole.outputs is not None
        hints = list(whole.hints)
        outputs = without_opaque(whole.outputs, hints)
        of_whole = replace(
            exported,
            outputs=outputs,
            has_loss=whole.has_loss,
            changed=whole.changed,
            hints=tuple(hints),
            applied=whole.applied,
        )
        return ShortExport(call, of_whole, found)
    return None
