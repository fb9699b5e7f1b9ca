"""Small effects of all features beside sparse ones, against sums over gates and ratios that share no code with ours."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import special
from scipy.sparse import csr_array

from pyro_l0.selection import SpikeSlabRegressor
from pyro_l0.selection.methods import background
from pyro_l0.selection.methods.enumeration import enumerate_posterior
from tests.selection.families import design_of
from tests.selection.references import by_densities, unknown_scales

N, NOISE, SLAB = 30, 0.7, 0.6
RATES = [0.3, 0.4, 0.2, 0.5, 0.3]
KNOWN = {"noise_scale": NOISE, "slab_scale": SLAB, "random_state": 0, "rate": RATES, "background": True}
RATIOS = [0.0, 0.02, 0.08, 0.32, 1.28, 5.12]
PRIOR = [0.5] + [0.1] * 5


def data(seed=0, n=N):
    """Correlated features, far from zero; one has a large effect, all have small ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5)) @ np.linalg.cholesky(0.5 ** np.abs(np.subtract.outer(range(5), range(5)))).T + 3
    return x, 2 + x[:, 1] + x @ rng.normal(size=5, scale=0.3) + NOISE * rng.normal(size=n)


def small(x, standardize, gated):
    """The covariance that small effects of ratio one give y."""
    x = (x - x.mean(0)) / (x.std(0) if standardize else 1)
    x = x[:, gated]
    return x @ x.T / x.var(0).sum()


def reference(x, y, rates=RATES, *, standardize=False, covariance=None, always=None, intercept=True, **more):
    """Each ratio's posterior, and P(ratio | y)."""
    gated = np.array(rates)[more.get("gate_of", np.arange(x.shape[1]))] < 1
    covariance = np.eye(len(y)) if covariance is None else covariance
    known = [
        by_densities(
            (x - x.mean(0)) / x.std(0) if standardize else x,
            y,
            covariance + ratio * small(x, standardize, gated),
            rates,
            always,
            noise=NOISE,
            slab=SLAB,
            intercept=intercept,
            **more,
        )
        for ratio in RATIOS
    ]
    log = np.array([each.log_evidence for each in known]) + np.log(PRIOR)
    return known, special.softmax(log), special.logsumexp(log)


def assert_same(one, other, atol):
    np.testing.assert_allclose([*one.background_.values()], [*other.background_.values()], atol=atol)
    np.testing.assert_allclose(one.pip_, other.pip_, atol=atol)


def assert_exact_pips(model, found):
    known, probs, log_evidence = found
    assert [*model.background_] == RATIOS
    np.testing.assert_allclose([*model.background_.values()], probs, atol=1e-8)
    np.testing.assert_allclose(model.pip_, probs @ [each.pips for each in known], atol=1e-8)
    assert model.log_evidence_ == pytest.approx(log_evidence, abs=1e-8)


def assert_exact(model, found, divisor=1.0, sd=1e-8):
    assert_exact_pips(model, found)
    known, probs, _ = found
    mean = probs @ [each.mean for each in known]
    np.testing.assert_allclose(model.coef_ * divisor, mean, atol=1e-8)
    square = probs @ [each.mean**2 + each.sd**2 for each in known]
    np.testing.assert_allclose(model.coef_sd_ * divisor, np.sqrt(square - mean**2), atol=sd)


IN = {"rate": [0.3, 1.0, 0.2, 0.5, 0.3]}
PAIR = {"rate": [0.3, 0.4], "groups": [0, 0, 1, 1, 1]}
AR = 0.8 ** np.abs(np.subtract.outer(range(N), range(N)))
CASES = {
    "standardised": ({"standardize": True}, {"standardize": True}),
    "own units": ({}, {}),
    "always in, flat": (IN, {"rates": IN["rate"]}),
    "always in, normal": ({"always_in_scale": 0.7, **IN}, {"rates": IN["rate"], "always": 0.7}),
    "groups": (PAIR, {"rates": PAIR["rate"], "gate_of": PAIR["groups"]}),
    "groups, correlated noise": (PAIR, {"rates": PAIR["rate"], "gate_of": PAIR["groups"], "covariance": AR}),
}


@pytest.mark.parametrize("name", CASES)
def test_known_scales(name):
    """Features that are always in have no small effect, and coefficients that are in part draws."""
    x, y = data()
    options, known = CASES[name]
    model = SpikeSlabRegressor(**{**KNOWN, "standardize": False, **options}).fit(
        x, y, noise_covariance=known.get("covariance")
    )
    is_in = "always in" in name
    assert_exact(model, reference(x, y, **known), x.std(0) if name == "standardised" else 1.0, 0.01 if is_in else 1e-8)
    assert (model.background_coef_[1] == 0) == is_in
    assert 0.05 < model.background_[0.0] < 0.95 or is_in or "groups" in name


def test_categories():
    """The dummies of a factor have the variance of a number; one of two levels is a 0/1 column."""
    x, y = data()
    number, letters = x[:, 0], np.array(list("abc") * 10)
    two = letters == "a"
    parameters = {"noise_scale": NOISE, "slab_scale": SLAB, "rate": 0.3, "random_state": 0, "background": True}
    model = SpikeSlabRegressor(**parameters).fit(pd.DataFrame({"x": number, "c": pd.Categorical(letters)}), y)
    dummies = np.stack([letters == level for level in "abc"], 1) * 1.0
    columns = np.c_[number / number.std(), dummies / np.sqrt(dummies.var(0).sum())]
    assert_exact_pips(model, reference(columns, y, [0.3, 0.3], gate_of=[0, 1, 1, 1]))
    pair = [pd.Categorical(two), two.astype(float)]
    models = [SpikeSlabRegressor(**parameters).fit(pd.DataFrame({"x": number, "c": c}), y) for c in pair]
    assert_same(*models, atol=1e-8)


def test_unknown_scales():
    x, y = data(n=20)
    x = x[:, :2]
    model = SpikeSlabRegressor(rate=0.3, background=True, random_state=0).fit(x, y)
    z = (x - x.mean(0)) / x.std(0)
    spreads = [np.eye(20) + ratio * z @ z.T / 2 for ratio in RATIOS]
    gates, log = zip(*(unknown_scales(z, y, spread, [0.3, 0.3], y.std(), y.std()) for spread in spreads), strict=True)
    probs = special.softmax(np.array(log) + np.log(PRIOR)[:, None])
    np.testing.assert_allclose([*model.background_.values()], probs.sum(1), atol=1e-4)
    np.testing.assert_allclose(model.pip_, probs.sum(0) @ gates[0], atol=1e-4)


def test_joint_draws_and_predictions():
    """Of all effects given the gates and the ratio, by the Gaussian that they and y have."""
    x, y = data()
    model = SpikeSlabRegressor(standardize=False, **KNOWN).fit(x, y)
    drawn, new = model.sample(2000), np.random.default_rng(1).normal(size=(3, 5)) + 3
    total = drawn["coef"] + drawn["background"]
    centred, known, probs = x - x.mean(0), *reference(x, y)[:2]
    # E[u | y] = r NOISE^2 / m Xc' E[(V^-1)(y - X beta)].
    expected = np.zeros(5)
    for ratio, each, prob in zip(RATIOS, known, probs, strict=True):
        gain = ratio / centred.var(0).sum() * centred.T
        left = y - y.mean() - centred @ each.mean
        expected += prob * gain @ np.linalg.solve(np.eye(N) + centred @ gain, left)
    np.testing.assert_allclose(model.background_coef_, expected, atol=1e-8)
    spread = drawn["background"].std(0) / np.sqrt(2000)
    assert (np.abs(drawn["background"].mean(0) - expected) < 4 * spread).all()
    mean, sd = model.predict(new, return_std=True)
    of_draws = drawn["intercept"][:, None] + total @ new.T
    assert (np.abs(mean - of_draws.mean(0)) < 4 * of_draws.std(0) / np.sqrt(2000)).all()
    np.testing.assert_allclose(sd, np.sqrt(of_draws.var(0) + NOISE**2), rtol=1e-6)
    ends = model.predict_quantiles(new, [0.05, 0.95])
    # Of 2,000 draws, whose 5 % quantile has a standard error of .05 deviations of .8, and of nearly normal ones.
    np.testing.assert_allclose(ends, mean[:, None] + sd[:, None] * [-1.645, 1.645], atol=0.15)
    posterior = model.to_arviz().posterior
    assert posterior["background"].dims == ("chain", "draw", "feature")
    assert posterior["background_ratio"].shape == (1, 1000)


def test_other_forms_of_the_data():
    """Weights, sparse columns, names, moments and z-scores say the same."""
    x, y = data()
    model = SpikeSlabRegressor(**KNOWN).fit(x, y)
    frame = pd.DataFrame(x, columns=list("abcde"))
    centred, target = x - x.mean(0), y - y.mean()
    weight = np.r_[np.full(10, 2), np.ones(20)]
    repeated = np.repeat(np.arange(N), weight.astype(int))
    pairs = [
        (model, SpikeSlabRegressor(**KNOWN).fit(csr_array(x), y)),
        (model, SpikeSlabRegressor(**KNOWN).fit(frame, y - 5, offset=np.full(N, -5.0))),
        (model, SpikeSlabRegressor.from_moments(centred.T @ centred, centred.T @ target, target @ target, N, **KNOWN)),
        (SpikeSlabRegressor(**KNOWN).fit(x[repeated], y[repeated]), SpikeSlabRegressor(**KNOWN).fit(x, y, weight)),
    ]
    unit = y.std()
    scaled = {**KNOWN, "noise_scale": NOISE / unit, "slab_scale": SLAB / unit}
    r = np.corrcoef(x.T, y)[-1, :-1]
    z = r * np.sqrt((N - 2) / (1 - r**2))
    pairs.append((model, SpikeSlabRegressor.from_z_scores(z, np.corrcoef(x.T), N, **scaled)))
    for one, other in pairs:
        assert_same(one, other, atol=1e-6)


@pytest.mark.slow
def test_chains():
    """Given each ratio, chains find what a sum over the gates has; so does their mixture."""
    x, y = data(n=60)
    parameters = {"background": True, "random_state": 0}
    exact = SpikeSlabRegressor(method="enumerate", **parameters).fit(x, y)
    sampled = SpikeSlabRegressor(method="tempered", **parameters).fit(x, y)
    assert sampled.ok_
    assert (np.abs(sampled.pip_ - exact.pip_) < 3 * sampled.error_ + 0.01).all()
    # Each of two log evidences that are off by .1 moves a probability by .025 at most; .06 is under two such errors.
    np.testing.assert_allclose([*sampled.background_.values()], [*exact.background_.values()], atol=0.06)
    assert sampled.log_evidence_ == pytest.approx(exact.log_evidence_, abs=0.1)


def test_without_any():
    """Where no feature has a gate, and in a later fit without a background."""
    x, y = data()
    model = SpikeSlabRegressor(background=True, rate=1.0, random_state=0).fit(x, y)
    plain = SpikeSlabRegressor(rate=1.0, random_state=0).fit(x, y)
    np.testing.assert_allclose(model.predict(x), plain.predict(x))
    again = SpikeSlabRegressor(**KNOWN).fit(x, y).set_params(background=False, rate=0.3).fit(x[:, :3], y)
    for each, p in ((model, 5), (plain, 5), (again, 3)):
        assert each.background_ == {0.0: 1.0}
        assert each.background_coef_.tolist() == [0.0] * p


def test_probability_from_draws_without_a_background(monkeypatch):
    """Those of a posterior that the other ratios' overlap."""
    x, y = data()
    rates = [0.3] * 5
    design = design_of(x, y, rate=0.3, noise_scale=NOISE, slab_scale=SLAB, standardize=False)
    draws = enumerate_posterior(design.problem, draws=4000, seed=0).draws
    monkeypatch.setattr(background, "_SCREENED", 4000)
    found = background.probability_of_background(design.problem, design.small_effects(), draws)
    _, probs, _ = reference(x, y, rates)
    assert 0.1 < probs[0] < 0.9
    assert found == pytest.approx(1 - probs[0], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_fit_without_a_background_warns_where_it_is_missed(share):
    """Three large effects among 120 correlated features, and small ones of all that explain a share of y."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(500, 120)) @ np.linalg.cholesky(0.9 ** np.abs(np.subtract.outer(range(120), range(120)))).T
    large, small = x[:, [20, 60, 100]] @ [1.0, -1.0, 1.0], x @ rng.normal(size=120)
    noise = rng.normal(size=500)
    y = 0.5 * large / large.std() + np.sqrt(share) * small / small.std() + np.sqrt(0.75 - share) * noise
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SpikeSlabRegressor(random_state=0).fit(x, y)
    assert [w.category for w in caught if "Fit with background=True" in str(w.message)] == [UserWarning] * (share > 0)
    assert all(w.filename == __file__ for w in caught)
