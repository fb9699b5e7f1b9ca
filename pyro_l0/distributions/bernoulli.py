"""The Bernoulli gate: open or closed, and nothing in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints
from torch.types import _size

from pyro_l0.distributions.gate import Bounded, GateDistribution, JointDraw, as_parameters, probability
from pyro_l0.maths.special import Number


class BernoulliGate(GateDistribution):
    r"""Gate that is 1 with probability :math:`\pi = \mathrm{sigmoid}(\mathrm{logits})` and 0 otherwise.

    The exact gate that the others smooth (eq. 2-3 of the L0 paper). It has atoms alone: draws have no pathwise
    derivative, so :class:`~pyro_l0.infer.L0_ELBO` trains it with one of its ``estimators``. Pyro can also enumerate it
    if the gates of a plate act only inside the plate. If a likelihood outside the plate depends on several, Pyro gives
    them all one value, in ``TraceEnum_ELBO`` and in NUTS; use :func:`~pyro_l0.infer.sample_posterior` instead.
    KL(Bernoulli || other gate) has a closed form; the reverse is infinite and refused. KLs to and from Pyro's
    ``Bernoulli`` are torch's.

    Args:
        probs: probability of an open gate, in (0, 1), shape ``batch_shape``.
        logits: log odds of an open gate, instead of ``probs``.

    Raises:
        ValueError: both or neither of ``probs`` and ``logits`` are given, or a value is outside its constraint.

    Example:
        >>> BernoulliGate(torch.tensor([0.25, 0.75])).active_prob
        tensor([0.2500, 0.7500])

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 2-3.
    """

    arg_constraints: ClassVar = {"logits": Bounded()}
    learned: ClassVar = {"logits": constraints.real}
    has_rsample = False
    has_enumerate_support = True

    def __init__(
        self, probs: Number | None = None, logits: Number | None = None, validate_args: bool | None = None
    ) -> None:
        if (logits is None) == (probs is None):
            raise ValueError(f"Expected one of probs and logits, but got probs {probs} and logits {logits}.")
        (given,), _ = as_parameters({}, **({"probs": probs} if logits is None else {"logits": logits}))
        self.logits = torch.logit(given) if logits is None else given
        try:
            super().__init__(self.logits.shape, validate_args=validate_args)
        except ValueError:
            if probs is None:
                raise
            raise ValueError(f"Expected probs above 0 and below 1, but got {probs}; log odds are logits.") from None

    @property
    def probs(self) -> Tensor:
        """Probability of an open gate, shape ``batch_shape``."""
        return torch.sigmoid(self.logits)

    @classmethod
    def parameters_at_rate(cls, rate: Tensor) -> dict[str, Number]:
        """Log odds of the rate."""
        return {"logits": torch.logit(rate)}

    @property
    def log_prob_zero(self) -> Tensor:
        """log P(z = 0), shape ``batch_shape``."""
        return F.logsigmoid(-self.logits)

    @property
    def log_prob_one(self) -> Tensor:
        """log P(z = 1), shape ``batch_shape``."""
        return F.logsigmoid(self.logits)

    @property
    def log_interior_prob(self) -> Tensor:
        """Minus infinity, shape ``batch_shape``."""
        return torch.full_like(self.logits, -math.inf)

    log_active_prob = log_prob_one

    @property
    def active_slope(self) -> Tensor:
        """Derivative of P(z != 0), a logistic function of the location, in it; ``batch_shape``, no gradient."""
        active = self.active_prob.detach()
        return active * (1 - active)

    @property
    def median(self) -> Tensor:
        """1 where the gate is open more often than not, shape ``batch_shape``."""
        return (self.logits > 0).to(self.logits.dtype)

    mean = probs

    @property
    def mode(self) -> Tensor:
        """The likelier value, shape ``batch_shape``; NaN where both are equally likely, as in ``dist.Bernoulli``."""
        return torch.where(self.logits == 0, math.nan, self.median)

    @property
    def variance(self) -> Tensor:
        """Var[z], shape ``batch_shape``."""
        return torch.sigmoid(self.logits) * torch.sigmoid(-self.logits)

    def entropy(self) -> Tensor:
        """Entropy in nats, shape ``batch_shape``."""
        return -(torch.sigmoid(-self.logits) * self.log_prob_zero + torch.sigmoid(self.logits) * self.log_prob_one)

    def sample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Draws without a gradient, shape ``sample_shape + batch_shape``."""
        shape = torch.Size(sample_shape) + self.logits.shape
        u = torch.rand(shape, dtype=self.logits.dtype, device=self.logits.device)
        return (u < torch.sigmoid(self.logits.detach())).to(self.logits.dtype)

    @classmethod
    def draw_jointly(cls, gates: Sequence[Self]) -> JointDraw:
        """Draw once from each of several gates, without a gradient."""
        return JointDraw(gates, [gate.sample() for gate in gates], torch.cat([gate.probs.flatten() for gate in gates]))

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Not available: draws of a binary gate have no derivative."""
        raise NotImplementedError("A BernoulliGate has no pathwise draws; use sample, or an estimator of L0_ELBO.")

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Both values, shape ``(2,) + batch_shape``, or ``(2, 1, ...)`` without ``expand``."""
        values = torch.tensor([0.0, 1.0], dtype=self.logits.dtype, device=self.logits.device)
        values = values.reshape((2,) + (1,) * self.logits.dim())
        return values.expand((2, *self.logits.shape)) if expand else values

    def icdf(self, value: Tensor) -> Tensor:
        """The smallest z with P(Z <= z) >= ``value``."""
        p = probability(value)
        return torch.where(p.isnan(), p, p > torch.sigmoid(-self.logits)).to(self.logits.dtype)

    def log_interior_density(self, z: Tensor) -> Tensor:
        """Minus infinity, as there is no mass between the atoms; shape of z and ``batch_shape``, broadcast."""
        return torch.full_like(z + self.logits, -math.inf)

    def interior_cdf(self, z: Tensor) -> Tensor:
        """P(Z <= z) at 0 <= z < 1, shape of z and ``batch_shape``, broadcast."""
        return torch.sigmoid(-self.logits).expand((z + self.logits).shape)

    def _node_temperature(self) -> float:
        raise TypeError("A BernoulliGate has no density to integrate.")
