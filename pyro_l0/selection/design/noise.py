"""Steps of a Gaussian regression to independent noise of one scale, and without features that are always in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.linalg import orth, solve_triangular, svdvals
from scipy.sparse import csr_array, hstack
from sklearn.utils import check_array
from torch.nn.functional import pad

from pyro_l0.maths.second_order import SparseColumns, shrunk
from pyro_l0.selection.design.draft import Draft, Step, check_sizes
from pyro_l0.selection.families.family import Array
from pyro_l0.selection.problem import SelectionPosterior

__all__ = ["IntegrateOut", "Weigh", "Whiten", "root_of"]


class Weigh(Step):
    """Rows times the roots of their weights: sums of squares are those of repeated rows."""

    def apply(self, draft: Draft) -> None:
        if draft.weight is None or not draft.family.has_closed_form:
            return
        root = np.sqrt(draft.weight)
        draft.y = draft.y * root
        if isinstance(draft.x, SparseColumns):
            draft.x = draft.x.weighed(torch.from_numpy(root))
        else:
            draft.x *= root[:, None]


class Whiten(Step):
    """Noise of a known covariance made independent: L^-1 y and L^-1 X, of the covariance noise_scale^2 L L'.

    The log evidence is that of y apart from what an intercept and features with a flat prior explain, which are the
    span of U with U'U = I: its density is that of the whitened y over det(L) det(U'(LL')^-1 U)^1/2.
    """

    _log_volume = 0.0  # the logarithm of these determinants

    def apply(self, draft: Draft) -> None:
        if draft.root is None:
            return
        always = draft.x[:, draft.gated if draft.always_in_scale is None else len(draft.gate_of) :]
        flat = np.hstack([np.ones((len(draft.y), int(draft.fit_intercept))), always])
        flat /= np.linalg.norm(flat, axis=0)
        stretch = svdvals(solve_triangular(draft.root, orth(flat), lower=True)) if flat.size else np.ones(1)
        self._log_volume = float(np.log(draft.root.diagonal()).sum() + np.log(stretch).sum())
        draft.x, draft.y = (solve_triangular(draft.root, part, lower=True) for part in (draft.x, draft.y))
        check_sizes(draft, " that was whitened by noise_covariance")

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        return replace(found, log_evidence=found.log_evidence - self._log_volume)


def root_of(covariance: ArrayLike, rows: int) -> Array:
    """The lower Cholesky factor of a covariance, which is given itself, by this factor, or by variances alone."""
    given = check_array(covariance, dtype=np.float64, ensure_2d=False, input_name="noise_covariance")
    if given.shape not in ((rows,), (rows, rows)):
        raise ValueError(
            f"Expected noise_covariance of shape ({rows}, {rows}), with a row and a column for each row of X, or "
            f"variances of shape ({rows},), but got {given.shape}; pass those of the rows that are fitted."
        )
    matrix = np.diag(given) if given.ndim == 1 else given
    is_factor = given.ndim == 2 and not np.triu(matrix, 1).any()
    if is_factor and not np.tril(matrix, -1).any() and (matrix.diagonal() != 1).any():
        raise ValueError(
            "Expected noise_covariance to be a covariance or its Cholesky factor, but a diagonal matrix may be either; "
            f"pass the variances alone, of shape ({rows},)."
        )
    root, wrong = (matrix, 0) if is_factor else torch.linalg.cholesky_ex(torch.from_numpy(matrix))
    root, is_symmetric = np.asarray(root), np.abs(matrix - matrix.T).max() <= 1e-6 * np.abs(matrix).max()
    # The deviation of each row's noise, and of what of it the rows before do not tell.
    whole, rest = np.linalg.norm(root, axis=1), root.diagonal()
    is_definite = not wrong and (rest > np.sqrt(rows * np.finfo(np.float64).eps) * whole).all()
    if not is_definite or not (is_factor or is_symmetric):
        raise ValueError(
            "Expected noise_covariance to be symmetric and, beyond rounding, positive definite, or to be its lower "
            "Cholesky factor, but it is neither; pass an upper factor R as R.T, or add the variance of independent "
            "noise to the diagonal."
        )
    return root


class IntegrateOut(Step):
    """Features A of a Gaussian regression that are always in, which its problem then has not.

    Their coefficients are N(0, s^2 noise_scale^2), with an infinite s for a flat prior. Given those of the others, X,
    they have the mean B'Q'(y - X beta) and the covariance noise_scale^2 B'B, B'B = (A'A + s^-2)^-1 and Q = A B'.
    """

    _root = np.empty((0, 0))  # B, shape (k, a)

    def apply(self, draft: Draft) -> None:
        gated, x, y, scale = draft.gated, draft.x, torch.from_numpy(draft.y), draft.always_in_scale
        if not draft.always or not draft.family.has_closed_form:
            return
        if isinstance(x, SparseColumns):
            always = x[gated:].dense() / x[gated:].divisor
        else:
            always = torch.from_numpy(x[:, gated:])
        n, missing = len(y), max(0, draft.always - len(y))  # directions of which the data say nothing
        left, sizes, right = torch.linalg.svd(pad(always, (0, 0, 0, missing)), full_matrices=False)
        precision = 0.0 if scale is None else scale**-2
        seen = (sizes > max(always.shape) * torch.finfo(sizes.dtype).eps * sizes[0]) | (precision > 0)
        gains = (sizes[seen].square() + precision).rsqrt()
        q, rest = left[:n, seen] * sizes[seen] * gains, precision * gains.square()
        # (I - Q t Q')^2 = I - QQ', as the columns of Q are orthogonal and their squares sum to 1 - rest.
        along = q, 1 / (1 + rest.sqrt())
        if isinstance(x, SparseColumns):
            crossed, draft.x = x[:gated] @ q, x[:gated].shrunk(*along)
        else:
            first = torch.from_numpy(x[:, :gated])
            crossed, draft.x = first.T @ q, shrunk(first, *along).numpy()
        self._root, self._crossed = (gains[:, None] * right[seen]).numpy(), crossed.T.numpy()
        self._target, draft.y = (q.T @ y).numpy(), shrunk(y, *along).numpy()
        self._log_evidence = 0.5 * float(rest.log().sum()) if precision else 0.0  # what no other feature changes
        draft.deviation, draft.gate_of, draft.always = draft.deviation[:gated], draft.gate_of[:gated], 0
        draft.taken += 0 if precision else len(gains)
        if draft.taken >= draft.number:
            raise ValueError(
                f"Expected more observations than features that are always in take, but they, and an intercept, take "
                f"{draft.taken:g} of {draft.number:g}; set always_in_scale."
            )

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        if not len(self._root):
            return found
        draws, means = found.draws, self._means(found.draws.total)
        noise = draws.noise_scale[:, None] * rng.standard_normal((len(means), len(self._root)))
        # Deviations are partly those of the draws.
        variance = means.var(0) + (draws.noise_scale**2).mean() * (self._root**2).sum(0)
        coefficients = csr_array(hstack([draws.coefficients, csr_array(means + noise @ self._root)]))
        background = found.background
        if background is not None and draws.background is not None:  # of these features there is none
            draws = draws._replace(background=np.pad(draws.background, ((0, 0), (0, means.shape[1]))))
            background = background._replace(mean=np.pad(background.mean, (0, means.shape[1])))
        return replace(
            found,
            background=background,
            mean=np.concatenate([found.mean, self._means(found.total.T).T]),
            sd=np.concatenate([found.sd, np.sqrt(variance)[:, None]]),
            draws=draws._replace(coefficients=coefficients),
            log_evidence=found.log_evidence + self._log_evidence,
        )

    def _means(self, beta: csr_array | Array) -> Array:
        """Of the coefficients given those of the other features, shape ``(N, p)`` to ``(N, a)``."""
        found: Array = (self._target - beta @ self._crossed.T) @ self._root
        return found
