"""Gates of large designs: sampled, or as a collapsed mean field, with the slabs of a guide's model integrated out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from pyro_l0.infer.elbo.slabs import Places, Switch
from pyro_l0.infer.guides.correlated import ConjugateRate
from pyro_l0.infer.posterior.collapse import Collapsed
from pyro_l0.infer.posterior.summaries import JointDraws
from pyro_l0.maths.spike_slab.collapsed import CollapsedQuadratic
from pyro_l0.maths.spike_slab.expansion import gibbs_by_expansion
from pyro_l0.maths.spike_slab.laplace import LogLikelihood
from pyro_l0.maths.spike_slab.tempered_gibbs import GibbsRun, collapsed_mean_field, tempered_gibbs

__all__ = ["Method", "RefinedPosterior", "refined"]

Method = Literal["tempered", "mean_field"]

_POINTS = 4  # at which a log likelihood is compared with its expansion
_CLOSE = 1e-3  # nats by which they may differ for 1 nat of change, or in all


class RefinedPosterior(JointDraws):
    """Gates and slabs of a model whose other latents are held fixed.

    Attributes:
        slab: the gate site of each slab site.
        spread: largest difference of an inclusion probability between chains; how well they have mixed.
    """

    def __init__(
        self,
        collapsed: Collapsed,
        probs: Tensor,
        draw_gates: Callable[[int], Tensor],
        slab: Mapping[str, Switch],
        places: Mapping[str, Places],
        spread: float,
    ) -> None:
        self.slab, self._places, self.spread = dict(slab), places, spread
        self._collapsed, self._probs, self._draw_gates = collapsed, probs, draw_gates

    def active_probs(self, draws: int = 0) -> dict[str, Tensor]:
        """Marginal P(z != 0) of every gate, by site and in its shape; no draws are needed."""
        return self._collapsed.gates.apart(self._probs)

    @torch.no_grad()
    def draws(self, number: int) -> dict[str, Tensor]:
        """Joint draws by site, shape ``(number, *shape of the site)``; the other latents are the same in all."""
        gates = self._draw_gates(number).to(self._probs)
        slabs = self._collapsed.quadratic.draw_slabs(gates) + self._collapsed.offset
        found = {name: x.expand(number, *x.shape) for name, x in self._collapsed.others.items()}
        for layout, flat in ((self._collapsed.gates, gates), (self._collapsed.slabs, slabs)):
            found |= {name: x.reshape(number, *layout.shapes[name]) for name, x in layout.pieces(flat).items()}
        for rate in self._collapsed.rates:
            found[rate.name] = _rates(rate, found, number)
        return found

    def _is_gate(self, name: str) -> bool:
        return name in self._collapsed.gates.shapes


def _rates(rate: ConjugateRate, drawn: Mapping[str, Tensor], number: int) -> Tensor:
    """Draws of a rate given its gates."""
    among = torch.cat([drawn[name].reshape(number, -1) for name in rate.gates], 1)
    opened = among.sum(1)
    beta = torch.distributions.Beta(rate.open + opened, rate.closed + among.shape[1] - opened)
    return beta.sample().reshape(number, *rate.shape)


@torch.no_grad()
def refined(
    collapsed: Collapsed,
    log_likelihood: LogLikelihood,
    method: Method,
    slab: Mapping[str, Switch],
    places: Mapping[str, Places],
    generator: torch.Generator | None,
    *,
    chains: int,
    flips: int,
) -> RefinedPosterior:
    """Sample the gates, or fit a collapsed mean field to them.

    Args:
        collapsed: the model, to second order in its coefficients.
        log_likelihood: the model's own, of coefficients ``(S, p)`` to ``(S,)``.
        method: which.
        slab: the gate site of each slab site.
        places: of each slab site, where its gates lie.
        generator: of the random numbers.
        chains: of the sampler.
        flips: of each chain.

    Raises:
        ValueError: the method is unknown.
    """
    if method not in ("tempered", "mean_field"):
        raise ValueError(f"Expected method 'tempered' or 'mean_field', but got {method!r}.")
    quadratic, prior = collapsed.quadratic, collapsed.prior
    if method == "mean_field":
        odds = collapsed_mean_field(quadratic, prior, generator=generator)
        probs = torch.sigmoid(odds)

        def independent(number: int) -> Tensor:
            return torch.bernoulli(probs.expand(number, -1))

        return RefinedPosterior(collapsed, probs, independent, slab, places, 0.0)
    if is_quadratic(log_likelihood, quadratic):
        run = tempered_gibbs(quadratic, prior, chains=chains, flips=flips, generator=generator)
    else:
        run, quadratic = gibbs_by_expansion(
            log_likelihood,
            quadratic.scale,
            prior,
            start=torch.zeros_like(quadratic.quadratic.linear),
            gate_of=quadratic.gate_of,
            chains=chains,
            flips=flips,
            generator=generator,
        )
    found = collapsed._replace(quadratic=quadratic)
    return RefinedPosterior(found, run.active_probs, _draws_of(run), slab, places, _spread(run))


def _draws_of(run: GibbsRun) -> Callable[[int], Tensor]:
    return lambda number: run.draws(number)[0]


def _spread(run: GibbsRun) -> float:
    """Largest range of an inclusion probability over halves of the chains."""
    first, second = (x.mean(0) for x in run.chain_active_probs.tensor_split(2))
    return float((first - second).abs().max())


def is_quadratic(log_likelihood: LogLikelihood, collapsed: CollapsedQuadratic) -> bool:
    """Whether a log likelihood is its own expansion, at random coefficients of the size that the prior has."""
    quadratic = collapsed.quadratic
    beta = torch.randn(_POINTS, len(quadratic.linear)).to(quadratic.linear) * collapsed.scale
    index = torch.arange(len(quadratic.linear), device=beta.device)
    rows = quadratic.rows(index[None]).squeeze(0)
    own = beta @ quadratic.linear - 0.5 * ((beta @ rows) * beta).sum(1)
    difference = log_likelihood(beta) - own
    change = difference - difference.mean()
    return bool((change.abs() <= _CLOSE * (1 + (own - own.mean()).abs())).all())
