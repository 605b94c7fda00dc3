"""Models without values get those of one process, bit for bit, each rank its own pieces; weights are read so too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import init

import autopar
from autopar import AutoparError, Cluster
from autopar.initialise import Initialised, deferred_init, reset_parameters
from autopar.models.llama import SIZES, Llama
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.lower import ParameterUse
from autopar.runtime import jump, replay, runs
from autopar.runtime.deferred import record
from autopar.runtime.mesh import connect
from autopar.runtime.parameters import lacking, local, place
from autopar.runtime.pool import RankPool
from autopar.runtime.replay import Target
from autopar.runtime.runs import take

MESH = Mesh((Axis("dp", 2),))
SEED = 3


class Odd(nn.Module):
    """Whatever constructors do: every draw, values thrown away, own generators, forks, values asked for, numbers from
    outside, views, casts, tensors beside buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 7, padding_idx=2)
        self.conv, self.norm, self.lstm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.LSTM(5, 7, 2)
        for name in ("trunc", "orthogonal", "sparse", "twice"):
            self.register_parameter(name, nn.Parameter(torch.empty(9, 17)))
        init.trunc_normal_(self.trunc, std=0.02)
        init.orthogonal_(self.orthogonal)
        init.sparse_(self.sparse, 0.3)
        init.kaiming_uniform_(self.twice)
        init.normal_(self.twice, std=0.02)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.forked = nn.Parameter(torch.randn(30))
        self.after = nn.Parameter(torch.randn(37) * 0.1 + 1)
        self.own = nn.Parameter(torch.empty(10, 10))
        init.normal_(self.own, generator=torch.Generator().manual_seed(4))
        self.outside = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])[:, None] * torch.rand(3, 40))
        self.transposed, self.part = nn.Parameter(torch.randn(6, 5).t()), nn.Parameter(torch.rand(12, 12)[2:5])
        self.log = nn.Parameter(torch.rand(6, 9).add_(1).log())
        self.old = nn.Parameter(torch.FloatTensor(3, 4).uniform_(-1, 1))
        self.rows = nn.Parameter(torch.zeros(8, 6))
        self.rows.data[3:5].fill_(2.0)
        self.sines = nn.Parameter(torch.empty(4, 6), requires_grad=False)
        self.sines[:, 0::2] = torch.FloatTensor(numpy.sin(numpy.ones((4, 3))))
        self.sines[:, 1::2] = torch.from_numpy(numpy.ones((4, 3)))
        self.order = nn.Parameter(torch.randperm(12).double())
        self.asked = nn.Parameter(torch.rand(3 if torch.rand(()).item() > 0.5 else 4))
        self.rate = torch.linspace(0, 1, 6).tolist()[2]
        self.beside = {"table": torch.arange(3) * torch.rand(3)}
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)), persistent=False)


def hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Llama(SIZES["tiny"]),
    "hf": hf_llama,
    "hf bf16": lambda: hf_llama().bfloat16(),
    "encoder": encoder,
    "odd": Odd,
    "double": lambda: Odd().double(),
}


def real(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return factory()


def values(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


def uses(model: nn.Module) -> Iterator[ParameterUse]:
    """Parameters rest on their dims in turn, the last of some whole."""
    for i, (fqn, p) in enumerate(model.named_parameters()):
        dim = i % (p.ndim + 1)
        layout = Layout.parse("I" if dim == p.ndim else f"S{dim}", p.ndim)
        yield ParameterUse(fqn, tuple(p.shape), p.dtype, True, layout, layout, "step")


# what the ranks run


def deferred(rank: int, name: str) -> tuple[dict[str, Tensor], list[int]]:
    """Pieces of every tensor, drawn in small chunks, and the bytes that this rank holds."""
    before = replay.SMALL, runs.CHUNK, jump.LEAST
    replay.SMALL, runs.CHUNK, jump.LEAST = 64, 256, 100
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    try:
        model = deferred_init(FACTORIES[name], seed=SEED)
        names = place(model, list(uses(model)), connect(MESH))
    finally:
        replay.SMALL, runs.CHUNK, jump.LEAST = before
    assert torch.equal(state, torch.get_rng_state()) and not lacking(names)
    if name == "odd":
        assert model.rate == real(Odd).rate and torch.equal(model.beside["table"], real(Odd).beside["table"])
    return values(names), [local(p.detach()).numel() for p in names.parameters()]


class Net(nn.Module):
    """Rows ``[batch, 6]`` to a loss; the last layer is tied to the first, ``scale`` is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6)
        self.out = nn.Linear(6, 10, bias=False)
        self.out.weight = self.up.weight
        self.register_buffer("scale", torch.rand(6), persistent=False)

    def reset_parameters(self) -> None:
        init.uniform_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(self.norm(self.up(x))) * self.scale).square().mean()


def on_meta(factory: Callable[[], nn.Module]) -> Initialised:
    """A model without values, placed."""
    with torch.device("meta"):
        model = factory()
    placed = Initialised(model, 2)
    placed._ranks = connect(MESH)
    placed._adopt(place(model, list(uses(model)), placed._ranks))
    return placed


def trained(rank: int) -> tuple[Any, ...]:
    """A step from deferred values, then one from those of `init_weights`; what is said where there are none."""
    x = torch.ones(4, 6)
    parallel = autopar.compile(deferred_init(Net, seed=SEED), Cluster.local(2), args=(x,), pins="dp=2 zero=3")
    first, loss = values(parallel), parallel.step(x)
    said = [refusal(lambda: parallel.init_weights(init_zeros))]
    said.append(refusal(lambda: parallel.init_weights(seeded_init, seed=rank)))
    parallel.init_weights(seeded_init, seed=SEED)
    second, other_loss = values(parallel), parallel.step(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Net, "reset_parameters", None)
        empty = on_meta(Net)
        said.append(refusal(lambda: empty.refuse_without_values("step")))
    return first, loss, second, other_loss, said


def loaded(rank: int, folder: str) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Every kind of checkpoint, those of DCP written first, and every line for those that do not fit."""
    model = deferred_init(Net, seed=SEED)
    first = place(model, list(uses(model)), connect(MESH))
    dcp.save(first.state_dict(), checkpoint_id=f"{folder}/dcp")
    autopar.save(f"{folder}/autopar", first)
    read, said = [], []
    for path in ("one.safetensors", "folder", "autopar", "dcp"):
        placed = on_meta(Net)
        assert placed.load_weights(f"{folder}/{path}") == ([], [])
        assert not lacking(placed._held[0])
        read.append(values(placed))
    for path in (
        "missing.safetensors",
        "more.safetensors",
        "shape.safetensors",
        "dtype.safetensors",
        "nothing",
        "none",
    ):
        said.append(refusal(lambda path=path: placed.load_weights(f"{folder}/{path}")))
    equal(values(placed), read[-1])
    placed.load_weights(f"{folder}/dtype.safetensors", strict=False)
    equal(cast(values(placed), torch.bfloat16), cast(read[0], torch.bfloat16))
    assert placed.load_weights(f"{folder}/missing.safetensors", strict=False).missing_keys == ["down.bias"]
    if rank == 1:
        said.append(refusal(lambda: placed.load_weights(f"{folder}/nowhere")))
    else:
        said.append(refusal(lambda: placed.load_weights(f"{folder}/one.safetensors")))
    return read, said


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What a checkpoint holds, rounded to ``dtype``."""
    return {name: t.to(dtype) for name, t in tensors.items() if name != "scale"}


def hf_weights(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A base model's checkpoint, in several files, with the tied head missing; inv_freq is in none."""
    placed = on_meta(hf_llama)
    placed.load_weights(folder)
    read = values(placed)
    placed.init_weights(seed=SEED)
    return read, values(placed)


def refusal(fn: Callable[[], object]) -> str:
    with pytest.raises(AutoparError) as caught:
        fn()
    return str(caught.value)


def init_zeros(model: nn.Module) -> None:
    for p in model.parameters():
        init.zeros_(p)


def seeded_init(model: nn.Module) -> None:
    for t in (*model.parameters(), *model.buffers()):
        init.trunc_normal_(t, std=0.02) if t.ndim > 1 else init.uniform_(t)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=120) as pool:
        yield pool


@pytest.mark.parametrize("name", FACTORIES)
def test_pieces_have_the_values_of_one_process(name: str, pool: RankPool) -> None:
    expected = values(real(FACTORIES[name]))
    every = pool.run(deferred, name)
    for found, _ in every:
        equal(found, expected)
    whole = sum(p.numel() for p in real(FACTORIES[name]).parameters())
    assert all(sum(held) < 0.8 * whole for _, held in every)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda t: t.uniform_(-1, 1),
    "normal": lambda t: t.normal_(0.5, 0.02),
    "integers": lambda t: t.random_(0, 100),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_stream_is_where_drawing_leaves_it(dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and jumps against one call: what is kept, and the numbers that come next."""
    for module, attribute, value in ((replay, "SMALL", 64), (runs, "CHUNK", 1 << 10), (jump, "LEAST", 500)):
        monkeypatch.setattr(module, attribute, value)
    for rows, first in ((16, 7), (1003, 990), (1003, 0), (997, 400)):

        def make(rows: int = rows) -> nn.ParameterList:
            return nn.ParameterList([DRAWS[name](torch.empty(rows, 3, dtype=dtype)), torch.randn(50)])

        torch.manual_seed(SEED)
        whole, following = make()
        parameters, recorder = record(make, SEED)
        cuts = (((first, 5), (first + 6, 2)), ((0, 3),)), (((0, 50),),)
        rooms = torch.empty(7, 3, dtype=dtype), torch.empty(50)
        places = map(recorder.place, parameters)
        replay.replay(recorder.recording, [Target("p", *each) for each in zip(places, cuts, rooms, strict=True)])
        assert torch.equal(rooms[0], take(whole.detach(), cuts[0])), (rows, first)
        assert torch.equal(rooms[1], following.detach()), (rows, first)


def test_training_starts_from_them(pool: RankPool) -> None:
    model, other, x = real(Net), real(Net), torch.ones(4, 6)
    torch.manual_seed(SEED)
    seeded_init(other)
    for first, loss, second, other_loss, said in pool.run(trained):
        equal(first, values(model))
        equal(second, values(other))
        torch.testing.assert_close(loss, model(x).detach())
        torch.testing.assert_close(other_loss, other(x).detach())
        assert said[0].startswith("scale: has no value: nothing wrote all of it")
        assert said[1].startswith("init_weights: init does something else on rank 1 than on rank 0")
        assert said[2].startswith("step: up.weight, up.bias, norm.weight and 4 more have no value yet")


def test_weights_are_read_from_every_kind_of_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    model = real(Net)
    state = {name: t for name, t in model.state_dict().items() if name != "out.weight"}
    save_file(state, tmp_path / "one.safetensors")
    (tmp_path / "folder").mkdir()
    save_file({f"module.{n}": t for n, t in state.items()}, tmp_path / "folder" / "model.safetensors")
    save_file({n: t for n, t in state.items() if n != "down.bias"}, tmp_path / "missing.safetensors")
    save_file(state | {"more": torch.ones(1)}, tmp_path / "more.safetensors")
    save_file(state | {"down.bias": torch.ones(2, 2)}, tmp_path / "shape.safetensors")
    save_file({n: t.bfloat16() for n, t in state.items()}, tmp_path / "dtype.safetensors")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "pytorch_model.bin").touch()
    expected = cast(values(model))
    every = pool.run(loaded, str(tmp_path))
    for read, said in every:
        for each in read:
            equal(cast(each), expected)
        for line, pattern in zip(said, LINES, strict=False):
            assert pattern in line and "\n" not in line
    assert "there is no such file or folder" in every[1][1][-1]
    assert "rank 1 failed. Look at its own error first" in every[0][1][-1]


LINES = (
    "it has no down.bias. Name its checkpoint",
    "the model has no more. Name its checkpoint",
    "down.bias has shape (2, 2) there, (6,) here",
    "torch.bfloat16 there, torch.float32 here",
    "pytorch_model.bin cannot be read in slices",
    "there is no such file or folder",
)


def test_hugging_face_folders_load_as_they_are(pool: RankPool, tmp_path: Path) -> None:
    model = real(hf_llama)
    model.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.manual_seed(SEED)
    reset_parameters(other := hf_llama())
    torch.manual_seed(SEED)
    reset_parameters(other)
    for read, drawn in pool.run(hf_weights, str(tmp_path)):
        equal(read, values(model))
        equal(drawn, values(other))


def test_what_cannot_be_recorded_is_one_line() -> None:
    outside = torch.ones(3)
    with pytest.raises(AutoparError, match="writes into a tensor from outside"):
        deferred_init(lambda: nn.ParameterList([outside.add_(torch.ones(3))]))
    with pytest.raises(AutoparError, match="on cuda"):
        deferred_init(lambda: nn.ParameterList([torch.ops.aten.ones([2], device="cuda")]))
    with pytest.raises(AutoparError, match="the factory returned a int"):
        deferred_init(lambda: 3)
    with pytest.raises(TypeError):
        deferred_init(nn.Linear)
    for change in (lambda m: m.bfloat16(), lambda m: init.ones_(m.weight)):
        model = deferred_init(nn.Linear, 2, 2)
        change(model)
        with pytest.raises(AutoparError, match="weight: was changed after deferred_init"):
            place(model, [], connect(Mesh(())))
    garbage = deferred_init(lambda: nn.ParameterDict({"a": torch.ones(2), "b": torch.empty(2)}))
    with pytest.raises(AutoparError, match="b: has no value: nothing wrote all of it"):
        place(garbage, [], connect(Mesh(())))
