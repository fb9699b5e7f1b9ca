"""Labels of several classes."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from pyro_l0.selection.families.family import Array, Family

__all__ = ["Categorical"]


class Categorical(Family):
    """Numbers of classes from 0, whose logits are the K linear predictors."""

    expected = "whole numbers from 0"
    slab_unit = 2.0
    has_outputs = True

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs

    def takes(self, y: Array) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = (y >= 0) & (y < self.outputs) & (y == np.floor(y))
        return fits

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        own = eta[..., torch.arange(len(y)), y.long()]
        return own - _by_class(eta).logsumexp(0)

    def slope(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        return F.one_hot(y.long(), self.outputs) - _by_class(eta).softmax(0).movedim(0, -1)

    def derivatives(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        prob = _by_class(eta).softmax(0)
        eye = torch.eye(self.outputs).to(prob).view(self.outputs, self.outputs, *[1] * (prob.dim() - 1))
        curvature = prob * eye - prob[:, None] * prob
        slope = F.one_hot(y.long(), self.outputs) - prob.movedim(0, -1)
        return slope, curvature.movedim((0, 1), (-2, -1))

    def curvature_slope(self, y: Tensor, eta: Tensor, covariance: Tensor, **parameters: Tensor) -> Tensor:
        prob = eta.softmax(-1)
        by_prob = covariance.diagonal(dim1=-2, dim2=-1) - 2 * (covariance @ prob[..., None])[..., 0]
        return prob * (by_prob - (prob * by_prob).sum(-1, keepdim=True))

    def null_predictor(self, y: Tensor, weight: Tensor) -> Tensor:
        """With half an observation more of each class."""
        log_counts = (y.long().bincount(weight, minlength=self.outputs) + 0.5).log()
        return log_counts - log_counts.mean()

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        # The largest of the predictors with Gumbel noise has the probabilities of the softmax.
        return np.asarray(np.argmax(eta + random.gumbel(size=eta.shape), axis=-1), dtype=np.float64)

    def mean(self, eta: Array, **parameters: Array) -> Array:
        probs: Array = softmax(eta, axis=-1)
        return probs


def _by_class(eta: Tensor) -> Tensor:
    """With the classes first: reductions over a short last axis take ten times as long."""
    return eta.movedim(-1, 0).contiguous()
