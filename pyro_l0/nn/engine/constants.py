"""Inputs of layers that are the same for every example: their values, and whether a bias can absorb them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_l0.nn.engine.maps import ConstantInput, Maps
from pyro_l0.nn.engine.slots import VARIES, ZERO, Mask
from pyro_l0.nn.engine.solve import Solution
from pyro_l0.nn.engine.tape import Operation, Value

__all__ = ["read_what_stays", "settle_constants"]


def settle_constants(maps: Maps) -> dict[ConstantInput, Tensor]:
    """Decide which constant inputs may leave, and return the constants, ``(inputs,)`` or ``(inputs, *positions)``.

    A bias absorbs an input if its value is the same at all calls of the layer, and at all positions or at least for
    all examples, where the layer pads.
    """
    of_weight = defaultdict[Value, list[ConstantInput]](list)
    for layer in maps.constant_inputs:
        of_weight[layer.weight].append(layer)
    chosen = {weight: layers for weight, layers in of_weight.items() if any(x.candidates.any() for x in layers)}
    values = _Evaluation(maps).run([layer.input for layers in chosen.values() for layer in layers])
    constants = dict[ConstantInput, Tensor]()
    for layers in chosen.values():
        # Units in front, then examples and positions.
        tensors = [values[layer.input].detach().cpu().movedim(layer.input_dim, 0) for layer in layers]
        known = [maps.states(layer.input, layer.input_dim) < VARIES for layer in layers]
        fits = _agree(layers, tensors, known)
        for layer, tensor in zip(layers, tensors, strict=True):
            layer.reads[layer.candidates & ~fits] = True
            constants[layer] = _reduced(tensor, layer.candidates & fits)
    return constants


def read_what_stays(maps: Maps, solution: Solution) -> bool:
    """Let layers read constants that stay for another reason and that nothing else computes; return whether any do."""
    is_changed = False
    for layer in maps.constant_inputs:
        axis = maps.axes[layer.input][layer.input_dim]
        stays = solution.stays[solution.units[axis.block]]
        missed = layer.candidates & ~layer.reads & stays & ~solution.is_needed(axis)
        if layer.operation in solution.running and missed.any():
            layer.reads[missed] = True
            is_changed = True
    return is_changed


def _agree(layers: list[ConstantInput], tensors: list[Tensor], known: list[Mask]) -> Mask:
    """The inputs that are the same at all calls, for all examples, and for dense layers at all positions."""
    first = tensors[0]
    fits: Mask = np.logical_and.reduce(known)
    for layer, tensor in zip(layers, tensors, strict=True):
        if layer.weight.rank > 2:  # images
            fits &= (tensor == tensor[:, :1]).flatten(1).all(1).numpy()
        if layer.weight.rank > 2 and tensor.shape[2:] == first.shape[2:]:
            fits &= (tensor[:, 0] == first[:, 0]).flatten(1).all(1).numpy()
        else:
            fits &= (tensor.flatten(1) == first.flatten(1)[:, :1]).all(1).numpy()
    return fits


def _reduced(tensor: Tensor, chosen: Mask) -> Tensor:
    """One number for each unit if all chosen ones have the same at all positions, else one for each position."""
    places = tensor.flatten(1)[torch.from_numpy(chosen)]
    is_uniform = bool((places == places[:, :1]).all())
    return tensor.flatten(1)[:, 0] if is_uniform else tensor[:, 0]


class _Evaluation:
    """Runs recorded operations again with fixed gates. Only what does not vary has a meaning in the results."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps
        self._values: dict[Value, Tensor] = {}

    def run(self, wanted: Iterable[Value]) -> dict[Value, Tensor]:
        """The tensors of some values."""
        operations = self._before(wanted)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for operation in self.maps.recording.operations:
                if operation in operations:
                    self._repeat(operation)
        return {value: self._tensor(value) for value in wanted}

    def _before(self, wanted: Iterable[Value]) -> set[Operation]:
        """The operations that made what has something constant in it."""
        makers = {x: operation for operation in self.maps.recording.operations for x in operation.made}
        found, waiting = set[Operation](), list(wanted)
        while waiting:
            value = waiting.pop()
            maker = makers.get(value)
            if maker is None or maker in found or maker in self.maps.barriers or not self._has_constants(value):
                continue
            found.add(maker)
            waiting.extend(maker.inputs)
        return found

    def _has_constants(self, value: Value) -> bool:
        return self.maps.state(value) < VARIES or any((x.states < VARIES).any() for x in self.maps.axes[value])

    def _tensor(self, value: Value) -> Tensor:
        return self._values.get(value, value.tensor.detach())

    def _repeat(self, operation: Operation) -> None:
        changes = operation.name.endswith("_")
        args, kwargs = tree_map_only(
            Value,
            lambda x: self._tensor(x).clone() if changes else self._tensor(x),
            (operation.args, operation.kwargs),
        )
        result = operation.function(*args, **kwargs)
        if operation.name == "gate":
            assert isinstance(result, Tensor)
            result = self._gated(operation, result)
        results = result if isinstance(result, (tuple, list)) else [result]
        for value, tensor in zip(operation.outputs, results, strict=True):
            if value is not None and isinstance(tensor, Tensor):
                self._values[value] = tensor

    def _gated(self, operation: Operation, x: Tensor) -> Tensor:
        site, dim = str(operation.arguments["site"]), operation.integer("dim") % x.dim()
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        if self.maps.values is not None and site in self.maps.values:
            x = x * self.maps.values[site].to(x).view(shape)
        if site in self.maps.closed:
            # In place on a copy: a new tensor would be contiguous, where recorded views may rely on the strides of x.
            x = x.clone().masked_fill_(torch.from_numpy(self.maps.closed[site]).to(x.device).view(shape), ZERO)
        return x
