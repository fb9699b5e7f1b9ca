"""Applies a plan to a network, in place, and refuses inputs of sizes that it no longer reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from pyro_l0.compaction.calls import Arguments, tensors
from pyro_l0.compaction.layers import add_shift, change_gate, reduce_norm
from pyro_l0.compaction.plan import Constant, LayerFold, Plan, contribution, input_dim, layer_constants, set_attributes
from pyro_l0.expect import expect
from pyro_l0.nn.engine import Example, calls_of
from pyro_l0.nn.engine.record import copied, example_of
from pyro_l0.nn.fixed import fix_gates
from pyro_l0.nn.gate import check_given
from pyro_l0.nn.insert import replace_gates
from pyro_l0.nn.l0_gate import forget_calls


class InputSizes:
    """A hook that refuses inputs of other sizes, without the batch, than those that a network was compacted with."""

    def __init__(self, sizes: tuple[tuple[int, ...], ...]) -> None:
        self.sizes = sizes

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Raise ValueError if the sizes are others."""
        got = tuple(tuple(x.shape[1:]) for x in tensors((args, kwargs)))
        if got != self.sizes:
            expected, found = (" and ".join(map(str, sizes)) for sizes in (self.sizes, got))
            raise ValueError(
                f"Expected inputs of size {expected}, as those that this network was compacted with (constants of "
                f"removed units depend on it), but got {found}; compact the whole network with an example of that size."
            )


def refuse_other_sizes(network: nn.Module, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Let a network refuse inputs of other sizes, in place of what it refused before."""
    for key, hook in list(network._forward_pre_hooks.items()):
        if isinstance(hook, InputSizes):
            del network._forward_pre_hooks[key]
    network.register_forward_pre_hook(InputSizes(sizes), prepend=True, with_kwargs=True)


Indices = Mapping[str, Sequence[Tensor | None]]
"""By name of a parameter or buffer, the indices that stay along each dimension; None for all."""


@torch.no_grad()
def apply_plan(network: nn.Module, plan: Plan, example: Example | None = None) -> nn.Module:
    """Apply a plan to a copy of a network and return it; nothing is certified.

    Args:
        network: the network that the plan was made for, with any weights.
        plan: from :func:`~pyro_l0.compaction.compact`.
        example: what the network is called with; only a plan that folds constants needs it.

    Raises:
        TypeError: ``plan`` is not a Plan.
        ValueError: the plan is of another network, or needs an example.

    Example:
        >>> from pyro_l0.compaction import compact
        >>> from pyro_l0.nn import L0Gate
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 1))
        >>> plan = compact(net, {"2": torch.tensor([1.0, 0.0, 0.5])}, torch.ones(1, 2)).plan
        >>> apply_plan(net, plan)[0]
        Linear(in_features=2, out_features=2, bias=True)
    """
    check_given(network)
    expect(Plan, "the plan of a compacted network", plan=plan)
    if plan.folds and example is None:
        raise ValueError("Expected an example, since constants of removed units are computed from it.")
    constants = constants_of(network, plan, [] if example is None else calls_of(example_of(example, network)))
    small = copied(network)
    apply_in_place(small, plan, constants)
    return small if plan.keeps_gates else small.eval()


@torch.no_grad()
def apply_in_place(
    network: nn.Module,
    plan: Plan,
    constants: Mapping[str, Constant] | None,
    optimiser: torch.optim.Optimizer | None = None,
) -> None:
    """Change a network as a plan says; every parameter stays the object that it was.

    So hooks on parameters, lists of them and the optimiser's groups hold. The optimiser's state is cut with its
    parameters, and new biases join it. By layer, ``constants`` are its folded inputs, as this network computes them;
    None to load parameters later. Refuses the plan of another network.
    """
    _check(network, plan)
    modules = dict(network.named_modules())
    additions = {} if constants is None else {f.layer: _addition(modules, plan, f, constants) for f in plan.folds}
    like = next(network.parameters(), torch.zeros(()))
    for fold in plan.folds:  # inputs that stay are no longer read
        weight = network.get_parameter(f"{fold.layer}.weight")
        unread = torch.tensor(fold.units, dtype=torch.long, device=weight.device)
        set_value(weight, weight.detach().index_fill(input_dim(modules[fold.layer]), unread, 0.0))
    for name, factors in plan.factors.items():
        weight = network.get_parameter(name)
        factor = torch.tensor(factors, dtype=torch.float64).to(weight)
        set_value(weight, weight.detach() * factor.view(1, -1, *[1] * (weight.dim() - 2)))
    reset_running_means(network, plan.zero_channels)
    slice_tensors(network, plan.remaining_indices(), optimiser)
    for fold in plan.folds:
        _add(modules[fold.layer], fold, additions.get(fold.layer), optimiser)
    for name, index in plan.indices.items():
        buffer = network.get_buffer(name)
        set_value(buffer, torch.tensor(index, dtype=torch.long, device=buffer.device))
    layers = [layer for layer in network.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
    fused = {module for layer in layers for module in layer.modules()}
    replace_gates(
        network, dict(change_gate(network, path, change, like, fused) for path, change in plan.changes.items())
    )
    forget_calls(network)
    for path, size in plan.norms.items():
        reduce_norm(modules[path], size)
    set_attributes(network, plan.attributes)
    if plan.input_sizes is not None:
        refuse_other_sizes(network, plan.input_sizes)


def constants_of(network: nn.Module, plan: Plan, calls: Sequence[Arguments]) -> dict[str, Constant]:
    """The inputs of layers that a plan folds, as a network computes them; NotConstantError if examples differ."""
    if not plan.folds:
        return {}
    like = next(network.parameters())
    gates = {site: torch.tensor(values, dtype=torch.float64).to(like) for site, values in plan.gates.items()}
    reference = fix_gates(network, gates).eval()
    reset_running_means(reference, plan.zero_channels)
    return layer_constants(reference, {fold.layer: fold.units for fold in plan.folds}, calls)


@torch.no_grad()
def reset_running_means(network: nn.Module, channels: Mapping[str, Sequence[int]]) -> None:
    """Set the running mean of channels that are always zero, by path of a BatchNorm, to its limit, 0."""
    for path, units in channels.items():
        mean = network.get_submodule(path).running_mean
        if isinstance(mean, Tensor):
            set_value(mean, mean.index_fill(0, torch.tensor(units, dtype=torch.long, device=mean.device), 0.0))


def _check(network: nn.Module, plan: Plan) -> None:
    """Refuse a plan whose names or indices are not those of a network, before anything is changed."""
    shapes = {name: tensor.shape for name, tensor in named_tensors(network)}
    sizes = {path: getattr(module, "size", 0) for path, module in network.named_modules()}
    named = (*plan.changes, *(fold.layer for fold in plan.folds), *plan.norms, *plan.attributes)
    wrong = [path for path in named if path not in sizes]
    wrong += [path for path, change in plan.changes.items() if max(change.units, default=-1) >= sizes.get(path, 0)]
    for name, indices in plan.remaining.items():
        ends = [-1 if index is None else max(index, default=-1) for index in indices]
        shape = shapes.get(name, ())
        if len(ends) != len(shape) or any(end >= size for end, size in zip(ends, shape, strict=True)):
            wrong.append(name)
    if wrong:
        raise ValueError(f"Expected a plan of this network, but it has no {wrong[0]!r} of the plan's size.")


def _addition(
    modules: Mapping[str, nn.Module], plan: Plan, fold: LayerFold, constants: Mapping[str, Constant]
) -> Tensor:
    """What constant inputs add to the outputs of a layer that stay."""
    layer = modules[fold.layer]
    value, is_map = contribution(layer, constants[fold.layer])
    dim = 0 if not is_map else value.dim() - 1 if isinstance(layer, nn.Linear) else 1
    indices = plan.remaining_indices().get(f"{fold.layer}.weight")
    rows = None if indices is None else indices[1 - input_dim(layer)]
    return cut(value, [None] * dim + [rows])


def _add(layer: nn.Module, fold: LayerFold, addition: Tensor | None, optimiser: torch.optim.Optimizer | None) -> None:
    """Let a layer add something to its output: to its bias, which may be new, or as a map."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    if fold.shape is not None:
        add_shift(layer, weight.new_zeros((1, *fold.shape)) if addition is None else addition)
        return
    bias = layer.bias
    if bias is None:
        rows = weight.shape[1 - input_dim(layer)]
        bias = layer.bias = nn.Parameter(weight.new_zeros(rows), requires_grad=weight.requires_grad)
        for group in [] if optimiser is None else optimiser.param_groups:
            if any(parameter is weight for parameter in group["params"]):
                group["params"].append(bias)
    assert isinstance(bias, nn.Parameter)
    if addition is not None:
        set_value(bias, bias.detach() + addition)


# ------------------------------------------------------------ slices of tensors and of an optimiser's state


def named_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under every name that they have."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def cut(tensor: Tensor, remaining: Sequence[Tensor | None]) -> Tensor:
    """Some indices of a tensor along each dimension, as a new tensor."""
    cuts = {dim: x.to(tensor.device) for dim, x in enumerate(remaining) if x is not None and len(x) < tensor.shape[dim]}
    if list(cuts) == [0, 1]:  # at once, without a tensor that is cut in one of them
        return tensor[cuts[0].unsqueeze(1), cuts[1]].contiguous()
    return reduce(lambda small, dim: small.index_select(dim, cuts[dim]), cuts, tensor) if cuts else tensor.clone()


def set_value(tensor: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer another value, perhaps of another shape; it stays the same object.

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
def slice_tensors(network: nn.Module, remaining: Indices, optimiser: torch.optim.Optimizer | None = None) -> None:
    """Cut parameters and buffers in place, with their gradients and the state that an optimiser keeps of them."""
    done: set[int] = set()
    for name, tensor in named_tensors(network):
        if name not in remaining or id(tensor) in done:
            continue
        done.add(id(tensor))
        shape, indices = tensor.shape, remaining[name]
        if all(index is None or len(index) == size for index, size in zip(indices, shape, strict=True)):
            continue
        state = {} if optimiser is None else optimiser.state.get(tensor, {})
        state.update(_cut_state(state, shape, indices))
        gradient = None if tensor.grad is None else cut(tensor.grad, indices)
        set_value(tensor, cut(tensor.detach(), indices))
        tensor.grad = gradient


def _cut_state(state: Mapping[str, object], shape: torch.Size, remaining: Sequence[Tensor | None]) -> dict[str, object]:
    """What an optimiser keeps of a parameter, cut where it has the parameter's shape."""
    return {k: cut(x, remaining) if isinstance(x, Tensor) and x.shape == shape else x for k, x in state.items()}


def check_state(optimiser: torch.optim.Optimizer, parameters: Collection[Tensor]) -> None:
    """Refuse an optimiser whose state of some parameters can't be cut with them, such as factored second moments."""
    for parameter in parameters:
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"Expected an optimiser whose state has the shapes of the parameters, but {key!r} of "
                    f"{type(optimiser).__name__} has {tuple(value.shape)} for {tuple(parameter.shape)}; train with "
                    "Adam, AdamW or SGD, or without Shrinker and compact at the end."
                )


def move(optimiser: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, tuple[nn.Parameter | None, Tensor]]) -> None:
    """Let an optimiser go on with other parameters, and with the parts of its state that belong to them.

    For each old parameter, ``replaced`` has the new one, None if there is none, and its indices along dimension 0.
    """
    for group in optimiser.param_groups:
        params: list[nn.Parameter] = []
        for old in group["params"]:
            new, index = replaced.get(old, (old, None))
            state = optimiser.state.pop(old, None) if new is not old else None
            if new is None:
                continue
            params.append(new)
            if state is not None:
                optimiser.state[new] = _cut_state(state, old.shape, (index,))
        group["params"] = params
