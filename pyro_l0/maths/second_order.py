"""Second-order tools: Newton's method, quadratic log likelihoods, expansions and Laplace's approximation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple, Protocol

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
        self.linear = linear
        self._columns = design.T.contiguous()
        self.diagonal = self._columns.square() @ design.new_ones(1).expand(len(design))
        self._capacity = KEPT // max(len(linear), 1)
        self._forget()

    def rows(self, index: Tensor) -> Tensor:
        """See :class:`Quadratic`."""
        wanted, inverse = index.unique(return_inverse=True)
        if len(wanted) > self._capacity:
            return self._computed(wanted)[inverse]
        missing = wanted[self._slot[wanted] < 0]
        if self._count + len(missing) > self._capacity:
            self._forget()
            missing = wanted
        self._keep(missing)
        return self._kept[self._slot[index]]

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
        self._slot = torch.full_like(self.linear, -1, dtype=torch.long)

    def _keep(self, index: Tensor) -> None:
        end = self._count + len(index)
        if end > len(self._kept):
            grown = self._kept.new_empty(min(max(2 * end, 64), self._capacity), len(self.linear))
            grown[: self._count] = self._kept[: self._count]
            self._kept = grown
        self._kept[self._count : end] = self._computed(index)
        self._slot[index] = torch.arange(self._count, end, device=index.device)
        self._count = end


def quadratic_of(design: Tensor, linear: Tensor) -> DenseQuadratic | DesignQuadratic:
    """A quadratic log likelihood with A = X'X, which is formed at once unless it is large."""
    if len(linear) > _DENSE:
        return DesignQuadratic(design, linear)
    return DenseQuadratic(design.T @ design, linear)


_ITERATIONS, _HALVINGS = 100, 40
_ARMIJO = 1e-4  # share of the promised gain that a step must bring

# S arguments, and whatever else is linear in them, such as linear predictors; each of shape (S, ...).
Point = tuple[Tensor, ...]


class Step(NamedTuple):
    """A Newton step from each of S points."""

    moves: Point
    gain: Tensor  # slope . step, shape (S,)
    converged: Tensor  # which points need no further step, shape (S,); they take this one without a check
    curvature: Tensor  # what is to be kept of the second derivatives


# The values of S functions, shape ``(S,)``, and the Newton step from points of known values.
Value = Callable[[Point], Tensor]
NextStep = Callable[[Point, Tensor], Step]


def maximise(value_at: Value, step_from: NextStep, point: Point, advice: str = "") -> tuple[Point, Tensor, Step]:
    """Take Newton steps, each halved until it gains enough: the last point, its values, and the step to take next.

    The advice ends the warning of maxima that were not found.
    """
    value = value_at(point)
    step = step_from(point, value)
    for _ in range(_ITERATIONS):
        if bool(step.converged.all()):
            break
        point, value, moved = _ascended(value_at, point, value, step)
        if not moved:
            break
        step = step_from(point, value)
    else:
        if advice:
            warnings.warn(
                f"Newton's method has not found the mode of {int((~step.converged).sum())} of {len(value)} gate "
                f"vectors in {_ITERATIONS} steps; their evidence is too small. {advice}",
                UserWarning,
                stacklevel=5,
            )
    return point, value, step


def _ascended(value_at: Value, point: Point, value: Tensor, step: Step) -> tuple[Point, Tensor, bool]:
    """Points after the longest of the halved steps that gains enough, their values, and whether any has moved."""
    length = torch.ones_like(value)
    for _ in range(_HALVINGS):
        with torch.no_grad():
            there = _moved(point, step.moves, length)
            new = value_at(there)
        enough = step.converged | ((new - value >= _ARMIJO * length * step.gain) & (new < math.inf))
        if bool(enough.all()):
            return there, new, True
        length = torch.where(enough, length, 0.5 * length)
    there = _moved(point, step.moves, torch.where(enough, length, 0.0))
    return there, torch.where(enough, new, value), bool((enough & ~step.converged).any())


def _moved(point: Point, moves: Point, length: Tensor) -> Point:
    return tuple(x + length.to(x).view(-1, *[1] * (x.dim() - 1)) * move for x, move in zip(point, moves, strict=True))


def jacobian(values: Tensor, at: Tensor) -> Tensor:
    """Of a vector of values by a vector, shape ``(len(values), len(at))``; zero where nothing depends on it."""
    if not values.requires_grad:
        return at.new_zeros(len(values), len(at))
    unit = torch.eye(len(values), dtype=values.dtype, device=values.device)
    (rows,) = torch.autograd.grad(
        values, at, unit, is_grads_batched=True, allow_unused=True, materialize_grads=True, retain_graph=True
    )
    return rows.detach()


@torch.enable_grad()
def slope_and_curvature(function: Callable[[Tensor], Tensor], at: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """The gradient of a function, shape ``(p,)``, and its negative Hessian with eigenvalues of at least ``least``."""
    at = at.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(at), at, create_graph=True)
    hessian = -jacobian(slope, at)
    eye = torch.eye(len(at)).to(at)
    _, not_positive = torch.linalg.cholesky_ex(hessian - least * eye)
    curvature = 0.5 * (hessian + hessian.mT)
    if int(not_positive):
        values, vectors = torch.linalg.eigh(curvature.double())
        curvature = ((vectors * values.clamp(min=least)) @ vectors.mT).to(curvature)
    return slope.detach(), curvature


def quadratic_at(function: Callable[[Tensor], Tensor], at: Tensor) -> DenseQuadratic:
    """A function of coefficients to second order at some of them, shape ``(p,)``, made concave where it is not."""
    slope, matrix = slope_and_curvature(function, at, least=0.0)
    return DenseQuadratic(matrix, slope + matrix @ at)


LogLikelihood = Callable[[Tensor], Tensor]

_AT_ONCE = 1024  # gate vectors whose graphs are held together


class Laplace(NamedTuple):
    """Laplace's approximation for each of S gate vectors."""

    log_evidence: Tensor  # log of the integral of likelihood times slabs, shape (S,)
    mode: Tensor  # the coefficients at its maximum, zero behind closed gates, shape (S, p)


def laplace(log_likelihood: LogLikelihood, z: Tensor, scale: float | Tensor, start: Tensor | None = None) -> Laplace:
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


def _laplace(log_likelihood: LogLikelihood, z: Tensor, scale: Tensor, start: Tensor) -> Laplace:
    index, valid = open_positions(z.bool())
    unit = scale.gather(1, index) * valid  # of the open elements; 0 at a padding

    def coefficients(x: Tensor) -> Tensor:
        """From those of the open elements, in units of their scales."""
        return x.new_zeros(z.shape).scatter_add(1, index, x * unit)

    def value_at(point: Point) -> Tensor:
        beta = coefficients(point[0])
        value = log_likelihood(beta)
        if value.shape != beta.shape[:1]:
            raise ValueError(
                f"Expected a log likelihood of shape ({len(beta)},) for coefficients of shape {tuple(beta.shape)}, but "
                f"got {tuple(value.shape)}."
            )
        return value - 0.5 * point[0].square().sum(1)

    def step_from(point: Point, value: Tensor) -> Step:
        """By the sizes of the Hessian's eigenvalues, which are kept."""
        with torch.enable_grad():
            x = point[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(value_at((x,)).sum(), x, create_graph=True)
            columns = [torch.autograd.grad(s.sum(), x, retain_graph=True)[0] for s in slope.unbind(1)]
        slope, hessian = slope.detach(), torch.stack(columns, 2)
        values, vectors = torch.linalg.eigh(-0.5 * (hessian + hessian.mT))
        tiny = 10 * torch.finfo(x.dtype).eps
        sizes = values.abs().clamp(min=tiny)
        step = (vectors @ ((vectors.mT @ slope[:, :, None]) / sizes[:, :, None])).squeeze(2)
        gain = (slope * step).sum(1)
        converged = ~(gain > tiny * (1 + value.abs()))
        return Step((step * ~converged[:, None],), gain, converged, values.clamp(min=tiny))

    x = torch.where(unit > 0, start.gather(1, index) / unit, 0.0)
    if not bool(torch.isfinite(value_at((x,))).all()):
        raise ValueError("Expected a log likelihood that is finite where the search for the mode starts; set start.")
    (x,), value, step = maximise(value_at, step_from, (x,), "Look for a likelihood that grows without bound.")
    return Laplace(value - 0.5 * step.curvature.log().sum(1), coefficients(x))


def open_positions(on: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the true entries of each row, padded with 0, and which are no padding; at least one column."""
    row, element = on.nonzero(as_tuple=True)
    count = on.sum(1)
    slot = torch.arange(len(row), device=on.device) - (count.cumsum(0) - count)[row]
    index = row.new_zeros(len(on), max(int(count.max()), 1) if len(on) else 1)
    valid = torch.zeros_like(index, dtype=torch.bool)
    index[row, slot], valid[row, slot] = element, True
    return index, valid
