"""Log likelihoods that are quadratic in the coefficients, for samplers of gates.

Up to a constant the log likelihood of coefficients beta is b . beta - beta' A beta / 2 with A positive semidefinite.
Samplers read a few rows of A at a time: of a wide design it is never formed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

# Numbers that one batch of work may hold, and rows of a design's A that are kept: 128 MB and 256 MB of float64.
BATCH = 2**24
KEPT = 2**25
_DENSE = 2000  # columns of a design up to which A is formed at once: 32 MB


class Quadratic(Protocol):
    """b . beta - beta' A beta / 2."""

    linear: Tensor  # b, shape (p,)
    diagonal: Tensor  # that of A, shape (p,)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of A: indices of shape ``(S, k)`` give ``(S, k, p)``."""
        ...

    def blocks(self, index: Tensor) -> Tensor:
        """The square of A that belongs to each row of indices: shape ``(S, k)`` gives ``(S, k, k)``."""
        ...


class DenseQuadratic:
    """A quadratic log likelihood with a given A, symmetric and positive semidefinite, shape ``(p, p)``."""

    def __init__(self, matrix: Tensor, linear: Tensor) -> None:
        if matrix.dim() != 2 or matrix.shape != linear.shape * 2:
            raise ValueError(
                f"Expected a matrix of shape (p, p) and a linear term of shape (p,), but got {tuple(matrix.shape)} "
                f"and {tuple(linear.shape)}."
            )
        self.matrix, self.linear, self.diagonal = matrix, linear, matrix.diagonal()

    def rows(self, index: Tensor) -> Tensor:
        """See :class:`Quadratic`."""
        return self.matrix[index]

    def blocks(self, index: Tensor) -> Tensor:
        """See :class:`Quadratic`."""
        return self.matrix[index[:, :, None], index[:, None, :]]


class DesignQuadratic:
    """A quadratic log likelihood with A = X'X, which is never held as a whole.

    Rows of A are computed when first needed and kept while there is room: a sampler opens few gates, mostly the same.
    """

    def __init__(self, design: Tensor, linear: Tensor) -> None:
        if design.dim() != 2 or design.shape[1:] != linear.shape:
            raise ValueError(
                f"Expected a design of shape (n, p) and a linear term of shape (p,), but got {tuple(design.shape)} and "
                f"{tuple(linear.shape)}."
            )
        self.linear = linear
        self._columns = design.T.contiguous()
        self.diagonal = self._columns.square() @ design.new_ones(1).expand(len(design))
        self._capacity = KEPT // max(len(linear), 1)
        self._forget()

    def rows(self, index: Tensor) -> Tensor:
        """See :class:`Quadratic`."""
        wanted, place = index.unique(return_inverse=True)
        if len(wanted) > self._capacity:
            return self._computed(wanted)[place]
        missing = wanted[self._place[wanted] < 0]
        if self._count + len(missing) > self._capacity:
            self._forget()
            missing = wanted
        self._keep(missing)
        return self._kept[self._place[index]]

    def blocks(self, index: Tensor) -> Tensor:
        """See :class:`Quadratic`."""
        pieces = index.split(max(1, BATCH // max(1, index.shape[1] * self._columns.shape[1])))
        columns = (self._columns[piece] for piece in pieces)
        return torch.cat([x @ x.mT for x in columns])

    def _computed(self, index: Tensor) -> Tensor:
        return self._columns[index] @ self._columns.T

    def _forget(self) -> None:
        self._count = 0
        self._kept = self._columns.new_empty(0, len(self.linear))
        self._place = torch.full_like(self.linear, -1, dtype=torch.long)

    def _keep(self, index: Tensor) -> None:
        end = self._count + len(index)
        if end > len(self._kept):
            grown = self._kept.new_empty(min(max(2 * end, 64), self._capacity), len(self.linear))
            grown[: self._count] = self._kept[: self._count]
            self._kept = grown
        self._kept[self._count : end] = self._computed(index)
        self._place[index] = torch.arange(self._count, end, device=index.device)
        self._count = end


def quadratic_of(design: Tensor, linear: Tensor) -> DenseQuadratic | DesignQuadratic:
    """A quadratic log likelihood with A = X'X, which is formed at once unless it is large."""
    if len(linear) > _DENSE:
        return DesignQuadratic(design, linear)
    return DenseQuadratic(design.T @ design, linear)
