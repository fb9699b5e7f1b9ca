"""A product with a gate that is carried out on the weights of the layer behind it, where that is cheaper.

Inputs of a network need no gradient, so the first layer of a dense network does no backward product with its
weights. Gates on the inputs would ask for one, though all that they need is the sum over the batch, which the
gradient of the weights already holds: with W (x * z) = (W * z) x the gates cost a pass over the weights instead of
a matrix product. In front of a convolution they cost a pass over the kernels instead of three over feature maps, which
are many times as large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["defer_product", "multiply_along"]


_CONVOLUTIONS = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}  # and the dimensions of a batch


class _DeferredProduct(Tensor):
    """The features ``plain`` times the gates ``factor``; any use but that of the layer behind it carries it out."""

    plain: Tensor
    factor: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and type(args[0]) is cls and not any(type(x) is cls for x in args[1:]) else None
        if first is not None and _is_convolution_over(first, func, args, kwargs):
            weight = args[1]
            scaled = weight * first.factor.to(weight.dtype).reshape((1, -1) + (1,) * (weight.dim() - 2))
            return func(first.plain, scaled, *args[2:], **kwargs)
        if func is F.linear and first is not None and first.__dict__["gated_dim"] == -1:
            x, weight = args[:2]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if torch.is_autocast_enabled(x.plain.device.type):
                return F.linear(x.plain, weight * x.factor.to(weight.dtype), bias)
            return _GatedLinear.apply(  # type: ignore[no-untyped-call]
                x.plain, x.factor.to(weight.dtype), weight, bias
            )
        args, kwargs = tree_map(_product, (args, kwargs))
        return func(*args, **kwargs)


class _GatedLinear(torch.autograd.Function):
    """W (x * z) + b without a gradient of x; the gates' gradient comes from that of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, z, weight)
        return F.linear(x * z, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        of_product = grad.t() @ x.flatten(0, -2)  # gradient of weight * z
        of_z = torch.linalg.vecdot(weight, of_product, dim=0)
        # In place, unless a graph of this gradient is being built: the matrix is large.
        of_weight = of_product * z if torch.is_grad_enabled() else of_product.mul_(z)
        return None, of_z, of_weight, grad.sum(0) if ctx.needs_input_grad[3] else None


def _is_convolution_over(x: _DeferredProduct, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is a convolution, without groups, over the dimension of the gates."""
    if x.__dict__["gated_dim"] != 1 or _CONVOLUTIONS.get(func) != x.plain.dim() or len(args) < 2:
        return False
    groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
    return bool(groups == 1)


def _product(x: Any) -> Any:
    if not isinstance(x, _DeferredProduct):
        return x
    return multiply_along(x.plain, x.factor, x.__dict__["gated_dim"])


def multiply_along(x: Tensor, z: Tensor, dim: int) -> Tensor:
    """Multiply dimension ``dim`` of ``x`` by the last dimension of ``z``, in the type of ``x``."""
    trailing = (x.dim() - dim if dim >= 0 else -dim) - 1
    if trailing:
        z = z.reshape(z.shape + (1,) * trailing)
    return x * z.to(x.dtype)


def defer_product(x: Tensor, z: Tensor, dim: int = -1) -> Tensor:
    """``x * z`` for gates ``z`` of the last dimension or of feature maps (1), left to the layer that uses it."""
    with torch._C.DisableTorchFunctionSubclass():
        deferred = x.as_subclass(_DeferredProduct)
    deferred.__dict__.update(plain=x, factor=z, gated_dim=dim)
    return deferred
