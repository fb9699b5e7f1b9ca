"""A network with its gates fixed to given values."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

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
        TypeError: ``gates`` is no mapping, or a value is no tensor.

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
    if not isinstance(gates, Mapping):
        raise TypeError(f"Expected gates as values by site, as of guide.test_gates(), but got {type(gates).__name__}.")
    missing, unknown = sorted(layers.keys() - gates.keys()), sorted(gates.keys() - layers.keys())
    if missing or unknown:
        lacking = [
            f"no {what} for {', '.join(map(repr, names))}"
            for what, names in (("value", missing), ("layer", unknown))
            if names
        ]
        raise ValueError(
            f"Expected one value per gate of the network, which has {sorted(layers)}, "
            f"but there is {' and '.join(lacking)}{_meant(unknown, list(layers))}."
        )
    for name, layer in layers.items():
        value = gates[name]
        if not isinstance(value, Tensor) or value.is_meta:
            kind = "a tensor on the device meta" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"Expected gates[{name!r}] to be a tensor with values, but got {kind}.")
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


def _meant(unknown: Sequence[str], known: Sequence[str]) -> str:
    """What names without a gate may have been meant to be."""
    for name in unknown:
        if any(name.endswith(f".{other}") or other.endswith(f".{name}") for other in known):
            return "; name_gates(network, prefix) names gates by their paths in a model that holds the network"
    near = {name: get_close_matches(name, known, 1) for name in unknown}
    return "".join(f"; did you mean {match[0]!r} by {name!r}?" for name, match in near.items() if match).rstrip("?")
