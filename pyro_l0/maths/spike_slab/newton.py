"""Newton's method with a line search, for many functions side by side, and derivatives to second order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Objective", "Point", "Step", "find_maximum", "jacobian", "slope_and_curvature"]

_ITERATIONS, _HALVINGS = 100, 40
_ARMIJO = 1e-4  # share of the promised gain that a step must bring

# S arguments, and whatever else is linear in them, such as linear predictors; each of shape (S, ...).
Point = tuple[Tensor, ...]


class Step(NamedTuple):
    """A Newton step from each of S points."""

    moves: Point
    gain: Tensor  # slope . step, shape (S,)
    settled: Tensor  # which points need no further step, shape (S,); they take this one without a check
    curvature: Tensor  # what the objective keeps of the second derivatives


class Objective(Protocol):
    """S functions to be maximised."""

    def value(self, point: Point) -> Tensor:
        """Shape ``(S,)``."""
        ...

    def step(self, point: Point, value: Tensor) -> Step:
        """The Newton step from a point of known values."""
        ...


def find_maximum(objective: Objective, point: Point, advice: str = "") -> tuple[Point, Tensor, Step]:
    """Take Newton steps, each halved until it gains enough: the last point, its values, and the step to take next.

    The advice ends the warning of maxima that were not found.
    """
    value = objective.value(point)
    step = objective.step(point, value)
    for _ in range(_ITERATIONS):
        if bool(step.settled.all()):
            break
        point, value, moved = _ascended(objective, point, value, step)
        if not moved:
            break
        step = objective.step(point, value)
    else:
        if advice:
            warnings.warn(
                f"Newton's method has not found the mode of {int((~step.settled).sum())} of {len(value)} gate vectors "
                f"in {_ITERATIONS} steps; their evidence is too small. {advice}",
                UserWarning,
                stacklevel=5,
            )
    return point, value, step


def _ascended(objective: Objective, point: Point, value: Tensor, step: Step) -> tuple[Point, Tensor, bool]:
    """Points after the longest of the halved steps that gains enough, their values, and whether any has moved."""
    length = torch.ones_like(value)
    for _ in range(_HALVINGS):
        with torch.no_grad():
            there = _moved(point, step.moves, length)
            new = objective.value(there)
        enough = step.settled | ((new - value >= _ARMIJO * length * step.gain) & (new < math.inf))
        if bool(enough.all()):
            return there, new, True
        length = torch.where(enough, length, 0.5 * length)
    there = _moved(point, step.moves, torch.where(enough, length, 0.0))
    return there, torch.where(enough, new, value), bool((enough & ~step.settled).any())


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
