"""Gates on the heads of attention, in front of the output projections."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_l0.expect import expect_count
from pyro_l0.nn.calls import refuse_idle
from pyro_l0.nn.engine.record import Example, copied, example_of
from pyro_l0.nn.gate import check_given
from pyro_l0.nn.insert import GateHook, arrange, has_hook, module_at
from pyro_l0.nn.l0_gate import L0Gate

__all__ = ["PlainAttention", "gate_heads", "is_dense"]


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
    if module.in_proj_weight is None:
        weights = [module.get_parameter(f"{name}_proj_weight") for name in "qkv"]
    else:
        weights = list(module.in_proj_weight.chunk(3))
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [_dense(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _dense(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A dense layer with copies of a weight, shape ``(out, in)``, and of a bias, if any."""
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


def gate_heads(network: nn.Module, heads: Mapping[str, int], example: Example | None = None) -> nn.Module:
    """Copy a network and put a gate on each attention head.

    The input of an output projection holds the heads side by side. The gates multiply its slices, so compaction removes
    a closed head's columns of the projection and its rows of queries, keys and values.

    A hook on the projection at ``path`` gates its input; the site is named ``path.gate``, and every module and
    parameter of the network keeps its path. An exception is :class:`torch.nn.MultiheadAttention`, which never calls its
    output projection ``path.out_proj``: it is replaced by a module with the same arguments and results that calls its
    layers, among them ``path.q_proj``, ``path.k_proj`` and ``path.v_proj``.

    Args:
        network: the network; it is not changed, and weights are not shared.
        heads: by path of the output projection, the number of heads whose values it reads.
        example: what the network is called with, as for :func:`~pyro_l0.nn.insert_gates`; give it to refuse gates that
            change no output.

    Raises:
        ValueError: a path is not a module of the network, or the module has two names or head gates already; the number
            of heads is not that of the ``nn.MultiheadAttention``, or does not divide the projection's inputs; an
            ``nn.MultiheadAttention`` is the whole network, or adds a bias or zeros to its keys and values; or a gate
            changes no output.
        TypeError: a module is not a dense layer, or a number of heads is not an integer.

    Example:
        >>> import torch
        >>> from pyro_l0.nn import fix_gates
        >>> layer = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
        >>> net = gate_heads(layer, {"self_attn.out_proj": 2})
        >>> fixed = fix_gates(net, {"self_attn.out_proj.gate": torch.tensor([1.0, 0.0])})
        >>> fixed(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 8])

    References:
        Voita, Talbot, Moiseev, Sennrich, Titov (2019), arXiv:1905.09418; section 5.1, with the gates in the same place.
    """
    check_given(network, heads, "numbers of heads by module path")
    new = copied(network)
    for path, number in heads.items():
        expect_count(1, **{f"heads[{path!r}]": number})
        module_at(new, path, "dense layers", is_dense)
        parent = new.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            _swap(new, path, parent, number)
        projection = new.get_submodule(path)
        _check_projection(new, path, projection, number)
        _HeadsHook(projection, number)
    arrange(new)
    for module in new.modules():
        # It would pass packed sequences to layers that take plain ones.
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, PlainAttention) for m in module.modules()):
            module.use_nested_tensor = False
    if example is not None:
        refuse_idle(new, example_of(example, network))
    return new


class _HeadsHook(GateHook):
    """A gate per head in front of a projection."""

    suffix = "gate"

    def __init__(self, projection: nn.Module, heads: int) -> None:
        super().__init__(L0Gate(heads, dim=-2, init_jitter=0.0))
        self.heads = heads
        self.handles.append(projection.register_forward_pre_hook(self))

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The projection's input, shape ``(..., heads * head_size)``, with its slices multiplied by the gates."""
        x, *others = args
        return self.gate(x.unflatten(-1, (self.heads, -1))).flatten(-2), *others

    def resize(self, size: int) -> None:
        """Follow a cut of the attention to fewer heads."""
        self.heads = size


def _swap(network: nn.Module, path: str, attention: nn.MultiheadAttention, heads: int) -> None:
    """Replace torch's attention by a module whose layers are called."""
    inner = path.rpartition(".")[0]
    if heads != attention.num_heads:
        raise ValueError(
            f"Expected {attention.num_heads} heads at {path!r}, as many as its nn.MultiheadAttention has, but got "
            f"{heads}."
        )
    _refuse_shared(network, inner, attention)
    network.set_submodule(inner, PlainAttention(attention))


def _check_projection(network: nn.Module, path: str, projection: nn.Module, heads: int) -> None:
    """Refuse all but a dense layer of one name that reads heads side by side."""
    if has_hook(projection, _HeadsHook):
        raise ValueError(f"Expected an output projection without head gates, but {path!r} has them already.")
    if not is_dense(projection):
        raise TypeError(
            f"Expected a dense layer at {path!r}, which reads the heads side by side, but got "
            f"{type(projection).__name__}; write an L0Gate(heads, dim=...) into the network's forward."
        )
    _refuse_shared(network, path, projection)
    weight = projection.weight
    assert isinstance(weight, Tensor)
    inputs = weight.shape[0 if type(projection).__name__ == "Conv1D" else 1]  # transformers' holds it transposed
    if inputs % heads:
        raise ValueError(f"Expected a number of heads at {path!r} that divides its {inputs} inputs, but got {heads}.")


def _refuse_shared(network: nn.Module, path: str, module: nn.Module) -> None:
    names = [name for name, other in network.named_modules(remove_duplicate=False) if other is module]
    if len(names) > 1:
        raise ValueError(
            f"Expected {path!r} to be a module of one name, but it is at {' and at '.join(map(repr, names))}; "
            "write an L0Gate(heads, dim=...) into the network's forward."
        )


def is_dense(module: nn.Module) -> bool:
    """Whether a module is a dense layer: torch's, or one of a matrix alone, such as the Conv1D of transformers."""
    weight = getattr(module, "weight", None)
    is_other = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not is_other
