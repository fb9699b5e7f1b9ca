"""Checks of the price of open gates: none, none that matters, one that drowns the data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_l0.diagnostics.findings import Finding, Unchecked
from pyro_l0.diagnostics.pulls import Pulls
from pyro_l0.diagnostics.sites import GateSite, Training
from pyro_l0.infer.elbo.coefficients import by_site
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.elbo.terms import TERMS
from pyro_l0.infer.target.sparsity_target import SparsityTarget

__all__ = ["check_prices"]

_DROWNS = 10.0  # root mean square of the price's gradient over that of the data's
_NEVER = 1e-3  # the same for each gate, so small that no training is long enough
_MOST = 0.9  # of a site's gates; noise closes some without any price
_ENOUGH = 20.0  # draws between 0 and 1, of which at least one has a gradient if the gates are used
_FIRST = 0.2  # of the training, in which the data's gradients are those of a bad fit and fall by orders
_CALLS = 5  # steps after which a target has a price
_FIRST_STEPS = 20
_MARGIN = 3.0  # noise helps a little
_LEAST = 0.01  # of a site's data gradient; a gate with less probably was not drawn


def check_prices(training: Training) -> Iterator[Finding | Unchecked]:
    """Whether the price of open gates is in proportion to the data."""
    elbo, target, pulls = training.elbo, training.target, training.pulls
    if target is not None:
        yield from _check_multiplier(target, training.counted)
    elif elbo is not None:
        yield from _check_price(training, elbo)
    else:
        yield Unchecked("the price of open gates", "loss=L0_ELBO(...)(model, guide), or the target")
    if pulls is None:
        yield Unchecked("what pulls at the gates, data or price", "loss and batches")
        return
    if elbo is not None or target is not None:
        yield from _check_unused(training, pulls)
    if elbo is not None and target is None:
        yield from _check_balance(training, pulls)


def _check_price(training: Training, elbo: L0_ELBO) -> Iterator[Finding]:
    """Find sites whose open gates cost nothing."""
    if training.has_gate_kl and (callable(elbo.kl_scale) or float(elbo.kl_scale) != 0):
        return
    if any(term.kind == "gates" and term not in TERMS for term in elbo.objective_terms):  # the user's own
        return

    def is_free(name: str) -> bool:
        price = torch.as_tensor(by_site(elbo.lam, name)) * torch.as_tensor(by_site(elbo.group_size, name, 1.0))
        decay = torch.as_tensor(by_site(elbo.weight_decay, name)) if name in elbo.square_norm else torch.zeros(())
        return not bool((price != 0).any()) and not bool((decay != 0).any())

    free = tuple(site.name for site in training.sites if is_free(site.name))
    if free:
        is_lam = not any(bool(torch.as_tensor(by_site(elbo.lam, name)).any()) for name in free)
        yield Finding(
            "no-price",
            free,
            f"open gates cost nothing: {'lam' if is_lam else 'group_size'} is 0, there is no KL of gates and no target "
            "was given.",
            "Give L0_ELBO a lam and a group_size above 0, use objective='free_energy', or use a SparsityTarget.",
        )


def _check_multiplier(target: SparsityTarget, steps: int | None) -> Iterator[Finding]:
    """Find multipliers of a target at their limit, and a target that is not called."""
    is_silent = target.step > target.start + _CALLS and not bool(target.multiplier.any())
    is_still = target.step == 0 and steps is not None and steps > _CALLS
    if is_silent or is_still:
        yield Finding(
            "no-price",
            (),
            f"the target has counted {target.step} steps, the optimiser {steps}, and the multiplier is 0.",
            "In every step, call target.add_gradient() after loss.backward(), and target.ascend() after "
            "optimiser.step().",
        )
    saturated = torch.as_tensor(target.saturated)
    if bool(saturated.any()):
        yield Finding(
            "multiplier-at-limit",
            (),
            f"the multiplier of {int(saturated.sum())} of {saturated.numel()} budgets is at its limit at step "
            f"{target.step} of {target.steps}: the price cannot bring the network to the budget.",
            "Give the target more steps or a larger budget, and the gates the learning rate of "
            "target.optimiser_options.",
        )


def _check_unused(training: Training, pulls: Pulls) -> Iterator[Finding]:
    """Find sites for whose gates the data have no gradient at all.

    Not while another site is closed, which may cut them off, and not in the first steps, where weights may be 0.
    """
    is_young = training.steps is not None and training.steps < _FIRST_STEPS
    if is_young or not all(bool(site.is_open.any()) for site in training.sites):
        return
    unused = [
        site.name
        for site in training.sites
        if (data := pulls.data.get(site.name)) is not None
        and not bool(data.any())
        and site.interior_draws(len(data)) > _ENOUGH
    ]
    if unused:
        yield Finding(
            "gates-drift-together",
            tuple(unused),
            f"the data's gradient for these gates was 0 in each of {len(pulls.data[unused[0]])} draws: the price "
            "alone moves them, all together.",
            "Let the likelihood depend on the gates: call the network inside the model, without no_grad or detach, "
            "and do not fix its gates.",
        )


def _check_balance(training: Training, pulls: Pulls) -> Iterator[Finding]:
    """Find a price that drowns the data, and one that closes nothing."""
    found = {site.name: ratios for site in training.sites if (ratios := _balance(site, pulls)) is not None}
    drowned = {name: ratio for name, (ratio, _) in found.items() if ratio > _DROWNS}
    if drowned:
        yield Finding(
            "price-too-large",
            tuple(drowned),
            f"the price's gradient is {max(drowned.values()):.3g} times the data's, which hardly count.",
            "Lower lam, which is in nats per weight on the loss summed over the data set (the paper's lam / N is lam "
            "here), or scale the model's likelihood to the whole data set.",
        )
    weak = {
        site.name: float(found[site.name][1].max())
        for site in training.sites
        if site.name in found and _closes_nothing(training, site, float(found[site.name][1].max()))
    }
    if weak and len(weak) == len(training.sites) and not training.has_gate_kl:  # a prior's KL is not a price
        yield Finding(
            "price-too-small",
            tuple(weak),
            f"the price's gradient is at most {max(weak.values()):.2g} of the data's noise: it will close nothing.",
            "Raise lam (in nats per weight on the loss summed over the data set), or use a SparsityTarget, which finds "
            "the price.",
        )


def _balance(site: GateSite, pulls: Pulls) -> tuple[float, Tensor] | None:
    """Price over data for a site's open gates, by root mean squares; and for each gate. None if it is not known."""
    if pulls.price is None or site.name not in pulls.data or not bool(site.is_open.any()):
        return None
    here = site.is_open.cpu()
    data, price = pulls.data[site.name][:, here], pulls.price[site.name][here].abs()
    typical = data.square().mean().sqrt()
    if site.interior_draws(len(data)) < _ENOUGH or not float(typical):
        return None
    by_gate = price / data.square().mean(0).sqrt().clamp(min=_LEAST * float(typical))
    return float(price.square().mean().sqrt() / typical), by_gate


def _closes_nothing(training: Training, site: GateSite, ratio: float) -> bool:
    """Whether a price, at most so large beside the data's noise, brings no gate of a site to where it closes."""
    holding, total = site.holding, training.total_steps(site)
    if holding is not None and total and (holding.steps or 0) < _FIRST * total:
        return False
    if 0 < ratio < _NEVER:
        return True
    if float(site.is_open.float().mean()) < _MOST:  # what has closed was worth its price
        return False
    if holding is None or not total or not holding.is_normalised or not ratio or not len(site.distance):
        return False
    return _MARGIN * holding.rate * total * ratio < float(site.distance.min())
