"""What a diagnosis knows of a training, as its checks read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pyro_l0.diagnostics.pulls import Pulls
from pyro_l0.diagnostics.sites import GateSite
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.target.sparsity_target import SparsityTarget

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """A training at one step; what is None is not known."""

    sites: Sequence[GateSite]
    optimisers: int  # how many were given
    elbo: L0_ELBO | None
    target: SparsityTarget | None
    pulls: Pulls | None  # gradients for the gates
    steps_left: int | None  # of the optimiser until the end

    @property
    def counted(self) -> int | None:
        """Steps that the optimiser has taken with the gates."""
        known = [site.holding.steps for site in self.sites if site.holding is not None]
        return max((steps for steps in known if steps is not None), default=None)

    @property
    def steps(self) -> int | None:
        """Steps taken, by what the optimiser or the objective counts."""
        return self.elbo.step if self.counted is None and self.elbo is not None else self.counted

    @property
    def has_gate_kl(self) -> bool:
        """Whether the objective compares the gates with a prior."""
        return self.elbo is not None and any(term.name == "kl_gate" for term in self.elbo.objective_terms)

    def gradient(self, site: GateSite) -> Tensor | None:
        """The mean gradient of a site, its price included."""
        return None if self.pulls is None else self.pulls.mean(site.name)

    def total_steps(self, site: GateSite) -> int | None:
        """Steps with a site's gates, taken and to come."""
        if site.holding is None or self.steps_left is None:
            return None
        return self.steps_left + (site.holding.steps or 0)
