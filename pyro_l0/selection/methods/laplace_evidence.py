"""Gate vectors of generalised linear regressions, with Laplace's approximation of their coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_l0.maths.monte_carlo import MOST_ERROR
from pyro_l0.maths.second_order import Normals, Point, Step, maximise
from pyro_l0.selection.families.likelihood import Likelihood
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
from pyro_l0.selection.predictive import linear_predictors
from pyro_l0.selection.problem import Draws, Problem

__all__ = ["LaplaceEvidence", "LaplaceFit", "find_mode"]


# A Newton step that would gain so little is the last one: the mode is 3e-3 of a deviation away before it.
_GAIN = 1e-5


class Mode(NamedTuple):
    """Laplace's approximation of s gate vectors with m coefficients for each of K outputs."""

    likelihood: Likelihood
    columns: Tensor  # features, shape (s, m, n)
    precision: Tensor  # of the priors, shape (s, m)
    normals: Normals  # of the coefficients, around the mode, shape (s, m, K)
    log_evidence: Tensor  # log of the integral of likelihood times prior, shape (s,)

    def means(self) -> Tensor:
        """Of the coefficients, shape ``(s, m, K)``, to the next order: mode - H^-1 (slope of log det H) / 2.

        With T_ijk the third derivatives of the log posterior, the mean is sum_jkl H^-1_ij T_jkl H^-1_kl / 2 away from
        the mode (Lindley 1980), and the sum over k and l is minus the slope of log det H.
        """
        mode, root, _ = self.normals
        s, m, outputs = mode.shape
        covariance, eta = torch.cholesky_inverse(root), self.columns.mT @ mode
        of_eta = self.likelihood.trace_slope(self.columns, eta, covariance.view(s, m, outputs, m, outputs))
        slope = self.columns @ of_eta
        shift: Tensor = (covariance @ slope.flatten(1)[:, :, None]).reshape(s, m, outputs)
        return mode - 0.5 * shift

    def at(self, which: Tensor, precision: Tensor) -> tuple[Normals, Tensor, Tensor]:
        """Those of some gate vectors under other priors, with the log likelihood to second order at the old mode.

        The determinant of its Hessian follows to first order: its slope is in the means. The other results are the log
        evidence and by how many deviations each mode moves, squared, shape ``(len(which),)``.

        With m the old mode, H the curvature of likelihood and priors there and D the change of the priors' precisions,
        the log posterior is, up to a constant, v - (x - m)'H (x - m) / 2 - x'D x / 2. Its curvature is H + D = R R'
        (``root``); the mode moves by -(H + D)^-1 D m, which is ``reach`` = m'D (H + D)^-1 D m in its own deviations,
        squared, and its value is v + (reach - m'D m) / 2. The log determinant of the likelihood's Hessian moves with
        the mode by its slope, -2 H (mean - m) as in ``means``. Our own; at D = 0 it is Laplace's approximation as it
        was.
        """
        modes, old, _ = self.normals
        outputs = modes.shape[2]
        change = (precision - self.precision[which]).repeat_interleave(outputs, 1)
        hessian, shift = (old @ old.mT)[which], (self.means() - modes).flatten(1)[which]
        root = torch.linalg.cholesky(hessian + torch.diag_embed(change))
        mode = modes[which].flatten(1)
        white = torch.linalg.solve_triangular(root, (-change * mode)[:, :, None], upper=False)
        move = torch.linalg.solve_triangular(root.mT, white, upper=True)
        reach = white.square().sum((1, 2))
        before = self.log_evidence - 0.5 * outputs * self.precision.log().sum(1) + self.normals.half_log_det()
        normals = Normals((mode + shift + move[:, :, 0]).reshape(len(which), *modes.shape[1:]), root)
        after = 0.5 * (outputs * precision.log().sum(1) + reach - (change * mode.square()).sum(1))
        after = after - normals.half_log_det() + (move.mT @ hessian @ shift[:, :, None]).flatten()
        return normals, before[which] + after, reach


def find_mode(likelihood: Likelihood, columns: Tensor, precision: Tensor, start: Tensor) -> Mode:
    """The mode of coefficients with independent normal priors around zero, by Newton's method.

    Of each gate vector there are its features, shape ``(s, m, n)``, the priors' precisions, ``(s, m)``, and
    coefficients to start from, ``(s, m, K)``. The points of the search hold linear predictors beside the coefficients.

    At the mode x, with H = R R' minus the Hessian of likelihood and priors, the log evidence is the value there, plus
    half the log determinant of the priors' precision, less log det R: the powers of 2 pi of prior and integral cancel
    (Laplace's method, as in MacKay, Information Theory, Inference and Learning Algorithms, chapter 27).
    """
    by_output = precision[:, :, None]

    def value_at(point: Point) -> Tensor:
        x, eta = point
        return likelihood.value(eta) - 0.5 * (by_output * x.square()).sum((1, 2))

    def step_from(point: Point, value: Tensor) -> Step:
        """With the Cholesky factor of minus the Hessian, shape ``(s, m K, m K)``."""
        x, eta = point
        residual, curvature = likelihood.second_order(columns, eta)
        s, m, outputs = x.shape
        hessian = curvature.reshape(s, m * outputs, m * outputs)
        hessian.diagonal(dim1=1, dim2=2).add_(by_output.expand_as(x).flatten(1))
        root = torch.linalg.cholesky(hessian)
        slope = columns @ residual - by_output * x
        step = torch.cholesky_solve(slope.flatten(1)[:, :, None], root).reshape(x.shape)
        gain = (slope * step).sum((1, 2))
        return Step((step, columns.mT @ step), gain, gain < _GAIN, root)

    point = start, columns.mT @ start
    (x, _), value, step = maximise(value_at, step_from, point, "Look for features of very different sizes.")
    half_prior = 0.5 * x.shape[2] * precision.log().sum(1)
    # The last step gains less than _GAIN: it is taken without a check.
    normals = Normals(x + step.moves[0], step.curvature)
    log_evidence = value + 0.5 * step.gain + half_prior - normals.half_log_det()
    return Mode(likelihood, columns, precision, normals, log_evidence)


_ENTRIES = 2**20  # numbers in the largest array of a step: 8 MB
_SIDE_BY_SIDE = 2**17  # numbers in an array: 1 MB. Up to there, more scales at once take less time than more steps


# Squared deviations by which a mode moves with the slab scale before it is searched for anew: the error of 40
# observations is 3e-3 nat.
_REACH = 0.03

# By how much importance weights may change means, in deviations, and the probabilities beyond the ends of a 90 %
# interval, where .02 is a sixth of a deviation. Where coefficients are skewed, they see half of it, as normal draws do
# not reach the tail. Coefficients that are open in a smaller share of draws do not count, nor do draws beyond so many
# linear predictors.
_OF_MEANS, _OF_TAILS = 0.1, 0.02
_SEEN, _PREDICTORS = 0.05, 2**21
FEWEST, _FEWEST = 500, 100  # draws that tell, and those that do where the observations are very many
_ENOUGH = 0.15  # share of draws that weights are worth, from which the evidence can be told

# Coefficients, shape (s, p, K), and intercepts, (s, K), to start from, of gates (s, G) and log slab scales (s,).
Start = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class LaplaceFit(NamedTuple):
    """Laplace's approximation of S gate vectors with a slab scale each.

    The coefficients are those of batches: of the open features, and of the intercept last if there is one.
    """

    z: Tensor  # shape (S, G)
    slab_scale: Tensor  # shape (S,)
    log_evidence: Tensor  # log of the integral of likelihood times slabs times intercept, shape (S,)
    parts: list[tuple[Batch, Normals]]

    def moments(self, weights: Tensor, p: int) -> tuple[Tensor, Tensor]:
        """As those of ``LaplaceEvidence``, at the slab scales of the fit; the number of features is p."""
        outputs = self.parts[0][1].mean.shape[2]
        first, second = torch.zeros(2, p, outputs, dtype=torch.float64)
        for batch, found in self.parts:
            k = batch.open.shape[1]
            mean, variance = found.mean[:, :k], found.variances()[:, :k]
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
        self._likelihood = problem.likelihood
        self._columns = problem.x.T.contiguous()

    def moments(self, z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Means of the coefficients and of their squares over gate vectors of weights that sum to one, ``(p, K)``."""
        first, second = torch.zeros(2, self._p, self.problem.outputs, dtype=torch.float64)
        for batch in self._batches(self.problem.checked(z)):
            k = batch.open.shape[1]
            log_slab = self._nodes(batch)[0][:, ::2]  # means to a few parts in a thousand
            modes = self._modes_along(batch, log_slab.T)
            by_mode = [(mode.log_evidence, mode.means()[:, :k], mode.normals.variances()[:, :k]) for mode in modes]
            log_evidence, mean, variance = (
                torch.cat(x).unflatten(0, (-1, len(batch.rows))) for x in zip(*by_mode, strict=True)
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
        return self.draws_of(self.fit(z, log_slab.exp()), torch.arange(len(z)), generator)

    def fit(self, z: Tensor, slab_scale: Tensor, start: Start | None = None) -> LaplaceFit:
        """Laplace's approximation of each gate vector, shape ``(S, G)``, with its slab scale, shape ``(S,)``.

        Of equal gate vectors, the mode is searched for at the middle one of their slab scales. The others follow from
        there, but for those that are too far away: their middle is the next one.
        """
        z, log_slab = self.problem.checked(z), slab_scale.log()
        _, vector = distinct_vectors(z)
        log_evidence, parts = torch.empty_like(log_slab), []
        left = torch.arange(len(z))
        while len(left):
            group, middle = _middles(vector[left], log_slab[left])
            is_far = torch.ones(len(left), dtype=torch.bool)
            for batch in self._batches(z[left[middle]]):
                centre = left[middle[batch.rows]]
                (mode,) = self._modes_along(batch, log_slab[centre][None], start and start(z[centre], log_slab[centre]))
                row, which = draws_of(batch.rows, group)
                normals, found, reach = mode.at(which, self._precision(log_slab[left[row]], batch.open.shape[1]))
                near = torch.nonzero(reach <= _REACH)[:, 0]
                at = left[row[near]]
                is_far[row[near]] = False
                log_evidence[at] = found[near]
                parts.append((Batch(at, batch.open[which[near]]), Normals(normals.mean[near], normals.root[near])))
            left = left[is_far]
        return LaplaceFit(z, slab_scale, log_evidence, parts)

    def draws_of(self, fit: LaplaceFit, which: Tensor, generator: torch.Generator) -> Draws:
        """One draw of the coefficients for each of some gate vectors of a fit, shape ``(N,)``."""
        problem = self.problem
        intercept = torch.zeros(len(which), problem.outputs, dtype=torch.float64)
        log_ratio, parts = torch.empty(len(which), dtype=torch.float64), []
        for batch, normals_of_part in fit.parts:
            row, vectors = draws_of(batch.rows, which)
            normals = Normals(normals_of_part.mean[vectors], normals_of_part.root[vectors])
            noise = torch.randn(normals.mean.shape, generator=generator, dtype=torch.float64)
            drawn, log_density = normals.draw(noise), normals.half_log_det() - 0.5 * noise.square().sum((1, 2))
            k = batch.open.shape[1]
            precision = self._precision(fit.slab_scale[which[row]].log(), k)[:, :, None]
            log_prior = 0.5 * (precision.log() - precision * drawn.square()).sum((1, 2))
            log_ratio[row] = log_prior - log_density - fit.log_evidence[which[row]]
            parts.append((Batch(row, batch.open[vectors]), drawn[:, :k]))
            if problem.intercept:
                intercept[row] = drawn[:, k]
        slab_scale = fit.slab_scale[which]
        draws = Draws(
            sparse_rows(parts, len(which), self._p, problem.outputs),
            intercept.numpy(),
            slab_scale.numpy(),
            torch.full_like(slab_scale, math.nan).numpy(),
            problem.prior.draw_rate(fit.z[which], generator),
        )
        return draws._replace(correction=self._correction(draws, fit.z[which], log_ratio))

    def _correction(self, draws: Draws, z: Tensor, log_ratio: Tensor) -> float | None:
        """See ``Draws``, by importance weights; ``log_ratio`` has those without the log likelihood."""
        problem, outputs = self.problem, self.problem.outputs
        number = max(_FEWEST, _PREDICTORS // max(len(problem.x) * outputs, problem.gates))
        some = draws.rows(np.arange(min(number, len(z))))
        eta = torch.from_numpy(linear_predictors(some, problem.x.numpy()))
        log_weight = self._likelihood.value(eta) + log_ratio[: len(eta)]
        change = log_weight.softmax(0).numpy() - 1 / len(eta)
        columns = some.coefficients.tocsc()
        filled = np.flatnonzero(np.diff(columns.indptr) > _SEEN * len(eta))
        shown = np.hstack([columns[:, filled].toarray(), some.intercept[:, : outputs * problem.intercept]])
        lower, upper = np.quantile(shown, (0.05, 0.95), axis=0, method="inverted_cdf")
        changes = [
            change @ z[: len(eta)].numpy() / MOST_ERROR,
            change @ shown / (_OF_MEANS * shown.std(0)),
            change @ (shown < lower) / _OF_TAILS,
            change @ (shown > upper) / _OF_TAILS,
        ]
        if (np.abs(np.concatenate(changes)) <= 1).all():
            return None
        effective = 1 / ((change + 1 / len(eta)) ** 2).sum()
        return float(log_weight.logsumexp(0)) - math.log(len(eta)) if effective > _ENOUGH * len(eta) else math.nan

    def _batches(self, z: Tensor) -> Iterator[Batch]:
        return batches_of(self.problem.switched(z), lambda k: _ENTRIES // self._entries(k))

    def _nodes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Nodes of the log slab scale, and rough log evidences; see ``GridEvidence``."""
        ends = torch.tensor(self.problem.prior.slab_range(), dtype=torch.float64).expand(len(batch.rows), 2)
        return nodes_around_mode(lambda log_slab: self._log_joint(batch, log_slab), ends)

    def _grid(self, batch: Batch, nodes: Tensor) -> Grid:
        log_joint = self._log_joint(batch, nodes)[:, :, None]
        return Grid(nodes, torch.zeros_like(log_joint), log_joint)

    def _log_joint(self, batch: Batch, log_slab: Tensor) -> Tensor:
        """log p(y, log slab scale | z), shape ``(m, R)`` as that of the log slab scales."""
        evidence = torch.cat([mode.log_evidence for mode in self._modes_along(batch, log_slab.T)])
        return evidence.view(-1, len(batch.rows)).T + self.problem.prior.log_slab(log_slab)

    def _modes_along(
        self, batch: Batch, log_slab: Tensor, start: tuple[Tensor, Tensor] | None = None
    ) -> Iterator[Mode]:
        """The modes of m gate vectors at slab scales of shape ``(R, 1 or m)``, of some scales after the other.

        A mode starts from that of the scale before. Where there are few numbers in all, several scales go side by side:
        their modes take more steps, but these cost no more than those of one.
        """
        m, k = batch.open.shape
        columns = self._columns[batch.open]
        if self.problem.intercept:
            columns = torch.cat([columns, columns.new_ones(m, 1, columns.shape[2])], 1)
        begin = columns.new_zeros(*columns.shape[:2], self.problem.outputs)
        if start is not None:
            begin[:, :k] = start[0].gather(1, batch.open[:, :, None].expand(-1, -1, self.problem.outputs))
            begin[:, k:] = start[1][:, None]
        for scales in log_slab.split(max(1, _SIDE_BY_SIDE // (m * self._entries(k)))):
            precision = self._precision(scales.expand(len(scales), m).flatten(), k)
            all_columns, x = (part.expand(len(scales), *part.shape).flatten(0, 1) for part in (columns, begin))
            mode = find_mode(self._likelihood, all_columns, precision, x)
            begin = mode.normals.mean[-m:]
            yield mode

    def _precision(self, log_slab: Tensor, k: int) -> Tensor:
        """Of the priors of k features, some of them always in, and of the intercept, for each slab scale."""
        slabs = (-2 * log_slab[:, None]).exp().expand(-1, k - self.problem.always)
        return torch.cat([slabs, self.problem.ungated_precision.expand(len(log_slab), -1)], 1)

    def _entries(self, k: int) -> int:
        """Numbers in the largest array of a gate vector with k open gates."""
        return self.problem.outputs**2 * (len(self.problem.x) + k + 1) * (k + 1)


def _middles(vector: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Which group of equal vectors each is in, shape ``(S,)``, and where the middle value of each group is."""
    _, group, count = vector.unique(return_inverse=True, return_counts=True)
    order = value.argsort()
    order = order[group[order].argsort(stable=True)]
    return group, order[count.cumsum(0) - count + count // 2]
