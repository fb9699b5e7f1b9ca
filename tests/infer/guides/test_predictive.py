"""Pyro's Predictive with guides over gates: exact zeros, joint draws, new rows, and refined posteriors."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

from pyro_l0 import BernoulliGate
from pyro_l0.infer import AutoGate, AutoSpikeSlab
from tests.infer.regressions import features

DRAWS = 400
ERRORS = 5


@pytest.fixture(scope="module")
def data():
    """Features 0 and 1 are nearly the same."""
    torch.manual_seed(61)
    x = torch.randn(60, 4)
    x[:, 1] = x[:, 0] + 0.05 * torch.randn(60)
    return x, 0.6 * x[:, 0] + 0.5 * torch.randn(60)


def model(x, y=None):
    z, w = features(x.shape[1], 0.3)
    beta = pyro.deterministic("beta", z * w)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(beta @ x.T, 0.5), obs=y)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"gates": "autoregressive", "slabs": "structured"}], ids=["mean field", "joint"]
)
def test_gates_are_zero_as_often_as_the_guide_says(options, parallel, data):
    """Within five standard errors of P(z = 0); predictions of new rows are those of the coefficients."""
    guide = AutoSpikeSlab(model, slab={"w": "z"}, **options)
    pyro.set_rng_seed(62)
    guide(*data)
    new = torch.eye(4)[:3]
    drawn = Predictive(model, guide=guide, num_samples=DRAWS, parallel=parallel)(new)
    z, beta, y = (drawn[name].reshape(DRAWS, -1) for name in ("z", "beta", "y"))
    assert ((z == 0) | (z == 1)).all()
    assert torch.equal(beta == 0, z == 0)
    probs = guide.active_probs()["z"]
    assert ((z.mean(0) - probs).abs() < ERRORS * (probs * (1 - probs) / DRAWS).sqrt()).all()
    noise = y - beta[:, :3]
    assert abs(noise.mean()) < ERRORS * 0.5 / math.sqrt(noise.numel())
    assert noise.std().item() == pytest.approx(0.5, rel=0.05)


def test_draws_of_a_refined_posterior(data):
    """Of the same features at most one is open, which the predictions of both together show; the guide is as before."""
    guide = AutoSpikeSlab(model, slab={"w": "z"}, slabs="structured")
    pyro.set_rng_seed(63)
    guide(*data)
    before = guide.active_probs()["z"]
    refined = guide.refine(*data, seed=0)
    draws = refined.draws(DRAWS)
    drawn = Predictive(model, posterior_samples=draws, parallel=True)(torch.eye(4))
    beta = drawn["beta"].reshape(DRAWS, 4)
    assert torch.equal(beta, draws["z"] * draws["w"])
    assert torch.equal(guide.active_probs()["z"], before)
    assert drawn["y"].shape == (DRAWS, 4)
    is_open = beta != 0
    assert (is_open[:, :2].sum(1) == 1).float().mean() > 0.8
    assert is_open.float().mean(0)[:2].min() > 0.1


def test_a_network_has_the_same_weights_in_all_draws(data):
    """Of an AutoGate only the gates vary."""
    net = torch.nn.Linear(4, 1)

    def gated(x, y=None):
        pyro.module("net", net)
        z = pyro.sample("z", BernoulliGate(probs=torch.full((4,), 0.5)).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(net(x * z)[:, 0], 1e-6), obs=y)

    guide = AutoGate(gated, BernoulliGate)
    pyro.set_rng_seed(64)
    guide(*data)
    drawn = Predictive(gated, guide=guide, num_samples=200, return_sites=("z", "y"))(torch.ones(1, 4))
    z = drawn["z"].reshape(200, 4)
    torch.testing.assert_close(drawn["y"][:, 0], net(z)[:, 0], atol=1e-5, rtol=0)
    assert 2 <= len(z.unique(dim=0)) <= 16
