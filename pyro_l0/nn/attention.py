"""Attention whose projections are layers that are called; torch's module hides its heads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PlainAttention"]


class PlainAttention(nn.Module):
    """Computes what :class:`torch.nn.MultiheadAttention` does, by layers that are called.

    Torch's module passes its weights to one function that checks their sizes, and calls none of its layers. Here
    ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` are dense layers, with copies of its weights, each head has its
    own slice of them, and the number of heads follows from the projections. Dropout of attention weights draws other
    random numbers. A module that adds a bias or zeros to its keys and values is refused.
    """

    # torch's encoder and its layers read these to decide whether their fused path may bypass the module.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("Expected an nn.MultiheadAttention without add_bias_kv and add_zero_attn.")
        self.head_size: int = module.head_dim
        self.dropout: float = module.dropout
        self.batch_first: bool = module.batch_first
        self.q_proj, self.k_proj, self.v_proj = _projections(module)
        self.out_proj: nn.Module = _dense(module.out_proj.weight, module.out_proj.bias)
        self.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Takes and returns what torch's module does; ``is_causal`` needs ``attn_mask``."""
        if is_causal and attn_mask is None:
            raise ValueError("Expected attn_mask with is_causal=True, which is a hint about it, but got none.")
        is_batched = query.dim() == 3
        is_turned = is_batched and not self.batch_first
        if not is_batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif is_turned:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._split(self.q_proj(query)), self._split(self.k_proj(key)), self._split(self.v_proj(value))
        mask = _merge(attn_mask, key_padding_mask, q)
        weights: Tensor | None = None
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_size)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        if not is_batched:
            return output[0], None if weights is None else weights[0]
        return (output.transpose(0, 1) if is_turned else output), weights

    def _split(self, x: Tensor) -> Tensor:
        """Heads as a dimension: from ``(batch, length, features)`` to ``(batch, heads, length, head_size)``."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_size))
        return heads.transpose(1, 2)


def _projections(module: nn.MultiheadAttention) -> list[nn.Linear]:
    """The dense layers of queries, keys and values."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        assert module.q_proj_weight is not None
        assert module.k_proj_weight is not None
        assert module.v_proj_weight is not None
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [_dense(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _dense(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A dense layer of copied weights."""
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias is not None, device=weight.device, dtype=weight.dtype)
    layer.requires_grad_(weight.requires_grad)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def _merge(attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Both masks as one that is added to scores of shape ``(batch, heads, length, keys)``."""
    merged: Tensor | None = None
    if attn_mask is not None:
        merged = _added(attn_mask, query.dtype)
        if merged.dim() == 3:
            merged = merged.unflatten(0, (len(query), -1))
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, query.dtype)[:, None, None]
        merged = padding if merged is None else merged + padding
    return merged


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask whose True means "not this one", as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
