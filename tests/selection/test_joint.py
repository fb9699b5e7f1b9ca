"""Several responses and several data sets, against sums over gates and a grid of all scales that share no code."""

import itertools
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import linalg, special, stats
from scipy.sparse import csr_array

from pyro_l0.selection import SpikeSlabMultiTaskRegressor, SpikeSlabRegressor
from pyro_l0.selection.methods.joint_evidence import JointEvidence
from tests.maths.spike_and_slab import seeded
from tests.selection.families import design_of
from tests.selection.references import log_grid, log_prior

RATES = [0.3, 0.5, 0.2]


def studies(seed=0, sizes=(25, 40)):
    """Data sets of three features of other means, the first of which has an effect in all."""
    rng = np.random.default_rng(seed)
    x = [
        rng.normal(size=(n, 3)) @ np.array([[1, 0.6, 0], [0, 0.8, 0], [0, 0, 2.0]]) + 3 * k for k, n in enumerate(sizes)
    ]
    return x, [2.0 + k + (1 - 1.6 * k) * each[:, 0] + (1 + k) * rng.normal(size=len(each)) for k, each in enumerate(x)]


class Exact(NamedTuple):
    pips: np.ndarray
    mean: np.ndarray  # shape (K, p)
    sd: np.ndarray
    noise: np.ndarray  # means, shape (K,)
    log_evidence: float


def exact(x, y, rates=RATES, slab=None):
    """Of features as they are, intercepts and features of rate 1 with flat priors, and slabs in units of each y.

    That unit is the deviation of what the flat priors leave of y, and the scale of the slabs' prior is one over the
    root of the features' mean variance. The grids of the logarithms of all scales have a hundred nodes.
    """
    is_in = np.array(rates) == 1
    variances = [features[:, ~is_in & (features.std(0) > 0)].var(0).mean() for features in x]
    slabs, log_slab = (np.array([slab]), np.zeros(1)) if slab else log_grid(-7, 1.6)
    prior = log_slab if slab else log_slab + stats.halfnorm.logpdf(slabs, scale=np.mean(variances) ** -0.5)
    found = []
    for z in itertools.product([0, 1], repeat=len(rates)):
        if (of_gates := log_prior(z, rates)) is None:
            continue
        sums, moments = [], []
        for features, target in zip(x, y, strict=True):
            basis = linalg.null_space(np.hstack([np.ones((len(target), 1)), features[:, is_in]]).T)
            rest, columns = basis.T @ target, basis.T @ (features * (np.array(z) * ~is_in))
            unit = np.sqrt(rest @ rest / len(target))
            noise, log_noise = log_grid(np.log(unit) - 3.5, np.log(unit) + 3)
            values, vectors = np.linalg.eigh(columns @ columns.T)
            variance = noise[:, None] ** 2 + (slabs[:, None, None] * unit) ** 2 * values.clip(min=0)
            log = stats.norm.logpdf(vectors.T @ rest, scale=np.sqrt(variance)).sum(2)
            log = log + log_noise + stats.halfcauchy.logpdf(noise / unit) - np.log(unit)
            own = columns.T @ vectors  # of the mean, tau^2 X' V (sigma^2 + tau^2 lambda)^-1 V' y
            tau = (slabs[:, None, None] * unit) ** 2
            mean = tau * ((1 / variance) * (vectors.T @ rest)) @ own.T
            square = mean**2 + tau * np.array(z) * (features.std(0) > 0) - tau**2 * (1 / variance) @ (own**2).T
            sums.append(special.logsumexp(log, 1))
            weights = special.softmax(log, 1)
            moments.append([np.einsum("rm,rmp->rp", weights, part) for part in (mean, square)] + [weights @ noise])
        log = sum(sums) + prior
        weights = special.softmax(log)
        found.append(
            (special.logsumexp(log) + of_gates, z, [[weights @ part for part in of_one] for of_one in moments])
        )
    log = np.array([each[0] for each in found])
    probs = special.softmax(log)
    first, second, noise = (
        np.array([sum(p * each[2][k][i] for p, each in zip(probs, found, strict=True)) for k in range(len(x))])
        for i in range(3)
    )
    pips = probs @ np.array([each[1] for each in found])
    return Exact(pips, first, np.sqrt((second - first**2).clip(min=0)), noise, special.logsumexp(log))


def assert_exact(model, found, free=slice(None), draws=0.1):
    """To 1e-4, and noise scales, which are averages of draws, within some of their size."""
    np.testing.assert_allclose(model.pip_[free], found.pips[free], atol=1e-4)
    np.testing.assert_allclose(model.coef_[:, free], found.mean[:, free], atol=1e-4)
    np.testing.assert_allclose(model.coef_sd_[:, free], found.sd[:, free], atol=2e-4)
    np.testing.assert_allclose(model.noise_scale_, found.noise, rtol=draws)
    assert model.log_evidence_ == pytest.approx(found.log_evidence, abs=2e-4)


def fitted(x, y, **options):
    return SpikeSlabMultiTaskRegressor(random_state=0, standardize=False, **{"rate": RATES, **options}).fit(x, y)


def test_data_sets():
    x, y = studies()
    assert_exact(fitted(x, y), exact(x, y))


def test_a_known_slab_scale():
    x, y = studies(seed=1)
    assert_exact(fitted(x, y, slab_scale=0.4), exact(x, y, slab=0.4))


def test_responses_of_the_same_rows():
    (x, _), (y, _) = studies(seed=2)
    y = np.stack([y, 5 * y[::-1] - x[:, 2], 0.01 * x[:, 1] + 0.005 * y], 1)
    assert_exact(fitted(x, y), exact([x] * 3, y.T))


def test_a_feature_that_is_always_in():
    x, y = studies(seed=3)
    rates = [0.3, 0.5, 1.0]
    model = fitted(x, y, rate=rates)
    assert_exact(model, exact(x, y, rates), free=slice(2))
    assert model.pip_[2] == 1
    assert 2 in model.select()


def test_a_feature_that_is_constant_in_one(recwarn):
    """Its effect there is 0, and the other data set tells of its gate."""
    x, y = studies(seed=4)
    x[1][:, 0] = 7.0
    model = fitted(x, y)
    assert_exact(model, exact(x, y))
    assert model.coef_[1, 0] == 0
    assert not recwarn
    x[0][:, 0] = 7.0
    with pytest.warns(UserWarning, match="probability and the coefficient of 'x0' are 0"):
        assert fitted(x, y).pip_[0] == 0


def test_rows_of_weight_two_are_two_rows():
    x, y = studies(seed=5)
    twice = [np.vstack([x[0], x[0][:5]]), x[1]], [np.r_[y[0], y[0][:5]], y[1]]
    weight = [np.r_[np.full(5, 2.0), np.ones(20)], np.ones(40)]
    weighted = SpikeSlabMultiTaskRegressor(random_state=0, rate=RATES).fit(x, y, weight)
    repeated = SpikeSlabMultiTaskRegressor(random_state=0, rate=RATES).fit(*twice)
    np.testing.assert_allclose(weighted.pip_, repeated.pip_, atol=1e-6)
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-6)
    assert weighted.log_evidence_ == pytest.approx(repeated.log_evidence_, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rate": {0: 0.3, 1: 0.5, 2: 1.0}},
        {"rate": {0: 0.3, 1: 0.5, 2: 1.0}, "always_in_scale": 2.0},
        {"groups": [0, 1, 1], "expected_size": 0.7},
        {"fit_intercept": False, "standardize": False},
    ],
    ids=str,
)
def test_one_response_is_a_linear_regression(options):
    (x, _), (y, _) = studies(seed=6)
    offset = np.linspace(0, 3, len(y))
    one = SpikeSlabRegressor(random_state=0, **options).fit(x, y, offset=offset)
    for given in ((x, y), ([x], [y])):
        several = SpikeSlabMultiTaskRegressor(random_state=0, **options)
        several.fit(*given, offset=offset if given[0] is x else [offset])
        for name, atol in (("pip_", 1e-5), ("coef_", 1e-4), ("coef_sd_", 1e-3)):
            np.testing.assert_allclose(np.ravel(getattr(several, name)), getattr(one, name), atol=atol)
        assert several.log_evidence_ == pytest.approx(one.log_evidence_, abs=1e-4)
        np.testing.assert_allclose(several.predict(x)[:, 0], one.predict(x), atol=1e-3)


def test_draws_are_those_of_the_posterior():
    """Means and deviations of coefficients within five standard errors, and of noise, whose draws are of a grid."""
    x, y = studies(seed=7)
    model, found = fitted(x, y), exact(x, y)
    coef, gates = (model.sample(2000)[name] for name in ("coef", "gates"))
    scale = np.sqrt(2000)
    assert (np.abs(gates.mean(0) - found.pips) <= 5 * np.sqrt(found.pips * (1 - found.pips)) / scale + 1e-3).all()
    assert (np.abs(coef.mean(0) - found.mean) <= 5 * found.sd / scale).all()
    noise = model.sample(2000)["noise_scale"]
    assert (np.abs(noise.mean(0) - found.noise) <= 5 * noise.std(0) / scale + 0.002 * found.noise).all()


def test_moves_of_the_scales():
    """From draws of their distribution given the gates they lead to draws of it, in means and second moments."""
    x, y = studies(seed=8)
    rows = np.full((sum(map(len, y)), 2), np.nan)
    rows[: len(y[0]), 0], rows[len(y[0]) :, 1] = y
    problem = design_of(np.vstack(x), rows, "multivariate").problem
    evidence, generator = JointEvidence(problem), seeded(0)
    z = torch.tensor([[True, False, True]]).expand(4000, -1)
    start = evidence.drawn_scales(z, generator)
    moved = evidence.moved_scales(z, start, generator)
    assert (moved != start).all()
    for power in (1, 2):
        before, after = start**power, moved**power
        apart = (after.mean(0) - before.mean(0)).abs()
        assert (apart <= 5 * (before - after).std(0) / 4000**0.5).all()
    assert (start.T.corrcoef() - moved.T.corrcoef()).abs().max() < 0.1


@pytest.mark.slow
def test_chains():
    """Within five of their standard errors."""
    x, y = studies(seed=9)
    summed, sampled = (
        SpikeSlabMultiTaskRegressor(random_state=0, method=method).fit(x, y) for method in ("enumerate", "tempered")
    )
    np.testing.assert_array_less(np.abs(summed.pip_ - sampled.pip_), 5 * sampled.error_ + 1e-3)
    np.testing.assert_allclose(sampled.coef_, summed.coef_, atol=0.03)
    assert sampled.log_evidence_ == pytest.approx(summed.log_evidence_, abs=0.05)


def test_z_scores():
    """As standardised data of the studies have them."""
    x, y = studies(seed=10)
    x, y = ([(part - part.mean(0)) / part.std(0) for part in parts] for parts in (x, y))
    n = [len(part) for part in y]
    along = [a.T @ b / len(b) for a, b in zip(x, y, strict=True)]
    z = [r * np.sqrt((m - 2) / (1 - r**2)) for r, m in zip(along, n, strict=True)]
    matrices = [pd.DataFrame(np.corrcoef(part.T), columns=list("abc")) for part in x]
    model = SpikeSlabMultiTaskRegressor.from_z_scores(z, matrices, n, random_state=0)
    other = SpikeSlabMultiTaskRegressor(random_state=0).fit(x, y)
    np.testing.assert_allclose(model.pip_, other.pip_, atol=1e-5)
    np.testing.assert_allclose(model.coef_, other.coef_, atol=1e-5)
    assert [*model.feature_names_in_] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="means of X and y to predict"):
        model.predict(x[0])


def test_sets_see_no_difference_of_means():
    """Features whose means differ between data sets, and that do not correlate within one, are in no set together."""
    rng = np.random.default_rng(11)
    x = [rng.normal(size=(60, 3)) + 10 * k for k in range(2)]
    y = [part[:, 0] + rng.normal(size=60) for part in x]
    model = SpikeSlabMultiTaskRegressor(random_state=0).fit(x, y)
    assert [found.features for found in model.credible_sets_] == [(0,)]
    assert model.predict(x[0]).shape == (60, 2)
    assert model.sample(5)["coef"].shape == (5, 2, 3)
    with pytest.raises(ValueError, match="of the same rows, but they are of several data sets"):
        model.to_arviz()


def test_what_is_said_of_a_gate_does_not_depend_on_a_data_set_without_it(recwarn):
    """Not the size of slabs, and not the number of features that may be expected; constants name the caller's file."""
    x, y = studies(seed=13)
    still = np.hstack([x[1][:, :1] * 0 + 2.0, np.ones((40, 2))])
    alone = fitted([1e3 * x[0]], y[:1], rate=0.3)
    beside = fitted([1e3 * x[0], still], y, rate=0.3)
    np.testing.assert_allclose(alone.pip_, beside.pip_, atol=1e-6)
    np.testing.assert_allclose(fitted([x[0], still], y, rate=None, expected_size=1.5).pip_.shape, (3,))
    assert not recwarn
    x[0][:, 1], x[1][:, 1] = 1.0, 2.0
    for given in ((x, y), (x[0], y[0])):
        SpikeSlabMultiTaskRegressor(random_state=0).fit(*given)
        assert recwarn.pop().filename == __file__
    SpikeSlabRegressor(random_state=0).fit(x[0], y[0])
    assert recwarn.pop().filename == __file__


def test_offsets():
    """Of each response, and of each data set, less which the posterior is the same."""
    x, y = studies(seed=14)
    offset = [np.linspace(-2, 5, len(part)) for part in y]
    plain = fitted(x, y)
    model = SpikeSlabMultiTaskRegressor(random_state=0, standardize=False, rate=RATES)
    model.fit(x, [a + b for a, b in zip(y, offset, strict=True)], offset=offset)
    np.testing.assert_allclose(model.pip_, plain.pip_, atol=1e-8)
    np.testing.assert_allclose(model.intercept_, plain.intercept_, atol=1e-6)
    both = np.stack([y[0], -y[0] + x[0][:, 2]], 1)
    known = np.stack([offset[0], -3 * offset[0]], 1)
    one, other = fitted(x[0], both), model.fit(x[0], both + known, offset=known)
    np.testing.assert_allclose(one.pip_, other.pip_, atol=1e-8)


def test_frames_with_levels():
    """A level that one data set alone has is constant in the other."""
    x, y = studies(seed=12)
    letters = [list("abc") * 8 + ["a"], list("ab") * 20]
    frames = [pd.DataFrame({"u": part[:, 0], "c": pd.Categorical(own)}) for part, own in zip(x, letters, strict=True)]
    model = SpikeSlabMultiTaskRegressor(random_state=0).fit(frames, y)
    assert [*model.get_feature_names_out(), *model.summary().index.get_level_values(0)[2::2]] == [
        "u",
        "c[a]",
        "c[b]",
        "c[c]",
    ]
    assert model.coef_[1, 3] == 0
    assert model.coef_[0, 3] != 0


def test_refused():
    x, y = studies()
    with pytest.raises(ValueError, match=r"y to be a list of 2 vectors, one for each X, of lengths \[25, 40\]"):
        fitted(x, y[::-1])
    with pytest.raises(ValueError, match=r"same features in all X, .* those of number 1 differ"):
        fitted([x[0], x[1][:, :2]], y)
    with pytest.raises(ValueError, match="one for each study, and panel_size, but got 2, 1, 2 and 2"):
        SpikeSlabMultiTaskRegressor.from_z_scores([y, y], [x], [5, 5])
    with pytest.raises(ValueError, match=r"each response to vary, .* number 1 does not"):
        fitted(x, [y[0], 0 * y[1]])
    with pytest.raises(ValueError, match="at least two rows in each X, but number 1 has 0"):
        fitted([x[0], x[1][:0]], [y[0], y[1][:0]])
    with pytest.raises(ValueError, match="of a weight in each data set, but number 0 has none"):
        SpikeSlabMultiTaskRegressor().fit(x, y, [np.zeros(25), np.ones(40)])
    with pytest.raises(ValueError, match="sample_weight to be a list of 2 vectors"):
        SpikeSlabMultiTaskRegressor().fit(x, y, 2.0)
    with pytest.raises(TypeError, match="dense X, but number 0 is sparse"):
        SpikeSlabMultiTaskRegressor().fit([csr_array(part) for part in x], y)
    with pytest.raises(ValueError, match="NaN"):
        fitted(x[0], np.stack([y[0], np.nan * y[0]], 1))
