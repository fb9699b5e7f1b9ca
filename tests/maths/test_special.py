"""Helpers against 50-digit arithmetic."""

import math

import mpmath
import pytest
import torch
from torch.autograd import gradgradcheck

from pyro_l0.maths import special

mp = mpmath.MPContext()
mp.dps = 50

DTYPES = (torch.float32, torch.float64)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# The function's value and slope in 50 digits, points on all branches and at their borders, and epsilons of error.
FUNCTIONS = {
    "log1mexp": (
        lambda x: mp.log(-mp.expm1(-x)),
        lambda x: 1 / mp.expm1(x),
        [1e-30, 1e-7, 0.1, 0.69, math.log(2), 0.7, 3.0, 20.0, 60.0],
        8,
    ),
    # Beyond the border expm1(x) - x loses a factor of |x| / psi(x), about 4 at 1/2.
    "psi": (
        lambda x: mp.expm1(x) - x,
        mp.expm1,
        [-80, -3, -1, -0.51, -0.5, -0.49, -1e-3, -1e-10, 1e-10, 1e-3, 0.2, 0.49, 0.5, 0.51, 0.99, 1, 3, 80],
        16,
    ),
    # erfcx, exp(-x^2 / 2) and log carry x^2 / 2 roundings on the upper side: 5 at 3.
    "log_ndtr": (
        lambda x: mp.log(mp.ncdf(x)),
        lambda x: mp.npdf(x) / mp.ncdf(x),
        [-100.0, -30.0, -8.0, -3.0, -1.0, 0.0, 0.7, 3.0],
        64,
    ),
    # Rounding x / sqrt(2) moves exp(-x^2 / 2) by x^2 epsilons: 64 at -8.
    "ndtr": (mp.ncdf, mp.npdf, [-8.0, -5.0, -2.0, -0.5, 0.0, 0.5, 3.0], 128),
    # The middle branch subtracts two numbers whose difference is 1/10 of them at -3.
    "positive_part_mean": (
        lambda x: x * mp.ncdf(x) + mp.npdf(x),
        mp.ncdf,
        [-8.0, -3.01, -2.99, -1.0, -1e-4, 0.0, 0.5, 4.0],
        128,
    ),
}


@both_dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes(name, dtype):
    """Relative errors, also deep in the tails and where a probability itself would underflow."""
    exact, slope, points, epsilons = FUNCTIONS[name]
    x = torch.tensor(points, dtype=dtype, requires_grad=True)
    value = getattr(special, name)(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    allowed = epsilons * torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).tiny
    for point, v, g in zip(map(mp.mpf, x.tolist()), value.tolist(), gradient.tolist(), strict=True):
        for what, actual, expected in (("value", v, exact(point)), ("slope", g, slope(point))):
            # Below the smallest normal number no relative accuracy is possible.
            error = abs(mp.mpf(actual) - expected)
            assert error <= allowed * abs(expected) + tiny, (what, point, actual, float(expected))


@both_dtypes
def test_log1mexp_stays_finite(dtype):
    """The unused branch sends no NaN into the gradient, however large the argument."""
    x = torch.tensor([1e-30, 80.0, 500.0, 1e30], dtype=dtype, requires_grad=True)
    value = special.log1mexp(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@both_dtypes
def test_psi_at_zero(dtype):
    """Exactly 0 with exactly no slope, so that equal gates have exactly no KL."""
    x = torch.zeros((), dtype=dtype, requires_grad=True)
    value = special.psi(x)
    assert value == 0
    assert torch.autograd.grad(value, x)[0] == 0


@both_dtypes
def test_klterm(dtype):
    """q log(q/p) - q + p from logs: its value, and q (lq - lp) and p - q as derivatives."""
    eps = torch.finfo(dtype).eps
    logs = [-50.0, -10.0, -3.1, -3.0, -1.0, -0.9990234375, -1e-3, 0.0, 2.0]
    for first in logs:
        for second in logs:
            lq = torch.tensor(first, dtype=dtype, requires_grad=True)
            lp = torch.tensor(second, dtype=dtype, requires_grad=True)
            value = special.klterm(lq, lp)
            by_q, by_p = torch.autograd.grad(value, (lq, lp))
            x, y = mp.mpf(lq.item()), mp.mpf(lp.item())
            q, p = mp.exp(x), mp.exp(y)
            expected = q * (x - y) - q + p
            assert value >= 0
            # The difference of the logs is rounded to eps of the larger log.
            lost = eps * max(1, abs(first), abs(second)) * abs(q * (x - y))
            assert abs(value.item() - expected) <= 16 * (eps * expected + lost * abs(x - y) + lost)
            scale = max(q, p)
            assert abs(by_q.item() - q * (x - y)) <= 16 * eps * (1 + abs(first)) * scale * max(1, abs(x - y))
            assert abs(by_p.item() - (p - q)) <= 16 * eps * (1 + abs(second)) * scale


@both_dtypes
def test_klterm_of_equals(dtype):
    """No KL and no derivative where q = p, at any size."""
    logs = torch.tensor([-1e4, -90.0, -1.0, 0.0, 3.0], dtype=dtype, requires_grad=True)
    other = logs.detach().clone().requires_grad_()
    value = special.klterm(logs, other)
    assert (value == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(value.sum(), (logs, other)))


def test_klterm_at_the_extremes_of_float32():
    """Logs of masses that underflow on either side: finite values and derivatives."""
    logs = torch.tensor([-1e4, -200.0, -90.0, -1.0, -1e-30, 0.0])
    lq = logs.repeat_interleave(6).requires_grad_()
    lp = logs.repeat(6).requires_grad_()
    value = special.klterm(lq, lp)
    assert value.isfinite().all()
    assert (value >= 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(value.sum(), (lq, lp)))


def test_helpers_can_be_differentiated_twice():
    """Custom derivatives are themselves differentiable."""
    x = torch.tensor([-2.0, -0.3, 0.2, 0.7, 2.0], dtype=torch.float64, requires_grad=True)
    positive = x.detach().abs().requires_grad_()
    assert gradgradcheck(special.psi, (x,))
    assert gradgradcheck(special.log1mexp, (positive,))
    assert gradgradcheck(special.klterm, (x, positive))
    assert gradgradcheck(special.log_ndtr, (x,))
    assert gradgradcheck(special.positive_part_mean, (x,))
