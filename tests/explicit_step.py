"""A whole step of all ranks by the explicit graphs of their units, in one process: what `stacked_step` finds under
autograd, found without it. For judging `differentiate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.passes.differentiate import Differentiated, Untraceable, differentiate
from autopar.passes.lower import Local
from autopar.passes.split_units import Ref, UnitCall, UnitClass
from autopar.runtime.parameters import piece
from autopar.runtime.stacked import run_stacked
from autopar.runtime.stacked_step import StackedStep, _global_gradient, _pieces, _rejoined, axis_groups


class ExplicitStep:
    """``recompute``: the policy of every unit. `saved` has the bytes of each unit that forward kept and that are no
    output's, of rank 0; `held` the storages of arguments that backward reads again."""

    def __init__(self, programs: Sequence[Local], recompute: str) -> None:
        self.programs, self.recompute = programs, recompute
        self.first, self.mesh = programs[0], programs[0].mesh
        self.groups = axis_groups(self.mesh)
        self.known: dict[int, Differentiated] = {}
        self.saved: list[int] = []

    def differentiated(self, unit: UnitClass) -> Differentiated:
        if id(unit) not in self.known:
            self.known[id(unit)] = differentiate(replace(unit, recompute=self.recompute))
        return self.known[id(unit)]

    def run(self, attributes: Mapping[str, Tensor], inputs: Sequence[Tensor], key: int = 0) -> StackedStep:
        programs, first, mesh = self.programs, self.first, self.mesh
        rests: list[dict[str, Tensor]] = []
        for p in programs:
            held = {u.fqn: piece(attributes[u.fqn].detach(), u.rest, mesh, p.coordinates) for u in p.parameters}
            rests.append({u.fqn: held[u.fqn].requires_grad_(u.trainable) for u in p.parameters})
        entries: list[list[Tensor]] = [[] for _ in programs]
        for use in first.parameters:
            own = [rest[use.fqn] for rest in rests]
            if use.fqn in first.enter:
                own = run_stacked([p.enter[use.fqn] for p in programs], [[x] for x in own], self.groups)
            for rank, x in enumerate(own):
                entries[rank].append(x)
        leaves: list[dict[Ref, Any]] = []
        rows = (0,) if mesh.time is None else mesh.axes[mesh.time].rows
        pieces = [[_pieces(p, rank, m, inputs) for m in range(len(rows))] for rank, p in enumerate(programs)]
        hoisted: list[Sequence[Tensor]] = [() for _ in programs]
        fixed = [[attributes[n].detach() for n in (*first.buffers, *first.constants)] for _ in programs]
        if first.prologue is not None:
            whole = [
                [*(e.detach() for e in entries[r]), *fixed[r], *_rejoined(p, pieces[r]), key]
                for r, p in enumerate(programs)
            ]
            made = run_stacked([p.prologue for p in programs if p.prologue is not None], whole, self.groups)
            hoisted = [outputs for outputs, _ in made]
        for rank in range(len(programs)):
            leaf: dict[Ref, Any] = {("parameter", i): x.detach() for i, x in enumerate(entries[rank])}
            leaf |= {("buffer", i): attributes[n].detach() for i, n in enumerate(first.buffers)}
            leaf |= {("constant", i): attributes[n].detach() for i, n in enumerate(first.constants)}
            leaf |= {("hoisted", i): x for i, x in enumerate(hoisted[rank])} | {("key", 0): key}
            leaves.append(leaf)
        sums: list[dict[Ref, Tensor]] = [{} for _ in programs]
        losses, updates = list[Tensor](), list[Tensor]()
        for m, n in enumerate(rows):
            for rank in range(len(programs)):
                leaves[rank] |= {("input", i): x for i, x in enumerate(pieces[rank][m])} | {("microbatch", 0): m}
            outputs, updates = self._microbatch(n, [dict(leaf) for leaf in leaves], sums)
            losses.append(outputs[0])
        for i, use in enumerate(first.parameters):
            grads = [total.get(("parameter", i)) for total in sums]
            if grads[0] is not None:
                assert all(g is not None for g in grads)
                wanted = [entries[r][i] for r in range(len(programs))]
                torch.autograd.backward(wanted, grads, retain_graph=True)  # type: ignore[arg-type]
            assert use.trainable or grads[0] is None
        gradients = {u.fqn: _global_gradient(u, mesh, [rest[u.fqn].grad for rest in rests]) for u in first.parameters}
        loss = sum(losses[1:], losses[0])
        return StackedStep(loss, gradients, dict(zip(first.buffer_updates, updates, strict=True)))

    @torch.no_grad()
    def _microbatch(
        self, rows: int, known: list[dict[Ref, Any]], sums: list[dict[Ref, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Forward and backward of one; (outputs, updates) of rank 0."""
        units = [p.units[rows] for p in self.programs]
        held: list[tuple[list[UnitCall], list[Differentiated], list[list[Any]], list[list[Tensor]]]] = []
        self.saved = []
        for calls in zip(*(u.calls for u in units), strict=True):
            kinds = [u.classes[c.kind] for u, c in zip(units, calls, strict=True)]
            args = [[ref[1] if ref[0] == "draw" else known[r][ref] for ref in c.args] for r, c in enumerate(calls)]
            if kinds[0].trains:
                done = [self.differentiated(k) for k in kinds]
                made = run_stacked([d.forward for d in done], args, self.groups)
                n = len(calls[0].results)
                kept = [list(out[n:]) for out in made]
                held.append(
                    (list(calls), done, [[a[i] for i in d.keeps] for a, d in zip(args, done, strict=True)], kept)
                )
                self.saved.append(
                    sum(t.nbytes for t, s in zip(kept[0], done[0].saved, strict=True) if s.result is None)
                )
                for t, s in zip(kept[0], done[0].saved, strict=True):
                    assert tuple(t.shape) == s.shape and t.dtype == s.dtype
            else:
                made = run_stacked([k.graph for k in kinds], args, self.groups)
            for r, c in enumerate(calls):
                known[r].update((("value", i), t) for i, t in zip(c.results, made[r], strict=False))
        grads: list[dict[Ref, Tensor]] = [{} for _ in units]
        for r, u in enumerate(units):
            grads[r][u.outputs[0]] = torch.ones_like(known[r][u.outputs[0]])
        for calls, done, again, kept in reversed(held):
            if done[0].backward is None:
                continue
            given = []
            for r, (c, d) in enumerate(zip(calls, done, strict=True)):
                assert d.backward is not None
                wanted = d.backward.graph.find_nodes(op="placeholder")[len(d.keeps) + len(d.saved) :]
                tangents = [
                    _laid_out(grads[r].get(("value", c.results[i])), n.meta["val"])
                    for i, n in zip(d.tangents, wanted, strict=True)
                ]
                given.append([*again[r], *kept[r], *tangents])
            made = run_stacked([d.backward for d in done if d.backward is not None], given, self.groups)
            for r, (c, d) in enumerate(zip(calls, done, strict=True)):
                for i, g in zip(d.grads, made[r], strict=True):
                    into = sums[r] if c.args[i][0] == "parameter" else grads[r]
                    into[c.args[i]] = into[c.args[i]] + g if c.args[i] in into else g
        return [known[0][ref] for ref in units[0].outputs], [known[0][ref] for ref in units[0].updates]


def _laid_out(x: Tensor | None, like: Tensor) -> Tensor:
    """A gradient with the strides that backward was traced with; zeros where nothing came."""
    if x is not None and x.stride() == like.stride():
        return x
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
    return made if x is None else made.copy_(x)


__all__ = ["ExplicitStep", "Untraceable"]
