"""The doctor: checks a training with gates and names what is wrong with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from pyro_l0.diagnostics.sites import (
    AnyOptimiser,
    GateSite,
    Loss,
    Pulls,
    Training,
    arguments_of,
    first_batches,
    gate_sites,
    measure_pulls,
    objective_of,
    untouched,
)
from pyro_l0.expect import expect
from pyro_l0.infer.elbo.coefficients import by_site
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.elbo.terms import TERMS
from pyro_l0.infer.guides.parameters import GateGuide, check_guide
from pyro_l0.infer.target.sparsity_target import SparsityTarget
from pyro_l0.nn.fixed import fix_gates


@dataclass(frozen=True)
class Finding:
    """One fault of a run with gates.

    Attributes:
        code: a stable name, such as ``"gates-not-trained"``; :func:`~pyro_l0.diagnostics.diagnose` lists all.
        sites: the gate sites concerned (for BatchNorm the layers).
        seen: what was seen, in numbers.
        remedy: what to do.
    """

    code: str
    sites: tuple[str, ...]
    seen: str
    remedy: str

    def __str__(self) -> str:
        where = f" at {', '.join(map(repr, self.sites))}" if self.sites else ""
        return f"{self.code}{where}: {self.seen}\n    {self.remedy}"


class Unchecked(NamedTuple):
    """Something that could not be checked.

    Attributes:
        what: what was not checked.
        give: the argument of ``diagnose`` that it takes.
    """

    what: str
    give: str

    def __str__(self) -> str:
        return f"{self.what}: give {self.give}"


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`~pyro_l0.diagnostics.diagnose` returns; it prints as text.

    Attributes:
        findings: the faults.
        unchecked: what was not checked, and what to give for it.
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[Unchecked, ...] = ()

    @property
    def codes(self) -> tuple[str, ...]:
        """The findings' codes in order, each once."""
        return tuple(dict.fromkeys(finding.code for finding in self.findings))

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings] or ["Nothing is wrong with what was checked."]
        if self.unchecked:
            lines += ["Not checked:", *(f"    {what}" for what in self.unchecked)]
        return "\n".join(lines)


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


Error = Callable[..., float | Tensor]
_ERROR_DRAWS = 8
_GAP_BEFORE = 0.3  # of the errors; in the first steps, healthy trainings show up to 0.25
_GAP_AT_END = 0.1
_DEVIATIONS = 3.0
_MEAN_OFF = 0.5  # standard deviations; healthy trainings stay below 0.2
_SCALE_OFF = math.log(3.0)  # and below log 1.8
_ALIVE = 1e-3  # of a layer's largest variance; below, a channel says the same of every input
_YOUNG = 50  # batches, in which running statistics get to where they belong


def check_network(
    training: Training,
    guide: GateGuide,
    network: nn.Module | None,
    error: Error | None,
    batches: Sequence[object] | None,
) -> Iterator[Finding | Unchecked]:
    """Whether the deterministic network is the one that was trained."""
    target = training.target
    if network is None or not batches:
        yield Unchecked("the statistics of BatchNorm", "network and batches")
    elif target is not None and target.start < target.step < target.settled:
        # While a budget falls, the deterministic network changes faster than running statistics follow.
        yield Unchecked("the statistics of BatchNorm", "a target whose budget holds, later in the training")
    else:
        yield from _check_statistics(network, guide.test_gates(), batches, training.steps)
    if network is None or not batches or error is None:
        yield Unchecked("the error with sampled and with deterministic gates", "network, batches and error")
    else:
        yield from _check_gap(network, guide, error, batches, training.steps_left == 0)


@torch.no_grad()
def _check_gap(
    network: nn.Module, guide: GateGuide, error: Error, batches: Sequence[object], is_end: bool
) -> Iterator[Finding]:
    """Find errors of sampled and of deterministic gates that are far apart; at the end they may differ less."""

    def errors(gates: Mapping[str, Tensor]) -> Tensor:
        fixed = fix_gates(network, gates).eval()
        return torch.tensor([float(error(fixed, *arguments_of(batch))) for batch in batches])

    fixed = float(errors(guide.test_gates()).mean())
    draws = [errors({name: gate.sample() for name, gate in guide.posterior().items()}) for _ in range(_ERROR_DRAWS)]
    sampled = torch.stack(draws).mean(1)
    apart = float(sampled.mean()) - fixed
    if abs(apart) > (_GAP_AT_END if is_end else _GAP_BEFORE) + _DEVIATIONS * float(
        sampled.std() / math.sqrt(_ERROR_DRAWS)
    ):
        more = "sampled" if apart > 0 else "deterministic"
        remedy = (
            "Sampled gates disturb the network too much: start them further open (init_active_prob), or train longer."
            if apart > 0
            else "The network was trained with gates that pruning closes: train the gates longer or at a larger rate, "
            "until they are decided, and fine-tune the network with its gates fixed."
        )
        yield Finding(
            "sampled-gap",
            (),
            f"the error is {fixed:.3g} with deterministic gates and {fixed + apart:.3g} with sampled ones; the "
            f"{more} network is worse.",
            remedy,
        )


def _check_statistics(
    network: nn.Module, gates: Mapping[str, Tensor], batches: Sequence[object], steps: int | None
) -> Iterator[Finding]:
    """Find BatchNorm layers whose running statistics are not those of the deterministic network.

    At the beginning of a training, running statistics have not reached those of any network yet.
    """
    off: dict[str, tuple[float, float]] = {}
    for name, (old, new) in _layers(network, gates, batches).items():
        variance = new.get_buffer("running_var")
        alive = variance > _ALIVE * variance.max()
        if not int(torch.as_tensor(new.num_batches_tracked)) or not bool(alive.any()):
            continue
        off_mean = old.get_buffer("running_mean") - new.get_buffer("running_mean")
        mean = float((off_mean.abs() / variance.sqrt())[alive].mean())
        scale = float(torch.log(old.get_buffer("running_var") / variance).abs()[alive].mean())
        seen = int(torch.as_tensor(old.num_batches_tracked))
        if (mean > _MEAN_OFF or scale > _SCALE_OFF) and (steps is None or max(steps, seen) >= _YOUNG):
            off[name] = mean, scale
    if off:
        mean, scale = max(off.values(), key=lambda x: max(x[0] / _MEAN_OFF, x[1] / _SCALE_OFF))
        yield Finding(
            "batch-norm-of-another-network",
            tuple(off),
            f"running means are {mean:.2g} standard deviations and running variances a factor of "
            f"{math.exp(min(scale, 50.0)):.3g} from those of the batches under the deterministic gates.",
            "Before evaluating it, run some batches in training mode through fix_gates(network, guide.test_gates()), "
            "or through the compacted network.",
        )


@torch.no_grad()
def _layers(
    network: nn.Module, gates: Mapping[str, Tensor], batches: Sequence[object]
) -> dict[str, tuple[_BatchNorm, _BatchNorm]]:
    """Each BatchNorm layer with its running statistics, and with those of batches in the deterministic network."""
    fixed = fix_gates(network, gates).eval()
    found = {
        name: (copy.deepcopy(layer), layer)
        for name, layer in fixed.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    }
    for _, layer in found.values():
        layer.reset_running_stats()
        layer.momentum = None  # the mean over batches
        layer.train()
    for batch in batches:
        inputs = arguments_of(batch)[0]
        fixed(*inputs) if isinstance(inputs, tuple | list) else fixed(inputs)
    return found


_BATCHES = 8
_DRAWS = 8


def diagnose(
    guide: GateGuide,
    optimiser: AnyOptimiser | Sequence[AnyOptimiser] | None = None,
    *,
    loss: Loss | None = None,
    batches: Iterable[object] | None = None,
    network: nn.Module | None = None,
    error: Error | None = None,
    target: SparsityTarget | None = None,
    steps_left: int | None = None,
) -> Diagnosis:
    """Check a training with gates and name what is wrong with it; at any time, and as often as you like.

    Only the guide is required; what cannot be checked without the rest is listed in
    :attr:`Diagnosis.unchecked <pyro_l0.diagnostics.doctor.Diagnosis>`. Nothing is changed: random states, gradients,
    optimisers, modes, BatchNorm's statistics and the objective's step are as before.

    ===================================  ====================================================
    ``code`` of a finding                what was seen
    ===================================  ====================================================
    ``"gates-not-trained"``              no optimiser holds them, or ``requires_grad`` is off
    ``"rate-too-small"``                 no gate can reach the point where it closes
    ``"weight-decay-on-gates"``          a weight decay pulls gates to half open
    ``"step-below-rounding"``            half precision rounds every step away
    ``"no-price"``                       open gates cost nothing
    ``"price-too-small"``                the price closes nothing
    ``"price-too-large"``                the price closes everything
    ``"multiplier-at-limit"``            a target's multiplier is at its limit
    ``"site-collapsed"``                 all gates of a site are closed
    ``"gates-drift-together"``           the data do not tell a site's gates apart
    ``"undecided-gates"``                at the end, over 5 % are between 0 and 1
    ``"sampled-gap"``                    sampled and deterministic errors differ
    ``"batch-norm-of-another-network"``  running statistics belong to other gates
    ===================================  ====================================================

    It takes about as long as ten steps on a batch, and with ``error`` on eight batches another nine evaluations.

    Args:
        guide: the gates' guide, after its first call; an AutoGate, NetworkGates or another
            :class:`~pyro_l0.infer.guides.parameters.GateGuide`.
        optimiser: the gates' optimiser, of torch or of Pyro, or a list of all optimisers.
        loss: the loss that is trained, a function of a batch. ``L0_ELBO(...)(model, guide)`` is split into data and
            price; the price of other losses cannot be checked. Give it without a wrapper for data parallelism.
        batches: batches for the loss, such as a loader; the first eight are used. A tuple or list holds the arguments.
        network: the network with the gates, to check its BatchNorm and its error. It is called with a batch's first
            entry, or with the entries of that if it is a tuple or list.
        error: takes a network whose gates are fixed and the entries of a batch, and returns an error rate.
        target: the gates' SparsityTarget, if there is one in place of a price.
        steps_left: the optimiser's steps until the end of the training, 0 at the end; a target knows them.

    Returns:
        The findings with remedies, and what could not be checked.

    Raises:
        TypeError: an argument has the wrong type, or ``batches`` is a single batch.
        ValueError: the guide has not been called, ``steps_left`` is negative, or the loss raises, as it does if it is
            not finite.

    Example:
        >>> import pyro, torch
        >>> from pyro_l0 import HardConcrete
        >>> from pyro_l0.infer import AutoGate
        >>> def model():
        ...     pyro.sample("z", HardConcrete(torch.zeros(10)).to_event(1))
        >>> guide = AutoGate(model)
        >>> _ = guide()
        >>> optimiser = torch.optim.Adam(guide.parameters(), lr=1e-3)
        >>> diagnosis = diagnose(guide, optimiser, steps_left=500)
        >>> diagnosis.codes
        ('rate-too-small',)
        >>> diagnosis.findings[0].seen
        'no gate can close in this training: 500 steps of at most 0.001 for a distance of 3.'
    """
    check_guide(guide, "a diagnosis", "posterior", "test_gates", "locations")
    if target is not None and not hasattr(target, "steps"):
        raise TypeError(f"Expected target to be a SparsityTarget, but got a value of type {type(target).__name__}.")
    if isinstance(batches, Tensor) or (isinstance(batches, tuple) and any(isinstance(x, Tensor) for x in batches)):
        raise TypeError("Expected batches to be an iterable of batches, but got a single one; put it in a list.")
    expect(Real | None, "a number", steps_left=steps_left)
    if steps_left is not None and steps_left < 0:
        raise ValueError(f"Expected steps_left of at least 0, but got {steps_left}.")
    optimisers = list(optimiser) if isinstance(optimiser, Sequence) else [] if optimiser is None else [optimiser]
    for each in optimisers:
        if not isinstance(each, Optimizer | PyroOptim):
            raise TypeError(f"Expected an optimiser of torch's or of Pyro's, but got a {type(each).__name__}.")
    if steps_left is None and target is not None:
        steps_left = max(0, target.steps - target.step)
    sites = gate_sites(guide, optimisers, target is not None)
    devices = {site.location.device for site in sites}
    some, pulls = None, None
    with untouched(guide, devices):
        if batches is not None:
            some = first_batches(batches, _BATCHES)
        if loss is not None and some:
            pulls = measure_pulls(loss, some, {site.name: site.parameter for site in sites}, _DRAWS)
    training = Training(sites, len(optimisers), objective_of(loss), target, pulls, steps_left)
    found = [*check_movement(training), *check_prices(training), *check_gates(training)]
    with untouched(guide, devices):
        found += check_network(training, guide, network, error, some)
    return Diagnosis(
        tuple(x for x in found if isinstance(x, Finding)), tuple(x for x in found if isinstance(x, Unchecked))
    )
