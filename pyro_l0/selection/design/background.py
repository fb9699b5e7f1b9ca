r"""Small effects of all features beside the sparse ones, as noise of a covariance that the features have.

The model is y = X (beta + u) + e with e ~ N(0, sigma^2) and u_j ~ N(0, sigma^2 r / m), m the sum of the variances of
the features that have a gate, so that r is the ratio of the variances that u and e give y. Given r, the covariance of
y is sigma^2 (I + r X X' / m). With X X' = W S W', X and y are turned to W'X and W'y, in which the noise of row i is
independent, of variance sigma^2 (1 + r s_i / m). Divided by its root, they have no background any more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import pad

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
        x, y = torch.from_numpy(draft.x), torch.from_numpy(draft.y)
        if len(y) > x.shape[1]:
            sizes, vectors = torch.linalg.eigh(x.T @ x)
            seen = sizes > len(y) * torch.finfo(x.dtype).eps * sizes[-1]
            sizes, vectors = sizes[seen], vectors[:, seen]
            along = vectors.T @ (x.T @ y) / sizes.sqrt()
            rest = (y - x @ (vectors @ (along / sizes.sqrt()))).norm()
            # All of y that no feature reaches is one row.
            self._x, self._y = pad(sizes.sqrt()[:, None] * vectors.T, (0, 0, 0, 1)), torch.cat([along, rest[None]])
            sizes = pad(sizes, (0, 1))
        else:
            sizes, vectors = torch.linalg.eigh(x @ x.T)
            self._x, self._y = vectors.T @ x, vectors.T @ y
        # 1 / m, in units of the noise's mean variance.
        noise = 1.0 if draft.root is None else float((draft.root**2).sum()) / len(draft.root)
        self._share = noise / float(draft.variance[: draft.gated].sum())
        self._sizes = sizes.clamp(min=0) * self._share

    def given(self, problem: Problem, number: int) -> tuple[Problem, float]:
        """The regression with noise made independent, given a ratio, and the logarithm of its weight."""
        root = (1 + RATIOS[number] * self._sizes).rsqrt()
        prior = math.log((1 - _NONE) / (len(RATIOS) - 1) if number else _NONE)
        found = replace(problem, x=root[:, None] * self._x, y=root * self._y, background=None)
        return found, float(root.log().sum()) + prior

    def mean(self, ratio: Array, coefficients: Array) -> Array:
        """Of the small effects at ratios ``(N, 1)`` given means of the others, both of shape ``(N, p)``."""
        return self._gain(ratio, coefficients @ self._x.numpy().T)

    def _gain(self, ratio: Array, explained: Array) -> Array:
        """The same given what the other effects explain of y, shape ``(N, n)``."""
        gain = ratio * self._share / (1 + ratio * self._sizes.numpy())
        found: Array = (gain * (self._y.numpy() - explained)) @ self._x.numpy()
        return found

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        """Draw the small effects given the others: those of the prior, less what these leave of y (Matheron's rule)."""
        draws = found.draws
        assert draws.ratio is not None
        ratio, noise, (n, p) = draws.ratio[:, None], draws.noise_scale[:, None], draws.coefficients.shape
        x = self._x.numpy()
        drawn = np.sqrt(ratio * self._share) * noise * rng.standard_normal((n, p))
        apart = draws.coefficients @ x.T + drawn @ x.T + noise * rng.standard_normal((n, len(x)))
        return replace(found, draws=draws._replace(background=drawn + self._gain(ratio, apart)))
