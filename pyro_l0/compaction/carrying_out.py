"""Carries a plan out on a network, in place: nothing but tensors, integers and gates changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pyro_l0.compaction.attributes import set_attributes
from pyro_l0.compaction.fold import Constant, contribution
from pyro_l0.compaction.input_sizes import refuse_other_sizes
from pyro_l0.compaction.layers import add_shift
from pyro_l0.compaction.norms import reduce_norm
from pyro_l0.compaction.plan import LayerFold, Plan
from pyro_l0.compaction.routes import change_gate
from pyro_l0.compaction.slice import cut, named_tensors, set_value, slice_tensors
from pyro_l0.nn.gate import Gate

__all__ = ["carry_out", "reset_running_means"]


@torch.no_grad()
def carry_out(
    network: nn.Module,
    plan: Plan,
    constants: Mapping[str, Constant] | None,
    optimiser: torch.optim.Optimizer | None = None,
) -> None:
    """Change a network as a plan says, in place; every parameter stays the object that it was.

    Args:
        network: the network that the plan was made for, with any weights.
        plan: see :class:`Plan`.
        constants: by layer, its inputs that leave, as this network computes them; None where the parameters will be
            loaded.
        optimiser: trains the network's parameters; its state is cut with them, and new biases join it.

    Raises:
        ValueError: the plan is of another network.
    """
    _check(network, plan)
    modules = dict(network.named_modules())
    additions = {} if constants is None else {f.layer: _addition(modules, plan, f, constants) for f in plan.folds}
    like = next(network.parameters(), torch.zeros(()))
    for fold in plan.folds:  # inputs whose places stay are read no more
        weight = network.get_parameter(f"{fold.layer}.weight")
        unread = torch.tensor(fold.units, dtype=torch.long, device=weight.device)
        set_value(weight, weight.detach().index_fill(_input_dim(modules[fold.layer]), unread, 0.0))
    for name, factors in plan.factors.items():
        weight = network.get_parameter(name)
        factor = torch.tensor(factors, dtype=torch.float64).to(weight)
        set_value(weight, weight.detach() * factor.view(1, -1, *[1] * (weight.dim() - 2)))
    reset_running_means(network, plan.zero_channels)
    slice_tensors(network, plan.places(), optimiser)
    for fold in plan.folds:
        _add(modules[fold.layer], fold, additions.get(fold.layer), optimiser)
    for name, index in plan.indices.items():
        buffer = network.get_buffer(name)
        set_value(buffer, torch.tensor(index, dtype=torch.long, device=buffer.device))
    for path, change in plan.changes.items():
        change_gate(network, path, change, like)
    for path, size in plan.norms.items():
        reduce_norm(modules[path], size)
    set_attributes(network, plan.attributes)
    if plan.input_sizes is not None:
        refuse_other_sizes(network, plan.input_sizes)


@torch.no_grad()
def reset_running_means(network: nn.Module, channels: Mapping[str, Sequence[int]]) -> None:
    """Set the running mean of channels that are always zero to its limit, 0.

    Args:
        network: changed in place.
        channels: by path of a BatchNorm.
    """
    for path, units in channels.items():
        mean = network.get_submodule(path).running_mean
        if isinstance(mean, Tensor):
            set_value(mean, mean.index_fill(0, torch.tensor(units, dtype=torch.long, device=mean.device), 0.0))


def _check(network: nn.Module, plan: Plan) -> None:
    """Refuse a plan whose names or places are not those of a network."""
    named = dict(named_tensors(network))
    for name, places in plan.kept.items():
        if name not in named:
            raise ValueError(f"Expected a plan of this network, but it has no {name!r}.")
        shape = tuple(named[name].shape)
        ends = [-1 if index is None else max(index, default=-1) for index in places]
        if len(ends) != len(shape) or any(end >= size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"Expected a plan of this network, but it cuts {name!r}, of shape {shape}, at {ends}.")
    modules = dict(network.named_modules())
    for path in (*plan.changes, *(fold.layer for fold in plan.folds), *plan.norms, *plan.attributes):
        if path not in modules:
            raise ValueError(f"Expected a plan of this network, but it has no module {path!r}.")
    for path, change in plan.changes.items():
        gate = modules[path]
        if not isinstance(gate, Gate) or max(change.units, default=0) >= gate.size:
            raise ValueError(f"Expected a plan of this network, but it has no Gate at {path!r} of the plan's size.")


def _addition(
    modules: Mapping[str, nn.Module], plan: Plan, fold: LayerFold, constants: Mapping[str, Constant]
) -> Tensor:
    """What the outputs of a layer that stay get from constant inputs."""
    layer = modules[fold.layer]
    value, is_map = contribution(layer, constants[fold.layer])
    dim = 0 if not is_map else value.dim() - 1 if isinstance(layer, nn.Linear) else 1
    places = plan.places().get(f"{fold.layer}.weight")
    rows = None if places is None else places[1 - _input_dim(layer)]
    return cut(value, [None] * dim + [rows])


def _input_dim(layer: nn.Module) -> int:
    """The dimension of a weight that reads the inputs."""
    return 0 if isinstance(layer, nn.modules.conv._ConvNd) and layer.transposed else 1


def _add(layer: nn.Module, fold: LayerFold, addition: Tensor | None, optimiser: torch.optim.Optimizer | None) -> None:
    """Let a layer add something to its output: to its bias, which may be new, or as a map."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    if fold.shape is not None:
        add_shift(layer, weight.new_zeros((1, *fold.shape)) if addition is None else addition)
        return
    bias = layer.bias
    if bias is None:
        rows = weight.shape[1 - _input_dim(layer)]
        bias = layer.bias = nn.Parameter(weight.new_zeros(rows), requires_grad=weight.requires_grad)
        for group in [] if optimiser is None else optimiser.param_groups:
            if any(parameter is weight for parameter in group["params"]):
                group["params"].append(bias)
    assert isinstance(bias, nn.Parameter)
    if addition is not None:
        set_value(bias, bias.detach() + addition)
