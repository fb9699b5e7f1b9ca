"""Gates on the single weights of a layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.fixed import check_gates
from pyro_l0.nn.gate import GateLayer, check_given
from pyro_l0.nn.insert import GateHook, arrange, has_hook, hooks_of, module_at, replace_gates
from pyro_l0.nn.l0_gate import L0Gate

__all__ = ["fix_weights", "gate_weights"]


def gate_weights(network: nn.Module, *paths: str) -> nn.Module:
    r"""Copy a network and put a gate on every single weight of some layers.

    The layer computes with :math:`\theta \odot z`, one draw for the whole minibatch; its bias has no gates. The site
    is named ``path.gate`` and has one gate per weight, in the order of ``weight.flatten()``; hooks on the layer put the
    product in the weight's place. Each gate's group is one weight, so Eq. 22 prices the site at
    :math:`\lambda \sum P(z \neq 0)` without ``group_size``, and the expected number of weights left is the sum of
    ``guide.posterior()[site].active_prob``.

    Closed weights shrink nothing: :func:`~pyro_l0.nn.fix_weights` writes them as zeros into the dense weight,
    which ``weight.to_sparse()`` stores without them. If units have gates too, give
    :func:`~pyro_l0.compaction.compact` the result of ``fix_weights``, with the values of the other gates.

    Args:
        network: the network; it is not changed, and weights are not shared.
        paths: paths of layers that are called and hold a ``weight`` of two dimensions or more.

    Raises:
        ValueError: a path is not a module of the network or has gates already, its weight is tied to another, or it
            belongs to an ``nn.MultiheadAttention``, which does not call it.
        TypeError: a module has no weight of two dimensions or more.

    Example:
        >>> from pyro_l0.nn.gate import gate_names
        >>> net = gate_weights(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), "0")
        >>> gate_names(net)
        {'0.gate': L0Gate(6, dim=-1, HardConcrete)}

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 22, with groups of one weight.
    """
    check_given(network, dict.fromkeys(paths), "paths of layers")
    new = copied(network)
    for path in paths:
        _WeightsHook(_layer(new, path))
    arrange(new)
    return new


def fix_weights(network: nn.Module, gates: Mapping[str, Tensor]) -> nn.Module:
    """Copy a network, multiply its gated weights by values, and remove their gates.

    Gates on units stay as they are.

    Args:
        network: what :func:`~pyro_l0.nn.gate_weights` returned, or a network that contains it.
        gates: values in [0, 1] of all gates of the network by site, such as ``guide.test_gates()``.

    Raises:
        ValueError: a gate of the network has no value or a wrong one, as for :func:`~pyro_l0.nn.fix_gates`.
        TypeError: ``gates`` is not a mapping of tensors.

    Example:
        >>> from pyro_l0.nn import gate_weights
        >>> net = gate_weights(nn.Sequential(nn.Linear(3, 2)), "0")
        >>> fixed = fix_weights(net, {"0.gate": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])})
        >>> int(fixed[0].weight.count_nonzero())
        3
    """
    values = {gate: gates[site] for site, gate in check_gates(network, gates).items()}
    with torch.no_grad():
        new = copied(network)
        for (path, before), (_, hook) in zip(list(hooks_of(network)), list(hooks_of(new)), strict=True):
            if isinstance(hook, _WeightsHook) and isinstance(before.gate, GateLayer):
                weight = _weight(new.get_submodule(path))
                weight *= values[before.gate].to(weight).view_as(weight)
                replace_gates(new, {hook.gate: (nn.Identity(), weight.numel())})
    return new


class _WeightsHook(GateHook):
    """Gates on the weight of a layer, whose ``weight`` is their product while it is called."""

    suffix = "gate"

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(L0Gate(_weight(layer).numel(), init_jitter=0.0))
        self.handles.append(layer.register_forward_pre_hook(self))
        self.handles.append(layer.register_forward_hook(self.restore, always_call=True))

    def __call__(self, module: nn.Module, args: object) -> None:
        """Let an attribute, the product, hide the parameter."""
        weight = _weight(module)
        module.__dict__["weight"] = self.gate(weight.flatten()).view_as(weight)

    def restore(self, module: nn.Module, args: object, output: object) -> None:
        """After a call, let the parameter be the layer's weight again, in place of its product with the gates."""
        module.__dict__.pop("weight", None)


def _layer(network: nn.Module, path: str) -> nn.Module:
    """The layer at a path, if gates can act on its weights there and nowhere else."""
    layer = module_at(network, path, "layers", _has_matrix)
    if has_hook(layer, _WeightsHook):
        raise ValueError(f"Expected a layer without gates on its weights, but {path!r} has them already.")
    outer = [module for name, module in network.named_modules(remove_duplicate=False) if path.startswith(f"{name}.")]
    if any(isinstance(module, nn.MultiheadAttention) for module in outer):
        raise ValueError(
            f"Expected a layer that is called, but {path!r} is part of an nn.MultiheadAttention, which reads its "
            "weights and does not call it; gate_heads replaces such a module by one of layers."
        )
    if not _has_matrix(layer):
        raise TypeError(f"Expected a layer with a weight of two dimensions or more, but {path!r} is a {layer}.")
    weight = _weight(layer)
    names = [name for name, other in network.named_parameters(remove_duplicate=False) if other is weight]
    if len(names) > 1:
        raise ValueError(
            f"Expected a weight of one name, but it is {' and '.join(map(repr, names))}; untie them first."
        )
    return layer


def _has_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() > 1


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight
