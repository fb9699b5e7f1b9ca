"""Likelihoods of observations given their linear predictors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import reduce
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.second_order import DenseQuadratic, Point, Quadratic, Step, maximise, quadratic_of
from pyro_l0.selection.methods.gaussian_evidence import smallest_noise
from pyro_l0.selection.problem import PARTIAL, Family, Prior, Problem

__all__ = ["CoxLikelihood", "Likelihood", "likelihood_of", "weighted_design"]


def weighted_design(curvature: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Roots R of curvatures, shape ``(n, K, K)``, and R' X by features of shape ``(n, p)``, shape ``(n K, p K)``."""
    values, vectors = torch.linalg.eigh(curvature)
    root = vectors * values.clamp(min=0).sqrt()[:, None, :]
    return root, torch.einsum("nki,nj->nijk", root, x).reshape(root.shape[0] * root.shape[1], -1)


# The least curvature by a parameter that steps divide by, and the gain below which a search ends.
_FLAT, _GAIN = 0.05, 1e-5


class Likelihood(ABC):
    """Of n observations with K linear predictors each, and with d parameters of its own.

    Attributes:
        theta: the parameters on the whole line, shape ``(s, d)``, or ``(1, d)`` for all predictors; by default none.
        reach: by how much a Newton step may change a linear predictor.
    """

    theta: Tensor = torch.zeros(1, 0, dtype=torch.float64)
    reach = 3.0

    @abstractmethod
    def value(self, eta: Tensor) -> Tensor:
        """Log likelihood, shape ``(..., s)``, of linear predictors of shape ``(..., s, n, K)``."""

    @abstractmethod
    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The slope by eta, shape ``(s, n, K)``, and minus the second derivatives, shape ``(s, n, K, K)``.

        Where the likelihood does not add over observations, these are at least minus the second derivatives: the
        difference is positive semidefinite. Where it is not concave, they are their expectation.
        """

    def slope(self, eta: Tensor) -> Tensor:
        """The first result above, without a matrix of each observation."""
        return self.derivatives(eta)[0]

    @abstractmethod
    def second_order(self, columns: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The slope, and minus the second derivatives by the coefficients of some features.

        The features have the shape ``(s, m, n)``, and the second result the shape ``(s, m, K, m, K)``.
        """

    @abstractmethod
    def trace_slope(self, columns: Tensor, eta: Tensor, covariance: Tensor) -> Tensor:
        """Derivatives by eta of the trace of the second result above times a covariance of the coefficients.

        The covariance has the shape ``(s, m, K, m, K)``, and the derivatives have that of eta.
        """

    def quadratic(self, x: Tensor, eta: Tensor) -> Quadratic:
        """Its second derivatives by the coefficients of features x, shape ``(n, p)``, on average over s sets of eta."""
        columns = weighted_design(self.derivatives(eta)[1].mean(0), x)[1].T
        return quadratic_of(columns, columns.new_zeros(len(columns)))

    def log_prior(self) -> Tensor:
        """Log density of theta, shape ``(s,)``."""
        return self.theta.new_zeros(len(self.theta))

    def named(self) -> dict[str, Tensor]:
        """What theta stands for, as users know it: each of shape ``(s,)`` or ``(s, K)``."""
        return {}

    def at(self, theta: Tensor) -> Self:
        """The same with other parameters."""
        found = copy(self)
        found.theta = theta
        return found

    def fitted(self, eta: Tensor) -> Self:
        """The same at the mode of theta given each of s sets of linear predictors, shape ``(s, n, K)``."""

        def value_at(point: Point) -> Tensor:
            there = self.at(point[0])
            return there.value(eta) + there.log_prior()

        def step_from(point: Point, value: Tensor) -> Step:
            slope, curvature = self.at(point[0])._by_theta(eta)
            move = torch.linalg.solve(curvature, slope)
            gain = (slope * move).sum(1)
            return Step((move,), gain, gain < _GAIN, curvature)

        start = self.theta.expand(len(eta), -1)
        return self.at(maximise(value_at, step_from, (start,))[0][0] if start.shape[1] else start)

    def spread(self, eta: Tensor) -> Tensor:
        """The root of the inverse of the curvature by theta, on average over s sets, shape ``(d, d)``."""
        d = self.theta.shape[1]
        curvature = self._by_theta(eta)[1].mean(0) if d else self.theta.new_zeros(0, 0)
        found: Tensor = torch.linalg.inv(torch.linalg.cholesky(curvature))
        return found

    @torch.enable_grad()
    def _by_theta(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The slope of log likelihood and prior, shape ``(s, d)``, and minus its second derivatives, made positive."""
        theta = self.theta.detach().expand(len(eta), -1).clone().requires_grad_()
        there = self.at(theta)
        (slope,) = torch.autograd.grad((there.value(eta) + there.log_prior()).sum(), theta, create_graph=True)
        rows = [torch.autograd.grad(part.sum(), theta, retain_graph=True)[0] for part in slope.unbind(1)]
        sizes, vectors = torch.linalg.eigh(-torch.stack(rows, 1))
        return slope.detach(), (vectors * sizes.clamp(min=_FLAT)[:, None, :]) @ vectors.mT


class IndependentLikelihood(Likelihood):
    """One that adds over observations."""

    def second_order(self, columns: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        slope, weights = self.derivatives(eta)
        s, m, _ = columns.shape
        outputs = eta.shape[2]
        curvature = columns.new_empty(s, m, outputs, m, outputs)
        for a in range(outputs):
            for b in range(a + 1):
                part = (columns * weights[:, None, :, a, b]) @ columns.mT
                curvature[:, :, a, :, b] = curvature[:, :, b, :, a] = part
        return slope, curvature

    def trace_slope(self, columns: Tensor, eta: Tensor, covariance: Tensor) -> Tensor:
        rows = columns.mT[:, None, None]
        by_output = covariance.movedim((2, 4), (1, 2))
        return self._trace_slope(eta, ((rows @ by_output) * rows).sum(4).movedim(3, 1))

    def _trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        """The same from the covariance of the linear predictors of each observation, shape ``(s, n, K, K)``.

        With parameters of its own, a likelihood has no Laplace evidence, which needs it.
        """
        raise NotImplementedError


class BernoulliLikelihood(IndependentLikelihood):
    """Logits eta of observations 0 and 1, or of shares of ones, shape ``(n,)``, with weights of shape ``(n, 1)``."""

    def __init__(self, y: Tensor, weight: Tensor) -> None:
        self._y, self._weight = y[:, None], weight

    def value(self, eta: Tensor) -> Tensor:
        return (self._weight * (self._y * eta - F.softplus(eta))).sum((-2, -1))

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        prob = torch.sigmoid(eta)
        return self._weight * (self._y - prob), (self._weight * prob * torch.sigmoid(-eta))[..., None]

    def _trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        prob = torch.sigmoid(eta)
        return self._weight * prob * (1 - prob) * (1 - 2 * prob) * covariance[..., 0]


class CategoricalLikelihood(IndependentLikelihood):
    """Logits eta of K classes; observations are the numbers of classes, shape ``(n,)``; weights as above."""

    def __init__(self, y: Tensor, weight: Tensor, classes: int) -> None:
        self._hot, self._weight = weight * F.one_hot(y.long(), classes), weight

    def value(self, eta: Tensor) -> Tensor:
        return eta.flatten(-2) @ self._hot.flatten() - _by_class(eta).logsumexp(0) @ self._weight[:, 0]

    def slope(self, eta: Tensor) -> Tensor:
        return self._hot - (self._weight[:, 0] * _by_class(eta).softmax(0)).movedim(0, 2)

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        prob = _by_class(eta).softmax(0)
        weighted = self._weight[:, 0] * prob
        eye = torch.eye(len(prob)).to(prob)[:, :, None, None]
        curvature = weighted * eye - weighted[:, None] * prob
        return self._hot - weighted.movedim(0, 2), curvature.movedim((0, 1), (2, 3))

    def _trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        prob = eta.softmax(2)
        by_prob = covariance.diagonal(dim1=2, dim2=3) - 2 * (covariance @ prob[..., None])[..., 0]
        return self._weight * prob * (by_prob - (prob * by_prob).sum(2, keepdim=True))


def _by_class(eta: Tensor) -> Tensor:
    """With the classes first: reductions over a short last axis take ten times as long."""
    return eta.movedim(-1, 0).contiguous()


class PoissonLikelihood(IndependentLikelihood):
    """Logs eta of the means of counts, shape ``(n,)``; weights as above."""

    def __init__(self, y: Tensor, weight: Tensor) -> None:
        self._y, self._weight = y[:, None], weight
        self._constant = (weight[:, 0] * torch.lgamma(y + 1)).sum()

    def value(self, eta: Tensor) -> Tensor:
        return (self._weight * (self._y * eta - eta.exp())).sum((-2, -1)) - self._constant

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        mean = eta.exp()
        return self._weight * (self._y - mean), (self._weight * mean)[..., None]

    def _trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        return self._weight * eta.exp() * covariance[..., 0]


_FORMED, _AVERAGED = 1000, 8  # features whose second derivatives are formed, and for how many sets of predictors
_LARGEST = 700.0  # exponents, beyond which derivatives are too small: of predictors that differ by more


class CoxLikelihood(Likelihood):
    r"""Log partial likelihood of survival times, with Breslow's or Efron's way with ties.

    The total of each of E events is over those who were at risk,

    .. math:: S_k = \sum_i a_{ki} \exp(\eta_i), \qquad \log L = \sum_k (\eta_k - \log S_k),

    with weights a of 1 by Breslow (1974), Biometrics 30, p. 92. By Efron (1977), JASA 72, eq. 3.4, they are 1 - l / d
    for the d events at the same time, of which l were counted before. The derivatives are those of E categorical
    variables with probabilities a exp(eta) / S. All sums are cumulative in the order of decreasing times.
    """

    def __init__(self, time: Tensor, event: Tensor, efron: bool) -> None:
        order = np.lexsort((event.numpy(), -time.numpy()))  # of equal times, those without an event first
        self._order, self._inverse = torch.from_numpy(order), torch.from_numpy(np.argsort(order))
        rising, self._event = -time[self._order], event[self._order].double()
        of_event = rising[self._event > 0]
        self.times = -of_event
        # How many are at risk for each event, and how many of its time's events are up to it.
        end, last = (torch.searchsorted(x, of_event, right=True) for x in (rising, of_event))
        ties = last - torch.searchsorted(of_event, of_event)
        share = (last - 1 - torch.arange(len(last))) / ties.double() * efron
        # Where it is cut for each event, and the shares of these sums.
        self._parts = [(end, 1 - share), (end - ties, share)][: 1 + bool(share.any())]

    def value(self, eta: Tensor) -> Tensor:
        return (self._event * eta[..., self._order, 0]).sum(-1) - self.log_totals(eta).sum(-1)

    def log_totals(self, eta: Tensor) -> Tensor:
        """log S of each event, in the order of ``times``, shape ``(..., E)``."""
        below = F.pad(eta[..., self._order, 0].logcumsumexp(-1), (1, 0), value=-math.inf)
        return reduce(torch.logaddexp, (below[..., at] + share.log() for at, share in self._parts))

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        return self._derivatives(self._at_risk(eta))

    def _derivatives(self, risk: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weights = self._summed(risk, torch.ones_like(risk[1]))[:, 0]
        slope = self._event - weights
        return slope[:, self._inverse, None], weights[:, self._inverse, None, None]

    def second_order(self, columns: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        risk = self._at_risk(eta)
        slope, weights = self._derivatives(risk)
        means = self._averages(risk, columns[:, :, self._order])
        curvature = (columns * weights[:, None, :, 0, 0]) @ columns.mT - means @ means.mT
        return slope, curvature[:, :, None, :, None]

    def trace_slope(self, columns: Tensor, eta: Tensor, covariance: Tensor) -> Tensor:
        risk = self._at_risk(eta)
        rows = torch.linalg.cholesky(covariance[:, :, 0, :, 0]).mT @ columns[:, :, self._order]
        square = rows.square().sum(1, keepdim=True)
        means = self._averages(risk, rows)
        constant = 2 * means.square().sum(1, keepdim=True) - self._averages(risk, square)
        total: Tensor = square * self._summed(risk, torch.ones_like(constant)) + self._summed(risk, constant)
        total = total[:, 0] - 2 * (rows * self._summed(risk, means)).sum(1)
        return total[:, self._inverse, None]

    def quadratic(self, x: Tensor, eta: Tensor) -> Quadratic:
        """See ``Likelihood``; over some sets, as the upper bound of ``derivatives`` may be a hundred times this."""
        if x.shape[1] > _FORMED:
            return super().quadratic(x, eta)
        some = eta[:: -(-len(eta) // _AVERAGED)]
        parts = [self.second_order(x.T[None], one[None])[1][0, :, 0, :, 0] for one in some]
        return DenseQuadratic(torch.stack(parts).mean(0), x.new_zeros(x.shape[1]))

    def _at_risk(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """exp(eta) in order, shape ``(s, 1, n)``, and 1 / S, ``(s, 1, E)``, both relative to the largest exp(eta)."""
        top = eta.amax(1)
        relative = (eta[:, self._order, 0] - top).exp()
        above = top - self.log_totals(eta)
        inverse = above.clamp(max=_LARGEST).exp()
        return relative[:, None], inverse[:, None]

    def _averages(self, risk: tuple[Tensor, Tensor], values: Tensor) -> Tensor:
        """Means of values in order over who was at risk, by their probabilities: ``(s, m, n)`` to ``(s, m, E)``."""
        below = F.pad((risk[0] * values).cumsum(2), (1, 0))
        total: Tensor = reduce(torch.add, (share * below[:, :, at] for at, share in self._parts))
        return total * risk[1]

    def _summed(self, risk: tuple[Tensor, Tensor], values: Tensor) -> Tensor:
        """Sums of values of the events for each who was at risk, by probabilities: ``(s, m, E)`` to ``(s, m, n)``."""
        ends = values.new_zeros(*values.shape[:2], risk[0].shape[2] + 1)
        for at, share in self._parts:
            ends.index_add_(2, at, share * risk[1] * values)
        return risk[0] * ends.flip(2).cumsum(2).flip(2)[:, :, 1:]


class NormalLikelihood(IndependentLikelihood):
    """Responses y, shape ``(n, K)``, with independent normal noise of deviations exp(theta); weights as above."""

    def __init__(self, y: Tensor, weight: Tensor, prior: Prior) -> None:
        self._y, self._weight, self._prior = y, weight, prior
        self.theta = y.new_zeros(1, y.shape[1])
        self._least = math.log(smallest_noise(len(y), len(y) * prior.noise_unit**2))

    def value(self, eta: Tensor) -> Tensor:
        square = (self._weight * (self._y - eta).square()).sum(-2)
        constant = self._weight.sum() * (self.theta + 0.5 * math.log(2 * math.pi))
        return -(0.5 * square * (-2 * self.theta).exp() + constant).sum(-1)

    def slope(self, eta: Tensor) -> Tensor:
        return self._precision() * (self._y - eta)

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        return self.slope(eta), torch.diag_embed(self._precision().expand_as(eta))

    def _precision(self) -> Tensor:
        return self._weight * (-2 * self.theta[:, None]).exp()

    def log_prior(self) -> Tensor:
        density = self._prior.log_noise(self.theta)
        return torch.where(self.theta < self._least, -math.inf, density).sum(1)

    def named(self) -> dict[str, Tensor]:
        return {"noise_scale": self.theta.exp()}


class ShiftedLikelihood(Likelihood):
    """Another likelihood, whose linear predictors have an offset of shape ``(n, K)`` beside eta."""

    def __init__(self, likelihood: Likelihood, offset: Tensor) -> None:
        self._likelihood, self._offset = likelihood, offset
        self.theta, self.reach = likelihood.theta, likelihood.reach

    def value(self, eta: Tensor) -> Tensor:
        return self._likelihood.value(eta + self._offset)

    def slope(self, eta: Tensor) -> Tensor:
        return self._likelihood.slope(eta + self._offset)

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        return self._likelihood.derivatives(eta + self._offset)

    def second_order(self, columns: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        return self._likelihood.second_order(columns, eta + self._offset)

    def quadratic(self, x: Tensor, eta: Tensor) -> Quadratic:
        return self._likelihood.quadratic(x, eta + self._offset)

    def trace_slope(self, columns: Tensor, eta: Tensor, covariance: Tensor) -> Tensor:
        return self._likelihood.trace_slope(columns, eta + self._offset, covariance)

    def log_prior(self) -> Tensor:
        return self._likelihood.log_prior()

    def named(self) -> dict[str, Tensor]:
        return self._likelihood.named()

    def at(self, theta: Tensor) -> Self:
        return type(self)(self._likelihood.at(theta), self._offset)


class NegativeBinomialLikelihood(IndependentLikelihood):
    """Logs eta of the means mu of counts, shape ``(n,)``, of variance mu + alpha mu^2; weights as above.

    With theta = log alpha and u = eta + theta, the log likelihood is that of y successes and 1 / alpha failures of
    log odds u, plus a part without u. The root of alpha, the deviation of what multiplies the mean, is half-normal with
    scale 1.
    """

    theta = torch.zeros(1, 1, dtype=torch.float64)

    def __init__(self, y: Tensor, weight: Tensor) -> None:
        self._y, self._weight = y[:, None], weight
        self._counts, which = y.unique(return_inverse=True)
        self._times = torch.zeros_like(self._counts).index_add(0, which, weight[:, 0])

    def value(self, eta: Tensor) -> Tensor:
        u, size = self._odds(eta)
        counts, failures = self._counts, size[:, :, 0]
        apart = _log_rising(failures, counts) - (counts + 1).lgamma()
        each = self._y * u - (self._y + size) * F.softplus(u)
        total: Tensor = (self._weight * each).sum((-2, -1)) + (apart * self._times).sum(1)
        return total

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        u, size = self._odds(eta)
        prob, other = torch.sigmoid(u), torch.sigmoid(-u)
        slope = self._weight * (self._y * other - size * prob)
        return slope, (self._weight * (self._y + size) * prob * other)[..., None]

    def log_prior(self) -> Tensor:
        log_root = 0.5 * self.theta[:, 0]
        return log_root - 0.5 * (2 * log_root).exp() - 0.5 * math.log(2 * math.pi)

    def named(self) -> dict[str, Tensor]:
        return {"dispersion": self.theta[:, 0].exp()}

    def _odds(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Log odds, and how many failures there are, shape ``(s, 1, 1)``."""
        theta = self.theta[:, :, None]
        return eta + theta, (-theta).exp()


_STIRLING = 1e4  # beyond which his series has a relative error of 1e-15


def _log_rising(x: Tensor, y: Tensor) -> Tensor:
    """log(Gamma(x + y) / Gamma(x)); beyond some x by Stirling's series, as log gammas of 1e15 have an error of 2."""
    large = x.clamp(min=_STIRLING)
    series = (large - 0.5) * (y / large).log1p() + y * ((large + y).log() - 1) - y / (12 * large * (large + y))
    return torch.where(x > _STIRLING, series, (x + y).lgamma() - x.lgamma())


class OrdinalLikelihood(IndependentLikelihood):
    r"""Class numbers y from 0 to C - 1, shape ``(n,)``, with P(y <= k) = sigmoid(c_k - eta); weights as above.

    Theta is the first of C - 1 increasing cut points c and the logarithms of the gaps between them. At eta = 0, all
    vectors of class probabilities have the same prior density: Dirichlet(1, ..., 1).
    """

    def __init__(self, y: Tensor, weight: Tensor, classes: int) -> None:
        self._class, self._weight = y.long(), weight
        self._counts = self._class.bincount(weight[:, 0], minlength=classes)
        below = (self._counts + 0.5).cumsum(0)
        self.theta = self._theta(torch.logit(below[:-1] / below[-1]))[None]

    def value(self, eta: Tensor) -> Tensor:
        lower, upper = self._odds(eta)
        each = F.logsigmoid(upper) + F.logsigmoid(-lower)
        # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)), which is stable in both tails.
        between = (-(-self.theta[:, 1:].exp()).expm1()).log() @ self._counts[1:-1]
        return (self._weight * each).sum((-2, -1)) + between

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = self._odds(eta)
        slope = torch.sigmoid(lower) - torch.sigmoid(-upper)
        curvature = sum(torch.sigmoid(x) * torch.sigmoid(-x) for x in (lower, upper))
        return self._weight * slope, (self._weight * curvature)[..., None]

    def log_prior(self) -> Tensor:
        cuts = self._cuts()
        both = F.logsigmoid(cuts) + F.logsigmoid(-cuts)
        return both.sum(1) + self.theta[:, 1:].sum(1) + math.lgamma(len(self._counts))

    def named(self) -> dict[str, Tensor]:
        return {"thresholds": self._cuts()}

    @staticmethod
    def _theta(cuts: Tensor) -> Tensor:
        return torch.cat([cuts[:1], cuts.diff().log()])

    def _cuts(self) -> Tensor:
        return torch.cat([self.theta[:, :1], self.theta[:, 1:].exp()], 1).cumsum(1)

    def _odds(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Log odds of less than each class, and of no more than it."""
        cuts = F.pad(F.pad(self._cuts(), (1, 0), value=-math.inf), (0, 1), value=math.inf)
        lower, upper = (cuts[:, self._class + i, None] - eta for i in (0, 1))
        return lower, upper


_DEGREES = 5.0  # of freedom, to start from


class StudentLikelihood(IndependentLikelihood):
    """Middles eta of observations with Student-t noise; weights as above.

    Theta is the logarithm of the noise's scale, and that of its degrees of freedom if these are not known.
    """

    reach = math.inf  # its slope is bounded

    def __init__(self, y: Tensor, weight: Tensor, prior: Prior) -> None:
        self._y, self._weight, self._prior = y[:, None], weight, prior
        start = [math.log(prior.noise_unit), math.log(_DEGREES)][: 1 + (prior.degrees_of_freedom is None)]
        self.theta = torch.tensor([start], dtype=torch.float64)

    def value(self, eta: Tensor) -> Tensor:
        scale, degrees = self._parameters()
        constant = (0.5 * (degrees + 1)).lgamma() - (0.5 * degrees).lgamma() - 0.5 * (degrees * math.pi).log()
        of_ratio = 0.5 * (degrees + 1) * (((self._y - eta) / scale).square() / degrees).log1p()
        return (self._weight * (constant - scale.log() - of_ratio)).sum((-2, -1))

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        scale, degrees = self._parameters()
        residual = self._y - eta
        slope = (degrees + 1) * residual / (degrees * scale.square() + residual.square())
        curvature = (degrees + 1) / (degrees + 3) / scale.square()
        return self._weight * slope, (self._weight * curvature)[..., None]

    def log_prior(self) -> Tensor:
        degrees = self.theta[:, 1:]  # by Juarez and Steel (2010), J. Bus. Econ. Stat. 28: Gamma(2, .1)
        return self._prior.log_noise(self.theta[:, 0]) + (2 * (degrees + math.log(0.1)) - 0.1 * degrees.exp()).sum(1)

    def named(self) -> dict[str, Tensor]:
        scale, degrees = (part[:, 0, 0] for part in self._parameters())
        return {"noise_scale": scale, "degrees_of_freedom": degrees}

    def _parameters(self) -> tuple[Tensor, Tensor]:
        """Scale and degrees of freedom, shape ``(s, 1, 1)`` each."""
        scale, known = self.theta[:, :1, None].exp(), self._prior.degrees_of_freedom
        return scale, self.theta[:, 1:, None].exp() if known is None else torch.full_like(scale, known)


def likelihood_of(problem: Problem) -> Likelihood:
    """The likelihood of a problem that is not Gaussian, by linear predictors without its offset."""
    y = problem.y
    if problem.offset is not None:
        return ShiftedLikelihood(likelihood_of(replace(problem, offset=None)), problem.offset)
    if problem.family in PARTIAL:
        return CoxLikelihood(y.abs(), ~y.signbit(), problem.family == "efron")
    weight = y.new_ones(len(y), 1) if problem.weight is None else problem.weight[:, None]
    if problem.family == "multivariate":
        return NormalLikelihood(y, weight, problem.prior)
    if problem.family == "categorical":
        return CategoricalLikelihood(y, weight, problem.outputs)
    if problem.family == "ordinal":
        return OrdinalLikelihood(y, weight, problem.classes)
    if problem.family == "student":
        return StudentLikelihood(y, weight, problem.prior)
    one: dict[Family, Callable[[Tensor, Tensor], Likelihood]] = {
        "bernoulli": BernoulliLikelihood,
        "poisson": PoissonLikelihood,
        "negative_binomial": NegativeBinomialLikelihood,
    }
    return one[problem.family](y, weight)
