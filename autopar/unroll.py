"""The graph of a model with fewer blocks as that of the whole model: the ops of a repeated block, made again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from autopar.clean_graph import LIFTED
from autopar.repeats import Repeat
from autopar.traps import REGION

NAME = re.compile(r"(.*?)(?:_(\d+))?")  # of a node: what fx made it of, and its number
ROOT = "L__self__model."  # in front of FQNs in the keys of module stacks


class NotAlike(Exception):
    """Two stretches of a graph that should be equal are not."""


def unroll(
    graph: fx.Graph,
    constants: Mapping[str, torch.Tensor],
    held: Callable[[str], torch.Tensor | None],
    repeats: Sequence[Repeat],
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """``graph``, a clean one of the shortened model, and its constants, with the blocks that were left out.

    ``held``: the tensor that the whole model has under an FQN. Names of nodes, module stacks, checkpointed regions and
    names of constants are those that an export of the whole model gives. Raises NotAlike where the graph does not
    repeat as the calls do.
    """
    for repeat in repeats:
        graph, constants = _Unrolling(graph, constants, held, repeat).run()
    return graph, dict(constants)


class _Unrolling:
    """One run of blocks: a control, which stays; the source, whose copies follow it; the tail, which reads the last.

    What stands before all blocks and belongs to one of them alone (its parameters, casts of these) is copied too.
    """

    def __init__(
        self,
        graph: fx.Graph,
        constants: Mapping[str, torch.Tensor],
        held: Callable[[str], torch.Tensor | None],
        repeat: Repeat,
    ) -> None:
        self.constants, self.held, self.repeat = dict(constants), held, repeat
        self.times = repeat.removed // repeat.period
        self.prefix = f"{repeat.container}." if repeat.container else ""
        self.number = {k: i for i, k in enumerate(repeat.keys)}
        self.stacks: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.old = list(graph.nodes)
        self.at = {n: i for i, n in enumerate(self.old)}
        starts = self._starts()
        first, second, self.tail = (starts[b] for b in (repeat.first, repeat.first + repeat.period, repeat.gap.stop))
        self.head = min(starts.values())
        self.control, self.source = range(first, second), range(second, self.tail)
        self.new = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.copies: list[dict[fx.Node, fx.Node]] = [self.env, *({} for _ in range(self.times))]
        self.twin: dict[fx.Node, fx.Node] = {}  # node of the source -> of the control
        self.later: dict[fx.Node, fx.Node] = {}  # the other way round
        self.grown: Counter[str] = Counter()  # what the numbers in names have grown by so far
        self.regions: set[int] = set()  # how far apart those of source and control are
        self.lifted: set[int] = set()  # and the numbers of their constants
        self.calls: dict[str, int] = {}  # and the calls of modules that both call
        self.scales: dict[fx.Node, dict[int, tuple[float, ...]]] = {}  # floats of a node of the source, by period
        self.made: dict[str, torch.Tensor] = {}  # the constants of the longer graph

    def run(self) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
        """The longer graph and its constants."""
        chunks = self._chunks()
        self._refuse_far_operands()
        lifted = [self._lifted(str(n.target)) for n in self.twin if n.op == "get_attr"]
        self.highest = max((found[1] for found in lifted if found is not None), default=0)
        self.own_region = min((n.meta[REGION] for n in self.twin if self._regions_apart(n)), default=0)
        at = 0
        while at < len(self.old):
            stop = chunks.get(at, at + 1)
            for node in self.old[at:stop]:
                self._keep(node)
            if at in chunks:
                self._copy(self.old[at:stop])
            at = stop
        names = [str(n.target) for n in self.new.find_nodes(op="get_attr")]
        return self.new, {n: self.made[n] for n in names if n in self.made}

    # -- what belongs to which block

    def _starts(self) -> dict[int, int]:
        """The first op of every block that was kept."""
        starts: dict[int, int] = {}
        for i, node in enumerate(self.old):
            block = self._block(node) if node.op == "call_function" else None
            if block is not None:
                starts.setdefault(block, i)
        kept = [b for b in range(len(self.repeat.keys)) if b not in self.repeat.gap]
        if list(starts) != kept:
            raise NotAlike
        return starts

    def _block(self, node: fx.Node) -> int | None:
        if node.op == "get_attr":
            return self._block_of(str(node.target))
        names = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        return next((b for b in map(self._block_of, names) if b is not None), None)

    def _block_of(self, name: str) -> int | None:
        if not name.startswith(self.prefix):
            return None
        return self.number.get(name[len(self.prefix) :].partition(".")[0])

    def _renamed(self, name: str, by: int) -> str:
        """An FQN, that of the module ``by`` blocks later where it is in a block."""
        block = self._block_of(name)
        if block is None or not by:
            return name
        return self.prefix + self.repeat.keys[block + by] + name[len(self.prefix) + len(self.repeat.keys[block]) :]

    def _owned(self) -> dict[fx.Node, int]:
        """What stands before the blocks and belongs to one -> the block; constants belong to where they are read."""
        owned: dict[fx.Node, int] = {}
        for node in self.old[: self.head]:
            block = None
            if node.op == "get_attr":
                block = self._block(node)
                if block is None and str(node.target) in self.constants:
                    block = self._reader(node)
            elif node.all_input_nodes and all(n in owned for n in node.all_input_nodes):
                blocks = {owned[n] for n in node.all_input_nodes}
                block = blocks.pop() if len(blocks) == 1 else None
            if block is not None:
                owned[node] = block
        return owned

    def _reader(self, node: fx.Node) -> int | None:
        first, period = self.repeat.first, self.repeat.period
        for block, stretch in ((first, self.control), (first + period, self.source)):
            if all(self.at[user] in stretch for user in node.users):
                return block
        return None

    def _chunks(self) -> dict[int, int]:
        """The stretches to copy, start -> stop, once they are shown to be those of the control."""
        owned, first, period = self._owned(), self.repeat.first, self.repeat.period
        apart = [range(first, first + period), range(first + period, first + 2 * period)]
        mine = [[i for i, n in enumerate(self.old[: self.head]) if owned.get(n, -1) in blocks] for blocks in apart]
        spans = [*map(_spans, mine)]
        spans[0].append((self.control.start, self.control.stop))
        spans[1].append((self.source.start, self.source.stop))
        if [b - a for a, b in spans[0]] != [b - a for a, b in spans[1]]:
            raise NotAlike
        for (a, _), (b, stop) in zip(*spans, strict=True):
            for ours, theirs in zip(self.old[a:], self.old[b:stop], strict=False):
                self._pair(ours, theirs)
        return dict(spans[1])

    # -- control and source are equal

    def _pair(self, ours: fx.Node, theirs: fx.Node) -> None:
        a, a_tree = tree_flatten((ours.args, ours.kwargs))
        b, b_tree = tree_flatten((theirs.args, theirs.kwargs))
        alike = (
            ours.op == theirs.op
            and self._same_target(ours, theirs)
            and a_tree == b_tree
            and all(self._same_operand(x, y) or self._scale(theirs, i, x, y) for i, (x, y) in enumerate(zip(a, b)))
            and list(map(_kind, tree_leaves(ours.meta.get("val"))))
            == list(map(_kind, tree_leaves(theirs.meta.get("val"))))
            and ours.meta.get("stack_trace") == theirs.meta.get("stack_trace")
            and self._same_stack(ours, theirs)
            and (ours.meta.get(REGION) is None) == (theirs.meta.get(REGION) is None)
        )
        if not alike:
            raise NotAlike
        self.twin[theirs], self.later[ours] = ours, theirs
        self.regions |= {self._regions_apart(theirs)} - {0}
        if len(self.regions) > 1 or len(self.lifted) > 1:
            raise NotAlike

    def _same_target(self, ours: fx.Node, theirs: fx.Node) -> bool:
        if ours.op != "get_attr":
            return ours.target == theirs.target
        a, b = str(ours.target), str(theirs.target)
        a_lifted, b_lifted = self._lifted(a), self._lifted(b)
        if a_lifted is None or b_lifted is None:
            return self._renamed(a, self.repeat.period) == b
        self.lifted.add(b_lifted[1] - a_lifted[1])
        x, y = self.constants[a], self.constants[b]
        same = x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
        return same and self._renamed(a_lifted[0], self.repeat.period) == b_lifted[0]

    def _same_operand(self, x: Any, y: Any) -> bool:
        if not (isinstance(x, fx.Node) and isinstance(y, fx.Node)):
            return type(x) is type(y) and (x == y or repr(x) == repr(y))
        if y in self.twin:
            return self.twin[y] is x
        if self.at[y] in self.control:  # of the block before, as the calls say; here that is the one before the control
            return self.at[x] < self.control.start and [*map(_kind, tree_leaves(x.meta.get("val")))] == [
                *map(_kind, tree_leaves(y.meta.get("val")))
            ]
        return x is y

    def _scale(self, node: fx.Node, place: int, x: Any, y: Any) -> bool:
        """Whether two literals are floats that the calls of all periods tell."""
        if not (type(x) is float and type(y) is float):
            return False
        columns = {column for column in zip(*self.repeat.scales, strict=True) if column[:2] == (x, y)}
        if len(columns) != 1:
            return False
        self.scales.setdefault(node, {})[place] = columns.pop()
        return True

    def _lifted(self, target: str) -> tuple[str, int] | None:
        found = LIFTED.fullmatch(target) if target in self.constants else None
        return None if found is None else (found[1], int(found[2]))

    def _refuse_far_operands(self) -> None:
        """What follows may read of the blocks only what the last one made, and what all of them read."""
        blocks = range(self.head, self.source.start)
        shared = {n for i in self.source for n in self.old[i].all_input_nodes if self.at[n] < self.control.start}
        for node in self.old[self.tail :]:
            if any(self.at[n] in blocks and n not in shared for n in node.all_input_nodes):
                raise NotAlike

    # -- the longer graph

    def _keep(self, node: fx.Node) -> None:
        tail, last = self.at[node] >= self.tail, self.copies[-1]

        def operand(n: fx.Node) -> fx.Node:
            return last[n] if tail and self.at[n] in self.source else self.env[n]

        target = node.target
        if node.op == "get_attr":
            found = self._lifted(str(target))
            if found is not None and self.lifted and found[1] > self.highest:
                target = f"{found[0]}{found[1] + self.times * sum(self.lifted)}"
            if str(node.target) in self.constants:
                self.made[str(target)] = self.constants[str(node.target)]
        base, number = _split(node.name)
        new = self._create(node, target, operand, _joined(base, number + self.grown[base]))
        new.meta = dict(node.meta)
        if tail:
            region = node.meta.get(REGION)
            if region is not None and self.regions and region >= self.own_region:
                new.meta[REGION] = region + self.times * sum(self.regions)
            new.meta |= self._stack_in_tail(node)
        self.env[node] = new

    def _copy(self, chunk: Sequence[fx.Node]) -> None:
        """Copies of a stretch of the source, each reading the one before as the source reads the control."""
        apart = {}
        for node in chunk:
            base, number = _split(node.name)
            apart[base] = number - _split(self.twin[node].name)[1]
        for time in range(1, self.times + 1):
            mine, before = self.copies[time], self.copies[time - 1]

            def operand(n: fx.Node, mine: Any = mine, before: Any = before) -> fx.Node:
                if n in mine:
                    return mine[n]  # type: ignore[no-any-return]
                return before[self.later[n]] if self.at[n] in self.control else self.env[n]

            for node in chunk:
                base, number = _split(node.name)
                name = _joined(base, number + self.grown[base] + time * apart[base])
                target = self._copied_name(node, time) if node.op == "get_attr" else node.target
                new = mine[node] = self._create(node, target, operand, name)
                for place, floats in self.scales.get(node, {}).items():
                    _put(new, place, floats[time + 1])
                new.meta = {**node.meta, "val": tree_map(_again, node.meta.get("val"))}
                if "nn_module_stack" in node.meta:
                    new.meta["nn_module_stack"] = self._stack(node, time)
                if REGION in node.meta:
                    new.meta[REGION] += time * self._regions_apart(node)
        for base, number in apart.items():
            self.grown[base] += self.times * number

    def _create(self, like: fx.Node, target: Any, operand: Callable[[fx.Node], fx.Node], name: str) -> fx.Node:
        if like.op == "get_attr":
            return self.new.get_attr(target)
        args, kwargs = fx.map_arg(like.args, operand), fx.map_arg(like.kwargs, operand)
        return self.new.create_node(like.op, target, args, kwargs, name)

    def _copied_name(self, node: fx.Node, time: int) -> str:
        by, target = time * self.repeat.period, str(node.target)
        found = self._lifted(target)
        if found is not None:
            name = f"{self._renamed(found[0], by)}{found[1] + time * sum(self.lifted)}"
            self.made[name] = self.constants[target].clone()
            return name
        name = self._renamed(target, by)
        tensor = self.held(name)
        if tensor is None:
            raise NotAlike
        if target in self.constants:
            self.made[name] = tensor
        return name

    def _regions_apart(self, theirs: fx.Node) -> int:
        return int(theirs.meta.get(REGION, 0)) - int(self.twin[theirs].meta.get(REGION, 0))

    # -- module stacks, whose keys count the calls of a module

    def _stack(self, node: fx.Node, time: int) -> dict[str, Any]:
        """The stack of the copy of a node of the source."""
        ours, theirs = (n.meta.get("nn_module_stack") or {} for n in (self.twin[node], node))
        key = (*ours, *theirs, time)
        if key not in self.stacks:
            by, found = time * self.repeat.period, {}
            for a, (b, (path, kind)) in zip(ours, theirs.items(), strict=True):
                (_, first), (name, second) = _called(a), _called(b)
                self.calls[name] = second - first
                count = second + time * (second - first)
                found[self._renamed_key(name, by) + f"@{count}" * (count > 0)] = self._renamed(path, by), kind
            self.stacks[key] = found
        return self.stacks[key]

    def _stack_in_tail(self, node: fx.Node) -> dict[str, Any]:
        stack = node.meta.get("nn_module_stack") or {}
        if not any(self.calls.get(_called(key)[0]) for key in stack):
            return {}
        found = {}
        for key, value in stack.items():
            name, count = _called(key)
            found[f"{name}@{count + self.times * self.calls[name]}" if self.calls.get(name) else key] = value
        return {"nn_module_stack": found}

    def _renamed_key(self, key: str, by: int) -> str:
        return ROOT + self._renamed(key[len(ROOT) :], by) if key.startswith(ROOT) else key

    def _same_stack(self, ours: fx.Node, theirs: fx.Node) -> bool:
        a, b = (n.meta.get("nn_module_stack") or {} for n in (ours, theirs))
        by = self.repeat.period
        return len(a) == len(b) and all(
            self._renamed_key(_called(x)[0], by) == _called(y)[0] and (self._renamed(p, by), k) == other
            for (x, (p, k)), (y, other) in zip(a.items(), b.items(), strict=True)
        )


def _put(node: fx.Node, place: int, value: float) -> None:
    """Another literal at a place among the flat operands of a node."""
    flat, tree = tree_flatten((node.args, node.kwargs))
    flat[place] = value
    node.args, node.kwargs = tree_unflatten(flat, tree)


def _called(key: str) -> tuple[str, int]:
    """A key of a module stack without the number of the module's call, and that."""
    name, _, count = key.partition("@")
    return name, int(count or 0)


def _split(name: str) -> tuple[str, int]:
    found = NAME.fullmatch(name)
    assert found is not None
    return found[1], int(found[2] or 0)


def _joined(base: str, number: int) -> str:
    return f"{base}_{number}" if number else base


def _kind(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _again(value: Any) -> Any:
    """A tensor of its own for a copy of a node."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring numbers, start and stop."""
    spans: list[tuple[int, int]] = []
    for i in numbers:
        if spans and spans[-1][1] == i:
            spans[-1] = (spans[-1][0], i + 1)
        else:
            spans.append((i, i + 1))
    return spans
