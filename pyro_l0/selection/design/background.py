r"""Small effects of all features beside the sparse ones, as noise of a covariance that the features have.

The model is y = X (beta + u) + e with e ~ N(0, sigma^2) and u_j ~ N(0, sigma^2 r / m), m the sum of the variances of
the features that have a gate, so that r is the ratio of the variances that u and e give y. Given r, the covariance of
y is sigma^2 K with K = I + r X X' / m. With K = L L', noise of L^-1 y is independent, and L^-1 X has no background any
more: X' K^-1 X, X' K^-1 y and y' K^-1 y are all that a Gaussian regression sees.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from pyro_l0.selection.design.draft import Draft
from pyro_l0.selection.families.family import Array
from pyro_l0.selection.problem import RATIOS, SelectionPosterior

if TYPE_CHECKING:
    from pyro_l0.selection.problem import Problem

__all__ = ["Background"]

_NONE = 0.5  # prior probability that there is no background; the other ratios share the rest


class Background:
    """What small effects of all features, of each of some ratios, make of a Gaussian regression."""

    def __init__(self, draft: Draft) -> None:
        self._x, self._y = torch.from_numpy(draft.x), torch.from_numpy(draft.y)
        n, p = self._x.shape
        if n > 2 * p:
            # The triangle's rows have the same products, and are p + 1.
            triangle = torch.linalg.qr(torch.column_stack([self._x, self._y]), mode="r").R
            self._x, self._y = triangle[:, :-1], triangle[:, -1]
        # 1 / m, in units of the noise's mean variance.
        noise = 1.0 if draft.root is None else float((draft.root**2).sum()) / len(draft.root)
        self._share = noise / float(draft.variance[: draft.gated].sum())
        self._products = self._share * (self._x @ self._x.T)

    def given(self, problem: Problem, number: int, features: Array | slice = slice(None)) -> tuple[Problem, float]:
        """The regression on some features with noise made independent, given a ratio, and the log of its weight."""
        root = self._root(RATIOS[number])
        columns = torch.column_stack([self._x[:, features], self._y])
        columns = torch.linalg.solve_triangular(root, columns, upper=False)
        prior = math.log((1 - _NONE) / (len(RATIOS) - 1) if number else _NONE)
        found = replace(problem, x=columns[:, :-1], y=columns[:, -1], background=None)
        return found, prior - float(root.diagonal().log().sum())

    def _root(self, ratio: float) -> torch.Tensor:
        """L of K = L L' given r."""
        root: torch.Tensor = torch.linalg.cholesky(torch.eye(len(self._y)).to(self._y) + ratio * self._products)
        return root

    def mean(self, ratio: Array, coefficients: Array) -> Array:
        """Of the small effects at ratios ``(N,)`` given means of the others, both of shape ``(N, p)``."""
        return self._gain(ratio, coefficients @ self._x.numpy().T)

    def _gain(self, ratio: Array, explained: Array) -> Array:
        """The same given what the other effects explain of y, shape ``(N, n)``: r X' K^-1 (y - explained) / m."""
        left = self._y - torch.from_numpy(explained)
        found = np.empty((len(ratio), self._x.shape[1]))
        for r in np.unique(ratio):
            at = ratio == r
            solved = torch.cholesky_solve(left[torch.from_numpy(at)].T, self._root(r))
            found[at] = (r * self._share * (self._x.T @ solved)).T.numpy()
        return found

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        """Draw the small effects given the others: those of the prior, less what these leave of y (Matheron's rule)."""
        draws = found.draws
        assert draws.ratio is not None
        noise, (n, p) = draws.noise_scale[:, None], draws.coefficients.shape
        x = self._x.numpy()
        drawn = np.sqrt(draws.ratio * self._share)[:, None] * noise * rng.standard_normal((n, p))
        apart = draws.coefficients @ x.T + drawn @ x.T + noise * rng.standard_normal((n, len(x)))
        return replace(found, draws=draws._replace(background=drawn + self._gain(draws.ratio, apart)))
