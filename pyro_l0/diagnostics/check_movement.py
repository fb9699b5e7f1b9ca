"""Whether gates can move: what holds them, at what rate, with what decay, in what precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyro_l0.diagnostics.findings import Finding
from pyro_l0.diagnostics.gate_sites import GateSite
from pyro_l0.diagnostics.holdings import Holding, spacing
from pyro_l0.diagnostics.pulls import Pulls

__all__ = ["check_decay", "check_rate", "check_rounding", "check_trained", "total_steps"]

_PULL = 0.1  # of a step, or of the gradient; AdamW's default decay of 0.01 stays below
_DECIDED = 2.0  # from 0, on the scale of log alpha, where gates are open or closed
_SGD_MARGIN = 3.0  # gradients may grow


def check_trained(sites: Sequence[GateSite], number: int) -> Iterator[Finding]:
    """Find gates that no optimiser steps.

    Args:
        sites: all of them.
        number: of optimisers that were given; with none, only ``requires_grad`` is looked at.
    """
    frozen = [site.name for site in sites if not site.parameter.requires_grad]
    if frozen:
        yield Finding(
            "gates-not-trained",
            tuple(frozen),
            "requires_grad of their parameters is False, so that they stay where they are.",
            "Call guide.requires_grad_(True), unless these gates are meant to stay.",
        )
    if not number:
        return
    left_out = [site.name for site in sites if site.holding is None and site.name not in frozen]
    if left_out:
        yield Finding(
            "gates-not-trained",
            tuple(left_out),
            f"no parameter group of the {number} optimiser(s) given holds their parameters.",
            "Give guide.parameters() to the optimiser. A guide makes its parameters at its first call, so call it once "
            "with the model's arguments before making the optimiser; after a change of the guide's parameters (another "
            "guide, a copy, a device) make the optimiser anew.",
        )


def total_steps(holding: Holding, steps_left: int | None) -> int | None:
    """Steps taken and to come; None if the latter are not known."""
    return None if steps_left is None else steps_left + (holding.steps or 0)


def check_rate(sites: Sequence[GateSite], pulls: Pulls | None, steps_left: int | None) -> Iterator[Finding]:
    """Find a rate that brings no gate to the point where it closes, in the whole of the training.

    Where a site's start is known, the whole training counts. Otherwise it is asked in its first half alone: later a
    gate that is far from closing may have gone there.
    """
    slow, words = [], []
    for site in sites:
        holding = site.holding
        if holding is None or steps_left is None or not site.parameter.requires_grad or not bool(site.is_open.all()):
            continue
        seen = None if pulls is None else _whole(pulls, site.name)
        step = holding.longest_step(seen)
        done = holding.steps or 0
        total = done + steps_left
        closing = site.closing[site.closing.isfinite()]
        if step is None or not total or not len(closing) or (site.start is None and done > steps_left):
            continue
        start = site.location if site.start is None else torch.full_like(site.closing, site.start)
        distance = float((start - site.closing)[site.closing.isfinite()].min())
        if float((site.location - start).abs().max()) > distance / 2:  # with gradients that have become smaller since
            continue
        reach = step * total * (1.0 if holding.is_normalised else _SGD_MARGIN)
        if reach < distance:
            slow.append(site.name)
            words.append(f"{total} steps of at most {step:.2g} for a distance of {distance:.2g}")
    if slow:
        yield Finding(
            "rate-too-small",
            tuple(slow),
            f"no gate can close in this training: {words[0]}.",
            "Give the gates a parameter group of their own with a larger learning rate, in Adam about 4 times the "
            "distance over the steps; SGD needs one for its gradients' size.",
        )


def _whole(pulls: Pulls, name: str) -> Tensor | None:
    """The mean gradient of a site with its price."""
    if name not in pulls.data:
        return None
    data = pulls.data[name].mean(0)
    return data if pulls.price is None else data + pulls.price[name]


def check_decay(sites: Sequence[GateSite], pulls: Pulls | None) -> Iterator[Finding]:
    """Find a weight decay that pulls the gates' locations towards 0 as hard as the loss does."""
    found: dict[str, str] = {}
    for site in sites:
        holding = site.holding
        if holding is None or not holding.decay:
            continue
        pull = holding.decay * max(_DECIDED, float(site.location.detach().abs().median()))
        if holding.decays_apart:
            if pull > _PULL:
                found[site.name] = f"it takes {pull:.2g} of a full step"
            continue
        gradient = holding.gradient_size()
        if gradient is None and pulls is not None:
            gradient = _whole(pulls, site.name)
        size = None if gradient is None else float(gradient.square().mean().sqrt())
        if size is None or pull > _PULL * size:
            beside = "" if size is None else f" beside gradients of {size:.2g}"
            found[site.name] = f"its gradient is {pull:.2g}{beside}"
    if found:
        holding = next(site.holding for site in sites if site.name in found and site.holding is not None)
        yield Finding(
            "weight-decay-on-gates",
            tuple(found),
            f"a weight decay of {holding.decay:g} pulls their locations towards 0, where a gate is neither open nor "
            f"closed; {next(iter(found.values()))}.",
            "Put guide.parameters() in a parameter group with weight_decay=0.",
        )


def check_rounding(sites: Sequence[GateSite], pulls: Pulls | None) -> Iterator[Finding]:
    """Find locations in half precision whose neighbouring numbers are further apart than a step."""
    swallowed: list[str] = []
    words: list[str] = []
    for site in sites:
        x, holding = site.parameter, site.holding
        if x.dtype not in (torch.bfloat16, torch.float16) or holding is None:
            continue
        step = holding.longest_step(None if pulls is None else _whole(pulls, site.name))
        apart = spacing(x)
        if step is not None and bool((apart > step).float().mean() > 0.5):
            swallowed.append(site.name)
            words.append(
                f"{x.dtype} numbers are {float(apart.median()):.2g} apart there, and a step is at most {step:.2g}"
            )
    if swallowed:
        yield Finding(
            "step-below-rounding",
            tuple(swallowed),
            f"{words[0]}, so that rounding takes it back.",
            "Keep the guide in float32 (guide.float() before making the optimiser); autocast for the network is "
            "enough.",
        )
