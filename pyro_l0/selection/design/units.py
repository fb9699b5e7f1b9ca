"""Steps to the units of a problem: offsets, centres, and scales of the features that vary."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from scipy.linalg import cho_solve
from scipy.sparse import csr_array, issparse

from pyro_l0.maths.second_order import SparseColumns
from pyro_l0.selection.design.draft import Draft, Step
from pyro_l0.selection.problem import SelectionPosterior

__all__ = ["Centre", "Offset", "Scale"]

_ROUNDING = 10 * np.finfo(np.float64).eps


class Offset(Step):
    """The known part of the linear predictors: subtracted from y, or else centred where there is an intercept.

    The prior of the intercept is then that of the linear predictor at average features and offset.
    """

    def apply(self, draft: Draft) -> None:
        self._level = np.zeros(1)
        if draft.offset is not None and draft.family.is_location:
            draft.y, draft.offset = draft.y - draft.offset.reshape(draft.y.shape), None
        elif draft.offset is not None and draft.fit_intercept:
            self._level = -np.average(draft.offset, axis=0, weights=draft.weight)
            draft.offset = draft.offset + self._level

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        draws = found.draws._replace(intercept=found.draws.intercept + self._level)
        return replace(found, intercept=found.intercept + self._level, draws=draws)


class Centre(Step):
    """Features less their means, and y less its middle where it is around the linear predictors, for an intercept.

    With normal noise the means are those of the likeliest intercept, so that a flat one is independent of the
    coefficients: it is integrated out, takes one observation, and is drawn given the rest.
    """

    def apply(self, draft: Draft) -> None:
        family, x, rows = draft.family, draft.x, draft.rows
        family.check(draft.y, rows, draft.fit_intercept)
        self._is_flat = draft.fit_intercept and family.has_closed_form
        # How much each row counts in the likeliest intercept; with a covariance some may be negative.
        share = rows if draft.root is None else cho_solve((draft.root, True), rows)
        self._precision = float(share.sum())  # of the intercept, for noise of deviation 1
        self._means, self._level = np.zeros(x.shape[1]), np.zeros(1)
        if draft.fit_intercept:
            self._means = (x.T @ share if issparse(x) else np.einsum("ij,i->j", x, share)) / self._precision
            self._level = family.middle(draft.y, share) if family.is_location else self._level
        if issparse(x):
            draft.x = SparseColumns.of(x, self._means, rows)
            square = draft.x.square.numpy()
        else:
            # Where there are many features their columns are read, and a copy with other rows would take as long.
            draft.x = np.subtract(x, self._means, order="F" if family.has_closed_form else "C")
            square = np.einsum("ij,ij,i->j", draft.x, draft.x, rows)
            if draft.root is not None and draft.fit_intercept:  # around the mean of the rows themselves
                square = (square - (rows @ draft.x) ** 2 / draft.number).clip(min=0)
        draft.y = draft.y - self._level
        draft.deviation = np.sqrt(square / draft.number)
        draft.deviation[draft.deviation <= _ROUNDING * np.abs(self._means)] = 0.0
        draft.taken += self._is_flat

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        # One column for each output: the features' means in the rows of its coefficients.
        means = np.kron(self._means[:, None], np.eye(found.mean.shape[1]))
        intercept = found.draws.intercept + self._level - found.draws.total @ means
        if self._is_flat:
            noise = found.draws.noise_scale / math.sqrt(self._precision)
            intercept = intercept + noise[:, None] * rng.standard_normal(intercept.shape)
        draws = found.draws._replace(intercept=intercept)
        return replace(found, intercept=found.intercept + self._level - self._means @ found.total, draws=draws)


class Scale(Step):
    """The features that vary, those that are always in last, over their deviations.

    Scales of slabs stay those of the problem: of the change of the linear predictor for one deviation of a feature.
    The dummies of one factor have one divisor, the root of their summed variances, so that the factor counts as one
    feature of deviation 1.
    """

    def apply(self, draft: Draft) -> None:
        each, factor_of = draft.deviation, draft.factor_of
        rate = np.nan if draft.rate is None or isinstance(draft.rate, tuple) else draft.rate
        is_in = np.broadcast_to(rate, int(draft.gate_of.max()) + 1)[draft.gate_of] == 1
        draft.constant = set(np.flatnonzero(each == 0).tolist())
        if draft.always_in_scale is not None and not is_in.any():
            raise ValueError(
                f"Expected no always_in_scale, as no feature has a rate of 1, but got {draft.always_in_scale}; leave "
                "it out."
            )
        gated, always = np.flatnonzero((each > 0) & ~is_in), np.flatnonzero((each > 0) & is_in)
        self._kept, self._gate_of, self._always = np.concatenate([gated, always]), draft.gate_of, len(always)
        deviation = each if factor_of is None else np.sqrt(np.bincount(factor_of, each**2))[factor_of]
        draft.deviation, draft.gate_of, draft.always = deviation[self._kept], draft.gate_of[self._kept], self._always
        draft.names = [draft.names[j] for j in self._kept.tolist()]
        self._divisor = draft.deviation if draft.standardize else np.ones(len(self._kept))
        draft.deviation = draft.deviation / self._divisor
        draft.variance = (each[self._kept] / self._divisor) ** 2
        if isinstance(draft.x, SparseColumns):
            draft.x = draft.x[torch.from_numpy(self._kept)].divided(self._divisor)
        else:
            draft.x = draft.x if len(gated) == len(each) else draft.x[:, self._kept]
            draft.x /= self._divisor

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        kept, outputs, draws = self._kept, found.mean.shape[1], found.draws
        gated, always = np.split(self._gate_of[kept], [len(kept) - self._always])
        probs, error = np.zeros((2, int(self._gate_of.max()) + 1))
        probs[np.unique(gated)], probs[always] = found.active_probs, 1.0
        error[np.unique(gated)] = found.error
        mean, sd = np.zeros((2, len(self._gate_of), outputs))
        mean[kept], sd[kept] = (part / self._divisor[:, None] for part in (found.mean, found.sd))
        feature, output = np.divmod(draws.coefficients.indices, outputs)
        data = draws.coefficients.data / self._divisor[feature]
        entries = data, kept[feature] * outputs + output, draws.coefficients.indptr
        coefficients = csr_array(entries, shape=(draws.coefficients.shape[0], mean.size))
        background = found.background
        if background is not None and draws.background is not None:
            drawn, of_means = np.zeros((len(draws.background), len(mean))), np.zeros(len(mean))
            drawn[:, kept], of_means[kept] = draws.background / self._divisor, background.mean / self._divisor
            draws, background = draws._replace(background=drawn), background._replace(mean=of_means)
        return replace(
            found,
            active_probs=probs,
            mean=mean,
            sd=sd,
            draws=draws._replace(coefficients=coefficients),
            error=error,
            background=background,
        )
