"""What the maths asks of torch: whether values can be read, caches, derivatives of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.jit import is_tracing  # type: ignore[attr-defined]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Options = TypeVar("_Options")


def traced() -> bool:
    """Whether what runs now is recorded for other values, by torch.compile or by ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or bool(is_tracing())


def transformed() -> bool:
    """Whether what runs now is traced, or a transform of torch.func applies it."""
    return traced() or torch._C._are_functorch_transforms_active()


def opaque(x: Tensor) -> bool:
    """Whether no branch may be taken on a tensor's values: traced, mapped by ``torch.vmap``, or without any."""
    if traced() or x.is_meta:
        return True
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def readable(x: Tensor) -> bool:
    """Whether the program can read a tensor's values without waiting for a device."""
    return x.device.type == "cpu" and not opaque(x)


def constant(x: Tensor) -> bool:
    """Whether a tensor can be replaced by its values: :func:`readable`, and nothing is derived by it."""
    if x.requires_grad or not readable(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return forward_ad.unpack_dual(x).tangent is None


def learned(*parameters: float | Tensor) -> bool:
    """Whether a gradient for one of some parameters is asked for."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in parameters)


def largest(x: float | Tensor) -> float:
    """The largest value, infinity where it cannot be read."""
    if not isinstance(x, Tensor):
        return x
    if not readable(x):
        return math.inf
    return float(x.detach().amax()) if x.numel() else 1.0


def cached(size: int) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Cache as many results of a function of hashable constants; torch.compile takes them as they are.

    torch.compile cannot trace a named tuple among the arguments.
    """

    def decorate(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        of_cache = lru_cache(size, typed=True)(function)

        @wraps(function)
        def call(*args: _Args.args, **options: _Args.kwargs) -> _Result:
            return of_cache(*args, **options)  # type: ignore[arg-type]

        # What torch.compiler.assume_constant_result does, whose import of the compiler takes a second.
        call._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return call

    return decorate


class Context(Protocol[_Options]):
    """What torch saves of a call of an autograd function for its derivative.

    ``forward`` takes it: with ``setup_context`` torch binds the signature anew at every call, which takes longer than
    the maths of a layer's gates. torch.compile and torch.func get the plain formulas instead, which they differentiate
    (forwards too), map and fuse by themselves.
    """

    options: _Options  # what is not a tensor
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep inputs and results for the backward pass, which reads them from ``saved_tensors``."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether gradients that are not there arrive as zeros."""


def apply(function: type[Function], *args: object) -> Tensor:
    """Call an autograd function that returns one tensor; torch types its result as anything."""
    out: Tensor = function.apply(*args)
    return out
