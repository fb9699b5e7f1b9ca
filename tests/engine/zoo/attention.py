"""Attention by hand, by torch's functions and by torch's modules, with gates on heads, units and blocks."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate, gate_heads
from tests.engine.zoo.entry import Entry, normal
from tests.networks import Dense, Net


class Attention(nn.Module):
    """Softmax attention with a gate per head.

    ``fused`` computes queries, keys and values by one projection; ``fixed`` writes the number of heads into its views,
    where others ask for what is left.
    """

    def __init__(self, size, heads, fused=False, fixed=False):
        super().__init__()
        self.heads, self.head_size = heads, size // heads
        self.fused, self.fixed = fused, fixed
        if fused:
            self.qkv = nn.Linear(size, 3 * size)
        else:
            self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.output = nn.Linear(size, size)
        self.gate = L0Gate(heads, dim=1)

    def forward(self, x):
        projected = self.qkv(x).chunk(3, -1) if self.fused else (self.query(x), self.key(x), self.value(x))
        query, key, value = (self.split(part) for part in projected)
        weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(self.head_size), -1)
        return self.output(self.gate(weights @ value).transpose(1, 2).reshape(*x.shape[:2], -1))

    def split(self, x):
        heads = self.heads if self.fixed else -1
        return x.view(*x.shape[:2], heads, self.head_size).transpose(1, 2)


def feed_forward(size, hidden):

    def forward(net, x):
        return net.outer(net.gate(F.gelu(net.inner(x))))

    return Dense(forward, inner=(size, hidden), gate=hidden, outer=(hidden, size))


class Block(nn.Module):
    """Attention and dense layers, each normalised first and added to the stream."""

    def __init__(self, size, heads, **options):
        super().__init__()
        self.attention_norm, self.dense_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(size, heads, **options)
        self.dense = feed_forward(size, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.dense(self.dense_norm(x)))


class LanguageModel(nn.Module):
    """Embeddings of words and places, blocks, and a head that shares the embedding."""

    def __init__(self, size=12, heads=4, words=20, **options):
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.places = nn.Parameter(torch.randn(1, 7, size) * 0.1)
        self.blocks = nn.Sequential(*(Block(size, heads, **options) for _ in range(2)))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places[:, : tokens.shape[1]])))


def causal_attention(size=12, heads=4):
    """Torch's fused attention on one projection, whose view holds all sizes as numbers (nanoGPT's ways)."""

    def forward(net, x):
        batch, time, _ = x.shape
        query, key, value = net.qkv(x).view(batch, time, 3, net.heads, net.size // net.heads).permute(2, 0, 3, 1, 4)
        attended = net.gate(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return net.output(attended.transpose(1, 2).reshape(batch, time, -1))

    layers = {"qkv": nn.Linear(size, 3 * size), "gate": L0Gate(heads, dim=1), "output": nn.Linear(size, 5)}
    return Net(forward, size=size, heads=heads, **layers)


def rms_norm(size):
    """The norm as language models write it out."""

    def forward(net, x):
        return net.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    return Net(forward, weight=nn.Parameter(torch.ones(size)))


def encoder_heads():
    """Torch's encoder with gates on the heads, whose attention is swapped for one of plain layers."""
    layer = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return gate_heads(encoder, {f"layers.{k}.self_attn.out_proj": 4 for k in range(2)})


def attention_module():
    """Torch's attention, which is kept whole, in front of gated units."""

    def forward(net, x):
        return net.head(net.gate(F.relu(net.inner(net.attention(x, x, x, need_weights=False)[0]))))

    attention = nn.MultiheadAttention(12, 4, batch_first=True)
    return Dense(forward, attention=attention, inner=(12, 16), gate=16, head=(16, 3))


def vision_transformer(size=12, heads=3):
    """Patches and a class token; one gate on each branch of each block."""

    def forward(net, image):
        x = net.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([net.token.expand(len(x), -1, -1), x], 1) + net.places
        for norm, branch, gate in zip(net.norms, net.branches, net.gates, strict=True):
            x = x + gate(branch(norm(x)).unsqueeze(-1)).squeeze(-1)
        return net.head(x[:, 0])

    branches = [x for _ in range(2) for x in (Attention(size, heads, fused=True), feed_forward(size, 10))]
    parts = {
        "norms": nn.ModuleList(nn.LayerNorm(size) for _ in branches), "branches": nn.ModuleList(branches),
        "gates": nn.ModuleList(L0Gate(1) for _ in branches), "head": (size, 4),
    }  # fmt: skip
    token, places = nn.Parameter(torch.randn(1, 1, size)), nn.Parameter(torch.randn(1, 5, size) * 0.1)
    return Dense(forward, patches=nn.Conv2d(3, size, 4, stride=4), token=token, places=places, **parts)


def linear_attention(size=12, heads=4):
    """Attention without softmax: keys times values first, by einsum."""

    def forward(net, x):
        layers = net.query, net.key, net.value
        query, key, value = (layer(x).unflatten(-1, (-1, net.head_size)) for layer in layers)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        context = torch.einsum("bthd,bthe->bhde", key, value)
        weight = 1 / torch.einsum("bthd,bhd->bth", query, key.sum(1))
        return net.output(net.gate(torch.einsum("bthd,bhde,bth->bthe", query, context, weight)).flatten(2))

    layers = {name: nn.Linear(size, size) for name in ("query", "key", "value")}
    return Net(forward, head_size=size // heads, gate=L0Gate(heads, dim=2), output=nn.Linear(size, 3), **layers)


def tokens(batch):
    return torch.randint(0, 20, (batch, 6))


def input_width(size=12, heads=2):
    """Vision transformers': the attention is as wide as its input, whose units therefore stay behind their gate."""

    def forward(net, x):
        x = net.gate(net.first(x))
        batch, time, size = x.shape
        heads = net.qkv(x).reshape(batch, time, 3, net.num_heads, size // net.num_heads)
        attended = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4).unbind(0))
        return net.head(net.inner(net.output(attended.transpose(1, 2).reshape(batch, time, size))))

    layers = {"first": (3, size), "qkv": (size, 3 * size), "output": (size, size), "head": (size, 2)}
    network = Dense(forward, gate=size, inner=size, **layers)
    network.num_heads = heads
    return network


def language_model(**options):
    separate = {f"blocks.0.attention.{name}.weight": (6, 12) for name in ("query", "key", "value")}
    projections = {"blocks.0.attention.qkv.weight": (18, 12)} if options.get("fused") else separate
    shapes = {**projections, "blocks.1.attention.output.weight": (12, 6), "blocks.1.dense.inner.weight": (8, 12)}
    return Entry(lambda: LanguageModel(**options), tokens, shapes=shapes)


ENTRIES = {
    "attention_separate": language_model(),
    "attention_fused": language_model(fused=True),
    "attention_fixed_views": language_model(fixed=True),
    "causal_attention": Entry(
        causal_attention, normal(5, 12), shapes={"qkv.weight": (18, 12), "output.weight": (5, 6)},
    ),
    "encoder_heads": Entry(
        encoder_heads, normal(5, 12),
        shapes={
            "layers.0.self_attn.q_proj.weight": (6, 12), "layers.0.self_attn.v_proj.weight": (6, 12),
            "layers.1.self_attn.out_proj.weight": (12, 6),
        },
    ),
    "attention_module": Entry(
        attention_module, normal(5, 12), shapes={"attention.in_proj_weight": (36, 12), "inner.weight": (8, 12)},
    ),
    "vision_transformer": Entry(
        vision_transformer, normal(3, 8, 8),
        shapes={"branches.0.qkv.weight": (24, 12), "branches.0.output.weight": (12, 8)},
    ),
    "input_width": Entry(
        input_width, normal(5, 3), shapes={"first.weight": (6, 3), "qkv.weight": (36, 12), "output.weight": (6, 12)},
    ),
    "linear_attention": Entry(linear_attention, normal(5, 12), shapes={"key.weight": (6, 12), "output.weight": (3, 6)}),
}  # fmt: skip
