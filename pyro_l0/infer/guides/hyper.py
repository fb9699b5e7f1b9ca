"""The posterior of a model's other latent variables, beside gates and slabs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_START = 0.2  # standard deviation on the real line


class HyperPosterior(nn.Module):
    """A Gaussian of full covariance on the real line, whose mean is at ``start`` first, shape ``(d,)``."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.loc = nn.Parameter(start.clone())
        self.log_scale = nn.Parameter(torch.full_like(start, math.log(_START)))
        self.coupling = nn.Parameter(start.new_zeros(len(start), len(start)))

    def draw(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiable draws, with mean and deviation of each entry given those before it; shapes ``(n, d)``."""
        scale = self.log_scale.exp()
        noise = torch.randn(n, len(self.loc), dtype=scale.dtype, device=scale.device)
        means = self.loc + noise @ self.coupling.tril(-1).mT
        return means + scale * noise, means, scale.expand_as(noise)
