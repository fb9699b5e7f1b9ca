"""The smallest of what public architectures do: sizes that become numbers, experts, edges, patches."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry
from tests.networks import Net


def sequence(features):
    return lambda batch: torch.randn(batch, 5, features)


class SizeAsNumber(nn.Module):
    """DeBERTa: the width of a head becomes a tensor, by which scores are divided."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16)
        self.gate, self.output = L0Gate(16), nn.Linear(16, 3)

    def forward(self, x):
        q, k, v = (layer(x).view(*x.shape[:2], 2, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / torch.sqrt(torch.tensor(q.size(-1), dtype=q.dtype))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.output(self.gate(mixed))


class Experts(nn.Module):
    """Mixtral: each token goes to one of two experts, whose results are added at its place."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.inner = nn.ModuleList(nn.Linear(6, 8) for _ in range(2))
        self.gates = nn.ModuleList(L0Gate(8) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(8, 6) for _ in range(2))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight = self.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for expert, (inner, gate, outer) in enumerate(zip(self.inner, self.gates, self.outer, strict=True)):
            (rows,) = torch.where(weight.argmax(-1) == expert)
            out.index_add_(0, rows, outer(gate(F.silu(inner(tokens[rows])))) * weight[rows, expert, None])
        return out.view_as(x)


class Graph(nn.Module):
    """GCN: nodes add up what their neighbours send."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 8), L0Gate(8), nn.Linear(8, 3)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]))

    def gather(self, h):
        start, end = self.edges
        return torch.zeros_like(h).index_add(1, end, h[:, start])

    def forward(self, x):
        return self.gather(self.last(self.gate(F.relu(self.gather(self.first(x))))))


class Edges(nn.Module):
    """GAT: what nodes send is weighted by a softmax over their edges, one per head."""

    def __init__(self):
        super().__init__()
        self.send, self.score = nn.Linear(4, 8, bias=False), nn.Parameter(torch.randn(2, 4))
        self.gate, self.last = L0Gate(8), nn.Linear(8, 3)
        self.register_buffer("ends", torch.tensor([0, 1, 0, 1, 2]))

    def forward(self, x):
        h = self.send(x).view(len(x), 5, 2, 4)
        score = (h * self.score).sum(-1).exp()
        total = torch.zeros_like(score[:, :3]).index_add(1, self.ends, score)
        sent = h * (score / total[:, self.ends])[..., None]
        return self.last(self.gate(torch.zeros_like(h[:, :3]).index_add(1, self.ends, sent).flatten(2)))


class ReducedKeys(nn.Module):
    """SegFormer: keys and values come from a picture that a convolution has reduced."""

    def __init__(self):
        super().__init__()
        self.query, self.reduce, self.norm = nn.Linear(6, 6), nn.Conv2d(6, 8, 2, stride=2), nn.LayerNorm(8)
        self.gate, self.key, self.value = L0Gate(8), nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x):
        batch, width = len(x), x.shape[-1]
        picture = x.permute(0, 2, 1).reshape(batch, width, 4, 4)
        small = self.gate(self.norm(self.reduce(picture).flatten(2).transpose(1, 2)))
        return (self.query(x) @ self.key(small).transpose(-1, -2)).softmax(-1) @ self.value(small)


class SquaredChannels(nn.Module):
    """RWKV: tokens are mixed with those before them, and units are squared behind their activation."""

    def __init__(self):
        super().__init__()
        self.mix, self.key, self.gate = nn.Parameter(torch.rand(6)), nn.Linear(6, 8, bias=False), L0Gate(8)
        self.value, self.receive = nn.Linear(8, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        mixed = x * self.mix + before * (1 - self.mix)
        return self.receive(mixed).sigmoid() * self.value(self.gate(F.relu(self.key(mixed)).square()))


def patches():
    """PatchTST: windows of a series become tokens, and a head reads all of them."""
    return Net(
        lambda net, x: net.head(net.gate(F.gelu(net.embed(x.unfold(-1, 4, 2)))).flatten(-2)),
        embed=nn.Linear(4, 8), gate=L0Gate(8), head=nn.Linear(7 * 8, 3),
    )  # fmt: skip


def tucked():
    """ConvNeXt: maps become the last dimension between a depthwise convolution and a norm, and come back scaled."""
    return Net(
        lambda net, x: x + (net.out(net.gate(F.gelu(net.inner(net.norm(net.deep(x).permute(0, 2, 3, 1)))))) * net.scale)
        .permute(0, 3, 1, 2),
        deep=nn.Conv2d(6, 6, 3, padding=1, groups=6), norm=nn.LayerNorm(6), inner=nn.Linear(6, 12), gate=L0Gate(12),
        out=nn.Linear(12, 6), scale=nn.Parameter(torch.rand(6)),
    )  # fmt: skip


def pooled_minus():
    """PoolFormer: pooling minus what comes in mixes tokens; a gate stands between the two dense layers."""
    return Net(
        lambda net, x: net.last(net.gate(F.gelu(net.first(net.norm(net.pool(x) - x))))),
        norm=nn.GroupNorm(1, 4), pool=nn.AvgPool2d(3, 1, 1, count_include_pad=False), first=nn.Conv2d(4, 8, 1),
        gate=L0Gate(8, dim=1), last=nn.Conv2d(8, 4, 1),
    )  # fmt: skip


ENTRIES = {
    "size_as_number": Entry(SizeAsNumber, sequence(6), shapes={"value.weight": (8, 6), "output.weight": (3, 8)}),
    "experts": Entry(Experts, sequence(6), shapes={"inner.0.weight": (4, 6), "outer.1.weight": (6, 4)}),
    "graph": Entry(Graph, lambda batch: torch.randn(batch, 3, 4), shapes={"first.weight": (4, 4)}),
    "edges": Entry(Edges, lambda batch: torch.randn(batch, 5, 4), shapes={"last.weight": (3, 4)}),
    "reduced_keys": Entry(ReducedKeys, lambda batch: torch.randn(batch, 16, 6), shapes={"key.weight": (6, 4)}),
    "squared_channels": Entry(SquaredChannels, sequence(6), shapes={"key.weight": (4, 6), "value.weight": (6, 4)}),
    "patches": Entry(patches, lambda batch: torch.randn(batch, 16), shapes={"head.weight": (3, 28)}),
    "tucked": Entry(tucked, lambda batch: torch.randn(batch, 6, 4, 4), shapes={"inner.weight": (6, 6)}),
    "pooled_minus": Entry(
        pooled_minus, lambda batch: torch.randn(batch, 4, 5, 5), shapes={"last.weight": (4, 4, 1, 1)},
    ),
}  # fmt: skip
