"""Quadrature of gates: any stretch, any sharpness, at a bounded cost; against scipy's adaptive integrals."""

import math
from itertools import product

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy import special, stats
from torch.distributions import kl_divergence

from pyro_l0.distributions import (
    ExponentialGate,
    ExponentialUniformGate,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    Rectified,
    RectifiedNormal,
)

DTYPES = (torch.float64, torch.float32)


class Textbook:
    """A family by its definition in numpy: log density and log tails before clipping, and where it changes fast."""

    def __init__(self, family, gamma=0.0, zeta=1.0, **parameters):
        self.family, self.parameters = family, parameters
        self.gamma, self.width = gamma, zeta - gamma
        self.limits = {} if family is RectifiedNormal else dict(gamma=gamma, zeta=zeta)

    def gate(self, dtype):
        """The library's gate; limits are numbers."""
        tensors = {name: torch.tensor(value, dtype=dtype) for name, value in self.parameters.items()}
        return self.family(**tensors, **self.limits)

    def logs(self, z):
        """log P(x <= z), log density, log P(x > z)."""
        s, p = (z - self.gamma) / self.width, self.parameters
        with np.errstate(divide="ignore"):
            if self.family is RectifiedNormal:
                law = stats.norm(p["loc"], p["scale"])
                return law.logcdf(z), law.logpdf(z), law.logsf(z)
            if self.family is HardConcrete:
                a = p["temperature"] * special.logit(s) - p["log_alpha"]
                slope = math.log(p["temperature"]) - np.log(s) - np.log1p(-s)
                below, above = stats.logistic.logcdf(a), stats.logistic.logsf(a)
                return below, below + above + slope - math.log(self.width), above
            if self.family is HardKumaraswamy:
                a, b = p["concentration1"], p["concentration0"]
                inside = np.log1p(-(s**a))
                density = math.log(a * b) + (a - 1) * np.log(s) + (b - 1) * inside - math.log(self.width)
                return np.log(-np.expm1(b * inside)), density, b * inside
            parts = [self.component(x) for x in (s, 1 - s)]
        weights = stats.logistic.logcdf(-p["logits"]), stats.logistic.logcdf(p["logits"])
        mix = lambda x, y: np.logaddexp(weights[0] + x, weights[1] + y)  # noqa: E731
        (below, density, above), (mirrored_below, mirrored_density, mirrored_above) = parts
        return (
            mix(below, mirrored_above),
            mix(density, mirrored_density) - math.log(self.width),
            mix(above, mirrored_below),
        )

    def component(self, s):
        """The same of the component near 0."""
        beta = self.parameters["beta"]
        if self.family is PowerLawGate:
            below = np.log(s) / beta
            return below, below - np.log(s) - math.log(beta), np.log(-np.expm1(below))
        scale = -math.expm1(-beta)
        below, above = -np.expm1(-beta * s) / scale, np.exp(-beta * s) * -np.expm1(-beta * (1 - s)) / scale
        density, e = beta * np.exp(-beta * s) / scale, self.parameters.get("epsilon", 0.0)
        uniform = (s, 1.0, 1 - s)
        return tuple(
            np.log((1 - e) * x + e * u + 1e-300) for x, u in zip((below, density, above), uniform, strict=True)
        )

    def breakpoints(self):
        """Points of (0, 1) about which the density may change fast."""
        p = self.parameters
        if self.family is RectifiedNormal:
            centres = [(p["loc"], p["scale"])]
        elif self.family is HardConcrete:
            s = special.expit(p["log_alpha"] / p["temperature"])
            centres = [(self.gamma + self.width * s, self.width * max(s * (1 - s), 1e-4) / p["temperature"])]
        elif self.family is HardKumaraswamy:
            a, b = p["concentration1"], p["concentration0"]
            centres = [(self.gamma + self.width * (1 - 0.5 ** (1 / b)) ** (1 / a), self.width / max(a, b))]
        else:
            scale = self.width / p["beta"]
            centres = [
                (0.0, scale),
                (1.0, scale),
                (self.gamma + self.width * (0.5 - p["logits"] / 2 / p["beta"]), scale),
            ]
        found = {c + side * scale * 1.7**k for c, scale in centres for k in range(-2, 10) for side in (-1, 1)}
        return {x for x in found if 0 < x < 1}


def exact_kl(q, p):
    """KL of two textbook gates by adaptive integrals between their breakpoints; no term is negative."""

    def term(a, b):
        a = np.maximum(a, -1e4)  # a tail below the smallest number has no share
        return np.exp(a) * (a - b) - np.exp(a) + np.exp(b)

    steps = {*np.logspace(-5, -0.4, 9), *(1 - np.logspace(-5, -0.4, 9)), 0.5}
    edges = sorted({0.0, 1.0} | steps | q.breakpoints() | p.breakpoints())
    x, w = np.polynomial.legendre.leggauss(30)
    low, high = np.array(edges[:-1])[:, None], np.array(edges[1:])[:, None]
    z = (low + high) / 2 + (high - low) / 2 * x
    inside = ((high - low) / 2 * w * term(q.logs(z)[1], p.logs(z)[1])).sum()
    return term(q.logs(0.0)[0], p.logs(0.0)[0]) + term(q.logs(1.0)[2], p.logs(1.0)[2]) + inside


STRETCHES = ((-1e-3, 1.001), (-0.1, 1.1), (-1.0, 2.0), (-0.01, 5.0), (-10.0, 11.0), (-100.0, 101.0))


def moderate(family, generator):
    """A random gate; numbers that float32 holds, so that both types mean the same gate."""
    x, y, u = (float(v) for v in generator.random(3))
    gamma, zeta = STRETCHES[generator.integers(len(STRETCHES))]
    parameters = {
        HardConcrete: dict(log_alpha=8 * x - 4, temperature=0.05 * 400**y),
        RectifiedNormal: dict(loc=3 * x - 1, scale=0.01 * 1000**y),
        HardKumaraswamy: dict(concentration1=0.1 * 300**x, concentration0=0.1 * 300**y),
        ExponentialGate: dict(logits=8 * x - 4, beta=1.1 * 90**y),
        ExponentialUniformGate: dict(logits=8 * x - 4, beta=1.1 * 90**y, epsilon=0.01 + 0.8 * u),
        PowerLawGate: dict(logits=8 * x - 4, beta=1.1 * 90**y),
    }[family]
    parameters = {name: float(np.float32(value)) for name, value in parameters.items()}
    return Textbook(family, **parameters, **({} if family is RectifiedNormal else dict(gamma=gamma, zeta=zeta)))


FAMILIES = (HardConcrete, RectifiedNormal, HardKumaraswamy, ExponentialGate, ExponentialUniformGate, PowerLawGate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("first", "second"), list(product(FAMILIES, FAMILIES)), ids=lambda f: f.__name__)
def test_every_pair_over_any_stretch(first, second, dtype):
    """KLs of random pairs whose stretches reach from 1e-3 to 100 beyond the unit interval."""
    generator = np.random.default_rng(91)
    wrong = []
    for _ in range(12):
        q, p = moderate(first, generator), moderate(second, generator)
        expected = exact_kl(q, p)
        value = kl_divergence(q.gate(dtype), p.gate(dtype)).item()
        # float32 rounds log masses of some hundreds, and compares densities that may nearly coincide.
        relative, absolute = (1e-8, 1e-13) if dtype == torch.float64 else (1e-4, 2e-6)
        if not abs(value - expected) <= relative * abs(expected) + absolute:
            wrong.append((value, expected, q.parameters, q.limits, p.parameters, p.limits))
    assert not wrong, wrong


SHARP = [
    Textbook(HardConcrete, log_alpha=0.3 * b, temperature=b, gamma=-0.1, zeta=1.1) for b in (1e-3, 200.0, 1e4, 1e6)
]
SHARP += [Textbook(HardConcrete, log_alpha=0.004 * b, temperature=b, gamma=-100.0, zeta=101.0) for b in (1e3, 1e6)]
SHARP += [Textbook(RectifiedNormal, loc=0.3, scale=s) for s in (1e-4, 1e-2, 1e4)]
SHARP += [
    Textbook(HardKumaraswamy, concentration1=a, concentration0=b, gamma=-0.1, zeta=1.1)
    for a, b in ((1e3, 0.5), (3.0, 1e3), (1e3, 1e6), (1e6, 1e6), (2.0, 1e6))
]
SHARP += [Textbook(ExponentialGate, logits=0.1 * b, beta=b, gamma=-0.1, zeta=1.1) for b in (1e-2, 300.0, 1e4)]
SHARP += [Textbook(ExponentialUniformGate, logits=0.5, beta=b, epsilon=0.1, gamma=-0.1, zeta=1.1) for b in (300.0, 1e6)]
BROAD = [
    Textbook(HardConcrete, log_alpha=-1.0, temperature=0.75, gamma=-0.1, zeta=1.1),
    Textbook(RectifiedNormal, loc=0.5, scale=0.5),
]


@pytest.fixture
def few_nodes(monkeypatch):
    """Refuse rules whose nodes are an eigenproblem of any size."""
    original = np.polynomial.legendre.leggauss

    def limited(n):
        assert n <= 128, f"{n} nodes are asked for"
        return original(n)

    monkeypatch.setattr(np.polynomial.legendre, "leggauss", limited)


@pytest.mark.usefixtures("few_nodes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sharp", SHARP, ids=lambda x: f"{x.family.__name__}-{list(x.parameters.values())}")
def test_sharp_gates_cost_what_others_cost(sharp, dtype):
    """KLs either way round and all moments of sharp gates, at a number of nodes that does not grow with them."""
    gate = sharp.gate(dtype)
    for other in BROAD:
        # A few roundings of float32's parameters, which move a sharp density against a broad one by nothing.
        relative, absolute = (1e-7, 1e-12) if dtype == torch.float64 else (2e-4, 1e-6)
        value = kl_divergence(gate, other.gate(dtype)).item()
        rounded = Textbook(sharp.family, **{k: getattr(gate, k).item() for k in sharp.parameters}, **sharp.limits)
        assert value == pytest.approx(exact_kl(rounded, other), rel=relative, abs=absolute)
        back = kl_divergence(other.gate(dtype), gate)
        assert back.isfinite()
        assert back > 0
    for statistic in (gate.mean, gate.variance, gate.entropy()):
        assert statistic.isfinite()
    assert 0 <= gate.mean <= 1
    assert 0 <= gate.variance <= 0.25


@pytest.mark.usefixtures("few_nodes")
def test_moments_of_a_sharp_gate():
    """A density of hardly any width has its median for its mean and its width for its deviation."""
    temperature = 1e5
    gate = HardConcrete(torch.tensor(0.3 * temperature, dtype=torch.float64), temperature)
    torch.testing.assert_close(gate.mean, gate.median, rtol=1e-8, atol=0)
    slope = 1.2 * special.expit(0.3) * special.expit(-0.3) / temperature
    assert gate.variance.item() == pytest.approx(slope**2 * math.pi**2 / 3, rel=1e-6)
    assert gate.entropy().item() == pytest.approx(2 + math.log(slope), rel=1e-6)


@pytest.mark.usefixtures("few_nodes")
def test_a_batch_of_gates_of_every_sharpness():
    """One tensor of temperatures from 1e-3 to 1e6, with the gradient of each from differences."""
    temperature = torch.tensor([1e-3, 0.5, 20.0, 1e3, 1e6], dtype=torch.float64, requires_grad=True)
    p = RectifiedNormal(torch.tensor(0.5, dtype=torch.float64), 0.5)

    def value(t):
        return kl_divergence(HardConcrete(0.2 * t, t), p)

    (slopes,) = torch.autograd.grad(value(temperature).sum(), temperature)
    with torch.no_grad():
        step = 1e-4 * temperature
        differences = (value(temperature + step) - value(temperature - step)) / (2 * step)
    torch.testing.assert_close(slopes, differences, rtol=1e-5, atol=1e-10)


def test_rectified_normals_of_a_wide_scale_in_single_precision():
    """The moments of a wide normal between the atoms are small differences, which single precision loses."""
    for wide, narrow in product((50.0, 1e3, 1e4), (1e-3, 0.1)):
        q, p = Textbook(RectifiedNormal, loc=0.25, scale=wide), Textbook(RectifiedNormal, loc=0.75, scale=narrow)
        value = kl_divergence(q.gate(torch.float32), p.gate(torch.float32)).item()
        exact = kl_divergence(q.gate(torch.float64), p.gate(torch.float64)).item()
        assert value == pytest.approx(exact, rel=1e-5)
        assert exact == pytest.approx(exact_kl(q, p), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-4, 0.01, 1.0])
def test_any_base_over_any_stretch(scale):
    """A rectified base of any scale, which places its own panels, as the named family does."""
    loc = torch.tensor([0.3, 1.2], dtype=torch.float64)
    p = HardConcrete(torch.tensor(2.0, dtype=torch.float64), 0.5, -10.0, 11.0)
    general, named = Rectified(dist.Normal(loc, scale)), RectifiedNormal(loc, scale)
    torch.testing.assert_close(kl_divergence(general, p)[0], kl_divergence(named, p)[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(general.variance[0], named.variance[0], rtol=1e-9, atol=0)
