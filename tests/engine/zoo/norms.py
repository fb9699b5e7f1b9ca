"""Norms over the gated units themselves, and norms of maps, groups and instances."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.attention import feed_forward, rms_norm
from tests.engine.zoo.entry import Entry, normal, second_half
from tests.networks import Dense, Net


def normed_stream(norm, behind, size=12):
    """A residual stream whose units are gated at every write, and behind each norm too if ``behind``.

    With gates behind the norms a closed unit leaves everywhere; without, a norm makes something of its zero.
    """

    def forward(net, x):
        normed = (lambda norm, x: net.gate(norm(x))) if behind else (lambda norm, x: norm(x))
        x = net.gate(net.stem(x))
        x = x + net.gate(net.dense(normed(net.norm, x)))
        return net.head(normed(net.last_norm, x))

    layers = {"norm": norm(size), "last_norm": norm(size), "dense": feed_forward(size, 10)}
    return Dense(forward, stem=(6, size), gate=size, head=(size, 3), **layers)


def diffusion_block(maps=8, time_size=6):
    """A diffusion U-Net's residual block: group norms, and an embedding of the time added to the maps."""

    def forward(net, x, time):
        angle = time[:, None].to(x.dtype) / 10 ** torch.arange(3, dtype=x.dtype)
        embedding = net.time(torch.cat([angle.sin(), angle.cos()], -1))
        x = net.stem(x)
        h = net.first(F.silu(net.first_norm(x))) + embedding[:, :, None, None]
        h = net.second(net.gate(F.silu(net.second_norm(h))))
        return net.head(x + h)

    return Net(
        forward, stem=nn.Conv2d(3, maps, 3, padding=1), first_norm=nn.GroupNorm(4, maps),
        first=nn.Conv2d(maps, maps, 3, padding=1), time=nn.Sequential(nn.SiLU(), nn.Linear(time_size, maps)),
        second_norm=nn.GroupNorm(4, maps), gate=L0Gate(maps, dim=1), second=nn.Conv2d(maps, maps, 3, padding=1),
        head=nn.Conv2d(maps, 3, 1),
    )  # fmt: skip


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


def position_gates():
    """Gates on positions, over which a norm of channels takes its statistics in training mode."""

    def forward(net, x):
        h = net.gate(F.relu(net.mix(net.lift(x))))
        return net.out(net.last(F.relu(net.head(net.norm(h)))))

    layers = {"lift": (6, 8), "mix": (8, 10), "gate": 10, "norm": nn.BatchNorm1d(5), "head": (10, 7)}
    return Dense(forward, last=7, out=(7, 2), **layers)


ENTRIES = {
    "layer_norm_between_gates": Entry(
        lambda: normed_stream(nn.LayerNorm, behind=True), normal(6),
        shapes={"stem.weight": (6, 6), "norm.weight": (6,), "dense.inner.weight": (5, 6), "head.weight": (3, 6)},
    ),
    "rms_norm_between_gates": Entry(
        lambda: normed_stream(nn.RMSNorm, behind=True), normal(6),
        shapes={"stem.weight": (6, 6), "norm.weight": (6,), "head.weight": (3, 6)},
    ),
    "rms_norm_behind_gate": Entry(
        lambda: normed_stream(nn.RMSNorm, behind=False), normal(6), shapes={"stem.weight": (6, 6), "norm.weight": (6,)},
    ),
    "handwritten_rms_norm": Entry(
        lambda: normed_stream(rms_norm, behind=True), normal(6), shapes={"dense.inner.weight": (5, 12)},
        stays={"gate": (6, "the mean of the squares is over all units, and its number of units is no operation")},
    ),
    "layer_norm_behind_gate": Entry(
        # What a norm makes of a unit that is 0 varies with the others' mean, so that all 12 stay behind the gate.
        lambda: normed_stream(nn.LayerNorm, behind=False), normal(6),
        shapes={"stem.weight": (6, 6), "dense.inner.weight": (5, 12), "dense.outer.weight": (6, 5)},
    ),
    "diffusion_block": Entry(
        diffusion_block, lambda batch: (torch.randn(batch, 3, 6, 6), torch.arange(batch)), second_half,
        shapes={"first.weight": (4, 8, 3, 3), "time.1.weight": (4, 6), "second_norm.weight": (4,)},
    ),
    "subclassed_norm": Entry(
        subclassed_norm, normal(3, 6, 6), shapes={"4.weight": (3, 4, 3, 3), "7.weight": (2, 3, 1, 1)},
    ),
    "standardised_weights": Entry(
        standardised_weights, normal(3, 6, 6), shapes={"0.weight": (4, 3, 1, 1), "3.weight": (3, 8, 3, 3)},
    ),
    "positions_before_a_norm": Entry(
        position_gates, normal(5, 6), shapes={"mix.weight": (5, 8), "head.weight": (4, 10), "out.weight": (2, 4)},
    ),
}  # fmt: skip
