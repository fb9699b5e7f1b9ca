"""The gate from a mixture of two exponentials."""

from __future__ import annotations

from typing import ClassVar

from pyro_l0.distributions.mixture import BetaMixtureGate
from pyro_l0.distributions.parameters import bounded
from pyro_l0.distributions.stretched import STRETCH_LIMITS
from pyro_l0.maths.components import Exponential


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
        >>> ExponentialGate(torch.tensor([-4.0, 4.0]), beta=30.0).active_prob
        tensor([0.0986, 0.9835])

    References:
        Huang, Chen, Wu, Learning sparse neural networks through mixture-distributed regularization; eq. 4-6.
    """

    arg_constraints: ClassVar = {"logits": bounded(), "beta": bounded(lower=0), **STRETCH_LIMITS}
    default_beta: ClassVar[float] = 30.0

    @property
    def _component(self) -> Exponential:
        return Exponential(self._beta)
