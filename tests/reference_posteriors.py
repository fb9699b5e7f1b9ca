"""Exact posteriors of Gaussian regressions with spike and slab: every gate vector, and a grid of hyperparameters.

The model is y ~ N(x (z * w), sigma^2), w_j ~ N(0, tau^2), z_j ~ Bernoulli(rate) with each of sigma, tau and rate known
or given a prior. Nothing of the library is used. For one gate vector, let lambda_i and v_i be the eigenvalues and
eigenvectors of D x'x D with D = diag(z), and r = tau^2 / sigma^2; then w given z, y has the covariance
tau^2 sum_i v_i v_i' / (1 + r lambda_i) and the mean r sum_i v_i (v_i . D x'y) / (1 + r lambda_i). So one decomposition
per gate vector serves every sigma and tau. A Beta rate is integrated out, which makes the number of open gates
beta-binomial; sigma and tau are integrated by the trapezoidal rule in their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GaussianPosterior", "LogDensity", "Posterior", "all_gates"]

LogDensity = Callable[[Tensor], Tensor]
_ENTRIES = 2**22  # numbers in the largest tensor that is made at a time
_NEGLIGIBLE = -14.0  # log of the weight, relative to the largest, below which a node of the grid is left out


@dataclass(frozen=True)
class Posterior:
    """What is compared with a fit: of each feature P(z = 1 | y), and mean and standard deviation of z w."""

    inclusion: Tensor
    mean: Tensor
    sd: Tensor
    log_evidence: float  # with every constant
    hyper: dict[str, float]  # means of sigma, log sigma, tau, log tau and rate, of those that are not known


def all_gates(p: int) -> Tensor:
    """Every vector of p gates, shape ``(2**p, p)``."""
    return (torch.arange(2**p)[:, None] >> torch.arange(p)).bitwise_and(1).double()


class GaussianPosterior:
    """The posterior over all gate vectors (rows) and all nodes of a grid of hyperparameters (columns).

    Sigma and tau are numbers or the log densities of their priors, the rate a number or the two parameters of its Beta
    prior. There are ``size`` nodes for each unknown of sigma and tau.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        sigma: float | LogDensity,
        tau: float | LogDensity,
        rate: float | tuple[float, float],
        size: int = 30,
    ) -> None:
        self.n, self.p = x.shape
        self.rate = rate
        self.gates = all_gates(self.p)
        self._decompose(x, y)
        self._square_y = float(y @ y)
        self._priors = (sigma, tau)
        around = (math.log(float(y.std())), 0.0)
        axes = [_start(prior, middle, size) for prior, middle in zip(self._priors, around, strict=True)]
        for _ in range(6):  # each round leaves out what is negligible and places the same number of nodes on the rest
            self._place(*axes)
            axes = [self._zoom(axis, 1 - k) for k, axis in enumerate(axes)]
        self._place(*axes)
        self.log_evidence = float(self._log_joint.flatten().logsumexp(0))
        self.weights = (self._log_joint - self.log_evidence).exp()

    def _decompose(self, x: Tensor, y: Tensor) -> None:
        gram, product = x.T @ x, x.T @ y
        blocks = self.gates.split(max(1, _ENTRIES // self.p**2))
        parts = [torch.linalg.eigh(z[:, :, None] * gram * z[:, None, :]) for z in blocks]
        self._values = torch.cat([values for values, _ in parts]).clamp(min=0.0)
        self._vectors = torch.cat([vectors for _, vectors in parts])
        self._projected = torch.einsum("sji,sj->si", self._vectors, self.gates * product)

    def _place(self, log_sigma: Tensor, log_tau: Tensor) -> None:
        """Weigh every gate vector at every pair of nodes."""
        self._axes = (log_sigma, log_tau)
        nodes = torch.cartesian_prod(log_sigma, log_tau)
        log_prior = torch.zeros(len(nodes), dtype=torch.float64)
        for prior, axis, node in zip(self._priors, self._axes, nodes.T, strict=True):
            if callable(prior):
                log_prior += prior(node.exp()) + node + math.log(float(axis[1] - axis[0]))
        self.log_sigma, self.log_tau = nodes.T
        self._log_joint = torch.cat([block for _, block in self._log_likelihoods()])
        self._log_joint += self._log_gates()[:, None] + log_prior

    def _blocks(self) -> Iterator[slice]:
        step = max(1, _ENTRIES // (self.p * len(self.log_sigma)))
        return (slice(k, k + step) for k in range(0, len(self.gates), step))

    def _shrunk(self, rows: slice) -> Tensor:
        """1 + r lambda, shape ``(rows, nodes, p)``."""
        ratio = (2 * (self.log_tau - self.log_sigma)).exp()
        return 1 + ratio[:, None] * self._values[rows, None, :]

    def _log_likelihoods(self) -> Iterator[tuple[slice, Tensor]]:
        """log p(y | z, sigma, tau), shape ``(rows, nodes)`` per block."""
        alone = -self.n * (self.log_sigma + 0.5 * math.log(2 * math.pi))
        alone = alone - 0.5 * self._square_y * (-2 * self.log_sigma).exp()
        scale = (2 * self.log_tau - 4 * self.log_sigma).exp()
        for rows in self._blocks():
            shrunk = self._shrunk(rows)
            explained = (self._projected[rows, None, :] ** 2 / shrunk).sum(-1)
            yield rows, alone + 0.5 * scale * explained - 0.5 * shrunk.log().sum(-1)

    def _log_gates(self) -> Tensor:
        """Log prior of each gate vector, the rate integrated out."""
        k = self.gates.sum(1)
        if not isinstance(self.rate, tuple):
            return k * math.log(self.rate) + (self.p - k) * math.log1p(-self.rate)
        a, b = self.rate
        constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) - math.lgamma(a + b + self.p)
        return torch.lgamma(a + k) + torch.lgamma(b + self.p - k) + constant

    def _zoom(self, axis: Tensor, other: int) -> Tensor:
        """As many nodes on the part of an axis where the posterior is, and one step beyond."""
        if len(axis) == 1:
            return axis
        weights = self._log_joint.logsumexp(0).reshape(len(self._axes[0]), len(self._axes[1])).logsumexp(other)
        kept = torch.nonzero(weights > weights.max() + _NEGLIGIBLE)[:, 0]
        low, high = max(int(kept[0]) - 1, 0), min(int(kept[-1]) + 1, len(axis) - 1)
        return torch.linspace(float(axis[low]), float(axis[high]), len(axis), dtype=torch.float64)

    def summary(self) -> Posterior:
        """Inclusion probabilities, moments of the coefficients and of the hyperparameters, and the evidence."""
        ratio = (2 * (self.log_tau - self.log_sigma)).exp()
        first, second = torch.zeros(2, self.p, dtype=torch.float64)
        for rows in self._blocks():
            weights, vectors, inverse = self.weights[rows], self._vectors[rows], 1 / self._shrunk(rows)
            means = (ratio[:, None] * inverse * self._projected[rows, None, :]) @ vectors.mT
            spread = torch.einsum("sh,shi->si", weights * (2 * self.log_tau).exp(), inverse)
            first = first + torch.einsum("sh,shj->j", weights, means)
            second = second + torch.einsum("sh,shj->j", weights, means**2)
            second = second + (self.gates[rows] * (vectors**2 @ spread[:, :, None])[:, :, 0]).sum(0)
        inclusion = self.weights.sum(1) @ self.gates
        sd = (second - first**2).clamp(min=0.0).sqrt()
        return Posterior(inclusion, first, sd, self.log_evidence, self._hyper())

    def _hyper(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, prior, node in zip(("sigma", "tau"), self._priors, (self.log_sigma, self.log_tau), strict=True):
            if callable(prior):
                found[name] = float(self.weights.sum(0) @ node.exp())
                found[f"log {name}"] = float(self.weights.sum(0) @ node)
        if isinstance(self.rate, tuple):
            a, b = self.rate
            found["rate"] = float(self.weights.sum(1) @ ((a + self.gates.sum(1)) / (a + b + self.p)))
        return found

    def draws(self, count: int) -> dict[str, Tensor]:
        """Joint draws of z, w and what is unknown of sigma, tau and rate, with torch's generator.

        A node stands for the values of its cell, so draws of sigma and tau are spread over it.
        """
        index = torch.multinomial(self.weights.flatten(), count, replacement=True)
        row, node = index // self.weights.shape[1], index % self.weights.shape[1]
        z, logs = self.gates[row], []
        for axis, values in zip(self._axes, (self.log_sigma, self.log_tau), strict=True):
            step = float(axis[1] - axis[0]) if len(axis) > 1 else 0.0
            logs.append(values[node] + step * (torch.rand(count, dtype=torch.float64) - 0.5))
        sigma, tau = logs[0].exp(), logs[1].exp()
        ratio = (tau / sigma)[:, None] ** 2
        shrunk = 1 + ratio * self._values[row]
        noise = torch.randn(count, self.p, dtype=torch.float64)
        coordinates = ratio * self._projected[row] / shrunk + tau[:, None] * noise / shrunk.sqrt()
        found = {"z": z, "w": (self._vectors[row] @ coordinates[:, :, None])[:, :, 0]}
        found |= {
            name: v
            for name, v, prior in zip(("sigma", "tau"), (sigma, tau), self._priors, strict=True)
            if callable(prior)
        }
        if isinstance(self.rate, tuple):
            k = z.sum(1)
            found["rate"] = torch.distributions.Beta(self.rate[0] + k, self.rate[1] + self.p - k).sample()
        return found


def _start(prior: float | LogDensity, middle: float, size: int) -> Tensor:
    """The nodes of the first round: a known value alone, or e^-12 to e^8 times what is expected."""
    if callable(prior):
        return torch.linspace(middle - 12.0, middle + 8.0, size, dtype=torch.float64)
    return torch.tensor([math.log(prior)], dtype=torch.float64)
