"""Gates as sites of models, their names, and fixed gates."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import L0Gate, fix_gates, insert_gates
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names, name_gates
from tests.compaction.networks import Model


def network():
    return nn.Sequential(L0Gate(4), nn.Linear(4, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 2))


def sites(model, *args):
    nodes = poutine.trace(model).get_trace(*args).nodes
    return [name for name, site in nodes.items() if site["type"] == "sample" and name not in ("data", "y")]


def test_names_of_sites():
    """By name_gates or by what inserts gates, or else in the order of their calls; they stay."""
    x = torch.ones(2, 4)
    model = Model(network())
    guide = AutoGate(model)
    L0_ELBO()(model, guide)(x, torch.zeros(2))
    assert list(guide.posterior()) == ["net.0", "net.3"]
    assert list(gate_names(model.net)) == ["net.0", "net.3"]
    inserted = insert_gates(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), {"1": L0Gate(3)})
    net = network()
    assert list(gate_names(net)) == ["0", "3"]
    for _ in range(2):
        assert sites(lambda x: (net(x), inserted(x), L0Gate(4)(x)), x) == ["gate0", "gate1", "1.1", "gate2"]
    assert list(gate_names(net)) == ["gate0", "gate1"]
    assert list(name_gates(nn.ModuleDict({"net": net}))) == ["net.0", "net.3"]


def test_gates_of_one_name_are_refused_and_a_run_that_records_none():
    parts = [insert_gates(nn.Sequential(nn.Linear(4, 4)), {"0": L0Gate(4)}) for _ in range(2)]
    both, x = nn.Sequential(*parts), torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"two gates are called '0.1'.*\. Call name_gates\(network\)"):
        AutoGate(both)(x)
    name_gates(both)
    guide = AutoGate(both)
    guide(x)
    assert list(guide.posterior()) == ["0.0.1", "1.0.1"]
    net = network()
    with (
        pytest.raises(RuntimeError, match=r"a gate with a name.*; call .*name_gates\(network\) before"),
        poutine.scale(scale=2.0),
    ):
        net(x)
    name_gates(net)
    with poutine.scale(scale=2.0):
        net(x)


@pytest.mark.parametrize(
    ("shape", "dim", "size"),
    [((2, 3), -1, 3), ((2, 3, 5, 5), 1, 3), ((2, 3, 5), -2, 3), ((2, 3), -1, 1), ((2, 3, 4, 4), 1, 1)],
)
def test_units_of_any_dimension(shape, dim, size):
    """One gate multiplies an input of any size."""
    gate = L0Gate(size, dim=dim)
    trace = poutine.trace(gate).get_trace(torch.ones(shape))
    z = trace.nodes["gate0"]["value"]
    view = [1] * len(shape)
    view[dim] = size
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], torch.ones(shape) * z.reshape(view))


def test_the_prior_moves_with_the_network():
    gate = L0Gate(3, prior=HardConcrete(torch.zeros(3), torch.full((3,), 0.5)))
    gate.double()
    prior = poutine.trace(gate).get_trace(torch.ones(2, 3)).nodes["gate0"]["fn"].base_dist
    assert prior.log_alpha.dtype == torch.float64


def test_fixed_gates_are_deterministic_and_leave_the_network():
    """A copy whose units are multiplied by what is given; the state of the original is shared with nothing."""
    net = network()
    gates = {"0": torch.tensor([1.0, 0.0, 0.5, 1.0]), "3": torch.tensor([0.0, 1.0, 0.3])}
    fixed = fix_gates(net, gates)
    x = torch.randn(5, 4)
    expected = net[4](net[2](net[1](x * gates["0"])) * gates["3"])
    torch.testing.assert_close(fixed(x), expected)
    assert isinstance(net[0], L0Gate)
    assert isinstance(fixed[0], FixedGate)
    assert fixed[1].weight is not net[1].weight
    assert set(fixed.state_dict()) == {"0.value", "1.weight", "1.bias", "3.value", "4.weight", "4.bias"}
    assert "FixedGate(3, dim=-1)" in repr(fixed)


def test_a_network_inside_the_data_plate():
    """Every example would have gates of its own: a warning where it happens, and a hint where it shows."""
    net = nn.Sequential(nn.Linear(3, 4), L0Gate(4), nn.Linear(4, 2))
    x, y = torch.randn(20, 3), torch.zeros(20).long()

    def model():
        with pyro.plate("data", 20, subsample_size=5) as index:
            pyro.sample("y", dist.Categorical(logits=net(x[index])), obs=y[index])

    name_gates(net)
    guide = AutoGate(model)
    with pytest.warns(UserWarning, match="inside the subsampled plate 'data'"):
        guide()
    with pytest.raises(ValueError, match="a gate per example"):
        fix_gates(net, guide.test_gates())


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
def test_gates_of_a_compiled_network_are_named_at_its_first_call():
    """And its gates are trained."""
    net = torch.compile(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 1)), backend="eager")
    x = torch.randn(6, 3)

    def model(x):
        mean = net(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=x[:, 0])

    guide = AutoGate(model)
    guide(x)
    assert list(guide.posterior()) == ["gate0"]
    L0_ELBO("l0", lam=0.1, group_size=1.0)(model, guide)(x).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in guide.parameters())
