"""Ordered classes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pyro.distributions import constraints
from scipy.special import expit
from torch import Tensor
from torch.distributions import Distribution

from pyro_l0.selection.families.family import Array, Family
from pyro_l0.selection.families.polya_gamma import draw_polya_gamma

__all__ = ["Ordinal"]


class _Thresholds(Distribution):
    """Increasing thresholds c of which P(class <= k) = sigmoid(c_k) has class probabilities of Dirichlet(1, ..., 1)."""

    arg_constraints = {}  # noqa: RUF012  as torch declares it
    support = constraints.ordered_vector

    def __init__(self, number: int) -> None:
        super().__init__(event_shape=torch.Size([number]), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        each = F.logsigmoid(value) + F.logsigmoid(-value)
        return each.sum(-1) + math.lgamma(value.shape[-1] + 1)


class Ordinal(Family):
    """Class numbers from 0 to C - 1 with P(y <= k) = sigmoid(threshold_k - eta).

    At eta = 0, all vectors of class probabilities have the same prior density.
    """

    expected = "whole numbers from 0"
    slab_unit = 2.0
    is_augmented = True
    has_intercept = False  # the thresholds are one

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def takes(self, y: Array) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = (y >= 0) & (y < self.classes) & (y == np.floor(y))
        return fits

    def priors(self, y: Tensor, unit: float) -> Mapping[str, Distribution]:
        return {"thresholds": _Thresholds(self.classes - 1)}

    def start(self, y: Tensor, weight: Tensor, unit: float) -> Mapping[str, Tensor]:
        """With half an observation more of each class."""
        below = (y.long().bincount(weight, minlength=self.classes) + 0.5).cumsum(0)
        return {"thresholds": torch.logit(below[:-1] / below[-1])}

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        lower, upper = _odds(y, eta, parameters["thresholds"])
        return F.logsigmoid(upper) + F.logsigmoid(-lower)

    def log_constant(self, y: Tensor, **parameters: Tensor) -> Tensor:
        # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)), which is stable in both tails.
        gaps = F.pad(parameters["thresholds"].diff(dim=-1), (1, 1), value=math.inf)
        return (-(-gaps[..., 0, :]).expm1()).log()[..., y.long()]

    def derivatives(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = _odds(y, eta, parameters["thresholds"])
        slope = torch.sigmoid(lower) - torch.sigmoid(-upper)
        curvature = sum((torch.sigmoid(x) * torch.sigmoid(-x) for x in (lower, upper)), torch.zeros_like(eta))
        return slope, curvature

    def augmented(
        self, y: Tensor, eta: Tensor, generator: torch.Generator, **parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """By a Polya-Gamma variable of each of two logits; an infinite one is no part of the log density."""
        odds = torch.stack(_odds(y, eta, parameters["thresholds"]))
        finite, weight = odds.isfinite(), torch.zeros_like(odds)
        weight[finite] = draw_polya_gamma(odds[finite], generator)
        half = odds.new_tensor([0.5, -0.5])[:, None, None]
        return torch.where(finite, half + weight * (odds + eta), 0.0).sum(0), weight.sum(0)

    def null_predictor(self, y: Tensor, weight: Tensor) -> Tensor:
        return y.new_zeros(1)

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        latent = eta + random.logistic(size=eta.shape)
        return np.asarray((latent[..., None] > parameters["thresholds"]).sum(-1), dtype=np.float64)

    def mean(self, eta: Array, **parameters: Array) -> Array:
        below = expit(parameters["thresholds"] - eta[..., None])
        return np.diff(below, axis=-1, prepend=0.0, append=1.0)


def _odds(y: Tensor, eta: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Log odds of less than each observation's class, and of no more than it."""
    cuts = F.pad(F.pad(thresholds[..., 0, :], (1, 0), value=-math.inf), (0, 1), value=math.inf)
    lower, upper = (cuts[..., y.long() + i] - eta for i in (0, 1))
    return lower, upper
