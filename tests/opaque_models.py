"""Models with functions and modules that capture cannot or must not see into, or that torch.export alone misreads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 8


class Straight(torch.autograd.Function):
    """Rounds; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reversed(torch.autograd.Function):
    """The identity; the gradient is turned round and scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class Clipped(torch.autograd.Function):
    """The identity; each element of the gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


class Functions(nn.Module):
    """A weight and activations pass through functions with a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = Straight.apply(self.up(x) * 4)
        h = Reversed.apply(nn.functional.linear(h, Straight.apply(self.mid.weight * 8) / 8).relu(), 0.5)
        return (Clipped.apply(self.down(h)) - y).square().mean()


class Branch(nn.Module):
    """Which weight is used depends on the mean of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.mean() > 0 else self.other(x).tanh()


class Quantile(nn.Module):
    """Calls numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        import numpy

        return self.fc(x.clamp(max=float(numpy.quantile(x.detach().numpy(), 0.9))))


class Loop(nn.Module):
    """Runs until its values are small, and counts its calls in a buffer that is read, too."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        while x.abs().max() > 1:
            x = self.fc(x) * 0.5 / (1 + x.abs().max())
        return x / self.calls.item()


class Noisy(nn.Module):
    """Drops elements, and asks for the mean of what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.fc(x), 0.5)
        return x * 2 if x.mean() > 0 else x


class Masked(nn.Module):
    """Asks whether any element is large, and does by rows what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        large = x > 2
        if large.any():
            x = x.masked_fill(large, 2.0)
        return self.fc(x)


class Rare(nn.Module):
    """Couples its rows where they are so large as no trial makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return x - x.mean(0) if x.abs().max() > 1e6 else x


class Unread(nn.Module):
    """What comes in, and one weight, are read only where the mean is large; nobody reads the second result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other, self.start = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x) if x.mean() > 1 else self.start.expand_as(x).tanh()
        return h, self.other(h.detach())


class Untaught(torch.autograd.Function):
    """A product whose second factor gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class Unused(nn.Module):
    """Parameters without a gradient, behind opaque calls and before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), Unread(), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.inner(self.first(x) * 3)
        return (Untaught.apply(self.last(h), self.scale) - y).square().mean()


class Finite(nn.Module):
    """Asks whether all is finite, as public models do, and whether labels are legal."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if not torch.isfinite(x).all():
            x = x.clamp(-100, 100)
        return x


class Windows(nn.Module):
    """Reads overlapping windows of its rows with ``as_strided``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.fc(x.reshape(-1, 2, 8)).transpose(1, 2).contiguous()
        return rows.as_strided((rows.shape[0], 3, 8), (16, 4, 1)).sum(1).repeat(1, 2)


class Pictures(nn.Module):
    """Takes the patches of all pictures, reads how many each has, and returns a tensor for each."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, patches: Tensor, sides: Tensor) -> list[Tensor]:
        if sides.max() > 100:
            raise ValueError("a picture is too large")
        pictures = patches.split([side * side for side in sides.tolist()])
        return [self.fc(p - p.mean(0)).tanh() for p in pictures]


class OfPictures(nn.Module):
    """Its outputs have a list of pictures too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), Pictures(), nn.Linear(16, 4)

    def forward(self, sides: Tensor, patches: Tensor, y: Tensor) -> dict[str, Any]:
        pictures = self.inner(self.first(patches) * 3, sides)
        loss = (self.last(torch.stack(pictures).mean(1)) - y).square().mean()
        return {"loss": loss, "pictures": pictures}


class Around(nn.Module):
    """A module between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), inner, nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if y.max() > 1e6:
            raise ValueError("labels are too large")
        return (self.last(self.inner(self.first(x) * 3)) - y).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "functions": Functions,
    "branch": lambda: Around(Branch()),
    "numpy": lambda: Around(Quantile()),
    "loop": lambda: Around(Loop()),
    "noisy": lambda: Around(Noisy()),
    "masked": lambda: Around(Masked()),
    "rare": lambda: Around(Rare()),
    "unused": Unused,
    "finite": lambda: Around(Finite()),
    "windows": lambda: Around(Windows()),
    "pictures": OfPictures,
}


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """A model with its inputs, for `autopar.verify` too."""
    torch.manual_seed(0)
    if name == "pictures":
        sides = torch.full((ROWS,), 2)
        return OfPictures(), (sides, torch.randn(ROWS * 4, 8), torch.randn(ROWS, 4)), {}
    return MODELS[name](), (torch.randn(ROWS, 8), torch.randn(ROWS, 4)), {}
