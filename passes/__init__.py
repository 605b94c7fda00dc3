"""Graph to graph: what the compiler does between capture and a rank's program.

Each name is a file of this folder with one function of that name, ``fx.GraphModule`` in and out; what the name says is
true after it ran. Reading the two tuples is reading the compiler. They hold names because reading a layout must not
cost the import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

if __name__ != "autopar.passes":
    raise ImportError(f"{__name__!r} is a folder of autopar: import autopar.passes instead")

PREPARE = (
    "counter_random",
    "composites_to_parts",
    "functionalize_mutations",
    "views_to_reshapes",
    "drop_noops",
    "slices_to_splits",
    "rows_to_gathers",
    "bags_to_sums",
    "experts_in_token_order",
    "means_to_sums",
    "cross_entropy_keeps_dims",
    "ops_keep_dims",
    "shifted_losses_keep_length",
    "recognize_causal_masks",
    "loss_stays_wide",
)
"""From the captured graph to one the rules divide well. ``annotate`` and ``hoist_normalisers`` come next."""

LOWER = ("complete_layouts", "insert_changes", "make_local", "split_units")
"""From the prepared graph to the program of a rank: strategies from pins (or a plan's), changes as nodes, local sizes
and collectives, a program for each unit. They take a mesh and more, so `autopar.build` and `autopar.passes.lower` call
them by hand."""


def run(gm: fx.GraphModule, names: tuple[str, ...]) -> fx.GraphModule:
    """Run the passes ``names`` in order on ``gm``, which they change and return.

    Example:
        >>> from autopar.passes import PREPARE, run
        >>> import torch
        >>> model = torch.fx.symbolic_trace(torch.nn.Identity())
        >>> run(model, ()) is model
        True
    """
    for name in names:
        gm = getattr(import_module(f"autopar.passes.{name}"), name)(gm)
    return gm
