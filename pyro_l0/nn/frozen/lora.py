"""Gates on the ranks of peft's LoRA adapters, and adapters of the ranks that are left.

peft is not imported: who has a model of its ``get_peft_model`` has it.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.fast.products import multiply_along
from pyro_l0.nn.l0_gate import L0Gate, NetworkGates, forget_calls

__all__ = ["compact_lora_ranks", "gate_lora_ranks"]

_SITE = "lora_ranks"
_CALL_NO_LAYER = {"Embedding", "MultiheadAttention", "ParamWrapper"}  # they compute with the matrices themselves
_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")  # the others change the frozen weights


def gate_lora_ranks(model: nn.Module) -> NetworkGates:
    r"""Put a gate on every rank of the active LoRA adapter of a model of peft, in place.

    .. math:: h = W x + \frac{\alpha}{r} B \operatorname{diag}(z) A x

    All gates are one site, ``"lora_ranks"``, so that a budget may take all ranks of a layer. Hooks on the layers
    ``lora_A`` multiply what these return. The gates train with the adapter, behind its dropout, and in evaluation mode
    they are deterministic. At the end :func:`compact_lora_ranks` cuts the matrices. Merge and save the adapter after
    that, as peft knows its matrices only, without the gates.

    Args:
        model: what ``peft.get_peft_model`` (``pip install peft``) returns for a ``LoraConfig``. Its other adapters have
            no gates.

    Returns:
        The model's gates, for :class:`~pyro_l0.infer.SparsityTarget`.

    Raises:
        ValueError: several adapters are active, the adapter is merged or has gates, or it is of another kind than
            gates of its ranks are right for, such as DoRA, PiSSA, or LoRA on embeddings.
        TypeError: ``model`` is not a model of peft.

    Example:
        ``SparsityTarget(gate_lora_ranks(model), {"lora_ranks": 0.5}, steps=1000)`` leaves half of all ranks.

    References:
        Hu et al. (2021), arXiv:2106.09685, Eq. 3; Ding et al. (2023), arXiv:2311.11696, have gates at the same point.
    """
    adapter, layers = _lora_layers(model)
    if hasattr(model, _SITE):
        raise ValueError("Expected a model without gates on ranks, but it has some; call compact_lora_ranks first.")
    sizes = [layer.r[adapter] for layer in layers.values()]
    gate = L0Gate(sum(sizes)).to(next(iter(layers.values())).lora_A[adapter].weight.device)
    for layer, units in zip(layers.values(), torch.arange(sum(sizes)).split(sizes), strict=True):
        _RanksHook(layer.lora_A[adapter], gate, slice(int(units[0]), int(units[-1]) + 1))
    model.add_module(_SITE, gate.train(model.training))
    return NetworkGates(model)


@torch.no_grad()
def compact_lora_ranks(model: nn.Module) -> dict[str, int]:
    """Remove the ranks whose gates are closed, and the gates, in place.

    Rows of A and columns of B leave, and the gates of the others go into B. So the adapter computes what it did in
    evaluation mode. Its ``LoraConfig`` gets a ``rank_pattern``, an ``alpha_pattern`` that leaves the scale of every
    layer as it was, and if layers lost all of their ranks, ``target_modules`` without them. ``save_pretrained``,
    ``PeftModel.from_pretrained`` and ``merge_and_unload`` work as for any adapter. An optimiser of the matrices has to
    be made anew.

    Args:
        model: the model that :func:`gate_lora_ranks` was called with, with the same adapter active.

    Returns:
        The ranks that are left, by path in the network that peft adapted; 0 for a layer without any.

    Raises:
        ValueError: the adapter has no gates, or is one that :func:`gate_lora_ranks` refuses.
        TypeError: ``model`` is not a model of peft.
    """
    adapter, layers = _lora_layers(model)
    calls = [layer.lora_A[adapter]._forward_hooks.values() for layer in layers.values()]
    hooks = [hook for hooks in calls for hook in hooks if isinstance(hook, _RanksHook)]
    if not hooks:
        raise ValueError(f"Expected gates on the ranks of {adapter!r}, but there are none; call gate_lora_ranks first.")
    for layer, hook in zip(layers.values(), hooks, strict=True):
        hook.handle.remove()
        _keep_ranks(layer, adapter, hook.gate.test_gate[hook.units])
    delattr(model, _SITE)
    forget_calls(model)
    ranks = {path: layer.r.get(adapter, 0) for path, layer in layers.items()}
    left = {path: layer for path, layer in layers.items() if ranks[path]}
    config: Any = model.peft_config[adapter]  # type: ignore[index]
    # With ^ no pattern fits a module further inside whose path ends alike; those of before are replaced.
    config.rank_pattern = {f"^{path}": ranks[path] for path in left}
    config.alpha_pattern = {f"^{path}": layer.lora_alpha[adapter] for path, layer in left.items()}
    if len(left) < len(layers):
        config.target_modules = "|".join(map(re.escape, left))
        config.layers_to_transform = config.layers_pattern = None  # which go with a list of modules only
    return ranks


class _RanksHook:
    """Multiplies what a layer's ``lora_A`` returns by its gates, some of those of all layers."""

    def __init__(self, module: nn.Module, gate: L0Gate, units: slice) -> None:
        self.gate, self.units = gate, units
        self.handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """The product; feature maps, of a convolution, are in the dimension behind the batch."""
        return multiply_along(output, self.gate()[self.units], -1 if isinstance(module, nn.Linear) else 1)


def _keep_ranks(layer: Any, adapter: str, gates: Tensor) -> None:
    """Cut the matrices of a layer to the ranks whose gates are open, and multiply these by them."""
    index = gates.nonzero().squeeze(1)
    if not len(index):
        active = layer.active_adapters
        layer.set_adapter([])  # or peft would activate another one
        layer.delete_adapter(adapter)
        layer.set_adapter(active)
        return
    a, b = layer.lora_A[adapter], layer.lora_B[adapter]
    down, up = a.weight[index], multiply_along(b.weight, gates, 1)[:, index]
    a.weight, b.weight = nn.Parameter(down, a.weight.requires_grad), nn.Parameter(up, b.weight.requires_grad)
    sizes = "features" if isinstance(a, nn.Linear) else "channels"
    setattr(a, f"out_{sizes}", len(index))
    setattr(b, f"in_{sizes}", len(index))
    layer.r[adapter] = len(index)
    of_scale = math.sqrt(len(index)) if layer.use_rslora[adapter] else len(index)
    layer.lora_alpha[adapter] = layer.scaling[adapter] * of_scale


def _lora_layers(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """The active adapter and its layers by path; an error if gates on their ranks would not be right."""
    configs, active = getattr(model, "peft_config", None), getattr(model, "active_adapters", None)
    get_base_model = getattr(model, "get_base_model", None)
    if not isinstance(configs, dict) or active is None or get_base_model is None:
        kind = type(model).__name__
        raise TypeError(f"Expected a model of peft.get_peft_model (pip install peft), but got a {kind}.")
    if len(active) != 1:
        raise ValueError(f"Expected one active adapter, but there are {active}; choose one by model.set_adapter.")
    adapter: str = active[0]
    config, modules = configs[adapter], dict(get_base_model().named_modules())
    layers = {path: module for path, module in modules.items() if adapter in getattr(module, "lora_alpha", ())}
    reason = _why_not(config, adapter, layers)
    if reason:
        raise ValueError(
            f"Expected an adapter whose ranks can have gates, but {adapter!r} {reason}; use LoRA without that."
        )
    return adapter, layers


def _why_not(config: Any, adapter: str, layers: dict[str, Any]) -> str | None:
    """Why gates of an adapter's ranks would not act everywhere, or the cut adapter would not load as it is."""
    if config.peft_type != "LORA":
        return f"is of the kind {config.peft_type.value}"
    if config.init_lora_weights not in _INITIALISATIONS:
        return f"has init_lora_weights={config.init_lora_weights!r}, which runs again on loading, with other ranks"
    if config.lora_bias or config.bias != "none":
        return "trains biases, which would be lost with all ranks of a layer (bias, lora_bias)"
    for path, layer in layers.items():
        if adapter in layer.lora_variant:
            return f"is a {type(layer.lora_variant[adapter]).__name__} at {path!r}"
        if type(layer).__name__ in _CALL_NO_LAYER:
            return f"adapts {path!r} of a kind whose matrices are no layers ({type(layer).__name__})"
        if layer.merged:
            return f"is merged into {path!r} (call model.unmerge_adapter())"
    return None
