"""Gates of large designs, sampled with the slabs integrated out, against enumeration."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import BernoulliGate
from pyro_l0.infer import AutoSpikeSlab
from tests.infer.regressions import enumerated
from tests.posterior_references import problem
from tests.reference_posteriors import GaussianPosterior
from tests.sampled_posteriors import importance_sampled_posterior
from tests.spike_slab_designs import Design

SLAB = {"w": "z"}


def data(p, n=60):
    x = torch.randn(n, p, dtype=torch.float64)
    x[:, 1] = x[:, 0] + 0.1 * torch.randn(n, dtype=torch.float64)
    return x, 0.7 * x[:, 0] - 0.5 * x[:, 2] + torch.randn(n, dtype=torch.float64)


def design(p, **options):
    x, y = data(p)
    return Design("linear", x, y, **options), GaussianPosterior(x, y, 1.0, 0.5, 0.2).summary()


@pytest.mark.slow
def test_tempered_gibbs_is_the_posterior():
    linear, exact = design(7)
    guide = AutoSpikeSlab(linear.model, slab=SLAB, slabs="structured")
    posterior = guide.refine(linear.x, linear.y, seed=0)
    torch.testing.assert_close(posterior.active_probs()["z"], exact.inclusion, atol=0.02, rtol=0)
    assert posterior.ok
    pyro.set_rng_seed(4)
    draws = posterior.draws(20_000)
    torch.testing.assert_close(draws["z"].mean(0), exact.inclusion, atol=0.03, rtol=0)
    summary = posterior.summary(20_000)["w"]
    torch.testing.assert_close(summary.mean, exact.mean, atol=0.02, rtol=0)
    torch.testing.assert_close((draws["z"] * draws["w"]).mean(0), exact.mean, atol=0.02, rtol=0)
    # A closed gate's slab has its prior.
    assert draws["w"][draws["z"] == 0].std() == pytest.approx(0.5, rel=0.03)
    again = guide.refine(linear.x, linear.y, seed=0).active_probs()["z"]
    assert torch.equal(again, posterior.active_probs()["z"])


def test_mean_field_of_independent_features():
    x = torch.linalg.qr(torch.randn(60, 6, dtype=torch.float64)).Q * math.sqrt(60)
    y = 0.4 * x[:, 0] + torch.randn(60, dtype=torch.float64)
    guide = AutoSpikeSlab(Design("independent", x, y).model, slab=SLAB)
    exact = GaussianPosterior(x, y, 1.0, 0.5, 0.2).summary().inclusion
    field = guide.refine(x, y, method="mean_field", seed=0)
    assert math.isnan(field.error)
    assert not field.ok
    assert "Compare method='tempered'" in field.problems[0]
    found = field.active_probs()["z"]
    torch.testing.assert_close(found, exact, atol=0.01, rtol=0)


@pytest.mark.slow
def test_groups_switch_together():
    x = torch.randn(80, 3, 2, dtype=torch.float64)
    y = (x[:, 1] @ torch.tensor([0.6, -0.4]).double()) + torch.randn(80, dtype=torch.float64)

    def model(x, y):
        with pyro.plate("groups", 3):
            z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.3).double()))
            w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 0.5).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((x * (z.unsqueeze(-1) * w)).sum((-2, -1)), 1.0), obs=y)

    exact, _ = enumerated(x.flatten(1), y, torch.tensor([0, 0, 1, 1, 2, 2]), 0.3, 0.5)
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
    pyro.set_rng_seed(1)
    interval = posterior.interval(0.8, draws=40)["w"]
    pyro.set_rng_seed(1)
    torch.testing.assert_close(interval, posterior.quantiles((0.1, 0.9), 40)["w"])


def test_a_likelihood_that_is_not_quadratic():
    x = torch.randn(80, 4, dtype=torch.float64)
    y = (torch.rand(80, dtype=torch.float64) < torch.sigmoid(1.2 * x[:, 0])).double()
    logistic = Design("labels", x, y, "logistic", tau=1.0)
    exact = importance_sampled_posterior(problem(logistic), 2000, seed=0).inclusion
    posterior = AutoSpikeSlab(logistic.model, slab=SLAB, slabs="structured").refine(x, y, seed=0, flips=600)
    torch.testing.assert_close(posterior.active_probs()["z"], exact, atol=0.03, rtol=0)


def test_probabilities_of_sure_effects_are_at_most_one():
    """Sums of weights round, in float32 to above one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x[:, 0] + 0.5 * torch.randn(60, generator=generator)
    sure = Design("sure", x, y, sigma=0.5, tau=1.0, rate=0.4)
    for seed in range(3):
        guide = AutoSpikeSlab(sure.model, slab=SLAB, slabs="structured")
        assert 0.999 < guide.refine(x, y, seed=seed).active_probs()["z"][0] <= 1


@pytest.mark.parametrize(
    ("family", "n", "slab"), [("logistic", 10, 10.0), ("logistic", 5, 3.0), ("logistic", 20, 30.0), ("poisson", 6, 2.0)]
)
@pytest.mark.parametrize("method", ["tempered", "mean_field"])
def test_slabs_far_from_normal(family, n, slab, method):
    """Given that the gate is open, draws have the mean, deviation and interval of quadrature; five standard errors."""
    x = torch.randn(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    y = torch.where(x[:, 0] > 0, 1.0 if family == "logistic" else 4.0, 0.0).double()
    few = Design("few rows", x, y, family, tau=slab, rate=0.5)
    guide = AutoSpikeSlab(few.model, slab=SLAB)
    guide(x, y)
    pyro.set_rng_seed(0)
    draws = guide.refine(x, y, seed=0, flips=100, method=method).draws(4000)
    found = draws["w"][draws["z"] == 1]
    nodes = torch.linspace(-5 * slab, 5 * slab, 20_001, dtype=torch.float64)
    log_likelihood = problem(few).log_likelihood(nodes[:, None] * x[:, 0]).sum(1)
    density = (log_likelihood - 0.5 * (nodes / slab).square()).softmax(0)
    mean = float(density @ nodes)
    sd = math.sqrt(float(density @ (nodes - mean).square()))
    assert len(found) > 500
    assert float(found.mean()) == pytest.approx(mean, abs=5 * sd / math.sqrt(len(found)))
    assert float(found.std()) == pytest.approx(sd, rel=0.15)
    for end in (0.05, 0.95):
        below = float(density[nodes < float(found.quantile(end))].sum())
        assert below == pytest.approx(end, abs=5 * math.sqrt(0.05 * 0.95 / len(found)))
    # A closed gate's slab has its prior.
    closed = draws["w"][draws["z"] == 0]
    assert len(closed) < 500 or float(closed.std()) == pytest.approx(slab, rel=0.2)
