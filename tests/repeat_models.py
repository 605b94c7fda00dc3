"""Deep models of equal blocks, and of blocks that are equal but for what depth makes of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

WIDTH, DEPTH = 8, 10


class Block(nn.Module):
    """Two linears around a residual; keeps its number."""

    def __init__(self, number: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks between an input and an output layer, and a squared error."""

    def __init__(self, block: Any = Block, depth: int = DEPTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(block(i) for i in range(depth))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.run(self.first(x))) ** 2).mean()


class Alternating(Block):
    """Every third block looks one place back, the others two: a pattern of three."""

    def forward(self, x):
        return super().forward(x + x.roll(1 if self.number % 3 == 2 else 2, 1))


class SpecialMiddle(Block):
    def forward(self, x):
        return super().forward(x.tanh() if self.number == 1 else x)


class SpecialLast(Block):
    def forward(self, x):
        return super().forward(x.tanh() if self.number == DEPTH - 1 else x)


class OneOff(Block):
    """Only block 6 is another: too few are equal on either side."""

    def forward(self, x):
        return super().forward(x.tanh() if self.number == 6 else x)


class Scaled(Block):
    """A number that depends on the depth at which the block stands."""

    def forward(self, x):
        return super().forward(x) / math.sqrt(self.number + 1)


class DropPath(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number, dropout=0.1 * number / DEPTH)


class WithBatchNorm(Block):
    """Buffers that forward changes."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class Checkpointed(Block):
    reentrant = False

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class InAutocast(Block):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        with torch.no_grad():
            scale = y.abs().mean()
        return y / scale


class WithConstants(Block):
    """Tensors made in the code, and one that is no buffer."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.shift = torch.full((WIDTH,), 0.5 + number)

    def forward(self, x):
        return super().forward(x + self.shift) * torch.tensor([0.5] * WIDTH)


class NumberedConstants(Block):
    def forward(self, x):
        return super().forward(x) * torch.tensor(0.5 + self.number)


class Counts(Block):
    """State kept in Python."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Square(torch.autograd.Function):
    """With its true derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class WithFunction(Block):
    def forward(self, x):
        return super().forward(x) + Square.apply(x)


class InPlace(Block):
    def forward(self, x):
        y = self.down(F.relu(self.up(x)))
        y.add_(x).mul_(0.5)
        return y


class Nested(Stack):
    """Blocks that are lists themselves, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(DEPTH))

    def run(self, x):
        for norm, linear in self.blocks:
            x = x + linear(norm(x))
        return x


class InSequential(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def run(self, x):
        return self.blocks(x)


class Glue(Stack):
    """Work between the blocks, by a module that all share and by the owner."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def run(self, x):
        start = x
        for block in self.blocks:
            x = block(x) + self.shared(start) * 0.1
            x = x.clone()
        return x


class TwoLists(Stack):
    """The blocks of one list read what the other one's made in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(Block(i) for i in range(DEPTH + 2))

    def run(self, x):
        seen = super().run(x)
        for block in self.more:
            x = block(x + seen)
        return x


class Zipped(Stack):
    """Two lists that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def run(self, x):
        for block, linear in zip(self.blocks, self.more):
            x = linear(block(x))
        return x


class UNet(Stack):
    """The second half reads the first one's outputs, last first."""

    def __init__(self) -> None:
        super().__init__(depth=2 * DEPTH)

    def run(self, x):
        kept = []
        for block in self.blocks[:DEPTH]:
            x = block(x)
            kept.append(x)
        for block in self.blocks[DEPTH:]:
            x = block(x + kept.pop())
        return x


class ReadsDepth(Stack):
    def run(self, x):
        for block in self.blocks:
            x = block(x) / math.sqrt(2 * len(self.blocks))
        return x


class ByIndex(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.depth = DEPTH

    def run(self, x):
        for i in range(self.depth):
            x = self.blocks[i](x)
        return x


class Sliced(ByIndex):
    def run(self, x):
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x


class Backwards(Stack):
    def run(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Averages(Stack):
    """Reads what every block made."""

    def run(self, x):
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x)
        return torch.stack(made).mean(0)


class ReadsThird(Stack):
    """Reads the third block's output at the end."""

    def run(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 2:
                third = x
        return x + third


class Carried(Stack):
    """A value of the block before last reaches a block through the one between, which only hands it on."""

    def run(self, x):
        before = x
        for block in self.blocks:
            x, before = block(x) + before.float(), x
        return x + before


class SharedBlocks(Stack):
    """Ten calls of five blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*self.blocks[:5], *self.blocks[:5]])


class TiedInside(Stack):
    """All blocks have the first one's norm."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = self.blocks[0].norm


class TiedWeights(Stack):
    """All blocks have the first one's weights, in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight = self.blocks[0].up.weight


class TiedToMiddle(Stack):
    """The output layer's weight is a row of the sixth block, which does not use it; the model lists the block first."""

    def __init__(self) -> None:
        super().__init__()
        last = self.last
        del self.last
        self.blocks[5].extra = last.weight
        self.last = last


class OtherRows(Block):
    """The sixth block does another op where there are many rows."""

    def forward(self, x):
        return super().forward(x.tanh() if self.number == 5 and len(x) > 3 else x)


class Fails(Block):
    def forward(self, x):
        if self.number == 5:
            raise ValueError("the sixth block fails")
        return super().forward(x)


class WritesCaches(Stack):
    """Equal tensors, made before the blocks, in which the first and the other blocks add up what they make."""

    def run(self, x):
        first, other = torch.zeros(1), torch.zeros(1)
        for block in self.blocks:
            x = block(x)
            (first if block.number < 5 else other).add_(x.detach().mean())
        return x * first


class OtherFactor(Block):
    """A float that differs in one block, where a graph of the first ones does not show it."""

    def forward(self, x):
        return super().forward(x * (0.7 if self.number == 6 else 0.5))


class Twice(Block):
    """A float that depends on the depth, at two places, and one that is always what the second block has there."""

    def forward(self, x):
        return super().forward(x / (0.5 + self.number)) + x * 0.5 + x / (0.5 + self.number)


class Pairs(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair):
        return self.a(pair[0]), self.b(pair[1])


class SwapsOnce(Stack):
    """Two values pass through the blocks, and change places behind one."""

    def __init__(self) -> None:
        super().__init__(Pairs)

    def run(self, x):
        pair = (x, x)
        for i, block in enumerate(self.blocks):
            pair = block(pair)[:: -1 if i == 6 else 1]
        return pair[0] - pair[1]


class Hooked(Stack):
    """One block has a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].register_forward_hook(lambda module, args, out: out * 2)


class SkipsOne(Stack):
    def run(self, x):
        for i, block in enumerate(self.blocks):
            x = x if i == 6 else block(x)
        return x


class Frozen(Stack):
    """One block's weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[6].up.weight.requires_grad_(False)


class MixedCase(Stack):
    """Constants under names that fx writes otherwise."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.Blocks = nn.ModuleList(nn.ModuleDict({"SelfAtt": WithConstants(0)}) for _ in range(DEPTH))

    def run(self, x):
        for block in self.Blocks:
            x = block["SelfAtt"](x)
        return x
