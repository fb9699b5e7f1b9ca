"""How a guide draws the sites of a correlated posterior: all of them together, each a part of one joint draw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack

import pyro
from pyro.poutine import runtime
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.fast.record import Record
from pyro_l0.infer._mean_field import GatesPosterior, SitePosterior
from pyro_l0.infer.correlated import CorrelatedPosterior, Part
from pyro_l0.infer.drawn import Drawn


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
