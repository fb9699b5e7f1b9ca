"""A layer whose weights are Gaussian slabs, each behind a binary gate, by local reparameterisation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

from pyro_l0.distributions import BernoulliGate

__all__ = ["BayesianLayer", "SpikeSlabPrior"]


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
        >>> layer = BayesianLayer(nn.Linear(3, 2), SpikeSlabPrior(0.1), True, init_active_prob=0.5, init_scale=0.05)
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
