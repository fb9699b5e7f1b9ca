"""Laplace's approximation of the evidence of gate vectors, and chains on an expansion that it re-weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pyro_l0.maths.collapsed import CollapsedQuadratic, open_positions
from pyro_l0.maths.second_order import DenseQuadratic, Point, Step, find_maximum, slope_and_curvature
from pyro_l0.maths.tempered_gibbs import GatePrior, GibbsRun, tempered_gibbs

LogLikelihood = Callable[[Tensor], Tensor]

# Gate vectors whose graphs are held together.
_AT_ONCE = 1024


class Laplace(NamedTuple):
    """Laplace's approximation for each of S gate vectors."""

    log_evidence: Tensor  # log of the integral of likelihood times slabs, shape (S,)
    mode: Tensor  # the coefficients at its maximum, zero behind closed gates, shape (S, p)


def laplace_evidence(
    log_likelihood: LogLikelihood, z: Tensor, scale: float | Tensor, start: Tensor | None = None
) -> Laplace:
    """Laplace's approximation of the evidence of each vector of gates, exact where the log likelihood is quadratic.

    Gates z have the shape ``(S, p)``; the slabs' scale and the coefficients to start from, zero by default, have that
    shape or ``(p,)``. The modes are found side by side by Newton's method with backtracking. Directions in which the
    log posterior is convex count by the size of their curvature, so that each step ascends.
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
    slope, matrix = slope_and_curvature(lambda x: log_likelihood(x[None])[0], beta, least=0.0)
    return DenseQuadratic(matrix, slope + matrix @ beta)


class _Objective(NamedTuple):
    """Log likelihood plus log slab of the open elements x, in units of the slabs' scale."""

    log_likelihood: LogLikelihood
    open: Tensor  # which elements are open, shape (S, k)
    unit: Tensor  # their scales; 0 at a padding
    elements: int  # how many there are in all

    def coefficients(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.elements).scatter_add(1, self.open, x * self.unit)

    def value(self, point: Point) -> Tensor:
        (x,) = point
        value = self.log_likelihood(self.coefficients(x))
        if value.shape != (len(x),):
            raise ValueError(
                f"Expected a log likelihood of shape ({len(x)},) for coefficients of shape {(len(x), self.elements)}, "
                f"but got {tuple(value.shape)}."
            )
        return value - 0.5 * x.square().sum(1)

    def step(self, point: Point, value: Tensor) -> Step:
        """By the sizes of the Hessian's eigenvalues, which are kept."""
        with torch.enable_grad():
            x = point[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.value((x,)).sum(), x, create_graph=True)
            columns = [torch.autograd.grad(s.sum(), x, retain_graph=True)[0] for s in slope.unbind(1)]
        slope, hessian = slope.detach(), torch.stack(columns, 2)
        values, vectors = torch.linalg.eigh(-0.5 * (hessian + hessian.mT))
        tiny = 10 * torch.finfo(x.dtype).eps
        sizes = values.abs().clamp(min=tiny)
        step = (vectors @ ((vectors.mT @ slope[:, :, None]) / sizes[:, :, None])).squeeze(2)
        gain = (slope * step).sum(1)
        settled = ~(gain > tiny * (1 + value.abs()))
        return Step((step * ~settled[:, None],), gain, settled, values.clamp(min=tiny))


def _laplace(log_likelihood: LogLikelihood, z: Tensor, scale: Tensor, start: Tensor) -> Laplace:
    index, valid = open_positions(z.bool())
    objective = _Objective(log_likelihood, index, scale.gather(1, index) * valid, z.shape[1])
    x = torch.where(objective.unit > 0, start.gather(1, objective.open) / objective.unit, 0.0)
    if not bool(torch.isfinite(objective.value((x,))).all()):
        raise ValueError("Expected a log likelihood that is finite where the search for the mode starts; set start.")
    (x,), value, step = find_maximum(objective, (x,), "Look for a likelihood that grows without bound.")
    return Laplace(value - 0.5 * step.curvature.log().sum(1), objective.coefficients(x))


TargetT = TypeVar("TargetT")


def sampled_on_expansions(
    expand: Callable[[Tensor], TargetT],
    point: Tensor,
    sample: Callable[[TargetT, float], GibbsRun],
    mean: Callable[[TargetT, GibbsRun], Tensor],
) -> tuple[TargetT, GibbsRun]:
    """Chains on the expansion of a log likelihood, which is taken twice more at the mean that shorter chains find.

    ``expand`` makes a target at a point, ``sample`` runs chains on it for a share of their flips, and ``mean`` is the
    point that a run has as its mean.
    """
    target = expand(point)
    for _ in range(2):
        target = expand(mean(target, sample(target, 1 / 3)))
    return target, sample(target, 1.0)


def gibbs_by_expansion(
    log_likelihood: LogLikelihood,
    scale: float | Tensor,
    prior: GatePrior,
    *,
    start: Tensor,
    gate_of: Tensor | None = None,
    chains: int = 16,
    flips: int = 600,
    generator: torch.Generator | None = None,
) -> tuple[GibbsRun, CollapsedQuadratic]:
    """Sample gates of a likelihood that need not be quadratic, with dense matrices: for up to a hundred or so elements.

    It is expanded at the mode with all gates open, then again at the posterior mean of the coefficients. The states
    that the last run visits are re-weighted by their Laplace evidence over that of the expansion; both are returned, as
    slabs can be drawn from the expansion. The log likelihood must be finite at ``start``, shape ``(p,)``.
    """
    scale = torch.as_tensor(scale, dtype=start.dtype, device=start.device)
    point = laplace_evidence(log_likelihood, torch.ones_like(start)[None], scale, start).mode[0]

    def sample(collapsed: CollapsedQuadratic, share: float) -> GibbsRun:
        return tempered_gibbs(collapsed, prior, chains=chains, flips=int(flips * share), generator=generator)

    def mean(collapsed: CollapsedQuadratic, run: GibbsRun) -> Tensor:
        states, weights = run.distinct()
        return weights @ collapsed.mean(states)

    collapsed, run = sampled_on_expansions(
        lambda at: CollapsedQuadratic(expanded(log_likelihood, at), scale, gate_of=gate_of), point, sample, mean
    )
    return reweighted(run, log_likelihood, collapsed), collapsed


def reweighted(run: GibbsRun, log_likelihood: LogLikelihood, collapsed: CollapsedQuadratic) -> GibbsRun:
    """A run on an expansion, its states re-weighted by their Laplace evidence under the log likelihood itself.

    All chains of the run share one scale and one factor.
    """
    scale = collapsed.scale

    def log_ratio(states: Tensor) -> Tensor:
        elements = collapsed.on(states).to(scale)
        start = collapsed.mean(states)
        return laplace_evidence(log_likelihood, elements, scale, start).log_evidence - collapsed.log_evidence(states)

    return run.reweighted(log_ratio)
