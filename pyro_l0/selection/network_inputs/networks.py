"""The networks behind the gates of a selector: the user's own, or a small default."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pyro_l0.selection.network_inputs.responses import Response

__all__ = ["Net", "check_outputs", "make_networks"]

Net = nn.Module | Callable[[int], nn.Module] | None

_HIDDEN = 64


def make_networks(net: Net, features: int, outputs: int, count: int) -> list[nn.Module]:
    """Networks of the same kind, to be trained apart.

    The default has two hidden layers of 64 units with SiLU, which is smooth, in float64.
    """
    if not (net is None or callable(net)):
        raise TypeError(
            f"Expected net to be a torch.nn.Module, a function of the number of features that makes one, or None, but "
            f"got a {type(net).__name__}."
        )
    networks = [_make(net, features, outputs) for _ in range(count)]
    for network in networks:
        if not isinstance(network, nn.Module):
            raise TypeError(f"Expected net to make a torch.nn.Module, but it made a {type(network).__name__}.")
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise ValueError("Expected a net with parameters to train, but it has none.")
    return networks


def _make(net: Net, features: int, outputs: int) -> nn.Module:
    if isinstance(net, nn.Module):
        return copy.deepcopy(net)
    if net is not None:
        return net(features)
    return nn.Sequential(
        nn.Linear(features, _HIDDEN), nn.SiLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.SiLU(), nn.Linear(_HIDDEN, outputs)
    ).double()


@torch.no_grad()
def check_outputs(network: nn.Module, response: Response, x: Tensor) -> None:
    """Refuse a network that does not take a batch of inputs, or whose outputs do not fit the response."""
    training = network.training
    try:
        raw = network.eval()(x)
    except RuntimeError as error:
        raise ValueError(
            f"Expected a net that takes inputs of shape (n, {x.shape[1]}), the standardised features, but it says: "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        network.train(training)
    if not isinstance(raw, Tensor):
        raise ValueError(f"Expected a net that returns a tensor, but got a {type(raw).__name__}.")
    response.output(raw)
