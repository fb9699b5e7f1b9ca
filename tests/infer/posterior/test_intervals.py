"""Intervals of scales, means and rates: right, or marked as wrong or unchecked; against enumeration and quadrature."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import BernoulliGate
from pyro_l0.infer import AutoSpikeSlab, check_fit, fit
from tests.infer.regressions import features, leave_one_out, train
from tests.reference_posteriors import all_gates

SLAB, CORRELATED = {"w": "z"}, {"gates": "autoregressive", "slabs": "structured"}
GROUPS, EACH = 6, 8
OF = torch.arange(GROUPS).repeat_interleave(EACH)
ONE = torch.ones((), dtype=torch.float64)


def data(effects):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(OF), generator=generator)
    return x, 0.5 + torch.tensor(effects)[OF] * x + 0.7 * torch.randn(len(OF), generator=generator)


X, Y = data([0.0, 1.2, 0.0, -0.8, 0.0, 0.0])


def varying(slope):
    """Slopes by group of which few differ from 0, with a width, an intercept and a rate that are unknown."""

    def model():
        mean, tau = pyro.sample("mean", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        rate = pyro.sample("rate", dist.Beta(1.0, 2.0))
        with pyro.plate("groups", GROUPS):
            z = pyro.sample("z", BernoulliGate(probs=rate))
            b = slope(z, tau)
        with pyro.plate("data", len(Y)):
            pyro.sample("y", dist.Normal(mean + b[..., OF] * X, 0.7), obs=Y)

    return model


MODELS = {
    "centred": varying(lambda z, tau: z * pyro.sample("w", dist.Normal(0.0, tau))),
    "scaled": varying(lambda z, tau: tau * (z * pyro.sample("w", dist.Normal(0.0, 1.0)))),
    "root": varying(lambda z, tau: z * pyro.sample("w", dist.Normal(0.0, 2.0)) * tau / 2),
}


def exact():
    """Mean, standard deviation and quantiles of tau, and those of the rate, by a grid of tau for each gate vector."""
    gates, taus = all_gates(GROUPS), torch.linspace(0.005, 5.0, 500, dtype=torch.float64)
    columns = (torch.nn.functional.one_hot(OF, GROUPS) * X[:, None]).double()
    slopes = torch.einsum("nj,gj,mj->gnm", columns, gates, columns)
    base = 0.49 * torch.eye(len(Y)).double() + 4.0
    fits = [dist.MultivariateNormal(0 * Y.double(), base + t**2 * slopes).log_prob(Y.double()) for t in taus]
    opened = gates.sum(1)
    log_gates = torch.lgamma(1 + opened) + torch.lgamma(2 + GROUPS - opened)
    log = torch.stack(fits, 1) + log_gates[:, None] - taus**2 / 2
    weights = log.flatten().softmax(0).view_as(log)
    of_tau, rates = weights.sum(0), (1 + opened) / (3 + GROUPS)
    second = (1 + opened) * (2 + opened) / ((3 + GROUPS) * (4 + GROUPS))
    ends = [float(taus[int((of_tau.cumsum(0) < p).sum())]) for p in (0.05, 0.95)]
    moments = {"tau": (of_tau @ taus, of_tau @ taus**2), "rate": (weights.sum(1) @ rates, weights.sum(1) @ second)}
    return {name: (float(m), math.sqrt(float(s - m**2))) for name, (m, s) in moments.items()}, ends


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_intervals_of_a_correlated_guide(name):
    """A latent that multiplies the slabs moves the linear term by a power, which a line does not follow far."""
    moments, ends = exact()
    guide = AutoSpikeSlab(MODELS[name], SLAB, **CORRELATED)
    result = fit(MODELS[name], guide, seed=0)
    check, summary = check_fit(MODELS[name], guide, seed=1), guide.summary()
    for site, (mean, sd) in moments.items():
        # What the check lets pass: .15 standard deviations, and as much for the noise of its draws.
        assert float(summary[site].mean) == pytest.approx(mean, abs=0.3 * sd)
        assert float(summary[site].sd) == pytest.approx(sd, rel=0.3)
        assert float(check.sites[site].found) == pytest.approx(mean, abs=0.2 * sd)
        assert float(check.sites[site].found_sd) == pytest.approx(sd, rel=0.2)
    for found, end in zip((summary["tau"].lower, summary["tau"].upper), ends, strict=True):
        assert float(found) == pytest.approx(end, abs=0.15)
    assert result.ok
    assert check.ok
    assert check.problems == ()


def narrowed(guide, by):
    """A guide whose other latents are too sure, as a training that stops early leaves them."""
    with torch.no_grad():
        guide.joint.hyper_posterior.log_scale.add_(math.log(by))
        guide.joint.hyper_posterior.coupling.mul_(by)


@pytest.mark.slow
def test_what_is_wrong_or_not_known_is_marked():
    """By the check, in its table and in the summary, until the guide moves again."""
    model = MODELS["centred"]
    guide = AutoSpikeSlab(model, SLAB, **CORRELATED)
    guide()
    assert set(guide.summary().to_frame()["check"]) == {"unchecked"}
    fit(model, guide, seed=0)
    assert set(guide.summary().to_frame()["check"]) == {"ok"}
    narrowed(guide, 0.5)
    assert set(guide.summary().to_frame()["check"]) == {"unchecked"}  # they were another's
    check = check_fit(model, guide, seed=0)
    assert not check.ok
    assert int(check.sites["tau"].check) == 2
    assert "sample_posterior" in check.problems[-1]
    rows = {line.split()[0]: line.split()[-1] for line in str(guide.summary()).splitlines()[1:]}
    assert rows["tau"] == "wrong"
    table = str(check).splitlines()
    assert table[0].split() == ["by", "guide", "found", "check", "guide_sd", "found_sd"]
    assert any(line.startswith("tau") and "wrong" in line for line in table)
    assert any(line.startswith("P(z[1] != 0)") and "chains" in line for line in table)


def test_weights_that_collapse_say_nothing():
    """Of forty latents that a guide has not learned; never "right"."""
    y = 3 * torch.ones(40)

    def model():
        z, w = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.5))), pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 40):
            x = pyro.sample("x", dist.LogNormal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z * w + x, 0.1), obs=y)

    guide = AutoSpikeSlab(model, SLAB)
    guide()
    check = check_fit(model, guide, seed=0)
    assert not check.ok
    assert bool((check.sites["x"].check == 1).all())
    assert "Unchecked are 41 entries" in str(check) or "the guide misses" in str(check)
    assert set(guide.summary().to_frame()["check"][1:]) == {"unchecked"}


@pytest.mark.slow
def test_a_mean_field_that_is_too_sure():
    """Of a slab width and its slabs, which it takes as independent: the fit has not converged, or says unchecked."""
    guide = AutoSpikeSlab(MODELS["scaled"], SLAB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = fit(MODELS["scaled"], guide, seed=0)
    sd = exact()[0]["tau"][1]
    summary = guide.summary()["tau"]
    assert float(summary.sd) < 0.7 * sd  # wrong
    assert int(summary.check) > 0
    assert not result.check.ok


def test_checks_of_a_trained_guide_leave_it_as_it_was():
    """Its parameters, which are widened for a while, and the generators."""
    guide = AutoSpikeSlab(MODELS["centred"], SLAB)
    guide()
    loss = leave_one_out(num_particles=2)
    train(lambda: loss.differentiable_loss(MODELS["centred"], guide), torch.optim.Adam(guide.parameters()), 2)
    before, state = [x.detach().clone() for x in guide.parameters()], torch.get_rng_state()
    check_fit(MODELS["centred"], guide, chains=4, flips=9, draws=20, seed=0)
    assert all(map(torch.equal, before, guide.parameters()))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
def test_restarts_that_disagree_are_not_ok():
    """A mean field settles on either of two equal features."""
    x = torch.randn(40, generator=torch.Generator().manual_seed(0)).expand(2, 40)

    def model():
        z, w = features(2, 0.1)
        pyro.sample("y", dist.Normal((z * w) @ x, 0.3).to_event(1), obs=x[0])

    guide = AutoSpikeSlab(model, SLAB)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(model, guide, seed=0, restarts=4, num_particles=16)
    assert not result.ok
    assert not result.converged
    assert any("Restarts disagree" in str(x.message) or "the guide misses" in str(x.message) for x in caught)
    assert any("gates='autoregressive' with slabs='structured'" in str(x.message) for x in caught)
