"""The hard concrete gate of the L0 paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pyro.distributions import Logistic
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.types import _size

from pyro_l0.distributions.gate import Bounded, JointDraw, as_parameters, check_rate
from pyro_l0.distributions.stretched import LIMITS, STRETCH_LIMITS, StretchedGate, integrate
from pyro_l0.maths import backend, hard_concrete, quadrature, special
from pyro_l0.maths.quadrature import Nodes, Stretch
from pyro_l0.maths.special import Number


class HardConcrete(StretchedGate):
    r"""Gate on :math:`[0, 1]` with point masses at 0 and at 1.

    Draw s from a binary concrete (log alpha, temperature beta), torch's ``RelaxedBernoulli``, stretch, then clip:

    .. math:: z = \min(1, \max(0, s(\zeta - \gamma) + \gamma)).

    Args:
        log_alpha: location, shape ``batch_shape``.
        temperature: positive, broadcast against ``log_alpha``.
        gamma: lower stretch limit, below 0.
        zeta: upper stretch limit, above 1.

    Example:
        >>> HardConcrete(torch.tensor([-4.0, 4.0])).active_prob
        tensor([0.0831, 0.9963])

    Note:
        Give the temperature as a number where you can. As a tensor on an accelerator it cannot be read, and each
        quadrature (``mean``, ``variance``, ``entropy``, KLs without a closed form) takes nodes for any temperature.

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 10-13 and 23-29.
    """

    arg_constraints: ClassVar = {"log_alpha": Bounded(), "temperature": Bounded(lower=0), **STRETCH_LIMITS}
    learned: ClassVar = {"log_alpha": constraints.real}
    defaults: ClassVar = {"temperature": 2 / 3, **LIMITS}
    fixed = tuple(defaults)

    def __init__(
        self,
        log_alpha: Number,
        temperature: Number = 2 / 3,
        gamma: Number = -0.1,
        zeta: Number = 1.1,
        validate_args: bool | None = None,
    ) -> None:
        (self.log_alpha,), (self._temperature, self._gamma, self._zeta) = as_parameters(
            {"temperature": temperature, "gamma": gamma, "zeta": zeta}, log_alpha=log_alpha
        )
        super().__init__(self.log_alpha.shape, validate_args=validate_args)

    @property
    def temperature(self) -> Tensor:
        """The temperature, above 0, expanded to ``batch_shape``."""
        return self._filled(self._temperature)

    @classmethod
    def parameters_at_rate(
        cls, rate: Tensor, temperature: Number, gamma: Number, zeta: Number, one_given_active: Number | None = None
    ) -> dict[str, Number]:
        """The location for a temperature, which ``one_given_active`` = P(z = 1 | z != 0) determines if given."""
        stretch = cls(torch.zeros_like(rate), temperature, gamma, zeta).stretch
        if one_given_active is not None:
            check_rate("one_given_active", one_given_active, cls.__name__)
            temperature = (torch.logit(rate) - torch.logit(rate * one_given_active)) / (stretch.t1 - stretch.t0)
        log_alpha = torch.logit(rate) + temperature * stretch.t0
        return {"log_alpha": log_alpha, "temperature": temperature, "gamma": gamma, "zeta": zeta}

    @classmethod
    def from_logits(cls, logits: Tensor, **options: Any) -> Self:
        """The hard concrete whose P(z != 0) has the given logits (eq. 12), shape ``batch_shape``.

        Args:
            logits: log odds of an open gate.
            **options: keywords of ``from_active_prob``.

        Example:
            >>> HardConcrete.from_logits(torch.tensor([0.0, 2.0])).active_prob
            tensor([0.5000, 0.8808])
        """
        (logits,), _ = as_parameters({}, logits=logits)
        middle = cls.from_active_prob(torch.tensor(0.5), **options)
        return middle.with_learned(log_alpha=logits + middle.log_alpha)

    @property
    def log_prob_zero(self) -> Tensor:
        """log P(z = 0), shape ``batch_shape``."""
        return self._log_probs()[0]

    @property
    def log_prob_one(self) -> Tensor:
        """log P(z = 1), shape ``batch_shape``."""
        return self._log_probs()[1]

    @property
    def log_interior_prob(self) -> Tensor:
        """log P(0 < z < 1), shape ``batch_shape``."""
        return self._log_probs()[2]

    @property
    def log_active_prob(self) -> Tensor:
        """log P(z != 0) (eq. 12), shape ``batch_shape``."""
        return F.logsigmoid(self.log_alpha - self._temperature * self.stretch.t0)

    def _log_probs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return hard_concrete.log_probs(self.log_alpha, self._temperature, self.stretch)

    @property
    def test_gate(self) -> Tensor:
        """The gate without noise and without temperature (eq. 13), neither median nor mean; shape ``batch_shape``."""
        return hard_concrete.transform(torch.zeros_like(self.log_alpha), self.log_alpha, 1.0, self.stretch)

    @property
    def active_slope(self) -> Tensor:
        """Derivative of P(z != 0), a logistic function of the location, in it; ``batch_shape``, no gradient."""
        active = self.active_prob.detach()
        return active * (1 - active)

    @property
    def median(self) -> Tensor:
        """The smallest z with P(Z <= z) >= 1/2, shape ``batch_shape``."""
        noise = torch.zeros_like(self.log_alpha)
        return hard_concrete.transform(noise, self.log_alpha, self._temperature, self.stretch)

    @property
    def mean(self) -> Tensor:
        """E[z], shape ``batch_shape``."""
        return integrate(lambda nodes, _, gate: hard_concrete.mean(gate.log_alpha, gate._temperature, nodes), self)

    @property
    def variance(self) -> Tensor:
        """Var[z], shape ``batch_shape``."""
        return integrate(
            lambda nodes, stretch, gate: hard_concrete.variance(gate.log_alpha, gate._temperature, stretch, nodes), self
        )

    def entropy(self) -> Tensor:
        """Entropy in nats with respect to the mixed measure; may be negative; shape ``batch_shape``."""
        return integrate(
            lambda nodes, stretch, gate: hard_concrete.entropy(gate.log_alpha, gate._temperature, stretch, nodes), self
        )

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws, shape ``sample_shape + batch_shape``; the derivative is 0 at the atoms."""
        shape = torch.Size(sample_shape) + self.log_alpha.shape
        noise = hard_concrete.logistic_noise(shape, self.log_alpha.dtype, self.log_alpha.device)
        return hard_concrete.transform(noise, self.log_alpha, self._temperature, self.stretch)

    @classmethod
    def draw_jointly(cls, gates: Sequence[Self]) -> JointDraw:
        """Draw once from each of several gates with equal other parameters, which are numbers; pathwise."""
        first = gates[0]
        assert not isinstance(first._temperature, Tensor)  # as concatenate has checked
        log_alphas = [gate.log_alpha for gate in gates]
        draws, active_prob = hard_concrete.draw_jointly(log_alphas, first._temperature, first.stretch)
        return JointDraw(gates, draws, active_prob)

    def icdf(self, value: Tensor) -> Tensor:
        """The smallest z with P(Z <= z) >= ``value``."""
        return hard_concrete.icdf(value, self.log_alpha, self._temperature, self.stretch)

    def base_distribution(self) -> TorchDistribution:
        """Logistic distribution with location log alpha / beta and scale 1 / beta."""
        scale = 1 / self.temperature
        return Logistic(self.log_alpha * scale, scale, validate_args=False)

    def rectify(self, value: Tensor) -> Tensor:
        """The gate for a draw of the base distribution."""
        return hard_concrete.transform(value, torch.zeros_like(value), 1.0, self.stretch)

    def log_interior_density(self, z: Tensor) -> Tensor:
        """Log density with respect to dz at 0 < z < 1, in nats, shape of z and ``batch_shape``, broadcast."""
        return hard_concrete.log_density(z, self.log_alpha, self._temperature, self.stretch)

    def _log_density_in_t(self, nodes: Nodes, stretch: Stretch) -> Tensor:
        if stretch is not self.stretch:
            return super()._log_density_in_t(nodes, stretch)
        return hard_concrete.log_density_in_t(nodes.t, self.log_alpha.unsqueeze(-1), special.last(self._temperature))

    def interior_cdf(self, z: Tensor) -> Tensor:
        """P(Z <= z) at 0 <= z < 1, shape of z and ``batch_shape``, broadcast."""
        return torch.sigmoid(hard_concrete.cdf_logit(z, self.log_alpha, self._temperature, self.stretch))

    def _node_temperature(self) -> float:
        return backend.largest(self._temperature)

    def panel_edges(self, dtype: torch.dtype) -> Tensor:
        """Values of z where panels of a quadrature end, shape ``batch_shape + (k,)``."""
        gamma, _, width, t0, t1 = self.stretch
        top = (self.log_alpha / self._temperature).clamp(min=t0).clamp(max=t1)
        t = quadrature.edges_around(top, 1 / self._temperature, dtype)
        return special.last(gamma) + special.last(width) * torch.sigmoid(t)
