"""The networks and the Pyro model that the examples train."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_l0 import GateDistribution
from pyro_l0.infer import AutoSpikeSlab
from pyro_l0.nn import Gate

__all__ = ["Classifier", "SlabLinear", "mlp", "slab_sites", "with_mean_weights"]


class SlabLinear(nn.Linear):
    """A dense layer whose weights are a Pyro site with a Gaussian prior; the bias stays a parameter.

    Args:
        in_features: inputs.
        out_features: outputs.
        site_name: name of the weights' site.
        prior_scale: standard deviation of the prior.
    """

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

    Args:
        sizes: units per layer, from the inputs to the classes.
        prior: prior of every gate.
        slab_scale: if given, the weights are sites named ``net.<index>.weight`` with a Gaussian prior, whose
            standard deviation is this over the square root of the layer's inputs.
    """
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layers.append(Gate(fan_in, prior=prior))
        if slab_scale is None:
            layers.append(nn.Linear(fan_in, fan_out))
            # As in the paper's public layers: a larger start than torch's, since gates shrink the signal.
            nn.init.kaiming_normal_(layers[-1].weight, mode="fan_out")
            nn.init.zeros_(layers[-1].bias)
        else:
            layers.append(SlabLinear(fan_in, fan_out, f"net.{len(layers)}.weight", slab_scale / fan_in**0.5))
        if i < len(sizes) - 2:
            layers.append(nn.ReLU())
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
    """The Pyro model: a network's outputs are the logits of observed classes.

    Args:
        net: the network.
        num_data: size of the data set, which scales a minibatch's likelihood.
    """

    def __init__(self, net: nn.Module, num_data: int) -> None:
        super().__init__()
        self.net = net
        self.num_data = num_data

    def forward(self, index: Tensor, images: Tensor, labels: Tensor) -> None:
        """Score a minibatch.

        Args:
            index: places of the examples in the data set, shape ``(batch,)``.
            images: inputs, shape ``(batch, features)``.
            labels: classes, shape ``(batch,)``.
        """
        logits = self.net(images)
        with pyro.plate("data", self.num_data, subsample=index):
            pyro.sample("label", dist.Categorical(logits=logits, validate_args=False), obs=labels)
