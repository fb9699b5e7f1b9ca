"""The three mixture-distributed gates: two exponentials, two exponentials with a uniform share, two power laws."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.types import _size

from pyro_l0.distributions.gate import Bounded, as_parameters, check_rate
from pyro_l0.distributions.stretched import LIMITS, STRETCH_LIMITS, UnitIntervalGate
from pyro_l0.maths import backend, mixture
from pyro_l0.maths.backend import cached
from pyro_l0.maths.mixture import Component, Exponential, ExponentialUniform, Point, PowerLaw
from pyro_l0.maths.special import Number, last


class MixtureGate(UnitIntervalGate):
    """A stretched and clipped mixture of a component near 0 and its mirror image near 1.

    A draw chooses a component first. Its derivatives in the logits and in the components' parameters are implicit
    (Eq. 12 of the paper) and exact up to the second. Its subclasses have examples.
    """

    _beta: Number
    learned: ClassVar = {"logits": constraints.real}
    fixed: ClassVar[tuple[str, ...]] = ("beta", "gamma", "zeta")

    def __init__(
        self,
        logits: Number,
        beta: Number | None = None,
        gamma: Number = -0.1,
        zeta: Number = 1.1,
        validate_args: bool | None = None,
    ) -> None:
        beta = self.defaults["beta"] if beta is None else beta
        self._set(logits, validate_args, beta=beta, gamma=gamma, zeta=zeta)

    def _set(self, logits: Number, validate_args: bool | None, **shared: Number) -> None:
        (self.logits,), values = as_parameters(shared, logits=logits)
        for name, value in zip(shared, values, strict=True):
            setattr(self, f"_{name}", value)
        super().__init__(self.logits.shape, validate_args=validate_args)

    @property
    @abstractmethod
    def _component(self) -> Component:
        """The component with its mass near 0, at this gate's parameters; the other one is its mirror image."""

    @property
    def beta(self) -> Tensor:
        """Sharpness, shape ``batch_shape``."""
        return self._filled(self._beta)

    @property
    def weight(self) -> Tensor:
        """Weight of the component near 1, shape ``batch_shape``."""
        return torch.sigmoid(self.logits)

    @classmethod
    def parameters_at_rate(cls, rate: Tensor, **options: Number) -> dict[str, Number]:
        """Log odds of the two components, whose rates enclose the wanted one."""
        make: Callable[..., Self] = cls
        # In double, as the rate is located between two that may be near.
        shared = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
        ends = make(torch.zeros((), dtype=torch.float64, device=rate.device), **shared)
        low, high = (ends._filled(x) for x in ends._active_probs)
        if not (backend.opaque(low) or backend.opaque(high)):
            check_rate("active_prob", rate, cls.__name__, float(low.amax()), float(high.amin()))
        logits = torch.log(rate.double() - low) - torch.log(high - rate.double())
        return {"logits": logits.to(rate.dtype), **options}

    @classmethod
    def closed(cls, **options: Any) -> Self:
        """The gate without the component near 1, whose P(z != 0) is the family's minimum.

        Args:
            **options: the parameters other than ``logits``.
        """
        make: Callable[..., Self] = cls
        return make(-30.0, **options)

    @property
    def least_active_prob(self) -> Tensor:
        """The smallest P(z != 0) that a weight reaches, shape ``batch_shape``."""
        return self._filled(self._active_probs[0])

    # ------------------------------------------------------------ the unstretched variable

    def _unit_log_density(self, x: Point) -> Tensor:
        return mixture.log_density(self._component, self.logits, x)

    def _unit_log_below(self, x: Point) -> Tensor:
        return mixture.log_below(self._component, self.logits, x)

    def _unit_log_above(self, x: Point) -> Tensor:
        return mixture.log_above(self._component, self.logits, x)

    def _unit_log_between(self, low: Point, high: Point) -> Tensor:
        return mixture.log_between(self._component, self.logits, low, high)

    def _unit_rsample(self, shape: torch.Size) -> Tensor:
        with torch.no_grad():
            s = mixture.unstretched_draw(self._component, self.logits, shape)
        return mixture.attach_gradient(self._component, self.logits, s)

    def _unit_icdf(self, p: Tensor) -> Tensor:
        with torch.no_grad():
            s = self._component.mixture_quantile(self.logits, p)
        return mixture.attach_gradient(self._component, self.logits, s, p)

    # ------------------------------------------------------------ the gate

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws, shape ``sample_shape + batch_shape``; the derivative is 0 at the atoms."""
        if backend.transformed() or backend.learned(*self.fixed_options.values()):
            return super().rsample(sample_shape)
        shape = torch.Size(sample_shape) + self.logits.shape
        return mixture.gate_draw(self.logits, shape, self._component, self.stretch)

    @property
    def _active_probs(self) -> tuple[Number, Number]:
        """P(z != 0) of the component near 0 and of the one near 1."""
        numbers = [x for x in self.fixed_options.values() if not isinstance(x, Tensor)]
        if len(numbers) == len(self.fixed):
            *parameters, gamma, zeta = numbers
            return _number_active_probs(type(self._component), tuple(parameters), gamma, zeta)
        return _component_active_probs(self._component, self._ends[0])

    @property
    def active_prob(self) -> Tensor:
        """P(z != 0), shape ``batch_shape``; strictly between its values at weights 0 and 1."""
        low, high = self._active_probs
        return torch.sigmoid(self.logits) * (high - low) + low

    @property
    def plug_in_mean(self) -> Tensor:
        """The unstretched variable's mean, stretched and clipped; shape ``batch_shape``."""
        mean = self._component.mean
        return self.rectify(torch.sigmoid(-self.logits) * mean + torch.sigmoid(self.logits) * (1 - mean))

    @property
    def plug_in_weight(self) -> Tensor:
        """The mixture's weight, stretched and clipped; shape ``batch_shape``."""
        return self.rectify(torch.sigmoid(self.logits))

    @property
    def test_gate(self) -> Tensor:
        """:attr:`plug_in_weight`, shape ``batch_shape``.

        The paper (section 4.2.2) does not say which value it stretches and clips. Four candidates have names:
        ``mean``, ``median``, ``plug_in_mean`` and ``plug_in_weight``. The mean never closes a gate, and the median is
        nearly binary. Of the other two, the paper estimates the gate through the weight, as Eq. 13 of the L0 paper
        does for the hard concrete.
        """
        return self.plug_in_weight

    def _node_temperature(self) -> float:
        return backend.largest(self._beta) if self._breakpoints() is None else 1.0

    def _breakpoints(self) -> tuple[float, ...] | None:
        return self._component.breakpoints(self.logits.dtype)

    def panel_edges(self, dtype: torch.dtype) -> Tensor:
        """Values of z where panels of a quadrature end, shape ``batch_shape + (k,)``."""
        low, high = self._ends
        s = self._component.panel_edges(self.logits, low.s, high.s, dtype)
        return last(self.stretch.gamma) + last(self.stretch.width) * s


def _component_active_probs(component: Component, zero: Point) -> tuple[Tensor, Tensor]:
    return torch.exp(component.log_above(zero)), torch.exp(component.log_below(zero.mirrored))


@cached(256)
def _number_active_probs(
    kind: Callable[..., Component], parameters: tuple[float, ...], gamma: float, zeta: float
) -> tuple[float, float]:
    s = torch.tensor([-gamma, zeta], dtype=torch.float64) / (zeta - gamma)
    low, high = _component_active_probs(kind(*parameters), Point(s[0], s[1]))
    return float(low), float(high)


class ExponentialGate(MixtureGate):
    r"""Gate from a mixture of two truncated exponentials, stretched and clipped (MDR-Exp).

    .. math::
        s \sim (1 - q) \frac{\beta e^{-\beta s}}{1 - e^{-\beta}} + q \frac{\beta e^{\beta (s - 1)}}{1 - e^{-\beta}},
        \qquad z = \min(1, \max(0, s (\zeta - \gamma) + \gamma)).

    Args:
        logits: log odds of the weight q of the component near 1, shape ``batch_shape``.
        beta: positive, broadcast against ``logits``; larger is nearer to binary (the paper calls it a temperature). By
            default 30, the paper's for MNIST.
        gamma: lower stretch limit, below 0.
        zeta: upper stretch limit, above 1.

    Example:
        >>> import torch
        >>> ExponentialGate(torch.tensor([-4.0, 4.0])).active_prob
        tensor([0.0986, 0.9835])

    References:
        Huang, Chen, Wu, Learning sparse neural networks through mixture-distributed regularization; eq. 4-6.
    """

    arg_constraints: ClassVar = {"logits": Bounded(), "beta": Bounded(lower=0), **STRETCH_LIMITS}
    defaults: ClassVar = {"beta": 30.0, **LIMITS}  # the paper's beta for MNIST

    @property
    def _component(self) -> Exponential:
        return Exponential(self._beta)


class PowerLawGate(MixtureGate):
    r"""Gate from a mixture of two power laws, stretched and clipped (MDR-PowerLaw).

    .. math::
        s \sim \frac{1 - q}{\beta} s^{1/\beta - 1} + \frac{q}{\beta} (1 - s)^{1/\beta - 1},
        \qquad z = \min(1, \max(0, s (\zeta - \gamma) + \gamma)).

    Args:
        logits: log odds of the weight q of the component near 1, shape ``batch_shape``.
        beta: above 1, broadcast against ``logits``; larger is nearer to binary. By default 40, the paper's for MNIST.
        gamma: lower stretch limit, below 0.
        zeta: upper stretch limit, above 1.

    Example:
        >>> import torch
        >>> PowerLawGate(torch.tensor([-4.0, 4.0])).active_prob
        tensor([0.0771, 0.9810])

    References:
        Huang, Chen, Wu, Learning sparse neural networks through mixture-distributed regularization; eq. 8.
    """

    arg_constraints: ClassVar = {"logits": Bounded(), "beta": Bounded(lower=1), **STRETCH_LIMITS}
    defaults: ClassVar = {"beta": 40.0, **LIMITS}  # the paper's beta for MNIST

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

    Args:
        logits: log odds of the weight q of the component near 1, shape ``batch_shape``.
        beta: positive, broadcast against ``logits``; larger is nearer to binary (the paper calls it a temperature).
        epsilon: uniform share, in (0, 1), broadcast against ``logits``.
        gamma: lower stretch limit, below 0.
        zeta: upper stretch limit, above 1.

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
    defaults: ClassVar = {"beta": 25.0, "epsilon": 0.1, **LIMITS}  # the paper's beta for MNIST
    fixed = tuple(defaults)
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
