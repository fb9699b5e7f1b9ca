"""Gates on the inputs of networks, drawn anew for every observation."""

from __future__ import annotations

from collections.abc import Sequence

import pyro
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor, nn

from pyro_l0.distributions import HardConcrete
from pyro_l0.nn import Gate
from pyro_l0.selection.network_inputs.responses import Response

__all__ = ["SITE", "GatedNetworks", "InputGates"]

SITE = "inputs"


class InputGates(nn.Module):
    """A guide over the gates of p inputs: every observation draws gates of its own from one hard concrete per input.

    The expected loss is that of gates that a whole batch shares, since a loss is a sum over observations; its estimate
    varies far less. The price of the gates of a batch is scaled to the ``size`` of the whole data set.
    """

    def __init__(self, prior: HardConcrete, size: int) -> None:
        super().__init__()
        self.size = size
        self.log_alpha = nn.Parameter(prior.log_alpha.detach().clone())
        self._prior = prior

    def forward(self, x: Tensor, y: Tensor) -> None:
        """Draw the gates of a batch; takes the arguments of :class:`GatedNetworks`."""
        with pyro.poutine.scale(scale=self.size / y.numel()), pyro.plate("observations", y.numel()):
            pyro.sample(SITE, self.gates().to_event(1))  # type: ignore[no-untyped-call]

    def gates(self) -> HardConcrete:
        """The gates, shape ``(p,)``, differentiable."""
        return self._prior.with_learned(log_alpha=self.log_alpha)

    @torch.no_grad()
    def close(self, places: Tensor) -> None:
        """Close the gates of some inputs permanently."""
        self.log_alpha[places] = HardConcrete.closed(**self._prior.fixed_options).log_alpha.to(self.log_alpha)


class GatedNetworks(nn.Module):
    """Several networks behind the same gates, each for observations of its own, as the model of an objective.

    The log likelihood of a batch is scaled to the ``size`` of the whole data set.
    """

    def __init__(self, networks: Sequence[nn.Module], response: Response, size: int, prior: HardConcrete) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.response = response
        self.size = size
        self.gate = Gate(len(prior.log_alpha), prior=prior)
        self.gate.site_name = SITE

    def forward(self, x: Tensor, y: Tensor) -> None:
        """State the likelihood of a batch of B for each network: inputs ``(M, B, p)``, encoded y ``(M, B)``."""
        count = y.numel()
        with pyro.poutine.scale(scale=self.size / count), pyro.plate("observations", count):
            gated = self.gate(x.flatten(0, 1)).view_as(x)
            pyro.sample("y", self.distribution(gated), obs=y.flatten())

    def distribution(self, gated: Tensor) -> TorchDistribution:
        """Of observations, batch shape ``(M B,)``, given what is behind the gates, shape ``(M, B, p)``."""
        outputs = [self.response.output(net(part)) for net, part in zip(self.networks, gated, strict=True)]
        return self.response.distribution(torch.cat(outputs))
