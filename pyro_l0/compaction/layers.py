"""Torch's layers with constants of removed inputs, and its norms with removed units, which count as zeros."""

# Without annotations as strings, which torch.jit.script can't read.
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_l0.nn.engine.maps import runs_as

__all__ = [
    "ReducedLayerNorm",
    "ReducedRMSNorm",
    "add_shift",
    "as_whole_norms",
    "pads_zeros",
    "reduce_norm",
    "takes_shift",
]


class _Shifted(nn.Module):
    """A layer that adds a constant to its output: the contribution of inputs that were removed."""

    shift: Tensor
    _conv_forward: Any

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output plus the constant."""
        out: Tensor = self._conv_forward(input, self.weight, self.bias)
        return out + self.shift


class ShiftedLinear(_Shifted, nn.Linear):
    """A dense layer plus a constant."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)


class ShiftedConv1d(_Shifted, nn.Conv1d):
    """A convolution plus a map."""


class ShiftedConv2d(_Shifted, nn.Conv2d):
    """A convolution plus a map."""


class ShiftedConv3d(_Shifted, nn.Conv3d):
    """A convolution plus a map."""


_KINDS = (ShiftedLinear, ShiftedConv1d, ShiftedConv2d, ShiftedConv3d)
_SHIFTED: dict[type[nn.Module], type[nn.Module]] = {kind.__bases__[1]: kind for kind in _KINDS}


def add_shift(module: nn.Module, shift: Tensor) -> None:
    """Let a dense layer or a convolution add a constant, shape ``(1, ...)``, beside those that it adds already."""
    if isinstance(module, _Shifted):
        module.shift = module.shift + shift
        return
    module.__class__ = next(shifted for kind, shifted in _SHIFTED.items() if runs_as(module, kind))
    module.register_buffer("shift", shift.clone())


def takes_shift(module: nn.Module) -> bool:
    """Whether a layer can add a constant that differs between places: one whose forward is torch's."""
    return isinstance(module, _KINDS) or any(runs_as(module, kind) for kind in _SHIFTED)


def pads_zeros(module: nn.Module) -> bool:
    """Whether a layer reads zeros beyond the border."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.padding_mode != "zeros":
        return False
    if module.transposed:
        return any(size > 1 for size in module.kernel_size)  # fewer inputs reach its border
    return any(module._reversed_padding_repeated_twice)


class ReducedLayerNorm(nn.LayerNorm):
    r"""Layer normalisation that counts removed units as zeros.

    Of ``size`` units, :math:`N`, the set :math:`K` is left. The mean is :math:`\mu = \sum_{i \in K} x_i / N`, the
    variance

    .. math:: v = \frac{1}{N} \Big[ \sum_{i \in K} (x_i - \mu)^2 + (N - |K|) \mu^2 \Big],

    because every removed unit differs from the mean by :math:`\mu`.
    """

    size: int

    def forward(self, input: Tensor) -> Tensor:
        """Normalise over the units that are left and the zeros that are not there."""
        left = self.normalized_shape[0]
        mean = input.sum(-1, keepdim=True) / self.size
        centred = input - mean
        squares = centred.square().sum(-1, keepdim=True) + (self.size - left) * mean.square()
        out = centred * torch.rsqrt(squares / self.size + self.eps)
        if self.weight is not None:
            out = out * self.weight
        return out if self.bias is None else out + self.bias


class ReducedRMSNorm(nn.RMSNorm):
    """Root mean square normalisation that counts removed units as zeros, of ``size`` units."""

    size: int

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the units that are left and the zeros that are not there."""
        # In place of finfo(x.dtype).eps, which scripts and symbolic traces can't ask for.
        eps = (3 * (x.new_full((), 4 / 3) - 1) - 1).abs() if self.eps is None else self.eps
        out = x * torch.rsqrt(x.square().sum(-1, keepdim=True) / self.size + eps)
        return out if self.weight is None else out * self.weight


_REDUCED: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: ReducedLayerNorm, nn.RMSNorm: ReducedRMSNorm}
_WHOLE = {reduced: whole for whole, reduced in _REDUCED.items()}


def reduce_norm(module: nn.Module, size: int) -> None:
    """Let a norm, reduced before or not, count removed units as zeros; ``size`` is the number of units at the start."""
    module.__class__ = next((new for kind, new in _REDUCED.items() if runs_as(module, kind)), type(module))
    if not isinstance(module, (ReducedLayerNorm, ReducedRMSNorm)):
        raise TypeError(f"Expected nn.LayerNorm or nn.RMSNorm to lose units, but got {type(module).__name__}.")
    module.size = size


@contextmanager
def as_whole_norms(network: nn.Module) -> Iterator[None]:
    """A context in which reduced norms of a network are plain ones, to be recorded as single operations."""
    reduced = [(module, type(module)) for module in network.modules() if type(module) in _WHOLE]
    for module, kind in reduced:
        module.__class__ = _WHOLE[kind]
    try:
        yield
    finally:
        for module, kind in reduced:
            module.__class__ = kind
