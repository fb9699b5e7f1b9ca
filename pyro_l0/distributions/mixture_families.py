"""The three mixture-distributed gates: two exponentials, two exponentials with a uniform share, two power laws."""

from __future__ import annotations

from typing import ClassVar, Self

from torch import Tensor

from pyro_l0.distributions.mixture import MixtureGate
from pyro_l0.distributions.parameters import Bounded
from pyro_l0.distributions.stretched import STRETCH_LIMITS
from pyro_l0.maths.components import Exponential, ExponentialUniform, PowerLaw
from pyro_l0.maths.special import Number


class BetaMixtureGate(MixtureGate):
    """A mixture gate whose component has the one parameter ``beta``."""

    _fixed = ("beta", "gamma", "zeta")
    default_beta: ClassVar[float]

    def __init__(
        self,
        logits: Number,
        beta: Number | None = None,
        gamma: Number = -0.1,
        zeta: Number = 1.1,
        validate_args: bool | None = None,
    ) -> None:
        beta = self.default_beta if beta is None else beta
        self._set(logits, validate_args, beta=beta, gamma=gamma, zeta=zeta)

    @classmethod
    def from_active_prob(
        cls,
        active_prob: Number,
        beta: Number | None = None,
        gamma: Number = -0.1,
        zeta: Number = 1.1,
        validate_args: bool | None = None,
    ) -> Self:
        """The gate with P(z != 0) = ``active_prob``.

        Args:
            active_prob: wanted rate, between the rates of the two components, of the shape that the gate gets.
            beta: sharpness; by default ``default_beta``, the paper's choice for MNIST.
            gamma: lower stretch limit.
            zeta: upper stretch limit.
            validate_args: whether the gate checks its arguments later on.

        Raises:
            ValueError: a parameter is outside its constraint, or this gate cannot reach the rate; the message
                states its range.

        Example:
            >>> from pyro_l0 import ExponentialGate
            >>> ExponentialGate.from_active_prob(0.25).active_prob
            tensor(0.2500)
        """
        beta = cls.default_beta if beta is None else beta
        return cls._from_active_prob(active_prob, validate_args, beta=beta, gamma=gamma, zeta=zeta)


class ExponentialGate(BetaMixtureGate):
    r"""Gate from a mixture of two truncated exponentials, stretched and clipped (MDR-Exp).

    .. math::
        s \sim (1 - q) \frac{\beta e^{-\beta s}}{1 - e^{-\beta}} + q \frac{\beta e^{\beta (s - 1)}}{1 - e^{-\beta}},
        \qquad z = \min(1, \max(0, s (\zeta - \gamma) + \gamma)).

    ``log_prob`` is a log mass at 0 and 1 and a log density in between, with respect to
    :math:`\delta_0 + \mathrm{Lebesgue}(0, 1) + \delta_1`. Half-precision parameters are computed in float32.

    Args:
        logits: log odds of the weight q of the component near 1, shape ``batch_shape``.
        beta: positive, broadcast against ``logits``; larger is nearer to binary (the paper calls it a temperature).
        gamma: lower stretch limit, below 0.
        zeta: upper stretch limit, above 1.

    Shape:
        ``rsample(sample_shape)`` gives ``sample_shape + batch_shape``.

    Raises:
        ValueError: a parameter is outside its constraint, or the shapes do not broadcast.

    Example:
        >>> import torch
        >>> ExponentialGate(torch.tensor([-4.0, 4.0])).active_prob
        tensor([0.0986, 0.9835])

    References:
        Huang, Chen, Wu, Learning sparse neural networks through mixture-distributed regularization; eq. 4-6.
    """

    arg_constraints: ClassVar = {"logits": Bounded(), "beta": Bounded(lower=0), **STRETCH_LIMITS}
    default_beta: ClassVar[float] = 30.0

    @property
    def _component(self) -> Exponential:
        return Exponential(self._beta)


class PowerLawGate(BetaMixtureGate):
    r"""Gate from a mixture of two power laws, stretched and clipped (MDR-PowerLaw).

    .. math::
        s \sim \frac{1 - q}{\beta} s^{1/\beta - 1} + \frac{q}{\beta} (1 - s)^{1/\beta - 1},
        \qquad z = \min(1, \max(0, s (\zeta - \gamma) + \gamma)).

    ``log_prob`` is a log mass at 0 and 1 and a log density in between, with respect to
    :math:`\delta_0 + \mathrm{Lebesgue}(0, 1) + \delta_1`. Half-precision parameters are computed in float32.

    Args:
        logits: log odds of the weight q of the component near 1, shape ``batch_shape``.
        beta: above 1, broadcast against ``logits``; larger is nearer to binary.
        gamma: lower stretch limit, below 0.
        zeta: upper stretch limit, above 1.

    Shape:
        ``rsample(sample_shape)`` gives ``sample_shape + batch_shape``.

    Raises:
        ValueError: a parameter is outside its constraint, or the shapes do not broadcast.

    Example:
        >>> import torch
        >>> PowerLawGate(torch.tensor([-4.0, 4.0])).active_prob
        tensor([0.0771, 0.9810])

    References:
        Huang, Chen, Wu, Learning sparse neural networks through mixture-distributed regularization; eq. 8.
    """

    arg_constraints: ClassVar = {"logits": Bounded(), "beta": Bounded(lower=1), **STRETCH_LIMITS}
    default_beta: ClassVar[float] = 40.0

    @property
    def _component(self) -> PowerLaw:
        return PowerLaw(self._beta)


class ExponentialUniformGate(MixtureGate):
    r"""Gate from two truncated exponentials and a uniform share, stretched and clipped (MDR-ExpUni).

    .. math::
        s \sim (1 - \epsilon) \Big[(1 - q) \frac{\beta e^{-\beta s}}{1 - e^{-\beta}}
        + q \frac{\beta e^{\beta (s - 1)}}{1 - e^{-\beta}}\Big] + \epsilon,
        \qquad z = \min(1, \max(0, s (\zeta - \gamma) + \gamma)).

    The uniform share keeps the density between the components away from 0, and with it the gradient's variance.
    ``log_prob`` is a log mass at 0 and 1 and a log density in between, with respect to
    :math:`\delta_0 + \mathrm{Lebesgue}(0, 1) + \delta_1`. Half-precision parameters are computed in float32.

    Args:
        logits: log odds of the weight q of the component near 1, shape ``batch_shape``.
        beta: positive, broadcast against ``logits``; larger is nearer to binary (the paper calls it a temperature).
        epsilon: uniform share, in (0, 1), broadcast against ``logits``.
        gamma: lower stretch limit, below 0.
        zeta: upper stretch limit, above 1.

    Shape:
        ``rsample(sample_shape)`` gives ``sample_shape + batch_shape``.

    Raises:
        ValueError: a parameter is outside its constraint, or the shapes do not broadcast.

    Example:
        >>> import torch
        >>> ExponentialUniformGate(torch.tensor([-4.0, 4.0])).active_prob
        tensor([0.2179, 0.9775])

    References:
        Huang, Chen, Wu, Learning sparse neural networks through mixture-distributed regularization; eq. 7.
    """

    arg_constraints: ClassVar = {
        "logits": Bounded(),
        "beta": Bounded(lower=0),
        "epsilon": Bounded(0.0, 1.0),
        **STRETCH_LIMITS,
    }
    _fixed = ("beta", "epsilon", "gamma", "zeta")
    _epsilon: Number

    def __init__(
        self,
        logits: Number,
        beta: Number = 25.0,
        epsilon: Number = 0.1,
        gamma: Number = -0.1,
        zeta: Number = 1.1,
        validate_args: bool | None = None,
    ) -> None:
        self._set(logits, validate_args, beta=beta, epsilon=epsilon, gamma=gamma, zeta=zeta)

    @property
    def epsilon(self) -> Tensor:
        """Uniform share, shape ``batch_shape``."""
        return self._filled(self._epsilon)

    @property
    def _component(self) -> ExponentialUniform:
        return ExponentialUniform(self._beta, self._epsilon)

    @classmethod
    def from_active_prob(
        cls,
        active_prob: Number,
        beta: Number = 25.0,
        epsilon: Number = 0.1,
        gamma: Number = -0.1,
        zeta: Number = 1.1,
        validate_args: bool | None = None,
    ) -> Self:
        """The gate with P(z != 0) = ``active_prob``.

        Args:
            active_prob: wanted rate, between the rates of the two components, of the shape that the gate gets.
            beta: sharpness; 25 is the paper's choice for MNIST.
            epsilon: uniform share.
            gamma: lower stretch limit.
            zeta: upper stretch limit.
            validate_args: whether the gate checks its arguments later on.

        Raises:
            ValueError: a parameter is outside its constraint, or this gate cannot reach the rate; the message
                states its range.

        Example:
            >>> ExponentialUniformGate.from_active_prob(0.25).active_prob
            tensor(0.2500)
        """
        return cls._from_active_prob(active_prob, validate_args, beta=beta, epsilon=epsilon, gamma=gamma, zeta=zeta)
