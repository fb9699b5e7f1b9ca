"""Layers that add what constant inputs which left made of them, place by place."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["add_shift", "pads_zeros"]


class _Shifted(nn.Module):
    """A layer that adds a constant to its output, the contribution of inputs that left."""

    shift: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output plus the constant."""
        out: Tensor = super().forward(input)
        return out + self.shift


class ShiftedLinear(_Shifted, nn.Linear):
    """A dense layer plus a constant for every place in front of its units."""


class ShiftedConv1d(_Shifted, nn.Conv1d):
    """A convolution plus a map."""


class ShiftedConv2d(_Shifted, nn.Conv2d):
    """A convolution plus a map."""


class ShiftedConv3d(_Shifted, nn.Conv3d):
    """A convolution plus a map."""


_SHIFTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ShiftedLinear,
    nn.Conv1d: ShiftedConv1d,
    nn.Conv2d: ShiftedConv2d,
    nn.Conv3d: ShiftedConv3d,
}


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
