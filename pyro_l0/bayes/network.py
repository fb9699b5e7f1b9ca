"""A network made Bayesian in one line: Gaussian slabs behind binary gates, and plain networks of the posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

from pyro_l0.distributions import BernoulliGate
from pyro_l0.distributions.gate import check_rate
from pyro_l0.expect import expect
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.l0_gate import L0Gate

__all__ = ["BayesianLayer", "SpikeSlabPrior", "bayesian", "bayesian_layers", "kl", "plain_network"]


class SpikeSlabPrior(NamedTuple):
    """The prior of every weight of a network: zero, or normal. :func:`~pyro_l0.bayes.bayesian` has an example.

    Attributes:
        active_prob: Prior probability that a gate is open, in (0, 1).
        scale: Standard deviation of the slab.
    """

    active_prob: float = 0.1
    scale: float = 1.0


class BayesianLayer(nn.Module):
    r"""A layer with weights :math:`z w`, where :math:`z` is a binary gate and :math:`w` is a Gaussian slab.

    The posterior of each weight is :math:`q(z = 1) = \pi` and :math:`q(w \mid z = 1) = N(\mu, s^2)`. In training
    mode the outputs are drawn and not the weights (local reparameterisation), for each example anew. A layer without
    gates is a mean-field Gaussian layer. The bias stays a parameter without a prior.

    .. math:: E[y] = \pi\mu * x + b, \qquad \mathrm{Var}[y] = \pi (s^2 + (1 - \pi) \mu^2) * x^2.

    Both moments are exact. The outputs are drawn from the normal distribution that has them, which is the outputs' own
    distribution where many weights are summed. In evaluation mode the layer has the weights of the median probability
    model: the slab's mean where :math:`\pi > 1/2`, and 0 elsewhere.

    Args:
        layer: A module that is linear in ``weight``, such as ``nn.Linear`` or ``nn.Conv2d``; its weights become the
            means of the slabs.
        prior: The prior of every weight.
        has_gates: Whether the weights have gates.
        init_active_prob: q(z = 1) at the start.
        init_scale: Standard deviation of the slabs at the start.

    Shape:
        As of the layer.

    Example:
        >>> from pyro_l0.bayes import SpikeSlabPrior
        >>> linear, prior = nn.Linear(3, 2), SpikeSlabPrior(0.1)
        >>> layer = BayesianLayer(linear, prior, True, init_active_prob=0.5, init_scale=0.05)
        >>> layer(torch.ones(4, 3)).shape, layer.active_prob[0]
        (torch.Size([4, 2]), tensor([0.5000, 0.5000, 0.5000], grad_fn=<SelectBackward0>))

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312, Eq. 20; Kingma, Salimans, Welling (2015), arXiv:1506.02557.
    """

    def __init__(
        self, layer: nn.Module, prior: SpikeSlabPrior, has_gates: bool, init_active_prob: float, init_scale: float
    ) -> None:
        super().__init__()
        self.layer, self.prior = layer, prior
        self.log_scale = nn.Parameter(torch.full_like(self.mean, math.log(init_scale)))
        start = math.log(init_active_prob / (1 - init_active_prob))
        self.logits = nn.Parameter(torch.full_like(self.mean, start)) if has_gates else None

    @property
    def mean(self) -> Tensor:
        """The slabs' means, the weight's shape."""
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def slab(self) -> Normal:
        """The posterior of the weights behind open gates."""
        return Normal(self.mean, self.log_scale.exp(), validate_args=False)

    @property
    def active_prob(self) -> Tensor:
        """The posterior probability that a weight is not zero, the weight's shape."""
        return torch.ones_like(self.mean) if self.logits is None else self.logits.sigmoid()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the weights, gates included, each of the weight's shape."""
        mean, variance = self.mean, (2 * self.log_scale).exp()
        if self.logits is None:
            return mean, variance
        active = self.logits.sigmoid()
        return active * mean, active * (variance + (1 - active) * mean.square())

    def median_weight(self) -> Tensor:
        """The weights of the median probability model, the weight's shape."""
        # The scales take no part, but whoever records a call sees that they belong to the same units as the means.
        weight = self.mean + 0 * self.log_scale
        return weight if self.logits is None else weight * (self.logits > 0)

    def sample_weight(self) -> Tensor:
        """A draw of the weights, the weight's shape, without a gradient."""
        with torch.no_grad():
            weight = self.slab.sample()
            drawn: Tensor = weight if self.logits is None else weight * BernoulliGate(logits=self.logits).sample()
            return drawn

    def kl(self, unit_prob: Tensor | None = None) -> Tensor:
        """KL of posterior to prior in nats, summed over weights (Eq. 20), shape ``()``.

        Args:
            unit_prob: Probability that the gate on each output is open, if there are such gates; shape ``(outputs,)``.
        """
        of_slab = kl_divergence(self.slab, Normal(0.0, self.prior.scale))
        if self.logits is None:
            return of_slab.sum() if unit_prob is None else (unit_prob * of_slab.flatten(1).sum(1)).sum()
        gates = BernoulliGate(logits=self.logits)
        prior = BernoulliGate.from_active_prob(self.logits.new_tensor(self.prior.active_prob))
        return (kl_divergence(gates, prior.expand(gates.batch_shape)) + gates.probs * of_slab).sum()

    def forward(self, x: Tensor) -> Tensor:
        """Outputs with the posterior's mean and variance in training mode, the median model's in evaluation mode."""
        if not self.training:
            out: Tensor = functional_call(self.layer, {"weight": self.median_weight()}, (x,))
            return out
        weight, weight_variance = self.moments()
        mean = functional_call(self.layer, {"weight": weight}, (x,))
        parts = {"weight": weight_variance}
        if isinstance(self.layer.bias, Tensor):
            parts["bias"] = torch.zeros_like(self.layer.bias)
        variance = functional_call(self.layer, parts, (x.square(),))
        # An output of zeros alone has a variance of 0, at which a square root has no derivative.
        drawn: Tensor = mean + variance.clamp(min=1e-16).sqrt() * torch.randn_like(mean)
        return drawn


Gates = Literal["weight", "unit"] | None
_PRIOR = SpikeSlabPrior()
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def bayesian(
    network: nn.Module,
    prior: SpikeSlabPrior = _PRIOR,
    gates: Gates = "weight",
    *,
    layers: Sequence[str] | None = None,
    init_active_prob: float = 0.5,
    init_scale: float = 0.05,
) -> nn.Module:
    r"""Copy a network and make its weights Gaussian slabs behind gates.

    The objective is Eq. 20 of the L0 paper. Train the copy by any loop of torch, in nats over all data:
    ``num_data * cross_entropy(net(x), y) + kl(net)``. Under Pyro the model adds ``factor("kl", -kl(net))``.
    Weights of a trained network become the means of the slabs. In evaluation mode it is the median probability model;
    :func:`plain_network` makes plain networks of it.

    Args:
        network: A network with dense layers or convolutions, whose weights are not shared; it is not changed.
        prior: The prior of the weights and of the gates; by default ``SpikeSlabPrior(0.1, 1.0)``.
        gates: ``"weight"`` for a binary gate per weight, ``"unit"`` for a hard concrete gate
            (:class:`~pyro_l0.nn.L0Gate`) on each output of all chosen layers but the last, which then stand with it
            in an ``nn.Sequential``, and None for none.
        layers: Paths of the layers to change; by default all ``nn.Linear`` and convolutions.
        init_active_prob: P(z != 0) at the start.
        init_scale: Standard deviation of the slabs at the start.

    Returns:
        The changed copy.

    Raises:
        ValueError: A path is not that of such a layer, there is none, a number is out of range, or a weight is shared.
        TypeError: An argument has the wrong type.

    Example:
        >>> from pyro_l0.bayes import SpikeSlabPrior, kl
        >>> mlp = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> net = bayesian(mlp, SpikeSlabPrior(0.05))
        >>> loss = 100 * net(torch.ones(8, 4)).square().mean() + kl(net)
        >>> loss.backward()

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312, Eq. 20 and its conclusion.
    """
    expect(nn.Module, "a network", network=network)
    expect(SpikeSlabPrior, "a SpikeSlabPrior", prior=prior)
    expect(Real, "a number", init_active_prob=init_active_prob, init_scale=init_scale, scale=prior.scale)
    if gates not in ("weight", "unit", None):
        raise ValueError(f"Expected gates to be 'weight', 'unit' or None, but got {gates!r}.")
    for name, rate in {"init_active_prob": init_active_prob, "prior.active_prob": prior.active_prob}.items():
        check_rate(name, rate, "BernoulliGate")
    if min(prior.scale, init_scale) <= 0:
        raise ValueError(f"Expected positive scales, but got {prior.scale} of the prior and {init_scale} at the start.")
    new = copied(network)
    paths = _paths(new, layers)
    for path in paths:
        layer = BayesianLayer(new.get_submodule(path), prior, gates == "weight", init_active_prob, init_scale)
        made: nn.Module = layer
        if gates == "unit" and path != paths[-1]:
            dim = 1 if layer.mean.dim() > 2 else -1
            made = nn.Sequential(layer, L0Gate(len(layer.mean), dim=dim, init_active_prob=init_active_prob))
        new.set_submodule(path, made.train(new.training))
    return new


def bayesian_layers(network: nn.Module) -> dict[str, BayesianLayer]:
    """Find the Bayesian layers of a network, by path.

    Raises:
        ValueError: There are none.
    """
    found = {path: module for path, module in network.named_modules() if isinstance(module, BayesianLayer)}
    if not found:
        raise ValueError("Expected a network with Bayesian layers, but it has none; make them by bayesian(network).")
    return found


def kl(network: nn.Module) -> Tensor:
    r"""Compute the KL of a network's posterior to its prior in nats, shape ``()``.

    This is the second part of Eq. 20. Add it to the expected loss of all data; :func:`bayesian` has an example.

    .. math:: \sum_j KL(q(z_j) \,\|\, p(z_j)) + q(z_j \neq 0)\, KL(q(w_j) \,\|\, p(w_j)).

    The slabs of a unit's weights are weighted with P(z != 0) of the unit's gate where an :class:`~pyro_l0.nn.L0Gate`
    follows the layer in an ``nn.Sequential``. Its prior has the layer's ``active_prob``.

    Args:
        network: The result of :func:`bayesian`, or a network around it.

    Raises:
        ValueError: The network has no Bayesian layers.
    """
    sequences = [list(module) for module in network.modules() if isinstance(module, nn.Sequential)]
    behind = {first: second for modules in sequences for first, second in pairwise(modules)}
    terms = []
    for layer in bayesian_layers(network).values():
        gate = behind.get(layer)
        if not isinstance(gate, L0Gate):
            terms.append(layer.kl())
            continue
        terms.append(layer.kl(gate.active_prob))
        family = gate.distribution
        prior = family.from_active_prob(torch.tensor(layer.prior.active_prob), **family.fixed_options)
        terms.append(gate.kl(prior))
    return torch.stack(terms).sum()


@torch.no_grad()
def plain_network(network: nn.Module, *, sample: bool = False, keep: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Copy a network in evaluation mode, with plain layers instead of Bayesian ones.

    Args:
        network: The result of :func:`bayesian`; gates on units stay, for :func:`~pyro_l0.compaction.compact`.
        sample: Whether to draw the weights from the posterior, gates included. By default they are those of the median
            probability model: the slab's mean where the gate is more likely open than closed.
        keep: The weights that are not zero, by path of each Bayesian layer; they replace the gates.

    Returns:
        The plain copy.

    Raises:
        ValueError: The network has no Bayesian layers.
        KeyError: ``keep`` lacks one of them.

    Example:
        >>> from pyro_l0.bayes import bayesian
        >>> net = bayesian(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)))
        >>> plain_network(net, sample=True)[0]
        Linear(in_features=4, out_features=3, bias=True)
    """
    new = copied(network).eval()
    layers = bayesian_layers(new)
    for path, layer in layers.items():
        if keep is None:
            weight = layer.sample_weight() if sample else layer.median_weight()
        else:
            weight = (layer.slab.sample() if sample else layer.mean) * keep[path]
        layer.mean.copy_(weight)
        new.set_submodule(path, layer.layer)
    return new


def _paths(network: nn.Module, layers: Sequence[str] | None) -> list[str]:
    """Paths of the layers to be made Bayesian, in the network's order."""
    modules = dict(network.named_modules())
    found = {path for path, module in modules.items() if path and isinstance(module, _LINEAR)}
    wanted = found if layers is None else set(layers)
    if not wanted or not wanted <= found:
        raise ValueError(
            f"Expected layers among the dense layers and convolutions {sorted(found)}, but got {layers!r}."
        )
    names: dict[Tensor, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for path in sorted(wanted):
        layer = modules[path]
        if len(names[layer.weight]) > 1:
            raise ValueError(
                f"Expected weights of one name, but {' and '.join(names[layer.weight])} are one; untie them."
            )
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise ValueError(f"Expected layers without hooks, but {path!r} has some; put gates behind it afterwards.")
        if any(isinstance(x, nn.MultiheadAttention) and path.startswith(f"{at}.") for at, x in modules.items()):
            raise ValueError(
                f"Expected layers that are called, but nn.MultiheadAttention only reads {path!r}; leave it out."
            )
    return [path for path in modules if path in wanted]
