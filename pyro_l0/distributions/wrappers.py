"""Gates inside ``to_event``, ``mask`` and ``expand``."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import ExpandedDistribution, Independent, MaskedDistribution, TorchDistribution
from torch import Tensor

from pyro_l0.distributions.gate import GateDistribution


def find_gate(fn: object) -> GateDistribution | None:
    """The gate inside ``to_event``, ``mask`` and ``expand`` wrappers, or None."""
    while type(fn) is Independent:  # the usual wrapper; abstract classes answer isinstance slowly
        fn = fn.base_dist
    while not isinstance(fn, GateDistribution):
        inner = getattr(fn, "base_dist", None)
        if inner is None or isinstance(fn, torch.distributions.TransformedDistribution):
            return None
        fn = inner
    return fn


def inside_events(fn: Any) -> Any:
    """What is inside of ``to_event``."""
    while isinstance(fn, torch.distributions.Independent):
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


def innermost(fn: object) -> object:
    """What is inside of ``to_event``, ``mask`` and ``expand``."""
    while isinstance(fn, Independent | MaskedDistribution | ExpandedDistribution):
        fn = fn.base_dist
    return fn


def rewrap(fn: Any, new: Any) -> TorchDistribution:
    """A distribution in a gate's wrappers, instead of the gate."""
    if isinstance(fn, GateDistribution):
        inner: TorchDistribution = new
        return inner
    wrapped = rewrap(fn.base_dist, new)
    if isinstance(fn, MaskedDistribution):
        wrapped = wrapped.mask(fn._mask)
    elif isinstance(fn, torch.distributions.Independent):
        wrapped = wrapped.to_event(fn.reinterpreted_batch_ndims)
    else:
        wrapped = wrapped.expand(fn.batch_shape)
    return wrapped
