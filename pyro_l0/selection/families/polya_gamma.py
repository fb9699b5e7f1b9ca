"""Polya-Gamma variables, given which logistic log likelihoods are quadratic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["draw_polya_gamma"]

_CUT = 0.64  # where the two parts of the proposal meet
_LEVY = 0.5 * math.erfc(1 / math.sqrt(2 * _CUT))  # half of the probability that a Levy variable is below the cut
_SMALL = -math.log(2 * _LEVY)  # half tilts up to which Levy variables are the tighter proposal


def draw_polya_gamma(tilt: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Exact draws of PG(1, tilt), in the shape of the tilts.

    Devroye's rejection sampler as in Polson, Scott and Windle (2013), arXiv:1205.0310, section 4, with one difference:
    what is proposed below the cut is not truncated beforehand, but rejected with the rest.
    """
    half = 0.5 * tilt.abs().flatten()
    drawn = torch.empty_like(half)
    everyone = torch.arange(len(half), device=half.device)
    is_small = half < _SMALL
    for part, is_levy in ((everyone[is_small], True), (everyone[~is_small], False)):
        left = part
        while len(left):
            x, accepted = _proposed(half[left], is_levy, generator)
            drawn[left[accepted]] = 0.25 * x[accepted]
            left = left[~accepted]
    return drawn.view_as(tilt)


def _proposed(half: Tensor, is_levy: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Proposals for J*(1, half), and which of them are accepted; below the cut, Levy or inverse Gaussian ones.

    The density is an alternating series sum (-1)^n a_n(x), times exp(-half^2 x / 2) up to a constant. Its first term is
    the proposal: above the cut an exponential of rate pi^2 / 8 + half^2 / 2 (``rate``), with the mass ``above``; below
    it an inverse Gaussian of mean 1 / half and shape 1, of mass 2 exp(-half), or a Levy variable that is below the cut,
    with exp(-half^2 x / 2) as a part of the acceptance. ``share`` is the series over its first term, with the terms (2
    n + 1) exp(-n (n + 1) pi^2 x / 2) above and (2 n + 1) exp(-2 n (n + 1) / x) below the cut. The densities are those
    of section 4 of Polson, Scott and Windle.
    """
    part, place, level = torch.rand(3, len(half), generator=generator, dtype=half.dtype, device=half.device)
    rate = 0.125 * math.pi**2 + 0.5 * half.square()
    above = 0.5 * math.pi / rate * (-_CUT * rate).exp()
    below = half.new_full((1,), 4 * _LEVY) if is_levy else 2 * (-half).exp()
    is_above = part * (above + below) < above
    exponential = _CUT - place.log() / rate
    if is_levy:
        x = torch.where(is_above, exponential, torch.special.ndtri(_LEVY * place).square().reciprocal())
    else:
        normal = torch.randn(len(half), generator=generator, dtype=half.dtype, device=half.device)
        mean = 1 / half
        spread = 0.5 * mean * normal.square()
        smaller = mean / (1 + spread + (spread * (2 + spread)).sqrt())
        x = torch.where(place * (mean + smaller) > mean, mean.square() / smaller, smaller)
        x = torch.where(is_above, exponential, x)
    # An alternating series; the next term is below 1e-15 of the first.
    exponent = torch.where(x > _CUT, 0.5 * math.pi**2 * x, 2 / x)
    share = 1 - 3 * (-2 * exponent).exp() + 5 * (-6 * exponent).exp()
    if is_levy:
        share = torch.where(is_above, share, share * (-0.5 * half.square() * x).exp())
    return x, (level < share) & (is_above | (x <= _CUT))
