"""The binary concrete: the hard concrete's limit without a stretch, which is never exactly zero."""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from pyro.distributions import Logistic
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.types import _size

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.distributions.parameters import Bounded, as_parameters, check_rate
from pyro_l0.maths import hard_concrete, quadrature
from pyro_l0.maths.special import Number, inside_unit_interval

_REACH = 40.0  # of a standard logistic: 4e-18 of its mass lies beyond
_OFFSETS = (0.5, 1.5, 4.0, 10.0, 20.0)


class BinaryConcrete(GateDistribution):
    r"""Gate :math:`z = \mathrm{sigmoid}((\log\alpha + e) / \beta)` on :math:`(0, 1)` with logistic e: no atoms.

    The hard concrete stretches and clips it (eq. 10 of the L0 paper). It is never exactly zero: ``active_prob`` is 1,
    a price on open weights has no gradient, and pruning needs rounding. It serves for comparisons.

    Args:
        log_alpha: location, shape ``batch_shape``.
        temperature: positive, broadcast against ``log_alpha``.

    Shape:
        ``rsample(sample_shape)`` gives ``sample_shape + batch_shape``.

    Raises:
        ValueError: a parameter is outside its constraint, or the shapes do not broadcast.

    Example:
        >>> BinaryConcrete(torch.tensor([-2.0, 2.0])).mean
        tensor([0.1669, 0.8331])

    References:
        Maddison, Mnih, Teh (2017), arXiv:1611.00712; Louizos, Welling, Kingma (2018), arXiv:1712.01312, eq. 10 and 23.
    """

    arg_constraints: ClassVar = {"log_alpha": Bounded(), "temperature": Bounded(lower=0)}
    learned: ClassVar = {"log_alpha": constraints.real}
    _fixed = ("temperature",)
    atoms = ()
    support = constraints.unit_interval  # no mass at its ends, so a smooth transform is enough

    def __init__(self, log_alpha: Number, temperature: Number = 2 / 3, validate_args: bool | None = None) -> None:
        (self.log_alpha,), (self._temperature,) = as_parameters({"temperature": temperature}, log_alpha=log_alpha)
        super().__init__(self.log_alpha.shape, validate_args=validate_args)

    @property
    def temperature(self) -> Tensor:
        """Temperature, shape ``batch_shape``."""
        return self._filled(self._temperature)

    @classmethod
    def from_active_prob(
        cls, active_prob: Number, temperature: Number = 2 / 3, validate_args: bool | None = None
    ) -> Self:
        """The binary concrete that rounds to 1 with probability ``active_prob``: P(z > 1/2) = sigmoid(log alpha).

        Its P(z != 0) is always 1, so the rate has this meaning here.

        Args:
            active_prob: wanted rate, in (0, 1), of the shape that the gate gets.
            temperature: temperature.
            validate_args: whether the gate checks its arguments later on.

        Raises:
            ValueError: the rate is not strictly between 0 and 1.

        Example:
            >>> BinaryConcrete.from_active_prob(0.25).log_alpha
            tensor(-1.0986)
        """
        check_rate("active_prob", active_prob, cls.__name__)
        (rate,), _ = as_parameters({}, active_prob=active_prob)
        return cls(torch.logit(rate), temperature, validate_args=validate_args)

    @property
    def log_prob_zero(self) -> Tensor:
        """Minus infinity, shape ``batch_shape``."""
        return torch.full_like(self.log_alpha, -math.inf)

    log_prob_one = log_prob_zero

    @property
    def log_interior_prob(self) -> Tensor:
        """0, shape ``batch_shape``."""
        return torch.zeros_like(self.log_alpha)

    log_active_prob = log_interior_prob

    @property
    def least_active_prob(self) -> Tensor:
        """1: no parameter makes a zero likely."""
        return torch.ones_like(self.log_alpha)

    @classmethod
    def closed(cls, **options: Number) -> Self:
        """Not available: no gate of this family is ever closed."""
        raise NotImplementedError("A BinaryConcrete is never exactly zero, so that none of its gates can be closed.")

    @property
    def test_gate(self) -> Tensor:
        """The gate without noise and without temperature, which is never 0."""
        return torch.sigmoid(self.log_alpha)

    @property
    def median(self) -> Tensor:
        """The z with P(Z <= z) = 1/2, shape ``batch_shape``."""
        return torch.sigmoid(self.log_alpha / self._temperature)

    @property
    def mean(self) -> Tensor:
        """E[z], shape ``batch_shape``; by quadrature."""
        mass, y = self._noise_nodes(())
        mean, co_mean = (mass * torch.sigmoid(y)).sum(-1), (mass * torch.sigmoid(-y)).sum(-1)
        return torch.where(mean < 0.5, mean, 1 - co_mean)

    @property
    def variance(self) -> Tensor:
        """Var[z], shape ``batch_shape``; by quadrature."""
        mass, y = self._noise_nodes(())
        z = torch.sigmoid(y)
        return (mass * (z - (mass * z).sum(-1, keepdim=True)).square()).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy in nats, shape ``batch_shape``: the logit's plus the mean log slope of the sigmoid."""
        mass, y = self._noise_nodes(())
        slope = (mass * (F.logsigmoid(y) + F.logsigmoid(-y))).sum(-1)
        return 2 - torch.log(self.temperature) + slope

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws, shape ``sample_shape + batch_shape``; rounding cannot make them 0 or 1."""
        shape = torch.Size(sample_shape) + self.log_alpha.shape
        noise = hard_concrete.logistic_noise(shape, self.log_alpha.dtype, self.log_alpha.device)
        return inside_unit_interval(torch.sigmoid((self.log_alpha + noise) / self._temperature))

    def icdf(self, value: Tensor) -> Tensor:
        """The z with P(Z <= z) = ``value``."""
        return torch.sigmoid((self.log_alpha + torch.logit(value)) / self._temperature)

    def base_distribution(self) -> TorchDistribution:
        """The distribution of logit z: logistic with location log alpha / beta and scale 1 / beta."""
        scale = 1 / self.temperature
        return Logistic(self.log_alpha * scale, scale, validate_args=False)

    def rectify(self, value: Tensor) -> Tensor:
        """The gate for a draw of the base distribution."""
        return torch.sigmoid(value)

    def kl_to(self, p: BinaryConcrete) -> Tensor:
        """KL to another binary concrete in nats, by quadrature on the logit axis; shape ``batch_shape``."""
        ratio = p.temperature / self.temperature
        mass, y = self._noise_nodes((-self.log_alpha + p.log_alpha / ratio,))
        a = self.temperature.unsqueeze(-1) * y - self.log_alpha.unsqueeze(-1)
        b = p.temperature.unsqueeze(-1) * y - p.log_alpha.unsqueeze(-1)
        change = F.logsigmoid(a) + F.logsigmoid(-a) - F.logsigmoid(b) - F.logsigmoid(-b)
        return (mass * change).sum(-1) - torch.log(ratio)

    def _noise_nodes(self, places: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The probability that a rule gives some draws, and their logits, shapes ``batch_shape + (n,)``.

        Panels in the standard logistic noise are fine around 0, where the sigmoid turns, and around further points.
        """
        like = self.log_alpha.detach()
        scale = self.temperature.detach()
        centres = [(torch.zeros_like(like), torch.ones_like(like)), (-like, scale)]
        centres += [(place.detach().expand(like.shape), scale) for place in places]
        edges = [torch.full_like(like, -_REACH), torch.full_like(like, _REACH)]
        for centre, width in centres:
            edges += [centre + sign * offset * width for offset in _OFFSETS for sign in (-1, 1)]
        edge = torch.stack([x.clamp(-_REACH, _REACH) for x in edges], -1).sort(-1).values
        x, w = quadrature.gauss_legendre(16, like.dtype, like.device)
        half = 0.5 * edge.diff(dim=-1).unsqueeze(-1)
        e = (0.5 * (edge[..., 1:] + edge[..., :-1]).unsqueeze(-1) + half * x).flatten(-2)
        mass = (half * w).flatten(-2) * torch.exp(F.logsigmoid(e) + F.logsigmoid(-e))
        y = (self.log_alpha.unsqueeze(-1) + e) / self.temperature.unsqueeze(-1)
        return mass, y

    def _log_density(self, z: Tensor) -> Tensor:
        log_low, log_high = torch.log(z), torch.log1p(-z)
        a = self._temperature * (log_low - log_high) - self.log_alpha
        return torch.log(self.temperature) - log_low - log_high + F.logsigmoid(a) + F.logsigmoid(-a)

    def _cdf(self, z: Tensor) -> Tensor:
        # The ends are reached by clamped arguments alone, whose derivative is not asked for.
        inside = inside_unit_interval(z)
        return torch.sigmoid(self._temperature * torch.logit(inside) - self.log_alpha)

    def _node_temperature(self) -> float:
        raise TypeError("A BinaryConcrete has no atoms, and a KL to or from a gate that has some is infinite.")
