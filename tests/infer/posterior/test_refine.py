"""Gates of large designs, sampled with the slabs integrated out, against enumeration."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_l0 import BernoulliGate
from pyro_l0.infer import AutoSpikeSlab

SLAB = {"w": "z"}


def regression(p, rate=0.2, noise=1.0):
    def model(x, y):
        with pyro.plate("features", p):
            z = pyro.sample("z", BernoulliGate(probs=torch.tensor(rate).double()))
            w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 0.5))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ (z * w), noise), obs=y)

    return model


def data(p, n=60):
    x = torch.randn(n, p, dtype=torch.float64)
    x[:, 1] = x[:, 0] + 0.1 * torch.randn(n, dtype=torch.float64)
    return x, 0.7 * x[:, 0] - 0.5 * x[:, 2] + torch.randn(n, dtype=torch.float64)


def enumerated(x, y, rate=0.2, tau=0.5):
    gates = torch.tensor(list(itertools.product((0.0, 1.0), repeat=x.shape[1])), dtype=torch.float64)
    covariances = [torch.eye(len(y)).double() + tau**2 * (x * z) @ x.T for z in gates]
    scores = torch.stack([MultivariateNormal(torch.zeros_like(y), c).log_prob(y) for c in covariances])
    scores = scores + gates.sum(1) * math.log(rate / (1 - rate))
    weights = scores.softmax(0)
    means = torch.stack(
        [tau**2 * z * (x.T @ torch.linalg.solve(c, y)) for z, c in zip(gates, covariances, strict=True)]
    )
    return weights @ gates, weights @ means


@pytest.fixture
def seeded():
    pyro.clear_param_store()
    pyro.set_rng_seed(3)


def test_tempered_gibbs_is_the_posterior(seeded):
    x, y = data(7)
    probs, means = enumerated(x, y)
    guide = AutoSpikeSlab(regression(7), slab=SLAB, slabs="structured")
    posterior = guide.refine(x, y, seed=0)
    torch.testing.assert_close(posterior.active_probs()["z"], probs, atol=0.02, rtol=0)
    assert posterior.spread < 0.1
    pyro.set_rng_seed(4)
    draws = posterior.draws(20_000)
    torch.testing.assert_close(draws["z"].mean(0), probs, atol=0.03, rtol=0)
    summary = posterior.summary(20_000)["w"]
    torch.testing.assert_close(summary.mean, means, atol=0.02, rtol=0)
    torch.testing.assert_close((draws["z"] * draws["w"]).mean(0), means, atol=0.02, rtol=0)
    # A closed gate's slab has its prior.
    closed = draws["w"][draws["z"] == 0]
    assert closed.std() == pytest.approx(0.5, rel=0.03)
    again = guide.refine(x, y, seed=0).active_probs()["z"]
    assert torch.equal(again, posterior.active_probs()["z"])


def test_a_plain_mean_field_guide_refines_too_and_stays(seeded):
    x, y = data(6)
    guide = AutoSpikeSlab(regression(6), slab=SLAB)
    guide(x, y)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    posterior = guide.refine(x, y, seed=1)
    torch.testing.assert_close(posterior.active_probs()["z"], enumerated(x, y)[0], atol=0.02, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


def test_mean_field_of_independent_features(seeded):
    x = torch.linalg.qr(torch.randn(60, 6, dtype=torch.float64)).Q * math.sqrt(60)
    y = 0.4 * x[:, 0] + torch.randn(60, dtype=torch.float64)
    posterior = AutoSpikeSlab(regression(6), slab=SLAB).refine(x, y, method="mean_field", seed=0)
    torch.testing.assert_close(posterior.active_probs()["z"], enumerated(x, y)[0], atol=0.01, rtol=0)


def test_a_rate_and_a_noise_of_the_model(seeded):
    x, y = data(5)

    def model(x, y):
        rate = pyro.sample("rate", dist.Beta(torch.ones(()).double(), 4.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(torch.ones(()).double()))
        with pyro.plate("features", 5):
            z = pyro.sample("z", BernoulliGate(probs=rate))
            w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 0.5))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ (z * w), sigma), obs=y)

    guide = AutoSpikeSlab(model, slab=SLAB, slabs="structured", hyper=("rate", "sigma"))
    draws = guide.refine(x, y, seed=0).draws(4000)
    assert draws["sigma"].shape == (4000,)
    assert bool((draws["sigma"] == draws["sigma"][0]).all())
    # Given the gates, the rate is Beta(1 + open, 4 + closed).
    expected = (1 + draws["z"].sum(1)) / 10
    assert float((draws["rate"] - expected).mean()) == pytest.approx(0.0, abs=0.01)
    alone = AutoSpikeSlab(model, slab=SLAB).refine(x, y, seed=0)  # takes both without being told, and needs no training
    torch.testing.assert_close(alone.active_probs()["z"], draws["z"].mean(0), atol=0.03, rtol=0)
    with pytest.raises(ValueError, match="sigma"):
        AutoSpikeSlab(model, slab=SLAB, hyper=()).refine(x, y)


def test_groups_switch_together(seeded):
    x = torch.randn(80, 3, 2, dtype=torch.float64)
    y = (x[:, 1] @ torch.tensor([0.6, -0.4]).double()) + torch.randn(80, dtype=torch.float64)

    def model(x, y):
        with pyro.plate("groups", 3):
            z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.3).double()))
            w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 0.5).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((x * (z.unsqueeze(-1) * w)).sum((-2, -1)), 1.0), obs=y)

    gates = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)), dtype=torch.float64)
    flat = x.flatten(1)
    covariances = [torch.eye(80).double() + 0.25 * (flat * z.repeat_interleave(2)) @ flat.T for z in gates]
    scores = torch.stack([MultivariateNormal(torch.zeros_like(y), c).log_prob(y) for c in covariances])
    exact = (scores + gates.sum(1) * math.log(0.3 / 0.7)).softmax(0) @ gates
    posterior = AutoSpikeSlab(model, slab=SLAB, slabs="structured").refine(x, y, seed=0)
    torch.testing.assert_close(posterior.active_probs()["z"], exact, atol=0.02, rtol=0)
    assert posterior.draws(7)["w"].shape == (7, 3, 2)
    summary = posterior.summary(50)
    assert summary["w"].active_probs.shape == (3, 2)
    frame = summary.to_frame()
    assert list(frame.columns) == ["active_probs", "mean", "sd", "lower", "upper"]
    assert frame.loc["w[1, 0]", "mean"] == pytest.approx(float(summary["w"].mean[1, 0]))
    assert str(summary).splitlines()[1].startswith("w[0, 0]")
    assert len(str(summary["w"]).splitlines()) == 7
    with pytest.warns(FutureWarning, match="Use active_probs"):
        assert summary["w"].active_prob is summary["w"].active_probs
    pyro.set_rng_seed(1)
    interval = posterior.interval(0.8, draws=40)["w"]
    pyro.set_rng_seed(1)
    torch.testing.assert_close(interval, posterior.quantiles((0.1, 0.9), 40)["w"])


def test_a_likelihood_that_is_not_quadratic(seeded):
    x = torch.randn(80, 4, dtype=torch.float64)
    y = (torch.rand(80, dtype=torch.float64) < torch.sigmoid(1.2 * x[:, 0])).double()

    def model(x, y):
        with pyro.plate("features", 4):
            z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.2).double()))
            w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=x @ (z * w)), obs=y)

    gates = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)), dtype=torch.float64)
    slabs = torch.randn(40_000, 4, dtype=torch.float64)
    scores = []
    for z in gates:  # the evidence as a mean over the prior
        eta = (slabs * z) @ x.T
        log_likelihood = (y * eta - torch.nn.functional.softplus(eta)).sum(1)
        scores.append(torch.logsumexp(log_likelihood, 0) + z.sum() * math.log(0.25))
    exact = torch.stack(scores).softmax(0) @ gates
    posterior = AutoSpikeSlab(model, slab=SLAB, slabs="structured").refine(x, y, seed=0, flips=600)
    torch.testing.assert_close(posterior.active_probs()["z"], exact, atol=0.03, rtol=0)


def test_refusals(seeded):
    x, y = data(4)
    guide = AutoSpikeSlab(regression(4), slab=SLAB)
    with pytest.raises(ValueError, match="'tempered' or 'mean_field', but got 'exact'"):
        guide.refine(x, y, method="exact")
