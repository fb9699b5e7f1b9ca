"""Likelihoods of observations given their linear predictors."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.selection.problem import Problem

__all__ = ["Likelihood", "likelihood_of"]


class Likelihood(Protocol):
    """Of n observations with K linear predictors each."""

    def value(self, eta: Tensor) -> Tensor:
        """Log likelihood, shape ``(s,)``, of linear predictors of shape ``(s, n, K)``."""
        ...

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The slope, shape ``(s, n, K)``, and minus the second derivatives, shape ``(s, n, K, K)``."""
        ...

    def trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        """Derivatives by eta of the trace of (minus the second derivatives) times covariance, shape ``(s, n, K)``.

        The covariance is that of the linear predictors of each observation, shape ``(s, n, K, K)``.
        """
        ...


class BernoulliLikelihood:
    """Logits eta of observations 0 and 1, shape ``(n,)``, with weights of shape ``(n, 1)``."""

    def __init__(self, y: Tensor, weight: Tensor) -> None:
        self._y, self._weight = y[:, None], weight

    def value(self, eta: Tensor) -> Tensor:
        return (self._weight * (self._y * eta - F.softplus(eta))).sum((1, 2))

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        prob = torch.sigmoid(eta)
        return self._weight * (self._y - prob), (self._weight * prob * torch.sigmoid(-eta))[..., None]

    def trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        prob = torch.sigmoid(eta)
        return self._weight * prob * (1 - prob) * (1 - 2 * prob) * covariance[..., 0]


class CategoricalLikelihood:
    """Logits eta of K classes; observations are the numbers of classes, shape ``(n,)``; weights as above."""

    def __init__(self, y: Tensor, weight: Tensor, classes: int) -> None:
        self._hot, self._weight = weight * F.one_hot(y.long(), classes), weight

    def value(self, eta: Tensor) -> Tensor:
        return eta.flatten(-2) @ self._hot.flatten() - _by_class(eta).logsumexp(0) @ self._weight[:, 0]

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        prob = _by_class(eta).softmax(0)
        weighted = self._weight[:, 0] * prob
        eye = torch.eye(len(prob)).to(prob)[:, :, None, None]
        curvature = weighted * eye - weighted[:, None] * prob
        return self._hot - weighted.movedim(0, 2), curvature.movedim((0, 1), (2, 3))

    def trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        prob = eta.softmax(2)
        by_prob = covariance.diagonal(dim1=2, dim2=3) - 2 * (covariance @ prob[..., None])[..., 0]
        return self._weight * prob * (by_prob - (prob * by_prob).sum(2, keepdim=True))


def _by_class(eta: Tensor) -> Tensor:
    """With the classes first: reductions over a short last axis take ten times as long."""
    return eta.movedim(-1, 0).contiguous()


class PoissonLikelihood:
    """Logs eta of the means of counts, shape ``(n,)``; weights as above."""

    def __init__(self, y: Tensor, weight: Tensor) -> None:
        self._y, self._weight = y[:, None], weight
        self._constant = (weight[:, 0] * torch.lgamma(y + 1)).sum()

    def value(self, eta: Tensor) -> Tensor:
        return (self._weight * (self._y * eta - eta.exp())).sum((1, 2)) - self._constant

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        mean = eta.exp()
        return self._weight * (self._y - mean), (self._weight * mean)[..., None]

    def trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        return self._weight * eta.exp() * covariance[..., 0]


def likelihood_of(problem: Problem) -> Likelihood:
    """The likelihood of a problem that is not Gaussian."""
    y = problem.y
    weight = (torch.ones_like(y) if problem.weight is None else problem.weight)[:, None]
    if problem.family == "categorical":
        return CategoricalLikelihood(y, weight, problem.outputs)
    return BernoulliLikelihood(y, weight) if problem.family == "bernoulli" else PoissonLikelihood(y, weight)
