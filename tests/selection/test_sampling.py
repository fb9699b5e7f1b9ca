"""Tempered chains with unknown scales against sums over all gates and a grid of scales."""

import numpy as np
import pytest
import torch
import torch.distributions as dist

from pyro_l0.selection.problem import Prior, Problem
from pyro_l0.selection.sampling import tempered_posterior
from pyro_l0.selection.tempered_chains import Effort
from tests.reference_posteriors import GaussianPosterior
from tests.spike_slab_designs import exact_pair, unknown_hyperparameters

DESIGNS = {design.name.removesuffix(", unknown"): design for design in [*unknown_hyperparameters(), exact_pair()]}
QUICK = Effort(16, 300, 2)
ONE = torch.ones((), dtype=torch.float64)


def reference(design, prior):
    sigma = dist.HalfCauchy(prior.noise_unit * ONE).log_prob if prior.noise_scale is None else prior.noise_scale
    tau = dist.HalfNormal(prior.slab_unit * ONE).log_prob if prior.slab_scale is None else prior.slab_scale
    return GaussianPosterior(design.x, design.y, sigma, tau, prior.rate, size=20).summary()


def errors(found, expected):
    """Largest errors of probabilities, of means in standard deviations, of relative deviations, and of the evidence."""
    sd = expected.sd.numpy()
    return (
        np.abs(found.inclusion - expected.inclusion.numpy()).max(),
        (np.abs(found.mean[:, 0] - expected.mean.numpy()) / sd).max(),
        np.abs(found.sd[:, 0] / sd - 1).max(),
        abs(found.log_evidence - expected.log_evidence),
    )


@pytest.mark.parametrize("name", ["diabetes", "near-duplicates", "exact pair"])
def test_everything_unknown(name):
    """Probabilities, moments, evidence, and draws of all unknowns."""
    prior = Prior((1.0, 4.0), slab_unit=0.7, noise_unit=2.0)
    expected = reference(DESIGNS[name], prior)
    found = tempered_posterior(Problem("gaussian", DESIGNS[name].x, DESIGNS[name].y, prior), seed=1)
    inclusion, mean, sd, evidence = errors(found, expected)
    assert inclusion < 0.03
    assert mean < 0.06
    assert sd < 0.04
    assert evidence < 0.1
    draws = found.draws
    beta = draws.coefficients.toarray()
    assert beta.shape == (4000, DESIGNS[name].x.shape[1])
    assert np.abs((beta != 0).mean(0) - expected.inclusion.numpy()).max() < 0.05
    assert (np.abs(beta.mean(0) - expected.mean.numpy()) / expected.sd.numpy()).max() < 0.1
    assert np.log(draws.noise_scale).mean() == pytest.approx(expected.hyper["log sigma"], abs=0.01)
    assert np.log(draws.slab_scale).mean() == pytest.approx(expected.hyper["log tau"], abs=0.05)
    assert draws.rate.mean() == pytest.approx(expected.hyper["rate"], abs=0.01)


@pytest.mark.parametrize(
    "prior",
    [Prior(0.2, 0.5, 1.0), Prior(0.2, 0.5, noise_unit=2.0), Prior((1.0, 4.0), None, 1.0)],
    ids=["all known", "noise unknown", "slab unknown"],
)
def test_some_known(prior):
    """Each scale alone, and none."""
    design = DESIGNS["near-duplicates"]
    inclusion, mean, sd, evidence = errors(
        tempered_posterior(Problem("gaussian", design.x, design.y, prior), seed=2), reference(design, prior)
    )
    assert inclusion < 0.03
    assert mean < 0.06
    assert sd < 0.04
    assert evidence < 0.1


def test_one_feature():
    """Whose gate is alone."""
    design = DESIGNS["diabetes"]
    prior = Prior((1.0, 1.0))
    x = design.x[:, 1:2]
    found = tempered_posterior(Problem("gaussian", x, design.y, prior), seed=3)
    expected = GaussianPosterior(
        x, design.y, dist.HalfCauchy(ONE).log_prob, dist.HalfNormal(ONE).log_prob, prior.rate
    ).summary()
    assert errors(found, expected)[0] < 0.02
    assert errors(found, expected)[3] < 0.1


def test_seed_decides():
    """The same posterior for the same seed, and torch's own generator untouched."""
    design = DESIGNS["independent"]
    problem = Problem("gaussian", design.x, design.y, Prior((1.0, 4.0)))
    state = torch.get_rng_state()
    first, again, other = (tempered_posterior(problem, draws=10, seed=seed, effort=QUICK) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(first.inclusion, again.inclusion)
    assert (first.draws.coefficients != again.draws.coefficients).nnz == 0
    assert first.log_evidence == again.log_evidence
    assert not np.array_equal(first.inclusion, other.inclusion)
