"""Gates on the single weights of a layer: dense matrices with zeros, and their storage without them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.fixed import check_gates
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.gate_layer import GateLayer, check_given
from pyro_l0.nn.hooks import GateHook, arrange, has_hook, hooks_of, module_at, replace_gate

__all__ = ["fix_weights", "gate_weights", "pack_zeros", "unpack_zeros"]

_SHAPE, _BITS, _VALUES = "#shape", "#bits", "#values"


def gate_weights(network: nn.Module, *paths: str) -> nn.Module:
    r"""Copy a network and put a gate on every single weight of some layers.

    The layer computes with :math:`\theta \odot z`, one draw for the whole minibatch; its bias has no gates. The site
    is named ``path.gate`` and has one gate per weight, in the order of ``weight.flatten()``; hooks on the layer put the
    product in the weight's place. Each gate's group is one weight, so Eq. 22 prices the site at
    :math:`\lambda \sum P(z \neq 0)` without ``group_size``, and the expected number of weights left is the sum of
    ``guide.posterior()[site].active_prob``.

    Closed weights shrink nothing: :func:`~pyro_l0.nn.weights.fix_weights` writes them as zeros into the dense weight,
    and :func:`~pyro_l0.nn.weights.pack_zeros` stores such weights without their zeros. If units have gates too, give
    :func:`~pyro_l0.compaction.compact` the result of ``fix_weights``, with the values of the other gates.

    Args:
        network: the network; it is not changed, and weights are not shared.
        paths: paths of layers that are called and hold a ``weight`` of two dimensions or more.

    Raises:
        ValueError: a path is not a module of the network or has gates already, its weight is tied to another, or it
            belongs to an ``nn.MultiheadAttention``, which does not call it.
        TypeError: a module has no weight of two dimensions or more.

    Example:
        >>> from pyro_l0.nn.gate_layer import gate_names
        >>> net = gate_weights(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), "0")
        >>> gate_names(net)
        {'0.gate': Gate(6, dim=-1)}

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
                replace_gate(new, hook.gate, nn.Identity(), weight.numel())
    return new


def pack_zeros(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pack a state dict without zeros: for each tensor its shape, a bit per entry, and the entries that are not zero.

    A tensor that this would not make smaller stays as it is. With a tenth of its weights left, a float32 matrix takes
    an eighth of its bytes; lists of indices would take a fifth.

    Args:
        state: tensors by name, such as ``network.state_dict()``.

    Raises:
        TypeError: ``state`` is not a mapping of tensors.

    Example:
        >>> packed = pack_zeros({"weight": torch.eye(8)})
        >>> {name: (len(x), x.dtype) for name, x in packed.items()}
        {'weight#shape': (2, torch.int64), 'weight#bits': (8, torch.uint8), 'weight#values': (8, torch.float32)}
        >>> torch.equal(unpack_zeros(packed)["weight"], torch.eye(8))
        True
    """
    _check_tensors(state)
    packed: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.detach()
        is_other = value.flatten() != 0
        shape, values = torch.tensor(value.shape), value.flatten()[is_other]
        bits = torch.from_numpy(np.packbits(is_other.cpu().numpy())).to(value.device)
        if value.dim() and sum(x.nbytes for x in (shape, bits, values)) < value.nbytes:
            packed.update({name + _SHAPE: shape, name + _BITS: bits, name + _VALUES: values})
        else:
            packed[name] = value
    return packed


def unpack_zeros(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore the state dict that was given to :func:`~pyro_l0.nn.weights.pack_zeros`, which has an example.

    Args:
        packed: what it returned, perhaps loaded from a file.

    Raises:
        TypeError: ``packed`` is not a mapping of tensors.
        ValueError: parts of a tensor are missing or do not fit each other.
    """
    _check_tensors(packed)
    state: dict[str, Tensor] = {}
    for name, value in packed.items():
        base, mark, part = name.rpartition("#")
        if not mark:
            state[name] = value
        elif mark + part == _SHAPE:
            state[base] = _from_parts(base, packed)
        elif mark + part not in (_BITS, _VALUES) or base + _SHAPE not in packed:
            raise ValueError(f"Expected {base!r} with {_SHAPE}, {_BITS} and {_VALUES}, but got {name!r} without them.")
    return state


def _check_tensors(state: object) -> None:
    """Refuse all but a mapping of tensors by name."""
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        raise TypeError(f"Expected tensors by name, such as network.state_dict(), but got {state!r}.")


class _WeightsHook(GateHook):
    """Gates on the weight of a layer, whose ``weight`` is their product while it is called."""

    suffix = "gate"

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(Gate(_weight(layer).numel()))
        self.handles.append(layer.register_forward_pre_hook(self))
        self.handles.append(layer.register_forward_hook(self.restore, always_call=True))

    def __call__(self, module: nn.Module, args: object) -> None:
        """Let an attribute, the product, hide the parameter."""
        weight = _weight(module)
        module.__dict__["weight"] = self.gate(weight.flatten()).view_as(weight)

    def restore(self, module: nn.Module, args: object, output: object) -> None:
        """Let the parameter be the weight again."""
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


def _from_parts(name: str, packed: Mapping[str, Tensor]) -> Tensor:
    """A tensor from its shape, bits and values."""
    parts = [packed.get(name + part) for part in (_SHAPE, _BITS, _VALUES)]
    shape, bits, values = parts
    if shape is None or bits is None or values is None:
        raise ValueError(f"Expected {name!r} with {_SHAPE}, {_BITS} and {_VALUES}, but one of them is missing.")
    sizes = shape.tolist()
    count = int(np.prod(sizes))
    flags = torch.from_numpy(np.unpackbits(bits.cpu().numpy())[:count].astype(bool)).to(values.device)
    if len(flags) != count or int(flags.sum()) != len(values):
        raise ValueError(
            f"Expected parts of {name!r} that fit each other, but got {len(bits)} bytes of bits and {len(values)} "
            f"values for a shape of {tuple(sizes)}."
        )
    tensor = values.new_zeros(count)
    tensor[flags] = values
    return tensor.view(sizes)
