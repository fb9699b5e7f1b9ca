r"""A generalised linear regression to second order in its coefficients, with the intercepts integrated out.

With g and H the slope and minus the curvature of each observation's log likelihood in its K linear predictors eta, and
r = g + H eta, the log likelihood is r . (c + X beta) - (c + X beta)' H (c + X beta) / 2 and a constant. Let F F' = H,
R = F' X and J = F' 1. Intercepts c ~ N(0, s^2) leave the quadratic

.. math:: A = R'R - R'J (J'J + s^{-2})^{-1} J'R, \quad b = X'r - R'J (J'J + s^{-2})^{-1} 1'r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_l0.maths.second_order import Quadratic, quadratic_of
from pyro_l0.selection.gate_vectors.likelihoods import likelihood_of
from pyro_l0.selection.problem import Problem

__all__ = ["Expansion", "expanded", "gate_of", "null_predictor"]


@dataclass(frozen=True)
class Expansion:
    """The log likelihood of the coefficients, to second order and up to a constant."""

    problem: Problem
    quadratic: Quadratic  # of the coefficients, the K of a feature side by side, shape (p K,)
    intercept: Tensor  # mean of the intercepts where all coefficients are zero, shape (K,)
    slope: Tensor  # by how much that mean falls with each coefficient, shape (K, p K)

    def predictor(self, beta: Tensor) -> Tensor:
        """Linear predictors at some coefficients, of shape ``(p K,)``, and the mean of the intercepts given these."""
        return self.intercept - self.slope @ beta + self.problem.x @ beta.view(-1, self.problem.outputs)


def null_predictor(problem: Problem) -> Tensor:
    """Linear predictors of the model without features, shape ``(n, K)``, with half an observation more per outcome."""
    y, zero = problem.y, problem.y.new_zeros(len(problem.y), problem.outputs)
    weight = torch.ones_like(y) if problem.weight is None else problem.weight
    if not problem.intercept:
        return zero
    n, total = weight.sum(), (weight * y).sum()
    if problem.family == "poisson":
        return zero + ((total + 0.5) / n).log()
    if problem.family == "bernoulli":
        return zero + ((total + 0.5) / (n - total + 0.5)).log()
    log_counts = (y.long().bincount(weight, minlength=problem.outputs) + 0.5).log()
    return zero + log_counts - log_counts.mean()


def expanded(problem: Problem, eta: Tensor) -> Expansion:
    """The log likelihood of a problem that is not Gaussian to second order at some linear predictors, ``(n, K)``."""
    x, outputs = problem.x, problem.outputs
    slope, curvature = (part[0] for part in likelihood_of(problem).derivatives(eta[None]))
    values, vectors = torch.linalg.eigh(curvature)
    root = vectors * values.clamp(min=0).sqrt()[:, None, :]  # F
    residual = slope + (curvature @ eta[:, :, None]).squeeze(2)
    design = torch.einsum("nki,nj->nijk", root, x).reshape(len(x) * outputs, -1)
    linear = (x.T @ residual).flatten()
    intercept, falls = x.new_zeros(outputs), x.new_zeros(outputs, design.shape[1])
    if problem.intercept:
        columns = root.mT.reshape(-1, outputs)  # J
        precision = problem.prior.intercept_scale**-2
        inverse = torch.linalg.inv(columns.T @ columns + precision * torch.eye(outputs).to(x))
        intercept = inverse @ residual.sum(0)
        crossed = columns.T @ design
        linear = linear - crossed.T @ intercept
        falls = inverse @ crossed
        # (I - U t U')^2 = I - J (J'J + s^-2)^-1 J' for the left singular vectors U of J.
        left, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
        shrunk = 1 - (precision / (sizes.square() + precision)).sqrt()
        design = design - (left * shrunk) @ (left.T @ design)
    return Expansion(problem, quadratic_of(design, linear), intercept, falls)


def gate_of(problem: Problem) -> Tensor | None:
    """Which gate switches each coefficient, shape ``(p K,)``; None where each has its own."""
    if problem.outputs == 1:
        return problem.gate_of
    return problem.switched(torch.arange(problem.gates)).repeat_interleave(problem.outputs)
