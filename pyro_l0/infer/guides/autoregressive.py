"""Posteriors of entries that depend on those before them: binary gates, and Gaussians of the other latents."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_START = 0.2  # standard deviation of the other latents on the real line


class GateChain(nn.Module):
    r"""Log odds of gates given the gates before them and other latents: :math:`a_j + \sum_{k<j} B_{jk} z_k + U_j^T t`.

    A posterior of this form puts its probability on sets of gates: of two features that stand for each other it opens
    one or the other. The parameters :math:`a` are a guide's own, by site; :math:`t` is the other latents' distance from
    where they started. Without B (``coupled``) the gates are independent given the other latents.
    """

    def __init__(self, size: int, hyper: int, coupled: bool, like: Tensor) -> None:
        super().__init__()
        self.coupling = nn.Parameter(like.new_zeros(size, size)) if coupled else None
        self.tilt = nn.Parameter(like.new_zeros(size, hyper)) if hyper else None

    def log_odds(self, base: Tensor, gates: Tensor, hyper: Tensor) -> Tensor:
        """Log odds of each gate given those before it, shape ``(n, size)`` as z; a has shape ``(size,)``."""
        odds = base.expand_as(gates)
        if self.tilt is not None:
            odds = odds + hyper @ self.tilt.mT
        return odds if self.coupling is None else odds + gates @ self.coupling.tril(-1).mT

    @torch.no_grad()
    def sample(self, base: Tensor, hyper: Tensor) -> Tensor:
        """Gates, one after the other, shape ``(n, size)`` for other latents of shape ``(n, hyper)``."""
        noise = torch.rand(len(hyper), len(base), dtype=base.dtype, device=base.device).logit()
        start = self.log_odds(base, torch.zeros_like(noise), hyper)
        if self.coupling is None:
            return (noise < start).to(base.dtype)
        gates = torch.zeros_like(noise)
        for j, row in enumerate(self.coupling.detach()):
            gates[:, j] = noise[:, j] < start[:, j] + gates[:, :j] @ row[:j]
        return gates


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
