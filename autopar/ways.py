"""What capture does beyond torch.export, and in which order it tries that for a model that export alone cannot take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn

from autopar.decisions import Decisions, Read
from autopar.example_values import INPUT, ExampleValues, not_exporting, untraced
from autopar.opaque_calls import Numbers, OpaqueModule, modules_called
from autopar.passes.divide_work import flops
from autopar.runtime.opaque import OPAQUE
from autopar.traps import Failed, where_now

Hold = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Ways:
    """``decide``: reads of values are answered as the examples do (`decisions`). ``eager``: models that ask whether
    they are exported are told that they are not. ``modules``: FQN, and ``functions``: class of what is opaque -> why.
    ``before``: the module in which the last way failed."""

    decide: bool = False
    eager: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[type, str] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)
    before: str | None = None

    @property
    def plain(self) -> bool:
        """Whether torch.export does alone."""
        return not (self.decide or self.eager or self.modules or self.functions)

    @contextmanager
    def around(
        self, model: nn.Module, held: Sequence[tuple[Tensor, str]], examples: Callable[[], Sequence[Tensor]]
    ) -> Iterator[Hold]:
        """Around a traced forward of ``model`` on inputs whose values are ``examples()``; ``held``: its own tensors, as
        `ExampleValues` takes them. Yields what the results have to pass through."""
        if self.plain:
            yield lambda tensors: tensors
            return
        with untraced():
            values = ExampleValues([*held, *((t, INPUT) for t in examples())])
        names = {id(m): n or type(model).__name__ for n, m in model.named_modules()}
        decisions = Decisions(values, lambda: re.sub(r"\(.*/", "(", where_now(names)), self.numbers)
        with ExitStack() as stack:
            stack.enter_context(patch.object(nn.Module, "_apply", _apply_what_changes))
            if self.eager:
                stack.enter_context(not_exporting())
            stack.enter_context(modules_called(model, self.modules, self.numbers, values))
            if self.decide:
                stack.enter_context(decisions)
            yield decisions.hold

    def hints(self, graph: fx.GraphModule) -> tuple[str, ...]:
        """What is opaque in a captured graph, why, and its share of the forward's FLOPs; what is held to."""
        nodes = [n for n in graph.graph.nodes if n.op == "call_function" and flops(n)]
        total = sum(flops(n) for n in nodes)
        tried = "Pieces of it run where trials were equal, which proves nothing."
        lines = [f"{where}; called as it is, with its own backward. {tried}" for where in self.functions.values()]
        for fqn, where in self.modules.items():
            part = sum(flops(n) for n in nodes if n.target in OPAQUE and n.args[1] in (fqn, where.split(" ")[0]))
            share = f"{part / total:.0%} of the FLOPs" if total else "no FLOPs"
            lines.append(f"{where}: decides by values of tensors; called as it is ({share}). {tried}")
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.autopar.decided.default):
            lines += [
                f"{where}: decided as the examples do; a batch that decides otherwise ends the step."
                for where in dict.fromkeys(node.args[2])
            ]
        return tuple(lines)

    def has_found_lists(self) -> bool:
        """Whether an opaque module was found to return a list as long as there are rows; asked once of each."""
        modules = [call for call, _ in self.numbers.values() if isinstance(call, OpaqueModule) and call.found_lists]
        for call in modules:
            call.begin_again()
        return bool(modules)

    def next(self, model: nn.Module, error: Failed) -> Ways:
        """What to try after ``error``; raises it where nothing is left."""
        if not self.decide:
            return replace(self, decide=True, before=error.fqn)
        if not self.eager and not error.values:
            return replace(self, eager=True, before=error.fqn)
        fqn = error.fqn
        if fqn is None:
            raise error
        within = next((n for n in self.modules if n == fqn or _inside(fqn, n)), None)
        if within == "":
            raise error
        if within is not None:
            fqn = _caller(model, within)
        kind = type(model.get_submodule(fqn))
        alike = {n: error.where if n == fqn else f"{n}, as {fqn}" for n, m in model.named_modules() if type(m) is kind}
        modules = {**self.modules, **alike}
        outer = {n: w for n, w in modules.items() if not any(n != o and _inside(n, o) for o in modules)}
        eager = self.eager and self.before != error.fqn  # where it did not help it is taken back
        return replace(self, modules=outer, eager=eager, before=error.fqn)


def _apply_what_changes(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``to()`` and its like, which torch cannot do while tracing, where they change nothing."""
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        made = function(tensor)
        if (made.dtype, made.device, made.shape) != (tensor.dtype, tensor.device, tensor.shape):
            raise Read("changes its parameters while it runs")
    return module


def _caller(model: nn.Module, fqn: str) -> str:
    """The next module outwards that has a forward of its own."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        if type(model.get_submodule(fqn)).forward is not nn.Module.forward:
            return fqn
    return ""


def _inside(fqn: str, outer: str) -> bool:
    return not outer or fqn.startswith(outer + ".")
