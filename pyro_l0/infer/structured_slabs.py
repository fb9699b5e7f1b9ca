"""Slabs whose Gaussian depends on the gates, from an expansion of the model's log likelihood, and learned from there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyro_l0.infer.expansion import Expansion
from pyro_l0.maths.structured_slab import SlabGivenGates, slab_given_gates

__all__ = ["StructuredSlabs"]

_RIDGE = 1e-3  # of the prior's precision, so that the curvature has a factor


class StructuredSlabs(nn.Module):
    r"""A Gaussian of all slabs given their gates and the other latents.

    The log likelihood is taken as quadratic in the coefficients, with curvature :math:`C (I + M) (I + M)^T C^T` and
    linear term :math:`C (C^{-1} b + \delta)`, where :math:`C C^T` and :math:`b` are those of an expansion and M and
    :math:`\delta` are learned from 0: they have no unit, so that one learning rate does for all features.

    Args:
        expansion: of the model's log likelihood.
        gate_of: which gate switches each element, shape ``(p,)``.
    """

    def __init__(self, expansion: Expansion, gate_of: Tensor) -> None:
        super().__init__()
        ridge = torch.diag(_RIDGE / expansion.scale**2)
        factor = torch.linalg.cholesky(expansion.curvature + ridge)
        linear = torch.linalg.solve_triangular(factor, expansion.linear.unsqueeze(-1), upper=False).squeeze(-1)
        for name, value in (
            ("gate_of", gate_of),
            ("factor", factor),
            ("linear", linear),
            ("loc", expansion.loc),
            ("scale", expansion.scale),
            ("shifts", expansion.shifts),
            ("scale_exponents", expansion.scale_exponents),
        ):
            self.register_buffer(name, value.detach())
        self.is_centred = not bool(expansion.loc.any())
        self.curvature_change = nn.Parameter(torch.zeros_like(factor))
        self.linear_change = nn.Parameter(torch.zeros_like(linear))
        self.exponents = nn.Parameter(expansion.exponents.clone()) if len(expansion.exponents) else None

    gate_of: Tensor
    factor: Tensor
    linear: Tensor
    loc: Tensor
    scale: Tensor
    shifts: Tensor
    scale_exponents: Tensor

    def quadratic(self) -> tuple[Tensor, Tensor]:
        """Curvature and linear term where the other latents started, shapes ``(p, p)`` and ``(p,)``."""
        change = torch.eye(len(self.linear), dtype=self.linear.dtype, device=self.linear.device) + self.curvature_change
        root = self.factor @ change
        return root @ root.mT, self.factor @ (self.linear + self.linear_change)

    def likelihood_factor(self, hyper: Tensor) -> Tensor | None:
        """What multiplies curvature and linear term, shape ``(n,)``; None without other latents."""
        return None if self.exponents is None else (hyper @ self.exponents).exp()

    def prior_scale(self, hyper: Tensor) -> Tensor:
        """Standard deviations of the slabs' priors, shape ``(n, p)``, or ``(p,)`` without other latents."""
        return self.scale * (hyper @ self.scale_exponents.mT).exp() if hyper.shape[-1] else self.scale

    def given(self, gates: Tensor, hyper: Tensor) -> SlabGivenGates:
        """The slabs' Gaussian.

        Args:
            gates: shape ``(n, number of gates)``.
            hyper: distances of the other latents from where they started, shape ``(n, d)``.
        """
        curvature, linear = self.quadratic()
        factor = self.likelihood_factor(hyper)
        if factor is not None:
            linear = factor.unsqueeze(-1) * (linear + hyper @ self.shifts.mT)
            curvature = factor[:, None, None] * curvature
        loc = None if self.is_centred else self.loc
        return slab_given_gates(curvature, linear, gates[..., self.gate_of], self.prior_scale(hyper), loc)
