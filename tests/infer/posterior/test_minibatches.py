"""Fits of models that draw rows of their data: all particles of a step run together, on the same rows."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0.infer import AutoSpikeSlab, fit
from pyro_l0.infer.posterior import fit as fitting
from tests.infer.regressions import SLAB, features, leave_one_out

N, ROWS = 60, 20
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([0.9, 0.4, 0.0]) + 1.4 * torch.randn(N, generator=torch.Generator().manual_seed(1))


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
            pyro.sample("y", dist.Normal(intercept + (z * w) @ X[rows].mT, 1.0), obs=Y[rows])


def objective(num_particles, mapped):
    return leave_one_out(num_particles, vectorize_particles=mapped)


def start(model):
    pyro.set_rng_seed(0)
    guide = AutoSpikeSlab(model, SLAB, init_active_prob=0.5)
    guide()
    return guide


@pytest.mark.parametrize("mapped", [True, False])
def test_particles_of_a_step_share_their_rows(mapped):
    """And each step draws its own."""
    model = Model()
    guide, elbo = start(model), objective(3, mapped)
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
        elbo = objective(20, mapped)
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
