"""Gates that nothing gives a value: warnings and exports."""

import io
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI, Predictive
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.diagnostics.gradients import measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate, NetworkCost, fix_gates
from pyro_l0.nn.gate import name_gates
from tests.networks import Net

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
GATES = {"2": torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0]), "5": torch.tensor([0.0, 1.0, 1.0])}


def network():
    return nn.Sequential(
        *(nn.Linear(4, 5), nn.ReLU(), Gate(5), nn.Linear(5, 3), nn.Tanh(), Gate(3), nn.Linear(3, 3)),
    )


def model_network():
    def forward(net, x, y=None):
        logits = net.net(x)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return Net(forward, net=network())


def test_a_network_in_eval_mode_without_a_posterior_warns_once():
    """For all gates of a network, with the remedy; for another network again."""

    def run(net):
        net(X)
        with torch.no_grad(), pyro.plate("rows", 6, dim=-2):
            net(X)

    for _ in range(2):
        with pytest.warns(UserWarning, match=r"Gate '2' is called in eval mode .*fix_gates\(network") as found:
            run(network().eval())
        assert len(found) == 1


def test_training_gates_by_a_loss_of_torchs_warns_once():
    """A user's loop without a guide; a single gradient is none."""
    net = network()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(steps):
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            optimiser.step()

    net(X)
    train(1)
    with pytest.warns(
        UserWarning, match="Gradients pass gate '5'.* nothing trains; .*L0_ELBO with the guide AutoGate"
    ) as found:
        train(3)
    assert len(found) == 1


@pytest.mark.parametrize("mode", [True, False])
def test_gates_with_a_posterior_do_not_warn(mode):
    """Under objectives, guides, Pyro's handlers and what reads networks, in both modes. Warnings are errors here."""
    torch.manual_seed(0)
    pyro.clear_param_store()
    model = model_network().train(mode)
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


EXPORTS = {
    "onnx": lambda net: torch.onnx.export(net, (X,), io.BytesIO(), dynamo=False),
    "onnx dynamo": lambda net: torch.onnx.export(net, (X,), io.BytesIO(), dynamo=True, verbose=False),
    "export": lambda net: torch.export.export(net, (X,)),
    "strict export": lambda net: torch.export.export(net, (X,), strict=True),
    "trace": lambda net: torch.jit.trace(net, X),
    "script": lambda net: torch.jit.script(net),
}


@pytest.mark.parametrize(("how", "named"), [*((how, True) for how in EXPORTS), ("export", False), ("script", False)])
def test_an_export_of_random_gates_is_refused(how, named):
    """With the remedy; the gates are named as before, and what was fixed is exported."""
    net = network().eval()
    if named:
        name_gates(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match=r"Gate\(5, dim=-1\), would be exported as a draw.*fix_gates") as error:
            EXPORTS[how](net)
    assert not named or "gate '2'" in str(error.value)
    assert [gate.site_name for gate in (net[2], net[5])] == (["2", "5"] if named else [None, None])


def test_fixed_gates_can_be_exported():
    fixed = fix_gates(network(), GATES).eval()
    expected = fixed(X)
    torch.testing.assert_close(torch.export.export(fixed, (X,)).module()(X), expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        traced = torch.jit.trace(fixed, X)
        torch.testing.assert_close(traced(X[:2]), expected[:2])
