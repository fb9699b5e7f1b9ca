"""Gates that act by hooks: nothing of the network changes its place, and nothing is left when they are taken out."""

import copy
import pickle

import pytest
import torch
from pyro import poutine
from torch import nn
from torch.utils.hooks import RemovableHandle

from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate, fix_gates, gate_heads, gate_weights, insert_gates
from pyro_l0.nn.gate import gate_names, name_gates
from pyro_l0.nn.weights import fix_weights
from tests.networks import Attention, Dense


def forward(net, x):
    """Attention, and blocks inside of each other; it reads what a module with a gate is made of."""
    h = net.enter(x.to(net.blocks[0][0].weight.dtype))
    return net.head(net.blocks(h + net.attention(h))).mean(1)


PLACES = {"blocks.0": 12, "blocks.0.0": 12, "blocks.1": 8}
SITES = {"attention.out.gate": 4, "blocks.0.0.1": 12, "blocks.0.1": 12, "blocks.1.1": 8}


def example():
    torch.manual_seed(1)
    return torch.randn(2, 4, 5).double()


def plain():
    torch.manual_seed(0)
    inner, outer = nn.Sequential(nn.Linear(8, 12), nn.ReLU()), nn.Sequential(nn.Linear(12, 8), nn.Tanh())
    layers = dict(enter=(5, 8), attention=Attention(8, 4), blocks=nn.Sequential(inner, outer), head=(8, 3))
    return Dense(forward, **layers).double()


def gated(net=None):
    heads = gate_heads(plain() if net is None else net, {"attention.out": 4})
    return insert_gates(heads, {path: L0Gate(size) for path, size in PLACES.items()}, example())


def half_closed(last=1.0):
    values = {site: (torch.arange(size) % 2).double() for site, size in SITES.items()}
    values["blocks.1.1"][1] = last
    return values


def hooks(network):
    return [hook for m in network.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_every_name_and_attribute_stays():
    """Of modules, tensors and classes; sites are named by the modules' paths, and open gates change nothing."""
    net = plain()
    found = gated(net)
    assert {site: gate.size for site, gate in gate_names(found).items()} == SITES
    assert list(gate_names(found)) == list(SITES)
    state = {name: x for name, x in found.state_dict().items() if not name.startswith("l0_gates.")}
    assert list(state) == list(net.state_dict())
    kinds = [{path: type(module) for path, module in one.named_modules()} for one in (net, found)]
    assert kinds[0].items() <= kinds[1].items()
    assert not hooks(net)
    x = example()
    ones = {site: torch.ones(size).double() for site, size in SITES.items()}
    torch.testing.assert_close(fix_gates(found, ones)(x), net(x))
    found.load_state_dict(net.state_dict(), strict=False)
    net.load_state_dict(state)


def test_a_container_counts_and_runs_its_layers_alone():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    found = insert_gates(net, {"1": L0Gate(4)}, torch.ones(1, 3))
    assert len(found) == 3
    assert isinstance(found[-1], nn.Linear)
    assert list(name_gates(nn.ModuleDict({"net": found}))) == ["net.1.1"]
    values = {"1.1": torch.tensor([1.0, 0.0, 0.5, 1.0])}
    small = compact(insert_gates(net, {"1": L0Gate(4)}), values, torch.ones(2, 3)).network
    assert list(small.state_dict()) == list(net.state_dict())


def test_a_compacted_network_is_plain():
    """No hook, no holder; what can't leave wholly is left at its site."""
    found = gated()
    small = compact(found, half_closed(0.5), example())
    assert small.certificate < 1e-10
    assert not hooks(small.network)
    assert not small.network._load_state_dict_pre_hooks
    assert [path for path, _ in small.network.named_modules()] == [path for path, _ in plain().named_modules()]
    assert type(small.network) is Dense
    assert small.network.attention.qkv.out_features == 12
    net = insert_gates(plain(), {"head": L0Gate(3)})
    left = compact(net, {"head.1": torch.tensor([0.5, 1.0, 0.0]).double()}, example()).network
    torch.testing.assert_close(left(example()), fix_gates(net, {"head.1": torch.tensor([0.5, 1.0, 0.0])})(example()))


def test_copies_and_pickles_have_gates_of_their_own(monkeypatch):
    """In a new process torch numbers hooks from 0 on; none takes the place of a gate's."""
    found = gated()
    other = copy.deepcopy(found)
    mine, others = ({id(gate) for gate in gate_names(one).values()} for one in (found, other))
    assert mine.isdisjoint(others)
    text = pickle.dumps(found)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    loaded = pickle.loads(text)
    seen = []
    for module in loaded.modules():
        module.register_forward_hook(lambda *_: seen.append(1))
        module.register_forward_pre_hook(lambda *_: None)
    values = half_closed()
    for one in (other, loaded):
        torch.testing.assert_close(fix_gates(one, values)(example()), fix_gates(found, values)(example()))
        assert compact(one, values, example()).certificate < 1e-10
    assert seen


def test_gates_on_weights_act_by_hooks():
    """The parameter is there before and after a call, and where a call fails."""
    net = plain()
    found = gate_weights(net, "head", "blocks.0.0")
    assert [name for name in found.state_dict() if not name.startswith("l0_gates.")] == list(net.state_dict())
    with pytest.raises(RuntimeError, match="shape"):
        found.head(torch.ones(2, 3).double())
    assert found.head.weight is dict(found.named_parameters())["head.weight"]
    values = {site: (torch.arange(gate.size) % 2).double() for site, gate in gate_names(found).items()}
    assert values.keys() == {"head.gate", "blocks.0.0.gate"}
    left = fix_weights(found, values)
    torch.testing.assert_close(fix_gates(found, values)(example()), left(example()))
    assert not hooks(left)
    assert list(left.modules())[-1] is left.head


@pytest.mark.slow  # importing torch's compiler takes seconds
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
def test_a_compiled_network_has_its_gates():
    found = insert_gates(plain(), {"blocks.0": L0Gate(12)})
    values = {"blocks.0.1": (torch.arange(12) % 2).double()}
    fixed = fix_gates(found, values)
    torch.testing.assert_close(torch.compile(fixed, backend="eager")(example()), fixed(example()))
    exported = torch.export.export(fixed, (example(),)).module()
    torch.testing.assert_close(exported(example()), fixed(example()))
    net = torch.compile(found, backend="eager")
    trace = poutine.trace(net).get_trace(example())
    assert [name for name, site in trace.nodes.items() if site["type"] == "sample"] == ["blocks.0.1"]


def test_gates_that_are_inserted_one_by_one_are_in_the_order_of_the_modules():
    """One of them has two names."""
    same = nn.Linear(3, 3)
    net = Dense(lambda s, x: s.last(s.again(s.same(x))), same=same, again=same, last=(3, 1))
    twice = insert_gates(insert_gates(net, {"last": L0Gate(1)}), {"same": L0Gate(3)})
    assert list(gate_names(twice)) == ["same.1", "last.1"]


def test_a_gate_behind_a_module_is_beside_the_gates_inside_of_it():
    """The second layer of the block has the name that the block's gate would have."""
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 1))
    gated = insert_gates(
        net, {"0": L0Gate(4), "0.1": L0Gate(4), "0.0": L0Gate(4), "0.1.1": L0Gate(4)}, torch.ones(1, 3)
    )
    sites = {"0.0.1", "0.1.1.1", "0.1.2", "0.2"}
    assert set(gate_names(gated)) == sites
    assert {path for path in dict(gated.named_modules()) if path.endswith(tuple(f"l0_gates.{x}" for x in sites))}
    values = {site: torch.tensor([1.0, 0.0, 1.0, 1.0]) for site in sites}
    assert compact(gated, values, torch.randn(2, 3)).network[1].in_features == 3
