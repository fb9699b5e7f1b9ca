"""Quadrature rules, and the hard concrete's formulas against 50-digit arithmetic."""

import math

import mpmath
import pytest
import torch
from scipy import stats
from torch.autograd import gradcheck, gradgradcheck

from pyro_l0.maths import hard_concrete, hard_concrete_kl, quadrature

mp = mpmath.MPContext()
mp.dps = 50


def test_logistic_noise_has_its_full_tails():
    """Finite in float32, logistic by Kolmogorov-Smirnov, and beyond a 24-bit uniform's 16.6."""
    torch.manual_seed(61)
    noise = hard_concrete.logistic_noise(torch.Size((2_000_000,)), torch.float32, torch.device("cpu"))
    assert noise.isfinite().all()
    assert stats.kstest(noise[:100_000].double().numpy(), "logistic").pvalue > 1e-6
    # Counts beyond 10 on either side: 90.8 expected, five standard deviations are 48.
    for side in (noise, -noise):
        assert abs(int((side > 10).sum()) - 2e6 / (1 + math.exp(10))) < 48


@pytest.mark.parametrize("n", [1, 5, 8, 28, 71])
def test_gauss_legendre_is_exact_for_polynomials(n):
    """n nodes integrate x^k exactly up to k = 2 n - 1."""
    x, w = quadrature.gauss_legendre(n, torch.float64)
    assert x.shape == w.shape == (n,)
    for k in (0, 1, 2 * n - 2, 2 * n - 1):
        expected = 2 / (k + 1) if k % 2 == 0 else 0.0
        assert abs(float((w * x**k).sum()) - expected) < 1e-13  # n roundings


@pytest.mark.parametrize("limits", [(-0.1, 1.1), (-0.2, 1.3), (-0.001, 1.001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nodes_of_a_stretch(limits, dtype):
    """Nodes lie inside, z and 1 - z add up, and g' integrates to one."""
    stretch = quadrature.make_stretch(*limits, dtype)
    nodes = quadrature.stretch_nodes(stretch, 80, dtype, torch.device("cpu"))
    eps = torch.finfo(dtype).eps
    assert ((nodes.z > 0) & (nodes.z < 1) & (nodes.one_minus_z > 0)).all()
    torch.testing.assert_close(nodes.z + nodes.one_minus_z, torch.ones(80, dtype=dtype))
    assert abs(float((nodes.weight * nodes.slope).sum()) - 1) < 80 * eps
    assert abs(float(nodes.weight.sum()) - 2 * quadrature.half_width(stretch)) < 80 * eps * 10


def test_nodes_in_panels():
    """Panels between breakpoints integrate the same, and an empty panel does no harm."""
    stretch = quadrature.make_stretch(-0.1, 1.1, torch.float64)
    breakpoints = torch.tensor([[0.0, 0.3], [0.2, 0.2], [0.4, 1.0]], dtype=torch.float64)
    nodes = quadrature.panel_nodes(stretch, [breakpoints], 20, torch.float64, torch.device("cpu"))
    assert nodes.t.shape == (3, 60)
    area = (nodes.weight * nodes.slope * nodes.z**2).sum(-1)
    torch.testing.assert_close(area, torch.full_like(area, 1 / 3), rtol=1e-13, atol=0)


@pytest.mark.parametrize("log_alpha_q", [-40.0, -20.0, -2.0, 0.0, 5.0, 19.0, 45.0])
@pytest.mark.parametrize("log_alpha_p", [-43.0, -22.9, -17.8, -1.0, 6.0, 21.0, 44.0])
def test_closed_kl_is_exact_to_rounding(log_alpha_q, log_alpha_p):
    """The closed form against the same formula in 50 digits, in float64."""
    temperature = 1.0849674940109253
    stretch = quadrature.make_stretch(-0.1, 1.1, torch.float64)
    rule = quadrature.gauss_legendre(8, torch.float64)
    q, p = (torch.tensor(x, dtype=torch.float64) for x in (log_alpha_q, log_alpha_p))
    value = hard_concrete_kl.same_temperature(q, p, temperature, stretch, rule)

    lq, lp, beta = mp.mpf(log_alpha_q), mp.mpf(log_alpha_p), mp.mpf(temperature)
    t0, t1 = mp.log(mp.mpf(0.1) / mp.mpf(1.1)), mp.log((1 + mp.mpf(0.1)) / (mp.mpf(1.1) - 1))
    d = lq - lp
    v0, v1 = (1 / (1 + mp.exp(lq - beta * t)) for t in (t0, t1))
    l0, l1 = (mp.log(1 + mp.expm1(d) * v) for v in (v0, v1))
    w0, w1 = mp.exp(l0), mp.exp(l1)
    expected = v0 * (l0 - d) + (1 - v1) * l1 - (d + 2) * (v1 - v0) + 2 / mp.expm1(d) * (w1 * l1 - w0 * l0)
    # A few hundred epsilons of the largest term; the total is well conditioned.
    assert abs(value.item() / expected - 1) < 1e-13


def test_closed_kl_can_be_differentiated_twice():
    """Its written-out derivatives are right and themselves differentiable, on both branches."""
    stretch = quadrature.make_stretch(-0.1, 1.1, torch.float64)
    rule = quadrature.gauss_legendre(8, torch.float64)
    q = torch.tensor([-6.0, -1.0, 0.3, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([4.0, -1.2, 1.5, -3.0, 6.0], dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def value(*inputs):
        return hard_concrete_kl.same_temperature(*inputs, stretch, rule)

    assert gradcheck(value, (q, p, temperature))
    assert gradgradcheck(value, (q, p, temperature))


@pytest.mark.parametrize("temperature", ["number", "one", "many"])
def test_many_gates_give_what_few_give(temperature):
    """Large tensors are worked on in blocks, which must not show in values or gradients."""
    torch.manual_seed(62)
    shape = (3, 50_000)
    q, p = torch.randn(2, *shape).mul(4).unbind(0)
    p[2] = p[0]
    stretch = quadrature.make_stretch(-0.1, 1.1, torch.float32)
    rule = quadrature.gauss_legendre(5, torch.float32)
    beta = {"number": 2 / 3, "one": torch.tensor(2 / 3), "many": torch.rand(shape) + 0.1}[temperature]

    def run(at):
        tensors = [x[at].clone().requires_grad_() for x in (q, p.expand(shape))]
        one = beta if not isinstance(beta, torch.Tensor) or beta.dim() == 0 else beta[at]
        if isinstance(one, torch.Tensor):
            tensors.append(one.clone().requires_grad_())
            one = tensors[-1]
        value = hard_concrete_kl.same_temperature(*tensors[:2], one, stretch, rule)
        return value.detach(), *torch.autograd.grad(value.sum(), tensors)

    everything = run(slice(None))
    assert everything[0].shape == shape
    rows = [run(row) for row in range(3)]
    for whole, parts in zip(everything, zip(*rows, strict=True), strict=True):
        # A temperature shared by all gates adds its gradient up over 150,000 of them, in another order.
        together = torch.stack(parts) if whole.dim() == 2 else torch.stack(parts).sum()
        torch.testing.assert_close(whole, together, rtol=1e-4 if whole.dim() == 0 else 1e-6, atol=1e-6)
