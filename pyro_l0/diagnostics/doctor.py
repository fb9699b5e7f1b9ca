"""The doctor: checks a training with gates and names what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    Contributions,
    GateSite,
    Loss,
    arguments_of,
    first_batches,
    gate_sites,
    measure_contributions,
    objective_of,
    untouched,
)
from pyro_l0.expect import expect
from pyro_l0.infer.control.sparsity_target import SparsityTarget
from pyro_l0.infer.elbo.coefficients import by_site
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.elbo.terms import TERMS
from pyro_l0.infer.guides.parameters import GateGuide, check_guide
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


Error = Callable[..., float | Tensor]


@dataclass(frozen=True)
class Training:
    """A training at one step; what is None is not known."""

    guide: GateGuide
    sites: Sequence[GateSite]
    optimisers: int  # how many were given
    elbo: L0_ELBO | None
    target: SparsityTarget | None
    steps_left: int | None  # of the optimiser until the end
    contributions: Contributions | None
    network: nn.Module | None
    error: Error | None
    batches: Sequence[object]

    @property
    def steps(self) -> int | None:
        """Steps taken, by what the gates' optimiser or the objective counts."""
        counted = [site.group.steps for site in self.sites if site.group is not None]
        known = [steps for steps in counted if steps is not None]
        return max(known) if known else None if self.elbo is None else self.elbo.step

    @property
    def total(self) -> int:
        """Steps taken and to come; 0 if that is not known."""
        return 0 if self.steps_left is None else self.steps_left + (self.steps or 0)

    @property
    def has_gate_kl(self) -> bool:
        """Whether the objective compares the gates with a prior."""
        return self.elbo is not None and any(term.name == "kl_gate" for term in self.elbo.objective_terms)

    @property
    def is_falling(self) -> bool:
        """Whether a budget falls, so that the deterministic network changes faster than running statistics follow."""
        return self.target is not None and self.target.start < self.target.step < self.target.reached

    def gradient(self, site: GateSite) -> Tensor | None:
        """The gradient of a site's locations: the optimiser's, or the mean that was measured."""
        found = self.contributions
        if site.parameter.grad is not None:
            return site.parameter.grad.detach().flatten().float()
        if found is None or site.name not in found.data:
            return None
        return found.data[site.name].mean(0) + (0.0 if found.price is None else found.price[site.name])


Seen = Iterable[tuple[str, str]]  # sites, or "" for none, and what was seen there
CHECKS: dict[str, tuple[Callable[[Training], Seen], str]] = {}


def finds(code: str, remedy: str) -> Callable[[Callable[[Training], Seen]], Callable[[Training], Seen]]:
    """Register a check under its code; the remedy is the sentence on what to do that its findings get."""

    def add(check: Callable[[Training], Seen]) -> Callable[[Training], Seen]:
        CHECKS[code] = check, remedy
        return check

    return add


def findings_on(training: Training) -> Iterator[Finding]:
    """A finding for each code whose check sees something, in the words for the first site."""
    for code, (check, remedy) in CHECKS.items():
        seen = dict(check(training))
        if seen:
            yield Finding(code, tuple(filter(None, seen)), next(iter(seen.values())), remedy)


@finds(
    "gates-not-trained",
    "Call the guide once with the model's arguments, which makes its parameters, then give guide.parameters() to a new "
    "optimiser. Do so again for another guide, a copy, or another device. guide.requires_grad_(True) unfreezes gates.",
)
def gates_not_trained(training: Training) -> Seen:
    """Gates whose parameters ask for no gradient, or are in no parameter group of the optimisers."""
    for site in training.sites:
        if not site.parameter.requires_grad:
            yield site.name, "requires_grad of their parameters is False, so that they stay where they are."
        elif training.optimisers and site.group is None:
            yield site.name, f"no parameter group of the {training.optimisers} optimiser(s) holds their parameters."


_PULL = 0.1  # of a step, or of the gradient; AdamW's default decay of 0.01 stays below
_DECIDED = 2.0  # from 0, on the scale of log alpha, where gates are open or closed


@finds("weight-decay-on-gates", "Put guide.parameters() in a parameter group with weight_decay=0.")
def weight_decay_on_gates(training: Training) -> Seen:
    """A weight decay that pulls the gates' locations towards 0 as hard as the loss does."""
    for site in training.sites:
        decay = 0.0 if site.group is None else site.group.number("weight_decay")
        pull, whole, gradient = decay * max(_DECIDED, float(site.location.abs().median())), 1.0, training.gradient(site)
        if site.group is not None and not site.group.is_decoupled:
            whole = 0.0 if gradient is None else float(gradient.square().mean().sqrt())
        if pull > _PULL * whole:
            words = f"a weight decay of {decay:g} pulls their locations towards 0, where a gate is half open, by "
            yield site.name, f"{words}{pull:.2g} where the loss pulls by {whole:.2g}."


@finds(
    "step-below-rounding",
    "Keep the guide in float32 (guide.float() before making the optimiser), and use autocast for the network.",
)
def step_below_rounding(training: Training) -> Seen:
    """Locations in half precision whose neighbouring numbers are further apart than a step."""
    for site in training.sites:
        dtype, step = site.parameter.dtype, site.group and site.group.longest_step(training.gradient(site))
        if dtype in (torch.bfloat16, torch.float16) and step is not None:
            spacing = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(site.location.abs().clamp(min=1e-30))))
            if bool((spacing > step).float().mean() > 0.5):
                words = f"{dtype} numbers are {float(spacing.median()):.2g} apart there"
                yield site.name, f"{words}, and a step is at most {step:.2g}, so that rounding takes it back."


_SGD_MARGIN = 3.0  # gradients may grow


@finds(
    "rate-too-small",
    "Give the gates their own parameter group with a larger learning rate: in Adam about 4 times the distance over the "
    "steps, in SGD one that suits their gradients.",
)
def rate_too_small(training: Training) -> Seen:
    """A rate at which no gate gets to where it closes, in the whole of the training.

    Where a site's start is not known, only the first half of a training is checked: later, a gate that is far from
    closing may have moved there.
    """
    for site in training.sites:
        step = site.group and site.group.longest_step(training.gradient(site))
        can_close, is_late = site.closing.isfinite(), site.start is None and 2 * (training.steps or 0) > training.total
        is_closing = is_late or not bool(site.is_open.all()) or not bool(can_close.any())
        if site.group is None or step is None or is_closing or not training.total or not site.parameter.requires_grad:
            continue
        start = site.location if site.start is None else torch.full_like(site.closing, site.start)
        distance, moved = float((start - site.closing)[can_close].min()), float((site.location - start).abs().max())
        reach = step * training.total * (1.0 if site.group.is_normalised else _SGD_MARGIN)
        if reach < distance and moved <= distance / 2:  # gradients may have become smaller since
            words = f"{training.total} steps of at most {step:.2g} for a distance of {distance:.2g}."
            yield site.name, f"no gate can close in this training: {words}"


_CALLS = 5  # steps after which a target has a price


@finds(
    "no-price",
    "Give L0_ELBO a lam and a group_size above 0, use objective='free_energy', or use a SparsityTarget: in every step, "
    "call target.add_gradient() after loss.backward(), and target.ascend() after optimiser.step().",
)
def no_price(training: Training) -> Seen:
    """Open gates that cost nothing, or a target that is not called."""
    target, elbo, steps = training.target, training.elbo, training.steps
    if target is not None:
        if not bool(target.multiplier.any()) and (
            target.step > target.start + _CALLS or (target.step == 0 and (steps or 0) > _CALLS)
        ):
            yield "", f"the target has counted {target.step} steps, the training {steps}, and the multiplier is 0."
        return
    if elbo is None or any(term.kind == "gates" and term not in TERMS for term in elbo.objective_terms):
        return  # the price is not known, or the user's own
    if training.has_gate_kl and (callable(elbo.kl_scale) or float(elbo.kl_scale) != 0):
        return
    for site in training.sites:
        lam, size = by_site(elbo.lam, site.name), by_site(elbo.group_size, site.name, 1.0)
        decay = by_site(elbo.weight_decay, site.name) if site.name in elbo.square_norm else 0.0
        if not any(bool(torch.as_tensor(x).any()) for x in (lam * torch.as_tensor(size), decay)):
            zero = "group_size" if bool(torch.as_tensor(lam).any()) else "lam"
            yield site.name, f"open gates cost nothing: {zero} is 0, there is no KL of gates and no target was given."


@finds(
    "multiplier-at-limit",
    "Give the target more steps or a larger budget, and the gates the learning rate of target.optimiser_options.",
)
def multiplier_at_limit(training: Training) -> Seen:
    """Budgets whose multiplier is the largest that a target takes, above the loss's scale."""
    target = training.target
    saturated = torch.as_tensor(False if target is None else target.saturated)
    if target is not None and bool(saturated.any()):
        words = f"the multiplier of {int(saturated.sum())} of {saturated.numel()} budgets is at its limit at step "
        yield "", f"{words}{target.step} of {target.steps}: the price cannot bring the network to the budget."


_ENOUGH = 20.0  # draws between 0 and 1, of which at least one has a gradient if the gates are used
_DROWNS = 10.0  # root mean square of the price's gradient over that of the data's
_LEAST = 0.01  # of a site's data gradient; a gate with less probably was not drawn
_TOO_WEAK = 1e-3  # price over noise, so small that no training is long enough
_MOST = 0.9  # of a site's gates; noise closes some without any price
_FIRST = 0.2  # of the training, in which the data's gradients are those of a bad fit and fall by orders
_MARGIN = 3.0  # noise helps a little


def _balances(training: Training) -> Iterator[tuple[GateSite, float, float]]:
    """The price over the data by root mean squares of a site's open gates, and the largest of a gate, if known."""
    found = training.contributions
    if found is None or found.price is None or training.target is not None:
        return
    for site in training.sites:
        here, data = site.is_open.cpu(), found.data.get(site.name, torch.zeros(1, len(site.test_gate)))
        open_data = data[:, here]
        typical = float(open_data.square().mean().sqrt())
        if not typical > 0 or site.interior_draws(len(data)) < _ENOUGH:  # NaN where no gate is open
            continue
        price = found.price[site.name][here].abs()
        by_gate = price / open_data.square().mean(0).sqrt().clamp(min=_LEAST * typical)
        yield site, float(price.square().mean().sqrt()) / typical, float(by_gate.max())


@finds(
    "price-too-large",
    "Lower lam, which is in nats per weight on the loss summed over the data set (the paper's lam / N is lam here), or "
    "scale the model's likelihood to the whole data set.",
)
def price_too_large(training: Training) -> Seen:
    """Sites where the price's gradient is over ten times the data's."""
    for site, ratio, _ in _balances(training):
        if ratio > _DROWNS:
            yield site.name, f"the price's gradient is {ratio:.3g} times the data's, which hardly count."


@finds(
    "price-too-small",
    "Raise lam (in nats per weight on the loss summed over the data set), or use a SparsityTarget, which finds it.",
)
def price_too_small(training: Training) -> Seen:
    """A price that closes nothing at any site; a prior's KL is not a price."""
    weak = {site.name: most for site, _, most in _balances(training) if _closes_nothing(training, site, most)}
    if len(weak) == len(training.sites) and not training.has_gate_kl:
        for name, most in weak.items():
            yield name, f"the price's gradient is at most {most:.2g} of the data's noise: it will close nothing."


def _closes_nothing(training: Training, site: GateSite, ratio: float) -> bool:
    """Whether a price, at most so large beside the data's noise, brings no gate of a site to where it closes."""
    if site.group is not None and (training.steps or 0) < _FIRST * training.total:
        return False
    if 0 < ratio < _TOO_WEAK:
        return True
    distance = (site.location - site.closing)[site.is_open & site.closing.isfinite()]
    has_closed = float(site.is_open.float().mean()) < _MOST  # what was worth its price
    if has_closed or site.group is None or not site.group.is_normalised or not ratio or not len(distance):
        return False
    return bool(training.total) and _MARGIN * site.group.rate * training.total * ratio < float(distance.min())


@finds(
    "site-collapsed",
    "Unless the whole site is meant to go, return to a checkpoint before it closed, and lower its price (lam, "
    "group_size) or the gates' learning rate, or train the network first.",
)
def site_collapsed(training: Training) -> Seen:
    """Sites of several gates of which none is open.

    A closed gate that is alone at its site takes a whole branch, whose other gates may then close as well.
    """
    shut = [site for site in training.sites if not bool(site.is_open.any())]
    for site in shut if all(len(site.test_gate) > 1 for site in shut) else ():
        most = float(site.gate.active_prob.detach().max())
        words = f"all {len(site.test_gate)} gates are closed in the deterministic network"
        yield site.name, f"{words}; P(z != 0) is at most {most:.2g}."


_FIRST_STEPS = 20  # in which weights may be 0
_MOVED = 1.0  # on the scale of log alpha
_TOGETHER = 0.05  # spread of a site's gates over how far they have moved
_FEWEST = 4  # gates that can be said to move together


@finds(
    "gates-drift-together",
    "Let the likelihood, summed over the data, depend on the gates: call the network inside the model, without no_grad "
    "or detach, and do not fix its gates. If it does, lower the price or the gates' learning rate.",
)
def gates_drift_together(training: Training) -> Seen:
    """Sites for whose gates the data have no gradient, or whose gates have all moved down by the same distance."""
    is_priced = training.elbo is not None or training.target is not None
    is_young = training.steps is not None and training.steps < _FIRST_STEPS
    # A closed site may cut others off.
    is_known = is_priced and not is_young and all(bool(site.is_open.any()) for site in training.sites)
    data = training.contributions.data if training.contributions is not None and is_known else {}
    for site in training.sites:
        here = data.get(site.name)
        moved = site.location - (site.location if site.start is None else site.start)
        mean, spread = float(moved.mean()), float(moved.std(correction=0))
        if here is not None and not bool(here.any()) and site.interior_draws(len(here)) > _ENOUGH:
            words = f"the data's gradient for these gates was 0 in each of {len(here)} draws"
            yield site.name, f"{words}: the price alone moves them, all together."
        elif len(moved) >= _FEWEST and bool(site.is_open.any()) and mean < -_MOVED and spread < -_TOGETHER * mean:
            words = f"all {len(moved)} gates have moved by {mean:.2g} (spread {spread:.2g})"
            yield site.name, f"{words}: the data tell none apart."


_UNDECIDED = 0.05  # share of the gates


@finds(
    "undecided-gates",
    "Train the gates longer or at a larger learning rate; a target decides them. A gate in between costs as much as an "
    "open one.",
)
def undecided_gates(training: Training) -> Seen:
    """Many gates between 0 and 1 at the end; a posterior may have them."""
    between = {site.name: int(((site.test_gate > 0) & (site.test_gate < 1)).sum()) for site in training.sites}
    number, total = sum(between.values()), sum(len(site.test_gate) for site in training.sites)
    if training.steps_left == 0 and not training.has_gate_kl and number > _UNDECIDED * total:
        words = f"{number} of {total} test gates ({number / total:.0%}) are between 0 and 1 at the end."
        yield from ((name, words) for name, count in between.items() if count)


_MEAN_OFF = 0.5  # standard deviations; healthy trainings stay below 0.2
_SCALE_OFF = math.log(3.0)  # and below log 1.8
_ALIVE = 1e-3  # of a layer's largest variance; below, a channel says the same of every input
_YOUNG = 50  # batches, in which running statistics get to where they belong


@finds(
    "batch-norm-of-another-network",
    "Before evaluating it, run some batches in training mode through fix_gates(network, guide.test_gates()), or "
    "through the compacted network.",
)
def batch_norm_of_another_network(training: Training) -> Seen:
    """BatchNorm layers whose running statistics are not those of the deterministic network.

    At the beginning of a training, running statistics have not reached those of any network yet.
    """
    if training.network is None or not training.batches or training.is_falling:
        return
    fixed = fix_gates(training.network, training.guide.test_gates()).eval()
    layers = {name: x for name, x in fixed.named_modules() if isinstance(x, _BatchNorm) and x.running_mean is not None}
    before = {name: _statistics(layer) for name, layer in layers.items()}
    for layer in layers.values():
        layer.reset_running_stats()
        layer.momentum = None  # the mean over batches
        layer.train()
    with torch.no_grad():
        for batch in training.batches:
            inputs = arguments_of(batch)[0]
            fixed(*inputs) if isinstance(inputs, tuple | list) else fixed(inputs)
    for name, layer in layers.items():
        (old_mean, old_variance, seen), (new_mean, variance, renewed) = before[name], _statistics(layer)
        alive = variance > _ALIVE * variance.max()
        is_young = training.steps is not None and max(training.steps, seen) < _YOUNG
        if not renewed or is_young or not bool(alive.any()):
            continue
        mean = float(((old_mean - new_mean).abs() / variance.sqrt())[alive].mean())
        scale = float(torch.log(old_variance / variance).abs()[alive].mean())
        if mean > _MEAN_OFF or scale > _SCALE_OFF:
            words = f"running means are {mean:.2g} standard deviations and running variances a factor of "
            words += f"{math.exp(min(scale, 50.0)):.3g} from those of the batches under the deterministic gates."
            yield name, words


def _statistics(layer: nn.Module) -> tuple[Tensor, Tensor, int]:
    """The running mean and variance of a BatchNorm layer, and how many batches they are of."""
    mean, variance = (layer.get_buffer(name).clone() for name in ("running_mean", "running_var"))
    return mean, variance, int(layer.get_buffer("num_batches_tracked"))


_ERROR_DRAWS = 8
_GAP_BEFORE = 0.3  # of the errors; in the first steps, healthy trainings show up to 0.25
_GAP_AT_END = 0.1
_DEVIATIONS = 3.0


@finds(
    "sampled-gap",
    "If sampled gates disturb the network, start them further open (init_active_prob), or train longer. If pruning "
    "closes what the network was trained with, train the gates longer or at a larger rate, until they are decided, and "
    "fine-tune the network with its gates fixed.",
)
def sampled_gap(training: Training) -> Seen:
    """Errors of sampled and of deterministic gates that are far apart; at the end they may differ less."""
    network, error, guide = training.network, training.error, training.guide
    if network is None or not training.batches or error is None:
        return
    with torch.no_grad():
        gates = [guide.test_gates()]
        gates += [{name: gate.sample() for name, gate in guide.posterior().items()} for _ in range(_ERROR_DRAWS)]
        networks = (fix_gates(network, values).eval() for values in gates)
        batches = [arguments_of(batch) for batch in training.batches]
        errors = torch.tensor([[float(error(fixed, *batch)) for batch in batches] for fixed in networks]).mean(1)
    fixed, sampled = float(errors[0]), float(errors[1:].mean())
    noise = float(errors[1:].std() / math.sqrt(_ERROR_DRAWS))
    if abs(sampled - fixed) > (_GAP_AT_END if training.steps_left == 0 else _GAP_BEFORE) + _DEVIATIONS * noise:
        worse = "sampled" if sampled > fixed else "deterministic"
        words = f"the error is {fixed:.3g} with deterministic gates and {sampled:.3g} with sampled ones"
        yield "", f"{words}; the {worse} network is worse."


def not_checked(training: Training) -> tuple[Unchecked, ...]:
    """What could not be checked with what was given, and which argument would let it be."""
    x, statistics = training, "the statistics of BatchNorm"
    has_network, has_end, has_price = x.network is not None and x.batches, x.steps_left is not None, x.elbo or x.target
    table = (
        (not x.optimisers, "whether the gates are trained, at what rate and with what decay", "the optimiser"),
        (x.optimisers and not has_end, "whether the rate is enough for what is left", "steps_left or the target"),
        (not has_price, "the price of open gates", "loss=L0_ELBO(...)(model, guide), or the target"),
        (x.contributions is None, "what contributes to the gates' gradients, data or price", "loss and batches"),
        (not has_end, "whether gates are undecided at the end", "steps_left=0 at the end, or the target"),
        (not has_network, statistics, "network and batches"),
        (has_network and x.is_falling, statistics, "a target whose budget holds, later in the training"),
        (not has_network or x.error is None, "errors of sampled and fixed gates", "network, batches and error"),
    )
    return tuple(Unchecked(what, give) for is_missing, what, give in table if is_missing)


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
    :attr:`Diagnosis.unchecked <pyro_l0.diagnostics.Diagnosis>`. Nothing is changed: random states, gradients,
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
            :class:`~pyro_l0.infer.GateGuide`.
        optimiser: the gates' optimiser, of torch or of Pyro, or a list of all optimisers.
        loss: the loss that is trained, a function of a batch. ``L0_ELBO(...)(model, guide)`` is split into data and
            price; the price of other losses cannot be checked. Give it without a wrapper for data parallelism.
        batches: batches for the loss, such as a loader; the first eight are used. A tuple or list holds the arguments.
        network: the network with the gates, to check its BatchNorm and its error. It is called with a batch's first
            entry, or with the entries of that if it is a tuple or list.
        error: takes a network whose gates are fixed and the entries of a batch, and returns an error rate.
        target: the gates' SparsityTarget, if there is one instead of a price.
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
    expect(SparsityTarget | None, "a SparsityTarget", target=target)
    if isinstance(batches, Tensor) or (isinstance(batches, tuple) and any(isinstance(x, Tensor) for x in batches)):
        raise TypeError("Expected batches to be an iterable of batches, but got a single one; put it in a list.")
    expect(Real | None, "a number", steps_left=steps_left)
    if steps_left is not None and steps_left < 0:
        raise ValueError(f"Expected steps_left of at least 0, but got {steps_left}.")
    optimisers = list(optimiser) if isinstance(optimiser, Sequence) else [] if optimiser is None else [optimiser]
    for each in optimisers:
        expect(Optimizer | PyroOptim, "one of torch's or of Pyro's", optimiser=each)
    if steps_left is None and target is not None:
        steps_left = max(0, target.steps - target.step)
    with untouched():
        sites = gate_sites(guide, optimisers, target is not None)
        some = [] if batches is None else first_batches(batches, _BATCHES)
        parameters = {site.name: site.parameter for site in sites}
        found = measure_contributions(loss, some, parameters, _DRAWS) if loss is not None and some else None
        elbo = objective_of(loss)
        training = Training(guide, sites, len(optimisers), elbo, target, steps_left, found, network, error, some)
        findings = tuple(findings_on(training))
    return Diagnosis(findings, not_checked(training))
