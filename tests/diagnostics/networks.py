"""Small networks with gates, for digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyro_l0 import HardConcrete
from pyro_l0.nn import L0Gate, gate_heads, insert_gates
from tests.networks import Net


def mlp(inputs: bool = False, prior: HardConcrete | None = None) -> nn.Sequential:
    first = [L0Gate(64, init_jitter=0.0)] if inputs else []
    layers = [
        nn.Linear(64, 60),
        nn.ReLU(),
        L0Gate(60, prior=prior, init_jitter=0.0),
        nn.Linear(60, 40),
        nn.ReLU(),
        L0Gate(40, prior=prior, init_jitter=0.0),
    ]
    return nn.Sequential(*first, *layers, nn.Linear(40, 10))


def convolution(inputs: int, outputs: int, gated: bool = True) -> list[nn.Module]:
    """With BatchNorm, an activation and gates behind it."""
    last = [nn.ReLU(), L0Gate(outputs, dim=1, init_jitter=0.0)] if gated else []
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), *last]


def cnn(dropout: float = 0.0) -> nn.Sequential:
    """Two convolutions with BatchNorm and gates."""
    first, second = convolution(1, 12), convolution(12, 24)
    pools = nn.MaxPool2d(2), nn.Dropout(dropout), nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(*first, *pools[:2], *second, pools[2], nn.Flatten(), nn.Linear(96, 10))


def residual_network() -> Net:
    """A stream with two branches of which a gate each takes all."""

    def forward(net: Net, x: Tensor) -> Tensor:
        x = net.enter(x)
        for branch in net.branches:
            x = x + branch(x)
        return net.leave(x)

    def branch() -> nn.Sequential:
        units = nn.BatchNorm1d(32), nn.Linear(32, 48), nn.ReLU(), L0Gate(48, init_jitter=0.0), nn.Linear(48, 32)
        return nn.Sequential(*units, L0Gate(1, init_jitter=0.0))

    enter, branches = nn.Linear(64, 32), nn.ModuleList(branch() for _ in range(2))
    return Net(forward, enter=enter, branches=branches, leave=nn.Linear(32, 10))


def residual_cnn() -> Net:
    """Two blocks of convolutions with BatchNorm beside a stream of maps."""

    def forward(net: Net, x: Tensor) -> Tensor:
        x = net.enter(x)
        for block in net.blocks:
            x = torch.relu(x + block(x))
        return net.leave(x.mean((2, 3)))

    enter = nn.Sequential(*convolution(1, 12, gated=False), nn.ReLU())
    blocks = [nn.Sequential(*convolution(12, 16), *convolution(16, 12, gated=False)) for _ in range(2)]
    return Net(forward, enter=enter, blocks=nn.ModuleList(blocks), leave=nn.Linear(12, 10))


def transformer_network():
    """Rows of an image as tokens, one encoder layer."""
    return Net(
        lambda net, images: net.head(net.encoder(net.embed(images)).mean(1)),
        embed=nn.Linear(8, 32),
        encoder=nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True, dropout=0.0),
        head=nn.Linear(32, 10),
    )


def transformer() -> nn.Module:
    """With gates on its heads and hidden units."""
    gated = gate_heads(transformer_network(), {"encoder.self_attn.out_proj": 4})
    return insert_gates(gated, {"encoder.linear1": L0Gate(64, init_jitter=0.0)})
