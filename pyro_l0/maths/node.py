"""What autograd functions share: the context that they are given, and how one is called.

They take it in ``forward``: with ``setup_context`` torch binds the signature anew at every call, which takes longer
than the maths of a layer's gates. torch.compile and torch.func get the plain formulas instead, which they differentiate
(forwards too), map and fuse by themselves.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.autograd import Function


class Context(Protocol):
    """What torch keeps of a call for its derivative."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep inputs and results."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether gradients that are not there arrive as zeros."""


def apply(function: type[Function], *args: object) -> Tensor:
    """The result of a function of one result."""
    out: Tensor = function.apply(*args)
    return out
