"""Linear regressions from moments, and from z-scores with correlations: as those of the data, and when they misfit."""

import pickle
import re
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from pyro_l0.selection import SpikeSlabRegressor
from pyro_l0.selection.summary_statistics import of_z_scores
from tests.selection.fitted import assert_equal_fits

ATTRIBUTES = "pip_ coef_ coef_sd_ log_evidence_ noise_scale_ slab_scale_ rate_"


def observed(n, p, seed=0):
    """Features of other units and means, two of which are alike; the first and the fourth have effects."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p))
    x[:, 1] = x[:, 0] + 0.3 * x[:, 1]
    y = 3 + x[:, 0] - x[:, 3] + rng.normal(size=n)
    return x * 10.0 ** rng.integers(-1, 3, p) + 5, y


def moments(x, y):
    return x.T @ x, x.T @ y, y @ y, len(y)


def z_scores(x, y):
    """t statistics of regressions on one feature each."""
    return np.array([(fit := stats.linregress(column, y)).slope / fit.stderr for column in x.T])


@pytest.mark.parametrize(
    ("n", "p", "options"),
    [
        (60, 5, {}),
        (60, 5, {"groups": [0, 1, 1, 2, 0], "standardize": False}),
        (60, 5, {"fit_intercept": False, "rate": 0.3, "slab_scale": 0.7, "noise_scale": 1.1}),
        (60, 5, {"rate": [0.3, 1.0, 0.7, 0.1, 1.0]}),
        pytest.param(60, 20, {"expected_size": 2, "slab_scale": 0.5, "noise_scale": 1.0}, marks=pytest.mark.slow),
        pytest.param(20, 30, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_posterior_is_that_of_the_data(n, p, options):
    """To 1e-8, by enumeration and by chains, with more features than observations, too; in predictions as well."""
    x, y = observed(n, p)
    wanted = SpikeSlabRegressor(random_state=0, **options).fit(x, y)
    if options.get("fit_intercept", True):
        means = {"X_mean": x.mean(0), "y_mean": y.mean()}
        given = moments(x - x.mean(0), y - y.mean())
    else:
        means, given = {}, moments(x, y)
    found = SpikeSlabRegressor.from_moments(*given, **means, random_state=0, **options)
    assert found.method_ == ("enumerate" if p == 5 else "tempered")
    assert_equal_fits(wanted, found, f"{ATTRIBUTES} intercept_", rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.predict(x), wanted.predict(x), rtol=1e-8, atol=1e-8)
    assert [str(one) for one in found.credible_sets_] == [str(one) for one in wanted.credible_sets_]


@pytest.mark.parametrize(("n", "p"), [(60, 6), pytest.param(20, 30, marks=pytest.mark.slow)])
def test_z_scores_have_the_posterior_of_the_data(n, p):
    """Of standardised observations; the purity of credible sets is that of the correlations."""
    x, y = observed(n, p)
    wanted = SpikeSlabRegressor(random_state=0).fit((x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std())
    found = SpikeSlabRegressor.from_z_scores(z_scores(x, y), np.corrcoef(x.T), n, random_state=0)
    assert_equal_fits(wanted, found, ATTRIBUTES, rtol=1e-8, atol=1e-8)
    assert [str(one) for one in found.credible_sets_] == [str(one) for one in wanted.credible_sets_]


def test_names_and_constants_and_what_has_no_answer():
    """Names are those of a frame; without means there is no intercept, and no observation for arviz."""
    x, y = observed(50, 4)
    x[:, 2] = 7.0
    square, crossed, square_y, n = moments(x - x.mean(0), y - y.mean())
    names = list("abcd")
    frame = pd.DataFrame(square, names, names)
    with pytest.warns(UserWarning, match="inclusion probability and the coefficient of 'c' are 0"):
        model = SpikeSlabRegressor.from_moments(frame, pd.Series(crossed, names), square_y, n, random_state=0)
    assert model.feature_names_in_.tolist() == names
    assert model.pip_[2] == 0
    assert np.isnan(model.intercept_)
    assert np.isnan(model.sample(5)["intercept"]).all()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.coef_, model.coef_)
    for call in (model.predict, model.predict_quantiles, model.sample_y):
        with pytest.raises(ValueError, match=r"Expected the means of X and y to predict by.*give X_mean and y_mean"):
            call(pd.DataFrame(x, columns=names))
    with pytest.raises(ValueError, match="Expected a fit to observations, but this one is to summary statistics"):
        model.to_arviz()
    moved = pd.Series(crossed, names)[::-1]
    with pytest.raises(ValueError, match=r"Expected Xty in the order of XtX, .* by Xty\[XtX.columns\]"):
        SpikeSlabRegressor.from_moments(frame, moved, square_y, n)


X, Y = (part - part.mean(0) for part in observed(40, 4))
SQUARE, CROSSED, SQUARE_Y, N = moments(X, Y)
R = np.corrcoef(X.T)


# Whether z-scores and correlations belong together


def genotypes(n, p, rng, population=0):
    """Two chains of alleles for each of n people; a population has its own frequencies and likeness of neighbours."""
    of_population = np.random.default_rng(population)
    frequencies = of_population.uniform(0.05, 0.5, p)
    noise = rng.normal(size=(2 * n, p))
    for j, memory in enumerate(of_population.choice([0.3, 0.98], p, p=[0.15, 0.85])):
        noise[:, j] = memory * noise[:, j - 1] + np.sqrt(1 - memory**2) * noise[:, j] if j else noise[:, j]
    alleles = noise < stats.norm.ppf(frequencies)
    return (alleles[:n] * 1.0) + alleles[n:]


def study(seed, n=1000, p=100, effects=3):
    rng = np.random.default_rng(seed)
    x = genotypes(n, p, rng)
    y = x[:, rng.choice(p, effects, replace=False)] @ rng.normal(size=effects) + rng.normal(size=n) * 1.5
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    r = x.T @ y / n
    return r * np.sqrt((n - 2) / (1 - r**2)), np.corrcoef(x.T), rng


def is_warned(z, correlation, n=1000):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_z_scores(z, correlation, n)
    return [str(warning.message) for warning in caught]


SEEDS = [pytest.param(range(5), id="5"), pytest.param(range(5, 50), id="45 more", marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_correlations_of_the_same_sample_are_not_warned_of(seeds):
    """Whatever the effects, and after rounding."""
    for seed in seeds:
        z, correlation, _ = study(seed, effects=seed % 10)
        for digits in (16, 4, 3):
            assert not is_warned(z, correlation.round(digits))


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_switched_allele_is_warned_of_by_name(seeds):
    """That of the strongest association, which has a neighbour of correlation .6, is named first."""
    for seed in seeds:
        z, correlation, _ = study(seed)
        alike = (np.abs(correlation - np.eye(len(z))) > 0.6).any(1)
        switched = np.where(alike, np.abs(z), 0).argmax()
        z[switched] *= -1
        (message,) = is_warned(z, correlation)
        assert re.search(r"the other sign is more probable for (\d+)", message)[1] == str(switched)


@pytest.mark.parametrize("seeds", SEEDS)
def test_correlations_of_other_people_are_warned_of(seeds):
    """Of another population, and of too few of the same one."""
    for seed in seeds:
        z, _, rng = study(seed)
        for n, population in ((1000, 1), (200, 0)):
            other = np.corrcoef(genotypes(n, len(z), rng, population).T)
            (message,) = is_warned(z, other)
            assert re.search(r"were taken as \(1 - s\) R \+ s I with s = 0\.\d+; ", message)


def test_opposite_effects_of_neighbours_are_not_warned_of():
    """Of alleles with a correlation of .8, which leave z-scores that those of others do not predict."""
    at = np.arange(200) // 20
    likeness = np.where(at[:, None] == at, 0.8, 0.0) + 0.2 * np.eye(200)
    effects = np.zeros(200)
    effects[[3, 7, 44, 49, 120, 131]] = np.array([25, -30, 30, -24, 28, -26])
    for seed in range(10):
        rng = np.random.default_rng(seed)
        noise = np.sqrt(0.2) * rng.normal(size=200) + np.sqrt(0.8) * rng.normal(size=10)[at]
        assert not is_warned(likeness @ effects + noise, likeness, 50_000)


def test_a_fit_that_is_warned_of_is_finite():
    """The noise is not explained away by correlations that z contradicts; frames give names to the worst."""
    z, correlation, _ = study(3, n=60, p=14)
    names = [f"rs{j}" for j in range(14)]
    wrong = pd.DataFrame(correlation[::-1, ::-1], names, names)
    with pytest.warns(UserWarning, match=r"z-scores do not fit the correlations R, .* 'rs\d+'"):
        model = SpikeSlabRegressor.from_z_scores(z, wrong, 60, random_state=0)
    assert np.isfinite(model.coef_).all()
    assert model.noise_scale_ > 0.8


# A panel of finite size


def chain(rows, p, rng, memory=0.9):
    """Rows of normal features whose neighbours have a correlation."""
    x = rng.normal(size=(rows, p))
    for j in range(1, p):
        x[:, j] = memory * x[:, j - 1] + np.sqrt(1 - memory**2) * x[:, j]
    return x


def scores_of(effects, n, rng, memory=0.9):
    """z-scores of n observations of such features, and what the effects explain."""
    at = np.arange(len(effects))
    likeness = memory ** np.abs(at[:, None] - at)
    explained = effects @ likeness @ effects
    r = likeness @ effects + np.sqrt((1 - explained) / n) * chain(1, len(effects), rng, memory)[0]
    return r * np.sqrt((n - 2) / (1 - r**2)), explained


def moments_of(rows):
    """X'X / n, X'y / n and y'y / n."""
    m = len(rows.y)
    return rows.x.T @ rows.x / m, rows.x.T @ rows.y / m, rows.y @ rows.y / m


def assert_same_moments(one, other, **tolerance):
    for found, wanted in zip(moments_of(one), moments_of(other), strict=True):
        np.testing.assert_allclose(found, wanted, **tolerance)
    np.testing.assert_allclose(one.number, other.number, **tolerance)


@pytest.mark.parametrize("rows", [25, 200], ids="B = {}".format)
def test_rows_of_a_panel_are_as_their_correlations(rows):
    """Fewer than the features, whose correlations are then singular, and more; in any units, with names."""
    rng = np.random.default_rng(0)
    effects = np.zeros(40)
    effects[[5, 20]] = 0.1, -0.07
    z, _ = scores_of(effects, 20_000, rng)
    raw = pd.DataFrame(chain(rows, 40, rng) * 10.0 ** rng.integers(-2, 3, 40) + 7).add_prefix("rs")
    found = of_z_scores(z, raw, 20_000)
    assert_same_moments(found, of_z_scores(z, raw.corr(), 20_000, rows), rtol=1e-8, atol=1e-8)
    assert found.names == list(raw.columns)
    square_x, crossed, square_y = moments_of(found)
    np.testing.assert_allclose(square_x, raw.corr(), atol=1 / rows)
    np.testing.assert_allclose(crossed, z / np.sqrt(z**2 + 19_998), atol=1e-8 if rows > 40 else 2e-3)
    np.testing.assert_allclose(square_y, 1)
    assert len(found.y) <= min(rows, 40) + 3


def test_an_endless_panel_is_the_sample():
    x, y = observed(60, 6)
    z, correlation = z_scores(x, y), np.corrcoef(x.T)
    for size in (1e12, np.inf):
        assert_same_moments(
            of_z_scores(z, correlation, 60, size), of_z_scores(z, correlation, 60), rtol=1e-9, atol=1e-9
        )


def test_the_noise_is_that_of_a_panel():
    """What X'y / n of 2,000 panels lacks to that which effects explain has the variance that n' observations give.

    It is compared for a feature far from the effects, where normal correlations have the variance of covariances.
    """
    rng = np.random.default_rng(1)
    effects, n, size, panels = np.zeros(12), 50_000, 100, 2000
    effects[[0, 2]] = 0.3, 0.2
    z, explained = scores_of(effects, n, rng, memory=0.5)
    drawn = chain(size * panels, 12, rng, memory=0.5).reshape(panels, size, 12)
    drawn -= drawn.mean(1, keepdims=True)
    drawn /= np.sqrt((drawn**2).sum(1, keepdims=True))
    last = np.einsum("bij,bi->bj", drawn, drawn[:, :, -1])
    error = (0.5 ** np.arange(11, -1, -1.0) - last) @ effects
    numbers = [of_z_scores(z, each.T @ each, n, size).number for each in drawn[:50]]
    given = np.mean((1 - explained) / np.array(numbers))
    # The standard errors are a relative .032 of the variance of 2,000 errors, and .02 of what is given.
    np.testing.assert_allclose(given, np.mean(error**2) + (1 - explained) / n, rtol=0.15)
    np.testing.assert_allclose(given, explained / size + (1 - explained) / n, rtol=0.1)


def test_a_panel_does_not_make_false_effects():
    """Its error counts as effects where it is taken as exact; two true ones are found with it and without."""
    rng = np.random.default_rng(2)
    effects = np.zeros(10)
    effects[[2, 7]] = 0.25, -0.2
    z, _ = scores_of(effects, 200_000, rng, memory=0.6)
    panel = chain(300, 10, rng, memory=0.6)
    fitted = SpikeSlabRegressor.from_z_scores(z, panel, 200_000, random_state=0)
    assert fitted.select().tolist() == [2, 7]
    exact = SpikeSlabRegressor.from_z_scores(z, np.corrcoef(panel.T), 200_000, panel_size=np.inf, random_state=0)
    assert len(exact.select()) > 3


@pytest.mark.parametrize("rows", [500, None], ids=["panel", "sample"])
@pytest.mark.slow
def test_a_switched_allele_among_two_thousand(rows):
    """With an association of moderate size, in blocks; without a switch, there is no warning."""
    at = np.arange(2000) // 20
    likeness = np.where(at[:, None] == at, 0.8, 0.0) + 0.2 * np.eye(2000)
    for seed in range(3 if rows else 1):
        rng = np.random.default_rng(seed)
        effects = np.zeros(2000)
        effects[[100, 900, 1500]] = np.array([6.0, -7, 8]) / np.sqrt(50_000)

        def drawn(number, rng=rng):
            return np.sqrt(0.2) * rng.normal(size=(number, 2000)) + np.sqrt(0.8) * rng.normal(size=(number, 100))[:, at]

        z = np.sqrt(50_000) * likeness @ effects + drawn(1)[0]
        correlation = likeness if rows is None else drawn(rows)
        assert not is_warned(z, correlation, 50_000)
        switched = 101 + int(np.abs(np.abs(z[101:120]) - 5).argmin())
        z[switched] *= -1
        (message,) = is_warned(z, correlation, 50_000)
        assert re.search(r"the other sign is more probable for (\d+)", message)[1] == str(switched)


@pytest.mark.parametrize("n", [400, 4000])
@pytest.mark.parametrize("seed", range(4))
def test_a_switched_sign_that_would_explain_more_than_all_of_y(n, seed):
    """Two of six features correlate by .9, and opposite effects of both would be of several deviations of y."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6))
    x[:, 1] = 0.9 * x[:, 0] + 0.44 * x[:, 1]
    r = np.corrcoef(x.T, x[:, 0] + 0.5 * x[:, 3] + 2 * rng.normal(size=n))[-1, :-1]
    z = r * np.sqrt((n - 2) / (1 - r**2))
    of_z_scores(z, np.corrcoef(x.T), n)
    z[1] *= -1
    with pytest.warns(UserWarning, match=r"(probable for|deviations have) ([023], )?1"):
        of_z_scores(z, np.corrcoef(x.T), n)


def test_a_panel_without_an_end_is_the_sample_where_it_does_not_fit(recwarn):
    """The same shrunk R, and words that name the caller's file; a panel that hides all effects is refused."""
    correlation = np.array([[1, 0.9, 0.9, 0.1], [0.9, 1, 0.9, 0.1], [0.9, 0.9, 1, 0.1], [0.1, 0.1, 0.1, 1]])
    one, other = (
        SpikeSlabRegressor.from_z_scores([12, -9, 5, 3], correlation, 500, panel_size=size, random_state=0)
        for size in (np.inf, None)
    )
    assert_equal_fits(one, other)
    SpikeSlabRegressor.from_z_scores([12, -9, 5, 3], correlation, 500, panel_size=1e6, random_state=0)
    assert all(warned.filename == __file__ for warned in recwarn)
    with pytest.raises(ValueError, match=r"larger panel than one of 20 rows, as the effects explain 0\.9"):
        of_z_scores([200.0, 0.0], np.eye(2), 1000, 20)
