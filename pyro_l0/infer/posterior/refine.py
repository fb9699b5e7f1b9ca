"""Gates of large designs with the slabs integrated out: sampled, or as a collapsed mean field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Beta

from pyro_l0.infer.elbo.slabs import Alignment, Switch
from pyro_l0.infer.posterior.collapse import Collapsed
from pyro_l0.infer.posterior.summaries import JointDraws
from pyro_l0.maths.collapsed import CollapsedQuadratic
from pyro_l0.maths.laplace import LogLikelihood, gibbs_by_expansion
from pyro_l0.maths.tempered_gibbs import collapsed_mean_field, tempered_gibbs

__all__ = ["Method", "RefinedPosterior", "refined"]

Method = Literal["tempered", "mean_field"]

_POINTS = 4  # at which a log likelihood is compared with its expansion
_CLOSE = 1e-3  # nats by which they may differ for 1 nat of change, or in all


@dataclass(frozen=True)
class RefinedPosterior(JointDraws):
    """Gates and slabs with the other latents held fixed, from :meth:`~pyro_l0.infer.AutoSpikeSlab.refine`.

    Attributes:
        spread: largest difference of an inclusion probability between chains; small if they have mixed.
        slab: the gate site of each slab site.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_l0 import BernoulliGate
        >>> from pyro_l0.infer import AutoSpikeSlab
        >>> x = torch.eye(50) * 3
        >>> def model(y):
        ...     with pyro.plate("features", 50):
        ...         z, w = pyro.sample("z", BernoulliGate(probs=0.1)), pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x @ (z * w), 0.5).to_event(1), obs=y)
        >>> guide, y = AutoSpikeSlab(model, slab={"w": "z"}), x[7]
        >>> _ = guide(y)
        >>> int(guide.refine(y, seed=0, flips=200).active_probs()["z"].argmax())
        7
    """

    _collapsed: Collapsed
    _probs: Tensor
    _draw_gates: Callable[[int], Tensor]
    spread: float
    slab: dict[str, Switch]
    _alignments: Mapping[str, Alignment]

    def active_probs(self) -> dict[str, Tensor]:
        """Marginal P(z != 0) of every gate, by site and in its shape."""
        return self._collapsed.gates.apart(self._probs)

    @torch.no_grad()
    def draws(self, n: int) -> dict[str, Tensor]:
        """n joint draws by site, shape ``(n, *shape of the site)``; the other latents are the same in all."""
        gates = self._draw_gates(n).to(self._probs)
        slabs = self._collapsed.quadratic.draw_slabs(gates) + self._collapsed.offset
        found = {name: x.expand(n, *x.shape) for name, x in self._collapsed.others.items()}
        for layout, flat in ((self._collapsed.gates, gates), (self._collapsed.slabs, slabs)):
            found |= {name: x.reshape(n, *layout.shapes[name]) for name, x in layout.pieces(flat).items()}
        for rate in self._collapsed.rates:
            found[rate.name] = Beta(*rate.parameters(found)).sample().reshape(n, *rate.shape)
        return found

    def _is_gate(self, name: str) -> bool:
        return name in self._collapsed.gates.shapes


@torch.no_grad()
def refined(
    collapsed: Collapsed,
    log_likelihood: LogLikelihood,
    method: Method,
    generator: torch.Generator | None,
    chains: int,
    flips: int,
) -> tuple[Collapsed, Tensor, Callable[[int], Tensor], float]:
    """Sample the gates, or fit a collapsed mean field to them; arguments as of :meth:`AutoSpikeSlab.refine`.

    The result is the model as it was expanded last, P(z != 0), what draws gates, and the spread of the chains.
    """
    if method not in ("tempered", "mean_field"):
        raise ValueError(f"Expected method 'tempered' or 'mean_field', but got {method!r}.")
    quadratic, prior = collapsed.quadratic, collapsed.prior
    if method == "mean_field":
        probs = torch.sigmoid(collapsed_mean_field(quadratic, prior, generator=generator))
        return collapsed, probs, lambda n: torch.bernoulli(probs.expand(n, -1)), 0.0
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
    first, second = (x.mean(0) for x in run.chain_active_probs.tensor_split(2))
    spread = float((first - second).abs().max())
    return collapsed._replace(quadratic=quadratic), run.active_probs, run.draws, spread


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
