"""Laplace's approximation of the evidence of gate vectors, for any log likelihood of the coefficients.

A log likelihood is a function of a batch: coefficients of shape ``(S, p)`` give ``(S,)``, each from its own row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.maths.spike_slab.collapsed import open_positions
from pyro_l0.maths.spike_slab.quadratic import DenseQuadratic

LogLikelihood = Callable[[Tensor], Tensor]

# Gate vectors whose graphs are held together.
_AT_ONCE = 1024
_ITERATIONS = 100
_HALVINGS = 30
# Share of the slope that a step has to gain.
_ARMIJO = 1e-4


class Laplace(NamedTuple):
    """Laplace's approximation for each of S gate vectors.

    Attributes:
        log_evidence: log of the integral of likelihood times slabs, shape ``(S,)``.
        mode: the coefficients at its maximum, zero behind closed gates, shape ``(S, p)``.
    """

    log_evidence: Tensor
    mode: Tensor


def laplace_evidence(
    log_likelihood: LogLikelihood, z: Tensor, scale: float | Tensor, start: Tensor | None = None
) -> Laplace:
    """Laplace's approximation of the evidence of each vector of gates, exact where the log likelihood is quadratic.

    The modes are found side by side by Newton's method with backtracking. Directions in which the log posterior is
    convex count by the size of their curvature, so that the way goes up for any twice differentiable likelihood.

    Args:
        log_likelihood: of coefficients, shape ``(S, p)`` to ``(S,)``; batches are of any size.
        z: which elements are open, shape ``(S, p)``.
        scale: the slabs' standard deviation: a number, or of shape ``(p,)`` or ``(S, p)``.
        start: coefficients to start from, shape ``(p,)`` or ``(S, p)``; zero by default.

    Raises:
        ValueError: the log likelihood is not finite where the search starts, or has another shape than ``(S,)``.
    """
    like = z if start is None else start
    scale = torch.as_tensor(scale, dtype=like.dtype, device=like.device)
    unit = scale.expand(z.shape)
    begin = torch.zeros_like(unit) if start is None else start.expand(z.shape)
    batches = zip(*(x.split(_AT_ONCE) for x in (z, unit, begin)), strict=True)
    parts = [_laplace(log_likelihood, *batch) for batch in batches]
    return Laplace(*map(torch.cat, zip(*parts, strict=True)))


def expanded(log_likelihood: LogLikelihood, beta: Tensor) -> DenseQuadratic:
    """The log likelihood to second order at some coefficients, shape ``(p,)``, made concave where it is not."""
    objective = _Objective.of(log_likelihood, torch.ones_like(beta)[None], torch.ones_like(beta)[None])
    _, slope, curvature = objective.derivatives(beta[None])
    # The objective's own slab, of scale one, is no part of the likelihood.
    values, vectors = torch.linalg.eigh(curvature[0] - torch.eye(len(beta)).to(beta))
    matrix = (vectors * values.clamp(min=0)) @ vectors.T
    return DenseQuadratic(matrix, slope[0] + beta + matrix @ beta)


class _Objective(NamedTuple):
    """Log likelihood plus log slab of the open elements x, in units of the slabs' scale.

    Attributes:
        log_likelihood: of coefficients.
        place: which elements are open, shape ``(S, k)``.
        unit: their scales; 0 at a padding.
        elements: how many there are in all.
    """

    log_likelihood: LogLikelihood
    place: Tensor
    unit: Tensor
    elements: int

    @staticmethod
    def of(log_likelihood: LogLikelihood, z: Tensor, scale: Tensor) -> _Objective:
        index, valid = open_positions(z.bool())
        return _Objective(log_likelihood, index, scale.gather(1, index) * valid, z.shape[1])

    def coefficients(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.elements).scatter_add(1, self.place, x * self.unit)

    def value(self, x: Tensor) -> Tensor:
        value = self.log_likelihood(self.coefficients(x))
        if value.shape != (len(x),):
            raise ValueError(
                f"Expected a log likelihood of shape ({len(x)},) for coefficients of shape {(len(x), self.elements)}, "
                f"but got {tuple(value.shape)}."
            )
        return value - 0.5 * x.square().sum(1)

    def derivatives(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Value, gradient of shape ``(S, k)`` and minus the Hessian."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = self.value(x)
            (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            columns = [torch.autograd.grad(s.sum(), x, retain_graph=True)[0] for s in slope.unbind(1)]
        hessian = torch.stack(columns, 2)
        return value.detach(), slope.detach(), -0.5 * (hessian + hessian.mT)


def _laplace(log_likelihood: LogLikelihood, z: Tensor, scale: Tensor, start: Tensor) -> Laplace:
    objective = _Objective.of(log_likelihood, z, scale)
    x = torch.where(objective.unit > 0, start.gather(1, objective.place) / objective.unit, 0.0)
    tiny = 10 * torch.finfo(x.dtype).eps
    for _ in range(_ITERATIONS):
        value, slope, curvature = objective.derivatives(x)
        if not bool(torch.isfinite(value).all()):
            raise ValueError(
                "Expected a log likelihood that is finite where the search for the mode starts; set start."
            )
        values, vectors = torch.linalg.eigh(curvature)
        sizes = values.abs().clamp(min=tiny)
        step = (vectors @ ((vectors.mT @ slope[:, :, None]) / sizes[:, :, None])).squeeze(2)
        gain = (slope * step).sum(1)
        moving = gain > tiny * (1 + value.abs())
        x, moved = _ascended(objective, x, step * moving[:, None], value, gain * moving)
        if not bool((moving & moved).any()):
            break
    else:
        warnings.warn(
            f"Newton's method has not found the mode of {int(moving.sum())} of {len(z)} gate vectors in {_ITERATIONS} "
            "steps; their evidence is too small. Look for a likelihood that grows without bound.",
            UserWarning,
            stacklevel=4,
        )
    log_root = 0.5 * values.clamp(min=tiny).log().sum(1)
    return Laplace(value - log_root, objective.coefficients(x))


def _ascended(objective: _Objective, x: Tensor, step: Tensor, value: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Each row moved by the longest of the halved steps that gains enough, and which have moved at all."""
    length = torch.ones_like(value)
    for _ in range(_HALVINGS):
        with torch.no_grad():
            new = objective.value(x + length[:, None] * step)
        enough = (new >= value + _ARMIJO * length * gain) & torch.isfinite(new)
        if bool(enough.all()):
            break
        length = torch.where(enough, length, 0.5 * length)
    length = torch.where(enough, length, 0.0)
    return x + length[:, None] * step, length > 0
