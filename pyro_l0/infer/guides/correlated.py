"""A joint posterior of gates, slabs and other latent variables, drawn part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import pyro
import torch
from pyro.distributions import Beta, Normal, TorchDistribution
from pyro.poutine import runtime
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor, nn

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.fast.record import Record
from pyro_l0.infer.guides.autoregressive import GateChain, HyperPosterior
from pyro_l0.infer.guides.drawn import Drawn, Part
from pyro_l0.infer.guides.layout import Layout
from pyro_l0.infer.guides.mean_field import GatesPosterior, SitePosterior
from pyro_l0.infer.guides.structured_slabs import SlabPosterior

_normal, _beta = (partial(family, validate_args=False) for family in (Normal, Beta))
_bernoulli = partial(BernoulliGate, None, validate_args=False)  # of logits


class ConjugateRate(NamedTuple):
    """A Beta(open, closed) variable, of one entry, that is the prior probability of the binary gates of some sites."""

    name: str
    gates: tuple[str, ...]
    open: Tensor
    closed: Tensor
    shape: torch.Size

    def parameters(self, gates: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Those of its Beta given n draws of the gates by site, shapes ``(n, 1)``."""
        among = torch.cat([gates[name].reshape(len(gates[name]), -1) for name in self.gates], 1).detach()
        opened = among.sum(1, keepdim=True)
        return self.open + opened, self.closed + among.shape[1] - opened


class CorrelatedPosterior(nn.Module):
    """The parts of a joint posterior and their order: other latents, gates, rates, slabs.

    ``slabs`` has the other latents too that are drawn with the slabs. ``chain`` is None where a family draws the gates.
    The guide sets ``posteriors``, those of the gates by site, and ``plates``, the names of each site's plates.
    """

    hyper_start: Tensor

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
        self.posteriors: Mapping[str, SitePosterior] = {}
        self.plates: Mapping[str, tuple[str, ...]] = {}

    @property
    def is_chain(self) -> bool:
        """Whether gates are binary, and depend on gates before them or on other latents."""
        return self.chain is not None and any(True for _ in self.chain.parameters())

    def draw(self, plates: Mapping[str, pyro.plate]) -> dict[str, Tensor]:
        """Sample every site in its plates, with a joint draw for each particle of the plates outside."""
        outside = {x.dim: x.size for x in runtime._PYRO_STACK if isinstance(x, IndepMessenger)}
        particles = {dim: size for dim, size in outside.items() if dim is not None}
        values: dict[str, Tensor] = {}
        for name, part in self.draw_together(math.prod(particles.values())).items():
            with ExitStack() as stack:
                for plate in self.plates[name]:
                    stack.enter_context(plates[plate])
                fn, value = part.at_site(particles)
                values[name] = pyro.sample(name, fn if part.depends else Drawn(fn, value))
        return values

    def draw_for(self, record: Record) -> dict[str, Tensor]:
        """Sample every site for a loss that needs sites alone."""
        return {name: record.sample(name, *part.at_site({})) for name, part in self.draw_together(1).items()}

    def draw_together(self, n: int) -> dict[str, Part]:
        """Parts of n joint draws, by site in their order."""
        parts: dict[str, Part] = {}
        hyper, means, deviations = self.hyper_posterior.draw(n)
        self._add(parts, self.hyper, _normal, hyper, means, deviations)
        shift = hyper - self.hyper_start
        gates = self._draw_gates(parts, shift, n)
        for rate in self.rates:
            parameters = rate.parameters({name: parts[name].values for name in rate.gates})
            values = _beta(*parameters).sample()
            parts[rate.name] = Part(values, _beta, parameters, rate.shape, 0)
        given = self.slab_posterior.given(gates, shift)
        noise = torch.randn_like(given.mean)
        slabs = given.draw(noise)
        self._add(parts, self.slabs, _normal, slabs, *given.conditionals(slabs, noise))
        return parts

    def active_probs(self, draws: int) -> dict[str, Tensor]:
        """P(z != 0) of the gates by site, the mean over draws of their conditional probabilities."""
        if self.chain is None:
            return {name: gate.active_prob for name, gate in self._distributions().items()}
        shift = self.hyper_posterior.draw(draws)[0] - self.hyper_start
        base = self._base()
        odds = self.chain.log_odds(base, self.chain.sample(base, shift), shift)
        return self.gates.apart(torch.sigmoid(odds).mean(0))

    def parameter_groups(self, sites: Sequence[Tensor], learning_rate: float) -> list[dict[str, object]]:
        """Parameters for an optimiser, each kind with its learning rate; ``sites`` are the gates' own."""
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
        split = [layout.pieces(x.expand_as(values)) for x in (values, *parameters)]
        for name, shape in layout.shapes.items():
            value, *own = (x[name] for x in split)
            parts[name] = Part(value, make, tuple(own), shape, layout.event_dims[name], layout.transforms.get(name))

    def _draw_gates(self, parts: dict[str, Part], shift: Tensor, n: int) -> Tensor:
        """Add the gates' parts; the gates side by side, shape ``(n, size)``."""
        if self.chain is None:
            for name, gate in self._distributions().items():
                parts[name] = Part.of(gate, n, self.gates.event_dims[name])
            return torch.cat([parts[name].values for name in self.gates.shapes], -1)
        base = self._base()
        gates = self.chain.sample(base, shift)
        self._add(parts, self.gates, _bernoulli, gates, self.chain.log_odds(base, gates, shift))
        return gates

    def _distributions(self) -> dict[str, GateDistribution]:
        """The gates by site; of a chain, given closed gates before them."""
        found = {name: x for name, x in self.posteriors.items() if isinstance(x, GatesPosterior)}
        return {name: gates.distribution(gates.parameters) for name, gates in found.items()}

    def _base(self) -> Tensor:
        """Log odds of the gates of a chain given closed gates before them, shape ``(size,)``."""
        gates = self._distributions()
        return torch.cat([gates[name].logits.reshape(-1) for name in self.gates.shapes])
