"""Posteriors of every kind as arviz's InferenceData, and what arviz then says of them."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from scipy import stats

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.diagnostics import to_arviz
from pyro_l0.infer import AutoGate, AutoSpikeSlab, fit, sample_posterior
from pyro_l0.infer.guides.summaries import import_arviz
from pyro_l0.infer.reparam import RectifyReparam
from tests.cases import first_by_default
from tests.reference_posteriors import GaussianPosterior

az = import_arviz()

NOISE, RATE = 0.5, 0.3
# arviz divides 0 by 0 for the r-hat of a gate that never moves.
pytestmark = pytest.mark.usefixtures("svi")  # which takes a while, and is set up before a test begins
CONSTANT = pytest.mark.filterwarnings("ignore:invalid value encountered in scalar divide:RuntimeWarning")


def regression(x, y, gate=None, noise=NOISE):
    with pyro.plate("features", x.shape[1]):
        z = pyro.sample("z", BernoulliGate(probs=torch.tensor(RATE)) if gate is None else gate)
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    mean = pyro.deterministic("mean", x @ (z * w))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


def unknown_noise(x, y):
    regression(x, y, noise=pyro.sample("sigma", dist.LogNormal(-0.5, 0.5)))


def data(p=4, n=30):
    generator = torch.Generator().manual_seed(4)  # exact draws have a Pareto k of at most .5 here
    x = torch.randn(n, p, generator=generator)
    beta = torch.tensor([1.5, -1.0, 0.0, 0.0])[:p]
    return x, x @ beta + NOISE * torch.randn(n, generator=generator)


def fitted(model, x, y, hyper=(), steps=800):
    guide = AutoSpikeSlab(model, slab={"w": "z"}, gates="autoregressive", slabs="structured", hyper=hyper)
    fit(model, guide, x, y, steps=steps, seed=0)
    return guide


@pytest.fixture(scope="module")
def svi():
    x, y = data()
    return to_arviz(regression, fitted(regression, x, y), x, y, draws=1000, seed=1)


@pytest.fixture(scope="module")
def nuts():
    x, y = data()
    chains = sample_posterior(
        regression, x, y, slab={"w": "z"}, num_samples=250, warmup_steps=100, num_chains=2, seed=2
    )
    return to_arviz(regression, chains, x, y, seed=1)


def check_log_likelihood(found, x, y, noise=NOISE):
    """Against a normal density at the draws themselves."""
    w, z = (found["posterior"][name].values.astype(float) for name in ("w", "z"))
    mean = np.einsum("cdp,np->cdn", w * z, x.double().numpy())
    by_hand = stats.norm.logpdf(y.double().numpy(), mean, noise)
    np.testing.assert_allclose(found["log_likelihood"]["y"], by_hand, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["posterior"]["mean"], mean, atol=1e-4)
    np.testing.assert_allclose(found["posterior"]["z * w"], w * z, atol=1e-6)
    np.testing.assert_allclose(found["observed_data"]["y"], y)
    predicted = found["posterior_predictive"]["y"].values
    standardised = (predicted - mean) / noise
    assert abs(standardised.mean()) < 5 / np.sqrt(standardised.size)
    assert abs(standardised.std() - 1) < 5 / np.sqrt(2 * standardised.size)


@pytest.mark.parametrize("result", first_by_default(["svi", "nuts"]))
def test_groups_are_those_of_the_draws(result, request):
    found, (x, y) = request.getfixturevalue(result), data()
    check_log_likelihood(found, x, y)
    assert found["posterior"]["z"].dtype == np.int8
    assert found["posterior"]["z"].shape == ((1, 1000, 4) if result == "svi" else (2, 250, 4))
    exact = GaussianPosterior(x.double(), y.double(), NOISE, 1.0, RATE).summary().inclusion
    # Five standard errors of the chains' 500 draws, of which about 240 count.
    np.testing.assert_allclose(found["constant_data"]["P(z != 0)"], exact, atol=0.02 if result == "svi" else 0.06)


@CONSTANT
@pytest.mark.parametrize("result", first_by_default(["svi", "nuts"]))
def test_arviz_takes_it(result, request, tmp_path):
    found = request.getfixturevalue(result)
    summary = az.summary(found, var_names=["z", "z * w"])
    np.testing.assert_allclose(summary["mean"].iloc[:4], found["posterior"]["z"].mean(("chain", "draw")), atol=1e-3)
    assert summary["r_hat"].isna().all() if result == "svi" else summary["r_hat"].iloc[4] < 1.02
    (axes,) = az.plot_forest(found, var_names=["z * w"], combined=True)
    assert len(axes.get_yticklabels()) == 4
    found.to_netcdf(str(tmp_path / "posterior.nc"))
    again = az.from_netcdf(str(tmp_path / "posterior.nc"))
    for group, name in (("posterior", "z"), ("posterior", "z * w"), ("constant_data", "P(z != 0)")):
        np.testing.assert_array_equal(again[group][name], found[group][name])
        assert (again[group][name].dtype, again[group][name].dims) == (
            found[group][name].dtype,
            found[group][name].dims,
        )


@pytest.mark.filterwarnings("ignore:Of means and standard deviations")  # the steps are few
def test_other_latents_count():
    """Noise that is drawn too, of guides that depend on it and of a refined posterior."""
    x, y = data()
    guide = fitted(unknown_noise, x, y, hyper=["sigma"], steps=120)
    for posterior in (guide, guide.refine(x, y, seed=0, chains=4, flips=150)):
        found = to_arviz(unknown_noise, posterior, x, y, draws=200, seed=1)
        sigma = found["posterior"]["sigma"].values.astype(float)
        check_log_likelihood(found, x, y, sigma[..., None])
        assert found["posterior"]["z"].dtype == np.int8


def test_guides_of_several_kinds_are_run():
    """AutoGate beside AutoNormal; probabilities are the gates' own, and gates with a density stay floats."""
    x, y = data(p=2)

    def model(x, y):
        regression(x, y, HardConcrete.from_active_prob(torch.tensor(RATE)))

    guide = AutoGuideList(model)
    gates = AutoGate(poutine.block(model, expose=["z"]))
    guide.append(gates)
    guide.append(AutoNormal(poutine.block(model, expose=["w"])))
    guide(x, y)
    found = to_arviz(model, guide, x, y, slab={"w": "z"}, draws=60, seed=1)
    check_log_likelihood(found, x, y)
    assert found["posterior"]["z"].dtype == np.float32
    expected = gates.posterior()["z"].active_prob.detach()
    np.testing.assert_allclose(found["constant_data"]["P(z != 0)"], expected, rtol=1e-6)
    alone = to_arviz(gates, draws=60, seed=1)
    assert sorted(alone.groups()) == ["constant_data", "posterior"]
    np.testing.assert_allclose(alone["constant_data"]["P(z != 0)"], expected, rtol=1e-6)


def test_chains_of_a_reparameterised_model():
    """Pyro's MCMC: gates follow from what was sampled, and their probabilities are those of the draws."""
    x, y = data(p=2, n=10)

    def regression_of_hard_gates(x, y):
        regression(x, y, HardConcrete.from_active_prob(torch.tensor(RATE)))

    model = poutine.reparam(regression_of_hard_gates, {"z": RectifyReparam()})
    mcmc = MCMC(NUTS(model, max_tree_depth=2), num_samples=20, warmup_steps=10, disable_progbar=True)
    mcmc.run(x, y)
    found = to_arviz(model, mcmc, x, y, slab={"w": "z"}, seed=1)
    check_log_likelihood(found, x, y)
    z = found["posterior"]["z"].values
    assert z.shape == (1, 20, 2)
    gate = HardConcrete.from_active_prob(torch.tensor(RATE))
    base = torch.from_numpy(found["posterior"]["z_base"].values)
    np.testing.assert_allclose(z, gate.rectify(base), rtol=1e-5)
    np.testing.assert_allclose(found["constant_data"]["P(z != 0)"], (z != 0).mean((0, 1)))
    np.testing.assert_array_equal(to_arviz(mcmc)["posterior"]["w"], mcmc.get_samples(group_by_chain=True)["w"])
