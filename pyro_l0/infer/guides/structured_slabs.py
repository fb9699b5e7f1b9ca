"""Slabs given their gates: one Gaussian of all, or each by itself; from an expansion of the model, then learned."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_l0.infer.guides.expansion import Expansion
from pyro_l0.maths.collapsed import SlabGivenGates, opened, slab_given_gates

_RIDGE = 1e-3  # of the prior's precision, so that the curvature has a factor


class IndependentNormals(NamedTuple):
    """Normals of their own, shape ``(n, p)``."""

    mean: Tensor
    deviation: Tensor

    def draw(self, noise: Tensor) -> Tensor:
        """Slabs from standard normal noise."""
        return self.mean + self.deviation * noise

    def conditionals(self, slabs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each slab."""
        return self.mean, self.deviation


class SlabPosterior(nn.Module):
    """Slabs of p elements given their gates and d other latents; where the gates are closed they have their prior.

    ``gate_of`` says which gate switches each element, shape ``(p,)``, or which do together, shape ``(p, k)``; -1 for
    other latents, which none does.
    """

    gate_of: Tensor
    loc: Tensor
    scale: Tensor
    scale_exponents: Tensor
    loc_shifts: Tensor

    def __init__(self, expansion: Expansion, gate_of: Tensor) -> None:
        super().__init__()
        self.register_buffer("gate_of", gate_of)
        for name in ("loc", "scale", "scale_exponents"):
            self.register_buffer(name, getattr(expansion, name))
        self.register_buffer("loc_shifts", expansion.loc_shifts, persistent=False)
        self.is_centred = not bool(expansion.loc.any() or expansion.loc_shifts.any())
        self.exponents = nn.Parameter(expansion.exponents.clone()) if len(expansion.exponents) else None

    def likelihood_factor(self, hyper: Tensor) -> Tensor | None:
        """What multiplies curvature and linear term, shape ``(n, 1)``; None without other latents."""
        return None if self.exponents is None else (hyper @ self.exponents).exp().unsqueeze(-1)

    def prior_scale(self, hyper: Tensor) -> Tensor:
        """Standard deviations of the slabs' priors, shape ``(n, p)``, or ``(p,)`` without other latents."""
        return self.scale * (hyper @ self.scale_exponents.mT).exp() if hyper.shape[-1] else self.scale

    def prior_loc(self, hyper: Tensor) -> Tensor:
        """Means of the slabs' priors, in the form of their standard deviations."""
        return self.loc + hyper @ self.loc_shifts.mT if hyper.shape[-1] else self.loc

    @abstractmethod
    def given(self, gates: Tensor, hyper: Tensor) -> SlabGivenGates | IndependentNormals:
        """The slabs' Gaussian for n rows of gates and of the other latents' distances from where they started."""


class StructuredSlabs(SlabPosterior):
    r"""A Gaussian of all slabs.

    The log likelihood is taken as quadratic in the coefficients, with curvature :math:`C (I + M) (I + M)^T C^T` and
    linear term :math:`C (C^{-1} b + \delta)`, where :math:`C C^T` and :math:`b` are those of an expansion and M and
    :math:`\delta` are learned from 0: they have no unit, so that one learning rate does for all features.
    """

    factor: Tensor
    linear: Tensor
    shifts: Tensor

    def __init__(self, expansion: Expansion, gate_of: Tensor) -> None:
        super().__init__(expansion, gate_of)
        factor = torch.linalg.cholesky(expansion.curvature + torch.diag(_RIDGE / expansion.scale**2))
        linear = torch.linalg.solve_triangular(factor, expansion.linear.unsqueeze(-1), upper=False).squeeze(-1)
        self.register_buffer("factor", factor)
        self.register_buffer("linear", linear)
        self.register_buffer("shifts", expansion.shifts)
        self.curvature_change = nn.Parameter(torch.zeros_like(factor))
        self.linear_change = nn.Parameter(torch.zeros_like(linear))

    def quadratic(self) -> tuple[Tensor, Tensor]:
        """Curvature and linear term where the other latents started, shapes ``(p, p)`` and ``(p,)``."""
        change = torch.eye(len(self.linear), dtype=self.linear.dtype, device=self.linear.device) + self.curvature_change
        root = self.factor @ change
        return root @ root.mT, self.factor @ (self.linear + self.linear_change)

    def given(self, gates: Tensor, hyper: Tensor) -> SlabGivenGates:
        """The slabs' Gaussian."""
        curvature, linear = self.quadratic()
        factor = self.likelihood_factor(hyper)
        if factor is not None:
            linear = factor * (linear + hyper @ self.shifts.mT)
            curvature = factor.unsqueeze(-1) * curvature
        loc = None if self.is_centred else self.prior_loc(hyper)
        return slab_given_gates(curvature, linear, opened(gates, self.gate_of), self.prior_scale(hyper), loc)


class IndependentSlabs(SlabPosterior):
    """A normal for each slab, given its own gate: at first about the mode with open gates."""

    mode: Tensor

    def __init__(self, expansion: Expansion, gate_of: Tensor) -> None:
        super().__init__(expansion, gate_of)
        self.register_buffer("mode", expansion.mode)
        self.log_curvature = nn.Parameter(expansion.curvature.diagonal().log())
        self.mode_change = nn.Parameter(torch.zeros_like(expansion.mode))  # in standard deviations

    def given(self, gates: Tensor, hyper: Tensor) -> IndependentNormals:
        """The slabs' normals."""
        curvature, prior = self.log_curvature.exp(), self.scale**-2
        mode, loc = self.mode + self.mode_change / (curvature + prior).sqrt(), self.prior_loc(hyper)
        linear = curvature * mode + prior * (mode - self.loc)  # so that the mean with an open gate is the mode
        factor = self.likelihood_factor(hyper)
        if factor is not None:
            curvature, linear = factor * curvature, factor * linear
        gate, scale = opened(gates, self.gate_of), self.prior_scale(hyper)
        precision = scale**-2 + gate.square() * curvature
        mean = (gate * linear + scale**-2 * loc) / precision
        return IndependentNormals(mean, precision.rsqrt())
