"""Offsets, trials, survival times and features that are always in, against grids of all coefficients."""

from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats

from pyro_l0.selection import SpikeSlabBinomialRegressor, SpikeSlabClassifier, SpikeSlabCox, SpikeSlabPoissonRegressor
from pyro_l0.selection.methods import exact_chains
from pyro_l0.selection.methods.exact_chains import AugmentedChains, JumpingChains
from tests.selection.families import design_of
from tests.selection.methods.closed_start import closed
from tests.selection.methods.test_cox import one_by_one
from tests.selection.references import by_quadrature
from tests.selection.test_offsets import offset_data

SHORT = {SpikeSlabClassifier: "logistic", SpikeSlabPoissonRegressor: "poisson", SpikeSlabBinomialRegressor: "binomial"}


class Case(NamedTuple):
    """Data, what is known of each row, the estimator's options, and how near its answers come."""

    kind: type
    x: np.ndarray
    y: np.ndarray
    rates: list
    options: dict
    known: dict
    trials: int = 1
    atol: float = 0.02
    evidence: float = 0.05

    def fit(self, method, known):
        rate = self.rates if len(self.rates) > 1 else self.rates[0]
        model = self.kind(rate=rate, method=method, standardize=False, random_state=0, **self.options)
        return model.fit(self.x, self.y, **known)


def log_likelihood(case):
    if case.kind is SpikeSlabPoissonRegressor:
        return lambda eta: stats.poisson.logpmf(case.y, np.exp(eta)).sum(-1)
    if case.kind is SpikeSlabCox:
        time, event = (torch.from_numpy(case.y[name].copy()) for name in ("time", "event"))
        return lambda eta: one_by_one(torch.from_numpy(eta), time, event, case.options["ties"]).numpy()
    return lambda eta: stats.binom.logpmf(case.y, case.trials, special.expit(eta)).sum(-1)


def confounded(kind, n=40, seed=1):
    """The second feature, which resembles the first, has an effect and is always in; the first one hardly any."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    x[:, 0] += x[:, 1]
    eta = 0.3 * x[:, 0] + 0.9 * x[:, 1]
    y = rng.poisson(np.exp(0.5 * eta)) if kind is SpikeSlabPoissonRegressor else rng.random(n) < special.expit(eta)
    return Case(kind, x, y.astype(float), [0.4, 1.0], {"slab_scale": 0.7, "always_in_scale": 2.0}, {})


def with_offset(kind):
    """Without it the probability would be far away."""
    x, y, offset = offset_data(kind)
    return Case(kind, x, y, [0.4], {"slab_scale": 0.7}, {"offset": pd.Series(offset)})


def few_trials():
    """Two of each row, and an offset."""
    rng = np.random.default_rng(3)
    x, offset = rng.normal(size=(25, 1)), rng.normal(size=25)
    y = rng.binomial(2, special.expit(offset + 0.4 * x[:, 0]))
    known = {"trials": 2, "offset": offset}
    return Case(SpikeSlabBinomialRegressor, x, y, [0.4], {"slab_scale": 0.7}, known, trials=2)


def survival(ties, offset=None, n=40, seed=3):
    """Three features, of which the last has no effect, and times on a grid, some of them censored."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    time = rng.exponential(np.exp(-0.8 * x[:, 0] + 0.3 * x[:, 1]))
    censored = rng.exponential(2.0, size=n)
    y = np.rec.fromarrays([time <= censored, np.ceil(4 * np.minimum(time, censored))], names="event,time")
    known = {} if offset is None else {"offset": offset}
    options = {"slab_scale": 1.0, "ties": ties}
    return Case(SpikeSlabCox, (x - x.mean(0)) / x.std(0), y, [0.4] * 3, options, known, atol=0.01, evidence=0.03)


CASES = {
    **{f"{name}, always in": confounded(kind) for kind, name in SHORT.items()},
    **{f"{name}, offset": with_offset(kind) for kind, name in SHORT.items()},
    "two trials, offset": few_trials(),
    **{ties: survival(ties) for ties in ("breslow", "efron")},
    "efron, offset": survival("efron", 0.7 * np.random.default_rng(1).normal(size=40) + 5),
}


@cache
def expected(name):
    """P(z = 1), means, and log p(y)."""
    case = CASES[name]
    slab, always = case.options["slab_scale"], case.options.get("always_in_scale")
    scales = [always if rate == 1 else slab for rate in case.rates]
    offset = np.asarray(case.known.get("offset", 0.0))
    grid = {"intercept": 0.0, "most": 2.5, "nodes": 31} if case.kind is SpikeSlabCox else {}
    grid = {"most": 5.0, "nodes": 101} if len(scales) == 1 else grid
    offset = offset if case.kind is SpikeSlabCox else offset - offset.mean()
    return by_quadrature(log_likelihood(case), case.x, case.rates, scales, offset=offset, **grid)


@pytest.mark.parametrize("method", ["enumerate", pytest.param("tempered", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_posteriors(name, method):
    """By Laplace's approximation, and by chains that start from it."""
    case, (pips, mean, log_evidence) = CASES[name], expected(name)
    model = case.fit(method, case.known)
    assert ((pips > 0.1) & (pips < 0.9)).sum() >= len(pips) / 2
    np.testing.assert_allclose(model.pip_, pips, atol=case.atol)
    assert model.log_evidence_ == pytest.approx(log_evidence, abs=case.evidence)
    if "always in" in name:
        coef, sd = (np.ravel(part)[1] for part in (model.coef_, model.coef_sd_))
        assert coef == pytest.approx(mean[1], abs=0.1 * sd)
        assert (np.ravel(model.sample(500)["coef"][..., 1]) != 0).all()


@pytest.mark.parametrize("name", ["logistic, always in", "poisson, always in", "logistic, offset", "poisson, offset"])
@torch.no_grad()
def test_exact_chains(name, monkeypatch):
    """Of both kinds, from closed gates; five standard errors."""
    monkeypatch.setattr(exact_chains, "_ROUNDS", 4)
    case, (pips, mean, _) = CASES[name], expected(name)
    family, chains = ("bernoulli", AugmentedChains) if "logistic" in name else ("poisson", JumpingChains)
    offset = np.asarray(case.known["offset"])[:, None] if case.known else None
    rate = np.array(case.rates) if len(case.rates) > 1 else case.rates[0]
    design = design_of(case.x, case.y, family, rate=rate, offset=offset, standardize=False, **case.options)
    found = design.posterior(closed(chains, design.problem).posterior(0.0, 1000, 0.0), 0)
    assert found.error[0] < 0.03
    assert abs(found.active_probs[0] - pips[0]) < 5 * found.error[0] + 1e-3
    if "always in" in name:
        assert found.mean[1, 0] == pytest.approx(mean[1], abs=0.15 * found.sd[1, 0])
