"""A product with a gate that is carried out on the weights of the layer behind it, where that is cheaper.

Inputs of a network need no gradient, so the first layer of a dense network does no backward product with its
weights. Gates on the inputs would ask for one, though all that they need is the sum over the batch, which the
gradient of the weights already holds: with W (x * z) = (W * z) x the gates cost a pass over the weights instead of
a matrix product. In front of a convolution they cost a pass over the kernels and one over feature maps, which are many
times as large, instead of three over these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["defer_product", "multiply_along"]


_CONVOLUTIONS = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}  # and the dimensions of a batch


class _DeferredProduct(Tensor):
    """The features ``plain`` times the gates ``factor``: the product itself for every use but a layer's behind it.

    It holds the product with its graph, so that what never asks a subclass (a custom function, reentrant
    checkpointing, vmap) or changes it in place gets what it would get without a deferral.
    """

    plain: Tensor
    factor: Tensor

    def _value(self) -> Tensor | None:
        """The product without its graph, None if it has been changed in place."""
        kept = self.__dict__
        product: Tensor = kept["product"]
        return product.detach() if product._version == kept["version"] else None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and type(args[0]) is cls and not any(type(x) is cls for x in args[1:]) else None
        if first is not None and (func is F.linear or func in _CONVOLUTIONS):
            value = first._value()
            if value is not None and _is_convolution_over(first, func, args, kwargs):
                weight = args[1]
                scaled = weight * first.factor.to(weight.dtype).reshape((1, -1) + (1,) * (weight.dim() - 2))
                return func(first.plain, scaled, *args[2:], **kwargs)
            if value is not None and func is F.linear and first.__dict__["gated_dim"] == -1:
                weight = args[1]
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                if torch.is_autocast_enabled(value.device.type):
                    return F.linear(first.plain, weight * first.factor.to(weight.dtype), bias)
                return _GatedLinear.apply(  # type: ignore[no-untyped-call]
                    value, first.plain, first.factor.to(weight.dtype), weight, bias
                )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class _GatedLinear(torch.autograd.Function):
    """W (x * z) + b without a gradient of x; the gates' gradient comes from that of the weights."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, z, weight)
        return F.linear(product, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        of_product = grad.t() @ x.flatten(0, -2)  # gradient of weight * z
        of_z = (weight * of_product).sum(0)
        # In place, unless a graph of this gradient is being built: the matrix is large.
        of_weight = of_product * z if torch.is_grad_enabled() else of_product.mul_(z)
        return None, None, of_z, of_weight, grad.sum(0) if ctx.needs_input_grad[4] else None


def _is_convolution_over(x: _DeferredProduct, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is a convolution, without groups, over the dimension of the gates."""
    if x.__dict__["gated_dim"] != 1 or _CONVOLUTIONS.get(func) != x.plain.dim() or len(args) < 2:
        return False
    groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
    return bool(groups == 1)


def multiply_along(x: Tensor, z: Tensor, dim: int) -> Tensor:
    """Multiply dimension ``dim`` of ``x`` by the last dimension of ``z``, in the type of ``x``."""
    trailing = (x.dim() - dim if dim >= 0 else -dim) - 1
    if trailing:
        z = z.reshape(z.shape + (1,) * trailing)
    return x * z.to(x.dtype)


def defer_product(x: Tensor, z: Tensor, dim: int = -1) -> Tensor:
    """``x * z`` for gates of the last dimension or of feature maps (1), which a layer behind may carry out its way."""
    product = multiply_along(x, z, dim)
    with torch._C.DisableTorchFunctionSubclass():
        deferred = product.as_subclass(_DeferredProduct)
        # The same memory and count of changes, without a subclass to ask.
        deferred.__dict__.update(product=product, plain=x, factor=z, gated_dim=dim, version=product._version)
    return deferred
