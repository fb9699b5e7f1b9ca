"""NOTEARS, linear and with a perceptron per node, written from the papers as a rival of gates on the edges of a graph.

Zheng, Aragam, Ravikumar, Xing (2018), arXiv:1803.01422, Algorithm 1; Zheng, Dan, Aragam, Ravikumar, Xing (2020),
arXiv:1909.13189. Both minimise least squares and an L1 penalty under h(W) = tr exp(W * W) - d = 0 by an
augmented Lagrangian, whose steps L-BFGS takes, and leave out edges below a threshold of 0.3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.linalg import expm
from scipy.optimize import minimize
from torch import Tensor

__all__ = ["notears_linear", "notears_mlp"]

THRESHOLD = 0.3
H_TOLERANCE, LARGEST_RHO = 1e-8, 1e16
PROGRESS, GROWTH = 0.25, 10.0  # what h must fall to before rho stays, and what rho grows by

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]


def notears_linear(x: Tensor, l1: float = 0.1) -> Tensor:
    """The edges of a linear structural model, shape ``(d, d)``; entry (i, j) is true for an edge from i to j.

    Args:
        x: data, shape ``(n, d)``.
        l1: price of the absolute weights.
    """
    n, d = x.shape
    x = (x - x.mean(0)).double()
    gram = x.T @ x / n

    def objective(parts: Tensor) -> tuple[Tensor, Tensor]:
        positive, negative = parts.view(2, d, d)
        weight = positive - negative
        residual = torch.eye(d).double() - weight
        loss = 0.5 * (gram * (residual @ residual.T)).sum() + l1 * parts.sum()  # least squares per example
        return loss, weight

    no_loop = [(0.0, 0.0 if i == j else None) for _ in range(2) for i in range(d) for j in range(d)]
    return _solve(objective, torch.zeros(2 * d * d).double(), no_loop)


def notears_mlp(x: Tensor, hidden: int = 10, l1: float = 0.01, l2: float = 0.01, seed: int = 0) -> Tensor:
    """The edges of a non-linear structural model, as :func:`notears_linear` returns them.

    Node j is a perceptron of ``hidden`` sigmoid units; the strength of edge (i, j) is the norm of its weights on i.

    Args:
        x: data, shape ``(n, d)``.
        hidden: units of each node's perceptron.
        l1: price of the absolute weights of first layers.
        l2: price of half of all squared weights.
        seed: of the first weights.
    """
    n, d = x.shape
    x = (x - x.mean(0)).double()
    sizes = [d * d * hidden, d * d * hidden, d * hidden, d * hidden, d]

    def objective(parts: Tensor) -> tuple[Tensor, Tensor]:
        positive, negative, first_bias, second, second_bias = parts.split(sizes)
        first = (positive - negative).view(d, d * hidden)  # from i to (j, unit)
        units = torch.sigmoid(x @ first + first_bias)
        predicted = (units.view(n, d, hidden) * second.view(d, hidden)).sum(-1) + second_bias
        loss = 0.5 * (x - predicted).square().sum() / n + l1 * (positive.sum() + negative.sum())
        loss = loss + 0.5 * l2 * (first.square().sum() + second.square().sum())
        squared = first.view(d, d, hidden).square().sum(-1)
        return loss, (squared + 1e-24).sqrt()  # whose derivative at 0 is finite

    generator = torch.Generator().manual_seed(seed)
    start = torch.cat([0.1 * torch.rand(size, generator=generator).double() for size in sizes])
    edges = [(0.0, 0.0 if i == j else None) for i in range(d) for j in range(d) for _ in range(hidden)]
    return _solve(objective, start, 2 * edges + (2 * d * hidden + d) * [(None, None)])


def _solve(objective: Objective, start: Tensor, bounds: list[tuple[float | None, float | None]]) -> Tensor:
    """Dual ascent on the multiplier of h, until the graph has no cycle but for rounding."""
    found = start.numpy() * [bound != (0.0, 0.0) for bound in bounds]
    rho, multiplier, h = 1.0, 0.0, np.inf

    def lagrangian(parts: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(parts).requires_grad_()
        loss, weight = objective(leaf)
        cycles, slope = _cycles(weight.detach().numpy())
        # Of the same gradient as the multiplier's and the quadratic term of h, without differentiating an exponential.
        linear = (multiplier + rho * cycles) * (torch.from_numpy(slope) * weight).sum()
        (gradient,) = torch.autograd.grad(loss + linear, leaf)
        return loss.item() + multiplier * cycles + 0.5 * rho * cycles**2, gradient.numpy()

    while h > H_TOLERANCE and rho < LARGEST_RHO:
        while True:
            candidate = minimize(lagrangian, found, method="L-BFGS-B", jac=True, bounds=bounds).x
            weight = objective(torch.from_numpy(candidate))[1]
            now = _cycles(weight.numpy())[0]
            if now <= PROGRESS * h or rho >= LARGEST_RHO:
                break
            rho *= GROWTH
        found, h = candidate, now
        multiplier += rho * h
    return weight.abs() > THRESHOLD


def _cycles(weight: np.ndarray) -> tuple[float, np.ndarray]:
    """h(W), which is 0 where the graph has no cycle (Theorem 1 of the first paper), and its gradient."""
    exponential = expm(weight * weight)
    return float(exponential.trace() - len(weight)), 2 * weight * exponential.T
