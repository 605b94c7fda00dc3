"""One microbatch of a rank's program: its units forward, each value let go of after its last reader, and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.runtime.units import Fallback, Gradient, Unit, unit_of

if TYPE_CHECKING:
    from autopar.passes.lower import Local
    from autopar.passes.split_units import Ref, UnitCall, UnitProgram
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
    """One microbatch. ``given``: by kind of `Ref`, all that is no parameter and no value; ``outputs``: how many of the
    body's there are, values for other stages stand behind them. Call `forward`, then maybe `backward`."""

    def __init__(self, units: Units, given: Mapping[str, Sequence[Any]], weights: Weights, outputs: int) -> None:
        self.program, self.units, self.about = units.program, units.units, units
        self.given, self.weights, self.outputs = given, weights, outputs
        self.values: dict[int, Tensor] = {}
        self.held: dict[int, tuple[list[Tensor | None], Any]] = {}  # by call: values that backward reads, and its own
        self.flow: dict[Ref, tuple[Tensor, bool]] = {}  # gradients of values; whether they may be added to in place
        self.left: dict[int, Any] = {}  # by call: what the gradients of its parameters are made of

    def _get(self, ref: Ref) -> Any:
        kind, i = ref
        if kind == "value":
            return self.values[i]
        if kind == "parameter":
            return self.weights.read[i]
        return i if kind == "draw" else self.given[kind][i]

    def forward(
        self, keep: Sequence[int], *, train: bool
    ) -> tuple[dict[int, Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(Those outputs, all buffer updates, what goes to other stages); ``train``: what backward needs is held."""
        for number, call in enumerate(self.program.calls):
            self.weights.arrive()
            unit, args = self.units[call.kind], [self._get(ref) for ref in call.args]
            for value in self.about.dies[number]:
                del self.values[value]
            if train and unit.grads:
                read = [args[i] if call.args[i][0] in ("value", "received") else None for i in unit.reads]
                made, own = unit.forward(args)
                self.held[number] = read, own
            else:
                made = unit.run(args)
            self.values |= {call.results[place]: made[place] for place in self.about.kept[number]}
            del made
            self.weights.release()
        outs = {i: self._get(self.program.outputs[i]) for i in keep}
        updates = tuple(self._get(ref) for ref in self.program.updates)
        sent = tuple(self._get(ref) for ref in self.program.outputs[self.outputs :])
        self.values.clear()
        self.given = {**self.given, "received": ()}  # what backward reads of it is held
        return outs, updates, sent

    def seed(self, output: int, gradient: Tensor, fresh: bool) -> None:
        """The gradient of an output, or of a value behind them, before `backward`."""
        self._flow(self.program.outputs[output], gradient, fresh)

    def backward(self, *, last: bool, part: str = "B") -> None:
        """The gradients of this microbatch, those of parameters added to those of ``weights``; ``last``: it is the last
        one. ``part``: ``"B"``: all; ``"I"``: all but those of parameters, which a later ``"W"`` makes."""
        for number in reversed(range(len(self.program.calls))):
            self.weights.arrive()
            if part == "W":
                self._rest(number)
            elif number in self.held:
                self._backward(number, part)
            self.weights.release()
            if part != "I":
                self.weights.reduce(number, last)

    def received(self, i: int) -> Tensor | None:
        """The gradient of a value of another stage, after `backward`; None where nothing flowed."""
        return self.flow.pop(("received", i), (None, False))[0]

    def _backward(self, number: int, part: str) -> None:
        call = self.program.calls[number]
        unit, (values, own) = self.units[call.kind], self.held.pop(number)
        flow = [self.flow.pop(("value", call.results[i]), (None, False))[0] for i in unit.tangents]
        if all(g is None for g in flow):
            return
        tangents = [_zeros(unit, i, self) if g is None else g for i, g in zip(unit.tangents, flow, strict=True)]
        held = dict(zip(unit.reads, values, strict=True))
        reads = unit.input_reads if part == "I" else unit.reads
        read = [self._get(call.args[i]) if held[i] is None else held[i] for i in reads]
        del held, values, flow
        if part == "I":
            gradients, self.left[number] = unit.inputs(read, own, tangents)
        else:
            gradients = unit.backward(read, own, tangents)
        self._add(call, gradients)

    def _rest(self, number: int) -> None:
        """The gradients of the parameters of a call whose other gradients are made."""
        if number in self.left:
            call = self.program.calls[number]
            unit = self.units[call.kind]
            read = [self._get(call.args[i]) for i in unit.weight_reads]
            self._add(call, unit.weights(read, self.left.pop(number)))

    def _add(self, call: UnitCall, gradients: Sequence[Gradient]) -> None:
        for gradient in gradients:
            self._flow(call.args[gradient.arg], gradient.tensor, gradient.fresh)

    def _flow(self, ref: Ref, gradient: Tensor, fresh: bool) -> None:
        kind, i = ref
        if kind == "parameter":
            self.weights.add(i, gradient, fresh)
        elif kind in ("value", "received"):
            if ref in self.flow:
                total, mine = self.flow[ref]
                gradient, fresh = (total.add_(gradient) if mine else total + gradient), True
            self.flow[ref] = gradient, fresh


def _zeros(unit: Unit, output: int, run: Run) -> Tensor:
    """The gradient of an output that nothing flows to, beside others of its unit that have one."""
    (results,) = unit.kind.graph.graph.output_node().args
    val = results[output].meta["val"]  # type: ignore[index, union-attr]
    return torch.zeros(val.shape, dtype=val.dtype, device=run.weights.device)


__all__ = ["Run", "Units", "units_of"]
