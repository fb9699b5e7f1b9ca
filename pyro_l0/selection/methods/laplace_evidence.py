"""Gate vectors of generalised linear regressions, with Laplace's approximation of their coefficients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.second_order import Point, Step, maximise
from pyro_l0.selection.methods.grid import (
    Batch,
    Grid,
    GridEvidence,
    batches_of,
    distinct_vectors,
    draws_of,
    nodes_around_mode,
    sparse_rows,
)
from pyro_l0.selection.problem import Draws, Problem

__all__ = ["LaplaceEvidence", "LaplaceFit", "Likelihood", "likelihood_of"]


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
        self._hot, self._weight = F.one_hot(y.long(), classes).to(y), weight

    def value(self, eta: Tensor) -> Tensor:
        return (self._weight[:, 0] * ((self._hot * eta).sum(2) - eta.logsumexp(2))).sum(1)

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        prob = eta.softmax(2)
        curvature = torch.diag_embed(prob) - prob[..., :, None] * prob[..., None, :]
        return self._weight * (self._hot - prob), self._weight[..., None] * curvature

    def trace_slope(self, eta: Tensor, covariance: Tensor) -> Tensor:
        prob = eta.softmax(2)
        by_prob = covariance.diagonal(dim1=2, dim2=3) - 2 * (covariance @ prob[..., None])[..., 0]
        return self._weight * prob * (by_prob - (prob * by_prob).sum(2, keepdim=True))


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
    coefficients to start from, ``(s, m, K)``. The points of the search hold linear predictors beside the coefficients.
    """
    by_output = precision[:, :, None]

    def value_at(point: Point) -> Tensor:
        x, eta = point
        return likelihood.value(eta) - 0.5 * (by_output * x.square()).sum((1, 2))

    def step_from(point: Point, value: Tensor) -> Step:
        """With the Cholesky factor of minus the Hessian, shape ``(s, m K, m K)``."""
        x, eta = point
        residual, weights = likelihood.derivatives(eta)
        s, m, outputs = x.shape
        hessian = x.new_empty(s, m, outputs, m, outputs)
        for a in range(outputs):
            for b in range(a + 1):
                block = (columns * weights[:, None, :, a, b]) @ columns.mT
                hessian[:, :, a, :, b] = hessian[:, :, b, :, a] = block
        hessian = hessian.reshape(s, m * outputs, m * outputs)
        hessian.diagonal(dim1=1, dim2=2).add_(by_output.expand_as(x).flatten(1))
        root = torch.linalg.cholesky(hessian)
        slope = columns @ residual - by_output * x
        step = torch.cholesky_solve(slope.flatten(1)[:, :, None], root).reshape(x.shape)
        gain = (slope * step).sum((1, 2))
        return Step((step, columns.mT @ step), gain, gain < _GAIN, root)

    point = start, columns.mT @ start
    (x, _), value, step = maximise(value_at, step_from, point, "Look for features of very different sizes.")
    root = step.curvature
    log_det = root.diagonal(dim1=1, dim2=2).log().sum(1)
    half_prior = 0.5 * x.shape[2] * precision.log().sum(1)
    # The last step gains less than _GAIN: it is taken without a check.
    return Mode(likelihood, columns, x + step.moves[0], root, value + 0.5 * step.gain + half_prior - log_det)


_ENTRIES = 2**20  # numbers in the largest array of a step: 8 MB
_SIDE_BY_SIDE = 2**17  # numbers in an array: 1 MB. Up to there, more scales at once take less time than more steps


class LaplaceFit(NamedTuple):
    """Laplace's approximation of S gate vectors.

    The modes are those of batches: coefficients of the open features, and of the intercept last if there is one.
    """

    log_evidence: Tensor  # log of the integral of likelihood times slabs times intercept, shape (S,)
    modes: list[tuple[Batch, Mode]]

    def moments(self, weights: Tensor, p: int) -> tuple[Tensor, Tensor]:
        """As those of ``LaplaceEvidence``, at the slab scales of the fit; the number of features is p."""
        outputs = self.modes[0][1].coefficients.shape[2]
        first, second = torch.zeros(2, p, outputs, dtype=torch.float64)
        for batch, mode in self.modes:
            k = batch.open.shape[1]
            mean, variance = mode.means()[:, :k], mode.variances()[:, :k]
            weight, at = weights[batch.rows, None, None], batch.open.flatten()
            first.index_add_(0, at, (weight * mean).flatten(0, 1))
            second.index_add_(0, at, (weight * (mean.square() + variance)).flatten(0, 1))
        return first, second


class LaplaceEvidence(GridEvidence[Batch]):
    """As ``GaussianEvidence``, for other families, with Laplace's approximation of integrals over the coefficients.

    A grid has log slab scales instead of log ratios.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._p = problem.x.shape[1]
        self._likelihood = likelihood_of(problem)
        self._columns = problem.x.T.contiguous()

    def moments(self, z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Means of the coefficients and of their squares over gate vectors of weights that sum to one, ``(p, K)``."""
        first, second = torch.zeros(2, self._p, self.problem.outputs, dtype=torch.float64)
        for batch in self._batches(self.problem.checked(z)):
            k = batch.open.shape[1]
            log_slab = self._nodes(batch)[0][:, ::2]  # means to a few parts in a thousand
            modes = self._modes_along(batch, log_slab.T)
            found = [(mode.log_evidence, mode.means()[:, :k], mode.variances()[:, :k]) for mode in modes]
            log_evidence, mean, variance = (
                torch.cat(x).unflatten(0, (-1, len(batch.rows))) for x in zip(*found, strict=True)
            )
            probs = (log_evidence + self.problem.prior.log_slab(log_slab).T).softmax(0) * weights[batch.rows]
            weight, at = probs[:, :, None, None], batch.open.flatten()
            first.index_add_(0, at, (weight * mean).sum(0).flatten(0, 1))
            second.index_add_(0, at, (weight * (mean.square() + variance)).sum(0).flatten(0, 1))
        return first, second

    def draws(self, z: Tensor, generator: torch.Generator) -> Draws:
        """One draw of the coefficients and of what is unknown for each gate vector."""
        z = self.problem.checked(z)
        distinct, vector = distinct_vectors(z)
        log_slab = torch.empty(len(z), dtype=torch.float64)
        for batch in self._batches(distinct):
            rows, which = draws_of(batch.rows, vector)
            log_slab[rows], _ = self._grid(batch, self._nodes(batch)[0]).draw(which, generator)
        return self.draws_at(z, log_slab.exp(), generator)

    def fit(self, z: Tensor, slab_scale: Tensor) -> LaplaceFit:
        """Laplace's approximation of each gate vector, shape ``(S, G)``, with its slab scale, shape ``(S,)``."""
        log_evidence = torch.empty(len(z), dtype=torch.float64)
        found = []
        for batch in self._batches(self.problem.checked(z)):
            (mode,) = self._modes_along(batch, slab_scale[batch.rows].log()[None])
            log_evidence[batch.rows] = mode.log_evidence
            found.append((batch, mode))
        return LaplaceFit(log_evidence, found)

    def draws_at(self, z: Tensor, slab_scale: Tensor, generator: torch.Generator) -> Draws:
        """One draw for each gate vector with its slab scale, as for :meth:`fit`."""
        problem = self.problem
        intercept = torch.zeros(len(z), problem.outputs, dtype=torch.float64)
        parts = []
        for batch, mode in self.fit(z, slab_scale).modes:
            drawn = mode.draw(generator)
            k = batch.open.shape[1]
            parts.append((batch, drawn[:, :k]))
            if problem.intercept:
                intercept[batch.rows] = drawn[:, k]
        return Draws(
            sparse_rows(parts, len(z), self._p, problem.outputs),
            intercept.numpy(),
            slab_scale.numpy(),
            torch.full_like(slab_scale, math.nan).numpy(),
            problem.prior.draw_rate(z, generator),
        )

    def _batches(self, z: Tensor) -> Iterator[Batch]:
        return batches_of(self.problem.switched(z), lambda k: _ENTRIES // self._entries(k))

    def _nodes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the log slab scale."""
        ends = torch.tensor(self.problem.prior.slab_range(), dtype=torch.float64).expand(len(batch.rows), 2)
        return nodes_around_mode(lambda log_slab: self._log_joint(batch, log_slab), ends)

    def _grid(self, batch: Batch, nodes: Tensor) -> Grid:
        log_joint = self._log_joint(batch, nodes)[:, :, None]
        return Grid(nodes, torch.zeros_like(log_joint), log_joint)

    def _log_joint(self, batch: Batch, log_slab: Tensor) -> Tensor:
        """log p(y, log slab scale | z), shape ``(m, R)`` as that of the log slab scales."""
        evidence = torch.cat([mode.log_evidence for mode in self._modes_along(batch, log_slab.T)])
        return evidence.view(-1, len(batch.rows)).T + self.problem.prior.log_slab(log_slab)

    def _modes_along(self, batch: Batch, log_slab: Tensor) -> Iterator[Mode]:
        """The modes of m gate vectors at slab scales of shape ``(R, 1 or m)``, of some scales after the other.

        A mode starts from that of the scale before. Where there are few numbers in all, several scales go side by side:
        their modes take more steps, but these cost no more than those of one.
        """
        m, k = batch.open.shape
        columns = self._columns[batch.open]
        intercept = int(self.problem.intercept)
        if intercept:
            columns = torch.cat([columns, columns.new_ones(m, 1, columns.shape[2])], 1)
        start = columns.new_zeros(m, k + intercept, self.problem.outputs)
        for scales in log_slab.split(max(1, _SIDE_BY_SIDE // (m * self._entries(k)))):
            precision = columns.new_full((len(scales), m, k + intercept), self.problem.prior.intercept_scale**-2)
            precision[:, :, :k] = (-2 * scales[:, :, None]).exp()
            each, x = (part.expand(len(scales), *part.shape).flatten(0, 1) for part in (columns, start))
            mode = find_mode(self._likelihood, each, precision.flatten(0, 1), x)
            start = mode.coefficients[-m:]
            yield mode

    def _entries(self, k: int) -> int:
        """Numbers in the largest array of a gate vector with k open gates."""
        return self.problem.outputs**2 * (len(self.problem.x) + k + 1) * (k + 1)
