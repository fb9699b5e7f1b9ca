r"""Small effects of all features beside the sparse ones, as noise of a covariance that the features have.

The model is y = X (beta + u) + e with e ~ N(0, sigma^2) and u_j ~ N(0, sigma^2 r / m), m the sum of the variances of
the features that have a gate, so that r is the ratio of the variances that u and e give y. Given r, y has the covariance
sigma^2 (I + r X X' / m). With X = W S V', X and y are turned to W'X = S V' and W'y, in which the noise of each row i is
independent, of variance sigma^2 (1 + r s_i^2 / m). Divided by its root, they are a regression without a background.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from pyro_l0.selection.design.draft import Draft
from pyro_l0.selection.families.family import Array
from pyro_l0.selection.problem import SelectionPosterior

if TYPE_CHECKING:
    from pyro_l0.selection.problem import Problem

__all__ = ["Background"]

# Ratios that are summed over, and the prior probability that there is no background.
RATIOS = np.concatenate([[0.0], np.geomspace(0.02, 5.12, 9)])
_NONE = 0.5


class Background:
    """What small effects of all features, of each of some ratios, make of a Gaussian regression."""

    def __init__(self, draft: Draft) -> None:
        x, y = torch.from_numpy(draft.x), torch.from_numpy(draft.y)
        left, singular, right = torch.linalg.svd(x, full_matrices=False)
        along = left.T @ y
        # What of y no feature reaches is a row of its own.
        rest = (y - left @ along).norm()[None]
        self._x = torch.cat([singular[:, None] * right, x.new_zeros(1, x.shape[1])])
        self._y = torch.cat([along, rest])
        self._share = 1 / float((draft.deviation[: draft.gated] ** 2).sum())  # 1 / m
        self._sizes = torch.cat([singular, singular.new_zeros(1)]).square() * self._share
        self.log_prior = np.log(np.append(_NONE, np.full(len(RATIOS) - 1, (1 - _NONE) / (len(RATIOS) - 1))))

    def problem(self, problem: Problem, ratio: float) -> tuple[Problem, float]:
        """The regression with noise made independent, and what its log evidence lacks."""
        root = (1 + ratio * self._sizes).rsqrt()
        found = replace(problem, x=root[:, None] * self._x, y=root * self._y, background=None)
        return found, float(root.log().sum())

    def mean(self, ratio: Array, coefficients: Array) -> Array:
        """Of the small effects at ratios ``(N, 1)`` given means of the others, both of shape ``(N, p)``."""
        return self._gain(ratio, coefficients @ self._x.numpy().T)

    def _gain(self, ratio: Array, explained: Array) -> Array:
        """The same given what the other effects explain of y, shape ``(N, n)``."""
        found: Array = ratio * self._share / (1 + ratio * self._sizes.numpy()) * (self._y.numpy() - explained)
        return found @ self._x.numpy()

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        """Draw the small effects given the others: those of the prior, less what these leave of y (Matheron's rule)."""
        draws = found.draws
        assert draws.ratio is not None
        ratio, noise, (n, p) = draws.ratio[:, None], draws.noise_scale[:, None], draws.coefficients.shape
        x = self._x.numpy()
        drawn = np.sqrt(ratio * self._share) * noise * rng.standard_normal((n, p))
        apart = draws.coefficients @ x.T + drawn @ x.T + noise * rng.standard_normal((n, len(x)))
        return replace(found, draws=draws._replace(background=drawn + self._gain(ratio, apart)))
