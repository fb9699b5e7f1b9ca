"""A site's part of joint draws, and the distribution that it has at the site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from pyro.distributions import TorchDistribution, TransformedDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Transform


class Drawn(TorchDistribution):
    """The distribution of a site given the sites before it, whose value is a part of a joint draw.

    The densities of the sites of a joint draw multiply to the joint density. As the parameters depend on the draw, it
    is the only value that has a density here.
    """

    arg_constraints = {}  # noqa: RUF012  # as torch declares it

    def __init__(self, base_dist: TorchDistribution, value: Tensor) -> None:
        self.base_dist = base_dist
        self.value = value
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Whether gradients go through the draw."""
        return self.base_dist.has_rsample

    @property
    def support(self) -> torch.distributions.constraints.Constraint | None:
        """That of the distribution inside."""
        return self.base_dist.support

    def expand(self, batch_shape: torch.types._size, _instance: object = None) -> Drawn:
        """The distribution in more plates, whose dimensions the value has already."""
        return Drawn(self.base_dist.expand(batch_shape), self.value)

    def rsample(self, sample_shape: torch.types._size = torch.Size()) -> Tensor:
        """The value that was drawn; refuses further draws."""
        if len(sample_shape):
            raise ValueError(
                f"Expected one draw of a part of a joint draw, but got sample_shape {tuple(sample_shape)}."
            )
        return self.value

    sample = rsample

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the value that was drawn, shape ``batch_shape``; refuses another."""
        if value is not self.value and not torch.equal(value, self.value):
            raise ValueError("Expected the value that was drawn, since the other sites' draws depend on it.")
        log_prob: Tensor = self.base_dist.log_prob(value)
        return log_prob


class Part(NamedTuple):
    """A site's part of n joint draws."""

    values: Tensor  # on the real line, (n, entries of the site), or without the dimension of draws
    make: Callable[..., TorchDistribution]  # the distribution given the parts before, from its parameters
    parameters: tuple[Tensor, ...]  # each of the values' shape
    shape: torch.Size  # of the site's value in one draw
    event_dim: int
    transform: Transform | None = None  # to the site's support
    depends: bool = True  # on other parts of the draw

    @classmethod
    def of(cls, fn: TorchDistributionMixin, n: int, event_dim: int) -> Part:
        """Draws of a distribution that depends on nothing."""
        draws = fn.rsample((n,)) if fn.has_rsample else fn.sample((n,))
        return cls(draws.reshape(n, -1), lambda: fn, (), draws.shape[1:], event_dim, depends=False)

    def at_site(self, particles: Mapping[int, int]) -> tuple[TorchDistribution, Tensor]:
        """The distribution of a site and its value, in plates of particles: their sizes by dimension from the right."""
        batch = self.shape[: len(self.shape) - self.event_dim]
        width = max(len(batch), *(-dim for dim in particles), 0)
        dims = [1] * (width - len(batch)) + list(batch)
        for dim, size in particles.items():
            dims[dim] = size
        shape = torch.Size(dims) + self.shape[len(batch) :]
        shape = shape if self.transform is None else self.transform.inverse_shape(shape)
        base = self.make(*(x.reshape(shape) for x in self.parameters))
        value = self.values.reshape(shape)
        if self.transform is not None:
            base, value = TransformedDistribution(base, [self.transform]), self.transform(value)
        base = base.to_event(self.event_dim - base.event_dim) if self.event_dim > base.event_dim else base
        return (Drawn(base, value) if self.depends else base), value

    def supported(self) -> Tensor:
        """The values in the site's support and shape, shape ``(n, *shape)``."""
        if self.transform is None:
            return self.values.reshape(-1, *self.shape)
        values: Tensor = self.transform(self.values.reshape(-1, *self.transform.inverse_shape(self.shape)))
        return values
