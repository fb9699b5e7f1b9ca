"""The rectified normal: a = -loc / scale and b = (1 - loc) / scale are its atoms on the standard normal's axis."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_l0.maths.quadrature import Rule
from pyro_l0.maths.special import (
    LOG_2PI,
    SQRT_2,
    log1mexp,
    log_ndtr,
    ndtr,
    positive_part_mean,
    standard_normal_density,
)


def _reflect(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The interval (a, b) or its mirror image, whichever has a + b <= 0, and whether it was mirrored."""
    mirrored = a + b > 0
    return torch.where(mirrored, -b, a), torch.where(mirrored, -a, b), mirrored


def log_interior_prob(loc: Tensor, scale: Tensor) -> Tensor:
    """log P(0 < z < 1), to rounding for narrow, wide and far normals, broadcast."""
    a, b, _ = _reflect(-loc / scale, (1 - loc) / scale)
    # A wide scale makes the interval narrow, and a difference of its ends' probabilities cancels; there a series of the
    # density about the middle x: the integral over a width w is w phi(x) (1 + w^2 / 24 He_2(x) + w^4 / 1920 He_4(x)),
    # with Hermite's polynomials He_2 = x^2 - 1 and He_4 = x^4 - 6 x^2 + 3, as the derivatives of phi are these times
    # phi; m is x^2. The terms left out are below (middle * width)^6 / 322560.
    middle, width = (0.5 - loc) / scale, 1 / scale
    narrow = width * middle.abs().clamp(min=1.0) < (0.01 if a.dtype == torch.float64 else 0.1)
    m, w = torch.where(narrow, middle, 0.0).square(), torch.where(narrow, width, 0.01)
    series = w.square() / 24 * (m - 1) + w.square().square() / 1920 * (m * m - 6 * m + 3)
    about_middle = torch.log(w) + torch.log1p(series) - 0.5 * (m + LOG_2PI)
    a, b = torch.where(narrow, -1.0, a), torch.where(narrow, 1.0, b)
    tail = b < 0.5
    a_tail, b_tail = torch.where(tail, a, -2.0), torch.where(tail, b, -1.0)
    log_b = log_ndtr(b_tail)
    in_tail = log_b + log1mexp(log_b - log_ndtr(a_tail))
    a_centre, b_centre = torch.where(tail, -1.0, a), torch.where(tail, 1.0, b)
    centre = torch.log(0.5 * (torch.erf(b_centre / SQRT_2) - torch.erf(a_centre / SQRT_2)))
    return torch.where(narrow, about_middle, torch.where(tail, in_tail, centre))


def mean(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """E[z] and E[1 - z], each with full relative accuracy."""
    a, b = -loc / scale, (1 - loc) / scale
    mean = scale * (positive_part_mean(-a) - positive_part_mean(-b))
    co_mean = scale * (positive_part_mean(b) - positive_part_mean(a))
    # The larger of the two is one minus the smaller, whose derivative does not cancel.
    low = loc < 0.5
    return torch.where(low, mean, 1 - co_mean), torch.where(low, 1 - mean, co_mean)


def moments(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrals of 1, e and e^2 against the standard normal density over (a, b)."""
    a, b = -loc / scale, (1 - loc) / scale
    m0 = torch.exp(log_interior_prob(loc, scale))
    density_a, density_b = standard_normal_density(a), standard_normal_density(b)
    return m0, density_a - density_b, m0 + a * density_a - b * density_b


def variance(loc: Tensor, scale: Tensor, rule: Rule) -> Tensor:
    """Var[z] as a sum of non-negative terms; the interior by the given rule where the density lives."""
    a, b = -loc / scale, (1 - loc) / scale
    centre, co_centre = mean(loc, scale)
    # Where the interval lies in a tail, the mass sits within 8 units of the edge that is nearer the centre.
    low = torch.maximum(a, torch.clamp(b - 8, max=-8.5))
    high = torch.minimum(b, torch.clamp(a + 8, min=8.5))
    x, w = rule
    half = (0.5 * (high - low)).unsqueeze(-1)
    e = (0.5 * (low + high)).unsqueeze(-1) + half * x
    z = loc.unsqueeze(-1) + scale.unsqueeze(-1) * e
    m, m_bar = centre.unsqueeze(-1), co_centre.unsqueeze(-1)
    distance = torch.where(m < 0.5, z - m, m_bar - (1 - z))
    interior = (half * w * standard_normal_density(e) * distance.square()).sum(-1)
    return ndtr(a) * centre.square() + ndtr(-b) * co_centre.square() + interior


def kl(loc_q: Tensor, scale_q: Tensor, loc_p: Tensor, scale_p: Tensor) -> Tensor:
    """KL of two rectified normals in closed form, from the truncated moments of q.

    Its absolute error is a few roundings of its largest term; a relative one would need quadrature where q and p
    nearly coincide.
    """
    m0, m1, m2 = moments(loc_q, scale_q)
    r, k = scale_q / scale_p, (loc_q - loc_p) / scale_p
    interior = -m0 * torch.log(r) + 0.5 * ((r * r - 1) * m2 + 2 * r * k * m1 + k * k * m0)
    log_q_zero = log_ndtr(-loc_q / scale_q)
    log_p_zero = log_ndtr(-loc_p / scale_p)
    log_q_one = log_ndtr((loc_q - 1) / scale_q)
    log_p_one = log_ndtr((loc_p - 1) / scale_p)
    atoms = torch.exp(log_q_zero) * (log_q_zero - log_p_zero) + torch.exp(log_q_one) * (log_q_one - log_p_one)
    return atoms + interior


def log_density(z: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """Log density of the normal at z with respect to dz, in nats, broadcast."""
    e = (z - loc) / scale
    return -0.5 * (e * e + LOG_2PI) - torch.log(scale)


def entropy(loc: Tensor, scale: Tensor) -> Tensor:
    """Entropy with respect to the mixed measure; it may be negative."""
    log_zero, log_one = log_ndtr(-loc / scale), log_ndtr((loc - 1) / scale)
    m0, _, m2 = moments(loc, scale)
    interior = m0 * (torch.log(scale) + 0.5 * LOG_2PI) + 0.5 * m2
    return interior - torch.exp(log_zero) * log_zero - torch.exp(log_one) * log_one
