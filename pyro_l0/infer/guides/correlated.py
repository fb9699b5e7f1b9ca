"""A joint posterior of gates, slabs and other latent variables, drawn part by part, and its sites in a guide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import pyro
import torch
from pyro.distributions import Beta, Normal, TorchDistribution, TransformedDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine import runtime
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor, nn
from torch.distributions import Transform

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.fast.record import Record
from pyro_l0.infer.guides.autoregressive import GateChain
from pyro_l0.infer.guides.drawn import Drawn
from pyro_l0.infer.guides.hyper import HyperPosterior
from pyro_l0.infer.guides.layout import Layout
from pyro_l0.infer.guides.mean_field import GatesPosterior, SitePosterior
from pyro_l0.infer.guides.structured_slabs import SlabPosterior


class ConjugateRate(NamedTuple):
    """A Beta variable that is the prior probability of some gates of two values.

    Attributes:
        name: its site.
        gates: the sites of the gates.
        open: its prior's first parameter, shape ``()``.
        closed: its prior's second parameter.
        shape: of its site's value, of one entry.
    """

    name: str
    gates: tuple[str, ...]
    open: Tensor
    closed: Tensor
    shape: torch.Size


class Part(NamedTuple):
    """A site's part of n joint draws.

    Attributes:
        values: on the real line, shape ``(n, entries of the site)``, or without the dimension of draws.
        make: the distribution given the parts before, from its parameters.
        parameters: of that distribution, each of the values' shape.
        shape: of the site's value in one draw.
        event_dim: how many of its dimensions are the event's.
        transform: what carries values to the site's support; None for the identity.
        depends: whether the distribution depends on other parts of the draw.
    """

    values: Tensor
    make: Callable[..., TorchDistribution]
    parameters: tuple[Tensor, ...]
    shape: torch.Size
    event_dim: int
    transform: Transform | None = None
    depends: bool = True

    @classmethod
    def alone(cls, draws: Tensor, fn: TorchDistributionMixin, event_dim: int) -> Part:
        """Draws of a distribution that depends on nothing, shape ``(n, *shape of the site)``."""
        return cls(draws.reshape(len(draws), -1), lambda: fn, (), draws.shape[1:], event_dim, depends=False)

    def at_site(self, particles: Mapping[int, int]) -> tuple[TorchDistribution, Tensor]:
        """The distribution of a site and its value.

        Args:
            particles: sizes of the plates of the draws, by their dimensions from the right.
        """
        batch = self.shape[: len(self.shape) - self.event_dim]
        width = max(len(batch), *(-dim for dim in particles), 0)
        dims = [1] * (width - len(batch)) + list(batch)
        for dim, size in particles.items():
            dims[dim] = size
        shape = torch.Size(dims) + self.shape[len(batch) :]
        shape = shape if self.transform is None else self.transform.inverse_shape(shape)
        base = self.make(*(x.reshape(shape) for x in self.parameters))
        value = self.values.reshape(shape)
        if self.transform is not None:
            base, value = TransformedDistribution(base, [self.transform]), self.transform(value)
        base = base.to_event(self.event_dim - base.event_dim) if self.event_dim > base.event_dim else base
        return (Drawn(base, value) if self.depends else base), value

    def supported(self) -> Tensor:
        """The values in the site's support and shape, shape ``(n, *shape)``."""
        if self.transform is None:
            return self.values.reshape(-1, *self.shape)
        values: Tensor = self.transform(self.values.reshape(-1, *self.transform.inverse_shape(self.shape)))
        return values


class CorrelatedPosterior(nn.Module):
    """The parts of a joint posterior and their order: other latents, gates, rates, slabs.

    Args:
        gates: the gate sites.
        hyper: the sites of the other latents, on the real line.
        slabs: the slab sites, for ``slab_posterior``, and other latents that it draws with them.
        rates: Beta variables that follow from the gates.
        chain: the gates given those before them; None where a family draws them.
        hyper_posterior: of the other latents.
        slab_posterior: of the slabs given gates and other latents.
    """

    def __init__(
        self,
        gates: Layout,
        hyper: Layout,
        slabs: Layout,
        rates: Sequence[ConjugateRate],
        chain: GateChain | None,
        hyper_posterior: HyperPosterior,
        slab_posterior: SlabPosterior,
    ) -> None:
        super().__init__()
        self.gates, self.hyper, self.slabs, self.rates = gates, hyper, slabs, tuple(rates)
        self.chain, self.hyper_posterior, self.slab_posterior = chain, hyper_posterior, slab_posterior
        self.register_buffer("hyper_start", hyper_posterior.loc.detach().clone())

    hyper_start: Tensor

    def draw(self, number: int, posterior: Mapping[str, GateDistribution]) -> dict[str, Part]:
        """Joint draws, by site in their order.

        Args:
            number: of draws.
            posterior: the gates' distributions by site; of a chain, those given closed gates before them.
        """
        parts: dict[str, Part] = {}
        drawn = self.hyper_posterior.draw(number)
        self._add(parts, self.hyper, _normal, *drawn)
        shift = drawn.values - self.hyper_start
        gates = self._draw_gates(parts, shift, posterior, number)
        for rate in self.rates:
            among = torch.cat([parts[name].values for name in rate.gates], -1)
            opened = among.detach().sum(-1, keepdim=True)
            parameters = rate.open + opened, rate.closed + among.shape[-1] - opened
            values = Beta(*parameters, validate_args=False).sample()
            parts[rate.name] = Part(values, _beta, parameters, rate.shape, 0)
        given = self.slab_posterior.given(gates, shift)
        noise = torch.randn_like(given.mean)
        slabs = given.draw(noise)
        self._add(parts, self.slabs, _normal, slabs, *given.conditionals(slabs, noise))
        return parts

    def active_probs(self, number: int, posterior: Mapping[str, GateDistribution]) -> dict[str, Tensor]:
        """P(z != 0) of the gates by site and in its shape, the mean over draws of what the gates before leave of it."""
        if self.chain is None:
            return {name: gate.active_prob for name, gate in posterior.items()}
        shift = self.hyper_posterior.draw(number).values - self.hyper_start
        base = torch.cat([posterior[name].logits.reshape(-1) for name in self.gates.shapes])
        odds = self.chain.log_odds(base, self.chain.sample(base, shift), shift)
        return self.gates.apart(torch.sigmoid(odds).mean(0))

    def parameter_groups(self, sites: Sequence[Tensor], learning_rate: float) -> list[dict[str, object]]:
        """Parameters for an optimiser, each kind with its learning rate.

        Args:
            sites: the gates' own parameters.
            learning_rate: of the gates; slabs get a fifth of it, other latents 0.3 of it.
        """
        chain = [] if self.chain is None else list(self.chain.parameters())
        exponents = self.slab_posterior.exponents
        slabs = [x for x in self.slab_posterior.parameters() if x is not exponents]
        hyper = [*self.hyper_posterior.parameters(), *([] if exponents is None else [exponents])]
        return [
            {"params": [*sites, *chain], "lr": learning_rate},
            {"params": slabs, "lr": 0.2 * learning_rate},
            {"params": hyper, "lr": 0.3 * learning_rate},
        ]

    def _add(
        self,
        parts: dict[str, Part],
        layout: Layout,
        make: Callable[..., TorchDistribution],
        values: Tensor,
        *parameters: Tensor,
    ) -> None:
        """Add the parts of several sites from what they have side by side, shape ``(n, size)`` each."""
        pieces = [layout.pieces(x.expand_as(values)) for x in (values, *parameters)]
        for name, shape in layout.shapes.items():
            value, *own = (piece[name] for piece in pieces)
            transform = layout.transforms.get(name)
            parts[name] = Part(value, make, tuple(own), shape, layout.event_dims[name], transform)

    def _draw_gates(
        self, parts: dict[str, Part], shift: Tensor, posterior: Mapping[str, GateDistribution], number: int
    ) -> Tensor:
        """Add the gates' parts; the gates side by side, shape ``(number, size)``."""
        if self.chain is None:
            for name, gate in posterior.items():
                draws = gate.rsample((number,)) if gate.has_rsample else gate.sample((number,))
                parts[name] = Part.alone(draws, gate, self.gates.event_dims[name])
            return torch.cat([parts[name].values for name in self.gates.shapes], -1)
        base = torch.cat([posterior[name].logits.reshape(-1) for name in self.gates.shapes])
        gates = self.chain.sample(base, shift)
        self._add(parts, self.gates, _bernoulli, gates, self.chain.log_odds(base, gates, shift))
        return gates


def _normal(loc: Tensor, scale: Tensor) -> TorchDistribution:
    return Normal(loc, scale, validate_args=False)


def _beta(opened: Tensor, closed: Tensor) -> TorchDistribution:
    return Beta(opened, closed, validate_args=False)


def _bernoulli(logits: Tensor) -> TorchDistribution:
    return BernoulliGate(logits, validate_args=False)


class Correlated:
    """Draws sites that depend on one another.

    Args:
        joint: the posterior.
        posteriors: the gates' by site.
        plates: names of each site's plates.
    """

    def __init__(
        self,
        joint: CorrelatedPosterior,
        posteriors: Mapping[str, SitePosterior],
        plates: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._joint, self._posteriors, self._plates = joint, posteriors, plates

    def gates(self) -> dict[str, GateDistribution]:
        """The gates by site; of a chain, given closed gates before them."""
        found = {name: x for name, x in self._posteriors.items() if isinstance(x, GatesPosterior)}
        return {name: gates.distribution(gates.parameters) for name, gates in found.items()}

    @property
    def is_chain(self) -> bool:
        """Whether gates have two values, and depend on gates before them or on other latents."""
        chain = self._joint.chain
        return chain is not None and any(True for _ in chain.parameters())

    def active_probs(self, number: int) -> dict[str, Tensor]:
        """P(z != 0) by site."""
        return self._joint.active_probs(number, self.gates())

    def draw_together(self, number: int) -> dict[str, Part]:
        """Parts of joint draws, by site."""
        return self._joint.draw(number, self.gates())

    def draw(self, plates: Mapping[str, pyro.plate]) -> dict[str, Tensor]:
        """Sample every site in its plates, with a joint draw for each particle of the plates outside."""
        outside = {x.dim: x.size for x in runtime._PYRO_STACK if isinstance(x, IndepMessenger)}
        particles = {dim: size for dim, size in outside.items() if dim is not None}
        values: dict[str, Tensor] = {}
        for name, part in self.draw_together(math.prod(particles.values())).items():
            with ExitStack() as stack:
                for plate in self._plates[name]:
                    stack.enter_context(plates[plate])
                fn, value = part.at_site(particles)
                values[name] = pyro.sample(name, fn if part.depends else Drawn(fn, value))
        return values

    def draw_for(self, record: Record) -> dict[str, Tensor]:
        """Sample every site for a loss that looks at sites alone."""
        return {name: record.sample(name, *part.at_site({})) for name, part in self.draw_together(1).items()}
