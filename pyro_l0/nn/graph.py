"""A network that was read: what produces and what consumes the units of every gate.

A *unit* is an entry of one dimension of a tensor: a feature or a feature map. Dense layers and convolutions read the
units of one tensor and write those of another; everything else keeps units apart (elementwise operations, pooling,
normalisation by running statistics), renames them (flattening) or adds them up (residual sums). What fits none of
these is refused by name, because a wrong count is worse than none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from pyro_l0.nn.kinds import Kind, LayerModule
from pyro_l0.nn.units import PerDevice, Units, either, product

__all__ = ["GateGraph", "Layer", "Step", "units_held"]


@dataclass(frozen=True)
class Layer:
    """A dense layer or a convolution.

    Attributes:
        path: module path.
        in_units: features or maps that it reads.
        out_units: features or maps that it writes.
        taps: weights per pair of these: 1, or the size of the kernel.
        positions: places per example where it is applied.
    """

    path: str
    in_units: int
    out_units: int
    taps: int
    positions: int


@dataclass(frozen=True)
class Step:
    """One node of the traced network.

    Attributes:
        kind: what it does to units.
        parents: names of the nodes whose units it takes.
        dim: dimension of its output that holds the units.
        size: number of units.
        layer: for layers, the layer.
        source: for ``"reshape"``, the parent's unit that each unit stems from; None where units are mixed. For
            ``"expand"`` the same, and -1 for units that are constant.
    """

    kind: Kind
    parents: tuple[str, ...] = ()
    dim: int = 1
    size: int = 0
    layer: Layer | None = None
    source: Tensor | None = None


@dataclass(frozen=True)
class GateGraph:
    """A traced network.

    Attributes:
        graph: the fx graph, with gates as leaves.
        modules: the modules of its nodes by path.
        sites: site name of each gate by path.
        steps: what each node does, by name and in order.
        left_out: what of the network's code is no operation of the graph, in words: what it does in training alone.
    """

    graph: fx.Graph
    modules: dict[str, nn.Module]
    sites: dict[str, str]
    steps: dict[str, Step]
    left_out: tuple[str, ...] = ()

    def layers(self) -> dict[str, Layer]:
        """The layers by node name."""
        return {name: step.layer for name, step in self.steps.items() if step.layer is not None}

    def module(self, layer: Layer) -> LayerModule:
        """The module of a layer."""
        module = self.modules[layer.path]
        assert isinstance(module, LayerModule)
        return module

    def weight_id(self, layer: Layer) -> int:
        """The same number for layers that share their weights."""
        module = self.module(layer)
        weight = module._parameters.get("weight")  # one that a parametrisation computes is another at each access
        return id(module if weight is None else weight)

    @cached_property
    def gates(self) -> dict[str, str]:
        """The sites of gates by node name."""
        gates = [node for node in self.graph.nodes if self.steps[node.name].kind == "gate"]
        return {node.name: self.sites[str(node.target)] for node in gates}

    def readers(self) -> Iterator[tuple[str, Layer, Tensor, Tensor]]:
        """Each gate site with each layer that reads its units: the layer's inputs, and the unit that each stems from.

        An input that holds several units, as a map that features were made into, is there several times; one that is
        constant is not. Once, where a gate acts at several places in front of a layer or of layers with the same
        weights.
        """
        shapes = {node.name: node.meta.get("shape") for node in self.graph.nodes}
        found: set[tuple[object, ...]] = set()
        for name, layer in self.layers().items():
            inputs = torch.arange(layer.in_units)
            frontier = [(parent, inputs, inputs) for parent in self.steps[name].parents]
            seen: set[str] = set()
            while frontier:
                parent, inputs, units = frontier.pop()
                step = self.steps[parent]
                if parent in seen:
                    continue
                seen.add(parent)
                if step.kind == "gate":
                    key = (self.gates[parent], self.weight_id(layer), tuple(inputs.tolist()), tuple(units.tolist()))
                    if key not in found:
                        found.add(key)
                        yield self.gates[parent], layer, inputs, units
                if step.kind in ("reshape", "expand"):
                    held = step.source
                    if held is None:
                        (before,) = step.parents
                        example, result = (torch.Size((1, *shapes[node][1:])) for node in (before, parent))
                        held = units_held(example, self.steps[before], result, step.dim)
                    inputs, units = _stems(inputs, held[units])
                elif step.kind not in ("gate", "unitwise", "add"):
                    continue
                frontier += [(before, inputs, units) for before in step.parents]

    def writers(self) -> Iterator[tuple[str, Layer]]:
        """Each gate site with each layer that writes its units, once."""
        found: set[tuple[str, int]] = set()
        for name, site in self.gates.items():
            frontier, seen = list(self.steps[name].parents), set[str]()
            while frontier:
                parent = frontier.pop()
                if parent in seen:
                    continue
                seen.add(parent)
                step = self.steps[parent]
                if step.kind in ("gate", "unitwise", "add"):
                    frontier.extend(step.parents)
                elif step.layer is not None and (key := (site, self.weight_id(step.layer))) not in found:
                    found.add(key)
                    yield site, step.layer

    def present(self, active: Mapping[str, Tensor]) -> dict[str, Units]:
        """For each node, that each of its units varies with the input.

        Args:
            active: P(z != 0) of every gate by site.
        """
        present: dict[str, Units] = {}
        device = next((probs.device for probs in active.values()), None)
        for name, step in self.steps.items():
            parents = [present[parent] for parent in step.parents]
            if step.kind == "gate":
                present[name] = parents[0].gated(self.gates[name], active[self.gates[name]])
            elif step.kind == "layer" or (step.kind == "reshape" and step.source is None):
                present[name] = parents[0].any()
            elif step.kind == "reshape":
                probs = parents[0].probs()
                if probs is not None and probs.dim():
                    probs = probs[self._stems[name][0].on(probs.device)]
                present[name] = Units({}, probs)
            elif step.kind == "expand":
                probs = parents[0].probs()
                probs = torch.ones((), device=device) if probs is None else probs
                stems, stemming = (value.on(probs.device) for value in self._stems[name])
                present[name] = Units({}, (probs[stems] if probs.dim() else probs) * stemming.to(probs.dtype))
            elif step.kind == "constant":
                present[name] = Units({}, torch.zeros(()))
            elif step.kind == "add":
                present[name] = either(parents)
            else:
                present[name] = parents[0] if parents else Units()
        return present

    def needed(self, active: Mapping[str, Tensor]) -> dict[str, Units]:
        """For each node, that the output depends on each of its units; arguments as in :meth:`present`."""
        uses: dict[str, list[Units]] = {name: [] for name in self.steps}
        needed: dict[str, Units] = {}
        for name, step in reversed(self.steps.items()):
            here = Units() if step.kind == "output" else either(uses[name])
            needed[name] = here
            if step.kind == "gate":
                here = here.gated(self.gates[name], active[self.gates[name]])
            elif step.kind == "layer" or (step.kind == "reshape" and step.source is None):
                here = here.any()
            elif step.kind == "reshape":
                probs = here.probs()
                if probs is not None and step.source is not None and probs.dim():
                    copies = self._copies[name].on(probs.device)
                    absent = torch.cat([1 - probs, probs.new_ones(1)]).index_select(0, copies.flatten())
                    here = Units({}, 1 - product(absent.view_as(copies)))
            elif step.kind == "expand":
                probs = here.probs()
                if probs is not None and probs.dim():
                    here = Units({}, probs[self._copies[name].on(probs.device)])
            for parent_name in step.parents:
                uses[parent_name].append(here)
        return needed

    @cached_property
    def _stems(self) -> dict[str, tuple[PerDevice, PerDevice]]:
        """By node that renames or expands units: the parent's unit that each stems from, and whether there is one."""
        sources = {name: step.source for name, step in self.steps.items() if step.source is not None}
        return {name: (PerDevice(source.clamp(min=0)), PerDevice(source >= 0)) for name, source in sources.items()}

    @cached_property
    def _copies(self) -> dict[str, PerDevice]:
        """By such a node, those that stem from each of the parent's units.

        An expansion has one of each; where units are renamed there is a row for each, filled up by the number of all.
        """
        copies = {}
        for name, step in self.steps.items():
            if step.source is None:
                continue
            order = step.source.argsort(stable=True)
            stems = step.source[order]
            if step.kind == "expand":
                copies[name] = PerDevice(order[stems >= 0])
                continue
            counts = torch.bincount(step.source, minlength=self.steps[step.parents[0]].size)
            rows = stems.new_full((len(counts), int(counts.max())), len(order))
            rows[stems, torch.arange(len(order)) - (counts.cumsum(0) - counts)[stems]] = order
            copies[name] = PerDevice(rows)
        return copies


def units_held(before: torch.Size, parent: Step, shape: torch.Size, dim: int) -> Tensor:
    """The units of the parent that each unit of a reshaped tensor holds, one row for each.

    Args:
        before: shape of the parent's tensor.
        parent: the parent.
        shape: shape of the reshaped tensor.
        dim: dimension of its units.
    """
    view = [1] * len(before)
    view[parent.dim] = parent.size
    ids = torch.arange(parent.size).view(view).expand(before).reshape(shape)
    return ids.movedim(dim, 0).reshape(shape[dim], -1)


def _stems(inputs: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of inputs and the units that they hold, each once; a negative unit is none."""
    if held.dim() > 1:
        inputs, held = torch.stack([inputs[:, None].expand_as(held), held]).flatten(1).unique(dim=1)
    return inputs[held >= 0], held[held >= 0]
