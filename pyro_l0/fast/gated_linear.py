"""A dense layer that multiplies its weights by its inputs' gates, and computes the norms of these weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.fast.switch import is_open

__all__ = ["gated_linear", "record_norms", "recorded_norms"]


class _Graph:
    """Whether the graph of some norms has been used up; it holds no tensor, which would make a cycle."""

    used = False


class _GatedLinear(torch.autograd.Function):
    """W (x * z) + b for rows x, and the squared norms of W's columns if there is a mark for their graph.

    The gates' gradient comes from that of the weights. That of the norms is added in place, where a node of its own
    would write and read two more matrices of the weights' size.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, graph: _Graph | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, z, weight)
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        scaled = weight * z
        norms = None if graph is None else weight.square().sum(0)
        return F.linear(x, scaled, bias), norms

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_norms: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.graph is not None:
            ctx.graph.used = True
        x, z, weight = ctx.saved_tensors
        if grad is None:
            return None, None, None if of_norms is None else weight * (2 * of_norms), None, None
        of_x = grad @ (weight * z) if ctx.needs_input_grad[0] else None
        of_product = grad.t() @ x  # gradient of weight * z
        of_z = (weight * of_product).sum(0)
        in_place = not torch.is_grad_enabled()  # no graph of this gradient is being built; the matrix is large
        of_weight = of_product.mul_(z) if in_place else of_product * z
        if of_norms is not None:
            of_weight = (of_weight.addcmul_ if in_place else of_weight.addcmul)(weight, of_norms, value=2)
        return of_x, of_z, of_weight, grad.sum(0) if ctx.needs_input_grad[3] else None, None


# The weights whose norms are needed, with those that a layer has computed.
_recorded: ContextVar[dict[Tensor, tuple[Tensor, _Graph] | None] | None] = ContextVar("_recorded", default=None)


def gated_linear(x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A dense layer of gated features, W (x * z) + b, which records the norms of W's columns if they are needed."""
    recorded = _recorded.get()
    # Norms without a graph would have no gradient. A mode that watches operations, such as selective checkpointing, has
    # to see the same ones when a layer runs again for the gradient.
    has_graph = weight.requires_grad and torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack()
    is_new = recorded is not None and weight in recorded and has_graph and recorded_norms(weight) is None
    graph = _Graph() if is_new else None
    out, norms = _GatedLinear.apply(x.flatten(0, -2), z, weight, bias, graph)  # type: ignore[no-untyped-call]
    if recorded is not None and graph is not None:
        recorded[weight] = norms, graph
    return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


@contextmanager
def record_norms(weights: Iterable[Tensor]) -> Iterator[None]:
    """A context in which dense layers behind gates record the squared norms of these weights' columns."""
    token = _recorded.set(dict.fromkeys(weights) if is_open("recorded_norms") else None)
    try:
        yield
    finally:
        _recorded.reset(token)


def recorded_norms(weight: Tensor) -> Tensor | None:
    """The norms that these weights' layer has recorded, with their graph; None if there are none that can be used."""
    if torch.compiler.is_compiling():  # a context variable can't be traced
        return None
    recorded = _recorded.get()
    found = None if recorded is None else recorded.get(weight)
    return None if found is None or found[1].used else found[0]
