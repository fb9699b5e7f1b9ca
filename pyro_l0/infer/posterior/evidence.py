"""Estimates of a model's log evidence from draws of a guide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_l0.fast.record import Record, Site
from pyro_l0.infer.elbo.pairs import check_pair
from pyro_l0.infer.elbo.particles import can_be_mapped, over_particles
from pyro_l0.infer.elbo.runs import Args, Kwargs, Program, log_prob, record_run
from pyro_l0.infer.elbo.slabs import Switch, alignment_of, gate_site
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.guides.drawn import Drawn

_AT_ONCE = 250


class Evidence(NamedTuple):
    """Estimates of the log evidence from log ratios of model and guide, in nats.

    Attributes:
        elbo: mean log ratio, a lower bound.
        standard_error: standard error of that mean.
        importance_weighted: log of the mean ratio, a tighter bound that misses modes of which the guide has no draw.
        effective: effective sample size of the weights as a fraction of the draws.

    Example:
        >>> round(Evidence.of(torch.tensor([-1.0, -2.0, -1.5])).importance_weighted, 2)
        -1.42
    """

    elbo: float
    standard_error: float
    importance_weighted: float
    effective: float

    @classmethod
    def of(cls, ratios: Tensor) -> Evidence:
        """Estimate from log ratios at draws in nats, shape ``(n,)``."""
        weights = torch.softmax(ratios, 0)
        return cls(
            float(ratios.mean()),
            float(ratios.std()) / math.sqrt(len(ratios)),
            float(torch.logsumexp(ratios, 0)) - math.log(len(ratios)),
            1 / float(weights.square().sum()) / len(ratios),
        )


@torch.no_grad()
def log_ratios(
    model: Program, guide: AutoSpikeSlab, args: Args, kwargs: Kwargs, mapped: bool | None = None
) -> tuple[Callable[[int], Tensor], bool]:
    """What computes log p(D, z, w, ...) - log q(z, w, ...) at n draws of the guide, and whether it takes them at once.

    A slab that does not depend on its gates counts where they are open; where they are closed, its posterior is its
    prior, as in Eq. 20 of the L0 paper. ``torch.vmap`` takes all draws at once where it can, or as ``mapped`` says.
    """

    def run_guide() -> Record:
        return record_run(guide, args, kwargs, 0)

    def evaluate(of_guide: Record) -> dict[str, Tensor]:
        of_model = record_run(model, args, kwargs, 0, of_guide.sites)
        return {"ratio": _log_ratio(of_model.sites, of_guide.sites, guide.slab)}

    at_once = can_be_mapped(evaluate, run_guide, guide) if mapped is None else mapped

    @torch.no_grad()
    def ratios(n: int) -> Tensor:
        parts = [min(_AT_ONCE, n - i) for i in range(0, n, _AT_ONCE)]
        return torch.cat([over_particles(evaluate, run_guide, guide, part, at_once)["ratio"] for part in parts])

    return ratios, at_once


def _log_ratio(model: Mapping[str, Site], guide: Mapping[str, Site], slab: Mapping[str, Switch]) -> Tensor:
    found = [-log_prob(site).sum() for name, site in guide.items() if name not in model and _is_drawn(site)]
    for name, site in model.items():
        if not _is_drawn(site):
            continue
        if not site["is_observed"]:
            check_pair(name, site, guide.get(name))
        value = log_prob(site)
        if name in guide:
            value = value - log_prob(guide[name])
            if name in slab and not isinstance(guide[name]["fn"], Drawn):
                gates = guide[gate_site(slab[name])]["value"]
                opened = (alignment_of(name, slab[name], model, guide).of(gates) != 0).to(value.dtype)
                value = value * opened.reshape(opened.shape[: value.dim()])
        found.append(value.sum())
    return torch.stack(found).sum()


def _is_drawn(site: Site) -> bool:
    return site["type"] == "sample" and not site_is_subsample(site)
