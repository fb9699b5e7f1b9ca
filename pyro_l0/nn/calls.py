"""Records a network on an example: its operations, and the calls of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_l0.nn.engine.analysis import analyse
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.record import (
    Example,
    ModuleCall,
    Recording,
    Value,
    calls_of,
    example_of,
    held,
    keep_state,
    record,
    tensors,
)
from pyro_l0.nn.gate import check_given, gate_names

__all__ = [
    "Calls",
    "follow_calls",
    "idle_gates",
    "record_called",
    "record_example",
    "refuse_computed",
    "refuse_idle",
    "refuse_wrapped",
]


@dataclass(frozen=True)
class Calls:
    """The calls of a network's modules, in order, and what the engine knows of their tensors."""

    maps: Maps

    @property
    def of(self) -> Mapping[nn.Module, list[ModuleCall]]:
        """The recorded calls of each module that is called, in order."""
        return self.maps.recording.modules

    def of_one(self, module: nn.Module) -> list[ModuleCall]:
        """The calls of a module in the first call of the network that calls it most often."""
        by_number: dict[int, list[ModuleCall]] = {}
        for call in self.of.get(module, []):
            by_number.setdefault(call.number, []).append(call)
        return max(by_number.values(), key=len, default=[])

    def unit_dims(self, value: Value) -> list[int]:
        """The dimensions of a tensor that are dimensions of weights as well, so that closing entries cuts weights."""
        root = self.maps.slots.root
        return [dim for dim, axis in enumerate(self.maps.axes[value]) if root(axis.dimension) in self._of_weights]

    @cached_property
    def _of_weights(self) -> set[int]:
        """The dimensions of weights, as those that they were joined with."""
        weights = [weight for weight in self.maps.recording.named.values() if weight.rank > 1]
        axes = [axis for weight in weights for axis in self.maps.axes[weight] if axis.size > 1]
        return {self.maps.slots.root(axis.dimension) for axis in axes}

    def are_same_units(self, outputs: Iterable[tuple[Value, int]]) -> bool:
        """Whether dimensions of tensors, such as a module's at its calls, have the same units in the same order."""
        units = self.maps.slots.units()
        return len({tuple(units[self.maps.axes[value][dim].dimension].tolist()) for value, dim in outputs}) <= 1


def follow_calls(network: nn.Module, example: Example) -> Calls:
    """Record a network, and find what the engine knows of the calls of its modules."""
    check_given(network)
    refuse_wrapped(network)
    recording = record_example(network, example)
    refuse_computed(network)
    return Calls(analyse(recording, {}).maps)


def refuse_wrapped(network: nn.Module) -> None:
    """Refuse what is around a network, or was made of it, and say what to give instead."""
    inner = "_orig_mod" if hasattr(network, "_orig_mod") else "module"  # of torch.compile and of data parallelism
    if inner == "_orig_mod" or isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(
            f"Expected the network itself, but got a {type(network).__name__} around it; give network.{inner}."
        )
    if isinstance(network, torch.jit.ScriptModule):
        raise TypeError(
            f"Expected a network of Python code, but got a {type(network).__name__}; give the module that was scripted "
            "or traced, and script what compact makes of it."
        )


def refuse_computed(network: nn.Module) -> None:
    """Refuse modules of which a hook computes a weight, as ``spectral_norm``: all of its units have to stay."""
    for path, module in network.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not module._parameters.keys().isdisjoint((f"{name}_orig", f"{name}_v")):
                how = "remove_weight_norm" if f"{name}_v" in module._parameters else "remove_spectral_norm"
                how = "prune.remove" if f"{name}_mask" in module._buffers else how
                raise ValueError(
                    f"Expected modules that hold parameters and buffers, but {name!r} of {path!r} was computed by a "
                    f"hook; call torch.nn.utils.{how}(network.get_submodule({path!r}), {name!r}) first."
                )


def refuse_idle(network: nn.Module, example: Example) -> None:
    """Refuse gates whose closing changes no output."""
    idle = idle_gates(network, example)
    if idle:
        raise ValueError(
            f"Expected gates that change what the network computes, but closing gate {idle[0]!r} changes no output; "
            "take it out, or put it behind a module whose units are read later."
        )


def idle_gates(network: nn.Module, example: Example) -> list[str]:
    """The sites of gates whose closing changes no output, with random weights and inputs either, where no unit is dead.

    Gates whose values have a gradient are none; those without are closed, as code may compare or choose by their units.
    """
    values = {site: torch.ones(gate.size, requires_grad=True) for site, gate in gate_names(network).items()}
    idle, generator, has_run = set(values), torch.Generator().manual_seed(0), False

    def draw(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator).to(x) if x.is_floating_point() else x

    def outputs(own: nn.Module, call: Any) -> list[Tensor]:
        args, kwargs = tree_map_only(Tensor, torch.clone, call)
        with keep_state(own):
            torch.manual_seed(0)
            return tensors(own(*args, **kwargs))

    devices = {x.device for x in network.parameters() if x.is_cuda}
    with held(network, values) as own, torch.random.fork_rng(devices=devices), torch.enable_grad():
        given = [(p, p.detach().clone()) for p in own.parameters()]
        for is_random, call in product((True, True, True, False), calls_of(example)):
            for p, before in given:
                p.data = draw(before) / max(1, before[:1].numel()) ** 0.5 if is_random and p.dim() else before
            with suppress(Exception):  # the code asks for other numbers
                call = tree_map_only(Tensor, draw, call) if is_random else call
                made = outputs(own, call)
                sums = [(x * draw(x.detach())).sum().real for x in made if x.requires_grad]
                slopes = torch.autograd.grad(sums, [*values.values()], allow_unused=True) if sums else ()
                idle -= {site for site, slope in zip(values, slopes, strict=False) if slope is not None and slope.any()}
                for site in sorted(idle):
                    values[site].data.zero_()
                    others = outputs(own, call)
                    values[site].data.fill_(1.0)
                    idle -= set() if all(map(_are_alike, made, others)) else {site}
                has_run = True
            if not idle:
                break
    return sorted(idle) if has_run else []


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal but for rounding."""
    apart, scale = (
        x.to(torch.complex128).norm() for x in (one - other if one.is_floating_point() else one != other, one)
    )
    return bool(apart <= 1e-4 * scale)


def record_called(network: nn.Module, example: Example) -> Recording:
    """Record a network, and refuse gates that are never called or compute weights."""
    gates = gate_names(network)
    paths = {module: path for path, module in network.named_modules()}
    for site, gate in gates.items():
        if "parametrizations" in paths[gate].split("."):
            raise _misplaced(site, paths[gate], "computes weights, which are not counted")
    recording = record_example(network, example)
    called = {str(x.arguments["site"]) for x in recording.operations if x.name == "gate"}
    for site, gate in gates.items():
        if site not in called:
            raise _misplaced(site, paths[gate], "is never called")
    return recording


def _misplaced(site: str, path: str, why: str) -> ValueError:
    return ValueError(
        f"Expected gates that are called on the units of a tensor, but gate {site!r} (module {path!r}) {why}; "
        "put it behind the layer whose units it gates, or take it out."
    )


def record_example(network: nn.Module, example: Example) -> Recording:
    """Record a network; where it does not take the example, the error names that."""
    check_given(network)
    calls = calls_of(example_of(example, network))
    tensors = [x for call in calls for x in tree_leaves(call) if isinstance(x, Tensor)]
    given = " and ".join(f"one of shape {tuple(x.shape)} and dtype {x.dtype}" for x in tensors) or "no tensor"
    if not calls or any(x.dim() and not len(x) for x in tensors):
        raise ValueError(f"Expected an example of at least one call with entries, but got {given}.")
    own = next((x.dtype for x in network.parameters() if x.is_floating_point()), None)
    try:
        return record(network, example)
    except (RuntimeError, IndexError, TypeError) as error:
        of, remedy = "", ""
        if own is not None and any(x.dtype != own for x in tensors):
            of, remedy = f" of dtype {own}, as the network's parameters,", f"; convert it by .to({own})"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"Expected an example that the network takes,{of} but got {given}, at which it fails: {reason}{remedy}"
        ) from error
