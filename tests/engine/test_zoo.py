"""Every network of the zoo: what it computes with gates, and what its closed gates take with them."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0.compaction import compact
from pyro_l0.nn import NetworkCost, fix_gates
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.heads import PlainAttention
from tests.engine.zoo import ZOO, call, sites

# torch's counter has no entry for aten._trilinear: the bilinear layer's weights times its batch of three.
UNCOUNTED = {"bilinear_pair": 3 * 4 * 5 * 5}


every_network = pytest.mark.parametrize("name", ZOO)


def without_dropout(network):
    """Draws of another shape would be others; what a network draws itself stays."""
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | PlainAttention | nn.RNNBase):
            module.dropout = 0.0
    return network


def settle(network, values, example):
    """Give each BatchNorm the statistics of the batch, with which training mode and evaluation agree."""
    fixed = fix_gates(network, values)
    for module in fixed.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            module.momentum = 1.0
    with torch.no_grad():
        call(fixed.train(), example)
    network.load_state_dict(fixed.state_dict(), strict=False)


def outputs_and_gradients(network, example):
    """What a network returns, and the gradients of the squares of that for those inputs that have one."""
    example = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.clone(), example)
    inputs = [
        x.requires_grad_()
        for x in torch.utils._pytree.tree_leaves(example)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    torch.manual_seed(0)
    outputs = call(network, example)
    gradients = torch.autograd.grad(sum(x.square().sum() for x in outputs), inputs, allow_unused=True) if inputs else ()
    return [x.detach() for x in outputs], [x for x in gradients if x is not None]


def assert_equal(ours, theirs):
    """To 1e-10 of the largest number."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-10 * other.abs().max()


@every_network
def test_closed_units_leave_on_one_side_of_their_gate_or_have_a_reason(name):
    entry = ZOO[name]
    network = entry.network()
    values = entry.gates(network)
    analysis = analyse(record(network, entry.example()), {site: z == 0 for site, z in values.items()}, values)
    for site, leaving in entry.leaving(network).items():
        gate = analysis.gates[site]
        left = len(values[site]) - len(set(gate.front.tolist()) & set(gate.behind.tolist()))
        assert left >= leaving, (site, analysis.reasons[site])
        if site in entry.stays:
            assert left == leaving
            assert len(analysis.reasons[site]) >= entry.stays[site][0]


@every_network
def test_compacts_to_an_equal_network_of_fewer_operations(name):
    """Outputs and input gradients in both modes, at another batch; shapes written by hand; torch's count of work."""
    entry = ZOO[name]
    network = without_dropout(entry.network())
    example, values = entry.example(4), entry.gates(network)
    settle(network, values, example)
    fixed = fix_gates(network, values).eval()
    compacted = compact(network, values, example)
    small = compacted.network
    assert type(small) is type(network)
    assert compacted.certificate <= 1e-10
    for other in (example, entry.example(5, seed=3)):
        for one, two in zip(outputs_and_gradients(small, other), outputs_and_gradients(fixed, other), strict=True):
            assert_equal(one, two)
    trained = [outputs_and_gradients(copy.deepcopy(net).train(), example) for net in (small, fixed)]
    for one, two in zip(*trained, strict=True):
        assert_equal(one, two)
    shapes = {path: tuple(x.shape) for path, x in small.named_parameters(remove_duplicate=False)}
    assert {path: shapes[path] for path in entry.shapes} == dict(entry.shapes)
    closed = {site: z == 0 for site, z in values.items()}
    example = entry.example(3)
    analysis = analyse(record(network, example), closed, values, folds=bool(compacted.plan.folds))
    with FlopCounterMode(display=False) as counter:
        call(small, example)
    assert counter.get_total_flops() // 2 + UNCOUNTED.get(name, 0) == analysis.multiply_adds()
    has_none = name == "factorisation"
    assert has_none or analysis.multiply_adds() < analysis.multiply_adds(remaining=False)


@pytest.mark.parametrize(
    ("name", "branches"),
    [
        ("gated_blocks", {f"{k}.branch.4.gate": f"{k}.branch" for k in (1, 2, 3)}),
        ("vision_transformer", {f"gates.{k}": f"branches.{k}" for k in range(4)}),
        ("encoder_heads", {f"layers.{k}.self_attn.out_proj.gate": f"layers.{k}.self_attn" for k in range(2)}),
    ],
)
def test_closed_blocks_compute_next_to_nothing(name, branches):
    """Closed gates on a whole branch, whose units are open; what is left is one unit, or one head of three."""
    entry = ZOO[name]
    network, example = entry.network(), entry.example()
    values = {site: torch.ones(size, dtype=torch.float64) for site, size in sites(network).items()}
    values |= {site: torch.zeros_like(values[site]) for site in branches}
    fixed, small = fix_gates(network, values), compact(network, values, example).network
    work = []
    for net in (fixed, small):
        with FlopCounterMode(display=False) as counter:
            call(net, example)
        counts = counter.get_flop_counts()
        paths = [f"{type(net).__name__}.{path}" for path in branches.values()]
        work.append(sum(sum(counts[path].values()) for path in paths if path in counts))
    assert_equal(call(small, example), call(fixed, example))
    assert work[1] <= 0.35 * work[0]


@every_network
def test_with_every_gate_open_the_price_is_that_of_the_whole_network(name):
    if name == "style_network":
        pytest.skip("its first image is a constant, whose convolution leaves whatever the gates say")
    network = ZOO[name].network()
    cost = NetworkCost(network, ZOO[name].example(2))
    gates = {site: torch.ones(size, dtype=torch.float64) for site, size in cost.sizes.items()}
    assert cost.macs(gates).item() == pytest.approx(cost.total_macs, rel=1e-12)
