"""From data to a problem and back: contrasts, units, draws, and what is refused."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from pyro_l0.maths import second_order
from pyro_l0.selection.design import design
from pyro_l0.selection.design.design import default_rate
from pyro_l0.selection.design.draft import Step
from pyro_l0.selection.methods.enumeration import exact_posterior
from pyro_l0.selection.problem import Draws, SelectionPosterior
from tests.selection.families import design_of


def data(n=30, p=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) * [1.0, 3.0, 0.2, 5.0][:p] + 7
    return x, 2 + 0.5 * x[:, 0] + rng.normal(size=n)


def found_with(beta, intercept, outputs=1):
    """A posterior whose draws have these coefficients, shape (N, p K); zeros are closed gates."""
    n = len(beta)
    draws = Draws(csr_array(beta), intercept, np.full(n, 0.5), np.full(n, 2.0), np.full(n, 0.1))
    moments = np.ones((beta.shape[1] // outputs, outputs))
    half, none = np.full(len(moments), 0.5), np.zeros(len(moments))
    return SelectionPosterior(half, moments, 2 * moments, intercept.mean(0), -3.0, draws, none)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("most", [2, 2000])
def test_products_of_sparse_features(monkeypatch, most, weighted):
    """Those of columns that are centred and scaled, all at once, or of a wide design when they are needed."""
    monkeypatch.setattr(second_order, "_DENSE", most)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 6)) * (rng.random((40, 6)) < 0.3)
    y, weight = x[:, 0] + rng.normal(size=40), rng.integers(1, 4, 40) if weighted else np.ones(40)
    found = design_of(csr_array(x), y, weight=weight.astype(float)).problem.quadratic
    columns, target = (part - np.average(part, axis=0, weights=weight) for part in (x, y))
    columns = torch.from_numpy(columns / np.sqrt(np.average(columns**2, axis=0, weights=weight)))
    target, weight = torch.from_numpy(target), torch.from_numpy(weight).double()
    matrix, index = columns.T @ (weight[:, None] * columns), torch.arange(6)
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(found.linear, columns.T @ (weight * target))
    close(found.diagonal, matrix.diagonal())
    close(found.rows(index[None])[0], matrix)
    for few in (index[1:4], index[:0]):  # as a gate vector has with three open gates, or with none
        close(found.blocks(few[None])[0], matrix[few][:, few])


def test_without_intercept_features_are_not_centred():
    x, y = data()
    problem = design_of(x, y, fit_intercept=False).problem
    np.testing.assert_allclose(problem.x.numpy(), x / np.sqrt((x**2).mean(0)), rtol=1e-12)
    assert torch.equal(problem.y, torch.from_numpy(y))
    assert torch.equal(design_of(x, y, fit_intercept=False, standardize=False).problem.x, torch.from_numpy(x))


def test_default_priors():
    x, y = data()
    prior = design_of(x, y).problem.prior
    assert prior.rate == default_rate(4)
    assert (prior.slab_scale, prior.noise_scale) == (None, None)
    assert prior.slab_unit == prior.noise_unit == pytest.approx(y.std())
    raw = design_of(x, y, standardize=False, expected_size=1).problem.prior
    assert raw.rate == 0.25
    assert raw.slab_unit == pytest.approx(y.std() / math.sqrt((x.std(0) ** 2).mean()))
    assert design_of(x, y > y.mean(), "bernoulli").problem.prior.slab_unit == 2
    assert design_of(x, np.floor(np.abs(y)), "poisson", rate=0.1).problem.prior.slab_unit == 1


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("family", ["gaussian", "categorical"])
def test_predictors_are_the_same_in_both_units(family, standardize):
    """A draw's linear predictor does not depend on the units, but for the intercept that is drawn."""
    x, y = data()
    outputs = 3 if family == "categorical" else 1
    y = np.arange(len(y)) % 3 if family == "categorical" else y
    design = design_of(x, y, family, standardize=standardize)
    rng = np.random.default_rng(1)
    beta = rng.normal(size=(5, 4, outputs)) * (rng.random((5, 4, 1)) < 0.6)
    intercept = rng.normal(size=(5, outputs)) if outputs > 1 else np.zeros((5, 1))
    found = found_with(beta.reshape(5, -1), intercept, outputs)
    raw = design.posterior(found, seed=2)
    assert raw.draws.coefficients.nnz == found.draws.coefficients.nnz
    deviation = x.std(0) if standardize else np.ones(4)
    centred = (x - x.mean(0)) / deviation
    expected = np.einsum("ij,sjk->sik", centred, beta) + intercept[:, None]
    got = np.einsum("ij,sjk->sik", x, raw.draws.coefficients.toarray().reshape(5, 4, outputs))
    got += raw.draws.intercept[:, None]
    if family == "gaussian":
        noise = np.random.default_rng(2).standard_normal((5, 1)) * 2.0 / math.sqrt(len(x))
        expected = expected + y.mean() + noise[:, None]
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(raw.mean, found.mean / deviation[:, None])
    np.testing.assert_allclose(raw.sd, found.sd / deviation[:, None])
    middle = found.intercept + (y.mean() if family == "gaussian" else 0)
    np.testing.assert_allclose(raw.intercept, middle - x.mean(0) @ raw.mean, rtol=1e-10)


class Tripled(Step):
    """Observations in another unit."""

    def apply(self, draft):
        draft.y = 3 * draft.y

    def undo(self, found, rng):
        names = ["coefficients", "intercept", "slab_scale", "noise_scale"]
        draws = found.draws._replace(**{name: getattr(found.draws, name) / 3 for name in names})
        moments = {name: getattr(found, name) / 3 for name in ("mean", "sd", "intercept")}
        log_evidence = found.log_evidence + 29 * math.log(3)  # of 30 observations, one of which the intercept takes
        return replace(found, draws=draws, log_evidence=log_evidence, **moments)


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_step_of_ones_own(monkeypatch, place):
    """Anywhere among the others, as all unknown scales have the unit of y."""
    steps = list(design.STEPS)
    x, y = data()
    wanted = exact_posterior(x, y, seed=0)
    monkeypatch.setattr(design, "STEPS", (*steps[:place], Tripled, *steps[place:]))
    found = exact_posterior(x, y, seed=0)
    assert found.log_evidence == pytest.approx(wanted.log_evidence, abs=1e-9)
    for name in ("active_probs", "mean", "sd", "intercept"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-9, atol=1e-9, err_msg=name)
    for name in ("intercept", "slab_scale", "noise_scale"):
        np.testing.assert_allclose(getattr(found.draws, name), getattr(wanted.draws, name), rtol=1e-9)


def test_a_constant_feature_is_as_good_as_an_intercept_where_there_is_none():
    x, y = data()
    x[:, 1] = -2.0
    design = design_of(x, y, fit_intercept=False)
    np.testing.assert_allclose(design.problem.x[:, 1].numpy(), -1.0)
    assert design.posterior(found_with(np.ones((2, 4)), np.zeros((2, 1))), seed=0).mean[1] == 0.5


def test_zeros_without_an_intercept_are_constant():
    """Whatever their coefficient, they have no part in the linear predictor."""
    x, y = data()
    x[:, 1] = 0
    with pytest.warns(UserWarning, match="coefficient of 'x1' are 0"):
        design = design_of(x, y, fit_intercept=False, standardize=False)
    raw = design.posterior(found_with(np.ones((2, 3)), np.zeros((2, 1))), seed=0)
    assert raw.mean[:, 0].tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("scale", [1e-6, 1e9])
@pytest.mark.parametrize("name", ["noise_scale", "slab_scale"])
def test_scales_far_from_one(name, scale):
    """Within the limits every probability is one, and every state's evidence is finite."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 12))
    y = x[:, :9].sum(1) + 1e-7 * rng.normal(size=60)
    found = exact_posterior(x, y, **{name: scale}, seed=0)
    assert np.isfinite(found.log_evidence)
    assert ((found.active_probs >= 0) & (found.active_probs <= 1 + 1e-12)).all()
    if (name, scale) != ("noise_scale", 1e9):
        assert (found.active_probs[:9] > 0.99).all() or name == "slab_scale"
