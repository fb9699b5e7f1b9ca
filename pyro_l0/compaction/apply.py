"""Slices of a network's own tensors: parameters, buffers, gradients and the optimiser's state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pyro_l0.compaction.fold import Constant, contribution
from pyro_l0.compaction.gate_change import change_gate
from pyro_l0.compaction.inputs import refuse_other_sizes
from pyro_l0.compaction.layers import add_shift, reduce_norm
from pyro_l0.compaction.plan import LayerFold, Plan
from pyro_l0.compaction.sizes import set_attributes
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.hooks import new_name, old_names

__all__ = [
    "Kept",
    "carry_out",
    "check_state",
    "cut",
    "move",
    "named_tensors",
    "names_before",
    "reset_running_means",
    "set_value",
    "slice_tensors",
]

Kept = Mapping[str, Sequence[Tensor | None]]
"""By name of a parameter or buffer, the places that stay along each dimension; None for all."""


def named_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under every name that they have."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def cut(tensor: Tensor, places: Sequence[Tensor | None]) -> Tensor:
    """Some places of a tensor along each dimension, as a tensor of its own."""
    small = tensor
    for dim, index in enumerate(places):
        if index is not None and len(index) < small.shape[dim]:
            small = small.index_select(dim, index.to(small.device))
    return small.clone() if small is tensor else small


def set_value(tensor: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer another value, of another shape perhaps; it stays the same object.

    A node of autograd that accumulates its gradient and is alive, as data parallelism holds them, refuses another
    shape, but not with another type in between.
    """
    gradient, tensor.grad = tensor.grad, None
    between = torch.float32 if tensor.dtype == torch.float16 else torch.float16
    if tensor.shape != value.shape and tensor.requires_grad:
        tensor.data = torch.empty(0, dtype=between, device=tensor.device)
    tensor.data = value
    if gradient is not None and gradient.shape == value.shape:
        tensor.grad = gradient


@torch.no_grad()
def slice_tensors(network: nn.Module, kept: Kept, optimiser: torch.optim.Optimizer | None = None) -> None:
    """Cut parameters and buffers in place, with their gradients and what an optimiser keeps about them.

    Every parameter stays the object that it was, so that hooks on it, lists of it and the optimiser's groups hold.

    Args:
        network: whose tensors.
        kept: what stays; tensors that it does not name stay whole.
        optimiser: of a state that :func:`check_state` takes.
    """
    done: set[int] = set()
    for name, tensor in named_tensors(network):
        places = kept.get(name)
        if places is None or id(tensor) in done:
            continue
        done.add(id(tensor))
        shape = tensor.shape
        if all(index is None or len(index) == size for index, size in zip(places, shape, strict=True)):
            continue
        state = {} if optimiser is None else optimiser.state.get(tensor, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape:
                state[key] = cut(value, places)
        gradient = None if tensor.grad is None else cut(tensor.grad, places)
        set_value(tensor, cut(tensor.detach(), places))
        tensor.grad = gradient


def check_state(optimiser: torch.optim.Optimizer, parameters: Collection[Tensor]) -> None:
    """Refuse an optimiser whose state of some parameters can't be cut with them.

    Raises:
        ValueError: an entry has neither the parameter's shape nor a single number, as factored second moments have.
    """
    for parameter in parameters:
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"Expected an optimiser whose state has the shapes of the parameters, but {key!r} of "
                    f"{type(optimiser).__name__} has {tuple(value.shape)} for {tuple(parameter.shape)}; train with "
                    "Adam, AdamW or SGD, or without Shrinker and compact at the end."
                )


def move(optimiser: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, tuple[nn.Parameter | None, Tensor]]) -> None:
    """Let an optimiser go on with parameters in the place of others, and the parts of its state that belong to them.

    Args:
        optimiser: whatever trains the parameters.
        replaced: for each old parameter the new one, None if there is none, and its places along dimension 0.
    """
    for group in optimiser.param_groups:
        params: list[nn.Parameter] = []
        for old in group["params"]:
            new, places = replaced.get(old, (old, None))
            state = optimiser.state.pop(old, None) if new is not old else None
            if new is None:
                continue
            params.append(new)
            if state is not None:
                optimiser.state[new] = {
                    key: cut(value, (places,)) if isinstance(value, Tensor) and value.shape == old.shape else value
                    for key, value in state.items()
                }
        group["params"] = params


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


def names_before(plans: Sequence[Plan], network: nn.Module) -> dict[str, str]:
    """By module path in plans of an earlier version, the path in their network now; empty for plans of this version."""
    old = old_names(network)
    own = {name for name, _ in (*network.named_modules(), *named_tensors(network))}
    names = {name for plan in plans for name in (*plan.kept, *plan.changes)}
    return old if any(name not in own and new_name(name, old) in own for name in names) else {}
