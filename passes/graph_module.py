"""Graph modules whose Python code is made when they are first called: most are only read and rewritten."""

from __future__ import annotations

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(graph: fx.Graph, root: nn.Module | None = None) -> fx.GraphModule:
    """``graph`` as a module, with the attributes of ``root`` that it reads.

    >>> import torch
    >>> graph = fx.Graph()
    >>> node = graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    >>> graph_module(graph)(torch.tensor(2.0))
    tensor(-2.)
    """
    return _LazyGraphModule(nn.Module() if root is None else root, graph)


def attributes_of(gm: fx.GraphModule, graph: fx.Graph) -> nn.Module:
    """A module that owns just the attributes that ``graph`` reads."""
    root = nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            *path, name = str(node.target).split(".")
            into: nn.Module = root
            source: object = gm
            for part in path:
                source = getattr(source, part)
                if not hasattr(into, part):
                    into.add_module(part, nn.Module())
                into = getattr(into, part)
            setattr(into, name, getattr(source, name))
    return root
