"""The Kumaraswamy distribution on (0, 1).

Its survival function is (1 - s^a)^b. ``log_s`` is log s, from whichever end is nearer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_l0.maths.special import log1mexp

_SMALL = -40.0  # log of a number that is lost beside 1


def log_above(log_s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Log of the survival function."""
    return b * log1mexp(-a * log_s)


def log_below(log_s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Log of the cdf."""
    log_power = a * log_s
    first = torch.log(b) + log_power
    # b s^a to rounding, where s^a itself would underflow.
    small = (log_power < _SMALL) & (first < _SMALL)
    return torch.where(small, first, log1mexp(-b * log1mexp(-torch.where(small, _SMALL, log_power))))


def log_between(log_low: Tensor, log_high: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Log of the mass between two points."""
    above = log_above(log_low, a, b)
    return above + log1mexp(above - log_above(log_high, a, b))


def log_density(log_s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Log density."""
    return torch.log(a) + torch.log(b) + (a - 1) * log_s + (b - 1) * log1mexp(-a * log_s)


def quantile_of_exponential(e: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """log s at a survival function of exp(-e), which is the quantile of a unit exponential e's probability."""
    return log1mexp((e / b).clamp(min=torch.finfo(e.dtype).tiny)) / a
