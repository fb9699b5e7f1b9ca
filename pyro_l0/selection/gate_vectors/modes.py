"""Modes of the coefficients of many gate vectors side by side, and Laplace's approximation around them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.maths.second_order import Point, Step, find_maximum
from pyro_l0.selection.gate_vectors.likelihoods import Likelihood

__all__ = ["Mode", "find_mode"]

# A Newton step that would gain so little is the last one: the error of the mode is 3e-4 of a deviation before it.
_GAIN = 1e-7


class Mode(NamedTuple):
    """Laplace's approximation of s gate vectors with m coefficients for each of K outputs."""

    likelihood: Likelihood
    columns: Tensor  # features, shape (s, m, n)
    coefficients: Tensor  # at the mode, shape (s, m, K)
    root: Tensor  # Cholesky factor of the precision there, shape (s, m K, m K)
    log_evidence: Tensor  # log of the integral of likelihood times prior, shape (s,)

    def variances(self) -> Tensor:
        """Of the coefficients, shape ``(s, m, K)``."""
        return self._covariance().diagonal(dim1=1, dim2=2).reshape(self.coefficients.shape)

    def means(self) -> Tensor:
        """Of the coefficients, shape ``(s, m, K)``, to the next order: mode - H^-1 (slope of log det H) / 2."""
        s, m, outputs = self.coefficients.shape
        covariance = self._covariance()
        by_output = covariance.view(s, m, outputs, m, outputs).movedim((2, 4), (1, 2))
        rows = self.columns.mT[:, None, None]
        of_predictors = ((rows @ by_output) * rows).sum(4).movedim(3, 1)
        slope = self.columns @ self.likelihood.trace_slope(self.columns.mT @ self.coefficients, of_predictors)
        shift: Tensor = (covariance @ slope.flatten(1)[:, :, None]).reshape(s, m, outputs)
        return self.coefficients - 0.5 * shift

    def draw(self, generator: torch.Generator) -> Tensor:
        """A normal draw around the mean of each gate vector, shape ``(s, m, K)``."""
        noise = torch.randn(self.root.shape[:2], generator=generator, dtype=torch.float64)[:, :, None]
        spread = torch.linalg.solve_triangular(self.root.mT, noise, upper=True)
        drawn: Tensor = self.means() + spread.reshape(self.coefficients.shape)
        return drawn

    def _covariance(self) -> Tensor:
        covariance: Tensor = torch.cholesky_inverse(self.root)
        return covariance


def find_mode(likelihood: Likelihood, columns: Tensor, precision: Tensor, start: Tensor) -> Mode:
    """The mode of coefficients with independent normal priors around zero, by Newton's method.

    Of each gate vector there are its features, shape ``(s, m, n)``, the priors' precisions, ``(s, m)``, and
    coefficients to start from, ``(s, m, K)``.
    """
    objective = _Objective(likelihood, columns, precision[:, :, None])
    point = start, columns.mT @ start
    (x, _), value, step = find_maximum(objective, point, "Look for features of very different sizes.")
    root = step.curvature
    log_det = root.diagonal(dim1=1, dim2=2).log().sum(1)
    half_prior = 0.5 * x.shape[2] * precision.log().sum(1)
    # The last step gains less than _GAIN: it is taken without a check.
    return Mode(likelihood, columns, x + step.moves[0], root, value + 0.5 * step.gain + half_prior - log_det)


class _Objective(NamedTuple):
    """Log likelihood plus log prior, but for a constant, of coefficients and their linear predictors."""

    likelihood: Likelihood
    columns: Tensor  # features, shape (s, m, n)
    precision: Tensor  # of the priors, shape (s, m, 1)

    def value(self, point: Point) -> Tensor:
        x, eta = point
        return self.likelihood.value(eta) - 0.5 * (self.precision * x.square()).sum((1, 2))

    def step(self, point: Point, value: Tensor) -> Step:
        """With the Cholesky factor of minus the Hessian, shape ``(s, m K, m K)``."""
        x, eta = point
        residual, weights = self.likelihood.derivatives(eta)
        s, m, outputs = x.shape
        hessian = x.new_empty(s, m, outputs, m, outputs)
        for a in range(outputs):
            for b in range(a + 1):
                block = (self.columns * weights[:, None, :, a, b]) @ self.columns.mT
                hessian[:, :, a, :, b] = hessian[:, :, b, :, a] = block
        hessian = hessian.reshape(s, m * outputs, m * outputs)
        hessian.diagonal(dim1=1, dim2=2).add_(self.precision.expand_as(x).flatten(1))
        root = torch.linalg.cholesky(hessian)
        slope = self.columns @ residual - self.precision * x
        step = torch.cholesky_solve(slope.flatten(1)[:, :, None], root).reshape(x.shape)
        gain = (slope * step).sum((1, 2))
        return Step((step, self.columns.mT @ step), gain, gain < _GAIN, root)
