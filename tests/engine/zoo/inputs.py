"""Several inputs, keywords and flags in; tuples, dicts and dataclasses out."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry, normal
from tests.networks import Dense, Net


def bilinear_pair():
    """Two inputs, one of them optional, a flag and a number, and a bilinear layer."""

    def forward(net, x, other=None, *, with_pair=True, scale=1.0):
        h = net.gate(F.relu(net.layer(x)))
        if with_pair and other is not None:
            return {"pair": net.head(net.pair_gate(torch.tanh(net.pair(h, other)))) * scale, "sum": h.sum()}
        return {"hidden": h}

    return Dense(forward, layer=(6, 10), gate=10, pair=nn.Bilinear(10, 5, 8), pair_gate=8, head=(8, 2))


def wide_and_deep():
    """Bags of categories beside numbers, with the factors of the bags gated."""

    def forward(net, words, category, numbers):
        factors = net.gate(torch.cat([net.bag(words), net.category(category)], -1))
        return torch.sigmoid(net.deep(torch.cat([factors, numbers], -1)) + net.wide(numbers)).squeeze(-1)

    deep = nn.Sequential(nn.Linear(15, 10), nn.ReLU(), L0Gate(10), nn.Linear(10, 1))
    embeddings = {"bag": nn.EmbeddingBag(20, 8, mode="sum"), "category": nn.Embedding(5, 4)}
    return Dense(forward, gate=12, deep=deep, wide=(3, 1), **embeddings)


@dataclass
class Answer:
    """What :func:`many_heads` returns."""

    classes: torch.Tensor
    boxes: torch.Tensor | None
    hidden: tuple[torch.Tensor, ...] | None = None

    def to_tuple(self):
        return tuple(x for x in (self.classes, self.boxes, self.hidden) if x is not None)


def many_heads():
    """A trunk, a gate in front of each head; returns a dataclass, or a plain tuple on request."""

    def forward(net, x, return_dict=True):
        h = net.trunk(x)
        answer = Answer(net.classes(net.class_gate(h)).log_softmax(-1), net.boxes(net.box_gate(h)))
        return answer if return_dict else answer.to_tuple()

    trunk = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
    return Dense(forward, trunk=trunk, class_gate=12, box_gate=12, classes=(12, 3), boxes=(12, 4))


def factorisation():
    """A factorisation machine: pairs of features interact through factors, some of which close."""

    def forward(net, features):
        factors = net.gate(net.factors(features))
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(-1)
        return pairs + net.weights(features).sum((1, 2))

    return Net(forward, factors=nn.Embedding(15, 8), gate=L0Gate(8), weights=nn.Embedding(15, 1))


ENTRIES = {
    "bilinear_pair": Entry(
        bilinear_pair,
        lambda batch: {"x": torch.randn(batch, 6), "other": torch.randn(batch, 5), "with_pair": True, "scale": 2.0},
        shapes={"layer.weight": (5, 6), "pair.weight": (4, 5, 5), "head.weight": (2, 4)},
    ),
    "wide_and_deep": Entry(
        wide_and_deep,
        lambda batch: (torch.randint(0, 20, (batch, 4)), torch.randint(0, 5, (batch,)), torch.randn(batch, 3)),
        shapes={"category.weight": (5, 2), "deep.0.weight": (5, 9)},
    ),
    "many_heads": Entry(many_heads, normal(6), shapes={"trunk.0.weight": (6, 6), "boxes.weight": (4, 6)}),
    "factorisation": Entry(
        factorisation, lambda batch: torch.randint(0, 15, (batch, 4)), shapes={"factors.weight": (15, 4)},
    ),
}  # fmt: skip
