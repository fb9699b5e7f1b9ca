"""What every gate in a network is, and its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from pyro_l0.expect import expect
from pyro_l0.fast.products import gated_product, may_be_gated, multiply_along


class GateLayer(nn.Module):
    """Base class of :class:`~pyro_l0.nn.L0Gate`: a gate per unit in a network.

    Attributes:
        size: number of units; a single gate multiplies an input of any size.
        dim: dimension of the input that holds the units.
        site_name: the gates' name in guides, costs and plans; None until they are named.
    """

    size: int
    dim: int
    site_name: str | None

    def narrow(self, index: Tensor) -> None:
        """Keep the gates at some indices, shape ``(n,)``, in place."""
        raise NotImplementedError(f"Expected {type(self).__name__} to write narrow, which keeps some of its gates.")

    def multiply(self, x: Tensor, z: Tensor, dim: int, in_block: bool) -> Tensor:
        """Multiply units by their gates ``z``; where that is cheaper, the layer behind does it with its weights.

        Args:
            x: what the units returned.
            z: their gates, in a shape that broadcasts along ``dim``.
            dim: dimension of ``x`` that holds the units.
            in_block: whether a block of ``torch.utils.checkpoint`` may be around; then only the layer multiplies.
        """
        is_last = dim in (-1, x.dim() - 1)
        if self.size > 1 and not in_block and x.dim() > 1 and (is_last or dim == 1) and may_be_gated(x, z):
            return gated_product(x, z, -1 if is_last else 1)
        return multiply_along(x, z, dim)


class GateHolder(nn.Module):
    """Registers gates that act by hooks; when it is called, it does nothing.

    ``levels`` is how many modules below the network it is, as a container can't hold it.
    """

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: object) -> object:
        """The input as it is: the gates are called where they stand."""
        return x


def name_gates(network: nn.Module, prefix: str = "") -> dict[str, GateLayer]:
    """Name the gates of a network after their module paths, and return them by name.

    Functions that insert gates do so for the network that they return. Elsewhere an unnamed gate is a site ``"gate0"``,
    ``"gate1"``, ... of a Pyro model, in the order of the calls, and goes by its path until then.

    Args:
        network: the module whose paths are used.
        prefix: text in front of every path.

    Raises:
        TypeError: ``network`` is not a module, or ``prefix`` not a string.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> list(
        ...     name_gates(nn.Sequential(L0Gate(4), nn.Linear(4, 2), L0Gate(2)), prefix="net.")
        ... )
        ['net.0', 'net.2']
    """
    check_given(network)
    expect(str, "a string", prefix=prefix)
    paths = {path: gate for path, gate in network.named_modules() if isinstance(gate, GateLayer)}
    gates = {prefix + (site_path(network, path) or "gate"): gate for path, gate in paths.items()}
    for name, gate in gates.items():
        gate.site_name = name
    return gates


def gate_names(network: nn.Module) -> dict[str, GateLayer]:
    """The gates of a network by site name, or else by their path in it; see :func:`~pyro_l0.nn.name_gates`.

    Raises:
        ValueError: two gates have one name.
        TypeError: ``network`` is not a module.
    """
    check_given(network)
    gates: dict[str, GateLayer] = {}
    for path, module in network.named_modules():
        if isinstance(module, GateLayer):
            name = module.site_name or site_path(network, path) or "gate"
            if name in gates:
                raise ValueError(
                    f"Expected gates of different names, but two are called {name!r}; name them by name_gates, which "
                    "takes their paths in the whole network."
                )
            gates[name] = module
    return gates


def check_given(network: object, entries: object = MappingProxyType({}), what: str = "") -> None:
    """Refuse all but a network and a mapping from strings, which a message describes by ``what``."""
    expect(nn.Module, "an nn.Module", network=network)
    if not isinstance(entries, Mapping) or not all(isinstance(name, str) for name in entries):
        raise TypeError(f"Expected {what}, but got a {type(entries).__name__}.")


def check_units(x: object, size: int, dim: int, name: object) -> None:
    """Refuse an input unless dimension ``dim`` holds ``size`` units, any number if that is 1."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"Expected a tensor at gate {name}, but got a {type(x).__name__}; of what a module such as nn.LSTM or "
            "nn.MultiheadAttention returns, pass on the entry to be gated."
        )
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"Expected units of a floating type at gate {name}, but got {x.dtype}, which would round gates to 0; "
            "convert them, by images.float() / 255 for example."
        )
    if type(x) is Tensor and x.is_nested:
        for example in x.unbind():
            check_units(example, size, dim - 1 if dim > 0 else dim, name)
    elif x.dim() <= (dim if dim >= 0 else -dim - 1) or (size != 1 and size != x.shape[dim]):
        raise ValueError(
            f"Expected {size} units in dimension {dim} at gate {name}, but got an input of shape {tuple(x.shape)}."
        )


def keep_being_called(module: nn.Module, inputs: object) -> None:
    """A hook that does nothing, without which torch's fused transformer layers bypass a module."""


def site_path(root: nn.Module, path: str) -> str:
    """A gate's module path without holders of gates."""
    names: list[str] = []
    module = root
    for name in path.split(".") if path else []:
        module = getattr(module, name)
        if isinstance(module, GateHolder):
            names = names[: len(names) - module.levels]
        else:
            names.append(name)
    return ".".join(names)
