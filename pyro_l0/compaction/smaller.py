"""Gates, layers and batch normalisation like others, with fewer units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pyro_l0.nn.gate import Gate
from pyro_l0.nn.kinds import LayerModule

__all__ = ["BatchNorm", "batch_norm_like", "gate_like", "layer_like"]

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def gate_like(gate: Gate, units: Sequence[int]) -> Gate:
    """The same site with fewer gates."""
    index = torch.tensor(units)
    prior = gate.prior.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == (gate.size,) else x)
    small = Gate(len(units), gate.dim, prior)
    small.site_name = gate.site_name
    return small


def layer_like(module: LayerModule, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The same layer with other weights."""
    out_units, in_units = weight.shape[:2]
    make: Callable[..., nn.Module] = nn.Linear if isinstance(module, nn.Linear) else type(module)
    options = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    kernel = {} if isinstance(module, nn.Linear) else {name: getattr(module, name) for name in options}
    layer = make(in_units, out_units, bias=bias is not None, dtype=weight.dtype, **kernel)
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer.load_state_dict(state)
    return _frozen_like(layer, module)


def batch_norm_like(module: BatchNorm, units: list[int], scale: Tensor | None) -> nn.Module:
    """Batch normalisation of some units, which come divided by ``scale``."""
    affine = module.affine or scale is not None
    state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    state = {name: value[units] if value.dim() else value for name, value in state.items()}
    norm = type(module)(len(units), module.eps, module.momentum, affine, dtype=state["running_mean"].dtype)
    if affine and not module.affine:
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
