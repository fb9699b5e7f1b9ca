"""Single terms of an objective: what one recorded site adds to it."""

from __future__ import annotations

import sys
from typing import Any

from pyro.distributions import Delta
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.distributions.util import scale_and_mask, sum_rightmost
from pyro.infer.util import is_validation_enabled
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import Independent, kl_divergence

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.fast.record import Site

__all__ = ["active_prob", "base", "kl_or_sample", "log_prob_sum", "other_kl", "site_sum"]


def base(fn: Any) -> Any:
    """What is inside of ``to_event``."""
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def active_prob(fn: Any) -> Tensor:
    """P(z != 0) of every gate of a site, 0 where a masked distribution masks it."""
    if isinstance(fn, GateDistribution):
        return fn.active_prob
    active = active_prob(fn.base_dist)
    if isinstance(fn, MaskedDistribution):
        mask = fn._mask
        if isinstance(mask, Tensor):
            mask = mask.expand(fn.batch_shape).reshape(fn.batch_shape + (1,) * fn.event_dim)
        return active * mask
    return active


def site_sum(value: Tensor, site: Site) -> Tensor:
    """Sum a per-gate term under its site's scale and mask."""
    scale, mask = site["scale"], site["mask"]
    if mask is not None or isinstance(scale, Tensor):
        value = sum_rightmost(value, site["fn"].event_dim)
    total: Tensor = scale_and_mask(value, scale, mask).sum()
    return total


def log_prob_sum(site: Site, sign: float = 1.0) -> Tensor:
    """The log probability of a site's value, or its negative, under the site's scale and mask."""
    log_prob = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    if site["cond_indep_stack"] and is_validation_enabled():
        shaped: Any = {**site, "log_prob": log_prob}
        check_site_shape(shaped, sys.maxsize)
    scale, mask = site["scale"], site["mask"]
    if mask is None and not isinstance(scale, Tensor):
        # One number, not one per row; and no sum over one number.
        total: Tensor = (log_prob.sum() if log_prob.dim() else log_prob) * (sign * scale)
        return total
    return sign * scale_and_mask(log_prob, scale, mask).sum()  # type: ignore[no-any-return]


def kl_or_sample(name: str, q: Any, p: Any, value: Tensor) -> Tensor:
    """KL(q || p) of a variable that is no gate: in closed form if registered, else log q - log p at a draw of q.

    The sampled difference is unbiased, and so is its pathwise gradient, as both densities are smooth: it may be the
    draw that the likelihood sees too. With a gate's atoms neither would hold.

    Raises:
        ValueError: a sample is needed, but ``q`` is not reparameterised, or ``p`` does not admit its draw.
    """
    try:
        return kl_divergence(q, p)
    except NotImplementedError:
        check_pathwise(name, q)
    try:
        log_prior = p.log_prob(value)
    except ValueError as error:
        raise ValueError(
            f"Expected a posterior at site {name!r} whose draws its prior {p} admits, but got {q}: {error}"
        ) from error
    difference: Tensor = q.log_prob(value) - log_prior
    return difference


def check_pathwise(name: str, q: Any) -> None:
    """Refuse a posterior through whose draw no gradient goes."""
    if not getattr(q, "has_rsample", False):
        raise ValueError(
            f"Expected a reparameterised posterior at latent site {name!r}, whose gradient goes through its sample, "
            f"but got {q}."
        )


def other_kl(name: str, site: Site, posterior: Site) -> Tensor:
    """KL of a latent variable that is neither gate nor slab."""
    q = posterior["fn"]
    check_pathwise(name, q)
    # The KL registered for a Delta leaves out its log density, which carries the Jacobian of an AutoContinuous guide.
    if not isinstance(base(q), Delta):
        try:
            kl = kl_divergence(q, site["fn"])
            total: Tensor = scale_and_mask(kl, posterior["scale"], posterior["mask"]).sum()
            return total
        except NotImplementedError:
            pass
    return log_prob_sum(posterior) - log_prob_sum(site)
