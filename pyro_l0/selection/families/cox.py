"""Survival times, by Cox's partial likelihood."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.second_order import DenseQuadratic, Quadratic
from pyro_l0.selection.families.family import Array, Family
from pyro_l0.selection.families.likelihood import Likelihood

__all__ = ["Cox", "CoxLikelihood"]


class Cox(Family):
    """Survival times y with log risks eta; a minus sign (-0.0, too) says that a time is censored.

    Args:
        efron: whether events at the same time are taken by Efron's way; otherwise by Breslow's.
    """

    has_intercept = False
    is_partial = True

    def __init__(self, efron: bool = True) -> None:
        self.efron = efron

    def likelihood(self, y: Tensor, weight: Tensor | None, offset: Tensor | None, unit: float) -> CoxLikelihood:
        return CoxLikelihood(y.abs(), ~y.signbit(), self.efron, offset)

    def null_predictor(self, y: Tensor, weight: Tensor) -> Tensor:
        return y.new_zeros(1)

    def observed(self, y: Array) -> Mapping[str, Array]:
        return {"time": np.abs(y), "event": ~np.signbit(y)}

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> NoReturn:
        raise NotImplementedError("Expected a distribution of y, but Cox's model has none; use predict_survival.")

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> NoReturn:
        raise NotImplementedError("Expected a distribution of y, but Cox's model has none; use predict_survival.")

    def mean(self, eta: Array, **parameters: Array) -> NoReturn:
        raise NotImplementedError("Expected a distribution of y, but Cox's model has none; use predict_survival.")


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

    def __init__(self, time: Tensor, event: Tensor, efron: bool, offset: Tensor | None = None) -> None:
        self._offset = 0.0 if offset is None else offset
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
        return (self._event * (eta + self._offset)[..., self._order, 0]).sum(-1) - self.log_totals(eta).sum(-1)

    def log_totals(self, eta: Tensor) -> Tensor:
        """log S of each event, in the order of ``times``, shape ``(..., E)``."""
        below = F.pad((eta + self._offset)[..., self._order, 0].logcumsumexp(-1), (1, 0), value=-math.inf)
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
        # With C = L L' the covariance and r_i = L'x_i (rows), the trace of C times the curvature is the sum over events
        # of E|r|^2 - |E r|^2, means over those at risk by their probabilities p_ki. As the derivative of p_ki by eta_j
        # is p_ki (1[i = j] - p_kj), that of the trace is sum_k p_kj (|r_j|^2 - E|r|^2 + 2 |E r|^2 - 2 r_j'E r).
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
        known = eta + self._offset
        top = known.amax(1)
        relative = (known[:, self._order, 0] - top).exp()
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
