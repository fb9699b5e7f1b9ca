"""Scales of the noise and of the slabs, which move beside the gates of weighted tempered Gibbs chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_l0.maths.spike_slab.collapsed import CollapsedQuadratic
from pyro_l0.maths.spike_slab.gate_priors import GatePrior
from pyro_l0.maths.spike_slab.quadratic import Quadratic
from pyro_l0.maths.spike_slab.tempered_gibbs import flip_rates

# Share of the proposals that a walk in one dimension accepts at its best (Gelman, Roberts and Gilks 1996).
_ACCEPTED = 0.44


class ScaleWalk:
    """Gates with the scales of a quadratic log likelihood at noise of scale one: a target of ``sampled_target``.

    The chains sample p(z, theta | y) Z(z, theta) with theta, kept in ``hyper``, the logarithms of the scales of noise
    and slabs, shape ``(chains, 2)``, and Z the sum of the rates at which gates are tried. ``every`` few flips one of
    the ``unknown`` scales is proposed anew, a random step away, and accepted by the ratio of that product. The steps
    adapt to the accepted share during the warm-up. ``log_density`` is that of theta, with the part of the log
    likelihood without gates.
    """

    def __init__(
        self,
        quadratic: Quadratic,
        prior: GatePrior,
        log_density: Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        unknown: Sequence[int] = (0, 1),
        gate_of: Tensor | None = None,
        every: int = 2,
    ) -> None:
        self._quadratic, self.prior, self._log_density = quadratic, prior, log_density
        self._unknown, self._gate_of, self._every = tuple(unknown), gate_of, every
        self._log_steps = [0.0 for _ in self._unknown]
        self._flips = 0
        self.hyper = start

    def collapsed(self, theta: Tensor) -> CollapsedQuadratic:
        """The likelihood and the slabs at scales of each chain, shape ``(S, 2)``."""
        noise, slab = theta.exp().T
        return CollapsedQuadratic(self._quadratic, slab[:, None], gate_of=self._gate_of, factor=noise**-2)

    def logits(self, z: Tensor) -> Tensor:
        """See :class:`~pyro_l0.maths.spike_slab.tempered_gibbs.Target`."""
        logits, self._log_joint = self._at(self.hyper, z)
        return logits

    def moved(
        self,
        z: Tensor,
        logits: Tensor,
        tried: Tensor,
        *,
        adapts: bool,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """See ``Target``; moves the chains that ``logits`` saw last."""
        rates = flip_rates(tried, z, logits)
        self._flips += 1
        if not self._unknown or self._flips % self._every:
            return logits, rates
        turn = self._flips // self._every
        which = turn % len(self._unknown)
        length = torch.tensor(self._log_steps[which]).exp().to(z)
        theta = self.hyper.clone()
        theta[:, self._unknown[which]] += length * torch.randn(len(z), generator=generator).to(z)
        new_logits, log_joint = self._at(theta, z)
        new_rates = flip_rates(tried, z, new_logits)
        log_ratio = log_joint + new_rates.sum(1).log() - self._log_joint - rates.sum(1).log()
        accept = torch.rand(len(z), generator=generator).to(z).log() < log_ratio
        self.hyper = torch.where(accept[:, None], theta, self.hyper)
        if adapts:
            gain = 2.0 / (1 + turn // len(self._unknown)) ** 0.6
            self._log_steps[which] += gain * (float(log_ratio.exp().clamp(max=1).mean()) - _ACCEPTED)
        return torch.where(accept[:, None], new_logits, logits), torch.where(accept[:, None], new_rates, rates)

    def _at(self, theta: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Log odds of the gates, and log p(y, theta | z)."""
        factors, log_evidence = self.collapsed(theta).conditionals(z)
        return factors + self.prior.logits(z).to(factors), log_evidence + self._log_density(theta)
