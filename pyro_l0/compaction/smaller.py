"""Gates, layers and batch normalisation like others, with fewer units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.nn.gate import Gate

__all__ = ["batch_norm_like", "gate_like", "layer_like"]


def gate_like(gate: Gate, units: Sequence[int]) -> Gate:
    """The same site with fewer gates."""
    index = torch.tensor(units)
    prior = gate.prior.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == (gate.size,) else x)
    small = Gate(len(units), gate.dim, prior)
    small.site_name = gate.site_name
    return small


def layer_like(module: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The same layer with other weights."""
    options: Any = module
    out_units, in_units = weight.shape[:2]
    if isinstance(module, nn.Linear):
        layer: nn.Module = nn.Linear(in_units, out_units, bias is not None, dtype=weight.dtype)
    else:
        layer = type(options)(
            in_units,
            out_units,
            options.kernel_size,
            options.stride,
            options.padding,
            options.dilation,
            bias=bias is not None,
            padding_mode=options.padding_mode,
            dtype=weight.dtype,
        )
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer.load_state_dict(state)
    return _frozen_like(layer, module)


def batch_norm_like(module: nn.Module, units: list[int], scale: Tensor | None) -> nn.Module:
    """Batch normalisation of some units, which come divided by ``scale``."""
    options: Any = module
    affine = options.affine or scale is not None
    norm: nn.Module = type(options)(len(units), options.eps, options.momentum, affine, dtype=options.running_mean.dtype)
    state = {name: value.detach().cpu() for name, value in options.state_dict().items()}
    state = {name: value[units] if value.dim() else value for name, value in state.items()}
    if affine and not options.affine:
        state["weight"], state["bias"] = torch.ones(len(units)), torch.zeros(len(units))
    if scale is not None:
        # ((s x - m) / d) w + b = ((x - m / s) / d) (w s) + b
        state["weight"] = state["weight"] * scale
        state["running_mean"] = state["running_mean"] / scale
    norm.load_state_dict(state)
    return _frozen_like(norm, module)


def _frozen_like(small: nn.Module, module: nn.Module) -> nn.Module:
    """A module whose parameters need a gradient if those of another do; new ones if all of its weights do."""
    needs = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(needs.get(name, needs.get("weight", True)))
    return small
