"""Norms over the gated units themselves, and norms of maps, groups and instances."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.attention import feed_forward, rms_norm
from tests.engine.zoo.convolutional import images
from tests.engine.zoo.entry import Entry, second_half


class NormedStream(nn.Module):
    """A residual stream whose units are gated at every write, and behind each norm too if ``behind``.

    With gates behind the norms a closed unit leaves everywhere; without, a norm makes something of its zero.
    """

    def __init__(self, norm, behind, size=12):
        super().__init__()
        self.stem = nn.Linear(6, size)
        self.gate = L0Gate(size)
        self.norm, self.last_norm = norm(size), norm(size)
        self.dense = feed_forward(size, 10)
        self.head = nn.Linear(size, 3)
        self.behind = behind

    def forward(self, x):
        x = self.gate(self.stem(x))
        x = x + self.gate(self.dense(self.normed(self.norm, x)))
        return self.head(self.normed(self.last_norm, x))

    def normed(self, norm, x):
        return self.gate(norm(x)) if self.behind else norm(x)


class DiffusionBlock(nn.Module):
    """A diffusion U-Net's residual block: group norms, and an embedding of the time added to the maps."""

    def __init__(self, maps=8, time_size=6):
        super().__init__()
        self.stem = nn.Conv2d(3, maps, 3, padding=1)
        self.first_norm = nn.GroupNorm(4, maps)
        self.first = nn.Conv2d(maps, maps, 3, padding=1)
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time_size, maps))
        self.second_norm = nn.GroupNorm(4, maps)
        self.gate = L0Gate(maps, dim=1)
        self.second = nn.Conv2d(maps, maps, 3, padding=1)
        self.head = nn.Conv2d(maps, 3, 1)

    def forward(self, x, time):
        frequencies = torch.arange(3, dtype=x.dtype)
        angle = time[:, None].to(x.dtype) / 10**frequencies
        embedding = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        x = self.stem(x)
        h = self.first(F.silu(self.first_norm(x))) + embedding[:, :, None, None]
        h = self.second(self.gate(F.silu(self.second_norm(h))))
        return self.head(x + h)


class MapNorm(nn.LayerNorm):
    """Layer norm over the maps of each pixel, as a class of one's own."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def subclassed_norm():
    """Such a norm of gated maps, in front of other gated maps."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), L0Gate(8, dim=1), MapNorm(8), L0Gate(8, dim=1),
        nn.Conv2d(8, 6, 3), nn.ReLU(), L0Gate(6, dim=1), nn.Conv2d(6, 2, 1),
    )  # fmt: skip


class StandardisedConv(nn.Conv2d):
    """A norm-free network's convolution: each filter has mean 0 and length 1 over its inputs."""

    def forward(self, x):
        flat = self.weight.flatten(1)[None]
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return self._conv_forward(x, weight, self.bias)


def standardised_weights():
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), L0Gate(8, dim=1), StandardisedConv(8, 6, 3), nn.ReLU(), L0Gate(6, dim=1),
        nn.Conv2d(6, 2, 1),
    )  # fmt: skip


class PositionGates(nn.Module):
    """Gates on positions, over which a norm of channels takes its statistics in training mode."""

    def __init__(self):
        super().__init__()
        self.lift, self.mix, self.gate = nn.Linear(6, 8), nn.Linear(8, 10), L0Gate(10)
        self.norm, self.head, self.last = nn.BatchNorm1d(5), nn.Linear(10, 7), L0Gate(7)
        self.out = nn.Linear(7, 2)

    def forward(self, x):
        h = self.gate(F.relu(self.mix(self.lift(x))))
        return self.out(self.last(F.relu(self.head(self.norm(h)))))


def _rows(batch):
    return torch.randn(batch, 6)


ENTRIES = {
    "layer_norm_between_gates": Entry(
        lambda: NormedStream(nn.LayerNorm, behind=True), _rows,
        shapes={"stem.weight": (6, 6), "norm.weight": (6,), "dense.inner.weight": (5, 6), "head.weight": (3, 6)},
    ),
    "rms_norm_between_gates": Entry(
        lambda: NormedStream(nn.RMSNorm, behind=True), _rows,
        shapes={"stem.weight": (6, 6), "norm.weight": (6,), "head.weight": (3, 6)},
    ),
    "rms_norm_behind_gate": Entry(
        lambda: NormedStream(nn.RMSNorm, behind=False), _rows, shapes={"stem.weight": (6, 6), "norm.weight": (6,)},
    ),
    "handwritten_rms_norm": Entry(
        lambda: NormedStream(rms_norm, behind=True), _rows, shapes={"dense.inner.weight": (5, 12)},
        stays={"gate": (6, "the mean of the squares is over all units, and its number of units is no operation")},
    ),
    "layer_norm_behind_gate": Entry(
        # What a norm makes of a unit that is 0 varies with the others' mean, so that all 12 stay behind the gate.
        lambda: NormedStream(nn.LayerNorm, behind=False), _rows,
        shapes={"stem.weight": (6, 6), "dense.inner.weight": (5, 12), "dense.outer.weight": (6, 5)},
    ),
    "diffusion_block": Entry(
        DiffusionBlock, lambda batch: (torch.randn(batch, 3, 6, 6), torch.arange(batch)), second_half,
        shapes={"first.weight": (4, 8, 3, 3), "time.1.weight": (4, 6), "second_norm.weight": (4,)},
    ),
    "subclassed_norm": Entry(
        subclassed_norm, images(6), shapes={"4.weight": (3, 4, 3, 3), "7.weight": (2, 3, 1, 1)},
    ),
    "standardised_weights": Entry(
        standardised_weights, images(6), shapes={"0.weight": (4, 3, 1, 1), "3.weight": (3, 8, 3, 3)},
    ),
    "positions_before_a_norm": Entry(
        PositionGates, lambda batch: torch.randn(batch, 5, 6),
        shapes={"mix.weight": (5, 8), "head.weight": (4, 10), "out.weight": (2, 4)},
    ),
}  # fmt: skip
