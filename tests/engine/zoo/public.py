"""The smallest of what public architectures do: sizes that become numbers, experts, edges, patches."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry, normal
from tests.networks import Dense, Net


def size_as_number():
    """DeBERTa: the width of a head becomes a tensor, by which scores are divided."""

    def forward(net, x):
        q, k, v = (layer(x).view(*x.shape[:2], 2, -1).transpose(1, 2) for layer in (net.query, net.key, net.value))
        scores = q @ k.transpose(-1, -2) / torch.sqrt(torch.tensor(q.size(-1), dtype=q.dtype))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return net.output(net.gate(mixed))

    return Dense(forward, query=(6, 16), key=(6, 16), value=(6, 16), gate=16, output=(16, 3))


def experts():
    """Mixtral: each token goes to one of two experts, whose results are added at its place."""

    def forward(net, x):
        tokens = x.flatten(0, 1)
        weight = net.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for expert, (inner, gate, outer) in enumerate(zip(net.inner, net.gates, net.outer, strict=True)):
            (rows,) = torch.where(weight.argmax(-1) == expert)
            out.index_add_(0, rows, outer(gate(F.silu(inner(tokens[rows])))) * weight[rows, expert, None])
        return out.view_as(x)

    makers = {"inner": lambda: nn.Linear(6, 8), "gates": lambda: L0Gate(8), "outer": lambda: nn.Linear(8, 6)}
    router = nn.Linear(6, 2)  # by which both experts have tokens of the example
    return Net(forward, router=router, **{name: nn.ModuleList([make(), make()]) for name, make in makers.items()})


def graph():
    """GCN: nodes add up what their neighbours send."""

    def gather(net, h):
        start, end = net.edges
        return torch.zeros_like(h).index_add(1, end, h[:, start])

    def forward(net, x):
        return gather(net, net.last(net.gate(F.relu(gather(net, net.first(x))))))

    edges = nn.Buffer(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]))
    return Dense(forward, first=(4, 8), gate=8, last=(8, 3), edges=edges)


def edges():
    """GAT: what nodes send is weighted by a softmax over their edges, one per head."""

    def forward(net, x):
        h = net.send(x).view(len(x), 5, 2, 4)
        score = (h * net.score).sum(-1).exp()
        total = torch.zeros_like(score[:, :3]).index_add(1, net.ends, score)
        sent = h * (score / total[:, net.ends])[..., None]
        return net.last(net.gate(torch.zeros_like(h[:, :3]).index_add(1, net.ends, sent).flatten(2)))

    score, ends = nn.Parameter(torch.randn(2, 4)), nn.Buffer(torch.tensor([0, 1, 0, 1, 2]))
    return Dense(forward, send=nn.Linear(4, 8, bias=False), score=score, gate=8, last=(8, 3), ends=ends)


def reduced_keys():
    """SegFormer: keys and values come from a picture that a convolution has reduced."""

    def forward(net, x):
        batch, width = len(x), x.shape[-1]
        picture = x.permute(0, 2, 1).reshape(batch, width, 4, 4)
        small = net.gate(net.norm(net.reduce(picture).flatten(2).transpose(1, 2)))
        return (net.query(x) @ net.key(small).transpose(-1, -2)).softmax(-1) @ net.value(small)

    reduced = {"reduce": nn.Conv2d(6, 8, 2, stride=2), "norm": nn.LayerNorm(8)}
    return Dense(forward, query=(6, 6), gate=8, key=(8, 6), value=(8, 6), **reduced)


def squared_channels():
    """RWKV: tokens are mixed with those before them, and units are squared behind their activation."""

    def forward(net, x):
        before = F.pad(x, (0, 0, 1, -1))
        mixed = x * net.mix + before * (1 - net.mix)
        return net.receive(mixed).sigmoid() * net.value(net.gate(F.relu(net.key(mixed)).square()))

    sizes = {"key": (6, 8), "value": (8, 6), "receive": (6, 6)}
    layers = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    return Dense(forward, mix=nn.Parameter(torch.rand(6)), gate=8, **layers)


def patches():
    """PatchTST: windows of a series become tokens, and a head reads all of them."""

    def forward(net, x):
        return net.head(net.gate(F.gelu(net.embed(x.unfold(-1, 4, 2)))).flatten(-2))

    return Dense(forward, embed=(4, 8), gate=8, head=(7 * 8, 3))


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
    "size_as_number": Entry(size_as_number, normal(5, 6), shapes={"value.weight": (8, 6), "output.weight": (3, 8)}),
    "experts": Entry(experts, normal(5, 6), shapes={"inner.0.weight": (4, 6), "outer.1.weight": (6, 4)}),
    "graph": Entry(graph, normal(3, 4), shapes={"first.weight": (4, 4)}),
    "edges": Entry(edges, normal(5, 4), shapes={"last.weight": (3, 4)}),
    "reduced_keys": Entry(reduced_keys, normal(16, 6), shapes={"key.weight": (6, 4)}),
    "squared_channels": Entry(squared_channels, normal(5, 6), shapes={"key.weight": (4, 6), "value.weight": (6, 4)}),
    "patches": Entry(patches, normal(16), shapes={"head.weight": (3, 28)}),
    "tucked": Entry(tucked, normal(6, 4, 4), shapes={"inner.weight": (6, 6)}),
    "pooled_minus": Entry(pooled_minus, normal(4, 5, 5), shapes={"last.weight": (4, 4, 1, 1)}),
}  # fmt: skip
