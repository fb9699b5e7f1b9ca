"""Averaged weights: what a run is measured by and what it saves."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["AVERAGE_POWER", "Average"]

AVERAGE_POWER = 9


class Average:
    """Averaged parameters of one module in another of the same shape, listed once and not per step.

    Polynomial-decay averaging with power k = 9: step t enters with a weight of (k + 1) / (t + k), so that the average
    reaches back over about a tenth of the steps taken, however many they are, or over fewer if a weight has a floor.

    Args:
        averaged: holds the averages.
        module: the module.
        steps: steps that the averages hold already.
        floor: least weight of a step.

    References:
        Shamir, Zhang (2013), arXiv:1212.1824.
    """

    def __init__(self, averaged: nn.Module, module: nn.Module, steps: int = 0, floor: float = 0.0) -> None:
        self.pair = list(averaged.parameters()), list(module.parameters())
        self.steps = steps
        self.floor = floor

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters."""
        self.steps += 1
        weight = max((AVERAGE_POWER + 1) / (self.steps + AVERAGE_POWER), self.floor)
        torch._foreach_lerp_(*self.pair, weight)
