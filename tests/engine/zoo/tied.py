"""Weights that are used more than once: shared by layers, by steps, or transposed."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import Gate
from tests.engine.zoo.attention import Block, tokens
from tests.engine.zoo.entry import Entry


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's transpose."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(10, 8)
        self.gate = Gate(8)
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x):
        return F.linear(self.gate(torch.sigmoid(self.encoder(x))), self.encoder.weight.t(), self.bias)


class RepeatedBlock(nn.Module):
    """ALBERT: one block, called three times with the same gates."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.block = Block(12, 4, fused=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.words(x)
        for _ in range(3):
            x = self.block(x)
        return self.head(x.mean(1))


class SharedLayer(nn.Module):
    """Two gates in front of one layer: a column leaves only where both are closed."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(5, 8), nn.Linear(5, 8)
        self.one_gate, self.other_gate = Gate(8), Gate(8)
        self.shared = nn.Linear(8, 3)

    def forward(self, x):
        return self.shared(self.one_gate(self.one(x))) + self.shared(self.other_gate(self.other(x)).relu())


class Equilibrium(nn.Module):
    """A layer iterated on its own output, with the input fed in anew each time."""

    def __init__(self, size=10):
        super().__init__()
        self.read = nn.Linear(5, size)
        self.layer = nn.Linear(size, size)
        self.gate = Gate(size)
        self.head = nn.Linear(size, 2)

    def forward(self, x):
        fed = self.read(x)
        state = torch.zeros_like(fed)
        for _ in range(4):
            state = self.gate(torch.tanh(self.layer(state) + fed))
        return self.head(state)


def _rows(size):
    return lambda batch: torch.randn(batch, size)


ENTRIES = {
    "tied_autoencoder": Entry(TiedAutoencoder, _rows(10), shapes={"encoder.weight": (4, 10), "bias": (10,)}),
    "repeated_block": Entry(
        RepeatedBlock, tokens, shapes={"block.attention.qkv.weight": (18, 12), "block.dense.outer.weight": (12, 8)},
    ),
    "shared_layer": Entry(SharedLayer, _rows(5), shapes={"one.weight": (4, 5), "shared.weight": (3, 4)}),
    "equilibrium": Entry(Equilibrium, _rows(5), shapes={"read.weight": (5, 5), "layer.weight": (5, 5)}),
}  # fmt: skip
