"""cut_stages: afterwards there is one graph a pipeline stage, and what crosses between them has a number.

A stage is a run of units. What its units read of earlier stages comes in as ``received_<number>``, in the layout in
which its producer left it; changes of layout belong to their reader, so they run on the receiving side. A value goes
from the stage that makes it to each that reads it, however many lie between. What depends on no parameter (masks,
tables, counts) is made again on every stage that reads it, and so are changes of a parameter's own layout; a parameter
that several stages read is held by each of them.

before:  %h0 = linear(%x, %w0); %h1 = linear(%h0, %w1); %y = add(%h1, %h0)     # units 0, 1, 2
after:   stage 0 of [0, 1):  %h0 = linear(%x, %w0); return %h0                 # sends 0
         stage 1 of [1, 3):  %h1 = linear(%received_0, %w1); %y = add(%h1, %received_0)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.passes.facts import DRAWN, KEY, Fact, Strategy, fact, is_tensor, value
from autopar.passes.graph_module import attributes_of, graph_module
from autopar.passes.insert_changes import change, is_getitem, produced_layout
from autopar.passes.lower import Lowerable, OutputUse, name_of
from autopar.passes.split_prologue import copy_graph
from autopar.passes.split_units import reach
from autopar.runtime.pipeline import Crossing


@dataclass(frozen=True)
class Cut:
    """``models``: of each stage; ``crossed``: each crossing's value, and how its ranks hold it; ``outputs``: the stage
    that makes each of the model's; ``updates``: of each buffer that changes the stage that makes its new value;
    ``holders``: of each parameter the stages that read it; ``reached``: those to which a gradient of the loss comes."""

    models: tuple[Lowerable, ...]
    crossings: tuple[Crossing, ...]
    crossed: tuple[OutputUse, ...]
    outputs: tuple[int, ...]
    updates: Mapping[str, int]
    holders: Mapping[str, tuple[int, ...]]
    reached: frozenset[str]


def cut_stages(model: Lowerable, stages: Sequence[tuple[int, int]]) -> Cut:
    """One model a stage. ``stages``: half-open ranges of units that follow each other. Call `with_changes` first."""
    return _Cutting(model, [last for _, last in stages]).run()


def moved(graph: fx.Graph) -> set[fx.Node]:
    """What is read as it is held (parameters among it), and changes of its own layout: made again where it is read."""
    found = set(graph.find_nodes(op="get_attr"))
    for node in graph.nodes:
        if node.target is change and node.args[0] in found:
            found.add(node)
    return found


class _Cutting:
    def __init__(self, model: Lowerable, stops: Sequence[int]) -> None:
        self.model, self.count = model, len(stops)
        self.nodes = list(model.body.graph.nodes)
        self.output = self.nodes[-1]
        (result,) = self.output.args
        self.outputs: Sequence[fx.Node] = result["outputs"]
        self.buffers: Mapping[str, fx.Node] = result["buffers"]
        tail = model.tail
        self.tailed = [] if tail is None else list(self.outputs[len(tail.kept) :])  # what the tail reads, last
        self.moved = moved(model.body.graph)
        self.stage = self._stages(list(stops))
        grads = {n for n in self.nodes if any(v is not None and v.grad for v in fact(n).values)}
        self.reach = reach(model.body.graph, self.tailed or self.outputs[:1], grads)
        for place, node in enumerate(self.nodes):
            node.meta[DRAWN] = place  # relaxed random ops draw by it: not the same on two stages

    def run(self) -> Cut:
        held = [self._held(stage) for stage in range(self.count)]
        loss = self.stage.get(self.outputs[0], self.count - 1) if self.outputs else self.count - 1
        returns = [self.stage.get(node, loss) for node in self.outputs]
        returns[len(returns) - len(self.tailed) :] = [self.count - 1] * len(self.tailed)
        updates = {name: self.stage.get(n, next((s for s, h in enumerate(held) if n in h), 0)) for name, n in
                   self.buffers.items()}  # fmt: skip
        for node, stage in (*zip(self.outputs, returns, strict=True),
                            *((n, updates[name]) for name, n in self.buffers.items())):  # fmt: skip
            self._hold(node, stage, held[stage])
        crossings = self._crossings(held)
        models = []
        for stage, nodes in enumerate(held):
            own = [i for i, s in enumerate(returns) if s == stage]
            names = [name for name, s in updates.items() if s == stage]
            models.append(self._model(stage, nodes, crossings, own, names))
        holders = {p: tuple(s for s, m in enumerate(models) if p in m.parameters) for p in self.model.parameters}
        reached = frozenset(str(n.target) for n in self.nodes if n.op == "get_attr" and n in self.reach)
        crossed = [OutputUse(value(n).shape, value(n).dtype, produced_layout(n)) for n, _ in crossings]
        return Cut(tuple(models), (*crossings.values(),), (*crossed,), tuple(returns), updates, holders, reached)

    def _stages(self, stops: list[int]) -> dict[fx.Node, int]:
        """The stage of all that depends on a parameter."""
        parameters = frozenset(self.model.parameters)
        core = {n for n in self.nodes if n.op == "get_attr" and str(n.target) in parameters}
        unit: dict[fx.Node, int] = {}
        for node in self.nodes:
            if node.op != "call_function" or not any(n in core for n in node.all_input_nodes):
                continue
            core.add(node)
            if node in self.moved:
                continue
            before = max((unit[n] for n in node.all_input_nodes if n in unit), default=0)
            said = unit.get(node.all_input_nodes[0]) if is_getitem(node) else fact(node).unit
            unit[node] = before if said is None else max(said, before)
        return {node: min(bisect_right(stops, u), self.count - 1) for node, u in unit.items()}

    def _held(self, stage: int) -> set[fx.Node]:
        held: set[fx.Node] = set()
        for node, s in self.stage.items():
            if s == stage:
                self._hold(node, stage, held)
        return held

    def _hold(self, node: fx.Node, stage: int, held: set[fx.Node]) -> None:
        """What the graph of a stage must have so that it has ``node``; values of earlier stages are not followed."""
        waiting = [node]
        while waiting:
            n = waiting.pop()
            if n in held:
                continue
            held.add(n)
            if self.stage.get(n, stage) == stage:
                waiting.extend(n.all_input_nodes)
            else:
                assert self.stage[n] < stage, f"{n} of stage {self.stage[n]} is read by stage {stage}"

    def _crossings(self, held: Sequence[set[fx.Node]]) -> dict[tuple[fx.Node, bool], Crossing]:
        """What stages read of others, by node and whether a gradient comes back."""
        found: dict[tuple[fx.Node, bool], Crossing] = {}
        for node in self.nodes:
            source = self.stage.get(node)
            targets = [s for s, nodes in enumerate(held) if source is not None and s != source and node in nodes]
            for grad in (True, False):
                own = tuple(s for s in targets if self._flows(node, s, held[s]) == grad)
                if own:
                    assert source is not None and is_tensor(node), f"{node} crosses and is no tensor"
                    found[node, grad] = Crossing(len(found), source, own, grad)
        return found

    def _flows(self, node: fx.Node, stage: int, held: set[fx.Node]) -> bool:
        """Whether a gradient of a node comes from a stage that reads it."""
        if node not in self.reach:
            return False
        tailed = stage == self.count - 1 and node in self.tailed
        return tailed or any(u in held and self.stage.get(u) == stage and u in self.reach for u in node.users)

    def _model(
        self,
        stage: int,
        held: set[fx.Node],
        crossings: Mapping[tuple[fx.Node, bool], Crossing],
        returns: Sequence[int],
        updates: Sequence[str],
    ) -> Lowerable:
        model, graph = self.model, fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        received: list[Crossing] = []
        inputs, hoisted = frozenset(model.inputs), []
        for node in self.nodes:
            if self.stage.get(node, stage) != stage:
                if node in held:
                    both = (crossings.get((node, grad)) for grad in (True, False))
                    received.append(next(c for c in both if c is not None and stage in c.targets))
                    env[node] = self._received(graph, node, received[-1])
            elif node in held or (node.op == "placeholder" and node.name in inputs):
                env[node] = graph.node_copy(node, lambda n: env[n])
                env[node].name, env[node].meta = node.name, dict(node.meta)
                if node.op == "placeholder" and node.name not in inputs:
                    hoisted.append(node.name)
        sent = [(node, c) for (node, _), c in crossings.items() if c.source == stage]
        ends = tuple(env[self.outputs[i]] for i in returns) + tuple(env[node] for node, _ in sent)
        output = graph.output({"outputs": ends, "buffers": {name: env[self.buffers[name]] for name in updates}})
        output.meta = dict(self.output.meta)
        body = graph_module(graph, attributes_of(model.body, graph))
        prologue = _only(model.prologue, model.hoisted, hoisted) if model.prologue is not None and hoisted else None
        read = {str(n.target) for g in (body, prologue) if g is not None for n in g.graph.find_nodes(op="get_attr")}
        return replace(
            model,
            body=body,
            parameters=tuple(p for p in model.parameters if p in read),
            buffers=tuple(b for b in model.buffers if b in read),
            constants=tuple(c for c in model.constants if c in read),
            prologue=prologue,
            hoisted=tuple(h for h in model.hoisted if h in hoisted),
            returns=tuple(model.returns[i] if model.returns is not None else i for i in returns),
            tail=model.tail if stage == self.count - 1 else None,
            received=tuple(received),
            sent=tuple(c for _, c in sent),
        )

    def _received(self, graph: fx.Graph, node: fx.Node, crossing: Crossing) -> fx.Node:
        made = graph.placeholder(name_of(crossing))
        layout = produced_layout(node)
        strategy = Strategy((), tuple(range(len(self.model.mesh.axes))), (), (layout,))
        made.meta = {"val": node.meta["val"], KEY: Fact((value(node),), fact(node).fqn, fact(node).source, strategy)}
        for key in ("nn_module_stack", "stack_trace"):
            if key in node.meta:
                made.meta[key] = node.meta[key]
        return made


def _only(prologue: fx.GraphModule, hoisted: Sequence[str], wanted: Sequence[str]) -> fx.GraphModule:
    """The prologue that makes just what is read."""
    gm = copy_graph(prologue)
    output = gm.graph.output_node()
    (result,) = output.args
    ends = tuple(n for n, name in zip(result["outputs"], hoisted, strict=True) if name in wanted)  # type: ignore[index, call-overload, arg-type]
    output.args = ({"outputs": ends, "buffers": {}},)
    for node in reversed(gm.graph.nodes):
        if node is not output and not node.users:
            gm.graph.erase_node(node)
    return gm


__all__ = ["Cut", "cut_stages", "moved"]
