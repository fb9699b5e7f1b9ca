"""The law of every gate family: Pyro's generic checks, rewritten for atoms.

Two of Pyro's checks assume a density on the whole line and are replaced. Goodness of fit becomes a
binomial test for each atom and a fit of the interior; ``cdf(icdf(u)) == u`` becomes the two
inequalities that hold for any distribution with jumps.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_l0.distributions import HardConcrete

# Every statistical test has a fixed seed. A p-value below 1e-6 would by chance be seen once in
# a million seeds.
SMALLEST_P_VALUE = 1e-6

interior = pytest.mark.interior  # a promise about densities and pathwise draws


def randomised_pit(gate, draws):
    """Probability integral transform that spreads each atom evenly over its step of the cdf."""
    u = torch.rand_like(draws)
    value = gate.cdf(draws)
    p0, p1 = gate.log_prob_zero.exp(), gate.log_prob_one.exp()
    value = torch.where(draws == 0, u * p0, value)
    return torch.where(draws == 1, 1 - u * p1, value)


def test_total_mass_is_one(gate):
    """Both atoms and the integral of exp(log_prob) make one."""
    # 60 Gauss-Legendre nodes on each of 40 panels, finer towards the ends where a narrow stretch
    # has its structure; doubling either changes the sum by less than 1e-13.
    nodes, weights = np.polynomial.legendre.leggauss(60)
    half = 0.5 * np.logspace(-6, 0, 20)
    edges = np.concatenate([[0.0], half, 1 - half[-2::-1], [1.0]])
    width = np.diff(edges)[:, None] / 2
    points = torch.from_numpy(edges[:-1, None] + width * (nodes + 1)).reshape(-1)
    inside = gate.log_prob(points).exp() @ torch.from_numpy(width * weights).reshape(-1)
    atoms = gate.log_prob(torch.tensor([0.0, 1.0], dtype=torch.float64)).exp().sum()
    torch.testing.assert_close(inside, gate.log_interior_prob.exp(), rtol=1e-11, atol=0)
    torch.testing.assert_close(inside + atoms, torch.ones_like(inside), rtol=1e-11, atol=0)


def test_cdf_and_icdf_are_galois_inverses(case):
    """cdf(icdf(u)) >= u and icdf(cdf(x)) <= x, with equality inside."""
    gate = case.gate()
    rounding = 1e-12  # a few hundred float64 epsilons: icdf divides by the density
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    there_and_back = gate.cdf(gate.icdf(u))
    assert (there_and_back >= u - rounding).all()
    inside = (gate.icdf(u) > 0) & (gate.icdf(u) < 1)
    assert inside.any() == case.family.interior
    torch.testing.assert_close(there_and_back[inside], u[inside], rtol=0, atol=rounding)
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert (gate.icdf(gate.cdf(x)) <= x + 1e-9).all()  # 1e-9: the density may be as low as 1e-6
    assert torch.equal(gate.median, gate.icdf(torch.tensor(0.5, dtype=torch.float64)))
    assert gate.icdf(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() == [0.0, 1.0]


def test_no_quantile_outside_of_the_unit_interval(case):
    """NaN, as torch's distributions have, for each number below 0 or above 1."""
    u = torch.tensor([-1.0, -1e-9, 0.5, 1 + 1e-9, 2.0, math.nan], dtype=torch.float64)
    assert case.gate().icdf(u).isnan().tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_randomised_integral_transform_is_uniform(case, dtype):
    """Kolmogorov-Smirnov on 10,000 draws, each atom spread over its step of the cdf first."""
    torch.manual_seed(13)
    gate = case.gate(dtype)
    values = randomised_pit(gate, gate.sample((10_000,)))
    assert stats.kstest(values.double().numpy(), "uniform").pvalue > SMALLEST_P_VALUE


def test_the_integral_transform_has_power():
    """The same test tells temperature 0.60 from 0.667, and so would see a wrong sampler."""
    torch.manual_seed(14)
    # Where P(z = 0) is about one half, a change of temperature moves it most.
    log_alpha = torch.tensor(-1.5, dtype=torch.float64)
    draws = HardConcrete(log_alpha, 0.60).sample((10_000,))
    right = randomised_pit(HardConcrete(log_alpha, 0.60), draws)
    wrong = randomised_pit(HardConcrete(log_alpha, 0.667), draws)
    assert stats.kstest(right.numpy(), "uniform").pvalue > SMALLEST_P_VALUE
    assert stats.kstest(wrong.numpy(), "uniform").pvalue < SMALLEST_P_VALUE


@interior
def test_sample_carries_no_gradient(family):
    parameters = {k: torch.tensor(v, requires_grad=True) for k, v in family.parameters[0].items()}
    gate = family.gate(**parameters)
    assert not gate.sample().requires_grad
    assert gate.rsample().requires_grad


@interior
def test_the_base_distribution_rectified_is_the_gate(gate):
    """Quantiles of the unclipped variable, clipped, are the gate's; its tails are the atoms."""
    base = gate.base_distribution()
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    torch.testing.assert_close(gate.rectify(base.icdf(u)), gate.icdf(u), rtol=0, atol=1e-12)
    torch.manual_seed(23)
    draws = gate.rectify(base.rsample((10_000,)))
    values = randomised_pit(gate, draws)
    assert stats.kstest(values.numpy(), "uniform").pvalue > SMALLEST_P_VALUE
