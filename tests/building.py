"""What factories of small models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def net(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with this ``forward``; parts become submodules, parameters and (plain tensors) buffers."""
    module = type("Net", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            module.register_buffer(name, part)
        else:
            setattr(module, name, part)
    return module


def par(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) * 0.3).to(dtype))


def ids(n: int, *shape: int) -> Tensor:
    return torch.randint(0, n, shape)
