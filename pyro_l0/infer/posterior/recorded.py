"""Functions of tensors as recorded lists of operations, for those that are called very often."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from pyro_l0.maths.host import Context, apply

__all__ = ["recorded_with_slope"]

Function = Callable[[Tensor], Tensor]


def recorded_with_slope(function: Function, example: Tensor, other: Tensor) -> Function:
    """The same function, differentiable once, without the Python code around its operations.

    Pyro's handlers, ``torch.vmap`` and autograd take longer than the operations of a small model; and what does not
    depend on the argument is computed once. A function that cannot be recorded, or whose recording with ``example``
    does not give what it gives at ``other``, is returned itself.
    """

    def with_slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = function(x)
        return torch.cat((value.detach().unsqueeze(0), torch.autograd.grad(value, x)[0]))

    try:
        record: GraphModule = make_fx(with_slope)(example)
        _fold_constants(record)
        same = torch.allclose(record(other), with_slope(other), rtol=1e-4, atol=1e-4, equal_nan=True)
    except Exception:  # whatever the recorder does not know: the function itself then says what is wrong with it
        return function
    return (lambda x: apply(_WithSlope, x, record)) if same else function


class _WithSlope(torch.autograd.Function):
    """A value whose gradient is computed beside it."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, record: Function) -> Tensor:
        both = record(x)
        ctx.save_for_backward(both[1:])
        return both[0].clone()

    @staticmethod
    def backward(ctx: Context[None], out: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return out * slope, None


@torch.no_grad()
def _fold_constants(record: GraphModule) -> None:
    """Compute now what does not depend on an argument, such as the prior of gates of a fixed rate."""
    operations = [node for node in record.graph.nodes if node.op == "call_function"]
    if any(node.target._schema.is_mutable for node in operations if isinstance(node.target, torch._ops.OpOverload)):
        return  # a constant may be written to
    known = {node: getattr(record, str(node.target)) for node in record.graph.nodes if node.op == "get_attr"}
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
