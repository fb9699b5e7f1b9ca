"""A joint posterior of gates, slabs and other latent variables, drawn part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from pyro.distributions import Beta, Normal, TorchDistribution, TransformedDistribution
from torch import Tensor, nn
from torch.distributions import Transform

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.infer.autoregressive import GateChain
from pyro_l0.infer.drawn import Drawn
from pyro_l0.infer.hyper import HyperPosterior
from pyro_l0.infer.layout import Layout
from pyro_l0.infer.structured_slabs import StructuredSlabs

__all__ = ["ConjugateRate", "CorrelatedPosterior", "Part"]


class ConjugateRate(NamedTuple):
    """A Beta variable that is the prior probability of some gates of two values.

    Attributes:
        name: its site.
        gates: the sites of the gates.
        open: its prior's first parameter, shape ``()``.
        closed: its prior's second parameter.
    """

    name: str
    gates: tuple[str, ...]
    open: Tensor
    closed: Tensor


class Part(NamedTuple):
    """A site's part of n joint draws.

    Attributes:
        values: on the real line, shape ``(n, entries of the site)``.
        make: the distribution given the parts before, from its parameters.
        parameters: of that distribution, each broadcasts to the values.
        transform: what carries values to the site's support; None for the identity.
    """

    values: Tensor
    make: Callable[..., TorchDistribution]
    parameters: tuple[Tensor, ...]
    transform: Transform | None = None

    def at_site(self, shape: torch.Size, event_dim: int) -> Drawn:
        """The part as the distribution of a site with its value.

        Args:
            shape: of the site's value, with the particles' plates.
            event_dim: how many of its dimensions are the event's.
        """
        base = self.make(*(x.expand_as(self.values).reshape(shape) for x in self.parameters))
        value = self.values.reshape(shape)
        if self.transform is not None:
            base, value = TransformedDistribution(base, [self.transform]), self.transform(value)
        return Drawn(base.to_event(event_dim) if event_dim else base, value)

    def supported(self) -> Tensor:
        """The values in the site's support, shape ``(n, entries)``."""
        return self.values if self.transform is None else self.transform(self.values)


class CorrelatedPosterior(nn.Module):
    """The parts of a joint posterior and their order: other latents, gates, rates, slabs.

    Args:
        gates: the gate sites.
        hyper: the sites of the other latents, on the real line.
        slabs: the slab sites, for ``slab_posterior``.
        rates: Beta variables that follow from the gates.
        chain: the gates given those before them; None where a family draws them.
        hyper_posterior: of the other latents.
        slab_posterior: of the slabs given gates and other latents; None where they are drawn by themselves.
    """

    def __init__(
        self,
        gates: Layout,
        hyper: Layout,
        slabs: Layout,
        rates: Sequence[ConjugateRate],
        chain: GateChain | None,
        hyper_posterior: HyperPosterior,
        slab_posterior: StructuredSlabs | None,
    ) -> None:
        super().__init__()
        self.gates, self.hyper, self.slabs, self.rates = gates, hyper, slabs, tuple(rates)
        self.chain, self.hyper_posterior, self.slab_posterior = chain, hyper_posterior, slab_posterior
        self.register_buffer("hyper_start", hyper_posterior.loc.detach().clone())

    hyper_start: Tensor

    def draw(self, number: int, posterior: Mapping[str, TorchDistribution]) -> dict[str, Part]:
        """Joint draws, by site in their order.

        Args:
            number: of draws.
            posterior: the gates' distributions by site, or what they are given closed gates before them.
        """
        parts: dict[str, Part] = {}
        drawn = self.hyper_posterior.draw(number)
        for i, (name, values) in enumerate(self.hyper.pieces(drawn.values).items()):
            means, scales = (list(self.hyper.pieces(x).values())[i] for x in (drawn.means, drawn.deviations))
            parts[name] = Part(values, _normal, (means, scales), self.hyper.transforms.get(name))
        shift = drawn.values - self.hyper_start
        gates = self._draw_gates(parts, shift, posterior, number)
        for rate in self.rates:
            among = torch.cat([parts[name].values for name in rate.gates], -1)
            opened = among.detach().sum(-1, keepdim=True)
            parameters = rate.open + opened, rate.closed + among.shape[-1] - opened
            parts[rate.name] = Part(Beta(*parameters, validate_args=False).sample(), _beta, parameters)
        if self.slab_posterior is not None:
            given = self.slab_posterior.given(gates, shift)
            noise = torch.randn_like(given.mean)
            slabs = given.draw(noise)
            means, deviations = given.conditionals(slabs, noise)
            pieces = [list(self.slabs.pieces(x).values()) for x in (slabs, means, deviations.expand_as(slabs))]
            for name, value, mean, deviation in zip(self.slabs.shapes, *pieces, strict=True):
                parts[name] = Part(value, _normal, (mean, deviation))
        return parts

    def _draw_gates(
        self, parts: dict[str, Part], shift: Tensor, posterior: Mapping[str, TorchDistribution], number: int
    ) -> Tensor:
        """Add the gates' parts; the gates side by side, shape ``(number, size)``."""
        if self.chain is None:
            for name in self.gates.shapes:
                gate = posterior[name]
                draws = gate.rsample((number,)) if gate.has_rsample else gate.sample((number,))
                parts[name] = Part(draws.reshape(number, -1), _same(gate), ())
            return torch.cat([parts[name].values for name in self.gates.shapes], -1)
        base = torch.cat([posterior[name].logits.reshape(-1) for name in self.gates.shapes])
        gates = self.chain.sample(base, shift)
        odds = self.gates.pieces(self.chain.log_odds(base, gates, shift))
        for name, values in self.gates.pieces(gates).items():
            parts[name] = Part(values, _bernoulli, (odds[name],))
        return gates


def _normal(loc: Tensor, scale: Tensor) -> TorchDistribution:
    return Normal(loc, scale, validate_args=False)


def _beta(opened: Tensor, closed: Tensor) -> TorchDistribution:
    return Beta(opened, closed, validate_args=False)


def _bernoulli(logits: Tensor) -> TorchDistribution:
    return BernoulliGate(logits, validate_args=False)


def _same(gate: TorchDistribution) -> Callable[[], TorchDistribution]:
    return lambda: gate
