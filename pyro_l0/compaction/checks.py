"""Networks and examples that can't be compacted, refused by name, and where in a network an error was raised."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from traceback import walk_tb

import torch
from torch import Tensor, nn

from pyro_l0.compaction.calls import run, tensors
from pyro_l0.nn.engine import Example, Recording, calls_of
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate_layer import GateLayer, gate_names

__all__ = ["check_network", "check_seen", "path_raised", "warn_unseen", "where_raised"]

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def check_network(network: nn.Module, example: Example) -> None:
    """Refuse what can't be recorded, copied or compared; nothing is changed."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"Expected network to be a torch module, but got {type(network).__name__}.")
    if isinstance(network, GateLayer):
        raise ValueError("Expected a network with gates in it, but got a gate alone; put it into nn.Sequential.")
    calls = calls_of(example)
    inputs = [x for call in calls for x in tensors(call)]
    if not inputs:
        raise TypeError(f"Expected an example with tensors, but got {type(example).__name__} without any.")
    _check_ready(network)
    _check_inputs(network, inputs)
    copied = _copied(network)
    for call in calls:
        try:
            run(copied.eval(), call)
        except Exception as error:
            given = ", ".join(f"shape {tuple(x.shape)} and type {x.dtype}" for x in tensors(call))
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"Expected an example that the network accepts, but got one of {given}, at which "
                f"{where_raised(copied, error)} raises: {text}"
            ) from error


def _check_ready(network: nn.Module) -> None:
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"Expected a network that is ready, but {name!r} is lazy; call the network once.")
        if parameter.is_meta:
            raise ValueError("Expected a network with values, but its parameters are on the device meta.")
    if gate_names(network):
        return
    for path, module in network.named_modules():
        if isinstance(module, FixedGate):
            raise ValueError(
                f"Expected a network with gates, but {path!r} is a FixedGate: the gates of this network are fixed "
                "already; use the network as it was before fix_gates."
            )


def _check_inputs(network: nn.Module, inputs: list[Tensor]) -> None:
    device = next((p.device for p in network.parameters()), None)
    for x in inputs:
        if not x.numel():
            raise ValueError(f"Expected an example with entries, but got shape {tuple(x.shape)}.")
        if x.is_meta or (device is not None and x.device != device):
            raise ValueError(
                f"Expected an example on {device or 'a device with values'}, where the network is, but got one "
                f"on {x.device}; move it by .to({str(device)!r})."
            )


def _copied(network: nn.Module) -> nn.Module:
    """A copy that draws its gates without reporting it."""
    try:
        with torch.no_grad():
            new = copied(network)
    except Exception as error:
        raise ValueError(
            f"Expected a network that copy.deepcopy can copy, but it can't copy {type(network).__name__}: {error}"
        ) from error
    for name, gate in gate_names(new).items():
        gate.site_name, gate.is_reported = name, True
    return new


def check_seen(network: nn.Module, recording: Recording, kept: Iterable[str]) -> None:
    """Refuse a module of which one parameter would be cut and another was not used by any call of the example."""
    cut = {name.rpartition(".")[0] for name in kept}
    for name, parameter in network.named_parameters():
        path = name.rpartition(".")[0]
        if path in cut and name not in recording.named and parameter.dim():
            raise ValueError(
                f"Expected an example that uses all parameters of module {path!r}, of which units are removed, but "
                f"{name!r} was not used; give a list of calls that together use every parameter."
            )


def warn_unseen(network: nn.Module, recording: Recording, shrunk: Mapping[str, Mapping[int, int]]) -> None:
    """Warn of layers that no call used, and that have a size of units that are removed beside them."""
    for path, module in network.named_modules():
        own = dict(module.named_parameters(path, recurse=False))
        sizes = {size for parameter in own.values() if parameter.dim() > 1 for size in parameter.shape[:2]}
        if not own.keys() & recording.named.keys() and sizes & shrunk.get(path.rpartition(".")[0], {}).keys():
            warnings.warn(
                f"Expected an example that uses the whole network, but no call of it uses {path!r}, which stays as it "
                "is and may not fit the units that are left; give a list of calls that use it too.",
                stacklevel=6,
            )


def path_raised(network: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost module of a network, or of a copy, that raised an error; None if there is none."""
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [x for x in owners if isinstance(x, nn.Module)]
    root = next((x for x in modules if type(x) is type(network)), network)
    paths = {id(module): path for path, module in root.named_modules()}
    return next((paths[id(x)] for x in reversed(modules) if id(x) in paths), None)


def where_raised(network: nn.Module, error: BaseException) -> str:
    """The innermost module of a network in which an error was raised, and the line of code that led to it, in words."""
    path, line = path_raised(network, error), ""
    kind = type(network.get_submodule(path or "")).__name__
    module = "the network" if path is None else f"module {path!r} ({kind})" if path else f"the network ({kind})"
    for frame, number in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            text = linecache.getline(file, number).strip()
            line = f" (line {number} of {Path(file).name}: {text})" if text else ""
    return module + line
