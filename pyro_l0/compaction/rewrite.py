"""Carries a plan out on a copy of a network."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.nn.utils import parametrize

from pyro_l0.compaction.plan import Plan, along, analyse
from pyro_l0.compaction.smaller import BatchNorm, batch_norm_like, gate_like, layer_like
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.graph import GateGraph
from pyro_l0.nn.kinds import dims_read, is_homogeneous
from pyro_l0.nn.pieces import Constant, Expand, Select, Shift, Sized
from pyro_l0.nn.reading import read_network
from pyro_l0.nn.tracing import place

__all__ = ["rewrite", "rewrite_graph"]


_DROPOUT: dict[object, type[nn.Module]] = {F.dropout: nn.Dropout, F.dropout2d: nn.Dropout2d}


def rewrite(network: nn.Module, plan: Plan, keep_gates: bool = False) -> fx.GraphModule:
    """The network that a plan describes; on a copy, in evaluation mode.

    Args:
        network: the network that the plan was made for, with any weights.
        plan: see :func:`~pyro_l0.compaction.plan.plan`.
        keep_gates: leave the gates of the units that stay in the network, to train on, in place of their values; the
            plan must have been made for it.

    Raises:
        ValueError: the plan is of another network, or a reshape can't be carried out on fewer units.
    """
    like = next(network.parameters(), torch.zeros(()))
    example = torch.zeros(plan.input_shape, dtype=like.dtype, device=like.device)
    return rewrite_graph(read_network(network, example), plan, like, keep_gates)


def rewrite_graph(graph: GateGraph, plan: Plan, like: Tensor, keep_gates: bool) -> fx.GraphModule:
    """:func:`rewrite` for a network that was read already, whose parameters are like one of them."""
    names = {name for name, step in graph.steps.items() if step.kind != "shape"}
    if names != plan.kept.keys() or set(graph.sites.values()) != plan.gates.keys():
        raise ValueError(
            f"Expected a plan of this network, whose gate sites are {sorted(set(graph.sites.values()))}, "
            f"but got one of {sorted(plan.gates)}."
        )
    return _Rewriter(graph, plan, like, keep_gates).run()


class _Rewriter:
    """Builds the small network node by node.

    A node of the old graph has a place in ``values`` only if some of its units stay. Gates between 0 and 1 wait in
    ``scales`` until a layer takes them into its weights or an operation needs the true value.
    """

    def __init__(self, graph: GateGraph, plan: Plan, like: Tensor, keep_gates: bool) -> None:
        self.old = graph
        self.keep_gates = keep_gates
        self.plan = plan
        self.kept = plan.kept
        self.like = like
        self.gates = {site: torch.tensor(value, dtype=like.dtype) for site, value in plan.gates.items()}
        found = analyse(graph, self.gates, keep_gates)
        self.constants, self.sized = found.constants, found.sized
        self.nodes = {node.name: node for node in graph.graph.nodes}
        self.graph = fx.Graph()
        self.modules: dict[str, nn.Module] = {}
        self.values: dict[str, fx.Node] = {}
        self.scales: dict[str, Tensor | None] = {}
        self.input: fx.Node

    @torch.no_grad()
    def run(self) -> fx.GraphModule:
        for name, step in self.old.steps.items():
            if step.kind == "shape":
                continue
            if step.kind == "output":
                parent = step.parents[0]
                self.graph.output(self._with_units(parent, range(self.old.steps[parent].size), "output"))
            elif step.kind == "input":
                self.input = self.values[name] = self.graph.placeholder(name)
                self.scales[name] = None
                if len(self.kept[name]) < step.size and self.kept[name]:
                    self._add(name, f"select_{name}", Select(self.kept[name], step.dim, step.size), self.input)
            elif self.kept[name]:
                getattr(self, "_sum" if step.kind == "add" else f"_{step.kind}")(name)
        if self.sized:
            self._check_size()
        network = fx.GraphModule(self.modules, self.graph, class_name="CompactedNetwork")
        network.graph.eliminate_dead_code()
        network.recompile()
        network.delete_all_unused_submodules()
        return network.to(self.like.device).eval()

    def _check_size(self) -> None:
        """Let the network refuse inputs of another size than the example's."""
        name = self.input.name
        step, x = self.old.steps[name], self.values[name]
        size = list(self.nodes[name].meta["shape"])
        if x is not self.input:  # some of its units are selected
            size[step.dim] = len(self.kept[name])
        with self.graph.inserting_after(x):
            sized = self._call(f"sized_{name}", Sized(size[1:]), x)
        x.replace_all_uses_with(sized, delete_user_cb=lambda user: user is not sized)

    # ------------------------------------------------------------ helpers

    def _call(self, path: str, module: nn.Module, x: fx.Node) -> fx.Node:
        self.modules[path] = module  # by path: GraphModule makes the parents itself
        return self.graph.call_module(path, (x,))

    def _add(self, name: str, path: str, module: nn.Module, x: fx.Node) -> None:
        self.values[name] = self._call(path, module, x)

    def _constant(self, name: str, units: Sequence[int]) -> Tensor:
        """The constant value of some units, shape ``(1, ...)``, one place for all where it is the same everywhere."""
        dim = self.old.steps[name].dim
        value = self.constants[name].index_select(dim, torch.tensor(units))
        if name in self.plan.maps:
            return value
        for other in range(1, value.dim()):
            if other != dim:
                value = value.narrow(other, 0, 1)
        return value

    def _true(self, name: str, x: fx.Node, scale: Tensor | None, user: str) -> fx.Node:
        """A node's value with its scale carried out."""
        if scale is None:
            return x
        return self._call(f"scale_{name}_{user}", FixedGate(scale, self.old.steps[name].dim), x)

    def _with_units(self, name: str, units: Sequence[int], user: str) -> fx.Node:
        """A node's true value with given units, constants among them."""
        have, step = self.kept[name], self.old.steps[name]
        if not have:
            value = self.constants[name].index_select(step.dim, torch.tensor(units))
            self.sized = self.sized or value.dim() > 2
            return self._call(f"constant_{name}_{user}", Constant(value), self.input)
        x = self._true(name, self.values[name], self.scales[name], user)
        inner = [unit for unit in have if unit in set(units)]
        if len(inner) < len(have):
            x = self._call(f"select_{name}_{user}", Select(_places(inner, have), step.dim, len(have)), x)
        if len(inner) < len(units):
            places = _places(inner, units)
            x = self._call(f"expand_{name}_{user}", Expand(places, self._constant(name, units), step.dim), x)
        return x

    def _scaled(self, name: str, units: Sequence[int], user: str) -> tuple[fx.Node, Tensor | None]:
        """A node's value with some of its units, and the scale that is still due."""
        have = self.kept[name]
        x, scale = self.values[name], self.scales[name]
        if tuple(units) != have:
            places = _places(units, have)
            x = self._call(f"select_{name}_{user}", Select(places, self.old.steps[name].dim, len(have)), x)
            scale = None if scale is None else scale[places]
        return x, scale

    # ------------------------------------------------------------ one method per kind of node

    def _gate(self, name: str) -> None:
        units, parent = self.kept[name], self.old.steps[name].parents[0]
        if self.keep_gates:
            # Some of its units may be constant here, or of use at another place alone.
            x = self._with_units(parent, units, name)
            path = str(self.nodes[name].target)
            if path not in self.modules:
                self.modules[path] = gate_like(cast(Gate, self.old.modules[path]), units)
            self.values[name], self.scales[name] = self.graph.call_module(path, (x,)), None
            return
        x, scale = self._scaled(parent, units, name)
        gate = self.gates[self.old.gates[name]][list(units)]
        scale = gate if scale is None else scale * gate
        self.values[name], self.scales[name] = x, None if bool((scale == 1).all()) else scale

    def _layer(self, name: str) -> None:
        step = self.old.steps[name]
        layer = step.layer
        assert layer is not None
        parent, rows = step.parents[0], list(self.kept[name])
        columns = list(self.kept[parent])
        module = self.old.module(layer)
        offset = self.plan.offsets[name]
        # A copy: a parametrisation may change what it keeps when it is asked for weights in training mode.
        module = copy.deepcopy(module).eval() if parametrize.is_parametrized(module) else module
        weight = module.weight.detach().cpu()[rows][:, columns]
        bias = None if module.bias is None else module.bias.detach().cpu()[rows]
        spread: Tensor | None = None
        if len(columns) < layer.in_units and offset != "none":
            outputs: Tensor = copy.deepcopy(module).cpu().eval()(self.constants[parent])
            spread = outputs.index_select(step.dim, torch.tensor(rows))
            if offset == "vector":
                bias = spread.movedim(step.dim, 0).flatten(1)[:, 0]  # the same at every place
            elif bias is not None:
                spread = spread - along(bias, spread.dim(), step.dim)
        scale = self.scales[parent]
        if scale is not None:
            weight = weight * along(scale, weight.dim(), 1)
        self.scales[name] = None
        self._add(name, layer.path, layer_like(module, weight, bias), self.values[parent])
        if offset == "map":
            assert spread is not None
            self._add(name, f"shift_{name}", Shift(spread), self.values[name])

    def _unitwise(self, name: str) -> None:
        step, node = self.old.steps[name], self.nodes[name]
        parent, units = step.parents[0], self.kept[name]
        x, scale = self._scaled(parent, units, name)
        module = self.old.modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, Sized):  # there will be another
            self.values[name], self.scales[name], self.sized = x, scale, True
            return
        if isinstance(module, Shift):
            x = self._true(parent, x, scale, name)
            value = module.value.cpu()
            value = value if value.shape[step.dim] == 1 else value.index_select(step.dim, torch.tensor(units))
            self._add(name, str(node.target), Shift(value), x)
            self.scales[name] = None
            return
        if isinstance(module, BatchNorm):
            self._add(name, str(node.target), batch_norm_like(module, list(units), scale), x)
            self.scales[name] = None
            return
        if scale is not None and not is_homogeneous(node, self.old.modules):
            x, scale = self._true(parent, x, scale, name), None
        self.scales[name] = scale
        if module is not None:
            self._add(name, str(node.target), copy.deepcopy(module), x)
        elif "mode" in node.meta:
            # Traced as it is evaluated, where it does nothing; as a module it follows the mode of the one it is in.
            owner = node.meta["mode"]
            dropout = _DROPOUT[node.target](cast(float, node.kwargs["p"]))
            self._add(name, f"{owner}.dropout_{name}" if owner else f"dropout_{name}", dropout, x)
        elif node.target in _DROPOUT and node.kwargs["training"]:
            raise ValueError(
                f"Expected dropout that is off in evaluation mode, but {name!r} {place(node)} is on in both; pass it "
                "training=self.training, or leave it out of the network."
            )
        else:
            self.values[name] = self._copy(node, {parent: x})

    def _reshape(self, name: str) -> None:
        step, node = self.old.steps[name], self.nodes[name]
        parent, units = step.parents[0], list(self.kept[name])
        before = self.old.steps[parent]
        if step.source is None:
            x: fx.Node = self._with_units(parent, range(before.size), name)
            held, scale = list(range(step.size)), None
        else:
            x, scale = self.values[parent], self.scales[parent]
            kept = set(self.kept[parent])
            held = [unit for unit, source in enumerate(step.source.tolist()) if source in kept]
            if scale is not None:
                places = _places([int(step.source[unit]) for unit in held], self.kept[parent])
                scale = scale[places]
        module = self.old.modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, Select):
            assert step.source is not None
            held, y = list(self.kept[parent]), x
            units = [int(step.source[unit]) for unit in units]
            scale = self.scales[parent]
        elif step.source is None or len(self.kept[parent]) == before.size:
            if node.op == "call_module":
                y = self._call(str(node.target), copy.deepcopy(self.old.modules[str(node.target)]), x)
            else:
                y = self._copy(node, {parent: x})
        elif len(node.meta["shape"]) == 2:
            # Sizes written into the reshape no longer hold; with the batch in front it is a flattening.
            y = self.graph.call_function(torch.flatten, (x, 1))
        else:
            raise ValueError(f"Expected reshapes of pruned units to flatten them, but {name!r} does not.")
        if held != units:
            places = _places(units, held)
            y = self._call(f"select_{name}", Select(places, step.dim, len(held)), y)
            scale = None if scale is None else scale[places]
        self.values[name], self.scales[name] = y, scale

    def _expand(self, name: str) -> None:
        source = self.old.steps[name].source
        assert source is not None
        stems = [int(source[unit]) for unit in self.kept[name]]
        self.values[name], self.scales[name] = self._scaled(self.old.steps[name].parents[0], stems, name)

    def _sum(self, name: str) -> None:
        step, units = self.old.steps[name], self.kept[name]
        self.scales[name] = None
        living = [parent for parent in step.parents if self.kept[parent]]
        operands = [self._with_units(parent, units, f"{name}_{i}") for i, parent in enumerate(living)]
        if len(operands) == 2:
            self.values[name] = self.graph.call_function(torch.add, tuple(operands))
            return
        dead = next(parent for parent in step.parents if not self.kept[parent])
        self.values[name] = operands[0]
        if name in self.plan.shifts:
            self._add(name, f"shift_{name}", Shift(self._constant(dead, units)), operands[0])

    def _copy(self, node: fx.Node, values: Mapping[str, fx.Node]) -> fx.Node:
        """The same function or method on new arguments."""

        def argument(old: fx.Node) -> Argument:
            if old.name in values:
                return values[old.name]
            step = self.old.steps[old.name]
            if step.kind != "shape":
                return self.values[old.name]
            if self.old.steps[node.name].kind == "unitwise" and self.old.steps[node.name].dim in dims_read(old):
                value: Argument = old.meta["value"]  # a number of units, which is another one now
                return value
            if old.name not in self.values:
                self.values[old.name] = self.graph.node_copy(old, argument)
            return self.values[old.name]

        return self.graph.node_copy(node, argument)


def _places(of: Sequence[int], among: Sequence[int]) -> list[int]:
    place = {unit: i for i, unit in enumerate(among)}
    return [place[unit] for unit in of]
