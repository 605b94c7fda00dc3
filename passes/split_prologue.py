"""split_prologue: afterwards what is computed once a step stands in a graph of its own, and the body reads its results.

before:  %count = cross_entropy_count(%labels)   # marked prologue
         %loss  = div(%sum, %count)
after:   prologue: %count = cross_entropy_count(%labels); return %count
         body:     %hoisted_0 = placeholder; %loss = div(%sum, %hoisted_0)
"""

from __future__ import annotations

import copy

from torch import fx

from autopar.passes.facts import KEY, Fact, fact, is_tensor, value
from autopar.passes.graph_module import attributes_of, graph_module


def split_prologue(gm: fx.GraphModule) -> tuple[fx.GraphModule | None, fx.GraphModule, tuple[str, ...]]:
    """(prologue, body, the body's new placeholders in the order of the prologue's outputs). The body is ``gm``."""
    marked = [n for n in gm.graph.nodes if n.op == "call_function" and fact(n).prologue]
    crossing = [n for n in marked if is_tensor(n) and any(u not in marked for u in n.users)]
    if not crossing:
        return None, gm, ()
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in marked or (node.op in ("placeholder", "get_attr") and any(u in marked for u in node.users)):
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
            env[node].name = node.name
    output = graph.output({"outputs": tuple(env[n] for n in crossing), "buffers": {}})
    output.meta["prologue"] = True
    output.meta[KEY] = Fact(())
    prologue = graph_module(graph, attributes_of(gm, graph))
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    names = []
    for i, node in enumerate(crossing):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"hoisted_{i}")
        last.meta = {"val": node.meta["val"], KEY: Fact((value(node),), fact(node).fqn, fact(node).source)}
        names.append(last.name)
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in marked)
    for node in reversed(marked):
        if not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return prologue, gm, tuple(names)


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes may be changed without touching ``gm``; attributes are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new = graph.node_copy(node, lambda n: env[n])
        new.meta = copy.copy(node.meta)
        env[node] = new
    return graph_module(graph, attributes_of(gm, graph))
