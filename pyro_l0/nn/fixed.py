"""A network with its gates fixed to given values."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pyro_l0.nn.deferred import multiply_along
from pyro_l0.nn.gate import Gate, gate_names

__all__ = ["FixedGate", "check_gates", "fix_gates"]


class FixedGate(nn.Module):
    """Multiply dimension ``dim`` by given values; what :func:`fix_gates` puts in the place of a Gate.

    Args:
        value: the gates, shape ``(size,)``; a buffer of the module.
        dim: dimension of the input that holds the units.
    """

    value: Tensor

    def __init__(self, value: Tensor, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("value", value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply dimension ``dim`` of ``x`` by the gates."""
        return multiply_along(x, self.value, self.dim)

    def extra_repr(self) -> str:
        """Size and dimension."""
        return f"{len(self.value)}, dim={self.dim}"


def fix_gates(network: nn.Module, gates: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a network whose gates have given values, for deterministic evaluation.

    Args:
        network: a network with :class:`Gate` layers; it is not changed.
        gates: values in [0, 1] by site name, each of shape ``(size,)``, such as ``guide.test_gates()``.

    Raises:
        ValueError: a gate of the network has no value, a name is not a gate of the network, a shape does not fit,
            or a value is outside [0, 1] or not a number.

    Example:
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(Gate(2), nn.Linear(2, 1))
        >>> fix_gates(net, {"0": torch.tensor([1.0, 0.0])})[0]
        FixedGate(2, dim=-1)
    """
    layers = check_gates(network, gates)
    # Give deepcopy the replacements as if it had already copied the gates.
    memo: dict[int, object] = {id(layer): FixedGate(gates[name], layer.dim) for name, layer in layers.items()}
    with torch.no_grad():
        return copy.deepcopy(network, memo)


def check_gates(network: nn.Module, gates: Mapping[str, Tensor]) -> dict[str, Gate]:
    """The gates of a network by site, after their values were checked; raises as :func:`fix_gates`."""
    layers = gate_names(network)
    for what, names in (("no value", layers.keys() - gates.keys()), ("no layer", gates.keys() - layers.keys())):
        if names:
            raise ValueError(
                f"Expected one value per gate of the network, which has {sorted(layers)}, "
                f"but there is {what} for {', '.join(map(repr, sorted(names)))}."
            )
    for name, layer in layers.items():
        value = gates[name]
        if value.shape != (layer.size,):
            why = (
                " (a gate per example, as of a network that is called inside the data plate?)"
                if value.dim() > 1
                else ""
            )
            raise ValueError(f"Expected gates[{name!r}] of shape ({layer.size},), but got {tuple(value.shape)}{why}.")
        if not bool(((value >= 0) & (value <= 1)).all()):
            raise ValueError(f"Expected gates[{name!r}] in [0, 1], but got {value}.")
    return layers
