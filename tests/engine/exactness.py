"""Two checks of an analysis that share no code with it: garbage in all that leaves, and operations on what stays."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.nn import Gate, fix_gates
from pyro_l0.nn.engine import Value, analyse, calls_of, record
from pyro_l0.nn.gate import name_gates

SHAPES = ("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::expand")
PARTS = ("aten::slice", "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::narrow")


class Between(nn.Module):
    """An operation between eight gated units and the layer that reads what it makes."""

    def __init__(self, operation, *layers, second=False):
        super().__init__()
        self.one, self.gate = nn.Linear(6, 8), Gate(8)
        self.layers = nn.ModuleList(layers)
        self.operation = operation
        self.other = nn.Linear(6, 8) if second else None
        with torch.no_grad():
            self.out = nn.Linear(self.middle(torch.ones(2, 6)).shape[-1], 3)

    def middle(self, x):
        h = self.gate(self.one(x))
        inputs = [h] if self.other is None else [h, self.other(x)]
        return self.operation(*inputs, *self.layers)

    def forward(self, x):
        return self.out(self.middle(x))


def close_some(network, fraction=0.5, seed=0):
    """Closed gates by site, and values for all, some of them between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    closed, values = {}, {}
    for site, gate in name_gates(network).items():
        order = torch.randperm(gate.size, generator=generator)
        closed[site] = torch.zeros(gate.size, dtype=torch.bool)
        closed[site][order[: round(gate.size * fraction)]] = True
        value = 0.3 + 0.7 * torch.rand(gate.size, generator=generator, dtype=torch.float64)
        values[site] = value.masked_fill(closed[site], 0.0)
    return closed, values


def shake(network, seed=0):
    """Random numbers in the place of the ones and zeros that layers begin with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*network.parameters(), *network.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(0.3 + 0.5 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
                if tensor.dim() > 1:
                    tensor.sub_(0.55)
    return network


def examine(network, example, closed=None, values=None, fraction=0.5, folds=False, seed=0):
    """Close gates, analyse, check the answer in both ways, and return it."""
    network = shake(network.double().eval(), seed)
    drawn_closed, drawn_values = close_some(network, fraction, seed)
    if closed is None:
        closed, values = drawn_closed, drawn_values
    elif values is None:
        values = {site: (~mask).double() for site, mask in closed.items()}
    recording = record(network, example)
    analysis = analyse(recording, closed, values, folds=folds)
    check_garbage(network, example, analysis, values)
    check_operations(recording, analysis, values)
    return analysis


def check_garbage(network, example, analysis, values):
    """What leaves may hold anything: outputs and the gradients of what stays are the same."""
    fixed, spoiled = fix_gates(network, values), fix_gates(network, values)
    named = dict(spoiled.named_parameters(remove_duplicate=False)) | dict(spoiled.named_buffers(remove_duplicate=False))
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for fold in analysis.folds:
            weight = named[fold.weight]
            columns = weight.flatten(2).sum(2) if weight.dim() > 2 else weight
            assert not fold.is_padded
            added = fold.constant @ columns.movedim(fold.dim, 0)[fold.units]
            if fold.bias is None:
                spoiled.get_submodule(fold.path).bias = nn.Parameter(added)
            else:
                named[fold.bias] += added
        for name, kept in analysis.kept.items():
            stays = _mask(named[name].shape, kept)
            if named[name].is_floating_point():
                garbage = 3 + torch.rand(stays.shape, generator=generator, dtype=torch.float64)
                named[name].copy_(torch.where(stays, named[name], garbage.to(named[name].dtype)))
        for fold in analysis.folds:
            named[fold.weight].movedim(fold.dim, 0)[fold.units] = 0.0
    for args, kwargs in calls_of(example):
        one, other = _tensors(fixed(*args, **kwargs)), _tensors(spoiled(*args, **kwargs))
        for expected, found in zip(one, other, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        for outputs in (one, other):
            sum(x.sin().sum() for x in outputs if x.requires_grad).backward()
    for name, parameter in fixed.named_parameters():
        if parameter.grad is not None and not analysis.folds:
            gradient = _cut(named[name].grad, analysis.kept[name])
            torch.testing.assert_close(gradient, _cut(parameter.grad, analysis.kept[name]), rtol=1e-9, atol=1e-9)


def check_operations(recording, analysis, values):
    """Every operation, given what stays of its inputs, makes what stays of its outputs, where that is needed."""
    full = {}
    special = {x.path for x in [*analysis.norms, *analysis.folds]}
    for operation in recording.operations:
        args, kwargs = _filled(operation, lambda x: full.get(x, x.tensor.detach()))
        with torch.no_grad():
            if operation.name == "write in place":
                full.update({x: x.tensor.detach() for x in operation.outputs})
                continue
            results = operation.function(*_copied(args), **_copied(kwargs))
            if operation.name == "gate":
                site, dim = operation.arguments["site"], operation.arguments["dim"]
                results = args[0] * _along(values[site], args[0].dim(), dim)
            results = results if isinstance(results, (tuple, list)) else [results]
            full.update({x: y for x, y in zip(operation.outputs, results, strict=True) if x is not None})
            if operation not in analysis.solution.running or operation.path in special or operation.name in PARTS:
                continue
            small = _on_what_stays(operation, analysis, lambda x: full.get(x, x.tensor.detach()), values)
        for value, found in zip(operation.outputs, small, strict=True):
            if value is not None and found.numel():
                axes = analysis.maps.axes[value]
                needed = [torch.from_numpy(analysis.solution.is_needed(axis))[_kept(analysis, axis)] for axis in axes]
                where = [mask.nonzero().flatten() for mask in needed]
                expected = _cut(_cut(full[value], [_kept(analysis, axis) for axis in axes]), where)
                torch.testing.assert_close(
                    _cut(found, where),
                    expected,
                    rtol=1e-9,
                    atol=1e-9,
                    msg=lambda m, o=operation: f"{o.name} {o.path} {m}",
                )


def _on_what_stays(operation, analysis, tensor, values):
    def cut(value):
        return _cut(tensor(value), [_kept(analysis, axis) for axis in analysis.maps.axes[value]])

    args, kwargs = _filled(operation, cut)
    args, name = list(args), operation.name
    if name == "gate":
        gate, dim = analysis.gates[operation.arguments["site"]], operation.arguments["dim"]
        shape = list(args[0].shape)
        shape[dim] = len(values[operation.arguments["site"]])
        whole = args[0].new_zeros(shape).index_copy(dim, gate.kept_in, args[0])
        gated = whole * _along(values[operation.arguments["site"]], args[0].dim(), dim)
        return [gated.index_select(dim, gate.kept_out)]
    if name in SHAPES:
        args[1] = list(analysis.shape(operation.output))
    if name == "aten::convolution":
        args[8] = analysis.shape(operation.output if args[6] else operation.value("input"))[1] // args[1].shape[1]
    if name == "aten::native_group_norm":
        args[6] = args[6] * args[0].shape[1] // args[4]
        args[4] = args[0].shape[1]
    if name == "aten::native_layer_norm":
        args[1] = list(args[0].shape[-len(args[1]) :])
    result = operation.function(*_copied(args), **_copied(kwargs))
    return result if isinstance(result, (tuple, list)) else [result]


def _kept(analysis, axis):
    return torch.from_numpy(analysis.solution.kept(axis))


def _filled(operation, tensor):
    return tree_map_only(Value, tensor, (operation.args, operation.kwargs))


def _copied(args):
    return tree_map_only(Tensor, lambda x: x.clone(), args)


def _along(value, rank, dim):
    shape = [1] * rank
    shape[dim] = -1
    return value.view(shape)


def _mask(shape, kept):
    stays = torch.ones(shape, dtype=torch.bool)
    for dim, entries in enumerate(kept):
        one = torch.zeros(shape[dim], dtype=torch.bool)
        one[entries] = True
        stays &= _along(one, len(shape), dim)
    return stays


def _cut(tensor, kept):
    for dim, entries in enumerate(kept):
        tensor = tensor.index_select(dim, entries)
    return tensor


def _tensors(result):
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    return [x for one in result for x in _tensors(one)]
