"""Every cut of the gates that are suggested is taken, whichever of them are open."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate, gate_heads, insert_gates, suggest_gates
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.engine.sizes import Holder
from tests.compaction.random_cuts import MODELS, gated, random_gates, refusals
from tests.engine.zoo import ZOO
from tests.networks import Net

EVERYDAY = ("GPT-2", "Llama", "nn.TransformerEncoder")
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@pytest.fixture(params=[x if x in EVERYDAY else pytest.param(x, marks=pytest.mark.slow) for x in MODELS])
def model(request):
    if request.param != "nn.TransformerEncoder" and not HAS_TRANSFORMERS:
        pytest.skip("needs the package transformers, which is not installed")
    return request.param


def test_a_cut_of_heads_and_units(model):
    network, example = gated(model, with_heads=True)
    assert not list(refusals(network, example, 1, first=1))


@pytest.mark.slow
@pytest.mark.parametrize("with_heads", [False, True])
def test_twenty_cuts_at_three_rates(model, with_heads):
    network, example = gated(model, with_heads)
    assert not list(refusals(network, example, 20))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_cuts_of_the_zoo(name):
    entry = ZOO[name]
    assert not list(refusals(entry.network(), entry.example(), 3, first=3))


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs the package transformers, which is not installed")
@pytest.mark.parametrize(("name", "heads"), [("GPT-2", 4), ("Llama", 2)])
def test_heads_that_leave_alone_are_proposed(name, heads):
    """Through a projection of three parts, and of queries that share keys and values."""
    network, example = MODELS[name]()
    suggested = suggest_gates(network.eval(), example)
    assert list(suggested.heads.values()) == [heads, heads]
    attention = [x for x in suggested.locations if x.path.endswith((".c_attn", ".q_proj", ".k_proj", ".v_proj"))]
    assert all(place.is_composite for place in attention)


# --- integers of modules -------------------------------------------------------------------------


class Attention(nn.Module):
    """Heads whose sizes are integers of the module, and equal to others by chance."""

    def __init__(self):
        super().__init__()
        self.heads, self.head_dim = 3, 4
        self.width = self.heads * self.head_dim
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.gates = nn.ModuleList(L0Gate(12) for _ in range(3))
        self.head_gate = L0Gate(3, dim=2)
        self.out = nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = (
            gate(layer(x)).view(*x.shape[:-1], self.heads, self.head_dim)
            for gate, layer in zip(self.gates, (self.q, self.k, self.v), strict=True)
        )
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        mixed = self.head_gate(torch.einsum("bhij,bjhd->bihd", weights, v))
        return self.out(mixed.reshape(*x.shape[:-1], self.width))


def test_an_integer_is_one_size():
    """Entries of queries and values leave apart, but both have the size head_dim, so they stay; whole heads leave."""
    network, x = Attention().eval(), torch.randn(2, 5, 12)
    recording = record(network, x)
    held = {source for comparison in recording.comparisons for source in comparison.sources}
    assert {str(x) for x in held if isinstance(x, Holder)} == {"heads", "head_dim", "width"}
    assert type(network.heads) is int
    third = torch.arange(12) % 4 == 3
    closed = {f"gates.{i}": third for i in range(2)}
    analysis = analyse(recording, closed)
    assert len(analysis.remaining["q.weight"][0]) == 9  # zeros take their places behind the gate
    assert any("head_dim, which is the size of other units" in text for _, text in analysis.maps.pins)
    gates = {site: torch.where(mask, 0.0, 1.0) for site, mask in {**closed, "gates.2": ~third & third}.items()}
    gates["head_gate"] = torch.tensor([1.0, 0.0, 1.0])
    small = compact(network, gates, x).network
    assert (small.heads, small.head_dim, small.width) == (2, 4, 8)
    assert small.out.in_features == 8


def heads_of(net, x, size):
    """Attention of which the code takes the width from elsewhere."""
    batch, time, width = size
    heads = net.qkv(x).reshape(batch, time, 3, net.heads, width // net.heads).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(*heads, scale=1.0).transpose(1, 2).reshape(size)


def scaled_heads(net, x):
    q, k, v = net.qkv(x).unflatten(-1, (3, net.heads, -1)).permute(2, 0, 3, 1, 4)
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def literal_heads(net, x):
    heads = (y.reshape(*y.shape[:-1], 2, 4).transpose(1, 2) for y in net.qkv(x).chunk(3, -1))
    return net.up(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def merged(net, x):
    width = x.shape[-1]
    x = torch.cat([x[:, ::2], x[:, 1::2]], -1).view(len(x), -1, 2 * width)
    return x[..., :width] * x[..., width:]


def checked(net, x):
    if x.size() != (*x.shape[:-1], net.width):
        raise ValueError(x.shape)
    return x


def as_wide(x):
    """As wide as it was, by a number that is not followed."""
    if x.stride(-2) != 8:
        raise RuntimeError("another width")
    return x


def in_parts(sizes):
    def forward(net, x):
        one, two, three = torch.split(net.qkv(x), sizes(net, x), dim=-1)
        return torch.cat([net.up(one), two * three], -1)

    return forward


def halves(net, x):
    one, two = net.qkv(x).split(net.qkv.out_features // 2, -1)
    return torch.cat([one, two], -1)


SIZES = {
    "of the input": lambda net, x: x + heads_of(net, x, x.shape),
    "of a layer": lambda net, x: heads_of(net, x, (*x.shape[:-1], net.qkv.in_features)),
    "in front of a layer": lambda net, x: net.up(heads_of(net, x, x.shape)),
    "literal heads": literal_heads,
    "head from the input": lambda net, x: (
        net.qkv(x).unflatten(-1, (3, -1, x.shape[-1] // net.heads)).mean(-2).flatten(2)
    ),
    "scale": scaled_heads,
    "merged": merged,
    "attributes": in_parts(lambda net, x: [net.width, net.width, net.width]),
    "list": in_parts(lambda net, x: net.sizes),
    "literals": in_parts(lambda net, x: [8, 8, 8]),
    "shape": in_parts(lambda net, x: x.shape[-1]),
    "halves": halves,
    "slices": lambda net, x: torch.cat([net.qkv(x)[..., : net.width], net.qkv(x)[..., 2 * net.width :]], -1),
    "range": lambda net, x: x * torch.arange(1, net.width + 1),
    "line": lambda net, x: x + torch.linspace(0, 1, x.shape[-1], dtype=x.dtype),
    "waves": lambda net, x: torch.cat([x[..., :1] * torch.arange(0, net.width, 2), net.qkv(x)], -1),
    "compared": checked,
    "strides compared": lambda net, x: net.up(as_wide(x.relu())).tanh(),
    "mean": lambda net, x: x - x.sum(-1, keepdim=True) / x.shape[-1],
    "branch": lambda net, x: x * 2 if x.shape[-1] == net.width and x.size(2) % net.heads == 0 else net.qkv(x),
    "literal": lambda net, x: x if x.shape[-1] == 8 else net.qkv(x),
    "unequal": lambda net, x: x.relu() if x.shape[1] != x.shape[2] else x,
    "repeated": lambda net, x: x.unflatten(-1, (-1, 2)).repeat_interleave(net.heads, dim=2).flatten(2),
}


@pytest.mark.filterwarnings("ignore:Expected an example that uses the whole network")
@pytest.mark.filterwarnings("ignore:Gates are closed, but nothing is smaller")  # halves of unequal numbers
@pytest.mark.parametrize("name", SIZES)
def test_sizes_in_code_fit_or_units_stay(name):
    """What code computes from shapes, attributes and literals, compares, or takes as a number.

    What is suggested can be cut, with other numbers closed than in the trial; the rest says what compaction would.
    """
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 8), "qkv": nn.Linear(8, 24), "up": nn.Linear(8, 5), "last": nn.LazyLinear(2)}
    network = Net(
        lambda net, x: net.last(SIZES[name](net, net.first(x))), heads=2, width=8, sizes=[8, 8, 8], **layers
    ).eval()
    example = torch.randn(2, 4, 3, dtype=torch.float64)
    network.double()(example)
    suggested = suggest_gates(network, example)
    assert suggested.in_the_way.items() <= suggested.refused.items()
    said = "The compacted network differs" if name == "repeated" else "Expected the network to run with fewer units"
    assert all(why.startswith(said) for why in suggested.in_the_way.values())
    assert bool(suggested.heads) == (name in ("of the input", "of a layer", "in front of a layer", "scale"))
    gated = gate_heads(insert_gates(network, suggested, example), suggested.heads)
    for seed, rate in enumerate((0.3, 0.4, 0.5, 0.6, 0.8)):
        small = compact(gated, random_gates(gated, rate, seed), example)
        assert small.certificate < 1e-12
    assert (network.heads, network.width, network.sizes) == (2, 8, [8, 8, 8])
    assert type(network.width) is int
