"""Credible sets: who is a member, with what probability, and how often an effect is inside."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from pyro_l0.selection import SpikeSlabRegressor
from pyro_l0.selection.credible_sets import CredibleSet, credible_sets, open_gates
from tests.reference_posteriors import GaussianPosterior


def duplicates(rng, n=60):
    """Features 0, 1, 2 nearly the same, 3 and 4 nearly the same with the other sign, 5 constant, 6 alone."""
    base = rng.normal(size=(n, 3))
    noise = 0.05 * rng.normal(size=(n, 7))
    return base[:, [0, 0, 0, 1, 1, 2, 2]] * [1, 1, 1, 1, -1, 0, 1] + noise * [1, 1, 1, 1, 1, 0, 1]


def one_open(choices, probs, draws, p, rng):
    """Draws in which exactly one of some features is open."""
    gates = np.zeros((draws, p), dtype=bool)
    gates[np.arange(draws), rng.choice(choices, size=draws, p=probs)] = True
    return gates


def test_features_that_stand_for_each_other_are_a_set():
    """One of three is open in each draw: all three are needed for 95 %, and their probability is one."""
    rng = np.random.default_rng(0)
    x = duplicates(rng)
    gates = one_open([0, 1, 2], [0.5, 0.3, 0.2], 1000, 7, rng)
    (found,) = credible_sets(gates, gates.mean(0), x, names=list("abcdefg"))
    assert found.features == (0, 1, 2)
    assert found.names == ("a", "b", "c")
    assert found.probability == 1.0
    correlation = np.abs(np.corrcoef(x[:, :3].T))
    assert found.purity == pytest.approx(correlation.min(), abs=1e-12)
    assert str(found) == f"{{a, b, c}} (probability 1.000, purity {found.purity:.2f})"
    assert str(CredibleSet((3, 1), 0.97, 0.8)) == "{3, 1} (probability 0.970, purity 0.80)"
    assert str(CredibleSet(tuple(range(50)), 0.97, 0.8)).startswith("{0, 1, 2, 3, 4, 5, 6, 7, 42 more} ")
    assert str(CredibleSet(tuple(range(9)), 0.97, 0.8)).startswith("{0, 1, 2, 3, 4, 5, 6, 7, 8} ")


def test_two_effects_make_two_sets_without_shared_members():
    """The sign of a correlation does not matter, and a set of one has purity one."""
    rng = np.random.default_rng(1)
    gates = one_open([3, 4], [0.6, 0.4], 1000, 7, rng)
    gates[:, 6] = rng.random(1000) < 0.97
    found = credible_sets(gates, gates.mean(0), duplicates(rng))
    assert [s.features for s in found] == [(6,), (3, 4)]
    assert found[0].purity == 1.0
    assert found[0].probability == pytest.approx(gates[:, 6].mean())


def replaced():
    """Draws in which the feature that is likeliest alone has two others in its place, which cover all without it."""
    gates = np.zeros((1000, 7), dtype=bool)
    gates[:500, 1] = gates[500:, 2] = gates[200:720, 0] = True
    return gates


APART = one_open([0, 6], [0.6, 0.4], 500, 7, np.random.default_rng(2))


@pytest.mark.parametrize(
    ("gates", "options", "sets"),
    [
        (APART, {}, []),  # which do not correlate: to say that one of them has an effect is no credible set
        (APART, {"min_correlation": 0.0}, [(0, 6)]),
        (APART, {"level": 0.5}, [(0,)]),
        (replaced(), {}, [(1, 2)]),  # members that are not needed leave
        (one_open([5, 6], [0.5, 0.5], 400, 7, np.random.default_rng(4)), {}, []),  # a constant correlates with none
        (np.arange(100)[:, None] < [4, 0, 0, 0, 0, 0, 0], {"level": 0.03}, []),  # less than .05 starts no set
    ],
)
def test_members(gates, options, sets):
    found = credible_sets(gates, gates.mean(0), duplicates(np.random.default_rng(3)), **options)
    assert [s.features for s in found] == sets


@pytest.mark.parametrize("features", [1, 3])
def test_gates_of_sparse_draws(features):
    """A coefficient that is stored tells an open gate, even if it is zero; the K of a feature have one gate."""
    stored = csr_array((np.array([0.0, 1.0, 2.0]), np.array([1, 0, 5 % (2 * features)]), np.array([0, 1, 3])))
    stored.resize((2, 2 * features))
    found = open_gates(stored, np.arange(features))
    wanted = np.zeros((2, features), dtype=bool)
    for row, column in ((0, 1), (1, 0), (1, 5 % (2 * features))):
        wanted[row, column // 2] = True
    assert (found == wanted).all()


def test_sets_hold_an_effect_as_often_as_they_say():
    """Gates from the prior, features of correlation .95: of some hundred sets a share of .95 or more is right."""
    right = []
    for seed in range(120):
        rng = np.random.default_rng(seed)
        x = np.sqrt(0.95) * np.repeat(rng.normal(size=(40, 2)), 3, axis=1) + np.sqrt(0.05) * rng.normal(size=(40, 6))
        z = rng.random(6) < 0.25
        y = x @ (z * rng.normal(size=6)) + rng.normal(size=40)
        torch.manual_seed(seed)
        gates = GaussianPosterior(*map(torch.from_numpy, (x, y)), 1.0, 1.0, 0.25).draws(2000)["z"].bool().numpy()
        right += [z[list(s.features)].any() for s in credible_sets(gates, gates.mean(0), x)]
    assert len(right) > 80
    # Of 100 sets of probability .95 or more, 2.5 standard errors are .055.
    assert np.mean(right) >= 0.95 - 2.5 * np.sqrt(0.95 * 0.05 / len(right))


@pytest.mark.parametrize("seed", range(3))
def test_among_many_near_copies(seed):
    """One effect among fifty near-copies: probabilities are those of single effects, and so is that of the set."""
    rng = np.random.default_rng(seed)
    shared = np.repeat(rng.normal(size=(200, 12)), 50, axis=1)
    x = np.sqrt(0.98) * shared + np.sqrt(0.02) * rng.normal(size=(200, 600))
    y = 0.6 * x[:, 7] + rng.normal(size=200)
    x, y = x - x.mean(0), y - y.mean()
    options = dict(rate=1e-5, slab_scale=0.5, noise_scale=1.0, standardize=False, fit_intercept=False)
    model = SpikeSlabRegressor(**options, random_state=seed).fit(x, y)
    precision = 1 + 0.25 * (x**2).sum(0)
    log_evidence = 0.125 * (x.T @ y) ** 2 / precision - 0.5 * np.log(precision)
    exact = np.exp(log_evidence - log_evidence.max())
    exact /= exact.sum()
    # Two effects at once have a probability of some hundredths. Chains that seldom exchange copies are off by .1.
    assert 0.5 * np.abs(model.pip_ - exact).sum() < 0.07
    (found,) = model.credible_sets_
    assert exact[list(found.features)].sum() > 0.935
