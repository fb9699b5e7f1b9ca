"""Checks of the gates: whether they can move, which have closed, which are undecided, which drift."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pyro_l0.diagnostics.findings import Finding, Unchecked
from pyro_l0.diagnostics.sites import GateSite, Training

__all__ = ["check_gates", "check_movement"]

_PULL = 0.1  # of a step, or of the gradient; AdamW's default decay of 0.01 stays below
_DECIDED = 2.0  # from 0, on the scale of log alpha, where gates are open or closed
_SGD_MARGIN = 3.0  # gradients may grow
_UNDECIDED = 0.05  # share of the gates
_MOVED = 1.0  # on the scale of log alpha
_TOGETHER = 0.05  # spread of a site's gates over how far they have moved
_FEWEST = 4  # gates that can be said to move together


def check_movement(training: Training) -> Iterator[Finding | Unchecked]:
    """Whether gates can move: what holds them, at what rate, with what decay, in what precision."""
    yield from _check_trained(training)
    yield from _check_decay(training)
    yield from _check_rounding(training)
    yield from _check_rate(training)
    if not training.optimisers:
        yield Unchecked("whether the gates are trained, at what rate and with what decay", "the optimiser")
    elif training.steps_left is None:
        yield Unchecked("whether the rate is enough for the steps that are left", "steps_left or the target")


def check_gates(training: Training) -> Iterator[Finding | Unchecked]:
    """What the gates themselves show: sites that have closed or drift, and undecided gates at the end."""
    yield from _check_closed(training)
    yield from _check_drift(training)
    if training.steps_left is None:
        yield Unchecked("whether gates are undecided at the end", "steps_left=0 at the end, or the target")
    elif not training.steps_left and not training.has_gate_kl:  # a posterior may be undecided
        yield from _check_undecided(training)


def _check_trained(training: Training) -> Iterator[Finding]:
    """Find gates that no optimiser steps."""
    frozen = [site.name for site in training.sites if not site.parameter.requires_grad]
    if frozen:
        yield Finding(
            "gates-not-trained",
            tuple(frozen),
            "requires_grad of their parameters is False, so that they stay where they are.",
            "Call guide.requires_grad_(True), unless these gates are meant to stay.",
        )
    left_out = [site.name for site in training.sites if site.holding is None and site.name not in frozen]
    if left_out and training.optimisers:
        yield Finding(
            "gates-not-trained",
            tuple(left_out),
            f"no parameter group of the {training.optimisers} optimiser(s) given holds their parameters.",
            "Call the guide once with the model's arguments, which makes its parameters, then give guide.parameters() "
            "to a new optimiser. Do so again for another guide, a copy, or another device.",
        )


def _check_decay(training: Training) -> Iterator[Finding]:
    """Find a weight decay that pulls the gates' locations towards 0 as hard as the loss does."""
    found: dict[str, str] = {}
    decay = 0.0
    for site in training.sites:
        holding = site.holding
        if holding is None or not holding.decay:
            continue
        pull = holding.decay * max(_DECIDED, float(site.location.abs().median()))
        gradient = holding.gradient_size()
        gradient = training.gradient(site) if gradient is None else gradient
        size = None if gradient is None else float(gradient.square().mean().sqrt())
        if holding.is_decoupled:
            words, is_strong = f"it takes {pull:.2g} of a full step", pull > _PULL
        else:
            beside = "" if size is None else f" beside gradients of {size:.2g}"
            words, is_strong = f"its gradient is {pull:.2g}{beside}", size is None or pull > _PULL * size
        if is_strong:
            found[site.name] = words
            decay = decay or holding.decay
    if found:
        yield Finding(
            "weight-decay-on-gates",
            tuple(found),
            f"a weight decay of {decay:g} pulls their locations towards 0, where a gate is half open; "
            f"{next(iter(found.values()))}.",
            "Put guide.parameters() in a parameter group with weight_decay=0.",
        )


def _check_rounding(training: Training) -> Iterator[Finding]:
    """Find locations in half precision whose neighbouring numbers are further apart than a step."""
    found: dict[str, str] = {}
    for site in training.sites:
        dtype, holding = site.parameter.dtype, site.holding
        if dtype not in (torch.bfloat16, torch.float16) or holding is None:
            continue
        step = holding.longest_step(training.gradient(site))
        spacing = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(site.location.abs().clamp(min=1e-30))))
        if step is not None and bool((spacing > step).float().mean() > 0.5):
            found[site.name] = (
                f"{dtype} numbers are {float(spacing.median()):.2g} apart there, and a step is at most {step:.2g}"
            )
    if found:
        yield Finding(
            "step-below-rounding",
            tuple(found),
            f"{next(iter(found.values()))}, so that rounding takes it back.",
            "Keep the guide in float32 (guide.float() before making the optimiser), and use autocast for the network.",
        )


def _check_rate(training: Training) -> Iterator[Finding]:
    """Find a rate at which no gate gets to where it closes, in the whole of the training."""
    slow = {site.name: words for site in training.sites if (words := _too_slow(training, site))}
    if slow:
        yield Finding(
            "rate-too-small",
            tuple(slow),
            f"no gate can close in this training: {next(iter(slow.values()))}.",
            "Give the gates their own parameter group with a larger learning rate: in Adam about 4 times the distance "
            "over the steps, in SGD one that suits their gradients.",
        )


def _too_slow(training: Training, site: GateSite) -> str:
    """In words, how far a site's gates can go and have to, if that is not enough; or nothing.

    Where a site's start is known, the whole training counts. Otherwise only its first half is checked: later, a gate
    that is far from closing may have moved there.
    """
    holding, total, can_close = site.holding, training.total_steps(site), site.closing.isfinite()
    if holding is None or training.steps_left is None or not site.parameter.requires_grad:
        return ""
    step, done = holding.longest_step(training.gradient(site)), holding.steps or 0
    if step is None or not total or not bool(site.is_open.all()) or not bool(can_close.any()):
        return ""
    if site.start is None and done > training.steps_left:
        return ""
    start = site.location if site.start is None else torch.full_like(site.closing, site.start)
    distance = float((start - site.closing)[can_close].min())
    if float((site.location - start).abs().max()) > distance / 2:  # with gradients that have become smaller since
        return ""
    if step * total * (1.0 if holding.is_normalised else _SGD_MARGIN) >= distance:
        return ""
    return f"{total} steps of at most {step:.2g} for a distance of {distance:.2g}"


def _check_closed(training: Training) -> Iterator[Finding]:
    """Find sites of several gates of which none is open.

    A closed gate that is alone at its site takes a whole branch, whose other gates may then close as well.
    """
    shut = [site for site in training.sites if not bool(site.is_open.any())]
    if shut and all(len(site.test_gate) > 1 for site in shut):
        most = max(float(site.gate.active_prob.detach().max()) for site in shut)
        yield Finding(
            "site-collapsed",
            tuple(site.name for site in shut),
            f"all {' and '.join(str(len(site.test_gate)) for site in shut)} gates are closed in the deterministic "
            f"network; P(z != 0) is at most {most:.2g}.",
            "Unless the whole site is meant to go, return to a checkpoint before it closed, and lower its price (lam, "
            "group_size) or the gates' learning rate, or train the network first.",
        )


def _check_drift(training: Training) -> Iterator[Finding]:
    """Find sites whose gates have all moved towards closing by the same distance."""
    for site in training.sites:
        if site.start is None or len(site.location) < _FEWEST or not bool(site.is_open.any()):
            continue
        moved = site.location - site.start
        mean, spread = float(moved.mean()), float(moved.std())
        if mean < -_MOVED and spread < -_TOGETHER * mean:
            yield Finding(
                "gates-drift-together",
                (site.name,),
                f"all {len(moved)} gates have moved by {mean:.2g} (spread {spread:.2g}): the data tell none apart.",
                "Check that the network's output depends on these gates, and that the likelihood is the sum over the "
                "data. If so, lower the price or the gates' learning rate.",
            )


def _check_undecided(training: Training) -> Iterator[Finding]:
    """Find many gates between 0 and 1."""
    between = {site.name: int(((site.test_gate > 0) & (site.test_gate < 1)).sum()) for site in training.sites}
    number, total = sum(between.values()), sum(len(site.test_gate) for site in training.sites)
    if number > _UNDECIDED * total:
        yield Finding(
            "undecided-gates",
            tuple(name for name, count in between.items() if count),
            f"{number} of {total} test gates ({100 * number / total:.0f} %) are between 0 and 1 at the end.",
            "Train the gates longer or at a larger learning rate, or use a target, which decides them. A gate in "
            "between costs as much as an open one.",
        )
