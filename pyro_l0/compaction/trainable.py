"""Which networks can't shrink while they train, and why, in words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pyro_l0.compaction.comparison import check_values, compare_training, hooks
from pyro_l0.compaction.plan import plan_graph
from pyro_l0.compaction.rewrite import rewrite_graph
from pyro_l0.nn.fixed import fix_gates
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.reading import read_network

__all__ = ["check_hooks", "check_rewriting", "check_trainable"]


def check_trainable(network: nn.Module) -> None:
    """Refuse parameters that would lose their place: parametrised ones, and one that several layers share."""
    owners: dict[int, str] = {}
    for path, module in network.named_modules():
        if parametrize.is_parametrized(module):
            raise ValueError(f"Expected layers with weights of their own, but {path!r} is parametrised.")
        for parameter in module.parameters(recurse=False):
            if owners.setdefault(id(parameter), path) != path:
                raise ValueError(
                    f"Expected layers with weights of their own, but {path!r} and {owners[id(parameter)]!r} share some."
                )


def check_hooks(network: nn.Module) -> None:
    """Refuse hooks, which the rewritten network would not have."""
    found = hooks(network)
    if found:
        raise ValueError(
            f"Expected a network without hooks, which shrinking would lose, but it has {', '.join(found)}; take them "
            "off, put them on the module that holds the network, or train without Shrinker and compact at the end."
        )


def check_rewriting(network: nn.Module, example_input: Tensor) -> None:
    """Refuse a network that would train otherwise once it is rewritten from its operations."""
    graph = read_network(network, example_input)
    check_hooks(network)
    check_values(network, {}, example_input)
    lost: str | None = ", ".join(graph.left_out)
    if not lost:
        like = next(network.parameters(), example_input)
        gates = {site: torch.linspace(0.5, 1.0, gate.size).to(like) for site, gate in gate_names(network).items()}
        with torch.random.fork_rng([]):  # layers draw weights when they are made
            found = plan_graph(graph, gates, example_input.shape, keep_gates=True)
            small = rewrite_graph(graph, found, like, keep_gates=True)
        lost = compare_training(fix_gates(network, gates), fix_gates(small, gates), example_input)
    if lost:
        raise ValueError(
            "Expected a network that is all in the operations on its input, because shrinking writes it anew from "
            f"these, but that would lose or change {lost}. Code under `if self.training`, no_grad blocks, custom "
            "backward functions and updates of buffers do not belong into it: leave the part out of the network and "
            "call it before or behind it, or train without Shrinker and compact at the end."
        )
