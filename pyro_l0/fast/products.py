"""Products with gates that a layer applies to its weights, where that is cheaper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_l0.fast.switch import is_on

_CONVOLUTIONS: dict[object, int] = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}  # and the dimensions of a batch
# What gives the product away to be changed without that its version counts.
_UNSEEN = {Tensor.data.__get__, Tensor.detach, Tensor.numpy}  # type: ignore[attr-defined]


class _Factors(NamedTuple):
    """What a product was made of, and how often each of the three had been changed in place."""

    units: Tensor
    gates: Tensor
    dim: int
    versions: tuple[int, ...]


class _GatedProduct(Tensor):
    """Units times gates. A layer that reads them reads the plain units and scales its weights, where that is cheaper.

    Every other use is one of the product, a plain tensor with a graph.
    """

    factors: _Factors

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # another library's tensors know what to do with a plain one
        if func in _UNSEEN and type(args[0]) is cls:
            args[0].factors = args[0].factors._replace(versions=())
        with torch._C.DisableTorchFunctionSubclass():
            if (func is F.linear or func in _CONVOLUTIONS) and len(args) > 1 and _is_cheaper(func, args[0], args[1]):
                units, gates, _, _ = args[0].factors
                weight = args[1] * aligned(args[1], gates, -1 if func is F.linear else 1)
                args = (units, weight, *args[2:])
            # The first call of a module that was compiled by itself runs under a mode that takes no subclass.
            if torch._C._len_torch_dispatch_stack() and torch._guards.active_fake_mode() is None:
                args, kwargs = tree_map_only(cls, lambda x: x.as_subclass(Tensor), (args, kwargs))
            return func(*args, **(kwargs or {}))


def _is_cheaper(layer: object, x: object, weight: Tensor) -> bool:
    """Whether a layer has less to do with its weights scaled than with its inputs, and makes the same of them.

    Inputs without a gradient would get one for the gates alone. Weights without one would get one for them. A
    checkpointed block has to make the same calls when it runs again.
    """
    if not _is_intact(x) or type(weight) is _GatedProduct or may_be_in_block():
        return False
    units, gates, dim, _ = x.factors
    if weight.dim() < 2 or weight.shape[1] != gates.numel():
        return False  # a convolution in groups, or an error that the layer raises
    if units.requires_grad and not (weight.requires_grad and units.numel() > weight.numel()):
        return False
    return dim == -1 if layer is F.linear else dim == 1 and _CONVOLUTIONS[layer] == units.dim()


def _is_intact(x: object) -> TypeGuard[_GatedProduct]:
    """Whether a tensor is still a product of its factors, and no one has asked for its own gradient."""
    if type(x) is not _GatedProduct or not x.requires_grad or x.retains_grad or x._backward_hooks:
        return False
    units, gates, _, versions = x.factors
    return versions == (units._version, gates._version, x._version)


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


def gated_product(x: Tensor, z: Tensor, dim: int = -1) -> Tensor:
    """``x * z`` for gates of the last dimension or of feature maps (1), which the next layer may apply to its weights.

    Consecutive gates are one factor.
    """
    product: Any = multiply_along(x, z, dim)
    if _is_intact(x) and x.factors.dim == dim:
        z = x.factors.gates * z
        x = x.factors.units
    product.__class__ = _GatedProduct  # as_subclass would make a view, which can't be changed in place as freely
    gated: _GatedProduct = product
    gated.factors = _Factors(x, z, dim, (x._version, z._version, gated._version))
    return gated


def may_be_gated(x: Tensor, z: Tensor) -> bool:
    """Whether a product may know its factors: plain tensors, a gate per unit, gradients; no transform or compiler."""
    if z.dim() != 1 or not z.requires_grad or not torch.is_grad_enabled() or not is_on("gated_weights"):
        return False
    if type(x) not in (Tensor, _GatedProduct) or not x.is_floating_point() or (type(x) is Tensor and x.is_nested):
        return False
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def may_be_in_block() -> bool:
    """Whether a checkpointed block may be running, for the first time or again."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1 or has_top_hooks()


def has_top_hooks() -> bool:
    """Whether saved tensors go through hooks, as in a checkpointed block."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
