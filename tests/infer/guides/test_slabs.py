"""Slabs of every kind in AutoSpikeSlab: where they start, where they live, what their median is."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_l0 import HardConcrete, RectifiedNormal
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, fit
from tests.infer.regressions import regression


def model_of(prior, event=False):
    """Three gates, and three slabs of a prior or one vector of them."""

    def model():
        z = pyro.sample("z", HardConcrete(torch.zeros(3)).to_event(1))
        w = pyro.sample("w", prior if event else prior.expand([3]).to_event(1))
        pyro.sample("y", dist.Normal((z * w).sum(), 1.0), obs=torch.tensor(2.0))

    return model


def started(model, **options):
    guide = AutoSpikeSlab(model, slab={"w": "z"}, **options)
    guide()
    return guide


REAL = {
    "cauchy": (dist.Cauchy(2.0, 0.5), 2.0, 1.0),
    "student, no mean": (dist.StudentT(1.0, 2.0, 0.5), 2.0, 1.0),
    "student, half a degree": (dist.StudentT(0.5, 2.0, 0.1), 2.0, 1.0),
    "student, no variance": (dist.StudentT(1.5, 2.0, 0.5), 2.0, 0.1),
    "student": (dist.StudentT(5.0, 2.0, 0.5), 2.0, 0.1),
    "laplace": (dist.Laplace(2.0, 0.5), 2.0, 0.1),
    "transformed": (
        dist.TransformedDistribution(dist.Normal(0.0, 1.0), [dist.transforms.AffineTransform(2.0, 0.5)]),
        2.0,
        1.0,
    ),
    "mixture": (
        dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(torch.tensor([1.0, 3.0]), 0.5)),
        2.0,
        0.1,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_a_slab_starts_at_finite_numbers(name):
    """At the mean or, where there is none, near the median; and the first gradients are finite."""
    prior, centre, far = REAL[name]
    model = model_of(prior)
    guide = started(model)
    slab = guide.slabs()["w"]
    assert (slab.mean - centre).abs().max() < far
    L0_ELBO("l0", lam=1.0).differentiable_loss(model, guide).backward()
    assert all(torch.isfinite(x.grad).all() for x in guide.parameters())


def test_where_it_starts_is_as_ever_with_two_moments():
    """The mean, with a hundredth of the standard deviation as noise, drawn after the gates' jitter."""
    pyro.set_rng_seed(3)
    started(model_of(dist.Normal(1.0, 2.0)), init_jitter=0.0)
    pyro.set_rng_seed(3)
    pyro.poutine.trace(model_of(dist.Normal(1.0, 2.0))).get_trace()
    expected = 1.0 + 0.01 * 2.0 * torch.randn(3)
    pyro.set_rng_seed(3)
    assert torch.equal(started(model_of(dist.Normal(1.0, 2.0)), init_jitter=0.0).slabs()["w"].mean, expected)


POSITIVE = (0.0, math.inf)
OTHERS = {
    "half-normal": (dist.HalfNormal(2.0), math.sqrt(2 / math.pi) * 2, POSITIVE),
    "half-cauchy": (dist.HalfCauchy(1.0), None, POSITIVE),
    "exponential": (dist.Exponential(0.5), 2.0, POSITIVE),
    "log-normal": (dist.LogNormal(0.0, 0.5), math.exp(0.125), POSITIVE),
    "beta": (dist.Beta(2.0, 2.0), 0.5, (0.0, 1.0)),
    "uniform": (dist.Uniform(-3.0, 1.0), -1.0, (-3.0, 1.0)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_slab_lives_where_its_prior_does(name):
    prior, mean, (low, high) = OTHERS[name]
    model = model_of(prior)
    guide = started(model, init_scale=2.0)
    slab = guide.slabs()["w"].to_event(1)
    assert (slab.event_dim, slab.has_rsample) == (1, True)
    draws = slab.rsample((2000,))
    assert bool(((draws >= low) & (draws <= high)).all())
    assert torch.isfinite(prior.log_prob(draws)).all()
    assert torch.isfinite(slab.log_prob(draws)).all()
    median = guide.median()["w"]
    if mean is not None:
        assert median.tolist() == pytest.approx([mean] * 3, rel=0.1)
    assert ((draws < median).float().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(2000)
    L0_ELBO("l0", lam=1.0).differentiable_loss(model, guide).backward()
    assert all(torch.isfinite(x.grad).all() for x in guide.parameters())


def test_a_positive_slab_has_a_closed_form():
    """Against a log-normal prior; the start can be set."""
    guide = started(model_of(dist.LogNormal(0.0, 1.0)), init_loc={"w": torch.tensor([0.5, 1.0, 2.0])})
    assert torch.isfinite(kl_divergence(guide.slabs()["w"], dist.LogNormal(torch.zeros(3), 1.0))).all()
    torch.testing.assert_close(guide.median()["w"], torch.tensor([0.5, 1.0, 2.0]))


def test_a_multivariate_normal_slab():
    """Independent normals of the prior's event."""
    covariance = torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 4.0]])
    guide = started(model_of(dist.MultivariateNormal(torch.tensor([1.0, 2.0, 3.0]), covariance), event=True))
    trace = pyro.poutine.trace(guide).get_trace()
    assert (trace.nodes["w"]["fn"].batch_shape, trace.nodes["w"]["fn"].event_shape) == ((), (3,))
    assert guide.slabs()["w"].mean.tolist() == pytest.approx([1.0, 2.0, 3.0], abs=0.2)


def test_median_is_a_copy():
    """It stays what it was while training goes on; posteriors and slabs follow."""
    model = model_of(dist.Normal(0.0, 1.0))
    guides = [started(model), AutoGate(pyro.poutine.block(model, expose=["z"]), family=RectifiedNormal)]
    for guide in guides:
        medians = guide.median()
        assert not any(x.requires_grad for x in medians.values())
        before = {name: x.clone() for name, x in medians.items()}
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.add_(1.0)
        assert all(torch.equal(x, before[name]) for name, x in medians.items())
        assert all(not torch.equal(x, before[name]) for name, x in guide.median().items())
    assert guides[0].slabs()["w"].mean.requires_grad
    assert guides[0].posterior()["z"].log_alpha is guides[0].sites["z"]["log_alpha"]


def test_fit_maps_the_particles_of_pathwise_gates():
    """A hard concrete's 128 particles take one run of the model, as those of Bernoulli gates do."""
    runs = []

    def model(x, y):
        runs.append(None)
        regression(x, y, HardConcrete.from_active_prob(0.3), dist.Normal(0.0, 1.0))

    x = torch.randn(100, 4)
    guide = AutoSpikeSlab(model, slab={"w": "z"})
    with pytest.warns(UserWarning, match="still falling"):
        fit(model, guide, x, x @ torch.tensor([1.0, 0.0, -1.0, 0.0]), steps=40, seed=0)
    assert len(runs) < 120  # also those that compare the target with the model
    probs = guide.active_probs()["z"]
    assert probs[[0, 2]].min() > 0.9 > 0.7 > probs[[1, 3]].max()
