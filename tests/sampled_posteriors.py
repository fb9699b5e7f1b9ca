"""Posteriors of regressions with spike and slab for any likelihood: enumeration with sampled evidences.

The log likelihood is a function of the linear predictor that adds over observations. Neither Pyro nor the library is
used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Problem", "SampledPosterior", "importance_sampled_posterior"]

_T = 10.0  # degrees of freedom of the proposals: heavier tails than those of any posterior with a normal prior
_BLOCK = 2**23  # linear predictors that are made at a time


@dataclass(frozen=True)
class Problem:
    """A regression with known hyperparameters."""

    x: Tensor
    log_likelihood: Callable[[Tensor], Tensor]  # from linear predictors to a term for each observation
    tau: float
    rate: float

    def slopes(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """First and second derivatives of each observation's term."""
        with torch.enable_grad():
            eta = eta.detach().requires_grad_()
            (first,) = torch.autograd.grad(self.log_likelihood(eta).sum(), eta, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), eta)
        return first.detach(), second


@dataclass(frozen=True)
class SampledPosterior:
    """Inclusion probabilities, moments of z * w and log evidence, with the effective share of the draws."""

    inclusion: Tensor
    mean: Tensor
    sd: Tensor
    log_evidence: float
    effective: float


def importance_sampled_posterior(problem: Problem, count: int, seed: int) -> SampledPosterior:
    """Every gate vector, its evidence by importance sampling with so many draws of t proposals at the mode.

    Closed slabs keep their prior and drop out, so only the open ones are sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    n, p = problem.x.shape
    gates, logs, firsts, seconds, shares = [], [], [], [], []
    for k in range(p + 1):
        subsets = list(itertools.combinations(range(p), k))
        chosen = torch.tensor(subsets, dtype=torch.long).reshape(len(subsets), k)
        for part in chosen.split(max(1, _BLOCK // (count * n))):
            log_evidence, mean, square, share = _evidence(problem, part, count, generator)
            gates.append(torch.zeros(len(part), p, dtype=torch.float64).scatter_(1, part, 1.0))
            firsts.append(torch.zeros_like(gates[-1]).scatter_(1, part, mean))
            seconds.append(torch.zeros_like(gates[-1]).scatter_(1, part, square))
            logs.append(log_evidence + k * math.log(problem.rate) + (p - k) * math.log1p(-problem.rate))
            shares.append(share)
    log_joint = torch.cat(logs)
    weights = log_joint.softmax(0)
    mean, square = weights @ torch.cat(firsts), weights @ torch.cat(seconds)
    return SampledPosterior(
        weights @ torch.cat(gates),
        mean,
        (square - mean**2).sqrt(),
        float(log_joint.logsumexp(0)),
        float(weights @ torch.cat(shares)),
    )


def _evidence(
    problem: Problem, chosen: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log evidence, mean and mean square of the open coefficients, and effective share of the draws, by gate vector.

    ``chosen`` has the open features of each gate vector, shape ``(m, k)``.
    """
    m, k = chosen.shape
    x = problem.x.T[chosen]  # m k n
    mode, precision = _mode(problem, x)
    factor = torch.linalg.cholesky(precision)
    noise = torch.randn(m, count, k, generator=generator, dtype=torch.float64)
    normals = torch.randn(m, count, int(_T), generator=generator, dtype=torch.float64)
    noise = noise / (normals.square().mean(-1, keepdim=True)).sqrt()
    beta = mode[:, None] + torch.linalg.solve_triangular(factor.mT, noise.mT, upper=True).mT
    log_q = math.lgamma((_T + k) / 2) - math.lgamma(_T / 2) - 0.5 * k * math.log(_T * math.pi)
    log_q = log_q - 0.5 * (_T + k) * torch.log1p(noise.square().sum(-1) / _T)
    log_q = log_q + factor.diagonal(dim1=1, dim2=2).log().sum(-1, keepdim=True)
    log_p = problem.log_likelihood(beta @ x).sum(-1) + _log_slab(beta, problem.tau)
    ratios = log_p - log_q
    weights = ratios.softmax(1)
    mean = (weights[:, :, None] * beta).sum(1)
    square = (weights[:, :, None] * beta**2).sum(1)
    return ratios.logsumexp(1) - math.log(count), mean, square, 1 / weights.square().sum(1) / count


def _log_slab(beta: Tensor, tau: float) -> Tensor:
    return -0.5 * beta.square().sum(-1) / tau**2 - beta.shape[-1] * (math.log(tau) + 0.5 * math.log(2 * math.pi))


def _mode(problem: Problem, x: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior modes of the open coefficients and the precisions there, by Newton's steps with backtracking."""
    m, k, _ = x.shape
    beta = torch.zeros(m, k, dtype=torch.float64)
    prior = torch.eye(k, dtype=torch.float64) / problem.tau**2

    def value(at: Tensor) -> Tensor:
        return problem.log_likelihood((at[:, None] @ x)[:, 0]).sum(-1) + _log_slab(at, problem.tau)

    for _ in range(100):
        first, second = problem.slopes((beta[:, None] @ x)[:, 0])
        gradient = (x @ first[:, :, None])[:, :, 0] - beta / problem.tau**2
        # Where an observation's term curves upwards, as a t's does in its tails, a step goes uphill without it.
        curvature = x @ (x * (-second).clamp(min=0.0)[:, None]).mT + prior
        step = torch.linalg.solve(curvature, gradient[:, :, None])[:, :, 0]
        length, now = torch.ones(m, 1, dtype=torch.float64), value(beta)
        for _ in range(30):
            worse = value(beta + length * step) < now
            if not bool(worse.any()):
                break
            length = torch.where(worse[:, None], length / 2, length)
        beta = beta + length * step
        if k == 0 or float((step * gradient).sum(-1).max()) < 1e-12:
            break
    _, second = problem.slopes((beta[:, None] @ x)[:, 0])
    values, vectors = torch.linalg.eigh(prior - x @ (x * second[:, None]).mT)
    return beta, (vectors * values.clamp(min=0.1 / problem.tau**2)[:, None]) @ vectors.mT
