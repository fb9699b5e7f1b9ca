"""The gate from a mixture of two power laws."""

from __future__ import annotations

from typing import ClassVar

from pyro_l0.distributions.mixture import BetaMixtureGate
from pyro_l0.distributions.parameters import bounded
from pyro_l0.distributions.stretched import STRETCH_LIMITS
from pyro_l0.maths.components import PowerLaw


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
        >>> PowerLawGate(torch.tensor([-4.0, 4.0]), beta=40.0).active_prob
        tensor([0.0771, 0.9810])

    References:
        Huang, Chen, Wu, Learning sparse neural networks through mixture-distributed regularization; eq. 8.
    """

    arg_constraints: ClassVar = {"logits": bounded(), "beta": bounded(lower=1), **STRETCH_LIMITS}
    default_beta: ClassVar[float] = 40.0

    @property
    def _component(self) -> PowerLaw:
        return PowerLaw(self._beta)
