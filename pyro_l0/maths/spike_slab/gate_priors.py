"""Priors of binary gates, for samplers of gates."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class GatePrior(Protocol):
    """Prior of gate vectors z of zeros and ones, shape ``(S, G)``."""

    active_prob: Tensor  # P(z = 1) of each gate alone, shape (G,) or one for all of them

    def logits(self, z: Tensor) -> Tensor:
        """Log odds that a gate is open, given the others; broadcasts against z."""
        ...

    def log_prob(self, z: Tensor) -> Tensor:
        """Log probability of each vector, shape ``(S,)``."""
        ...


class IndependentGates:
    """Gates that are open independently of one another, with log odds of shape ``(G,)`` or one for all."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.active_prob = torch.sigmoid(logits)

    def logits(self, z: Tensor) -> Tensor:
        """See :class:`GatePrior`."""
        return self._logits

    def log_prob(self, z: Tensor) -> Tensor:
        """See :class:`GatePrior`."""
        # Chosen rather than multiplied: a gate that is always open has infinite log odds.
        return torch.where(z > 0, F.logsigmoid(self._logits), F.logsigmoid(-self._logits)).sum(-1)


class BetaBinomialGates:
    """Gates that are open with a common probability, which is Beta(alpha, beta) and summed out."""

    def __init__(self, alpha: float, beta: float) -> None:
        if not (0 < alpha < math.inf and 0 < beta < math.inf):
            raise ValueError(f"Expected alpha and beta to be positive and finite, but got {alpha} and {beta}.")
        self.alpha, self.beta = alpha, beta
        self.active_prob = torch.tensor(alpha / (alpha + beta), dtype=torch.float64)

    def logits(self, z: Tensor) -> Tensor:
        """See :class:`GatePrior`."""
        z = _numbers(z)
        others = z.sum(-1, keepdim=True) - z
        return torch.log(self.alpha + others) - torch.log(self.beta + (z.shape[-1] - 1 - others))

    def log_prob(self, z: Tensor) -> Tensor:
        """See :class:`GatePrior`."""
        count = _numbers(z).sum(-1)
        total = torch.lgamma(self.alpha + count) + torch.lgamma(self.beta + (z.shape[-1] - count))
        constant = math.lgamma(self.alpha) + math.lgamma(self.beta) - math.lgamma(self.alpha + self.beta)
        return total - math.lgamma(self.alpha + self.beta + z.shape[-1]) - constant


def _numbers(z: Tensor) -> Tensor:
    """Gates that may be bool, as numbers whose log gamma is accurate."""
    return z if z.is_floating_point() else z.double()
