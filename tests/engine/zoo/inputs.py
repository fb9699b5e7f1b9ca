"""Several inputs, keywords and flags in; tuples, dicts and dataclasses out."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry
from tests.networks import Net


class BilinearPair(nn.Module):
    """Two inputs, one of them optional, a flag and a number, and a bilinear layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 10)
        self.gate = L0Gate(10)
        self.pair = nn.Bilinear(10, 5, 8)
        self.pair_gate = L0Gate(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, other=None, *, with_pair=True, scale=1.0):
        h = self.gate(F.relu(self.layer(x)))
        if with_pair and other is not None:
            return {"pair": self.head(self.pair_gate(torch.tanh(self.pair(h, other)))) * scale, "sum": h.sum()}
        return {"hidden": h}


class WideAndDeep(nn.Module):
    """Bags of categories beside numbers, with the factors of the bags gated."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode="sum")
        self.category = nn.Embedding(5, 4)
        self.gate = L0Gate(12)
        self.deep = nn.Sequential(nn.Linear(15, 10), nn.ReLU(), L0Gate(10), nn.Linear(10, 1))
        self.wide = nn.Linear(3, 1)

    def forward(self, words, category, numbers):
        factors = self.gate(torch.cat([self.bag(words), self.category(category)], -1))
        return torch.sigmoid(self.deep(torch.cat([factors, numbers], -1)) + self.wide(numbers)).squeeze(-1)


@dataclass
class Answer:
    """What :class:`ManyHeads` returns."""

    classes: torch.Tensor
    boxes: torch.Tensor | None
    hidden: tuple[torch.Tensor, ...] | None = None

    def to_tuple(self):
        return tuple(x for x in (self.classes, self.boxes, self.hidden) if x is not None)


class ManyHeads(nn.Module):
    """A trunk, a gate in front of each head; returns a dataclass, or a plain tuple on request."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
        self.class_gate, self.box_gate = L0Gate(12), L0Gate(12)
        self.classes, self.boxes = nn.Linear(12, 3), nn.Linear(12, 4)

    def forward(self, x, return_dict=True):
        h = self.trunk(x)
        answer = Answer(self.classes(self.class_gate(h)).log_softmax(-1), self.boxes(self.box_gate(h)))
        return answer if return_dict else answer.to_tuple()


def factorisation():
    """A factorisation machine: pairs of features interact through factors, some of which close."""

    def forward(net, features):
        factors = net.gate(net.factors(features))
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(-1)
        return pairs + net.weights(features).sum((1, 2))

    return Net(forward, factors=nn.Embedding(15, 8), gate=L0Gate(8), weights=nn.Embedding(15, 1))


ENTRIES = {
    "bilinear_pair": Entry(
        BilinearPair,
        lambda batch: {"x": torch.randn(batch, 6), "other": torch.randn(batch, 5), "with_pair": True, "scale": 2.0},
        shapes={"layer.weight": (5, 6), "pair.weight": (4, 5, 5), "head.weight": (2, 4)},
    ),
    "wide_and_deep": Entry(
        WideAndDeep,
        lambda batch: (torch.randint(0, 20, (batch, 4)), torch.randint(0, 5, (batch,)), torch.randn(batch, 3)),
        shapes={"category.weight": (5, 2), "deep.0.weight": (5, 9)},
    ),
    "many_heads": Entry(
        ManyHeads, lambda batch: torch.randn(batch, 6), shapes={"trunk.0.weight": (6, 6), "boxes.weight": (4, 6)},
    ),
    "factorisation": Entry(
        factorisation, lambda batch: torch.randint(0, 15, (batch, 4)), shapes={"factors.weight": (15, 4)},
    ),
}  # fmt: skip
