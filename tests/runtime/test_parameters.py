"""Parameters keep their names, ties and values as DTensors, whatever pieces the ranks hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.errors import AutoparError
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.lower import ParameterUse
from autopar.runtime.mesh import connect, nesting, placements
from autopar.runtime.parameters import local, place, take
from autopar.runtime.pool import RankPool

MESH = Mesh((Axis("dp", 2), Axis("tp", 2)))
TIED = Mesh((Axis("dp", 4),))


class Names(nn.Module):
    """A tie, a shared submodule, a frozen and an odd parameter, buffers of both kinds and a None."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.BatchNorm1d(width)])
        self.layers.append(self.layers[0])
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(()), requires_grad=False)
        self.brief = nn.Parameter(torch.rand(7, 2).bfloat16())
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.register_buffer("nothing", None)


def rest(fqn: str, shape: tuple[int, ...], word: str) -> ParameterUse:
    layout = Layout.parse(word, len(shape))
    return ParameterUse(fqn, shape, torch.float32, True, layout, layout, "step")


def unseeded() -> Names:
    torch.seed()
    return Names()


def described(module: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()],
        "all": [n for n, _ in module.named_parameters(remove_duplicate=False)],
        "buffers": [(n, tuple(b.shape), b.dtype) for n, b in module.named_buffers()],
        "state": [(n, tuple(t.shape), t.dtype) for n, t in module.state_dict().items()],
    }


def values(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module.state_dict(), **dict(module.named_buffers())}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


# what the ranks run


def place_unseeded(rank: int) -> dict[str, Any]:
    model = unseeded()
    before = {n: t.clone() for n, t in {**model.state_dict(), **dict(model.named_buffers())}.items()}
    words = {"embed.weight": "S0@1 S0@0", "layers.0.weight": "I S1", "brief": "S0 I"}
    uses = [rest(fqn, tuple(model.get_parameter(fqn).shape), word) for fqn, word in words.items()]
    names = place(model, uses, connect(MESH))
    assert described(names) == described(model)
    tied = names.get_parameter("head.weight") is names.get_parameter("embed.weight")
    shared = names.get_submodule("layers.0") is names.get_submodule("layers.2")
    pieces = {n: local(p.detach()).clone() for n, p in names.named_parameters()}
    return {"before": before, "after": values(names), "tied": tied, "shared": shared, "pieces": pieces}


def pieces_as_dtensor_cuts(rank: int) -> None:
    ranks = connect(MESH)
    for rows in (1, 2, 3, 5, 13, 18):
        for word in ("S0 S1", "S0 I", "S0 S0", "S0@1 S0@0", "I S1", "S1 S1"):
            layout, full = Layout.parse(word, 2), torch.rand(rows, 5)
            torch.distributed.broadcast(full, 0)
            model = nn.Module()
            model.w = nn.Parameter(full)
            own = place(model, [rest("w", (rows, 5), word)], ranks).get_parameter("w")
            order = nesting([layout], MESH)
            theirs = distribute_tensor(full, ranks.device_mesh(order), placements(layout, order))
            assert torch.equal(local(own), local(theirs)) and local(own).is_contiguous(), (rows, word)
            assert torch.equal(own.full_tensor(), full), (rows, word)


def load(rank: int) -> dict[str, Tensor]:
    """A state dict loads into other pieces; the program's view of the local tensors sees it."""
    torch.manual_seed(rank == 0)
    source = place(Names(), [rest("embed.weight", (5, 3), "S0 S1")], connect(MESH))
    target = place(Names(), [rest("embed.weight", (5, 3), "I S0")], connect(MESH))
    seen = local(target.get_parameter("embed.weight").detach())
    target.load_state_dict(
        {
            n: distribute_tensor(t.full_tensor(), own.device_mesh, own.placements) if isinstance(own, DTensor) else t
            for (n, t), own in zip(source.state_dict().items(), target.state_dict().values(), strict=True)
        }
    )
    assert torch.equal(seen, local(target.get_parameter("embed.weight").detach()))
    a, b = values(source), values(target)
    return {n: (a[n].float() - b[n].float()).abs().max() for n in source.state_dict()}


def other_models(rank: int) -> None:
    place(Names(width=3 + rank // 3), [], connect(TIED))


def on_meta(rank: int) -> None:
    with torch.device("meta" if rank == 0 else "cpu"):
        model = Names()
    place(model, [], connect(TIED))


def meta_elsewhere(rank: int) -> list[Tensor]:
    with torch.device("cpu" if rank == 0 else "meta"):
        model = Names()
    return [local(p.detach()) for p in place(model, [], connect(TIED)).parameters()]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout=60) as pool:
        yield pool


def test_every_rank_starts_from_rank_0_under_the_same_names(pool: RankPool) -> None:
    every = pool.run(place_unseeded)
    assert not torch.equal(every[0]["before"]["embed.weight"], every[1]["before"]["embed.weight"])
    for result in every:
        assert result["tied"] and result["shared"]
        for name, value in every[0]["before"].items():
            assert torch.equal(result["after"][name], value), name
    held = [result["pieces"]["embed.weight"].shape[0] for result in every]
    assert held == [2, 1, 1, 1]  # tp outside, dp inside: 5 rows are 3 and 2, then 2 1 and 1 1; ranks count tp fastest
    assert [result["pieces"]["brief"].shape[0] for result in every] == [4, 4, 3, 3]


def test_pieces_are_those_of_dtensor_uneven_and_empty_too(pool: RankPool) -> None:
    pool.run(pieces_as_dtensor_cuts)


def test_a_state_dict_loads_in_place(pool: RankPool) -> None:
    for result in pool.run(load):
        assert all(difference == 0 for difference in result.values())


def test_ranks_may_build_on_meta_but_rank_0(pool: RankPool) -> None:
    every = pool.run(meta_elsewhere)
    assert all(torch.equal(a, b) for a, b in zip(every[0], every[3], strict=True))
    with pytest.raises(AutoparError, match="rank 0's model is on the meta device"):
        pool.run(on_meta)


def test_other_models_on_other_ranks_are_refused(pool: RankPool) -> None:
    with pytest.raises(AutoparError, match="rank 3 has other parameter names, shapes or dtypes than rank 0"):
        pool.run(other_models)


def test_nesting_follows_the_layouts() -> None:
    parse = lambda *words: [Layout.parse(w, 2) for w in words]
    assert nesting(parse("I I", "S0 S1"), MESH) == (0, 1)
    assert nesting(parse("I I", "S0@1 S0@0"), MESH) == (1, 0)
    assert placements(*parse("S0@1 S0@0"), (1, 0)) == [Shard(0), Shard(0)]
    assert placements(*parse("S1 I"), (1, 0)) == [Replicate(), Shard(1)]
    with pytest.raises(AutoparError, match="nest the axes dp, tp in opposite orders"):
        nesting(parse("S0 S0", "S0@1 S0@0"), MESH)


def test_take_concatenates_runs() -> None:
    x = torch.arange(24).reshape(8, 3)
    assert take(x, (((2, 2), (5, 1)), ((1, 1),))).flatten().tolist() == [7, 10, 16]
    assert take(x, (((0, 8),), ((0, 3),))).equal(x)
