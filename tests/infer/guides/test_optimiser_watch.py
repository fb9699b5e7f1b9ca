"""A guide whose parameters no optimiser holds."""

import copy
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import nn
from torch.optim import optimizer as torch_optimizer

from pyro_l0 import HardConcrete
from pyro_l0.diagnostics.gradients import measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x):
        z = pyro.sample("z", HardConcrete.from_active_prob(0.5).expand([4]).to_event(1))
        pyro.sample("y", dist.Normal(self.net(x * z)[:, 0], 0.5).to_event(1), obs=x[:, 0])


X = torch.linspace(-1, 1, 40).view(10, 4)


@pytest.fixture
def module():
    model = Model()
    return L0_ELBO("free_energy")(model, AutoGate(model))


def train(loss, *optimisers, steps=8, micro_batches=1, clear=None):
    for _ in range(steps):
        for optimiser in optimisers:
            (clear or optimiser).zero_grad()
        for _ in range(micro_batches):
            loss(X).backward()
        for optimiser in optimisers:
            optimiser.step()


@pytest.mark.parametrize("clear_all", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_optimiser_made_before_the_first_call(module, clear_all, scheduled):
    """One warning that names the guide, its sites and the remedy; a second optimiser for something else is none."""
    optimisers = [torch.optim.Adam(module.parameters(), lr=0.01)]
    if scheduled:
        optimisers.append(torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1))
    with pytest.warns(
        UserWarning, match=r"AutoGate \(gate sites 'z'\) have had gradients for 100 losses, but no optimiser"
    ) as seen:
        train(module, *optimisers, steps=130, clear=module if clear_all else None)
    assert len(seen) == 1
    assert "call it once with the model's arguments before making an optimiser" in str(seen[0].message)


@pytest.mark.parametrize("freeze_first", [False, True])
def test_gates_behind_a_frozen_site(freeze_first):
    """A first site that is frozen, or that no loss depends on: the others are watched."""

    def model(x):
        pyro.sample("a", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", HardConcrete.from_active_prob(0.5).expand([4]).to_event(1))
        pyro.sample("y", dist.Normal(x @ z, 0.5).to_event(1), obs=x[:, 0])

    called, guide = AutoGate(model), AutoGate(model)
    called(X)
    guide.load_state_dict(called.state_dict())
    if freeze_first:
        guide.sites["a"].requires_grad_(False)

    def loss(x):
        return -guide(x)["z"].sum()

    with pytest.warns(UserWarning, match="no optimiser has moved them"):
        train(loss, steps=110)
    guide.requires_grad_(False)
    again = AutoGate(model)
    again.load_state_dict(guide.state_dict())
    again.requires_grad_(False)
    again(X)  # nothing to watch
    assert not any(x.requires_grad for x in again.parameters())


def test_a_part_of_a_list_of_guides():
    """A list's parameters that were read before its first call; each guide speaks for its own sites."""
    scale = nn.Parameter(torch.zeros(()))

    def model(x):
        bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", HardConcrete(torch.zeros(4)).to_event(1))
        pyro.sample("y", dist.Normal(x @ z + bias, scale.exp()).to_event(1), obs=x[:, 0])

    guide = AutoGuideList(model)
    guide.append(AutoNormal(pyro.poutine.block(model, expose=["bias"])))
    guide.append(AutoGate(pyro.poutine.block(model, hide=["bias"])))
    optimiser = torch.optim.Adam([scale, *guide.parameters()])
    with pytest.warns(UserWarning, match="gate sites 'z'"):
        train(partial(L0_ELBO("free_energy").differentiable_loss, model, guide), optimiser, steps=110)


def adam(*modules):
    return torch.optim.Adam([x for module in modules for x in module.parameters()], lr=0.01)


def read_early(module):
    """Moving, printing and saving before the first call are no optimisers."""
    module.to(torch.float32).train()
    str(module)
    module.state_dict()
    module.guide(X)
    train(module, adam(module), steps=110)


def in_micro_batches(module):
    module.guide(X)
    train(module, adam(module), micro_batches=100, steps=2)


def waiting(module):
    """The network's optimiser steps at every loss, the gates' at every tenth."""
    module.guide(X)
    network, gates = adam(module.model), adam(module.guide)
    for _ in range(11):
        train(module, network, steps=10)
        gates.step()


def measured(module):
    """Evaluations and a measured gradient, which train nothing."""
    module.guide(X)
    for _ in range(110):
        with torch.no_grad():
            module(X)
    measure_gradient(L0_ELBO("free_energy"), module.model, module.guide, X, draws=110)


def beside_another(module):
    module.guide(X)
    other = copy.deepcopy(module.guide)
    train(L0_ELBO("free_energy")(module.model, other), adam(other), steps=110)


def by_svi(optimiser, module):
    """Pyro makes an optimiser for each parameter, some of which step behind autograd's back."""
    svi = SVI(module.model, AutoGate(module.model), optimiser({"lr": 0.01}), L0_ELBO("free_energy"))
    for _ in range(110):
        svi.step(X)


@pytest.mark.parametrize(
    "training",
    [
        read_early,
        in_micro_batches,
        waiting,
        measured,
        beside_another,
        partial(by_svi, pyro.optim.Adam),
        partial(by_svi, pyro.optim.ClippedAdam),
    ],
)
def test_trainings_that_are_not_warned_of(training, module):
    """For longer than the hundred losses after which a warning comes."""
    training(module)


def test_nothing_of_torchs_is_touched(module):
    """Optimisers have no hooks, and after a hundred losses the guide's parameters have none."""
    module(X)
    assert not torch_optimizer._global_optimizer_post_hooks
    train(module, torch.optim.Adam(module.parameters()), steps=101)
    assert not any(x._post_accumulate_grad_hooks for x in module.guide.parameters())


def test_parameters_that_are_asked_for_before_the_first_call():
    """An optimiser of them would hold none: refused, with what to do; a guide whose state was loaded has them."""
    guide = AutoGate(Model())
    with pytest.raises(RuntimeError, match=r"AutoGate that has its parameters.*Call guide\(\*args\) once"):
        torch.optim.Adam(guide.parameters())
    called = AutoGate(Model())
    called(X)
    guide.load_state_dict(called.state_dict())
    assert len(list(guide.parameters())) == len(list(called.parameters()))
