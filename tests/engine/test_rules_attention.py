"""Rules of attention, norms over units and look-ups."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import Gate
from pyro_l0.nn.engine import analyse, record
from tests.engine.exactness import examine
from tests.engine.zoo.attention import rms_norm
from tests.networks import Net


class Attention(nn.Module):
    """Four heads of six features, gated; `how` says how they are written down."""

    def __init__(self, how, kv_heads=4):
        super().__init__()
        self.how, self.kv_heads = how, kv_heads
        if "fused" in how:
            self.qkv = nn.Linear(24, 72)
        else:
            self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 6 * kv_heads), nn.Linear(24, 6 * kv_heads)
        self.gate, self.out = Gate(4, 1), nn.Linear(24, 24)
        self.register_buffer("mask", torch.ones(9, 9).tril().log())

    def heads(self, x):
        b, t, _ = x.shape
        if "fused" in self.how:
            q, k, v = self.qkv(x).view(b, t, 3, -1, 6).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (layer(x).view(b, t, -1, 6).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.kv_heads < 4 and "gqa" not in self.how:
            k, v = (y[:, :, None].expand(-1, -1, 4 // self.kv_heads, -1, -1).flatten(1, 2) for y in (k, v))
        if "einsum" in self.how:
            weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(6**-0.5).softmax(-1)
            return torch.einsum("bhqk,bhkd->bhqd", weights, v)
        if "sdpa" in self.how:
            mask = self.mask[:t, :t] if "mask" in self.how else None
            scale = 0.5 if "scale" in self.how else None
            return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa="gqa" in self.how)
        if "bmm" in self.how:
            q, k, v = (y.reshape(-1, t, 6) for y in (q, k, v))
            return torch.bmm(torch.baddbmm(q.new_zeros(1), q, k.mT, beta=0).softmax(-1), v).view(b, -1, t, 6)
        weights = q @ k.transpose(-1, -2) / math.sqrt(6) + self.mask[:t, :t]
        return F.dropout(weights.softmax(-1), 0.1, self.training) @ v

    def forward(self, x):
        heads = self.gate(self.heads(x))
        if "einsum" in self.how:
            return torch.einsum("bhqd,hdo->bqo", heads, self.out.weight.t().reshape(-1, 6, 24))
        return x + self.out(heads.transpose(1, 2).reshape(*x.shape[:2], -1))


@pytest.mark.parametrize("how", ["hand", "fused", "sdpa", "sdpa mask", "sdpa scale", "einsum", "bmm", "fused sdpa"])
def test_heads_leave_with_their_rows_and_columns(how):
    closed = {"gate": torch.tensor([False, True, False, True])}
    analysis = examine(Attention(how), torch.randn(2, 5, 24, dtype=torch.float64), closed)
    rows = [*range(6), *range(12, 18)]
    assert analysis.removed["gate"].tolist() == [1, 3]
    assert analysis.kept["out.weight"][1].tolist() == rows
    if "fused" in how:
        assert analysis.kept["qkv.weight"][0].tolist() == [24 * part + row for part in range(3) for row in rows]
    else:
        assert all(analysis.kept[f"{name}.weight"][0].tolist() == rows for name in "qkv")
    assert not analysis.barriers


@pytest.mark.parametrize("how", ["hand", "sdpa", "sdpa gqa"])
def test_grouped_queries_leave_with_their_shared_head(how):
    """Two heads of queries read one of keys: it leaves when both are closed; one alone stays in front of its gate."""
    for closed, front, behind in (
        ([2, 3], [0, 1], [0, 1]),
        ([1, 2], [0, 1, 2, 3], [0, 3]),
        ([0], [0, 1, 2, 3], [1, 2, 3]),
    ):
        mask = torch.zeros(4, dtype=torch.bool)
        mask[closed] = True
        analysis = examine(Attention(how, kv_heads=2), torch.randn(2, 5, 24, dtype=torch.float64), {"gate": mask})
        assert analysis.gates["gate"].kept_in.tolist() == front
        assert analysis.gates["gate"].kept_out.tolist() == behind
        assert len(analysis.kept["k.weight"][0]) == 6 * (len(front) // 2)
        assert len(analysis.kept["out.weight"][1]) == 6 * len(behind)


def test_multiply_adds_of_attention_are_counted_apart():
    recording = record(Attention("sdpa"), torch.randn(2, 5, 24))
    analysis = analyse(recording, {"gate": torch.tensor([True, True, False, False])})
    assert analysis.multiply_adds(kept=False) == 2 * 5 * 24 * 24 * 4
    assert analysis.multiply_adds() == 2 * 5 * 24 * 12 * 4
    assert analysis.attention_multiply_adds(kept=False) == 2 * 4 * 5 * 5 * 6 * 2
    assert analysis.attention_multiply_adds() == 2 * 2 * 5 * 5 * 6 * 2


def test_attention_over_constants_varies():
    """Constant values that differ from token to token are weighted by what the queries ask for."""

    def forward(net, x):
        q = net.query(x)[:, None]
        v = (net.gate(net.query(x))[:, None, :3] + net.values) * 1.0
        return net.out(F.scaled_dot_product_attention(q, q[:, :, :3], v)[:, 0])

    network = Net(
        forward, query=nn.Linear(6, 4), gate=Gate(4), out=nn.Linear(4, 2), values=nn.Parameter(torch.randn(1, 1, 3, 4))
    )
    analysis = examine(network, torch.randn(2, 5, 6, dtype=torch.float64), folds=True)
    assert not analysis.folds
    assert len(analysis.gates["gate"].kept_out) == 4


def test_torch_multihead_attention_keeps_its_sizes_and_says_so():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.gate = nn.Linear(6, 8), Gate(8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.second, self.out = Gate(8), nn.Linear(8, 3)

        def forward(self, x):
            h = self.gate(self.one(x))
            return self.out(self.second(self.attention(h, h, h)[0]))

    analysis = examine(Net(), torch.randn(2, 5, 6, dtype=torch.float64))
    reason = "nn.MultiheadAttention in attention, whose sizes are fixed"
    assert set(analysis.reasons["gate"].values()) == {reason}
    assert len(analysis.removed["second"]) == 4
    assert len(analysis.kept["attention.in_proj_weight"][0]) == 24
    assert analysis.kept["out.weight"][1].tolist() == analysis.gates["second"].kept_out.tolist()


def test_a_transformer_layer_of_torch_loses_its_feed_forward_units():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    layer.activation = nn.Sequential(nn.GELU(), Gate(12))
    analysis = examine(layer, torch.randn(2, 5, 8, dtype=torch.float64))
    assert len(analysis.removed["activation.1"]) == 6
    kept = analysis.gates["activation.1"].kept_out.tolist()
    assert analysis.kept["linear1.weight"][0].tolist() == analysis.kept["linear2.weight"][1].tolist() == kept


class Stream(nn.Module):
    """A residual stream whose units are gated wherever something is written to it, and behind its norm or not."""

    def __init__(self, norm, gates_norm):
        super().__init__()
        self.one, self.gate, self.norm = nn.Linear(6, 8), Gate(8), norm
        self.up, self.down, self.out = nn.Linear(8, 10), nn.Linear(10, 8), nn.Linear(8, 3)
        self.gates_norm = gates_norm

    def forward(self, x):
        h = self.gate(self.one(x))
        normed = self.norm(h)
        h = h + self.gate(self.down(torch.relu(self.up(self.gate(normed) if self.gates_norm else normed))))
        return self.out(h)


@pytest.mark.parametrize(
    ("norm", "gates_norm", "folds", "is_reduced"),
    [
        (nn.LayerNorm, True, True, True),
        (nn.LayerNorm, True, False, True),
        (nn.LayerNorm, False, True, False),
        (type("OwnNorm", (nn.LayerNorm,), {}), True, True, True),
        (nn.RMSNorm, False, False, True),
        (nn.RMSNorm, True, True, True),
        (rms_norm, False, True, False),
    ],
)
def test_norms_over_units_of_which_some_leave(norm, gates_norm, folds, is_reduced):
    analysis = examine(Stream(norm(8), gates_norm), torch.randn(2, 6, dtype=torch.float64), folds=folds)
    assert len(analysis.removed["gate"]) == (4 if is_reduced else 0)
    if not is_reduced:
        assert not analysis.norms
        return
    (found,) = analysis.norms
    kept = analysis.gates["gate"].kept_out
    assert (found.path, found.size) == ("norm", 8)
    assert torch.equal(found.kept, kept)
    assert torch.equal(analysis.kept["norm.weight"][0], kept)


def test_reduced_norms_are_exact():
    """The formulas that a norm with fewer units is to follow, in numbers: mean and scale count the units that left."""
    x = torch.randn(5, 8, dtype=torch.float64)
    x[:, [1, 4, 5]] = 0
    kept = torch.tensor([0, 2, 3, 6, 7])
    few = x[:, kept]
    mean = few.sum(-1, keepdim=True) / 8
    variance = ((few - mean).square().sum(-1, keepdim=True) + 3 * mean.square()) / 8
    found = (few - mean) / (variance + 1e-5).sqrt()
    torch.testing.assert_close(found, F.layer_norm(x, (8,))[:, kept], rtol=1e-13, atol=1e-13)
    found = math.sqrt(8 / 5) * F.rms_norm(few, (5,), eps=1e-3 * 8 / 5)
    torch.testing.assert_close(found, F.rms_norm(x, (8,), eps=1e-3)[:, kept], rtol=1e-13, atol=1e-13)


def test_tied_embeddings_share_the_units_of_the_stream():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.gate = nn.Embedding(20, 8), Gate(8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.gate(torch.tanh(self.embedding(tokens)))).log_softmax(-1)

    analysis = examine(Language(), torch.randint(0, 20, (2, 5)))
    assert len(analysis.removed["gate"]) == 4
    kept = analysis.gates["gate"].kept_out.tolist()
    for name in ("embedding.weight", "head.weight"):
        assert [x.tolist() for x in analysis.kept[name]] == [list(range(20)), kept]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_lose_inputs_and_keep_units_that_they_read(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.before = nn.Linear(6, 8), Gate(8)
            self.layer, self.behind, self.out = kind(8, 10, batch_first=True), Gate(10), nn.Linear(10, 12)
            self.last, self.read = Gate(12), nn.Linear(12, 2)

        def forward(self, x):
            h = self.behind(self.layer(self.before(self.one(x)))[0][:, -1])
            return self.read(self.last(torch.relu(self.out(h))))

    analysis = examine(Recurrent(), torch.randn(2, 5, 6, dtype=torch.float64))
    assert len(analysis.removed["before"]) == 4
    assert len(analysis.removed["behind"]) == 5
    assert len(analysis.gates["behind"].kept_in) == 10  # the gate selects
    assert len(analysis.removed["last"]) == 6
    assert not analysis.barriers
    sizes = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    assert analysis.multiply_adds() == 2 * 5 * (4 * 6 + sizes * 10 * 14) + 2 * (5 * 6 + 6 * 2)
