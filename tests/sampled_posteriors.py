"""Posteriors of regressions with spike and slab for any likelihood: enumeration with sampled evidences; long chains.

The log likelihood is a function of the linear predictor that adds over observations. Both ways are right in the limit
and share nothing but the derivatives of that function, so that they check one another. They know numbers alone, neither
Pyro nor the library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ChainPosterior", "Problem", "SampledPosterior", "importance_sampled_posterior", "long_chain_posterior"]

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


@dataclass(frozen=True)
class ChainPosterior:
    """Inclusion probabilities and moments of z * w over all chains; ``error``: largest standard error of the former."""

    inclusion: Tensor
    mean: Tensor
    sd: Tensor
    error: float


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


@torch.no_grad()
def long_chain_posterior(problem: Problem, steps: int, chains: int, seed: int, burn: float = 0.1) -> ChainPosterior:
    """Metropolis chains that open, close, move and exchange coefficients; right for any likelihood.

    A step of each chain takes a random feature and proposes its gate and slab anew, then takes a random open and a
    random closed feature and proposes to exchange them. A slab is proposed from a normal that depends on the other
    coefficients alone, so both moves are reversible.
    """
    torch.manual_seed(seed)
    p = problem.x.shape[1]
    chain = _Chain(problem, chains)
    start = int(burn * steps)
    sums = torch.zeros(3, chains, p, dtype=torch.float64)
    for t in range(steps):
        chain.renew(torch.randint(p, (chains,)))
        chain.exchange(torch.randint(p, (chains,)), torch.randint(p, (chains,)))
        if t >= start:
            sums += torch.stack([(chain.beta != 0).double(), chain.beta, chain.beta**2])
    per_chain = sums[0] / (steps - start)
    inclusion, mean, square = sums.mean(1) / (steps - start)
    error = float((per_chain.std(0) / math.sqrt(chains)).max())
    return ChainPosterior(inclusion, mean, (square - mean**2).sqrt(), error)


class _Chain:
    """Coefficients of several chains, exactly 0 where the gate is closed, and their linear predictors."""

    def __init__(self, problem: Problem, chains: int) -> None:
        self.problem, self.rows = problem, torch.arange(chains)
        self.features = problem.x.T.contiguous()
        self.beta = torch.zeros(chains, problem.x.shape[1], dtype=torch.float64)
        self.eta = torch.zeros(chains, len(problem.x), dtype=torch.float64)
        self.log_odds = math.log(problem.rate) - math.log1p(-problem.rate)

    def _log_likelihood(self, eta: Tensor) -> Tensor:
        return self.problem.log_likelihood(eta).sum(-1)

    def _proposal(self, eta: Tensor, x: Tensor) -> torch.distributions.Normal:
        """Two Newton's steps from 0 for one slab, the other coefficients being in ``eta``."""
        mean = torch.zeros(x.shape[:-1], dtype=torch.float64)
        for _ in range(2):
            first, second = self.problem.slopes(eta + mean[..., None] * x)
            precision = (x**2 * (-second).clamp(min=0.0)).sum(-1) + self.problem.tau**-2
            mean = mean + ((x * first).sum(-1) - mean * self.problem.tau**-2) / precision
        return torch.distributions.Normal(mean, 1.1 / precision.sqrt())

    def _open(self, beta: Tensor) -> Tensor:
        """Log prior density of one open coefficient over the prior mass of a closed one."""
        return self.log_odds + _log_slab(beta[..., None], self.problem.tau)

    def renew(self, j: Tensor) -> None:
        """Gate and slab of feature j, proposed together."""
        old, x = self.beta[self.rows, j], self.features[j]
        rest = self.eta - old[:, None] * x
        proposal = self._proposal(rest, x)
        new = proposal.sample()
        values = torch.stack([proposal.mean, new, old])
        closed, *opened = self._log_likelihood(torch.cat([rest[None], rest + values[:, :, None] * x]))
        # Of the open target over the proposal, with the closed target as unit.
        excess = torch.stack(opened) + self._open(values) - closed - proposal.log_prob(values)
        log_odds = excess[0]  # how often the open state is proposed; any function of the rest will do
        is_open = torch.rand(len(j)) < torch.sigmoid(log_odds)
        into = torch.where(is_open, excess[1] - log_odds, 0.0)
        out_of = torch.where(old != 0, excess[2] - log_odds, 0.0)
        accept = torch.rand(len(j)).log() < into - out_of
        self._move(accept, j, torch.where(is_open, new, 0.0), rest, x)

    def exchange(self, i: Tensor, j: Tensor) -> None:
        """Close one feature and open the other; chains where not exactly the first is open stay as they are."""
        old = self.beta[self.rows, i]
        fits = (old != 0) & (self.beta[self.rows, j] == 0)
        rest = self.eta - old[:, None] * self.features[i]
        forth_and_back = self._proposal(rest, torch.stack([self.features[j], self.features[i]]))
        new = forth_and_back.sample()[0]
        eta = torch.stack([rest + new[:, None] * self.features[j], self.eta])
        values = torch.stack([new, old])
        excess = self._log_likelihood(eta) + self._open(values) - forth_and_back.log_prob(values)
        accept = fits & (torch.rand(len(i)).log() < excess[0] - excess[1])
        self._move(accept, i, torch.zeros_like(old), rest, self.features[i])
        self._move(accept, j, new, self.eta, self.features[j])

    def _move(self, accept: Tensor, j: Tensor, value: Tensor, rest: Tensor, x: Tensor) -> None:
        self.beta[self.rows, j] = torch.where(accept, value, self.beta[self.rows, j])
        self.eta = torch.where(accept[:, None], rest + value[:, None] * x, self.eta)
