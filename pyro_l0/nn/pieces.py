"""Small modules that a network with fewer units may need between its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Constant", "Expand", "Select", "Shift", "Sized"]


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


class _Valued(nn.Module):
    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value.clone())


class Shift(_Valued):
    """Add a constant that is the same for every example.

    Args:
        value: broadcasts against one example's tensor with a batch dimension in front.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` plus the constant."""
        return x + self.value


class Constant(_Valued):
    """A tensor that is the same for every example.

    Args:
        value: shape ``(1, ...)``; expanded to the batch of the network's input.
    """

    def forward(self, x: Tensor) -> Tensor:
        """One copy per example of ``x``."""
        return self.value.expand(x.shape[0], *self.value.shape[1:])


class Sized(nn.Module):
    """Hand on what has the size of the example that constants of a network were computed at, and refuse the rest.

    Args:
        size: shape of one example.

    Raises:
        ValueError: the input has another size.
    """

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        self.size = tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        if tuple(x.shape[1:]) != self.size:
            raise ValueError(
                f"Expected inputs of size {self.size}, as those that this network was compacted with (constants of "
                f"units that left depend on it), but got {tuple(x.shape[1:])}; compact the whole network with an "
                "example_input of that size."
            )
        return x
