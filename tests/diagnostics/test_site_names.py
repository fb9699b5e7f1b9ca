"""Gradients are measured whatever the gates' sites are called."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import BernoulliGate, HardConcrete, HardKumaraswamy
from pyro_l0.diagnostics import measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate

NAMES = ["a/b", "keys", "values", "items", "weight.x", "training", "a//b.c", "0"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [HardConcrete, HardKumaraswamy, BernoulliGate])
def test_measure_gradient_of_any_site_name(name, family):
    """With slashes and dots, and the names that a dictionary uses itself; each gate has its own entry."""

    def model():
        z = pyro.sample(name, family.from_active_prob(torch.full((2,), 0.4)).to_event(1))
        v = pyro.sample("other", family.from_active_prob(torch.tensor([0.4])).to_event(1))
        pyro.sample("y", dist.Normal(z.sum() + 3 * v.sum(), 1.0), obs=torch.tensor(1.5))

    guide = AutoGate(model, family=family, init_active_prob=0.5)
    guide()
    estimator = "leave_one_out" if family is BernoulliGate else None
    elbo = L0_ELBO("l0", num_particles=2, estimator=estimator)
    report = measure_gradient(elbo, model, guide, draws=400, exact=family is not HardKumaraswamy)
    assert report.mean.shape == (3,)
    assert (report.slope > 0).all() if family is not HardKumaraswamy else (report.slope != 0).all()
    if report.exact is not None:
        assert (report.bias.abs() < 5 * report.standard_error).all()
