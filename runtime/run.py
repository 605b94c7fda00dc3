"""One microbatch of a rank's program: its units forward, each value let go of after its last reader, and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.runtime.units import Fallback, Unit, unit_of

if TYPE_CHECKING:
    from autopar.passes.lower import Local
    from autopar.passes.split_units import Ref, UnitProgram
    from autopar.runtime.weights import Weights


@dataclass(frozen=True, eq=False)
class Units:
    """A program and how it is run. ``units``: by class; ``dies``: by call, the values that no later one reads, so that
    they may go while it runs; ``kept``: by call, the results that something reads."""

    program: UnitProgram
    units: tuple[Unit, ...]
    dies: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(program: UnitProgram, units: Sequence[Unit]) -> Units:
        """A program whose classes are run by ``units``."""
        last = {i: number for number, call in enumerate(program.calls) for word, i in call.args if word == "value"}
        ends = {i for word, i in (*program.outputs, *program.updates) if word == "value"}
        dies: list[list[int]] = [[] for _ in program.calls]
        for value, number in last.items():
            if value not in ends:
                dies[number].append(value)
        kept = [tuple(p for p, i in enumerate(call.results) if i in last or i in ends) for call in program.calls]
        return Units(program, tuple(units), tuple(map(tuple, dies)), tuple(kept))

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The units that autograd runs."""
        pairs = ((call.fqn, self.units[call.kind].why) for call in self.program.calls)
        return tuple(dict.fromkeys(Fallback(fqn, why) for fqn, why in pairs if why is not None))


def units_of(local: Local, device: torch.device = torch.device("cpu")) -> dict[int, Units]:  # noqa: B008
    """How a rank's microbatches are run, by their rows as `Local.units` has them."""
    return {rows: Units.of(p, [unit_of(kind, device) for kind in p.classes]) for rows, p in local.units.items()}


class Run:
    """``given``: by kind of `Ref`, all that is no parameter and no value. Call `forward`, then maybe `backward`."""

    def __init__(self, units: Units, given: Mapping[str, Sequence[Any]], weights: Weights) -> None:
        self.program, self.units, self.about = units.program, units.units, units
        self.given, self.weights = given, weights
        self.values: dict[int, Tensor] = {}
        self.held: dict[int, tuple[list[Tensor | None], Any]] = {}  # by call: values that backward reads, and its own
        self.flow: dict[int, tuple[Tensor, bool]] = {}  # gradients of values; whether they may be added to in place

    def _get(self, ref: Ref) -> Any:
        kind, i = ref
        if kind == "value":
            return self.values[i]
        if kind == "parameter":
            return self.weights.read[i]
        return i if kind == "draw" else self.given[kind][i]

    def forward(self, keep: int, *, train: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(The first ``keep`` outputs, all buffer updates); ``train``: what backward needs is held."""
        for number, call in enumerate(self.program.calls):
            self.weights.arrive()
            unit, args = self.units[call.kind], [self._get(ref) for ref in call.args]
            for value in self.about.dies[number]:
                del self.values[value]
            if train and unit.grads:
                read = [args[i] if call.args[i][0] == "value" else None for i in unit.reads]
                made, own = unit.forward(args)
                self.held[number] = read, own
            else:
                made = unit.run(args)
            self.values |= {call.results[place]: made[place] for place in self.about.kept[number]}
            del made
            self.weights.release()
        outs = tuple(self._get(ref) for ref in self.program.outputs[:keep])
        updates = tuple(self._get(ref) for ref in self.program.updates)
        if train:
            self._flow(self.program.outputs[0], torch.ones_like(outs[0]), True)
        self.values.clear()
        return outs, updates

    def backward(self, *, last: bool) -> None:
        """The gradients of this microbatch, added to those of ``weights``; ``last``: it is the last one."""
        for number in reversed(range(len(self.program.calls))):
            self.weights.arrive()
            if number in self.held:
                self._backward(number)
            self.weights.release()
            self.weights.reduce(number, last)

    def _backward(self, number: int) -> None:
        call = self.program.calls[number]
        unit, (values, own) = self.units[call.kind], self.held.pop(number)
        flow = [self.flow.pop(call.results[i], (None, False))[0] for i in unit.tangents]
        if all(g is None for g in flow):
            return
        tangents = [_zeros(unit, i, self) if g is None else g for i, g in zip(unit.tangents, flow, strict=True)]
        read = [self._get(call.args[i]) if x is None else x for i, x in zip(unit.reads, values, strict=True)]
        del values, flow
        for gradient in unit.backward(read, own, tangents):
            self._flow(call.args[gradient.arg], gradient.tensor, gradient.fresh)

    def _flow(self, ref: Ref, gradient: Tensor, fresh: bool) -> None:
        kind, i = ref
        if kind == "parameter":
            self.weights.add(i, gradient, fresh)
        elif kind == "value":
            if i in self.flow:
                total, mine = self.flow[i]
                gradient, fresh = (total.add_(gradient) if mine else total + gradient), True
            self.flow[i] = gradient, fresh


def _zeros(unit: Unit, output: int, run: Run) -> Tensor:
    """The gradient of an output that nothing flows to, beside others of its unit that have one."""
    (results,) = unit.kind.graph.graph.output_node().args
    val = results[output].meta["val"]  # type: ignore[index, union-attr]
    return torch.zeros(val.shape, dtype=val.dtype, device=run.weights.device)


__all__ = ["Run", "Units", "units_of"]
