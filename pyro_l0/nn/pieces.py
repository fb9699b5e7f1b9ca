"""Small modules that a network with fewer units may need between its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Constant", "Expand", "Select", "Shift"]


class Select(nn.Module):
    """Some units of a tensor.

    Args:
        units: which, in order.
        dim: dimension of the units.
    """

    index: Tensor

    def __init__(self, units: Sequence[int], dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("index", torch.tensor(units, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """The selected units."""
        return x.index_select(self.dim, self.index)


class Expand(nn.Module):
    """Put constant units between those of a tensor.

    Args:
        places: where the tensor's units go, in order.
        constants: every unit of the result, shape ``(1, ...)`` that broadcasts against it; those at ``places`` are
            not used.
        dim: dimension of the units.
    """

    order: Tensor
    constants: Tensor

    def __init__(self, places: Sequence[int], constants: Tensor, dim: int) -> None:
        super().__init__()
        taken = set(places)
        others = [unit for unit in range(constants.shape[dim]) if unit not in taken]
        self.dim = dim
        self.register_buffer("order", torch.tensor([*places, *others]).argsort())
        self.register_buffer("constants", constants.index_select(dim, torch.tensor(others)).clone())

    def forward(self, x: Tensor) -> Tensor:
        """All units."""
        shape = list(x.shape)
        shape[self.dim] = self.constants.shape[self.dim]
        return torch.cat([x, self.constants.expand(shape)], self.dim).index_select(self.dim, self.order)


class Shift(nn.Module):
    """Add a constant that is the same for every example.

    Args:
        value: broadcasts against one example's tensor with a batch dimension in front.
    """

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value.clone())

    def forward(self, x: Tensor) -> Tensor:
        """``x`` plus the constant."""
        return x + self.value


class Constant(nn.Module):
    """A tensor that is the same for every example.

    Args:
        value: shape ``(1, ...)``; expanded to the batch of the network's input.
    """

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value.clone())

    def forward(self, x: Tensor) -> Tensor:
        """One copy per example of ``x``."""
        return self.value.expand(x.shape[0], *self.value.shape[1:])
