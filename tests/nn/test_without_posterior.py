"""Gates whose posterior a guide has, in calls without it."""

import copy
import io
import pickle
import warnings

import pyro
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI, Predictive
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.diagnostics.gradients import measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import L0Gate, NetworkCost, NetworkGates, fix_gates
from pyro_l0.nn.gate import name_gates
from tests.compaction.networks import Model

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
GATES = {"2": torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0]), "5": torch.tensor([0.0, 1.0, 1.0])}


def network():
    return nn.Sequential(
        *(nn.Linear(4, 5), nn.ReLU(), L0Gate(5), nn.Linear(5, 3), nn.Tanh(), L0Gate(3), nn.Linear(3, 3)),
    )


def closed(gates):
    return {site: torch.where(torch.arange(len(z)) == 1, 0.0, z) for site, z in gates.items()}


@pytest.mark.parametrize("mode", [True, False])
def test_gates_of_a_guide_are_refused_without_it(mode):
    """In both modes, copied and loaded too; what the message names gives the gates' values."""
    model = Model(network())
    guide = AutoGate(model)
    guide(X, Y)
    net = model.net.train(mode)
    for each in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with pytest.raises(RuntimeError, match=r"gate 'net.2' in a run of .*fix_gates\(.*NetworkGates\(network\)"):
            each(X)
    gates = closed(guide.test_gates())
    fixed = fix_gates(net, gates).eval()(X)
    torch.testing.assert_close(compact(net, gates, X).network.eval()(X), fixed)
    with poutine.condition(data=gates):
        torch.testing.assert_close(net(X), fixed)
    own = NetworkGates(net)
    net(X)
    torch.testing.assert_close(net.eval()(X), fix_gates(net, own.test_gates()).eval()(X))


@pytest.mark.parametrize("mode", [True, False])
def test_gates_with_a_posterior_do_not_warn(mode):
    """Under objectives, guides, Pyro's handlers and what reads networks, in both modes. Warnings are errors here."""
    torch.manual_seed(0)
    pyro.clear_param_store()
    model = Model(network()).train(mode)
    guide = AutoGate(model)
    loss = L0_ELBO("l0", lam=0.1)(model, guide)
    for _ in range(3):
        loss(X, Y).backward()
    L0_ELBO("l0").terms(model, guide, X, Y)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), L0_ELBO("free_energy"))
    for _ in range(3):
        svi.step(X, Y)
    svi.evaluate_loss(X, Y)
    measure_gradient(L0_ELBO("l0"), model, guide, X, Y, draws=3)
    Predictive(model, num_samples=3)(X)
    Predictive(model, guide=guide, num_samples=3)(X)
    trace = poutine.trace(model).get_trace(X, Y)
    poutine.replay(model, trace=trace)(X, Y)
    with poutine.condition(data={f"net.{name}": value for name, value in GATES.items()}):
        for _ in range(3):
            F.cross_entropy(model.net(X), Y).backward()
    NetworkCost(model.net, X)
    gates = {name: value.detach() for name, value in guide.test_gates().items()}
    fix_gates(model.net, gates).eval()(X)
    compact(model.net, gates, X).network(X)


def test_parameters_that_wait_for_their_gates_to_come_back():
    """They keep their keys in files, follow the network, are cut with it, and are the same objects in the end."""
    net = network()
    name_gates(net)
    net[5].requires_grad_(False)
    before, location = set(net.state_dict()), net[2].location
    AutoGate(net)(X)
    assert [name for name, _ in net.named_parameters() if name[0] in "25"] == []
    assert set(net.state_dict()) == before
    network().load_state_dict(net.state_dict())
    net.load_state_dict(network().state_dict())
    assert list(NetworkGates(net).parameters()) == [location, net[5].location]
    assert net[2].location is location
    assert [gate.location.requires_grad for gate in (net[2], net[5])] == [True, False]
    poutine.trace(net).get_trace(X)
    net = copy.deepcopy(net.double())
    assert not any(x.requires_grad for x in net.buffers())
    net[2].narrow(torch.tensor([0, 3]))
    kept = NetworkGates(net).sites["2"]
    assert (kept.location.dtype, kept.location.shape, kept.location.requires_grad) == (torch.float64, (2,), True)


EXPORTS = {
    "onnx": lambda net: torch.onnx.export(net, (X,), io.BytesIO(), dynamo=False),
    "onnx dynamo": lambda net: torch.onnx.export(net, (X,), io.BytesIO(), dynamo=True, verbose=False),
    "export": lambda net: torch.export.export(net, (X,)),
    "strict export": lambda net: torch.export.export(net, (X,), strict=True),
    "trace": lambda net: torch.jit.trace(net, X),
}


@pytest.mark.parametrize("how", EXPORTS)
def test_an_export_of_a_guides_gates_is_refused(how):
    """With the remedy."""
    if how == "onnx dynamo":
        pytest.importorskip("onnxscript")
    net = network().eval()
    name_gates(net)
    poutine.trace(net).get_trace(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match=r"gate '2' in a run of the model.*fix_gates"):
            EXPORTS[how](net)


def test_fixed_gates_can_be_exported():
    fixed = fix_gates(network(), GATES).eval()
    expected = fixed(X)
    torch.testing.assert_close(torch.export.export(fixed, (X,)).module()(X), expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        traced = torch.jit.trace(fixed, X)
        torch.testing.assert_close(traced(X[:2]), expected[:2])
