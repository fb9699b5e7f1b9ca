"""A regression with spike-and-slab coefficients, and its posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack
from torch import Tensor
from torch.nn.functional import pad

from pyro_l0.maths.monte_carlo import Trust
from pyro_l0.maths.second_order import Quadratic, SparseColumns, quadratic_of
from pyro_l0.maths.tempered_gibbs import BetaBinomialGates, IndependentGates, open_counts
from pyro_l0.selection.families.family import Family
from pyro_l0.selection.families.likelihood import Likelihood

if TYPE_CHECKING:
    from pyro_l0.selection.design.background import Background

__all__ = ["RATIOS", "BackgroundEffects", "Draws", "JointProblem", "Prior", "Problem", "SelectionPosterior"]

# Of the variances of small effects and of noise, which are summed over.
RATIOS = np.array([0.0, 0.02, 0.08, 0.32, 1.28, 5.12])


class Draws(NamedTuple):
    """N joint draws of a posterior, in the units of its problem.

    Attributes:
        coefficients: sparse, shape ``(N, p K)``, with the K coefficients of a feature side by side. Those of closed
            gates are not stored, so the stored entries show the gates.
        intercept: shape ``(N, K)``; 0 if the problem has none.
        slab_scale: shape ``(N,)``, also if it is known.
        noise_scale: shape ``(N,)``, or ``(N, K)`` of several responses, also if it is known; NaN for a family without
            noise.
        rate: P(z = 1), shape ``(N,)``, also if it is known; NaN if it differs between gates.
        learned: further parameters of the family by name, each of shape ``(N,)`` or ``(N, K)``.
        background: small effects of all features beside the sparse ones, shape ``(N, p)``; None without any.
        ratio: of the variances of these and of the noise, shape ``(N,)``.
        correction: what the log evidence of Laplace's approximation lacks, where this drew them and is too far off,
            NaN if that cannot be told; None elsewhere.
    """

    coefficients: csr_array
    intercept: NDArray[np.float64]
    slab_scale: NDArray[np.float64]
    noise_scale: NDArray[np.float64]
    rate: NDArray[np.float64]
    learned: Mapping[str, NDArray[np.float64]] = {}
    background: NDArray[np.float64] | None = None
    ratio: NDArray[np.float64] | None = None
    correction: float | None = None

    @property
    def total(self) -> csr_array | NDArray[np.float64]:
        """The effects of the features, sparse and small ones, shape ``(N, p K)``."""
        return self.coefficients if self.background is None else self.coefficients.toarray() + self.background

    def rows(self, index: NDArray[np.intp]) -> Draws:
        """The draws at some indices, in that order, without the correction."""
        of_draws = (name for name in self._fields if name not in ("learned", "correction"))
        found = {name: getattr(self, name)[index] for name in of_draws if getattr(self, name) is not None}
        return Draws(**found, learned={name: values[index] for name, values in self.learned.items()})

    @staticmethod
    def joined(parts: Sequence[Draws], index: NDArray[np.intp]) -> Draws:
        """Rows of several sets of draws without further parameters, one set behind the other."""
        coefficients = csr_array(vstack([part.coefficients for part in parts]))
        each = zip(*((part.intercept, part.slab_scale, part.noise_scale, part.rate) for part in parts), strict=True)
        intercept, slab_scale, noise_scale, rate = map(np.concatenate, each)
        return Draws(coefficients, intercept, slab_scale, noise_scale, rate).rows(index)


class BackgroundEffects(NamedTuple):
    """The posterior of small effects of all features, whose variances are a ratio of that of the noise."""

    ratios: NDArray[np.float64]  # of the variances that they and the noise give y, shape (R,)
    probs: NDArray[np.float64]  # of each ratio, shape (R,)
    mean: NDArray[np.float64]  # of the effects, shape (p,)


@dataclass(frozen=True)
class SelectionPosterior(Trust):
    """The posterior of a regression with spike-and-slab coefficients, in the units of its problem.

    Attributes:
        active_probs: P(z = 1 | y) of every gate, shape ``(G,)``.
        mean: means of the coefficients, shape ``(p, K)``.
        sd: standard deviations of the coefficients, shape ``(p, K)``.
        intercept: means of the intercepts, shape ``(K,)``; that of one that was integrated out has no sampling error.
        log_evidence: log p(y) in nats, or its estimate; NaN for a family whose parameters are
            sampled (negative binomial, ordinal, Student-t).
        draws: joint draws.
        error: Monte Carlo standard errors of ``active_probs``, from the differences of chains and the weights of their
            draws, shape ``(G,)``; 0 without chains.
        problems: what else is wrong, in sentences.
        background: small effects of all features beside the coefficients, if the problem has any.
    """

    active_probs: NDArray[np.float64]
    mean: NDArray[np.float64]
    sd: NDArray[np.float64]
    intercept: NDArray[np.float64]
    log_evidence: float
    draws: Draws
    error: NDArray[np.float64]
    problems: tuple[str, ...] = ()
    background: BackgroundEffects | None = None

    @property
    def total(self) -> NDArray[np.float64]:
        """Means of the effects of the features, sparse and small ones, shape ``(p, K)``."""
        return self.mean if self.background is None else self.mean + self.background.mean[:, None]

    @staticmethod
    def of(
        active_probs: Tensor,
        moments: tuple[Tensor, Tensor],
        log_evidence: float,
        draws: Draws,
        error: Tensor,
        problems: tuple[str, ...] = (),
    ) -> SelectionPosterior:
        """From tensors, and means of the coefficients and of their squares."""
        mean, square = moments
        sd = (square - mean.square()).clamp(min=0).sqrt()
        parts = active_probs.numpy(), mean.numpy(), sd.numpy(), draws.intercept.mean(0)
        return SelectionPosterior(*parts, log_evidence, draws, error.numpy(), problems)


@dataclass(frozen=True)
class Prior:
    """Known hyperparameters of a regression, or the priors of unknown ones.

    Attributes:
        rate: P(z = 1) of every gate, or of each, shape ``(G,)``, or the two parameters of its Beta prior.
        slab_scale: standard deviation of the slabs; None if unknown.
        noise_scale: standard deviation of Gaussian noise; None if unknown, or if the family has no such noise.
        slab_unit: scale of the half-normal prior of an unknown slab scale.
        noise_unit: scale of the half-Cauchy prior of an unknown noise scale.
        intercept_scale: standard deviation of the normal prior of the intercept, for families other than the Gaussian.
        always_scale: the same of features that are always in.
    """

    rate: float | tuple[float, float] | NDArray[np.float64]
    slab_scale: float | None = None
    noise_scale: float | None = None
    slab_unit: float = 1.0
    noise_unit: float = 1.0
    intercept_scale: float = 10.0
    always_scale: float = 10.0

    def gates(self) -> IndependentGates | BetaBinomialGates:
        """The prior of gate vectors, with an unknown rate integrated out."""
        if isinstance(self.rate, tuple):
            return BetaBinomialGates(*self.rate)
        if isinstance(self.rate, np.ndarray):
            return IndependentGates(torch.from_numpy(self.rate).logit())
        return IndependentGates(torch.tensor(math.log(self.rate) - math.log1p(-self.rate), dtype=torch.float64))

    def draw_rate(self, z: Tensor, generator: torch.Generator) -> NDArray[np.float64]:
        """P(z = 1) given gates of shape ``(N, G)``, shape ``(N,)``; NaN where each has its own."""
        if not isinstance(self.rate, tuple):
            return np.full(len(z), math.nan if isinstance(self.rate, np.ndarray) else self.rate)
        opened = open_counts(z).numpy()
        # By numpy, as torch draws Beta variables from its global generator alone.
        rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        return rng.beta(self.rate[0] + opened, self.rate[1] + z.shape[1] - opened)

    def log_slab(self, log_scale: Tensor) -> Tensor:
        """Log density of the slab scale's logarithm, by a half-normal scale; 0 where it is known."""
        if self.slab_scale is not None:
            return torch.zeros_like(log_scale)
        t = log_scale - math.log(self.slab_unit)
        return 0.5 * math.log(2 / math.pi) + t - 0.5 * (2 * t).exp()

    def log_noise(self, log_scale: Tensor) -> Tensor:
        """Log density of the noise scale's logarithm, by a half-Cauchy scale; 0 where it is known."""
        if self.noise_scale is not None:
            return torch.zeros_like(log_scale)
        t = log_scale - math.log(self.noise_unit)
        return math.log(2 / math.pi) - torch.logaddexp(t, -t)

    def slab_range(self) -> tuple[float, float]:
        """Log slab scales beyond which the prior has a mass of 2e-5: the known value twice, if it is known."""
        if self.slab_scale is not None:
            return math.log(self.slab_scale), math.log(self.slab_scale)
        return math.log(self.slab_unit) - 10.5, math.log(self.slab_unit) + 1.6


@dataclass(frozen=True)
class Problem:
    """Observations, features and priors: y depends on x beta, and beta_j = z_j w_j with z_j = 0 or 1.

    z_j ~ Bernoulli(rate) and w_j ~ N(0, slab_scale^2). Features may share a gate, and a feature of a categorical
    regression has one gate and a coefficient for each class. A Gaussian regression has no intercept: its observations
    and features were centred (``pyro_l0.selection.design``), which integrates out a flat one.

    Attributes:
        family: distribution of y given linear predictors x beta, plus an intercept.
        x: features, float64, shape ``(n, p)``.
        y: observations as the family says, float64, shape ``(n,)``, or ``(n, K)`` of several responses.
        prior: of the hyperparameters.
        intercept: whether the linear predictor has one, or one for each class.
        always: how many of the features, the last ones, are always in: they have no gate, and a normal prior as the
            intercept. Those of a Gaussian regression were integrated out.
        gate_of: which of G gates switches each other feature, shape ``(p - always,)``; None if each has its own.
        weight: how many observations each row stands for, shape ``(n,)``; None if it is one. Rows of a Gaussian
            regression were multiplied by its square root.
        offset: known part of the linear predictors, shape ``(n, K)``; None if there is none. It was subtracted from y
            of a family with noise.
        observations: number of observations of a Gaussian regression, less those that flat priors take; None if it is
            the number of rows.
        sparse: the features of a Gaussian regression that are sparse; ``x`` then has a shape and no values.
        background: small effects of all features beside the sparse ones, in a Gaussian regression.
    """

    family: Family
    x: Tensor
    y: Tensor
    prior: Prior
    intercept: bool = False
    always: int = 0
    gate_of: Tensor | None = None
    weight: Tensor | None = None
    offset: Tensor | None = None
    observations: float | None = None
    sparse: SparseColumns | None = None
    background: Background | None = None

    @cached_property
    def quadratic(self) -> Quadratic:
        """The log likelihood of a Gaussian regression with noise of deviation 1, less that without features."""
        columns = self.x.T if self.sparse is None else self.sparse
        return quadratic_of(columns, columns @ self.y)

    @cached_property
    def likelihood(self) -> Likelihood:
        """That of the observations, by linear predictors without the offset."""
        return self.family.likelihood(self.y, self.weight, self.offset, self.prior.noise_unit)

    @property
    def outputs(self) -> int:
        """Linear predictors of an observation, K."""
        return self.family.outputs

    @property
    def is_sampled(self) -> bool:
        """Whether the family has parameters of its own, so that the posterior comes from exact chains alone."""
        return not self.family.has_closed_form and self.likelihood.theta.shape[1] > 0

    @property
    def width(self) -> int:
        """The number of features p, those without gates included."""
        return self.x.shape[1]

    @property
    def gates(self) -> int:
        """The number of gates G; features of one group share theirs."""
        return self.x.shape[1] - self.always if self.gate_of is None else int(self.gate_of.max()) + 1

    @property
    def gated(self) -> Tensor:
        """The columns of features with a gate, shape ``(n, p - always)``, which come first."""
        return self.x[:, : self.x.shape[1] - self.always]

    @property
    def ungated(self) -> Tensor:
        """The columns without a gate, which are features that are always in, then the constant of an intercept."""
        features = self.x[:, self.x.shape[1] - self.always :]
        return pad(features, (0, int(self.intercept)), value=1.0)

    @property
    def ungated_precision(self) -> Tensor:
        """Precisions of the normal priors of the coefficients of :attr:`ungated`."""
        scales = [self.prior.always_scale] * self.always + [self.prior.intercept_scale] * self.intercept
        return torch.tensor(scales, dtype=torch.float64) ** -2

    @property
    def size(self) -> float:
        """The number of observations, where moments stand for others than the rows."""
        return float(len(self.y)) if self.observations is None else self.observations

    def switched(self, z: Tensor) -> Tensor:
        """From values of gates to those of the features: shape ``(..., G)`` to ``(..., p)``; 1 for those always in."""
        own = z if self.gate_of is None else z[..., self.gate_of]
        return pad(own, (0, self.always), value=1) if self.always else own

    def checked(self, z: Tensor) -> Tensor:
        """Gates as bool, if their shape is ``(S, G)`` with at least one row."""
        return _checked(z, self.gates)


def _checked(z: Tensor, gates: int) -> Tensor:
    if z.dim() != 2 or z.shape[1] != gates or not len(z):
        raise ValueError(f"Expected gates of shape (S, {gates}) with at least one row, but got {tuple(z.shape)}.")
    return z.to(torch.bool)


@dataclass(frozen=True)
class JointProblem:
    """K Gaussian regressions, each with a noise of its own, that share gates and the scale of the slabs.

    Attributes:
        family: of their responses.
        parts: the regressions, whose responses were divided by their size, so that one slab scale suits all.
        gates_of: which of the gates those of each regression are: a feature that is constant in it has none there.
        prior: of all gates, and of the slab scale.
        gates: number of gates, G.
    """

    family: Family
    parts: tuple[Problem, ...]
    gates_of: tuple[Tensor, ...]
    prior: Prior
    gates: int
    background: None = None
    is_sampled: bool = False

    @property
    def width(self) -> int:
        """Number of gates, which is what chains are the longer for."""
        return self.gates

    def switched(self, z: Tensor) -> Tensor:
        """From values of gates to those of the features of one regression after the other."""
        return torch.cat([part.switched(z[..., own]) for part, own in zip(self.parts, self.gates_of, strict=True)], -1)

    def checked(self, z: Tensor) -> Tensor:
        """Gates as bool, if their shape is ``(S, G)`` with at least one row."""
        return _checked(z, self.gates)
