"""The networks and the Pyro model that the examples train."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.distributions import GateDistribution, MixtureGate
from pyro_l0.infer import AutoSpikeSlab, factor
from pyro_l0.nn import FAMILIES as PATHWISE
from pyro_l0.nn import L0Gate

__all__ = [
    "FAMILIES",
    "KEEP_RATES",
    "Classifier",
    "FamilyName",
    "NetworkName",
    "SlabLinear",
    "build",
    "family_options",
    "init_active_prob",
    "lenet5",
    "mlp",
    "slab_sites",
    "with_mean_weights",
]


NetworkName = Literal["mlp", "lenet5"]
FamilyName = Literal[
    "hard_concrete",
    "rectified_normal",
    "hard_kumaraswamy",
    "exponential",
    "exponential_uniform",
    "power_law",
    "bernoulli",
]
FAMILIES: dict[str, type[GateDistribution]] = {**PATHWISE, "bernoulli": BernoulliGate}
# What both papers keep of each gate site's units at the start: the L0 paper drops 0.2 of the MLP's inputs and half of
# all other units (log alpha = logit(0.8), 0), and the mixtures' paper starts from these as weights.
KEEP_RATES: dict[NetworkName, tuple[float, ...]] = {"mlp": (0.8, 0.5, 0.5), "lenet5": (0.5, 0.5, 0.5, 0.5)}


def family_options(family: FamilyName, beta: float | None) -> dict[str, float]:
    """What both papers call beta, by its name in a family: the hard concrete's temperature, the mixtures' sharpness."""
    if beta is None:
        return {}
    for name in ("temperature", "beta"):
        if name in FAMILIES[family].defaults:
            return {name: beta}
    raise ValueError(f"Expected beta with the hard concrete or a mixture, but got family={family!r}.")


def init_active_prob(keep_rates: Sequence[float], family: FamilyName, beta: float | None = None) -> tuple[float, ...]:
    """P(z != 0) at the start for the rates of units that gate sites keep, as in the papers.

    The rate is the hard concrete's sigmoid(log alpha), the mixtures' weight and the Bernoulli gate's probability; other
    families start at the hard concrete's P(z != 0).
    """
    gate = FAMILIES[family]
    rates = torch.tensor(keep_rates, dtype=torch.float64)
    if gate is BernoulliGate:
        return tuple(rates.tolist())
    make: Any = gate if issubclass(gate, MixtureGate) else HardConcrete
    return tuple(make(torch.logit(rates), **family_options(family, beta)).active_prob.tolist())


class SlabLinear(nn.Linear):
    """A dense layer whose weights are a Pyro site with a Gaussian prior; the bias stays a parameter."""

    def __init__(self, in_features: int, out_features: int, site_name: str, prior_scale: float) -> None:
        super().__init__(in_features, out_features)
        self.site_name = site_name
        self.prior_scale = prior_scale
        self.weight.requires_grad_(False)  # only where the slab starts

    def forward(self, x: Tensor) -> Tensor:
        """Sample the weights once for the batch."""
        prior = dist.Normal(torch.zeros_like(self.weight), self.prior_scale, validate_args=False)
        return F.linear(x, pyro.sample(self.site_name, prior.to_event(2)), self.bias)


def mlp(sizes: Sequence[int], prior: GateDistribution | None = None, slab_scale: float | None = None) -> nn.Sequential:
    """A multilayer perceptron with a gate per input and per hidden unit, behind the nonlinearity.

    With ``slab_scale`` the weights are sites named ``net.<index>.weight`` with a Gaussian prior, whose standard
    deviation is the scale over the square root of the layer's inputs.
    """
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layers.append(L0Gate(fan_in, prior=prior, init_jitter=0.0))
        if slab_scale is None:
            layers.append(nn.Linear(fan_in, fan_out))
            # A larger start than torch's, since gates shrink the signal; chosen on held-out images over the still
            # larger one of the paper's public layers (fan_out).
            nn.init.kaiming_normal_(layers[-1].weight)
            nn.init.zeros_(layers[-1].bias)
        else:
            layers.append(SlabLinear(fan_in, fan_out, f"net.{len(layers)}.weight", slab_scale / fan_in**0.5))
        if i < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def build(
    name: NetworkName, pixels: int, prior: GateDistribution | None = None, slab_scale: float | None = None
) -> nn.Sequential:
    """An MLP with hidden layers of 300 and 100 units, or LeNet-5; ``slab_scale`` as for :func:`mlp`."""
    return mlp((pixels, 300, 100, 10), prior, slab_scale) if name == "mlp" else lenet5(prior)


def lenet5(prior: GateDistribution | None = None) -> nn.Sequential:
    """LeNet-5-Caffe 20-50-800-500 on flat images of 28 x 28: gates on feature maps and on the dense layers' inputs.

    A map's gate stands behind the pooling, which commutes with it and leaves a quarter of the products.
    """
    layers = [
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        L0Gate(20, dim=1, prior=prior, init_jitter=0.0),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        L0Gate(50, dim=1, prior=prior, init_jitter=0.0),
        nn.Flatten(),
        L0Gate(800, prior=prior, init_jitter=0.0),
        nn.Linear(800, 500),
        nn.ReLU(),
        L0Gate(500, prior=prior, init_jitter=0.0),
        nn.Linear(500, 10),
    ]
    for layer in layers:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            # As in the paper's public layers: a larger start than torch's, since gates shrink the signal.
            nn.init.kaiming_normal_(layer.weight, mode="fan_out" if isinstance(layer, nn.Linear) else "fan_in")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def slab_sites(network: nn.Sequential) -> dict[str, str]:
    """The gate site of every slab site of :func:`mlp`: the gate in front of the layer."""
    layers = list(network)
    return {layer.site_name: f"net.{i - 1}" for i, layer in enumerate(layers) if isinstance(layer, SlabLinear)}


def with_mean_weights(network: nn.Sequential, guide: AutoSpikeSlab) -> nn.Sequential:
    """The network with every slab fixed at its posterior mean."""
    slabs = guide.slabs()
    layers: list[nn.Module] = []
    for layer in network:
        if isinstance(layer, SlabLinear):
            plain = nn.Linear(layer.in_features, layer.out_features)
            plain.weight.data = slabs[layer.site_name].mean.detach().clone()
            plain.bias.data = layer.bias.detach().clone()
            layer = plain
        layers.append(layer)
    return nn.Sequential(*layers)


class Classifier(nn.Module):
    """The Pyro model: a network's outputs are the logits of observed classes. It scores them, and draws none.

    ``num_data``, the size of the data set, scales a minibatch's likelihood. ``logits`` are those of the last one.
    """

    logits: Tensor

    def __init__(self, net: nn.Module, num_data: int) -> None:
        super().__init__()
        self.net = net
        self.num_data = num_data

    def forward(self, images: Tensor, labels: Tensor) -> None:
        """Score a minibatch, instead of all data."""
        logits = self.net(images)
        self.logits = logits.detach()
        # What a Categorical in a subsampled plate says, whose work is some percent of a small network's step.
        factor("labels", -self.num_data * F.cross_entropy(logits, labels))
