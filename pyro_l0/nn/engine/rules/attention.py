"""Rules of attention and softmax."""

from __future__ import annotations

import numpy as np

from pyro_l0.nn.engine.maps import Maps, Product, rule
from pyro_l0.nn.engine.slots import CONSTANT, ZERO
from pyro_l0.nn.engine.tape import Operation, Value

__all__: list[str] = []


@rule("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax", "aten::softmax", "aten::log_softmax")
def softmax(maps: Maps, operation: Operation) -> None:
    """Entries of its dimension share a sum, and stay; the other dimensions, such as heads, pass."""
    x, output = operation.value("self"), operation.output
    maps.passes_rest(x, output, least=CONSTANT)
    if x.rank:
        maps.mixes(x, operation.integer("dim") % x.rank)


@rule(
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
def attention(maps: Maps, operation: Operation) -> None:
    """Heads pass; features of values pass; those of queries and keys stay, since their number sets the scale.

    Tokens stay. With fewer keys than queries, a head of the keys leaves iff all heads of queries that read it do.
    """
    query, key, value = (operation.value(name) for name in ("query", "key", "value"))
    output, rank = operation.output, query.rank
    for x in (query, key, value):
        for dim in range(rank - 2):
            if x.shape[dim] == output.shape[dim]:
                maps.same(x, dim, output, dim)
            else:
                _share_heads(maps, x, output, dim)
    mask = operation.maybe("attn_mask") or operation.maybe("attn_bias")
    weights = max(maps.state(x) for x in (query, key, mask) if x is not None)
    for dim in (*range(rank - 2), rank - 1):
        if value.shape[dim] == output.shape[dim]:  # zeros stay zeros; constants are weighted token by token
            states = maps.states(value, dim)
            maps.set_states(output, dim, np.where(states == ZERO, states, np.maximum(states, np.uint8(weights))))
    maps.same(query, rank - 2, output, rank - 2)
    maps.same(value, rank - 1, output, rank - 1)
    where = np.logical_and(maps.states(query, rank - 1) != ZERO, maps.states(key, rank - 1) != ZERO)
    maps.reads(
        (query, rank - 1), (key, rank - 1), where=where if operation.arguments.get("scale") is not None else None
    )
    maps.reads((key, rank - 2), (value, rank - 2))
    if mask is not None:
        _mask(maps, mask, output)
    axes = (*maps.axes[query], maps.axes[key][rank - 2])
    maps.products.append(Product(operation, axes, is_attention=True))
    values = (*maps.axes[query][: rank - 1], maps.axes[key][rank - 2], maps.axes[value][rank - 1])
    maps.products.append(Product(operation, values, is_attention=True))


def _share_heads(maps: Maps, x: Value, output: Value, dim: int) -> None:
    """Several heads of queries read one head of keys and values."""
    sharing = maps.fixed(output.shape[dim] // x.shape[dim])
    maps.reshape([maps.axes[x][dim], sharing], [maps.axes[output][dim]])


def _mask(maps: Maps, mask: Value, output: Value) -> None:
    """A mask's tokens stay; its heads, if it has several, are those of the output."""
    for dim in range(mask.rank):
        output_dim = dim - mask.rank + output.rank
        if dim < mask.rank - 2 and mask.shape[dim] == output.shape[output_dim]:
            maps.same(mask, dim, output, output_dim)
        else:
            maps.fixes(mask, dim)
