"""Gates on attention heads: what a closed one leaves, torch's attention in plain layers, and what is refused."""

import pytest
import torch
from torch import nn

from pyro_l0.nn import fix_gates, gate_heads
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.heads import PlainAttention
from tests.networks import Attention


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(1)


def randn(generator, *sizes):
    return torch.randn(*sizes, generator=generator, dtype=torch.float64)


def test_a_gate_multiplies_its_heads_columns(generator):
    """The same as a projection whose columns were multiplied; the network itself stays as it was."""
    net = Attention(6, 2).double()
    gated = gate_heads(net, {"out": 2})
    assert {name: (gate.size, gate.dim) for name, gate in gate_names(gated).items()} == {"out.gate": (2, -2)}
    x = randn(generator, 2, 5, 6)
    before = net(x)
    values = torch.tensor([0.0, 0.4], dtype=torch.float64)
    outputs = fix_gates(gated, {"out.gate": values})(x)
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)
    with torch.no_grad():
        net.out.weight *= values.repeat_interleave(3)
    torch.testing.assert_close(outputs, net(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {"batch_first": False},
        {"batch_first": True, "bias": False},
        {"batch_first": True, "kdim": 5, "vdim": 4},
    ],
    ids=str,
)
def test_torch_attention_in_plain_layers(options, need_weights, generator):
    """All arguments, with open gates; with a closed one, what remains when its columns are zero."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 4, **options, dtype=torch.float64)})
    module = net["attention"]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(randn(generator, *parameter.shape))
    plain = gate_heads(net, {"attention.out_proj": 4})
    query = randn(generator, 3, 5, 8)
    key, value = (randn(generator, 3, 6, options.get(name, 8)) for name in ("kdim", "vdim"))
    if not options["batch_first"]:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [True] + [False] * 5])
    causal = torch.ones(5, 6, dtype=torch.bool).triu(2)
    calls = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": causal, "key_padding_mask": padding},
        {"attn_mask": causal, "is_causal": False, "average_attn_weights": False},
        {"attn_mask": randn(generator, 12, 5, 6)},
    ]
    for gate in (torch.ones(4, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64)):
        fixed = fix_gates(plain, {"attention.out_proj.gate": gate})["attention"]
        with torch.no_grad():
            module.out_proj.weight *= gate.repeat_interleave(2)
        for call in calls:
            ours = fixed(query, key, value, need_weights=need_weights, **call)
            theirs = module(query, key, value, need_weights=need_weights, **call)
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-12)
            assert (ours[1] is None) == (theirs[1] is None) == (not need_weights)
            if need_weights:
                torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=1e-12)


def test_unbatched_calls(generator):
    net = nn.ModuleDict({"a": nn.MultiheadAttention(6, 2, dtype=torch.float64)})
    plain = PlainAttention(net["a"])
    x = randn(generator, 5, 6)
    torch.testing.assert_close(plain(x, x, x), net["a"](x, x, x), rtol=1e-12, atol=1e-12)


def test_dropout_drops_attention_in_training_alone():
    """A mean over many draws is that without dropout, to five standard errors."""
    torch.manual_seed(0)
    plain = PlainAttention(nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True, dtype=torch.float64))
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    expected = plain.eval()(x, x, x)[0]
    for need_weights in (True, False):
        draws = plain.train()(*[x.expand(4000, 3, 4)] * 3, need_weights=need_weights)[0].detach()
        assert (draws.std(0) > 0.01).all()
        assert ((draws.mean(0) - expected[0]).abs() < 5 * draws.std(0) / 4000**0.5).all()
