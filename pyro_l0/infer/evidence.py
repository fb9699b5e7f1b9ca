"""Estimates of a model's log evidence from draws of a guide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.fast.record import Site
from pyro_l0.infer.blocks import Run
from pyro_l0.infer.drawn import Drawn
from pyro_l0.infer.slabs import places_of

__all__ = ["Evidence", "log_ratio"]


class Evidence(NamedTuple):
    """What log ratios of model and guide say of the log evidence, in nats.

    Attributes:
        elbo: their mean, a lower bound.
        standard_error: of that mean.
        importance_weighted: log of the mean ratio, a tighter bound that misses modes of which the guide has no draw.
        effective: effective sample size of the weights as a fraction of the draws.
    """

    elbo: float
    standard_error: float
    importance_weighted: float
    effective: float

    @classmethod
    def of(cls, ratios: Tensor) -> Evidence:
        """From log ratios at draws, shape ``(n,)``."""
        weights = torch.softmax(ratios, 0)
        return cls(
            float(ratios.mean()),
            float(ratios.std()) / math.sqrt(len(ratios)),
            float(torch.logsumexp(ratios, 0)) - math.log(len(ratios)),
            1 / float(weights.square().sum()) / len(ratios),
        )


def log_ratio(run: Run, slab: Mapping[str, str]) -> Tensor:
    """log p(D, z, w, ...) - log q(z, w, ...) at one draw of the guide, shape ``()``.

    A slab that does not depend on its gates counts where they are open; where they are closed, its posterior is its
    prior, as in Eq. 20 of the L0 paper.
    """
    total = torch.zeros(())
    for name, site in run.model.items():
        if site["type"] != "sample":
            continue
        value = _log_prob(site)
        if name in run.guide:
            value = value - _log_prob(run.guide[name])
        if name in slab and not isinstance(run.guide[name]["fn"], Drawn):
            value = value * _is_open(name, slab[name], run)
        total = total + value.sum()
    for name, site in run.guide.items():
        if site["type"] == "sample" and name not in run.model:
            total = total - _log_prob(site).sum()
    return total
