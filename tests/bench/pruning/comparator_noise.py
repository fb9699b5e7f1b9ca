"""Multiplicative noise of the comparators, with its divergence from its prior."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["LogNormals", "TruncatedLogNormal"]


class TruncatedLogNormal(nn.Module):
    """Multipliers whose log is normal within (-20, 0), under a log-uniform prior there (Neklyudov et al. 2017)."""

    low, high = -20.0, 0.0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.zeros(size))
        self.log_sigma = nn.Parameter(torch.full((size,), -5.0))

    def _ends(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Location, scale and the standardised ends, in double for their tails."""
        mu, sigma = self.mu.double(), self.log_sigma.double().exp()
        return mu, sigma, (self.low - mu) / sigma, (self.high - mu) / sigma

    def _log_mass(self, a: Tensor, b: Tensor) -> Tensor:
        """Log of the normal mass between two ends, from the nearer tail."""
        upper = a > 0
        low, high = torch.where(upper, -b, a), torch.where(upper, -a, b)
        near = torch.special.log_ndtr(high)
        return near + torch.log1p(-torch.exp((torch.special.log_ndtr(low) - near).clamp(max=-1e-12)))

    def rsample(self, shape: torch.Size) -> Tensor:
        """Draws, shape ``shape``, whose last dimension is the multipliers'."""
        mu, sigma, a, b = self._ends()
        upper = a > 0
        low, high = torch.special.ndtr(torch.where(upper, -b, a)), torch.special.ndtr(torch.where(upper, -a, b))
        p = torch.lerp(low.expand(shape), high.expand(shape), torch.rand(shape, dtype=torch.float64))
        e = torch.special.ndtri(p.clamp(1e-300, 1 - 1e-16))
        return torch.exp((mu + sigma * torch.where(upper, -e, e)).clamp(self.low, self.high)).float()

    def kl(self) -> Tensor:
        """KL to the log-uniform prior, one per multiplier."""
        _, sigma, a, b = self._ends()
        log_mass = self._log_mass(a, b)
        # The density at both ends over the mass, whose exponentials alone would be 0 / 0 far out.
        lower = a * torch.exp(-0.5 * a * a - log_mass)
        upper = b * torch.exp(-0.5 * b * b - log_mass)
        slope = (lower - upper) / (2 * math.sqrt(2 * math.pi))
        entropy = torch.log(sigma) + 0.5 * math.log(2 * math.pi * math.e) + log_mass + slope
        return (math.log(self.high - self.low) - entropy).float()

    def mean_and_snr(self) -> tuple[Tensor, Tensor]:
        """The mean, and the mean over the standard deviation."""
        mu, sigma, a, b = self._ends()
        log_mass = self._log_mass(a, b)
        first, second = (
            torch.exp(k * mu + 0.5 * (k * sigma) ** 2 + self._log_mass(a - k * sigma, b - k * sigma) - log_mass)
            for k in (1, 2)
        )
        deviation = (second - first**2).clamp(min=1e-30).sqrt()
        return first.float(), (first / deviation).float()


class LogNormals(nn.Module):
    r"""Log-normal posteriors under the two factors of squared half-Cauchy scales (Wand et al. 2011).

    :math:`\sqrt{ab}` is half-Cauchy of scale t for a ~ Gamma(1/2, scale t^2) and b ~ InverseGamma(1/2, 1).
    """

    def __init__(self, number: int, scale: float) -> None:
        super().__init__()
        self.log_rate = -2 * math.log(scale)
        # Logarithms cover a longer way than weights, so that they go ten times as far in a step of Adam.
        self.tenth_loc = nn.Parameter(0.1 * torch.tensor([[-self.log_rate], [0.0]]) + 0.001 * torch.randn(2, number))
        self.tenth_log_var = nn.Parameter(torch.full((2, number), -0.9))

    @property
    def loc(self) -> Tensor:
        """Means of the logarithms of the factors, shape ``(2, number)``."""
        return 10 * self.tenth_loc

    @property
    def log_var(self) -> Tensor:
        """Logarithms of the variances of these logarithms, shape ``(2, number)``."""
        return 10 * self.tenth_log_var

    def log_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the logarithms of the scales, each of shape ``(number,)``."""
        return self.loc.sum(0) / 2, self.log_var.exp().sum(0) / 4

    def kl(self) -> Tensor:
        """KL of the factors to their priors, shape ``(2, number)``; Louizos et al. (2017), appendix, derived anew."""
        # For the second factor 1 / b ~ Gamma(1/2, 1), and the logarithm of 1 / b has the opposite mean.
        mean = torch.stack([self.loc[0] + self.log_rate, -self.loc[1]])
        return (mean + self.log_var.exp() / 2).exp() - 0.5 * (mean + self.log_var + 1 + math.log(2))
