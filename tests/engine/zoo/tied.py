"""Weights that are used more than once: shared by layers, by steps, or transposed."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.zoo.attention import Block, tokens
from tests.engine.zoo.entry import Entry, normal
from tests.networks import Dense, Net


def tied_autoencoder():
    """The decoder is the encoder's transpose."""

    def forward(net, x):
        return F.linear(net.gate(torch.sigmoid(net.encoder(x))), net.encoder.weight.t(), net.bias)

    return Dense(forward, encoder=(10, 8), gate=8, bias=nn.Parameter(torch.zeros(10)))


def repeated_block():
    """ALBERT: one block, called three times with the same gates."""

    def forward(net, x):
        x = net.words(x)
        for _ in range(3):
            x = net.block(x)
        return net.head(x.mean(1))

    return Net(forward, words=nn.Embedding(20, 12), block=Block(12, 4, fused=True), head=nn.Linear(12, 3))


def shared_layer():
    """Two gates in front of one layer: a column leaves only where both are closed."""

    def forward(net, x):
        return net.shared(net.one_gate(net.one(x))) + net.shared(net.other_gate(net.other(x)).relu())

    return Dense(forward, one=(5, 8), other=(5, 8), one_gate=8, other_gate=8, shared=(8, 3))


def equilibrium(size=10):
    """A layer iterated on its own output, with the input fed in anew each time."""

    def forward(net, x):
        fed = net.read(x)
        state = torch.zeros_like(fed)
        for _ in range(4):
            state = net.gate(torch.tanh(net.layer(state) + fed))
        return net.head(state)

    return Dense(forward, read=(5, size), layer=(size, size), gate=size, head=(size, 2))


ENTRIES = {
    "tied_autoencoder": Entry(tied_autoencoder, normal(10), shapes={"encoder.weight": (4, 10), "bias": (10,)}),
    "repeated_block": Entry(
        repeated_block, tokens, shapes={"block.attention.qkv.weight": (18, 12), "block.dense.outer.weight": (12, 8)},
    ),
    "shared_layer": Entry(shared_layer, normal(5), shapes={"one.weight": (4, 5), "shared.weight": (3, 4)}),
    "equilibrium": Entry(equilibrium, normal(5), shapes={"read.weight": (5, 5), "layer.weight": (5, 5)}),
}  # fmt: skip
