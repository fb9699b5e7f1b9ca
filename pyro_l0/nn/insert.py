"""Puts gates into networks that were written without them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pyro_l0.nn.gate import Gate
from pyro_l0.nn.graph import read_network

__all__ = ["gate_dropout", "insert_gates"]

_MAPS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_DROPOUT = (nn.Dropout, nn.AlphaDropout, *_MAPS)


def insert_gates(network: nn.Module, gates: Mapping[str, Gate]) -> nn.Module:
    """A copy of a network with gates behind named modules.

    A module with a gate becomes ``nn.Sequential(module, gate)`` under its old path, so that the site of the gate is
    named ``path.1`` and the module's parameters are found at ``path.0``.

    Args:
        network: the network; it is not changed, and weights are not shared.
        gates: by module path, the gate for the module's output. A path of modules inside each other is allowed.

    Raises:
        ValueError: a path is not a module of the network.
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
    modules = dict(network.named_modules())
    for path, gate in gates.items():
        if not path or path not in modules:
            raise ValueError(f"Expected paths of modules of the network, but got {path!r}.")
        if not isinstance(gate, Gate):
            raise TypeError(f"Expected a Gate for module {path!r}, but got {gate!r}.")
    new = copy.deepcopy(network)
    # Inner modules first: a module that has moved into a Sequential is no longer at its path.
    for path in sorted(gates, key=lambda path: -path.count(".")):
        _replace(new, path, nn.Sequential(new.get_submodule(path), gates[path]))
    return new


def gate_dropout(network: nn.Module, example_input: Tensor) -> tuple[nn.Module, dict[str, float]]:
    """A copy of a network with a gate in the place of every Dropout layer.

    ``nn.Dropout`` behind a convolution becomes one gate per feature map, which is what can be pruned; elsewhere one per
    feature. A Dropout layer with p = 0 stays.

    Args:
        network: the network; it is not changed, and weights are not shared.
        example_input: one batch, for the number of units.

    Returns:
        The network, and by gate site the probability 1 - p with which a unit stayed: ``init_active_prob`` of
        :class:`~pyro_l0.infer.AutoGate`. Sites go by their path in the network; a model that holds the network
        under an attribute puts the attribute's name in front.

    Raises:
        ValueError: a Dropout layer drops everything, is never called, or is called on different numbers of units.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout(0.2), nn.Linear(3, 1))
        >>> gate_dropout(net, torch.ones(1, 2))[1]
        {'2': 0.8}
    """
    paths = {
        path: module
        for path, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, _DROPOUT) and module.p > 0
    }
    shapes: dict[nn.Module, set[tuple[int, int]]] = {module: set() for module in paths.values()}
    dims = _dims_by_module(network, example_input)

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rank = inputs[0].dim()
        dim = dims.get(module, 1 if isinstance(module, _MAPS) or rank > 3 else -1)
        dim = -1 if dim == rank - 1 else dim
        shapes[module].add((inputs[0].shape[dim], dim))

    handles = [module.register_forward_pre_hook(note) for module in shapes]
    training = [module for module in network.modules() if module.training]
    try:
        with torch.no_grad():
            network.eval()(example_input)
    finally:
        for module in training:
            module.training = True
        for handle in handles:
            handle.remove()
    made: dict[int, Gate] = {}
    for path, module in paths.items():
        if module.p >= 1:
            raise ValueError(f"Expected Dropout layers with p below 1, but {path!r} has {module.p}.")
        if len(shapes[module]) != 1:
            found = sorted(size for size, _ in shapes[module])
            raise ValueError(f"Expected {path!r} to be called on one number of units, but it was called on {found}.")
        ((size, dim),) = shapes[module]
        made.setdefault(id(module), Gate(size, dim))
    new = copy.deepcopy(network, dict(made))
    gates = {path: gate for path, gate in new.named_modules() if isinstance(gate, Gate)}
    return new, {path: 1 - paths[path].p for path in gates if path in paths}


def _dims_by_module(network: nn.Module, example_input: Tensor) -> dict[nn.Module, int]:
    """The dimension of the units at every module, from the layers around it; none of a network that can't be traced."""
    try:
        graph = read_network(network, example_input)
    except (ValueError, TypeError, RuntimeError):
        return {}
    modules = {node.name: graph.modules[node.target] for node in graph.graph.nodes if node.op == "call_module"}
    return {module: graph.steps[name].dim for name, module in modules.items()}


def _replace(network: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, module)
