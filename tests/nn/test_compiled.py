"""Networks that are compiled before anything else."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate


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
