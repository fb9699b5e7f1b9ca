"""Costs of networks of many kinds against the engine's analysis, against draws, and against differences."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.square_norms import square_norms
from tests.engine.zoo import ZOO
from tests.networks import Net


class Attention(nn.Module):
    """A transformer of one layer, with gates on its heads and on its feed-forward units."""

    def __init__(self, is_fused=False):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(9, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.heads, self.up, self.units, self.down = L0Gate(4, dim=1), nn.Linear(8, 6), L0Gate(6), nn.Linear(6, 8)
        self.last, self.is_fused = nn.Linear(8, 3), is_fused

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.first(x)
        q, k, v = (m(y).unflatten(-1, (4, 2)).transpose(1, 2) for m in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v) if self.is_fused else (q @ k.mT / 2**0.5).softmax(-1) @ v
        x = x + self.out(self.heads(mixed).transpose(1, 2).flatten(2))
        x = x + self.down(self.units(F.gelu(self.up(self.second(x)))))
        return self.last(x[:, 0])


class Stream(nn.Module):
    """A residual stream with a gate on what enters and on every branch."""

    def __init__(self):
        super().__init__()
        self.enter, self.start = nn.Linear(4, 6), L0Gate(6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gates, self.last = nn.ModuleList(L0Gate(6) for _ in "abc"), nn.Linear(6, 2)

    def forward(self, x):
        x = self.start(F.relu(self.enter(x)))
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = x + gate(F.relu(layer(x)))
        return self.last(x)


class WholeBlock(nn.Module):
    """One gate on a whole branch, with gates on its units inside."""

    def __init__(self):
        super().__init__()
        self.enter, self.up, self.down, self.last = (nn.Linear(*s) for s in ((4, 5), (5, 6), (6, 5), (5, 2)))
        self.units, self.block = L0Gate(6), L0Gate(1)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        branch = self.down(self.units(F.relu(self.up(x))))
        return self.last(x + self.block(branch.unsqueeze(-1)).squeeze(-1))


TOKENS = torch.tensor([[1, 5, 2]])
OF_THE_ZOO = (
    *("mlp", "soft_experts", "linear_attention", "gated_blocks", "gated_stream"),
    *("lenet", "shufflenet", "super_resolution", "diffusion_block"),
)
NETWORKS = {
    "attention": lambda: (Attention().double(), TOKENS),
    "fused attention": lambda: (Attention(is_fused=True).double(), TOKENS),
    "stream": lambda: (Stream().double(), torch.randn(3, 4).double()),
    **{name: lambda entry=ZOO[name]: (entry.network(), entry.example(2)) for name in OF_THE_ZOO},
}


def made(name):
    torch.manual_seed(11)
    return NETWORKS[name]()


def drawn(cost, probs):
    return {name: (torch.rand(size) < probs).double() for name, size in cost.sizes.items()}


def count(analysis, example):
    """Multiply-adds per example of what stays, and whether something stays only lest a dimension be empty."""
    solution, products = analysis.solution, analysis.maps.products
    reasons = {
        int(x)
        for product in products
        for axis in product.axes
        for x in solution.reasons[solution.units[axis.dimension]]
    }
    is_empty = any(x >= 0 and solution.texts[x] == "the last of its dimension" for x in reasons)
    rows = len(example[0] if isinstance(example, tuple) else example)
    return (analysis.multiply_adds() + analysis.attention_multiply_adds()) / rows, is_empty


@pytest.mark.parametrize("name", NETWORKS)
def test_counts_of_given_gates_are_those_of_the_analysis(name):
    """For gates that were drawn: what the compacted network computes, and the sizes of its weights."""
    network, example = made(name)
    cost, recording = NetworkCost(network, example), record(network, example)
    smaller = 0
    for round in range(12):
        gates = drawn(cost, (0.3, 0.6, 0.9)[round % 3])
        analysis = analyse(recording, {site: z == 0 for site, z in gates.items()}, gates)
        expected, is_empty = count(analysis, example)
        if is_empty:
            assert cost.macs(gates).item() <= expected
            continue
        assert cost.macs(gates).item() == expected
        kept = [analysis.remaining[key] for key, x in network.named_parameters() if x.dim() > 1 and "embed" not in key]
        assert cost.weights(gates).item() == sum(
            torch.tensor([len(dim) for dim in dims]).prod().item() for dims in kept
        )
        smaller += cost.macs(gates).item() < cost.total_macs
    assert smaller > 0
    everything = {site: torch.ones(size).double() for site, size in cost.sizes.items()}
    assert cost.macs(everything).item() == cost.total_macs
    assert cost.weights(everything).item() == cost.total_weights


@pytest.mark.parametrize("name", NETWORKS)
def test_expectations_agree_with_draws(name):
    """Within five standard errors, and a tenth for what several dimensions of a layer have in common."""
    network, example = made(name)
    cost = NetworkCost(network, example)
    probs = {site: 0.3 + 0.6 * torch.rand(size).double() for site, size in cost.sizes.items()}
    draws = torch.stack(
        [cost.macs({site: (torch.rand(len(p)) < p).double() for site, p in probs.items()}) for _ in range(300)]
    )
    error = 5 * draws.std().item() / 300**0.5
    assert cost.macs(probs).item() == pytest.approx(draws.mean().item(), abs=error + 0.1 * draws.mean().item())


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients(name):
    """Against differences, with gates that are open for sure among them."""
    network, example = made(name)
    cost = NetworkCost(network, example)
    probs = [0.2 + 0.7 * torch.rand(size).double() for size in cost.sizes.values()]
    for prob in probs:
        prob[: max(1, min(3, len(prob) - 1))] = 1.0
        prob.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *p: cost.macs(dict(zip(cost.sizes, p, strict=True))) / cost.total_macs, probs
    )


def test_a_head_costs_its_queries_keys_values_and_outputs():
    """By hand: 3 tokens, heads of 2 of 8 features."""
    cost = NetworkCost(Attention(), torch.tensor([[1, 5, 2]]))
    active = {"heads": torch.ones(4).double().requires_grad_(), "units": torch.ones(6).double()}
    (saved,) = torch.autograd.grad(cost.macs(active), active["heads"])
    torch.testing.assert_close(saved, torch.full((4,), 4 * 3 * 8 * 2 + 2 * 3 * 3 * 2.0).double())
    assert cost.group_sizes["heads"] == 2 * 8
    assert cost.filter_sizes["heads"] == 3 * 2 * 8


def test_a_gate_on_a_whole_block():
    """Closed, it takes the block's units with it, and is as likely to be open as they are together."""
    cost = NetworkCost(WholeBlock(), torch.zeros(3, 4))
    closed = {"units": torch.ones(6), "block": torch.zeros(1)}
    assert cost.weights(closed).item() == 4 * 5 + 5 * 2
    assert cost.weights({"units": torch.full((6,), 0.5), "block": torch.full((1,), 0.25)}).item() == pytest.approx(
        4 * 5 + 5 * 2 + 0.125 * 6 * 5 * 2
    )


def test_report_says_why_units_stay():
    """Those of the network's inputs and outputs, and those that a barrier reads; the others leave."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.gates = nn.ModuleList([L0Gate(3), L0Gate(4), L0Gate(4), L0Gate(2)])

        def forward(self, x):
            x = self.gates[1](torch.relu(self.a(self.gates[0](x))))
            return self.gates[3](self.c(self.gates[2](torch.relu(self.b(x))).sort().values))

    report = NetworkCost(Net(), torch.randn(2, 3)).report()
    assert {(stay.site, stay.where, stay.why, stay.units) for stay in report.stays} == {
        ("gates.0", "in front", "network input", (0, 1, 2)),
        ("gates.2", "behind", "sort in the network", (0, 1, 2, 3)),
        ("gates.3", "behind", "network output", (0, 1)),
    }
    assert "gate 'gates.2', units 0-3: stay behind the gate (sort in the network)" in str(report)
    assert str(NetworkCost(Attention(), torch.tensor([[1, 2]])).report()) == "every unit leaves with its gate"


def test_square_norms_of_all_layers():
    """Of transposed and grouped convolutions, of heads, and of weights that are parametrised or transposed."""

    product = Net(lambda net, x: net.gate(x) @ net.weight, gate=L0Gate(3), weight=nn.Parameter(torch.randn(3, 2)))
    torch.testing.assert_close(square_norms(product, torch.ones(1, 3))["gate"](), product.weight.square().sum(1))
    product.weight = nn.Parameter(torch.randn(3, 3))
    product.forward = lambda x: product.gate(x) @ product.weight.t()  # of a square, whose shape tells no transposition
    torch.testing.assert_close(square_norms(product, torch.ones(1, 3))["gate"](), product.weight.square().sum(0))
    grouped = nn.Sequential(L0Gate(4, dim=1), nn.Conv1d(4, 6, 2, groups=2))
    weight = grouped[1].weight.square().sum(2)
    expected = torch.cat([weight[:3].sum(0), weight[3:].sum(0)])
    torch.testing.assert_close(square_norms(grouped, torch.ones(1, 4, 5))["0"](), expected)
    transposed = nn.Sequential(L0Gate(4, dim=1), nn.ConvTranspose1d(4, 3, 2))
    expected = transposed[1].weight.square().sum([1, 2])
    torch.testing.assert_close(square_norms(transposed, torch.ones(1, 4, 5))["0"](), expected)
    attention = Attention()
    expected = attention.out.weight.square().sum(0).view(4, 2).sum(1)
    torch.testing.assert_close(square_norms(attention, torch.tensor([[1, 2]]))["heads"](), expected)
    maps, image = made("lenet")
    expected = maps[8].weight.square().sum(0).view(6, 4).sum(1)
    torch.testing.assert_close(square_norms(maps, image)["6"](), expected)
    normed = nn.Sequential(L0Gate(3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    torch.testing.assert_close(square_norms(normed, torch.ones(1, 3))["0"](), normed[1].weight.square().sum(0))


class TwoReaders(nn.Module):
    """Hidden units that are read twice: for forty gated units, and for one more behind the same gates."""

    def __init__(self):
        super().__init__()
        self.enter, self.many, self.one = nn.Linear(3, 4), nn.Linear(4, 40), nn.Linear(4, 1)
        self.gate, self.last = L0Gate(41), nn.Linear(41, 2)

    def forward(self, x):
        x = F.relu(self.enter(x))
        return self.last(self.gate(torch.cat([self.many(x), self.one(x)], dim=-1)))


def test_one_gate_more_in_a_long_disjunction_counts():
    """The hidden units stay if any of 41 gates is open, the last one included."""
    cost = NetworkCost(TwoReaders(), torch.randn(2, 3))
    last = torch.zeros(41)
    last[-1] = 1
    assert cost.weights({"gate": last}).item() == 3 * 4 + 4 * 1 + 1 * 2
    assert cost.weights({"gate": 1 - last}).item() == 3 * 4 + 4 * 40 + 40 * 2


def test_weights_that_multiply_unit_by_unit_read_the_units():
    """Each head has a 3 x 2 matrix of its own, and two outputs, which a layer of 2 x 8 weights reads."""

    def forward(net, x):
        heads = torch.einsum("bhd,hde->bhe", net.gate(x.unflatten(1, (4, 3))), net.matrix())
        return net.out(heads.flatten(1))

    network = Net(forward, gate=L0Gate(4, dim=1), matrix=Parameter(4, 3, 2), out=nn.Linear(8, 2))
    assert NetworkCost(network, torch.randn(2, 12)).group_sizes == {"gate": 3 * 2 + 2 * 2}


def test_what_is_added_in_an_attention_is_no_weight():
    """Units of the values are read by the layer behind the attention, whose mask is learned."""

    def forward(net, x):
        q, k, v = net.enter(x).chunk(3, -1)
        return net.out(F.scaled_dot_product_attention(q, k, net.gate(v), net.mask()))

    network = Net(forward, enter=nn.Linear(6, 18), gate=L0Gate(6), mask=Parameter(3, 3), out=nn.Linear(6, 2))
    cost = NetworkCost(network, torch.randn(2, 3, 6))
    assert cost.group_sizes == {"gate": 2}
    assert cost.total_weights == 6 * 18 + 6 * 2


class Parameter(nn.Module):
    """One tensor that is learned."""

    def __init__(self, *shape):
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))

    def forward(self):
        return self.value


class Comparing(nn.Module):
    """Asks for the number of channels, from which compaction must not take so many that the answer is another."""

    def __init__(self, least):
        super().__init__()
        self.first, self.gate, self.second, self.least = nn.Linear(4, 6), L0Gate(6), nn.Linear(6, 3), least

    def forward(self, x):
        y = self.gate(torch.relu(self.first(x)))
        return self.second(2 * y if y.shape[1] < self.least else y)


@pytest.mark.parametrize("least", [0, 4])
def test_code_that_compares_sizes(least):
    """Where the answer depends on what leaves, the count is below what compaction keeps, and a warning says so."""
    x, z = torch.randn(2, 4), {"gate": torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])}
    network = Comparing(least).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cost = NetworkCost(network, x)
    small = compact(network, z, x).network
    is_less = cost.parameters(z) < sum(p.numel() for p in small.parameters())
    said = [x for x in caught if "compares shape[1] of a tensor in the network" in str(x.message)]
    assert bool(is_less) == bool(said) == bool(least)
    assert all(x.filename == __file__ for x in said)
