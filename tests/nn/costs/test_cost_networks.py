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
from tests.engine.zoo.attention import Block
from tests.networks import Dense


def stream():
    """A residual stream with a gate on what enters and on every branch."""

    def forward(net, x):
        x = net.start(F.relu(net.enter(x)))
        for layer, gate in zip(net.layers, net.gates, strict=True):
            x = x + gate(F.relu(layer(x)))
        return net.last(x)

    layers, gates = nn.ModuleList(nn.Linear(6, 6) for _ in "abc"), nn.ModuleList(L0Gate(6) for _ in "abc")
    return Dense(forward, enter=(4, 6), start=6, layers=layers, gates=gates, last=(6, 2))


TOKENS = torch.randn(1, 3, 8)
OF_THE_ZOO = (
    *("mlp", "soft_experts", "causal_attention", "linear_attention", "gated_blocks", "gated_stream"),
    *("lenet", "shufflenet", "super_resolution", "diffusion_block"),
)
NETWORKS = {
    "attention": lambda: (Block(8, 4).double(), TOKENS.double()),
    "stream": lambda: (stream().double(), torch.randn(3, 4).double()),
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
        kept = [analysis.remaining[key] for key, x in network.named_parameters() if x.dim() > 1]
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
    cost = NetworkCost(Block(8, 4), TOKENS)
    heads = torch.ones(4).double().requires_grad_()
    active = {"attention.gate": heads, "dense.gate": torch.ones(16).double()}
    (saved,) = torch.autograd.grad(cost.macs(active), heads)
    torch.testing.assert_close(saved, torch.full((4,), 4 * 3 * 8 * 2 + 2 * 3 * 3 * 2.0).double())
    assert cost.group_sizes["attention.gate"] == 2 * 8
    assert cost.filter_sizes["attention.gate"] == 3 * 2 * 8


def test_a_gate_on_a_whole_block():
    """Closed, it takes the block's units with it, and is as likely to be open as they are together."""

    def forward(net, x):
        x = torch.tanh(net.enter(x))
        branch = net.down(net.units(F.relu(net.up(x))))
        return net.last(x + net.block(branch.unsqueeze(-1)).squeeze(-1))

    network = Dense(forward, enter=(4, 5), up=(5, 6), units=6, down=(6, 5), block=1, last=(5, 2))
    cost = NetworkCost(network, torch.zeros(3, 4))
    rest = 4 * 5 + 5 * 2
    assert cost.weights({"units": torch.ones(6), "block": torch.zeros(1)}).item() == rest
    found = cost.weights({"units": torch.full((6,), 0.5), "block": torch.full((1,), 0.25)})
    assert found.item() == pytest.approx(rest + 0.125 * 6 * 5 * 2)


def test_report_says_why_units_stay():
    """Those of the network's inputs and outputs, and those that a barrier reads; the others leave."""

    def forward(net, x):
        x = net.gates[1](torch.relu(net.a(net.gates[0](x))))
        return net.gates[3](net.c(net.gates[2](torch.relu(net.b(x))).sort().values))

    gates = nn.ModuleList(L0Gate(size) for size in (3, 4, 4, 2))
    report = NetworkCost(Dense(forward, a=(3, 4), b=(4, 4), c=(4, 2), gates=gates), torch.randn(2, 3)).report()
    assert {(stay.site, stay.where, stay.why, stay.units) for stay in report.stays} == {
        ("gates.0", "in front", "network input", (0, 1, 2)),
        ("gates.2", "behind", "sort in the network", (0, 1, 2, 3)),
        ("gates.3", "behind", "network output", (0, 1)),
    }
    assert "gate 'gates.2', units 0-3: stay behind the gate (sort in the network)" in str(report)
    assert str(NetworkCost(Block(8, 4), TOKENS).report()) == "every unit leaves with its gate"


def test_square_norms_of_all_layers():
    """Of transposed and grouped convolutions, of heads, and of weights that are parametrised or transposed."""

    def check(net, shape, site, expected):
        torch.testing.assert_close(square_norms(net, torch.ones(shape))[site](), expected)

    product = Dense(lambda net, x: net.gate(x) @ net.weight, gate=3, weight=nn.Parameter(torch.randn(3, 2)))
    check(product, (1, 3), "gate", product.weight.square().sum(1))
    product.weight = nn.Parameter(torch.randn(3, 3))
    product.forward = lambda x: product.gate(x) @ product.weight.t()  # of a square, whose shape tells no transposition
    check(product, (1, 3), "gate", product.weight.square().sum(0))
    grouped = nn.Sequential(L0Gate(4, dim=1), nn.Conv1d(4, 6, 2, groups=2))
    first, second = grouped[1].weight.square().sum(2).split(3)
    check(grouped, (1, 4, 5), "0", torch.cat([first.sum(0), second.sum(0)]))
    transposed = nn.Sequential(L0Gate(4, dim=1), nn.ConvTranspose1d(4, 3, 2))
    check(transposed, (1, 4, 5), "0", transposed[1].weight.square().sum([1, 2]))
    block = Block(8, 4)
    check(block, (1, 3, 8), "attention.gate", block.attention.output.weight.square().sum(0).view(4, 2).sum(1))
    maps = ZOO["lenet"].network().float()
    check(maps, (1, 1, 10, 10), "6", maps[8].weight.square().sum(0).view(6, 4).sum(1))
    normed = nn.Sequential(L0Gate(3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    check(normed, (1, 3), "0", normed[1].weight.square().sum(0))


def test_one_gate_more_in_a_long_disjunction_counts():
    """Hidden units are read for forty gated units and for one more: they stay if any of 41 gates is open."""

    def forward(net, x):
        x = F.relu(net.enter(x))
        return net.last(net.gate(torch.cat([net.many(x), net.one(x)], dim=-1)))

    network = Dense(forward, enter=(3, 4), many=(4, 40), one=(4, 1), gate=41, last=(41, 2))
    cost, last = NetworkCost(network, torch.randn(2, 3)), (torch.arange(41) == 40).float()
    assert cost.weights({"gate": last}).item() == 3 * 4 + 4 * 1 + 1 * 2
    assert cost.weights({"gate": 1 - last}).item() == 3 * 4 + 4 * 40 + 40 * 2


def test_weights_that_multiply_unit_by_unit_read_the_units():
    """Each head has a 3 x 2 matrix of its own, and two outputs, which a layer of 2 x 8 weights reads."""

    def forward(net, x):
        return net.out(torch.einsum("bhd,hde->bhe", net.gate(x.unflatten(1, (4, 3))), net.matrix).flatten(1))

    network = Dense(forward, gate=L0Gate(4, dim=1), matrix=nn.Parameter(torch.randn(4, 3, 2)), out=(8, 2))
    assert NetworkCost(network, torch.randn(2, 12)).group_sizes == {"gate": 3 * 2 + 2 * 2}


def test_what_is_added_in_an_attention_is_no_weight():
    """Units of the values are read by the layer behind the attention, whose mask is learned."""

    def forward(net, x):
        q, k, v = net.enter(x).chunk(3, -1)
        return net.out(F.scaled_dot_product_attention(q, k, net.gate(v), net.mask))

    network = Dense(forward, enter=(6, 18), gate=6, mask=nn.Parameter(torch.randn(3, 3)), out=(6, 2))
    cost = NetworkCost(network, torch.randn(2, 3, 6))
    assert cost.group_sizes == {"gate": 2}
    assert cost.total_weights == 6 * 18 + 6 * 2


@pytest.mark.parametrize("least", [0, 4])
def test_code_that_compares_sizes(least):
    """Where the answer depends on what leaves, the count is below what compaction keeps, and a warning says so."""

    def forward(net, x):
        y = net.gate(torch.relu(net.first(x)))
        return net.second(2 * y if y.shape[1] < least else y)

    x, z = torch.randn(2, 4), {"gate": torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])}
    network = Dense(forward, first=(4, 6), gate=6, second=(6, 3)).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cost = NetworkCost(network, x)
    small = compact(network, z, x).network
    is_less = cost.parameters(z) < sum(p.numel() for p in small.parameters())
    said = [x for x in caught if "compares shape[1] of a tensor in the network" in str(x.message)]
    assert bool(is_less) == bool(said) == bool(least)
    assert all(x.filename == __file__ for x in said)
