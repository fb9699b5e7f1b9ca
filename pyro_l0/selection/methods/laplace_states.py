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
    Grid,
    Group,
    Part,
    distinct_states,
    draw_rate,
    draws_of,
    gate_prior,
    groups_of,
    log_half_normal,
    log_marginals,
    nodes_around_mode,
    slab_range,
    sparse_rows,
)
from pyro_l0.selection.problem import Draws, Problem


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
    if problem.family == "bernoulli":
        return BernoulliLikelihood(y, weight)
    if problem.family == "poisson":
        return PoissonLikelihood(y, weight)
    if problem.family == "categorical":
        return CategoricalLikelihood(y, weight, problem.outputs)
    raise ValueError(f"Expected a family other than the Gaussian, but got {problem.family!r}; see GaussianStates.")


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

    The modes are those of groups of states: coefficients of the open features, and of the intercept last if there is
    one.
    """

    log_evidence: Tensor  # log of the integral of likelihood times slabs times intercept, shape (S,)
    modes: list[tuple[Group, Mode]]

    def moments(self, weights: Tensor, p: int) -> tuple[Tensor, Tensor]:
        """See ``GaussianStates.moments``; the number of features is p."""
        outputs = self.modes[0][1].coefficients.shape[2]
        first, second = torch.zeros(2, p, outputs, dtype=torch.float64)
        for group, mode in self.modes:
            k = group.open.shape[1]
            mean, variance = mode.means()[:, :k], mode.variances()[:, :k]
            weight, at = weights[group.rows, None, None], group.open.flatten()
            first.index_add_(0, at, (weight * mean).flatten(0, 1))
            second.index_add_(0, at, (weight * (mean.square() + variance)).flatten(0, 1))
        return first, second


def laplace(problem: Problem, z: Tensor, slab_scale: Tensor) -> LaplaceFit:
    """Laplace's approximation of each gate vector, shape ``(S, G)``, with its slab scale, shape ``(S,)``."""
    modes = _Modes(problem)
    log_evidence = torch.empty(len(z), dtype=torch.float64)
    found = []
    for group in groups_of(problem.switched(problem.checked(z))):
        for part in modes.parts(group):
            (mode,) = modes.along(part, slab_scale[part.rows].log()[None])
            log_evidence[part.rows] = mode.log_evidence
            found.append((part, mode))
    return LaplaceFit(log_evidence, found)


def laplace_draws(problem: Problem, z: Tensor, slab_scale: Tensor, generator: torch.Generator) -> Draws:
    """One draw for each gate vector with its slab scale; see :func:`laplace`."""
    intercept = torch.zeros(len(z), problem.outputs, dtype=torch.float64)
    parts = []
    for group, mode in laplace(problem, z, slab_scale).modes:
        drawn = mode.draw(generator)
        k = group.open.shape[1]
        parts.append((group, drawn[:, :k]))
        if problem.intercept:
            intercept[group.rows] = drawn[:, k]
    return Draws(
        sparse_rows(parts, len(z), problem.x.shape[1], problem.outputs),
        intercept.numpy(),
        slab_scale.numpy(),
        torch.full_like(slab_scale, math.nan).numpy(),
        draw_rate(problem.prior, z, generator),
    )


class LaplaceStates:
    """As ``GaussianStates``, for other families, with Laplace's approximation of the integrals over the coefficients.

    A grid has log slab scales instead of log ratios.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._p = problem.x.shape[1]
        self._modes = _Modes(problem)

    def log_marginal(self, z: Tensor) -> Tensor:
        """See ``GaussianStates``."""
        z = self.problem.checked(z)
        return log_marginals(gate_prior(self.problem.prior).log_prob(z), map(self._rough, self._parts(z)))

    def moments(self, z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """See ``GaussianStates``."""
        first, second = torch.zeros(2, self._p, self.problem.outputs, dtype=torch.float64)
        for part in self._parts(self.problem.checked(z)):
            k = part.open.shape[1]
            log_slab = self._nodes(part)[0][:, ::2]  # means to a few parts in a thousand
            modes = self._modes.along(part, log_slab.T)
            found = [(mode.log_evidence, mode.means()[:, :k], mode.variances()[:, :k]) for mode in modes]
            log_evidence, mean, variance = (
                torch.cat(x).unflatten(0, (-1, len(part.rows))) for x in zip(*found, strict=True)
            )
            probs = (log_evidence + self._log_prior(log_slab).T).softmax(0) * weights[part.rows]
            weight, at = probs[:, :, None, None], part.open.flatten()
            first.index_add_(0, at, (weight * mean).sum(0).flatten(0, 1))
            second.index_add_(0, at, (weight * (mean.square() + variance)).sum(0).flatten(0, 1))
        return first, second

    def draws(self, z: Tensor, generator: torch.Generator) -> Draws:
        """See ``GaussianStates``."""
        z = self.problem.checked(z)
        distinct, state = distinct_states(z)
        log_slab = torch.empty(len(z), dtype=torch.float64)
        for part in self._parts(distinct):
            rows, place = draws_of(part.rows, state)
            log_slab[rows], _ = self._grid_at(part, self._nodes(part)[0]).draw(place, generator)
        return laplace_draws(self.problem, z, log_slab.exp(), generator)

    def _parts(self, z: Tensor) -> Iterator[Group]:
        return (part for group in groups_of(self.problem.switched(z)) for part in self._modes.parts(group))

    def _rough(self, part: Group) -> Part:
        nodes, rough = self._nodes(part)
        return part.rows, rough, lambda some: self._grid_at(part.at(some), nodes[some])

    def _nodes(self, part: Group) -> tuple[Tensor, Tensor]:
        """Log slab scales for each state, shape ``(s, R)``, and its rough log p(y | z)."""
        ends = torch.tensor(slab_range(self.problem.prior), dtype=torch.float64).expand(len(part.rows), 2)
        return nodes_around_mode(lambda log_slab: self._log_joint(part, log_slab), ends)

    def _grid_at(self, part: Group, log_slab: Tensor) -> Grid:
        log_joint = self._log_joint(part, log_slab)[:, :, None]
        return Grid(log_slab, torch.zeros_like(log_joint), log_joint)

    def _log_joint(self, part: Group, log_slab: Tensor) -> Tensor:
        """log p(y, log slab scale | z), shape ``(s, R)`` as that of the log slab scales."""
        evidence = torch.cat([mode.log_evidence for mode in self._modes.along(part, log_slab.T)])
        return evidence.view(-1, len(part.rows)).T + self._log_prior(log_slab)

    def _log_prior(self, log_slab: Tensor) -> Tensor:
        prior = self.problem.prior
        return log_half_normal(log_slab, prior.slab_unit) if prior.slab_scale is None else torch.zeros_like(log_slab)


class _Modes:
    """Finds the modes of groups of states."""

    def __init__(self, problem: Problem) -> None:
        self._likelihood = likelihood_of(problem)
        self._problem = problem
        self._columns = problem.x.T.contiguous()

    def parts(self, group: Group) -> Iterator[Group]:
        """As many states at a time as fit in memory."""
        return group.split(max(1, _ENTRIES // self._entries(group.open.shape[1])))

    def along(self, part: Group, log_slab: Tensor) -> Iterator[Mode]:
        """The modes of a part's states at slab scales of shape ``(R, 1 or s)``, of some scales after the other.

        A mode starts from that of the scale before. Where there are few numbers in all, several scales go side by side:
        their modes take more steps, but these cost no more than those of one.
        """
        s, k = part.open.shape
        columns = self._columns[part.open]
        intercept = int(self._problem.intercept)
        if intercept:
            columns = torch.cat([columns, columns.new_ones(s, 1, columns.shape[2])], 1)
        start = columns.new_zeros(s, k + intercept, self._problem.outputs)
        for scales in log_slab.split(max(1, _SIDE_BY_SIDE // (s * self._entries(k)))):
            precision = columns.new_full((len(scales), s, k + intercept), self._problem.prior.intercept_scale**-2)
            precision[:, :, :k] = (-2 * scales[:, :, None]).exp()
            each, x = (part.expand(len(scales), *part.shape).flatten(0, 1) for part in (columns, start))
            mode = find_mode(self._likelihood, each, precision.flatten(0, 1), x)
            start = mode.coefficients[-s:]
            yield mode

    def _entries(self, k: int) -> int:
        """Numbers in the largest array of a state with k open gates."""
        return self._problem.outputs**2 * (len(self._problem.x) + k + 1) * (k + 1)
