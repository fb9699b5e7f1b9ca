"""The compacted network computes what the network with fixed gates computes, and costs what the count says."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common.networks import lenet5, mlp
from pyro_l0.compaction import compact, load_compacted
from pyro_l0.compaction.apply import apply_plan
from pyro_l0.compaction.plan import Plan
from pyro_l0.nn import L0Gate, NetworkCost, fix_gates
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.gate import gate_names
from tests.networks import Net

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(net, gates, x, dtypes=(torch.float64, torch.float32)):
    """Certificate in both types, and multiply-adds to the last operation; the result in the last type."""
    for dtype in dtypes:
        values = {name: gate.to(dtype) for name, gate in gates.items()}
        result = compact(net.to(dtype), values, x.to(dtype))
        assert result.certificate <= TOLERANCE[dtype]
    closed = {name: gate == 0 for name, gate in gates.items()}
    found = analyse(record(net, x[:1].to(dtype)), closed, values)
    with FlopCounterMode(display=False) as counter:
        result.network(x[:1].to(dtype))
    if not result.plan.folds:  # after which something else may go, as nothing reads it
        assert found.multiply_adds() == counter.get_total_flops() / 2
    if not any(found.reasons.values()):  # no closed unit stays, as the last of its layer
        state = {name: (~mask).float() for name, mask in closed.items()}
        assert NetworkCost(net, x.to(dtype)).macs(state).item() == found.multiply_adds()
    return result


def test_lenet5_and_mlp_shrink_to_the_papers_sizes():
    """9-18-65-25 of LeNet-5 and 266-88-33 of the MLP, gates between 0 and 1 among them."""
    generator = torch.Generator().manual_seed(5)
    for net, sizes in ((lenet5(), (9, 18, 65, 25)), (mlp((784, 300, 100, 10)), (266, 88, 33))):
        gates = {}
        for (name, gate), left in zip(gate_names(net).items(), sizes, strict=True):
            gates[name] = torch.zeros(gate.size)
            if gate.size == 800:  # open inputs of open maps
                maps = gates["8"].nonzero().flatten()
                chosen = torch.cat([16 * maps + i for i in range(16)])[:left]
            else:
                chosen = torch.randperm(gate.size, generator=generator)[:left]
            gates[name][chosen] = 0.2 + 0.8 * torch.rand(len(chosen), generator=generator).round(decimals=1)
        result = check(net, gates, torch.rand(2, 784, generator=generator))
        weights = sum(p.numel() for p in result.network.parameters() if p.dim() > 1)
        expected = 9 * 25 + 9 * 18 * 25 + 65 * 25 + 250 if len(sizes) == 4 else 266 * 88 + 88 * 33 + 330
        assert weights == expected
        assert not any(isinstance(module, L0Gate) for module in result.network.modules())


def biased(net):
    """BatchNorm shifts what a closed gate hands on."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.running_mean, module.weight, module.bias):
                nn.init.normal_(values)
    return net


def test_a_constant_behind_a_gate_and_padding():
    """A closed map that BatchNorm shifts is no zero for a padded convolution: its border differs."""
    net = nn.Sequential(nn.Conv2d(1, 3, 3), L0Gate(3, dim=1), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1))
    result = check(biased(net), {"1": torch.tensor([1.0, 0.0, 0.3])}, torch.randn(2, 1, 6, 6))
    assert [(fold.layer, fold.units, fold.shape) for fold in result.plan.folds] == [("3", (1,), (2, 4, 4))]
    assert result.network.get_submodule("2").num_features == 2


def test_the_network_is_left_alone_and_the_result_can_be_trained():
    """Neither the network nor its modes change, and nothing is shared."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), L0Gate(2, dim=1), nn.Conv2d(2, 1, 3)).train()
    before = copy.deepcopy(net.state_dict())
    small = compact(net, {"3": torch.tensor([1.0, 0.0])}, torch.randn(2, 1, 6, 6)).network
    assert all(module.training for module in net.modules())
    assert not any(module.training for module in small.modules())
    small.train()(torch.randn(2, 1, 6, 6)).square().sum().backward()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.sub_(1.0 + parameter.grad)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


# ------------------------------------------------------------ plans and files


def example(seed=0):
    """Maps, features and a branch, of which one is folded."""
    torch.manual_seed(seed)
    layers = dict(a=nn.Conv2d(2, 3, 3), maps=L0Gate(3, dim=1), norm=nn.BatchNorm2d(3), b=nn.Conv2d(3, 3, 3, padding=1))
    layers.update(branch=L0Gate(3, dim=1), features=L0Gate(48), last=nn.Linear(48, 2))

    def forward(s, x):
        x = s.norm(s.maps(torch.relu(s.a(x))))
        return s.last(s.features((x + s.branch(s.b(x))).flatten(1)))

    gates = {"maps": torch.tensor([0.5, 0.0, 1.0]), "branch": torch.tensor([1.0, 1.0, 0.0])}
    gates["features"] = (torch.arange(48) % 3 > 0).float()
    return biased(Net(forward, **layers)), gates, torch.randn(2, 2, 6, 6)


def test_torch_pruning_agrees():
    """Another tool, on a network that it can prune: convolutions, BatchNorm, a residual sum."""
    pruning = pytest.importorskip("torch_pruning", reason="the oracle is not installed")

    def forward(s, x):
        x = torch.relu(s.a(x))
        x = x + s.c(s.gate(torch.relu(s.norm(s.b(x)))))
        return s.head(x.mean((2, 3)))

    layers = dict(a=nn.Conv2d(1, 4, 3), b=nn.Conv2d(4, 6, 3, padding=1), c=nn.Conv2d(6, 4, 3, padding=1))
    net = Net(forward, gate=L0Gate(6, dim=1), norm=nn.BatchNorm2d(6), head=nn.Linear(4, 2), **layers)
    net = biased(net).eval()
    gate = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    x = torch.randn(3, 1, 8, 8)
    ours = check(net, {"gate": gate}, x).network
    theirs = fix_gates(net, {"gate": torch.ones(6)}).eval()
    theirs.gate = nn.Identity()
    graph = pruning.DependencyGraph().build_dependency(theirs, x)
    graph.get_pruning_group(theirs.b, pruning.prune_conv_out_channels, idxs=[1, 4]).prune()
    torch.testing.assert_close(ours(x), theirs(x))
    ours_size, theirs_size = (sum(p.numel() for p in model.parameters()) for model in (ours, theirs))
    assert ours_size == theirs_size


def test_plans_and_saved_networks_come_back(tmp_path):
    """Plans to the last digit; saved networks into a network with other weights, without pickle."""
    net, gates, x = example()
    result = compact(net, gates, x)
    again = Plan.from_json(result.plan.to_json())
    assert again == result.plan
    torch.testing.assert_close(apply_plan(net, again, x)(x), result.network(x))
    pytest.importorskip("safetensors")
    result.save(tmp_path / "small")
    assert {path.name for path in tmp_path.iterdir()} == {"small.safetensors"}
    loaded = load_compacted(example(seed=9)[0], tmp_path / "small")
    assert torch.equal(loaded.network(x), result.network(x))
    assert (loaded.plan, loaded.certificate) == (result.plan, result.certificate)
