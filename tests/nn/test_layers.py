"""The Gate layer, its site names, and fixed gates."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate, fix_gates
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names, name_gates
from tests.networks import Net


def network():
    return nn.Sequential(Gate(4), nn.Linear(4, 3), nn.ReLU(), Gate(3), nn.Linear(3, 2))


def model_network():
    def forward(net, x):
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=net.net(x)), obs=torch.zeros(len(x)))

    return Net(forward, net=network())


def sites(model, *args):
    nodes = poutine.trace(model).get_trace(*args).nodes
    return [name for name, site in nodes.items() if site["type"] == "sample" and name not in ("data", "y")]


def test_sites_are_named_after_module_paths():
    """From the outermost module that is called: a plain function adds nothing, losses do not count."""
    x = torch.ones(2, 4)
    net = network()
    assert sites(lambda x: net(x), x) == ["0", "3"]
    model = model_network()
    guide = AutoGate(model)
    L0_ELBO()(model, guide)(x)
    assert list(guide.posterior()) == ["net.0", "net.3"]
    assert list(gate_names(model.net)) == ["net.0", "net.3"]
    assert sites(Gate(4), x) == ["gate"]


@pytest.mark.parametrize(
    ("shape", "dim", "size"),
    [((2, 3), -1, 3), ((2, 3, 5, 5), 1, 3), ((2, 3, 5), -2, 3), ((2, 3), -1, 1), ((2, 3, 4, 4), 1, 1)],
)
def test_units_of_any_dimension(shape, dim, size):
    """One gate multiplies an input of any size."""
    gate = Gate(size, dim=dim)
    trace = poutine.trace(gate).get_trace(torch.ones(shape))
    z = trace.nodes["gate"]["value"]
    view = [1] * len(shape)
    view[dim] = size
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], torch.ones(shape) * z.reshape(view))


def test_the_prior_moves_with_the_network():
    gate = Gate(3, prior=HardConcrete(torch.zeros(3), torch.full((3,), 0.5)))
    gate.double()
    assert (
        poutine.trace(gate).get_trace(torch.ones(2, 3)).nodes["gate"]["fn"].base_dist.log_alpha.dtype == torch.float64
    )


def test_fixed_gates_are_deterministic_and_leave_the_network():
    """A copy whose units are multiplied by what is given; the state of the original is shared with nothing."""
    net = network()
    gates = {"0": torch.tensor([1.0, 0.0, 0.5, 1.0]), "3": torch.tensor([0.0, 1.0, 0.3])}
    fixed = fix_gates(net, gates)
    x = torch.randn(5, 4)
    expected = net[4](net[2](net[1](x * gates["0"])) * gates["3"])
    torch.testing.assert_close(fixed(x), expected)
    assert isinstance(net[0], Gate)
    assert isinstance(fixed[0], FixedGate)
    assert fixed[1].weight is not net[1].weight
    assert set(fixed.state_dict()) == {"0.value", "1.weight", "1.bias", "3.value", "4.weight", "4.bias"}
    assert "FixedGate(3, dim=-1)" in repr(fixed)


def test_a_network_inside_the_data_plate():
    """Every example would have gates of its own: a warning where it happens, and a hint where it shows."""
    net = nn.Sequential(nn.Linear(3, 4), Gate(4), nn.Linear(4, 2))
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
    """The guide's names are those of the network that is not compiled, and its gates are trained."""
    net = torch.compile(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Gate(4), nn.Linear(4, 1)), backend="eager")
    x = torch.randn(6, 3)

    def model(x):
        mean = net(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=x[:, 0])

    guide = AutoGate(model)
    guide(x)
    assert list(guide.posterior()) == ["2"]
    L0_ELBO("l0", lam=0.1, group_size=1.0)(model, guide)(x).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in guide.parameters())
