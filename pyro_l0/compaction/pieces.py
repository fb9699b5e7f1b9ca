"""A selection of units, and zeros between units: what may stand where a gate stood."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Expand", "Select"]


class Select(nn.Module):
    """Some units of a tensor.

    Args:
        units: which, in order.
        dim: dimension of the units.
        size: number of units that there are.
        reads_input: whether what it selects from is an input of the network that nothing else reads.

    Raises:
        ValueError: the input has another number of units.
    """

    index: Tensor

    def __init__(self, units: Sequence[int], dim: int, size: int, reads_input: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.size = size
        self.reads_input = reads_input
        self.is_done = False  # by whoever hands in the units
        self.register_buffer("index", torch.tensor(units, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """The selected units."""
        if self.is_done:
            return x
        if x.shape[self.dim] != self.size:
            raise ValueError(
                f"Expected {self.size} units in dimension {self.dim}, of which {len(self.index)} are read, but got a "
                f"tensor of shape {tuple(x.shape)}."
            )
        return x.index_select(self.dim, self.index)


class Expand(nn.Module):
    """Units of a tensor and zeros between them.

    Args:
        units: where the tensor's units go, in order.
        dim: dimension of the units.
        size: number of units of the result.
    """

    index: Tensor

    def __init__(self, units: Sequence[int], dim: int, size: int) -> None:
        super().__init__()
        self.dim = dim
        self.size = size
        self.register_buffer("index", torch.tensor(units, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """All units."""
        shape = list(x.shape)
        shape[self.dim] = self.size
        return x.new_zeros(shape).index_copy(self.dim, self.index, x)
