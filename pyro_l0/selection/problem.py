"""A regression with spike-and-slab coefficients, which the methods solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Family", "Prior", "Problem"]

Family = Literal["gaussian", "bernoulli", "categorical", "poisson"]


@dataclass(frozen=True)
class Prior:
    """Known hyperparameters of a regression, or the priors of unknown ones.

    Attributes:
        rate: P(z = 1) of every gate, or the two parameters of its Beta prior.
        slab_scale: standard deviation of the slabs; None if unknown.
        noise_scale: standard deviation of Gaussian noise; None if unknown, or if the family has no noise.
        slab_unit: scale of the half-normal prior of an unknown slab scale.
        noise_unit: scale of the half-Cauchy prior of an unknown noise scale.
        intercept_scale: standard deviation of the normal prior of the intercept, for families other than the Gaussian.
    """

    rate: float | tuple[float, float]
    slab_scale: float | None = None
    noise_scale: float | None = None
    slab_unit: float = 1.0
    noise_unit: float = 1.0
    intercept_scale: float = 10.0


@dataclass(frozen=True)
class Problem:
    """Observations, features and priors: y depends on x beta, and beta_j = z_j w_j with z_j = 0 or 1.

    z_j ~ Bernoulli(rate) and w_j ~ N(0, slab_scale^2). Features may share a gate, and a feature of a categorical
    regression has one gate and a coefficient for each class. A Gaussian regression has no intercept: its observations
    and features were made orthogonal to a constant (``pyro_l0.selection.design``), which integrates out a flat one.

    Attributes:
        family: distribution of y: N(x beta, noise_scale^2), Bernoulli and Categorical with logits x beta (plus
            intercept), Poisson with the logarithm of the mean.
        x: features, float64, shape ``(n, p)``.
        y: observations, float64, shape ``(n,)``; counts, 0 or 1, or the number of a class from 0.
        prior: of the hyperparameters.
        intercept: whether the linear predictor has one, or one for each class.
        outputs: K, linear predictors of an observation: the classes of a categorical regression, otherwise 1.
        gate_of: which of G gates switches each feature, shape ``(p,)``; None if each has its own.
        weight: how many observations each row stands for, shape ``(n,)``; None if it is one. Rows of a Gaussian
            regression were multiplied by its square root.
        observations: number of observations of a Gaussian regression; None if it is the number of rows.
    """

    family: Family
    x: Tensor
    y: Tensor
    prior: Prior
    intercept: bool = False
    outputs: int = 1
    gate_of: Tensor | None = None
    weight: Tensor | None = None
    observations: float | None = None

    @property
    def gates(self) -> int:
        """G."""
        return self.x.shape[1] if self.gate_of is None else int(self.gate_of.max()) + 1

    @property
    def size(self) -> float:
        """Number of observations."""
        return float(len(self.y)) if self.observations is None else self.observations

    def switched(self, z: Tensor) -> Tensor:
        """From values of gates to those of the features that they switch: shape ``(..., G)`` to ``(..., p)``."""
        return z if self.gate_of is None else z[..., self.gate_of]

    def checked(self, z: Tensor) -> Tensor:
        """Gates as bool, if their shape is ``(S, G)`` with at least one row."""
        if z.dim() != 2 or z.shape[1] != self.gates or not len(z):
            raise ValueError(
                f"Expected gates of shape (S, {self.gates}) with at least one row, but got {tuple(z.shape)}."
            )
        return z.to(torch.bool)
