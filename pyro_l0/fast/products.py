"""Products with gates that a layer applies to its weights, where that is cheaper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_l0.fast.switch import is_open


class _GatedLinear(torch.autograd.Function):
    """W (x * z) + b for rows x. The gates' gradient comes from that of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, z, weight)
        return F.linear(x, weight * z, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        of_x = grad @ (weight * z) if ctx.needs_input_grad[0] else None
        of_product = grad.t() @ x  # gradient of weight * z
        of_z = (weight * of_product).sum(0)
        # In place where no graph of this gradient is being built; the matrix is large.
        of_weight = of_product * z if torch.is_grad_enabled() else of_product.mul_(z)
        return of_x, of_z, of_weight, grad.sum(0) if ctx.needs_input_grad[3] else None


def gated_linear(x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A dense layer of gated features, W (x * z) + b."""
    out = _GatedLinear.apply(x.flatten(0, -2), z, weight, bias)  # type: ignore[no-untyped-call]
    return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


_CONVOLUTIONS: dict[object, int] = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}  # and the dimensions of a batch
_FLATTENINGS = {torch.flatten, Tensor.flatten}
# A checkpointed block that runs for the first time has hooks. Before torch 2.8 nothing tells, so assume some.
_top_hooks: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: True
)
# What does not need the product.
_DESCRIPTIONS: set[object] = {Tensor.dim, Tensor.size, Tensor.is_floating_point} | {
    getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")
}


class _DeferredProduct(Tensor):
    """The features ``plain`` times the gates ``factor``, computed at the first use other than the next layer's.

    Calls of torch come through ``__torch_function__``; a custom function, reentrant checkpointing and vmap come through
    ``__torch_dispatch__``. Until then the memory, which is that of ``product``, has no size, so that code which reads
    memory past both finds none.
    """

    plain: Tensor
    factor: Tensor
    product: Tensor

    def _pending(self) -> bool:
        """Whether the product has not been computed; raises if it can no longer be, as its factors have changed."""
        kept = self.__dict__
        if any(other._version != version for other, version in kept["views"]):
            raise RuntimeError(
                "Expected gated maps and the features that a flattening made of them to stay as they were, but the "
                "others have been changed in place; change a copy."
            )
        if "plain" not in kept:
            return False
        if (kept["plain"]._version, kept["factor"]._version) != kept["versions"]:
            raise RuntimeError(
                "Expected the units and the gates of a product to stay as they were until it was used, but one of "
                "them has been changed in place; change a copy."
            )
        return True

    def _compute(self) -> Tensor:
        """The product without its graph."""
        kept = self.__dict__
        product: Tensor = kept["product"]
        if self._pending():
            plain, factor = kept.pop("plain"), kept.pop("factor")
            product.untyped_storage().resize_(product.numel() * product.element_size())
            with torch.no_grad():
                # Not counted as a change of what has been saved for a gradient: there was nothing before.
                torch.mul(plain, aligned(plain, factor, kept["gated_dim"]), out=product.data)
        return product

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # another library's tensors know what to do with a plain one
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # A block that runs again for its gradient may find that the product is no longer pending.
            if not may_be_in_block():
                if (func is F.linear or func in _CONVOLUTIONS) and len(args) > 1:
                    first = args[0]
                    if type(first) is cls and not any(type(x) is cls for x in args[1:]) and first._pending():
                        return first._layer(func, args[1], *args[2:], **kwargs)
                elif func in _FLATTENINGS and args:
                    flat = _flatten(*args, **kwargs)
                    if flat is not None:
                        return flat
            for x in args:
                if type(x) is cls and func not in _DESCRIPTIONS:
                    x._compute()  # its memory may be read
            return func(*args, **kwargs)

    def _layer(self, layer: Callable[..., object], weight: Tensor, *others: Any, **options: Any) -> object:
        """A layer of the product, by its weights where that is cheaper."""
        gated_dim, factor = self.__dict__["gated_dim"], self.factor
        if not _is_cheaper(self, weight):
            # No view of the product comes out of a layer, so that it need not share the memory.
            return layer(multiply_along(self.plain, factor, gated_dim), weight, *others, **options)
        factor = factor.to(weight.dtype)
        if gated_dim == 1 and _CONVOLUTIONS.get(layer) == self.plain.dim():
            return layer(self.plain, weight * aligned(weight, factor, 1), *others, **options)
        if gated_dim == -1 and layer is F.linear:
            if _is_autocast_on(weight.device.type):
                return F.linear(self.plain, weight * factor, *others, **options)
            return gated_linear(self.plain, factor, weight, *others, **options)
        self._compute()
        return layer(self, weight, *others, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*tree_map_only(cls, cls._compute, args), **tree_map_only(cls, cls._compute, kwargs or {}))
        # An operation in place returns its argument.
        return next((x for x in args if isinstance(x, cls) and out is x.__dict__["product"]), out)


class _Product(torch.autograd.Function):
    """x * z without a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x, z)
        ctx.dim = dim
        product = torch.empty_like(x)
        product.untyped_storage().resize_(0)
        deferred = torch.Tensor._make_subclass(_DeferredProduct, product)
        deferred.__dict__.update(
            product=product, plain=x, factor=z, gated_dim=dim, versions=(x._version, z._version), views=[]
        )
        return deferred

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z = ctx.saved_tensors
        of_x = multiply_along(grad, z, ctx.dim) if ctx.needs_input_grad[0] else None
        others = [dim for dim in range(x.dim()) if dim != ctx.dim % x.dim()]
        return of_x, (grad * x).sum(others).to(z.dtype) if ctx.needs_input_grad[1] else None, None


def _is_autocast_on(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; torch refuses the question for those that have none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _is_cheaper(x: _DeferredProduct, weight: Tensor) -> bool:
    """Whether a layer has less to do with its weights scaled than with its inputs.

    Inputs without a gradient would get one for the gates alone. Weights without one would get one for them.
    """
    if weight.dim() < 2 or weight.shape[1] != x.factor.numel():
        return False  # a convolution in groups, or an error that the layer raises
    return not x.plain.requires_grad or (weight.requires_grad and x.plain.numel() > weight.numel())


def _flatten(x: _DeferredProduct, start_dim: int = 0, end_dim: int = -1, **others: object) -> Tensor | None:
    """Gated feature maps as features, whose product is still deferred; None for any other flattening.

    They have a memory of their own, so that a change in place of either must be the last use of both.
    """
    kept, last = x.__dict__, x.dim() - 1
    if others or last < 2 or (kept["gated_dim"], start_dim) != (1, 1) or end_dim not in (-1, last):
        return None
    if not x._pending() or not may_defer(x, x.factor):
        return None
    factor = x.factor.unsqueeze(1).expand(-1, math.prod(x.shape[2:])).reshape(-1)
    flat = defer_product(x.plain.flatten(1), factor)
    for one, other in ((x, flat), (flat, x)):
        one.__dict__["views"].append((other.__dict__["product"], other.__dict__["product"]._version))
    return flat


def multiply_along(x: Tensor, z: Tensor, dim: int) -> Tensor:
    """Multiply dimension ``dim`` of ``x`` by the last dimension of ``z``, in the type of ``x``."""
    if type(x) is Tensor and x.is_nested:  # torch's transformers make them of padded batches, and don't broadcast them
        each = [multiply_along(example, z, dim - 1 if dim > 0 else dim) for example in x.unbind()]
        return torch.nested.as_nested_tensor(each)
    return x * aligned(x, z, dim)


def aligned(x: Tensor, z: Tensor, dim: int) -> Tensor:
    """``z`` in the type of ``x`` and in a shape whose last dimension stands at dimension ``dim`` of ``x``."""
    trailing = (x.dim() - dim if dim >= 0 else -dim) - 1
    if trailing:
        z = z.reshape(list(z.shape) + [1] * trailing)
    return z.to(x.dtype)


def defer_product(x: Tensor, z: Tensor, dim: int = -1) -> Tensor:
    """``x * z`` for gates of the last dimension or of feature maps (1), which the next layer may apply to its weights.

    Consecutive gates, such as those of maps and of the features that a flattening makes of them, are one product.
    """
    if isinstance(x, _DeferredProduct) and x._pending() and x.__dict__["gated_dim"] % x.dim() == dim % x.dim():
        z = x.factor * z
        x = x.plain
    product: Tensor = _Product.apply(x, z, dim)  # type: ignore[no-untyped-call]
    return product


def may_defer(x: Tensor, z: Tensor) -> bool:
    """Whether a product can wait: plain tensors, one gate per unit, with gradients; no transform or compiler."""
    if z.dim() != 1 or not z.requires_grad or not torch.is_grad_enabled() or not is_open("deferred_products"):
        return False
    if type(x) not in (Tensor, _DeferredProduct) or not x.is_floating_point() or (type(x) is Tensor and x.is_nested):
        return False
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def may_be_in_block() -> bool:
    """Whether a checkpointed block may be running, for the first time or again."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1 or has_top_hooks()


def has_top_hooks() -> bool:
    """Whether saved tensors go through hooks, as in a checkpointed block."""
    return _top_hooks(True) is not None
