"""Networks that add: gates inside of branches, on the sum, on the stream itself, and on whole blocks."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry, normal, second_half
from tests.networks import Dense, Net


class Bottleneck(nn.Module):
    """ResNet-50's block: narrow, filter, widen; the sum is written in place."""

    def __init__(self, read, write, stride, norm):
        super().__init__()
        middle = max(write // 4, 4)
        self.narrow = nn.Sequential(nn.Conv2d(read, middle, 1, bias=False), norm(middle), nn.ReLU(inplace=True))
        self.narrow_gate = L0Gate(middle, dim=1)
        filters = nn.Conv2d(middle, middle, 3, stride, padding=1, bias=False)
        self.filter = nn.Sequential(filters, norm(middle), nn.ReLU(inplace=True))
        self.filter_gate = L0Gate(middle, dim=1)
        self.widen = nn.Sequential(nn.Conv2d(middle, write, 1, bias=False), norm(write))
        self.shortcut = None
        if read != write or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(read, write, 1, stride, bias=False), norm(write))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.narrow_gate(self.narrow(x))
        h = self.filter_gate(self.filter(h))
        h = self.widen(h)
        h += x if self.shortcut is None else self.shortcut(x)
        return self.relu(h)


def resnet(layers=(1, 2, 1, 1), width=4, norm=nn.BatchNorm2d):
    """ResNet-50's blocks at a small width, with a gate on what the head reads."""
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width), nn.ReLU(inplace=True))
    blocks, read = [], width
    for stage, count in enumerate(layers):
        for k in range(count):
            write = width * 4 * 2**stage
            blocks.append(Bottleneck(read, write, 2 if k == 0 and stage else 1, norm))
            read = write
    head = [L0Gate(read, dim=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(read, 10)]
    return nn.Sequential(stem, nn.Sequential(*blocks), *head)


def gated_stream(maps=12, blocks=3):
    """One gate at every write to the stream, so that a closed map leaves everywhere."""

    def forward(net, x):
        x = net.gate(net.stem(x))
        for block in net.blocks:
            x = F.relu(x + net.gate(block(x)))
        return net.head(x.mean((2, 3)))

    def block():
        behind = nn.BatchNorm2d(8), nn.ReLU(), L0Gate(8, dim=1)
        return nn.Sequential(nn.Conv2d(maps, 8, 3, padding=1), *behind, nn.Conv2d(8, maps, 3, padding=1))

    layers = {"stem": nn.Conv2d(3, maps, 3, padding=1), "blocks": nn.ModuleList(block() for _ in range(blocks))}
    return Dense(forward, gate=L0Gate(maps, dim=1), head=(maps, 5), **layers)


def added(*layers):
    """Adds a branch."""
    return Net(lambda net, x: x + net.branch(x), branch=nn.Sequential(*layers))


def gated_branches():
    """A gate at the end of each branch, whose maps close on the stream while others write them."""
    branches = [added(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), L0Gate(6, dim=1)) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 6, 1), *branches, nn.Conv2d(6, 2, 1))


def gated_blocks():
    """A gate on each whole branch: a closed block computes nothing."""
    blocks = [added(nn.Linear(8, 6), nn.ReLU(), L0Gate(6), nn.Linear(6, 8), whole_gate()) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 8), *blocks, nn.Linear(8, 3))


def whole_gate():
    """One gate for a whole tensor."""
    return Net(lambda net, x: net.gate(x.unsqueeze(-1)).squeeze(-1), gate=L0Gate(1))


def _groups_of(count):
    return lambda maps: nn.GroupNorm(count, maps)


def _all(size):
    """Closes every unit of sites of one unit, and every other of larger ones."""
    return torch.arange(size) % 2 == (0 if size == 1 else 1)


ENTRIES = {
    "resnet50": Entry(
        resnet, normal(3, 16, 16), shapes={"1.0.narrow.0.weight": (2, 4, 1, 1), "1.2.filter.0.weight": (4, 4, 3, 3)},
    ),
    "resnet_group_norm": Entry(
        lambda: resnet((1, 1, 1), norm=_groups_of(2)), normal(3, 8, 8), second_half,
        shapes={"1.1.narrow.0.weight": (4, 16, 1, 1), "1.1.narrow.1.weight": (4,)},
    ),
    "gated_stream": Entry(
        gated_stream, normal(3, 6, 6), shapes={"stem.weight": (6, 3, 3, 3), "blocks.2.0.weight": (4, 6, 3, 3)},
    ),
    "gated_branches": Entry(
        gated_branches, normal(3, 6, 6), shapes={"1.branch.0.weight": (3, 6, 3, 3), "0.weight": (6, 3, 1, 1)},
    ),
    "gated_blocks": Entry(
        gated_blocks, normal(5), _all,
        shapes={"1.branch.0.weight": (1, 8), "3.branch.3.weight": (8, 1)},
        stays={f"{k}.branch.4.gate": (1, "a dimension keeps one entry, and this has no other") for k in (1, 2, 3)},
    ),
}  # fmt: skip
