"""Networks and examples that can't be compacted, refused by name before anything is done."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pyro_l0.compaction.calls import run, tensors
from pyro_l0.compaction.sizes import where_raised
from pyro_l0.nn.engine import Example, calls_of
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import Gate, gate_names

__all__ = ["check_network"]


def check_network(network: nn.Module, example: Example) -> None:
    """Refuse what can't be recorded, copied or compared.

    Args:
        network: the network with gates; it is not changed.
        example: what it is called with.

    Raises:
        TypeError: the network is no module, or the example none of the kinds that are taken.
        ValueError: the network is not ready, or does not take the example.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"Expected network to be a torch module, but got {type(network).__name__}.")
    if isinstance(network, Gate):
        raise ValueError("Expected a network with gates in it, but got a Gate; put it into nn.Sequential.")
    calls = calls_of(example)
    inputs = [x for call in calls for x in tensors(call)]
    if not inputs:
        raise TypeError(f"Expected an example_input with tensors, but got {type(example).__name__} without any.")
    _check_ready(network)
    for x in inputs:
        if not x.numel():
            raise ValueError(f"Expected an example_input with entries, but got shape {tuple(x.shape)}.")
    _check_device(network, inputs)
    copied = _copied(network)
    for call in calls:
        try:
            run(copied.eval(), call)
        except Exception as error:
            given = ", ".join(f"shape {tuple(x.shape)} and type {x.dtype}" for x in tensors(call))
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"Expected an example_input that the network takes, but got one of {given}, at which "
                f"{where_raised(copied, error)} raises: {text}"
            ) from error


def _check_ready(network: nn.Module) -> None:
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"Expected a network that is ready, but {name!r} is lazy; call the network once.")
        if parameter.is_meta:
            raise ValueError("Expected a network with values, but its parameters are on the device meta.")
    if not gate_names(network):
        for path, module in network.named_modules():
            if isinstance(module, FixedGate):
                raise ValueError(
                    f"Expected a network with gates, but {path!r} is a FixedGate: the gates of this network are fixed "
                    "already; take the network as it was before fix_gates."
                )


def _check_device(network: nn.Module, inputs: list[Tensor]) -> None:
    device = next((p.device for p in network.parameters()), None)
    for x in inputs:
        if x.is_meta or (device is not None and x.device != device):
            raise ValueError(
                f"Expected an example_input on {device or 'a device with values'}, where the network is, but got one "
                f"on {x.device}; move it by .to({str(device)!r})."
            )


def _copied(network: nn.Module) -> nn.Module:
    """A copy that draws its gates without telling anybody."""
    try:
        with torch.no_grad():
            new = copy.deepcopy(network)
    except Exception as error:
        raise ValueError(
            f"Expected a network that copy.deepcopy can copy, but it can't copy {type(network).__name__}: {error}"
        ) from error
    for name, gate in gate_names(new).items():
        gate.site_name, gate.is_reported = name, True
    return new
