"""A distribution together with the value that was drawn of it, as a part of a joint draw."""

from __future__ import annotations

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor


class Drawn(TorchDistribution):
    """The distribution of a site given the sites before it, whose value is a part of a joint draw.

    The densities of the sites of a joint draw multiply to the joint density. As the parameters depend on the draw, it
    is the only value that has a density here.

    Args:
        base_dist: the distribution given the sites before.
        value: what was drawn, of the shape of one draw.
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
        """The distribution in more plates, of which the value has the dimensions already."""
        return Drawn(self.base_dist.expand(batch_shape), self.value)

    def rsample(self, sample_shape: torch.types._size = torch.Size()) -> Tensor:
        """The value that was drawn."""
        return self.sample(sample_shape)

    def sample(self, sample_shape: torch.types._size = torch.Size()) -> Tensor:
        """The value that was drawn.

        Raises:
            ValueError: further draws are asked for.
        """
        if len(sample_shape):
            raise ValueError(
                f"Expected one draw of a part of a joint draw, but got sample_shape {tuple(sample_shape)}."
            )
        return self.value

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the value that was drawn, shape ``batch_shape``.

        Raises:
            ValueError: the value is another one.
        """
        if value is not self.value and not torch.equal(value, self.value):
            raise ValueError("Expected the value that was drawn, since the other sites' draws depend on it.")
        log_prob: Tensor = self.base_dist.log_prob(value)
        return log_prob
