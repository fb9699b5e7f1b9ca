"""Continuous variables as gates, by clipping them to the unit interval: the rectified normal, and any base."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from pyro.distributions import Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.types import _size

from pyro_l0.distributions.gate import Bounded, GateDistribution, as_parameters, probability
from pyro_l0.distributions.stretched import QuadratureGate
from pyro_l0.expect import expect
from pyro_l0.maths import backend, quadrature, rectified_normal, special
from pyro_l0.maths.quadrature import Nodes, Stretch
from pyro_l0.maths.special import Number


class RectifiedNormal(GateDistribution):
    r"""Gate :math:`z = \min(1, \max(0, x))` with :math:`x \sim N(\mu, s^2)`.

    Args:
        loc: location, shape ``batch_shape``.
        scale: positive, broadcast against ``loc``; 0.5 in ``from_active_prob`` and guides by default.

    Example:
        >>> RectifiedNormal(torch.tensor([-0.5, 0.5]), 0.5).active_prob
        tensor([0.1587, 0.8413])

    References:
        Yamada, Lindenbaum, Negahban, Kluger (2020), arXiv:1810.04247; the end of section 2.2 of the L0 paper.
    """

    arg_constraints: ClassVar = {"loc": Bounded(), "scale": Bounded(lower=0)}
    learned: ClassVar = {"loc": constraints.real, "scale": constraints.positive}
    defaults: ClassVar = {"scale": 0.5}  # as in the paper on stochastic gates

    def __init__(self, loc: Number, scale: Number, validate_args: bool | None = None) -> None:
        (self.loc, self.scale), _ = as_parameters({}, loc=loc, scale=scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    @classmethod
    def parameters_at_rate(cls, rate: Tensor, scale: Tensor) -> dict[str, Number]:
        """The location for a scale."""
        return {"loc": scale * torch.special.ndtri(rate), "scale": scale}

    @property
    def log_prob_zero(self) -> Tensor:
        """log P(z = 0), shape ``batch_shape``."""
        return special.log_ndtr(-self.loc / self.scale)

    @property
    def log_prob_one(self) -> Tensor:
        """log P(z = 1), shape ``batch_shape``."""
        return special.log_ndtr((self.loc - 1) / self.scale)

    @property
    def log_interior_prob(self) -> Tensor:
        """log P(0 < z < 1), shape ``batch_shape``."""
        return rectified_normal.log_interior_prob(self.loc, self.scale)

    @property
    def log_active_prob(self) -> Tensor:
        """log P(z != 0), shape ``batch_shape``."""
        return special.log_ndtr(self.loc / self.scale)

    @property
    def median(self) -> Tensor:
        """The smallest z with P(Z <= z) >= 1/2, which is also the gate without noise; shape ``batch_shape``."""
        return self.loc.clamp(0, 1)

    @property
    def mean(self) -> Tensor:
        """E[z], shape ``batch_shape``."""
        return rectified_normal.mean(self.loc, self.scale)[0]

    @property
    def variance(self) -> Tensor:
        """Var[z], shape ``batch_shape``."""
        rule = quadrature.gauss_legendre(48, self.loc.dtype, self.loc.device)
        return rectified_normal.variance(self.loc, self.scale, rule)

    def entropy(self) -> Tensor:
        """Entropy in nats with respect to the mixed measure; may be negative; shape ``batch_shape``."""
        return rectified_normal.entropy(self.loc, self.scale)

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws, shape ``sample_shape + batch_shape``; the derivative is 0 at the atoms."""
        shape = torch.Size(sample_shape) + self.loc.shape
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return (self.loc + self.scale * noise).clamp(0, 1)

    def icdf(self, value: Tensor) -> Tensor:
        """The smallest z with P(Z <= z) >= ``value``."""
        e: Tensor = torch.special.ndtri(value)
        return (self.loc + self.scale * e).clamp(0, 1)

    def base_distribution(self) -> TorchDistribution:
        """The normal that is clipped to [0, 1], whose draws may lie outside."""
        return Normal(self.loc, self.scale, validate_args=False)

    def log_interior_density(self, z: Tensor) -> Tensor:
        """Log density with respect to dz at 0 < z < 1, in nats, shape of z and ``batch_shape``, broadcast."""
        return rectified_normal.log_density(z, self.loc, self.scale)

    def interior_cdf(self, z: Tensor) -> Tensor:
        """P(Z <= z) at 0 <= z < 1, shape of z and ``batch_shape``, broadcast."""
        return special.ndtr((z - self.loc) / self.scale)

    def _node_temperature(self) -> float:
        return backend.largest(1 / self.scale)

    def _breakpoints(self) -> None:
        return None  # the density may be sharp anywhere between the atoms

    def panel_edges(self, dtype: torch.dtype) -> Tensor:
        """Values of z where panels of a quadrature end, shape ``batch_shape + (k,)``."""
        loc, scale = self.loc.unsqueeze(-1), self.scale.unsqueeze(-1)
        distance = (loc.clamp(0, 1) - loc) / scale  # of the top between the atoms
        reach = scale * torch.sqrt(distance.square() + 2 * quadrature.drops(dtype, loc.device))
        return torch.cat((loc - reach, loc + reach), -1)


# Shares of the mass between the atoms that lie below the ends of panels.
_SHARES = (1e-14, 1e-10, 1e-7, 1e-4, 0.01, 0.15, 0.5, 0.85, 0.99, 1 - 1e-4, 1 - 1e-7, 1 - 1e-10, 1 - 1e-14)
_HALVINGS = 50
_TAIL = 1e-3  # below it a base's cdf has lost three digits or more


class Rectified(QuadratureGate):
    r"""Gate :math:`z = \min(1, \max(0, x))` of any continuous real variable with a cdf and pathwise draws.

    Prefer the named families where one fits: they have closed forms and float32-safe tails. Here the atoms' log masses
    are logs of the base's own cdf or, in the far tails of a base on the whole line, integrals of its density; a base in
    half precision stays so. This is the general form of the L0 paper's gates (end of section 2.2).

    A base of any kind has no parameter that a guide could learn or a rate could set. So ``from_active_prob``,
    ``from_logits``, ``closed``, ``from_real_line``, ``with_learned``, ``draw_jointly`` and ``active_slope``, which need
    one, are missing.

    Args:
        base: a distribution of real numbers with ``cdf``, ``log_prob`` and ``rsample``, shape ``batch_shape``; its
            ``icdf``, if it has one, gives quantiles.

    Raises:
        ValueError: the base is not a univariate continuous distribution with pathwise draws.
        TypeError: the base is not a distribution.

    Example:
        >>> from pyro.distributions import Normal
        >>> Rectified(Normal(torch.tensor([-0.5, 0.5]), 0.5)).active_prob
        tensor([0.1587, 0.8413])

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; section 2.2.
    """

    arg_constraints: ClassVar = {}
    learned: ClassVar = {}

    def __init__(self, base: Distribution, validate_args: bool | None = None) -> None:
        expect(Distribution, "a distribution", base=base)
        support: constraints.Constraint | None = base.support
        if base.event_shape or support is None or support.is_discrete or not base.has_rsample:
            raise ValueError(
                f"Expected a base of single continuous variables with pathwise draws, but got {type(base).__name__}."
            )
        self.base = base
        super().__init__(base.batch_shape, validate_args=validate_args)

    def __repr__(self) -> str:
        return f"Rectified({self.base})"

    def _state(self) -> dict[str, object]:
        return {"base": self.base}

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """This gate with ``function`` applied to every tensor of its base, for instance to move it."""
        return type(self)(_map_tensors(self.base, function), validate_args=False)

    @classmethod
    def parameters_at_rate(cls, rate: Tensor, **options: Number) -> dict[str, Number]:
        """Not available: the rate is that of the base."""
        raise NotImplementedError("Rectified has no rate of its own; give it a base.")

    def _at(self, value: float) -> Tensor:
        like = self._like
        return torch.full(self.batch_shape, value, dtype=like.dtype, device=like.device)

    @property
    def _like(self) -> Tensor:
        return next(x for x in _tensors(self.base) if x.is_floating_point())

    @property
    def log_prob_zero(self) -> Tensor:
        """log P(z = 0), shape ``batch_shape``."""
        return self._log_beyond(0.0, upper=False)

    @property
    def log_prob_one(self) -> Tensor:
        """log P(z = 1), shape ``batch_shape``."""
        return self._log_beyond(1.0, upper=True)

    @property
    def log_interior_prob(self) -> Tensor:
        """log P(0 < z < 1), shape ``batch_shape``."""
        return torch.log(self.base.cdf(self._at(1.0)) - self.base.cdf(self._at(0.0)))

    @property
    def log_active_prob(self) -> Tensor:
        """log P(z != 0), shape ``batch_shape``."""
        return self._log_beyond(0.0, upper=True)

    def _log_beyond(self, edge: float, upper: bool) -> Tensor:
        """Log of the base's mass above or below an edge; in a far tail from its log density, as the cdf is rounded."""
        cdf = self.base.cdf(self._at(edge))
        is_tail = (1 - cdf if upper else cdf) < _TAIL
        is_real = getattr(type(self.base), "support", None) is constraints.real
        cdf = torch.where(is_tail, 0.5, cdf) if is_real else cdf
        near = torch.log1p(-cdf) if upper else torch.log(cdf)
        if not is_real:
            return near
        s = torch.arange(-58, 59, dtype=cdf.dtype, device=cdf.device).view(-1, *(1,) * cdf.dim()) / 16
        log_t = 0.5 * math.pi * torch.sinh(s)  # exp-sinh quadrature, which suits tails of any length
        log_weight = log_t + torch.log(math.pi / 32 * torch.cosh(s))
        x = torch.where(is_tail, edge + (1 if upper else -1) * torch.exp(log_t), 0.5)
        with torch.no_grad():  # where the density is nothing, its derivative may be no number
            terms = self.base.log_prob(x) + log_weight
            is_seen = terms > terms.amax(0) - 100
        terms = self.base.log_prob(torch.where(is_seen, x, edge)) + log_weight
        return torch.where(is_tail, torch.where(is_seen, terms, -math.inf).logsumexp(0), near)

    @property
    def median(self) -> Tensor:
        """The smallest z with P(Z <= z) >= 1/2, shape ``batch_shape``."""
        return self.icdf(self._at(0.5))

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws, shape ``sample_shape + batch_shape``; the derivative is 0 at the atoms."""
        return self.base.rsample(torch.Size(sample_shape)).clamp(0, 1)

    def icdf(self, value: Tensor) -> Tensor:
        """The smallest z with P(Z <= z) >= ``value``, if the base has quantiles."""
        return self.base.icdf(probability(value)).clamp(0, 1)

    def base_distribution(self) -> Distribution:
        """The distribution that is clipped to [0, 1], as it was given, or expanded since."""
        return self.base

    def log_interior_density(self, z: Tensor) -> Tensor:
        """Log density with respect to dz at 0 < z < 1, in nats, shape of z and ``batch_shape``, broadcast."""
        return self.base.log_prob(z)

    def _log_density_in_t(self, nodes: Nodes, stretch: Stretch) -> Tensor:
        # Nodes come last, but a distribution broadcasts its batch from the right.
        shape = torch.broadcast_shapes(self.batch_shape, nodes.z.shape[:-1])
        z = nodes.z.expand(*shape, nodes.z.shape[-1]).movedim(-1, 0)
        return self.base.log_prob(z).movedim(0, -1) + torch.log(nodes.slope)

    def interior_cdf(self, z: Tensor) -> Tensor:
        """P(Z <= z) at 0 <= z < 1, shape of z and ``batch_shape``, broadcast."""
        return self.base.cdf(z)

    def _breakpoints(self) -> None:
        return None

    @torch.no_grad()
    def panel_edges(self, dtype: torch.dtype) -> Tensor:
        """Quantiles given 0 < z < 1 by bisection, as a base need not have any of its own."""
        low, high = torch.broadcast_tensors(self.base.cdf(self._at(0.0)), self.base.cdf(self._at(1.0)))
        share = torch.tensor(_SHARES, dtype=low.dtype, device=low.device).view(-1, *(1,) * low.dim())
        # The median too, where a density such as Laplace's has its kink.
        goal = torch.cat((low + share * (high - low), torch.full_like(low, 0.5).unsqueeze(0)))
        left, right = torch.zeros_like(goal), torch.ones_like(goal)
        for _ in range(_HALVINGS):
            middle = 0.5 * (left + right)
            below = self.base.cdf(middle) < goal
            left, right = torch.where(below, middle, left), torch.where(below, right, middle)
        return (0.5 * (left + right)).movedim(0, -1)

    def integrals(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """E[z] and E[1 - z] by the nodes, shape ``batch_shape``."""
        z = nodes.z.expand(*self.batch_shape, nodes.z.shape[-1]).movedim(-1, 0)
        below = self.base.cdf(z).movedim(0, -1)
        measure = nodes.weight * nodes.slope
        return (measure * (1 - below)).sum(-1), (measure * below).sum(-1)


def _parts(base: Distribution) -> dict[str, Tensor | Distribution]:
    """Attributes of a distribution that hold tensors or distributions, lists of them included."""
    return {name: x for name, x in vars(base).items() if isinstance(x, Tensor | Distribution)}


def _tensors(base: Distribution) -> list[Tensor]:
    found: list[Tensor] = []
    for x in _parts(base).values():
        found += [x] if isinstance(x, Tensor) else _tensors(x)
    if not found:
        found = [torch.zeros(())]
    return found


def _map_tensors(base: Distribution, function: Callable[[Tensor], Tensor]) -> Distribution:
    new = copy.copy(base)
    for name, x in _parts(base).items():
        setattr(new, name, function(x) if isinstance(x, Tensor) else _map_tensors(x, function))
    return new
