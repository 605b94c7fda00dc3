"""The ResNet family (He et al. 2016) with BatchNorm, with the published sizes and the parameter names of torchvision.

As in torchvision, a bottleneck strides in its 3x3 convolution.

>>> model, (images, labels), _ = make()
>>> model(images, labels).shape
torch.Size([])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of one member of the family; the defaults are those of ResNet-18."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)  # per group; every group after the first halves the image
    width: int = 64  # channels of the first group; every further group doubles them
    bottleneck: bool = False
    classes: int = 1000


SIZES = {
    "tiny": ResNetConfig(blocks=(1, 1), width=16, classes=16),
    "resnet18": ResNetConfig(),
    "resnet34": ResNetConfig(blocks=(3, 4, 6, 3)),
    "resnet50": ResNetConfig(blocks=(3, 4, 6, 3), bottleneck=True),
    "resnet101": ResNetConfig(blocks=(3, 4, 23, 3), bottleneck=True),
    "resnet152": ResNetConfig(blocks=(3, 8, 36, 3), bottleneck=True),
}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the image's size at stride 1."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; ``[batch, inputs, side, side]`` to ``[batch, width, side / stride, side / stride]``."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1; as `BasicBlock` with ``4 * width`` channels out."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Images ``[batch, 3, side, side]`` to logits ``[batch, classes]``.

    With ``labels`` ``[batch]`` the mean cross-entropy, in nats.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, config.width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        block = Bottleneck if config.bottleneck else BasicBlock
        self.groups = [f"layer{i + 1}" for i in range(len(config.blocks))]
        inputs, width = config.width, config.width
        for name, count in zip(self.groups, config.blocks, strict=True):
            strides = [1 if name == "layer1" else 2] + [1] * (count - 1)
            group = nn.Sequential()
            for stride in strides:
                group.append(block(inputs, width, stride))
                inputs = width * block.expansion
            self.add_module(name, group)
            width *= 2
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for name in self.groups:
            x = self.get_submodule(name)(x)
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits if labels is None else F.cross_entropy(logits, labels)


def make(
    size: str = "tiny", batch: int = 8, side: int = 32, seed: int = 0
) -> tuple[ResNet, tuple[Tensor, Tensor], dict[str, Any]]:
    """A model with random weights, images ``[batch, 3, side, side]`` and labels ``[batch]``; ``size``: see `SIZES`."""
    config = SIZES[size]
    torch.manual_seed(seed)
    images = torch.randn(batch, 3, side, side, device="cpu")
    labels = torch.randint(config.classes, (batch,), device="cpu")
    return ResNet(config), (images, labels), {}
