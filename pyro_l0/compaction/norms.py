r"""Normalisation over units of which some left, whose values were zeros.

Of N units the set K is left. The mean is :math:`\mu = \sum_{i \in K} x_i / N`, the variance

.. math:: v = \frac{1}{N} \Big[ \sum_{i \in K} (x_i - \mu)^2 + (N - |K|) \mu^2 \Big],

because every unit that left differs from the mean by :math:`\mu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["ReducedLayerNorm", "ReducedRMSNorm", "as_whole_norms", "reduce_norm"]


class ReducedLayerNorm(nn.LayerNorm):
    """Layer normalisation that counts units which left as zeros.

    ``size`` is the number of units before any left; the shape of one example's units is ``normalized_shape``.
    """

    size: int

    def forward(self, input: Tensor) -> Tensor:
        """Normalise over the units that are left and the zeros that are not there."""
        dims = tuple(range(-len(self.normalized_shape), 0))
        left = self.normalized_shape[0] if len(dims) == 1 else torch.Size(self.normalized_shape).numel()
        mean = input.sum(dims, keepdim=True) / self.size
        centred = input - mean
        squares = centred.square().sum(dims, keepdim=True) + (self.size - left) * mean.square()
        out = centred * torch.rsqrt(squares / self.size + self.eps)
        if self.weight is not None:
            out = out * self.weight
        return out if self.bias is None else out + self.bias


class ReducedRMSNorm(nn.RMSNorm):
    """Root mean square normalisation that counts units which left as zeros; ``size`` as above."""

    size: int

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the units that are left and the zeros that are not there."""
        dims = tuple(range(-len(self.normalized_shape), 0))
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        out = x * torch.rsqrt(x.square().sum(dims, keepdim=True) / self.size + eps)
        return out if self.weight is None else out * self.weight


_REDUCED: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: ReducedLayerNorm, nn.RMSNorm: ReducedRMSNorm}
_WHOLE = {reduced: whole for whole, reduced in _REDUCED.items()}


def reduce_norm(module: nn.Module, size: int) -> None:
    """Let a normalisation count units that left as zeros, in place.

    Args:
        module: ``nn.LayerNorm`` or ``nn.RMSNorm``, reduced before or not.
        size: the number of its units before any left.

    Raises:
        TypeError: it is another module.
    """
    if type(module) in _REDUCED:
        module.__class__ = _REDUCED[type(module)]
    if not isinstance(module, (ReducedLayerNorm, ReducedRMSNorm)):
        raise TypeError(f"Expected nn.LayerNorm or nn.RMSNorm to lose units, but got {type(module).__name__}.")
    module.size = size


@contextmanager
def as_whole_norms(network: nn.Module) -> Iterator[None]:
    """A context in which reduced normalisations of a network are plain ones, to be read as single operations."""
    reduced = [(module, type(module)) for module in network.modules() if type(module) in _WHOLE]
    for module, kind in reduced:
        module.__class__ = _WHOLE[kind]
    try:
        yield
    finally:
        for module, kind in reduced:
            module.__class__ = kind
