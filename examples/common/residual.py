"""Residual networks: wide ones with gates, and small ones without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from pyro_l0.distributions import GateDistribution
from pyro_l0.nn import L0Gate

__all__ = ["ResidualNetwork", "wide_resnet"]


class WideBlock(nn.Module):
    """BatchNorm, ReLU, convolution, twice, beside a shortcut; the gate sits where dropout usually does."""

    def __init__(self, in_maps: int, maps: int, stride: int, prior: GateDistribution | None) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_maps)
        self.conv1 = nn.Conv2d(in_maps, maps, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(maps)
        self.gate = L0Gate(maps, dim=1, prior=prior, init_jitter=0.0)
        self.conv2 = nn.Conv2d(maps, maps, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(in_maps, maps, 1, stride, bias=False) if in_maps != maps or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, maps, height / stride, width / stride)``."""
        active = F.relu(self.norm1(x))
        hidden = self.gate(F.relu(self.norm2(self.conv1(active))))
        return self.conv2(hidden) + (x if self.shortcut is None else self.shortcut(active))


def wide_resnet(depth: int, width: int, prior: GateDistribution | None = None, classes: int = 10) -> nn.Sequential:
    """A wide residual network for images of 3 x 32 x 32 (Zagoruyko and Komodakis, 2016, arXiv:1605.07146).

    The number of layers, ``depth``, is 4 more than a multiple of 6; ``width`` is a factor on the 16, 32 and 64 maps of
    the three groups.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"Expected depth of 10, 16, 22, 28, ..., but got {depth}.")
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    maps = 16
    for group, size in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range((depth - 4) // 6):
            layers.append(WideBlock(maps, size, 2 if group and not block else 1, prior))
            maps = size
    layers += [nn.BatchNorm2d(maps), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(maps, classes)]
    net = nn.Sequential(*layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return net


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, in_maps: int, maps: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_maps, maps, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(maps)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(maps, maps, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(maps)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module | None = None
        if in_maps != maps or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(in_maps, maps, 1, stride, bias=False), nn.BatchNorm2d(maps))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, maps, height / stride, width / stride)``."""
        hidden = self.relu1(self.norm1(self.conv1(x)))
        beside = x if self.shortcut is None else self.shortcut(x)
        return self.relu2(self.norm2(self.conv2(hidden)) + beside)


class ResidualNetwork(nn.Module):
    """A convolution, a residual block for each width, of stride 2 where the width changes, and a classifier."""

    def __init__(self, channels: int, widths: Sequence[int], stride: int = 1, classes: int = 10) -> None:
        super().__init__()
        first = widths[0]
        convolution = nn.Conv2d(channels, first, 3, stride, 1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(first), nn.ReLU())
        pairs = itertools.pairwise((first, *widths))
        self.blocks = nn.Sequential(*(ResidualBlock(m, n, 1 if m == n else 2) for m, n in pairs))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.head(self.blocks(self.stem(x)))
