"""A compacted network without what once held its gates."""

from __future__ import annotations

from torch import nn

from pyro_l0.nn.heads import HeadGated
from pyro_l0.nn.insert import Gated

__all__ = ["drop_holders"]


def drop_holders(network: nn.Module) -> nn.Module:
    """Put modules back to where they were before :func:`insert_gates` and :func:`gate_heads`, in place.

    Only where nothing is left of the gate, so that every parameter and buffer has the name that it had at first.

    Args:
        network: a compacted network.

    Returns:
        The network.
    """
    for path, module in reversed(list(network.named_modules())):
        if isinstance(module, Gated) and isinstance(module[1], nn.Identity):
            network.set_submodule(path, module[0])
        elif isinstance(module, HeadGated) and isinstance(module.gate, nn.Identity):
            network.set_submodule(path, module.projection)
    return network
