"""Layers that lost all units on one side, or that add what constant inputs made of them place by place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["add_shift", "allow_no_units", "pads_zeros"]


class _Shifted(nn.Module):
    """A layer that adds a constant to its output, the contribution of inputs that left."""

    shift: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output plus the constant."""
        out: Tensor = super().forward(input)
        return out + self.shift


class ShiftedLinear(_Shifted, nn.Linear):
    """A dense layer plus a constant for every place in front of its units."""


class _Convolution(nn.modules.conv._ConvNd):
    """A convolution that may have no channel on one side."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution; its bias where no channel is left to read."""
        if 0 not in self.weight.shape:
            out: Tensor = super().forward(input)
            return out
        value = self.weight.flatten(1).sum(1)  # zeros, with a gradient as every parameter has one
        value = value if self.bias is None else value + self.bias
        shape = [input.shape[0], len(value), *self._places(input.shape[2:])]
        return value.view(1, -1, *(1 for _ in shape[2:])).expand(shape)

    def _places(self, size: torch.Size) -> list[int]:
        padding = self._reversed_padding_repeated_twice[::-1]
        sides = [padding[i] + padding[i + 1] for i in range(0, len(padding), 2)]
        taken = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        return [(n + p - t - 1) // s + 1 for n, p, t, s in zip(size, sides, taken, self.stride, strict=True)]


class PrunedConv1d(_Convolution, nn.Conv1d):
    """One dimension."""


class PrunedConv2d(_Convolution, nn.Conv2d):
    """Two dimensions."""


class PrunedConv3d(_Convolution, nn.Conv3d):
    """Three dimensions."""


class ShiftedConv1d(_Shifted, _Convolution, nn.Conv1d):
    """A convolution plus a map."""


class ShiftedConv2d(_Shifted, _Convolution, nn.Conv2d):
    """A convolution plus a map."""


class ShiftedConv3d(_Shifted, _Convolution, nn.Conv3d):
    """A convolution plus a map."""


class _NoChannels(nn.Module):
    """Batch normalisation, which torch refuses to call without channels."""

    def forward(self, input: Tensor) -> Tensor:
        """The same, because there is nothing in it."""
        if input.shape[1]:
            out: Tensor = super().forward(input)
            return out
        return input


class PrunedBatchNorm1d(_NoChannels, nn.BatchNorm1d):
    """Vectors or sequences."""


class PrunedBatchNorm2d(_NoChannels, nn.BatchNorm2d):
    """Maps."""


class PrunedBatchNorm3d(_NoChannels, nn.BatchNorm3d):
    """Volumes."""


_EMPTY: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: PrunedConv1d,
    nn.Conv2d: PrunedConv2d,
    nn.Conv3d: PrunedConv3d,
    nn.BatchNorm1d: PrunedBatchNorm1d,
    nn.BatchNorm2d: PrunedBatchNorm2d,
    nn.BatchNorm3d: PrunedBatchNorm3d,
}
_SHIFTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ShiftedLinear,
    nn.Conv1d: ShiftedConv1d,
    nn.Conv2d: ShiftedConv2d,
    nn.Conv3d: ShiftedConv3d,
    PrunedConv1d: ShiftedConv1d,
    PrunedConv2d: ShiftedConv2d,
    PrunedConv3d: ShiftedConv3d,
}


def allow_no_units(module: nn.Module) -> None:
    """Let a layer of torch work without units, in place, where it does not by itself."""
    module.__class__ = _EMPTY.get(type(module), type(module))


def add_shift(module: nn.Module, shift: Tensor) -> None:
    """Let a layer add a constant to its output, in place; to one that it adds already.

    Args:
        module: a dense layer or a convolution of torch.
        shift: one example's output, shape ``(1, ...)``.

    Raises:
        TypeError: it is another module.
    """
    if isinstance(module, _Shifted):
        module.shift = module.shift + shift
        return
    if type(module) not in _SHIFTED:
        raise TypeError(f"Expected a dense layer or a convolution of torch, but got {type(module).__name__}.")
    module.__class__ = _SHIFTED[type(module)]
    module.register_buffer("shift", shift.clone())


def pads_zeros(module: nn.Module) -> bool:
    """Whether a layer takes zeros for what is beyond the border."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.padding_mode != "zeros":
        return False
    if module.transposed:
        return any(size > 1 for size in module.kernel_size)  # its border sees fewer places
    return any(module._reversed_padding_repeated_twice)
