"""Puts gates into networks that were written without them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from torch import Tensor, nn

from pyro_l0.nn.calls import Followed, follow_calls
from pyro_l0.nn.engine.record import Example
from pyro_l0.nn.engine.tape import Value
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.places import unit_dim

__all__ = ["Gated", "gate_dropout", "insert_gates"]

_MAPS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_DROPOUT = (nn.Dropout, nn.AlphaDropout, *_MAPS)


def insert_gates(network: nn.Module, gates: Mapping[str, Gate], example: Example | None = None) -> nn.Module:
    """A copy of a network with gates behind named modules.

    A module with a gate becomes ``nn.Sequential(module, gate)`` under its old path, so that the site of the gate is
    named ``path.1`` and the module's parameters are found at ``path.0``.

    Args:
        network: the network; it is not changed, and weights are not shared.
        gates: by module path, the gate for the module's output; such as the answer of
            :func:`~pyro_l0.nn.suggest_gates`. A path of modules inside each other is allowed.
        example: what the network is called with, as :class:`~pyro_l0.nn.NetworkCost` takes it. With it the places
            where the network calls each module are counted; without it, a module that is called at several places is
            noticed only where it has several paths.

    Raises:
        ValueError: a path is not a module of the network, or the gate could not act behind this module at this place
            alone: the module is called at several places or at none, is passed by by the module that holds it, or
            returns more than a tensor.
        TypeError: a value is not a gate.

    Example:
        >>> insert_gates(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), {"1": Gate(3)})
        Sequential(
          (0): Linear(in_features=2, out_features=3, bias=True)
          (1): Sequential(
            (0): ReLU()
            (1): Gate(3, dim=-1)
          )
        )
    """
    _check_gates(network, gates, example)
    new = copy.deepcopy(network)
    # Inner modules first: a module that has moved into a Sequential is no longer at its path.
    for path in sorted(gates, key=lambda path: -path.count(".")):
        parent, _, name = path.rpartition(".")
        setattr(new.get_submodule(parent), name, Gated(path, new.get_submodule(path), gates[path]))
    for module in new.modules():
        # Whether to pack a padded batch it asks of the weights of its first layer, which has none behind a gate.
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(inner, Gated) for inner in module.modules()):
            module.use_nested_tensor = False
    return new


def _check_gates(network: nn.Module, gates: Mapping[str, Gate], example: Example | None) -> None:
    """Refuse what is no gate, and paths that are no modules behind which one can act."""
    modules = dict(network.named_modules(remove_duplicate=False))
    followed = None if example is None else follow_calls(network, example)
    for path, gate in gates.items():
        if not path or path not in modules:
            children = [name for name, _ in network.named_children()]
            close = get_close_matches(path, [name for name in modules if name], n=3) or children
            raise ValueError(
                f"Expected paths of modules of the network, but got {path!r}; there are {', '.join(map(repr, close))}."
            )
        if not isinstance(gate, Gate):
            raise TypeError(f"Expected a Gate for module {path!r}, but got {gate!r}.")
        _check_place(modules, path, followed)
        if followed is not None:
            _check_size(path, gate, followed.of_one(modules[path])[0].output)


class Gated(nn.Sequential):
    """A module and the gate behind it, which describes itself as the module does; its weights are not to be had."""

    def __init__(self, path: str, module: nn.Module, gate: Gate) -> None:
        super().__init__(module, gate)
        self.path = path

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """The module's output times the gates."""
        gated: Tensor = self[1](self[0](*args, **kwargs))
        return gated

    def __getattr__(self, name: str) -> Tensor | nn.Module:  # as torch has it, which returns whatever there is
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("0")
            if module is None:
                raise
            value: Tensor | nn.Module = getattr(module, name)
        if not isinstance(value, (Tensor, nn.Module)):
            return value
        raise AttributeError(
            f"Expected the module at {self.path!r} to be called, which has a gate behind it, but its {name!r} is read; "
            "put the gate where its input is called, or write it into the network's forward."
        )

    def _get_name(self) -> str:
        return "Sequential"


def _check_size(path: str, gate: Gate, output: Value | None) -> None:
    """Refuse a gate that has not as many units as the module's output, where that is known."""
    if output is None or gate.size == 1:
        return
    if not -output.rank <= gate.dim < output.rank or output.shape[gate.dim] != gate.size:
        raise ValueError(
            f"Expected a Gate for the output of {path!r}, of shape {output.shape}, the batch first, but got {gate!r}."
        )


def _check_place(modules: Mapping[str, nn.Module], path: str, followed: Followed | None) -> None:
    """Refuse a place where a gate would act elsewhere too, or not at all."""
    module, parent = modules[path], modules[path.rpartition(".")[0]]
    if isinstance(parent, nn.MultiheadAttention):
        raise ValueError(
            f"Expected modules that are called, but nn.MultiheadAttention reads the weights of {path!r} and does not "
            "call it; put the gate behind the attention, on the first entry of what it returns."
        )
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        raise ValueError(
            f"Expected modules that return a tensor, but {path!r} ({type(module).__name__}) returns a tuple; "
            "write a Gate for its first entry into the network's forward."
        )
    places = [repr(name) for name, other in modules.items() if other is module]
    if len(places) == 1 and followed is not None:
        places = [f"{path!r} behind {call.behind}" for call in followed.of_one(module)]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        places = []
    if len(places) != 1:
        found = f"it is called at {' and at '.join(places)}" if places else "it is never called"
        raise ValueError(
            f"Expected {path!r} to be called at one place, which a gate behind it then acts on, but {found}; "
            "make a module for every place, or write the Gate into the network's forward."
        )


def gate_dropout(network: nn.Module, example: Example) -> tuple[nn.Module, dict[str, float]]:
    """A copy of a network with a gate in the place of every Dropout layer.

    ``nn.Dropout`` behind a convolution becomes one gate per feature map, which is what can be pruned; elsewhere one per
    feature. A Dropout layer with p = 0 stays.

    Args:
        network: the network; it is not changed, and weights are not shared.
        example: what it is called with, as :class:`~pyro_l0.nn.NetworkCost` takes it, for the number of units.

    Returns:
        The network, and by gate site the probability 1 - p with which a unit stayed: ``init_active_prob`` of
        :class:`~pyro_l0.infer.AutoGate`. Sites go by their path in the network; a model that holds the network
        under an attribute puts the attribute's name in front.

    Raises:
        ValueError: a Dropout layer drops everything, is never called, or is called on different numbers of units.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout(0.2), nn.Linear(3, 1))
        >>> gate_dropout(net, torch.ones(1, 2))[1]
        {'2': 0.8}
    """
    paths = {
        path: module
        for path, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, _DROPOUT) and module.p > 0
    }
    shapes = _units_by_module(network, paths.values(), example)
    made: dict[int, Gate] = {}
    for path, module in paths.items():
        found = shapes[module]
        if module.p >= 1:
            raise ValueError(f"Expected Dropout layers with p below 1, but {path!r} has {module.p}.")
        if len(set(found)) != 1:
            sizes = sorted({size for size, _ in found})
            raise ValueError(f"Expected {path!r} to be called on one number of units, but it was called on {sizes}.")
        if len(found) > 1 and id(module) not in made:
            warnings.warn(
                f"Dropout layer {path!r} is called {len(found)} times, and the gate in its place acts alike "
                "each time; make a layer for every place if their units are to be pruned apart.",
                stacklevel=2,
            )
        made.setdefault(id(module), Gate(*found[0]))
    new = copy.deepcopy(network, dict(made))
    gates = {path: gate for path, gate in new.named_modules() if isinstance(gate, Gate)}
    return new, {path: 1 - paths[path].p for path in gates if path in paths}


def _units_by_module(
    network: nn.Module, modules: Iterable[nn.Module], example: Example
) -> dict[nn.Module, list[tuple[int, int]]]:
    """The number and the dimension of the units at every call of some modules, as the network runs on an example."""
    found = follow_calls(network, example)
    shapes: dict[nn.Module, list[tuple[int, int]]] = {}
    for module in modules:
        shapes[module] = []
        for units in (call.input for call in found.of_one(module) if call.input is not None):
            dim = unit_dim(found.maps, units)
            if dim is None:
                dim = 1 if isinstance(module, _MAPS) or units.rank > 3 else units.rank - 1
            shapes[module].append((units.shape[dim], -1 if dim == units.rank - 1 else dim))
    return shapes
