"""A function's value and gradient as a recorded list of tensor operations, for functions that are called very often."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from pyro_l0.maths.node import Context, apply

__all__ = ["recorded"]

Function = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


def recorded(function: Function, example: Tensor, other: Tensor) -> Function:
    """The same function, differentiable once, without the Python code around its operations.

    Pyro's handlers, ``torch.vmap`` and autograd take longer than the operations of a small model; and what does not
    hang on the argument is computed once.

    Args:
        function: of a vector, shape ``()``. Its operations may not depend on the vector's values.
        example: where it is recorded.
        other: another argument, where the record has to give what the function gives.

    Returns:
        The function itself where it cannot be recorded, as where Python code reads a value.
    """

    def with_gradient(x: Tensor) -> Pair:
        x = x.detach().requires_grad_()
        value = function(x)
        return value.detach(), torch.autograd.grad(value, x)[0]

    try:
        record = make_fx(with_gradient)(example)
        _fold_constants(record)
        same = all(map(_close, record(other), with_gradient(other)))
    except Exception:  # whatever the recorder does not know: the function itself then says what is wrong with it
        return function
    return (lambda x: apply(_Recorded, x, record)) if same else function


@torch.no_grad()
def _fold_constants(record: GraphModule) -> None:
    """Compute now what does not hang on the argument, such as the prior of gates of a fixed rate."""
    operations = [node for node in record.graph.nodes if node.op == "call_function"]
    if any(node.target._schema.is_mutable for node in operations if isinstance(node.target, torch._ops.OpOverload)):
        return  # a constant may be written to
    known: dict[Node, object] = {
        node: getattr(record, str(node.target)) for node in record.graph.nodes if node.op == "get_attr"
    }
    for node in operations:
        if not node.all_input_nodes or all(given in known for given in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = value = node.target(*args, **kwargs)
            if isinstance(value, Tensor) and any(user not in known for user in node.users):
                name = f"_folded_{node.name}"
                record.register_buffer(name, value)
                with record.graph.inserting_before(node):
                    node.replace_all_uses_with(record.graph.get_attr(name))
    record.graph.eliminate_dead_code()
    record.recompile()


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


class _Recorded(torch.autograd.Function):
    """A value whose gradient came with it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, record: Callable[[Tensor], Pair]) -> Tensor:
        value, gradient = record(x)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Context, out: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return out * gradient, None
