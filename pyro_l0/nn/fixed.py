"""A network with its gates fixed to given values."""

# Without annotations as strings, which torch.jit.script can't read.
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from pyro_l0.expect import expect
from pyro_l0.fast.products import aligned, multiply_along
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.gate import GateLayer, check_given, check_units, gate_names, keep_being_called
from pyro_l0.nn.l0_gate import forget_calls

__all__ = ["FixedGate", "check_gates", "check_value", "fix_gates"]


class FixedGate(nn.Module):
    """Multiply dimension ``dim`` by given values; :func:`~pyro_l0.nn.fix_gates` puts it in place of a gate.

    Args:
        value: the gates, shape ``(size,)``; a buffer of the module.
        dim: dimension of the input that holds the units.

    Raises:
        ValueError: a shape does not fit, as for :class:`~pyro_l0.nn.L0Gate`.
        TypeError: ``value`` or the input is not a tensor, or the input is not of a floating or complex type.

    Example:
        >>> FixedGate(torch.tensor([1.0, 0.0]))(torch.tensor([[2.0, 3.0]]))
        tensor([[2., 0.]])
    """

    value: Tensor

    def __init__(self, value: Tensor, dim: int = -1) -> None:
        super().__init__()
        expect(Tensor, "a tensor", value=value)
        expect(int, "a whole number", dim=dim)
        if value.dim() != 1 or dim == 0:
            raise ValueError(
                f"Expected one value per unit, shape (size,), and not the batch's dimension 0, but got a value of "
                f"shape {tuple(value.shape)} for dimension {dim}."
            )
        self.dim = dim
        self.register_forward_pre_hook(keep_being_called)
        self.register_buffer("value", value.detach().clone())

    def forward(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Multiply the module's dimension of ``x`` by the gates; ``dim`` is accepted as by L0Gate, and ignored."""
        return _multiply(x, self.value, self.dim)

    def extra_repr(self) -> str:
        """Size and dimension, for ``print``."""
        return f"{len(self.value)}, dim={self.dim}"


def _multiply(x: Tensor, value: Tensor, dim: int) -> Tensor:
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        if not is_tracing():  # the sizes in a trace are no numbers
            check_units(x, len(value), dim, f"FixedGate({len(value)}, dim={dim})")
        return multiply_along(x, value, dim)
    return x * aligned(x, value, dim)


torch.fx.wrap("_multiply")  # symbolic traces take it whole, as they can't follow sizes


def fix_gates(network: nn.Module, gates: Mapping[str, Tensor]) -> nn.Module:
    """Copy a network and fix its gates to given values, for deterministic evaluation.

    Args:
        network: a network with :class:`~pyro_l0.nn.L0Gate` layers; it is not changed.
        gates: values in [0, 1] by site name, each of shape ``(size,)``, such as ``guide.test_gates()``.

    Raises:
        ValueError: a gate of the network has no value, a name is not a gate of the network, a shape does not fit,
            or a value is outside [0, 1] or not a number.
        TypeError: ``gates`` is not a mapping of tensors.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> net = nn.Sequential(L0Gate(2), nn.Linear(2, 1))
        >>> fix_gates(net, {"0": torch.tensor([1.0, 0.0])})[0]
        FixedGate(2, dim=-1)
    """
    layers = check_gates(network, gates)
    # Give deepcopy the replacements as if it had already copied the gates.
    memo: dict[int, object] = {id(layer): FixedGate(gates[name], layer.dim) for name, layer in layers.items()}
    with torch.no_grad():
        fixed = copied(network, memo)
    forget_calls(fixed)
    return fixed


def check_gates(network: nn.Module, gates: Mapping[str, Tensor]) -> dict[str, GateLayer]:
    """Check values of gates as :func:`~pyro_l0.nn.fix_gates` does, and return the network's gates by site."""
    check_given(network, gates, "gates by site name, such as guide.test_gates()")
    layers = gate_names(network)
    differences = [
        f"{what} for {', '.join(map(repr, sorted(names)))}"
        for what, names in (("no value", layers.keys() - gates.keys()), ("no layer", gates.keys() - layers.keys()))
        if names
    ]
    if differences:
        raise ValueError(
            f"Expected one value per gate of the network, which has {sorted(layers)}, "
            f"but there is {' and '.join(differences)}{_why(network, layers, gates)}."
        )
    for name, layer in layers.items():
        check_value(name, layer.size, gates[name])
    return layers


def check_value(name: str, size: int, value: object, slack: float | None = 0.0) -> None:
    """Refuse all but a tensor with a value for each unit, in [0, 1] up to a slack."""
    expect(Tensor, "a tensor", **{f"gates[{name!r}]": value})
    assert isinstance(value, Tensor)
    if value.shape != (size,):
        why = " (a gate per example, as of a network that is called inside the data plate?)" if value.dim() > 1 else ""
        raise ValueError(f"Expected gates[{name!r}] of shape ({size},), but got {tuple(value.shape)}{why}.")
    if slack is not None and not bool(((value >= -slack) & (value <= 1 + slack)).all()):
        raise ValueError(f"Expected gates[{name!r}] in [0, 1], but got {value}.")


def _why(network: nn.Module, layers: Mapping[str, GateLayer], gates: Mapping[str, Tensor]) -> str:
    """The likely cause of values under other names."""
    if any(isinstance(module, FixedGate) for module in network.modules()):
        return " (gates of this network have been fixed before)"
    ends = [(name, layer) for name in gates for layer in layers if name != layer]
    if any(one.endswith(f".{other}") or other.endswith(f".{one}") for one, other in ends):
        return " (the paths start at different modules; name_gates(network, prefix=...) gives the gates their names)"
    return ""
