r"""Gaussian slabs given their gates, for a log likelihood that is quadratic in the coefficients.

With coefficients :math:`\beta = z \circ w`, prior :math:`w \sim N(\mu, S^2)` (S diagonal) and log likelihood
:math:`b^T \beta - \tfrac12 \beta^T A \beta`, the slabs given the gates are Gaussian. With
:math:`c = b - A (z \circ \mu)`,

.. math:: w = \mu + m + S L^{-T} \epsilon, \quad L L^T = I + S D_z A D_z S, \quad m = S (L L^T)^{-1} S D_z c.

The diagonal of what is factorised is 1 for closed gates, whose slabs have their prior.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlabGivenGates(NamedTuple):
    """The Gaussian of slabs given their gates, for a batch of n gate vectors over p elements."""

    cholesky: Tensor  # L, shape (n, p, p)
    mean: Tensor  # of the slabs, shape (n, p)
    scale: Tensor  # standard deviations of the prior, shape (n, p) or what broadcasts to it

    def draw(self, noise: Tensor) -> Tensor:
        """Slabs from standard normal noise, shapes ``(n, p)``."""
        spread: Tensor = torch.linalg.solve_triangular(self.cholesky.mT, noise.unsqueeze(-1), upper=True)
        return self.mean + self.scale * spread.squeeze(-1)

    def conditionals(self, slabs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each slab given those behind it, at a draw and its noise.

        Row j of L^T (w - mean) / S = noise holds the slabs from j on: their densities multiply to the joint one.
        """
        deviation = self.scale / self.cholesky.diagonal(dim1=-2, dim2=-1)
        return slabs - deviation * noise, deviation


def slab_given_gates(
    curvature: Tensor, linear: Tensor, gates: Tensor, scale: Tensor, loc: Tensor | None = None
) -> SlabGivenGates:
    """The slabs' Gaussian given gates z of each element, shape ``(n, p)``, and the prior's scales and means.

    The curvature A and the linear term b may have a batch dimension n.
    """
    if loc is not None:
        linear = linear - torch.einsum("...ij,...j->...i", curvature, gates * loc)
    gated = gates * scale
    precision = gated.unsqueeze(-1) * curvature * gated.unsqueeze(-2)
    precision = precision + torch.eye(gates.shape[-1], dtype=gates.dtype, device=gates.device)
    cholesky = torch.linalg.cholesky(precision)
    offset = scale * torch.cholesky_solve((gated * linear).unsqueeze(-1), cholesky).squeeze(-1)
    return SlabGivenGates(cholesky, offset if loc is None else loc + offset, scale)
