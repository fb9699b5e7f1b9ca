"""Models of many kinds that correlated guides take: rows that are drawn, gates alone, dtypes and sizes."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import BernoulliGate
from pyro_l0.infer import L0_ELBO, AutoSpikeSlab, check_fit, fit
from pyro_l0.infer.posterior import fit as fitting
from tests.infer.regressions import SLAB, correlated_guide, features, leave_one_out, observe
from tests.spike_slab_designs import Design

X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] + torch.randn(20, generator=torch.Generator().manual_seed(1))
N, ROWS = 60, 20
DESIGN = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
SEEN = DESIGN @ torch.tensor([0.9, 0.4, 0.0]) + 1.4 * torch.randn(N, generator=torch.Generator().manual_seed(1))


def test_a_part_of_the_data_that_is_handed_on():
    def of_ten():
        z, w = features(2)
        with pyro.plate("data", len(X), subsample=torch.arange(10)) as i:
            pyro.sample("y", dist.Normal((z * w) @ X[i].mT, 1.0), obs=Y[i])

    half = correlated_guide(of_ten)
    half()
    curvature = half.joint.slab_posterior.quadratic()[0].detach()
    torch.testing.assert_close(curvature, 2 * X[:10].mT @ X[:10], rtol=1e-3, atol=1e-2)  # for all 20


def test_a_gate_that_nothing_sees_keeps_its_prior():
    def program():
        pyro.sample("v", BernoulliGate(probs=torch.tensor(0.3)))
        z, w = features(2)
        observe((z * w) @ X.mT, Y)

    guide = correlated_guide(program, gates="mean_field", slabs="independent")
    # Sixteen chains with 1200 flips of three gates.
    assert float(guide.refine(seed=0).active_probs()["v"]) == pytest.approx(0.3, abs=0.03)


def test_a_model_that_cannot_be_mapped(monkeypatch):
    """It is fitted particle by particle, with a warning that says so; a loss that was told to map it refuses."""

    def branching():
        z, w = features(2)
        observe((z * w) @ X.mT if z[0].item() > 0 else z[1] * w[1] * X[:, 1], Y)

    guide = correlated_guide(branching)
    monkeypatch.setattr(fitting, "_DRAWS", 50)
    with pytest.warns(UserWarning, match="one by one|still falling") as caught:
        result = fit(branching, guide, steps=12, num_particles=4, seed=0)
    assert sum("one by one" in str(warning.message) for warning in caught) == 1
    assert len(result.losses) == 12
    elbo = leave_one_out(vectorize_particles=True)
    with pytest.raises(RuntimeError, match=r"vmap[^$]*Set vectorize_particles=False"):
        elbo.differentiable_loss(branching, guide)


def test_parameters_can_not_be_made_in_many_particles_at_once():
    """Pyro makes them at their first call."""

    def coin():
        pyro.sample("z", BernoulliGate(logits=pyro.param("logits", torch.zeros(2))).to_event(1))

    def toss():
        z = pyro.sample("z", BernoulliGate(probs=torch.full((2,), 0.5)).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.ones(()))

    elbo = L0_ELBO("free_energy", estimator="leave_one_out", num_particles=2, vectorize_particles=True)
    with pytest.raises(RuntimeError, match=r"Set vectorize_particles=False"):
        elbo.differentiable_loss(toss, coin)


@pytest.mark.filterwarnings("ignore:The loss was still falling")
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_data_of_another_dtype_than_the_default(default):
    """Priors of the default dtype over data of the other: a step of training, its check, and finite numbers."""
    other = torch.float64 if default is torch.float32 else torch.float32
    x, y = X.to(other), Y.to(other)
    torch.set_default_dtype(default)

    def mixed():
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        z, w = features(2)
        observe((z * w * x).sum(-1), y, sigma)

    guide = correlated_guide(mixed, hyper=("sigma",))
    fit(mixed, guide, steps=3, num_particles=4)
    assert check_fit(mixed, guide, flips=9).active_probs["z"].isfinite().all()
    assert {x.dtype for x in guide.draws(2).values()} == {default}


@pytest.mark.filterwarnings("ignore:The loss was still falling")
@pytest.mark.parametrize("p", [1, 12])
def test_one_feature_and_more_features_than_observations(p):
    """With every hyperparameter unknown, in one pass of fit and check; probabilities stay apart from 0 and 1."""
    x = torch.randn(8, p, generator=torch.Generator().manual_seed(2))
    y = x[:, 0] + torch.randn(8, generator=torch.Generator().manual_seed(3))

    priors = {"sigma": dist.HalfCauchy(1.0), "tau": dist.HalfNormal(1.0), "rate": dist.Beta(1.0, 4.0)}
    model = Design("small", x, y, **priors).model
    guide = correlated_guide(model, hyper=("sigma", "tau", "rate"))
    fit(model, guide, x, y, steps=40, num_particles=16, seed=0)
    probs = guide.active_probs()["z"]
    assert probs.shape == (p,)
    assert float(probs.min()) > 0.02
    assert float(probs.max()) < 0.98
    draws = guide.draws(500)
    assert bool((draws["sigma"] > 0).all() and (draws["tau"] > 0).all())
    assert 0.05 < float(draws["rate"].mean()) < 0.6
    assert check_fit(model, guide, x, y, flips=9).active_probs["z"].isfinite().all()


class Model:
    """A regression with an intercept for each row, which has the rows of its runs."""

    def __init__(self, can_be_mapped=True):
        self.can_be_mapped = can_be_mapped
        self.rows = []

    def __call__(self):
        z, w = features(3, 0.3)
        with pyro.plate("data", N, subsample_size=ROWS) as rows:
            self.rows.append(rows)
            intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
            if not self.can_be_mapped:
                z.tolist()
            pyro.sample("y", dist.Normal(intercept + (z * w) @ DESIGN[rows].mT, 1.0), obs=SEEN[rows])


def start(model):
    pyro.set_rng_seed(0)
    guide = AutoSpikeSlab(model, SLAB, init_active_prob=0.5)
    guide()
    return guide


@pytest.mark.parametrize("mapped", [True, False])
def test_particles_of_a_step_share_their_rows(mapped):
    """And each step draws its own."""
    model = Model()
    guide, elbo = start(model), leave_one_out(3, vectorize_particles=mapped)
    elbo.differentiable_loss(model, guide)  # the first also looks at what depends on what
    model.rows.clear()
    for _ in range(5):
        elbo.differentiable_loss(model, guide)
    assert len(model.rows) == (5 if mapped else 15)
    assert len({tuple(rows.tolist()) for rows in model.rows}) == 5


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_particles_one_by_one():
    """Given the rows, means over draws agree to five standard errors; the rows of intercepts without data have none."""
    model = Model()
    guide = start(model)
    parameters = list(guide.parameters())
    found = {}
    for mapped in (True, False):
        elbo = leave_one_out(20, vectorize_particles=mapped)
        elbo.differentiable_loss(model, guide)
        found[mapped] = []
        for seed in range(30):
            torch.manual_seed(seed)
            loss = elbo.differentiable_loss(model, guide)
            slopes = torch.autograd.grad(loss, parameters)
            found[mapped].append(torch.cat([loss.detach().reshape(1), *(x.reshape(-1) for x in slopes)]))
    together, apart = torch.stack(found[True]), torch.stack(found[False])
    assert torch.equal(together == 0, apart == 0)
    difference = together - apart
    error = difference.std(0) / len(difference) ** 0.5
    assert (difference.mean(0).abs() <= 5 * error + 1e-6).all()
    assert (together.std(0) < 2 * apart.std(0) + 1e-6).all()


@pytest.mark.parametrize("can_be_mapped", [True, False])
def test_what_cannot_be_mapped_is_said(can_be_mapped, monkeypatch):
    """It is fitted all the same."""
    monkeypatch.setattr(fitting, "_DRAWS", 20)
    model = Model(can_be_mapped)
    guide = AutoSpikeSlab(model, SLAB)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(model, guide, steps=2, num_particles=3, seed=0)
    assert len(result.losses) == 2
    assert any("one by one" in str(warning.message) for warning in caught) != can_be_mapped
