"""Whether the price of open gates is in proportion: none, none that matters, one that drowns the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pyro_l0.diagnostics.check_movement import total_steps
from pyro_l0.diagnostics.findings import Finding
from pyro_l0.diagnostics.gate_sites import GateSite
from pyro_l0.diagnostics.pulls import Pulls
from pyro_l0.infer.elbo.coefficients import by_site
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.elbo.terms import TERMS

__all__ = [
    "Target",
    "check_balance",
    "check_multiplier",
    "check_price",
    "check_unused",
    "has_gate_kl",
    "interior_draws",
]

_DROWNS = 10.0  # root mean square of the price's gradient over that of the data's
_NEVER = 1e-3  # the same for each gate, so small that no training is long enough
_MOST = 0.9  # of a site's gates; noise closes some without any price
_ENOUGH = 20.0  # draws between 0 and 1, of which at least one has a gradient if the gates are used
_FIRST = 0.2  # of the training, in which the data's gradients are those of a bad fit and fall by orders
_CALLS = 5  # steps after which a target has had its say
_FIRST_STEPS = 20
_MARGIN = 3.0  # noise helps a little
_LEAST = 0.01  # of a site's data gradient, below which that of a gate is taken for not having been drawn


class Target(Protocol):
    """What a diagnosis asks of a target; :class:`~pyro_l0.infer.SparsityTarget` is one."""

    @property
    def step(self) -> int:
        """Steps taken."""

    @property
    def steps(self) -> int:
        """Steps of the whole training."""

    @property
    def start(self) -> int:
        """Steps before the gates begin to move."""

    @property
    def settled(self) -> int:
        """Steps until the final budget holds."""

    @property
    def multiplier(self) -> Tensor:
        """The multiplier of each constraint, shape ``(k,)``."""

    @property
    def saturated(self) -> Tensor:
        """Which constraints' multipliers stand at their limit, shape ``(k,)``."""


def has_gate_kl(elbo: L0_ELBO) -> bool:
    """Whether an objective compares the gates with a prior."""
    return any(term.name == "kl_gate" for term in elbo.objective_terms)


def check_price(sites: Sequence[GateSite], elbo: L0_ELBO) -> Iterator[Finding]:
    """Find sites whose open gates cost nothing."""
    if has_gate_kl(elbo) and (callable(elbo.kl_scale) or float(elbo.kl_scale) != 0):
        return
    if any(term.kind == "gates" and term not in TERMS for term in elbo.objective_terms):  # the user's own
        return

    def is_free(name: str) -> bool:
        price = torch.as_tensor(by_site(elbo.lam, name)) * torch.as_tensor(by_site(elbo.group_size, name, 1.0))
        decay = torch.as_tensor(by_site(elbo.weight_decay, name)) if name in elbo.square_norm else torch.zeros(())
        return not bool((price != 0).any()) and not bool((decay != 0).any())

    free = [site for site in sites if is_free(site.name)]
    if free:
        lam = {site.name: by_site(elbo.lam, site.name) for site in free}
        cause = "lam is 0" if not any(bool(torch.as_tensor(x).any()) for x in lam.values()) else "group_size is 0"
        yield Finding(
            "no-price",
            tuple(site.name for site in free),
            f"open gates cost nothing: {cause}, there is no KL of gates and no target was given.",
            "Give L0_ELBO a lam (and a group_size that is not 0), take objective='free_energy', or use a "
            "SparsityTarget.",
        )


def check_multiplier(target: Target, steps: int | None) -> Iterator[Finding]:
    """Find multipliers of a target at their limit, and a target that is not called.

    Args:
        target: the target.
        steps: that the optimiser has taken with the gates, where they are known.
    """
    is_silent = target.step > target.start + _CALLS and not bool(target.multiplier.any())
    is_still = target.step == 0 and steps is not None and steps > _CALLS
    if is_silent or is_still:
        yield Finding(
            "no-price",
            (),
            f"the target has counted {target.step} steps, the optimiser {steps}, and the multiplier is 0.",
            "Call target.add_gradient() between loss.backward() and optimiser.step(), and target.ascend() after it, in "
            "every step.",
        )
    saturated = torch.as_tensor(target.saturated)
    if bool(saturated.any()):
        yield Finding(
            "multiplier-at-limit",
            (),
            f"the multiplier of {int(saturated.sum())} of {saturated.numel()} budgets stands at its limit at step "
            f"{target.step} of {target.steps}: the price cannot bring the network to the budget.",
            "Give the target more steps or a larger budget, and see that the gates' learning rate is that of "
            "target.optimiser_options.",
        )


def interior_draws(site: GateSite, draws: int) -> float:
    """How many draws of a site's open gates are expected to have a gradient."""
    gate = site.gate
    closed, opened = (torch.exp(x.detach()).flatten()[site.is_open] for x in (gate.log_prob_zero, gate.log_prob_one))
    return draws * float((1 - torch.maximum(closed, opened)).sum())


def check_unused(sites: Sequence[GateSite], pulls: Pulls, steps: int | None) -> Iterator[Finding]:
    """Find sites for whose gates the data have no gradient at all.

    Not while another site is closed, which may shut them off, and not in the first steps, where weights may be 0.

    Args:
        sites: all of them.
        pulls: at the gates.
        steps: of the training, where they are known.
    """
    if not all(bool(site.is_open.any()) for site in sites) or (steps is not None and steps < _FIRST_STEPS):
        return
    unused = [
        site
        for site in sites
        if site.name in pulls.data
        and not bool(pulls.data[site.name].any())
        and interior_draws(site, len(pulls.data[site.name])) > _ENOUGH
    ]
    if unused:
        yield Finding(
            "gates-drift-together",
            tuple(site.name for site in unused),
            f"the data's gradient for these gates was 0 in each of {len(pulls.data[unused[0].name])} draws: the price "
            "alone moves them, all together.",
            "Use the gates' values in what the likelihood is computed from: call the network inside of the model, "
            "without no_grad or detach, and do not fix its gates.",
        )


def balance(site: GateSite, pulls: Pulls) -> tuple[float, Tensor] | None:
    """Price over data for a site's open gates, by root mean squares; and gate by gate. None if it can't be told."""
    if pulls.price is None or site.name not in pulls.data or not bool(site.is_open.any()):
        return None
    here = site.is_open.cpu()
    data, price = pulls.data[site.name][:, here], pulls.price[site.name][here].abs()
    if interior_draws(site, len(data)) < _ENOUGH:
        return None
    typical = data.square().mean().sqrt()
    if not float(typical):
        return None
    by_gate = price / data.square().mean(0).sqrt().clamp(min=_LEAST * float(typical))
    return float(price.square().mean().sqrt() / typical), by_gate


def check_balance(sites: Sequence[GateSite], pulls: Pulls, steps_left: int | None, is_price: bool) -> Iterator[Finding]:
    """Find a price that drowns the data, and one that closes nothing.

    Args:
        sites: all of them.
        pulls: with the price's gradient.
        steps_left: of the training, where it is known.
        is_price: whether it is a price, for which few open gates are better, and not a prior's KL.
    """
    found = {site.name: (site, ratio) for site in sites if (ratio := balance(site, pulls)) is not None}
    drowned = {name: ratio for name, (_, (ratio, _)) in found.items() if ratio > _DROWNS}
    if drowned:
        yield Finding(
            "price-too-large",
            tuple(drowned),
            f"the price's gradient is {max(drowned.values()):.3g} times the data's: the gates close whatever the data "
            "say.",
            "Lower lam (it is in nats per weight on the loss summed over the data set; the paper's lam / N on a mean "
            "loss is lam here), or see that the model's likelihood is scaled to the whole data set.",
        )
    if not is_price or not found:
        return
    weak = {name: ratio for name, (site, (_, ratio)) in found.items() if _closes_nothing(site, ratio, steps_left)}
    if len(weak) == len(sites):
        yield Finding(
            "price-too-small",
            tuple(weak),
            f"the price's gradient is at most {max(float(x.max()) for x in weak.values()):.2g} of the data's noise: "
            "nothing will close on its account.",
            "Raise lam (in nats per weight on the loss summed over the data set), or use a SparsityTarget, which finds "
            "the price.",
        )


def _closes_nothing(site: GateSite, ratio: Tensor, steps_left: int | None) -> bool:
    """Whether the price, among the data's noise, brings no gate of a site to where it closes."""
    most = float(ratio.max())
    holding = site.holding
    total = None if holding is None else total_steps(holding, steps_left)
    if holding is not None and total and (holding.steps or 0) < _FIRST * total:
        return False
    if 0 < most < _NEVER:
        return True
    if float(site.is_open.float().mean()) < _MOST:  # what has closed was worth its price
        return False
    if holding is None or not total or not holding.is_normalised:
        return False
    distance = site.distance[site.distance.isfinite()]
    return most > 0 and bool(len(distance)) and _MARGIN * holding.rate * total * most < float(distance.min())
