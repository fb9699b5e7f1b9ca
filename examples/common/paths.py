"""Weights on a path from an input to an output, and the removal of units without any while a network trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_l0.bayes import BayesianLayer
from pyro_l0.bayes.network import bayesian_layers
from pyro_l0.nn import GateLayer, gate_names
from pyro_l0.nn.engine.record import copied

__all__ = ["OpenUnits", "WeightGates", "active_weights"]


class OpenUnits(GateLayer):
    """Marks units that :class:`~pyro_l0.compaction.Shrinker` removes once no open weight reads them.

    It returns its input. Put one where units may leave: in front of the first layer, and behind each hidden one.

    Args:
        size: Number of units.
        dim: Dimension of the units: -1 for features, 1 for feature maps.
    """

    def __init__(self, size: int, dim: int = -1) -> None:
        super().__init__()
        self.size, self.dim, self.site_name = size, dim, None

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        return x

    def narrow(self, index: Tensor) -> None:
        """Keep the units at some indices."""
        self.size = len(index)

    def extra_repr(self) -> str:
        """Size and dimension."""
        return f"{self.size}, dim={self.dim}"


def active_weights(network: nn.Module, example: Tensor) -> dict[str, Tensor]:
    r"""Find the weights of the median probability model that lie on a path from an input to an output.

    A weight with :math:`q(z = 1) > 1/2` is active if there is a chain of such weights from an input through it to an
    output. The others change no prediction but by constants, which the biases of the next layer hold.

    Args:
        network: The result of :func:`~pyro_l0.bayes.bayesian`. Increasing activations, pooling, sums and
            concatenations may join its layers; after an activation that is not zero at zero all units count as reached.
        example: A batch of inputs.

    Returns:
        True for active weights, by path of each Bayesian layer, in the shape of its weight.
    """
    slopes = _slopes(network, example, lambda layer: layer.active_prob > 0.5, bias=0.0)
    return {path: slope > 0 for path, slope in slopes.by_layer.items()}


class WeightGates:
    """Tells :class:`~pyro_l0.compaction.Shrinker` which units the gates of the weights have closed.

    A unit behind an :class:`OpenUnits` is closed when each path from it to an output has a weight that is open with at
    most twice its prior probability (at most 1/2): gates that nothing in the data needs rest at the prior's.
    Gates may sink at first and rise again, so begin after some epochs, or give the Shrinker more patience.

    Args:
        network: The result of :func:`~pyro_l0.bayes.bayesian`, with :class:`OpenUnits` where units may be removed.
        example: A batch of inputs.
    """

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        self.network, self.example = network, example

    def posterior(self) -> dict[str, UnitProbs]:
        """Probabilities of 0 or 1 that the units of each site are open."""

        def is_open(layer: BayesianLayer) -> Tensor:
            return layer.active_prob > min(0.5, 2 * layer.prior.active_prob)

        slopes = _slopes(self.network, self.example, is_open, bias=1.0)
        return {site: UnitProbs((slope > 0).float()) for site, slope in slopes.by_site.items()}

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Return no parameters, since the units have none of their own."""
        return {}


class UnitProbs(NamedTuple):
    """Probabilities of units, shape ``(n,)``."""

    active_prob: Tensor

    @property
    def test_gate(self) -> Tensor:
        """1 for units that stay."""
        return self.active_prob

    @property
    def least_active_prob(self) -> Tensor:
        """Zeros."""
        return torch.zeros_like(self.active_prob)


class _Slopes(NamedTuple):
    by_layer: dict[str, Tensor]
    by_site: dict[str, Tensor]


def _slopes(network: nn.Module, example: Tensor, is_open: Callable[[BayesianLayer], Tensor], bias: float) -> _Slopes:
    """How much of the summed outputs of a network without signs goes through weights and units; positive on a path.

    All weights are 1 over the number of inputs where they are open and 0 elsewhere, so that nothing can cancel.
    """
    new = copied(network).eval().double()
    for path, module in list(new.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            new.set_submodule(path, nn.Identity())
    weights = {}
    for path, layer in bayesian_layers(new).items():
        plain, on = layer.layer, is_open(layer)
        plain.weight = nn.Parameter(on.double() / on[0].numel())
        if isinstance(plain.bias, Tensor):
            plain.bias = nn.Parameter(torch.full_like(plain.bias, bias))
        new.set_submodule(path, plain)
        weights[path] = plain.weight
    outputs: dict[str, list[Tensor]] = {}
    gates = {site: gate for site, gate in gate_names(new).items() if isinstance(gate, OpenUnits)}
    with torch.enable_grad():
        for site, gate in gates.items():
            gate.register_forward_hook(_keep_output(outputs.setdefault(site, [])))
        total = new(torch.ones_like(example[:1], dtype=torch.float64)).sum()
        units = [x for found in outputs.values() for x in found]
        found = torch.autograd.grad(total, [*weights.values(), *units], allow_unused=True, materialize_grads=True)
    by_layer = {path: slope * weight.detach() for (path, weight), slope in zip(weights.items(), found, strict=False)}
    by_site = {}
    for (site, gate), slope in zip(gates.items(), found[len(weights) :], strict=True):
        by_site[site] = slope.movedim(gate.dim, 0).flatten(1).sum(1)
    return _Slopes(by_layer, by_site)


def _keep_output(into: list[Tensor]) -> Callable[[nn.Module, object, Tensor], Tensor]:
    """A hook that keeps the output, as a tensor of its own."""

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        into.append(output.clone().requires_grad_())
        return into[-1]

    return hook
