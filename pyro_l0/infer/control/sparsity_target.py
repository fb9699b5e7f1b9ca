"""Sparsity as a constraint: the deterministic network keeps to a budget, without a setting to tune."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints, transform_to

from pyro_l0.distributions.gate import GateDistribution, concatenate
from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.control.budget import Budget, Budgets, Cost, gates_within
from pyro_l0.infer.guides.parameters import GateGuide, check_guide


@dataclass(frozen=True)
class TargetReport:
    """The progress of a :class:`~pyro_l0.infer.SparsityTarget`, from its ``report()``; it prints as text.

    Attributes:
        step: steps taken.
        steps: number of steps with gates.
        fraction: by constraint, the cost of the deterministic network as a fraction of the full one's.
        budget: by constraint, the largest fraction at the end.
        undecided: the share of gates whose test gate is neither 0 nor 1.
        multiplier: by constraint, nats per unit of cost, such as per multiply-add.
        at_minimum: sites with no more open gates than their minimum, which close after all others.
        open: by site, the numbers of open gates and of all gates.
    """

    step: int
    steps: int
    fraction: Mapping[str, float]
    budget: Mapping[str, float]
    undecided: float
    multiplier: Mapping[str, float]
    at_minimum: tuple[str, ...]
    open: Mapping[str, tuple[int, int]]

    @property
    def of_budget(self) -> float:
        """The largest share of a budget that is used; above 1 if a budget is not met."""
        return max(self.fraction[name] / self.budget[name] for name in self.budget)

    def __str__(self) -> str:
        lines = [f"step {self.step} of {self.steps}, {self.undecided:.1%} of the gates undecided"]
        for name, budget in self.budget.items():
            lines.append(
                f"{name}: {self.fraction[name]:.4f} of the full network, budget {budget:.4g}, "
                f"{self.multiplier[name]:.3g} nats per unit of cost"
            )
        width = max((len(site) for site in self.open), default=0)
        for site, (number, of) in self.open.items():
            minimum = ", at its minimum" if site in self.at_minimum else ""
            lines.append(f"{site.ljust(width)}  {number} of {of} gates open{minimum}")
        return "\n".join(lines)


_LEAST_STEPS = 10
_CHECKS = 100
# How far a gate may go while the budget falls, in distances from where it starts to where it closes: so far at least if
# all of its gradients have one sign, and so far if they have none, when Adam's steps add up like a random walk's.
LEAST_DISTANCE, _WALK = 4.0, 1 / 6
# Of the steps with gates: what passes before the first gate moves, and of the rest, what passes until the budget holds.
_WARM_UP_PRETRAINED, _WARM_UP, _FALL = 0.08 / 3, 0.8 / 3, 0.8


class BudgetSchedule:
    """Phases of a training with gates: they wait until ``start``, the budget falls, it holds from ``reached`` on."""

    def __init__(self, steps: int, pretrained: bool) -> None:
        expect_count(_LEAST_STEPS, steps=steps)
        wait = int((_WARM_UP_PRETRAINED if pretrained else _WARM_UP) * steps)
        self.steps = steps
        self.start = max(wait, min(20, int(steps / 7.5)))
        rest = steps - self.start
        self.reached = self.start + int(_FALL * rest)
        self.interval = max(1, round(rest / _CHECKS))

    @property
    def distance(self) -> float:
        """How far a gate can go while the budget falls; the more steps, the weaker a force that closes it.

        In proportion to the root of the number of steps, gates go by the mean of their gradients, and what is noise
        moves them equally far in runs of any length.
        """
        return max(LEAST_DISTANCE, _WALK * math.sqrt(self.reached - self.start))

    def rate(self, unit: float) -> float:
        """The gates' step size under Adam, for the distance from where they start to where they close."""
        return self.distance * unit / (self.reached - self.start)

    def is_check(self, step: int) -> bool:
        """Whether the deterministic network is checked after so many steps."""
        return step == self.steps or (self.start <= step < self.steps and (step - self.start) % self.interval == 0)

    def budget(self, step: int, final: Tensor) -> Tensor:
        """What holds until the check after the one at a step: from 1 to the final budget, by a cubic curve."""
        done = min(1.0, max(0.0, (step + self.interval - self.start) / (self.reached - self.start)))
        return final + (1 - final) * (1 - done) ** 3


# In units of the logit of P(z != 0). Of a hard concrete, log alpha between -6 and 6, whose test gate closes at -log 11.
HIGHEST, LOWEST = math.log(11) + 6, math.log(11) - 6
OPENED, CLOSED = 1.0, -1.0  # of a gate that a correction opens or closes
# Adam's first step moves all gates alike, by its rate or, behind steps without gradients or on a schedule, by less.
_ALIKE, _LEAST_PART, _MOST_PART = 2.0, 0.05, 4.0
_RANGE = 30.0  # of the search, on the real line on which locations are learned
_HALVINGS = 60


class GatePositions:
    r"""The locations of a guide's gates, side by side and in one unit.

    A position is 0 where the test gate closes and positive where it is open; near there its unit is that of the logit
    of P(z != 0), whatever the family. For a hard concrete it is :math:`\log \alpha - \log(-\gamma / \zeta)`.
    The guide has been called before.
    """

    def __init__(self, guide: GateGuide) -> None:
        self._guide = guide
        self._cached: dict[str, tuple[Tensor, Tensor]] = {}  # one number for a site, or one for each gate
        for (site, gate), location in zip(guide.posterior().items(), guide.locations(), strict=True):
            name, constraint = next(iter(gate.learned.items()))
            now = transform_to(constraint)(location.detach())
            if now.shape != getattr(gate, name).shape or not torch.allclose(now, getattr(gate, name)):
                raise ValueError(
                    f"Expected guide.locations() to hold {name} of gate site {site!r} on the real line, as "
                    f"transform_to({constraint}) takes it, but got another tensor."
                )

    @torch.no_grad()
    def read(self) -> Tensor:
        """The positions of all gates, site after site in the guide's order, shape ``(n,)``."""
        scales = self._scales()
        found = [
            ((location.float() - closing) * slope).flatten()
            for location, (closing, slope) in zip(self._guide.locations(), scales.values(), strict=True)
        ]
        return torch.cat(found) if found else torch.zeros(0)

    def follow(self) -> None:
        """Forget the closing points of gates with further parameters, which may have changed."""
        self._cached = {site: scale for site, scale in self._cached.items() if not scale[0].dim()}

    @torch.no_grad()
    def slopes(self) -> Tensor:
        """Derivatives of P(z != 0) by the locations, in the order of :meth:`read`; shape ``(n,)``."""
        gates = list(self._guide.posterior().values())
        joint = concatenate(gates)
        if joint is not None and next(iter(joint.learned.values())) is constraints.real:
            return joint.active_slope.float()
        found = zip(gates, self._guide.locations(), strict=True)
        return torch.cat([(gate.active_slope * _stretching(gate, at)).flatten().float() for gate, at in found])

    @torch.no_grad()
    def write(self, positions: Tensor) -> None:
        """Put the gates at positions, in the order of :meth:`read`; shape ``(n,)``."""
        start = 0
        for location, (closing, slope) in zip(self._guide.locations(), self._scales().values(), strict=True):
            end = start + location.numel()
            location.copy_(positions[start:end].view(location.shape) / slope + closing)
            start = end

    @torch.no_grad()
    def open_all(self, active_prob: float) -> float:
        """Give every gate a P(z != 0), or the nearest that :data:`HIGHEST` allows.

        Returns the largest distance of a location from where its gate closes, in the location's own unit.
        """
        distance = 0.0
        scales = self._scales()
        for (site, gate), location in zip(self._guide.posterior().items(), self._guide.locations(), strict=True):
            closing, slope = scales[site]
            wanted = _search(gate, lambda at: at.active_prob >= active_prob)
            opened = torch.minimum(wanted, closing + HIGHEST / slope).to(location)
            location.copy_(opened)
            distance = max(distance, float((opened - closing).max()))
        return distance

    def _scales(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """By site, the locations at which gates close, and the slope of the logit of P(z != 0) there."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for (site, gate), location in zip(self._guide.posterior().items(), self._guide.locations(), strict=True):
            scale = self._cached.get(site)
            is_one = len(gate.learned) == 1 and not any(isinstance(x, Tensor) for x in gate.fixed_options.values())
            if scale is None or scale[0].device != location.device or scale[0].shape not in ((), location.shape):
                scale = _scale(gate)
                if is_one:  # nothing but the location differs from gate to gate
                    scale = (scale[0].flatten()[0], scale[1].flatten()[0])
                self._cached[site] = scale
            found[site] = scale
        return found


def closing_locations(gate: GateDistribution) -> Tensor:
    """Where each test gate closes, on the real line on which locations are learned; shape ``batch_shape``."""
    return _search(gate, lambda at: at.test_gate > 0)


def _scale(gate: GateDistribution) -> tuple[Tensor, Tensor]:
    """Where each gate closes, and the slope there; shape ``batch_shape``."""
    closing = closing_locations(gate)
    with torch.enable_grad():
        there = closing.double().requires_grad_()
        at = _placed(gate, there)
        (slope,) = torch.autograd.grad((at.log_active_prob - at.log_prob_zero).sum(), there)
    return closing, slope.float()


def _stretching(gate: GateDistribution, location: Tensor) -> Tensor:
    """Derivative of the first learned parameter by its value on the real line."""
    constraint = next(iter(gate.learned.values()))
    with torch.enable_grad():
        at = location.detach().requires_grad_()
        (slope,) = torch.autograd.grad(transform_to(constraint)(at).sum(), at)
    return slope


def _search(gate: GateDistribution, is_past: Callable[[GateDistribution], Tensor]) -> Tensor:
    """The lowest locations past a point, the other parameters as they are; shape ``batch_shape``."""
    low = torch.full(gate.batch_shape, -_RANGE, dtype=torch.float64, device=gate.active_prob.device)
    high = -low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        past = is_past(_placed(gate, middle))
        low, high = torch.where(past, low, middle), torch.where(past, middle, high)
    return high.float()


def _placed(gate: GateDistribution, location: Tensor) -> GateDistribution:
    """The gate in double precision with other locations, given on the real line."""
    name, constraint = next(iter(gate.learned.items()))
    exact = gate.apply_to_tensors(lambda x: x.detach().double())
    learned = {other: getattr(exact, other) for other in gate.learned}
    return exact.with_learned(**learned | {name: transform_to(constraint)(location)})


OnBudget = Callable[[float, dict[str, Tensor]], None]
_START = 0.999  # P(z != 0) at the start, or all but one gate in expectation where that is more
_BETAS, _EPS = (0.9, 0.99), 1e-15
_MEMORY = 0.98  # of the moving averages of squared gradients
_GAIN, _FAR, _MOST = 10.0, 0.1, 6.0  # of the multiplier's logarithm: speed, clipped violation, largest size
_FIRST, _MOST_AT_ONCE = -5.0, 3.0  # for gates of each example: that logarithm at the start, and what a batch adds to it
_HARDENING = 10.0  # of the logarithm of positions in the last steps: what stands at OPENED or further stays on its side
_TENSORS = ("integral", "of_loss", "of_penalty")  # of a controller, in its state


class Controller:
    """What moves gates to a budget: multipliers at the loss's scale, times e to the integral of the violations."""

    def __init__(self, integral: Tensor, fall: int) -> None:
        self.step = 0
        self._integral, self._fall = integral, fall
        self._of_loss = torch.zeros_like(integral)
        self._of_penalty = torch.zeros_like(integral)

    @property
    def multiplier(self) -> Tensor:
        """The multiplier of each constraint in nats, shape ``(k,)``; ``()`` of an ActiveTarget."""
        # Where no gate has a coefficient yet, both averages are 0.
        return torch.sqrt(self._of_loss / self._of_penalty.clamp(min=1e-30)) * torch.exp(self._integral)

    @property
    def saturated(self) -> Tensor:
        """Whether a multiplier has reached its maximum above the loss's scale, in the shape of ``multiplier``."""
        return self._integral >= _MOST

    def _take_scales(self, of_loss: Tensor, of_penalty: Tensor) -> None:
        """Average mean squares of the gradients of loss and penalty, shape ``(k,)``."""
        self._of_loss.lerp_(of_loss, 1 - _MEMORY)
        self._of_penalty.lerp_(of_penalty, 1 - _MEMORY)

    def _integrate(self, violation: Tensor, steps: int) -> None:
        """Add the logarithms of cost over budget, shape ``(k,)``, over some steps."""
        faster = _GAIN * (violation / _FAR).clamp(-1, 1) * steps / self._fall
        self._integral = (self._integral + faster).clamp(-_MOST, _MOST)

    def _move(self, device: torch.device) -> None:
        for name in _TENSORS:
            setattr(self, f"_{name}", getattr(self, f"_{name}").to(device))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, beside the state of the gates."""
        return {"step": self.step, **{name: getattr(self, f"_{name}").clone() for name in _TENSORS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a ValueError says that it has another number of constraints."""
        if state["integral"].shape != self._integral.shape:
            raise ValueError(
                f"Expected the state of {self._integral.numel()} constraints, but got {state['integral'].numel()}."
            )
        self.step = state["step"]
        for name in _TENSORS:
            setattr(self, f"_{name}", state[name].to(self._integral).clone())


class SparsityTarget(Controller):
    r"""Keeps a network within a budget of multiply-adds, weights, parameters or another cost while it trains.

    The number of steps, the number of gates and the budget determine everything else. All gates start open. In every
    step :meth:`add_gradient` adds the gradient of a penalty to the gates' gradients,

    .. math:: \mu \sum_j p_j P(z_j \neq 0), \qquad
        p_j = \frac{\partial \log E[c(z)]}{\partial P(z_j \neq 0)}, \qquad
        \mu = e^I \frac{\operatorname{rms}(\nabla_a \text{loss})}
            {\operatorname{rms}(\nabla_a \sum_j p_j P(z_j \neq 0))},

    where a are the gates' locations. So the multiplier μ has the scale of the loss, and the integral part I of its
    logarithm rises while the *deterministic* network (test gates) costs more than the current budget, and falls while
    it costs less. That budget falls from 1 to its final value along a cubic curve. A hundred times :meth:`ascend`
    checks the deterministic network and puts it onto the curve: it moves the open gates of lowest location just below
    the point where test gates close, or the closed ones of highest location just above it. In the last steps all gates
    move away from that point, so that few test gates are neither 0 nor 1. Leave prices and expected weight decay of
    gates out of the loss: they would close gates that the target opens again. Weight decay in the network's optimiser
    is fine.

    While other sites can still close gates, a site keeps three quarters of the gates that an equal rate of open gates
    at every site would leave, and at least one of several.

    Args:
        guide: the gates' guide, after its first call; an AutoGate, or another
            :class:`~pyro_l0.infer.GateGuide`. Its gates are opened.
            To resume, make the target first and load the guide's state afterwards.
        budget: largest fraction of the full network's cost, in (0, 1). Several falling ones are met one after the
            other in one run, and each is handed to ``on_budget``. A dict gives a fraction for each of several costs by
            name or, without a cost, the largest fraction of open gates by gate site.
        cost: differentiable cost of given gates by site (P(z != 0) or 0 and 1), of shape ``()``, such as
            :meth:`NetworkCost.macs <pyro_l0.nn.NetworkCost.macs>`; a dict of several for budgets by their names.
        steps: number of optimiser steps with gates, at least 10; give some hundreds for the best network. Further steps
            leave the gates as they are.
        pretrained: whether the network was trained before. If not, it learns for a quarter of the steps first.
        at_least: by gate site, how many of its gates never close; all of them if the site has fewer.
        multiple_of: by gate site, a number: the open gates are a multiple of it, or all of the site's.
        on_budget: is called with a budget and the deterministic gates by site when this budget is met: for the last
            one at the last step, for intermediate ones right after the gates have changed.

    Attributes:
        steps: as given.
        start: steps before the gates begin to move.
        reached: steps until the final budget is reached.
        step: steps taken.
        budget: final budgets, shape ``(k,)`` for k constraints.
        total: costs of the full network, shape ``(k,)``.
        multiplier: :math:`\mu` in nats, shape ``(k,)``.
        gate_learning_rate: the gates' learning rate under Adam: large enough to close a gate four times while the
            budget falls, and more often in runs of more than about a thousand steps.

    Raises:
        TypeError: the guide lacks a method, or ``pretrained`` is not True or False.
        ValueError: a budget is outside (0, 1), below the cost of what cannot close, or has no cost of its name; budgets
            do not fall; a site is unknown; or there are fewer than ten steps.

    Example:
        >>> import pyro
        >>> from pyro_l0 import HardConcrete
        >>> from pyro_l0.infer import L0_ELBO, AutoGate, factor
        >>> pyro.set_rng_seed(0)
        >>> def model():
        ...     z = pyro.sample("z", HardConcrete(torch.zeros(10)).to_event(1))
        ...     factor("data", (z * torch.arange(10.0)).sum())
        >>> guide = AutoGate(model)
        >>> _ = guide()
        >>> target = SparsityTarget(guide, {"z": 0.3}, steps=100)
        >>> optimiser = torch.optim.Adam(guide.locations(), **target.optimiser_options)
        >>> loss = L0_ELBO("l0")(model, guide)
        >>> for _ in range(100):
        ...     optimiser.zero_grad()
        ...     loss().backward()
        ...     target.add_gradient()
        ...     optimiser.step()
        ...     target.ascend()
        >>> target.fraction()
        tensor([0.3000])

    References:
        Gallego-Posada et al. (2022), Controlled Sparsity via Constrained Optimization, arXiv:2208.04425; Cotter et al.
        (2019), arXiv:1804.06500 (a proxy for the gradient, the true constraint for the multiplier); Zhu, Gupta (2017),
        arXiv:1710.01878 (the cubic curve).
    """

    def __init__(
        self,
        guide: GateGuide,
        budget: Budgets,
        cost: Cost | Mapping[str, Cost] | None = None,
        *,
        steps: int,
        pretrained: bool = False,
        at_least: Mapping[str, int] | None = None,
        multiple_of: Mapping[str, int] | None = None,
        on_budget: OnBudget | None = None,
    ) -> None:
        check_guide(guide, "a SparsityTarget", "posterior", "test_gates", "locations")
        expect(bool, "True or False", pretrained=pretrained)
        self.guide = guide
        gates = guide.test_gates()
        self._schedule = BudgetSchedule(steps, pretrained)
        self.steps, self.start, self.reached = steps, self._schedule.start, self._schedule.reached
        self._budget = Budget(budget, cost, gates, at_least, multiple_of)
        self._budget.check()
        # At the loss's scale for gates that can go just far enough; the further they can go, the weaker a penalty does.
        integral = torch.full_like(self._budget.final, -math.log(self._schedule.distance / LEAST_DISTANCE))
        super().__init__(integral, self.reached - self.start)
        self._positions = GatePositions(guide)
        self._on_budget = on_budget
        number = sum(gate.numel() for gate in gates.values())
        self.gate_learning_rate = self._schedule.rate(self._positions.open_all(max(_START, 1 - 1 / number)))
        self._coefficients: Tensor | None = None
        self._shares = torch.zeros(0)
        self._first = [location.detach().clone() for location in guide.locations()]
        self._before: list[Tensor] | None = []  # locations before a step; None once the optimiser has moved them

    @property
    def budget(self) -> Tensor:
        """The final budgets as fractions of the full costs, in (0, 1), shape ``(k,)``."""
        return self._budget.final

    @property
    def total(self) -> Tensor:
        """Costs of the full network, shape ``(k,)``."""
        return self._budget.total

    @property
    def optimiser_options(self) -> dict[str, float | tuple[float, float]]:
        """Keywords for the parameter group of ``guide.locations()`` in Adam or AdamW, whatever the loss's scale.

        An AutoGate over hard concretes has no other parameters. Leave those of other families out of the optimiser: at
        this rate they would move far from where gates close. An optimiser of another kind, such as SGD, is refused
        when it first moves the gates.
        """
        return {"lr": self.gate_learning_rate, "betas": _BETAS, "eps": _EPS, "weight_decay": 0.0}

    @torch.no_grad()
    def fraction(self) -> Tensor:
        """Cost of the deterministic network as a fraction of the full one's, shape ``(k,)``."""
        self._follow()
        return self._budget.fraction({site: is_open.float() for site, is_open in self._open().items()})

    @torch.no_grad()
    def report(self, gates: Mapping[str, Tensor] | None = None) -> TargetReport:
        """The progress so far; of given gates of 0 and 1, in the order of the guide's, instead of the test gates."""
        tests, names = self.guide.test_gates() if gates is None else gates, self._budget.names
        opened = {site: gate != 0 for site, gate in tests.items()}
        self._follow()
        fraction = self._budget.fraction({site: is_open.float() for site, is_open in opened.items()})
        values = torch.cat([gate.flatten() for gate in tests.values()]) if tests else torch.ones(1)
        numbers = {site: (int(is_open.sum()), is_open.numel()) for site, is_open in opened.items()}
        expected = self._budget.fraction({site: gate.active_prob for site, gate in self.guide.posterior().items()})
        per_unit = self.multiplier / (expected * self.total)
        return TargetReport(
            step=self.step,
            steps=self.steps,
            fraction=dict(zip(names, fraction.tolist(), strict=True)),
            budget=dict(zip(names, self.budget.tolist(), strict=True)),
            undecided=float(((values > 0) & (values < 1)).float().mean()),
            multiplier=dict(zip(names, per_unit.tolist(), strict=True)),
            at_minimum=tuple(site for site, (n, _) in numbers.items() if n <= self._budget.minimums[site]),
            open=numbers,
        )

    @torch.no_grad()
    def best_within(self, scores: Mapping[str, Tensor], limits: Mapping[str, float]) -> dict[str, Tensor]:
        """The gates, 0 or 1 by site, that stay open if those of the lowest scores close until budgets hold.

        Args:
            scores: of every gate by site, in the order of the guide's.
            limits: the budgets by the names of their costs.
        """
        self._follow()
        scores = {site: score.to(self.budget) for site, score in scores.items()}
        opened = {site: torch.ones_like(score) for site, score in scores.items()}
        coefficients = self._budget.coefficients(opened)
        positions, is_open = (torch.cat([x.flatten() for x in each.values()]) for each in (scores, opened))
        budget = self.budget.new_tensor([limits[name] for name in self._budget.names])
        shapes = {site: score.shape for site, score in scores.items()}
        gates = gates_within(self._budget, budget, positions, is_open, coefficients, shapes)
        pieces = gates.split([shape.numel() for shape in shapes.values()])
        return {site: x.view(shape) for (site, shape), x in zip(shapes.items(), pieces, strict=True)}

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the penalty's gradient to that of the gates' locations; call it after ``loss.backward()``.

        Before the gates move and after the last step with gates their gradients are set to None, and the optimiser
        skips them. Nothing is read back from the device.

        Raises:
            ValueError: no location has a gradient, for instance because the loss does not depend on the gates.
        """
        locations = self.guide.locations()
        if not self.start <= self.step < self.steps:
            for location in locations:
                location.grad = None
            return
        if locations and all(location.grad is None for location in locations):
            raise ValueError(
                "Expected gradients of the gates' locations, but none has one; call add_gradient after "
                "loss.backward(), with a loss that draws the gates from this target's guide."
            )
        self._follow()
        if not locations:
            return
        grad = torch.cat([_grad(location).flatten() for location in locations]).float()
        coefficients = self._coefficients_of(len(grad))
        slopes = coefficients * self._positions.slopes()
        squares = grad.nan_to_num(0.0, 0.0, 0.0).square()
        self._take_scales(self._shares @ squares, (slopes.square() * self._shares).sum(1))
        added = (self.multiplier @ slopes).split([location.numel() for location in locations])
        for location, more in zip(locations, added, strict=True):
            location.grad = _grad(location) + more.view(location.shape).to(location)
        if self._before is not None:
            now = [location.clone() for location in locations]
            # Of gates that the loss alone moved before, a later step says nothing.
            is_first = self._before or all(
                x.is_meta or torch.equal(x, y) for x, y in zip(now, self._first, strict=True)
            )
            self._before = now if is_first else None

    @torch.no_grad()
    def ascend(self) -> None:
        """Advance one step, after the optimiser's; when due, check the deterministic network and harden its gates.

        Raises:
            ValueError: the optimiser's first step with gates is not one of Adam's.
        """
        if self._before:
            self._check_step(self._before)
        self.step += 1
        if not self.start <= self.step <= self.steps or not self.guide.locations():
            return
        if self._schedule.is_check(self.step):
            self._follow()
            self._positions.follow()
            if self.step > self.start:  # where no gate has moved yet, none is better than another
                self._keep_to_curve()
            self._take_coefficients()
        if self.reached <= self.step < self.steps:
            positions = self._positions.read()
            # Meanwhile Adam can push a gate by a quarter of that distance, in units of about eight: by less than this.
            hardening = _HARDENING * self._schedule.distance / LEAST_DISTANCE
            harder = positions * (1 + hardening / (self.steps - self.reached))
            self._positions.write(harder.clamp(LOWEST, HIGHEST))
        if self.step == self.steps and self._on_budget is not None:
            self._on_budget(float(self.budget[0]), dict(self.guide.test_gates()))

    def _check_step(self, before: Sequence[Tensor]) -> None:
        """Refuse a first step that is not like Adam's, which moves all gates by the learning rate."""
        pairs = [(x, y) for x, y in zip(self.guide.locations(), before, strict=False) if x.shape == y.shape]
        each = [(x - y).abs().flatten().float().cpu() for x, y in pairs if x.dtype.itemsize > 2 and not x.is_meta]
        moved = torch.cat([torch.zeros(0), *each])
        moved = moved[moved > 0].sort().values
        if not len(moved):
            return  # a gradient scaler skipped the step, or the type is too coarse to tell
        self._before = None
        low, high = (float(moved[len(moved) * i // 4]) for i in (1, 3))
        if high > _ALIKE * low or not _LEAST_PART <= high / self.gate_learning_rate <= _MOST_PART:
            raise ValueError(
                "Expected Adam or AdamW with optimiser_options, which first moves each gate's location by "
                f"{self.gate_learning_rate:.1e}, but they were moved by {low:.1e} to {high:.1e}; train "
                "guide.locations() by a torch.optim.Adam of their own."
            )

    def _keep_to_curve(self) -> None:
        """Put the deterministic network onto the curve, and let the multiplier follow."""
        schedule, interval = self._schedule, self._schedule.interval
        budget = schedule.budget(self.step, self.budget)
        self._integrate(torch.log(self.fraction() / budget), interval)
        before = 1.0
        if self.step > self.start + interval:
            before = float(schedule.budget(self.step - interval, self.budget)[0])
        for intermediate in self._budget.intermediate:
            if float(budget[0]) <= intermediate < before:
                self._correct(torch.full_like(self.budget, intermediate))
                if self._on_budget is not None:
                    self._on_budget(intermediate, dict(self.guide.test_gates()))
        self._correct(budget)

    @torch.no_grad()
    def project(self) -> None:
        """Put the deterministic network onto the final budget now, for a run that ends early."""
        self._follow()
        self._correct(self.budget)

    def _correct(self, budget: Tensor) -> None:
        positions, is_open = self._positions.read(), self._open()
        shapes = {site: gate.shape for site, gate in is_open.items()}
        now = torch.cat([gate.flatten() for gate in is_open.values()])
        wanted = gates_within(self._budget, budget, positions, now, self._coefficients_of(len(now)), shapes) > 0
        # Until the end a gate can go back; those of the last check are decided.
        opened, closed = (OPENED, CLOSED) if self.step < self.steps else (HIGHEST, LOWEST)
        moved = torch.where(wanted & ~now, opened, torch.where(now & ~wanted, closed, positions))
        self._positions.write(moved.clamp(LOWEST, HIGHEST))

    def _open(self) -> dict[str, Tensor]:
        return {site: gate != 0 for site, gate in self.guide.test_gates().items()}

    def _coefficients_of(self, number: int) -> Tensor:
        """The penalty coefficients at the last check; new ones if the number of gates has changed since."""
        if self._coefficients is None or self._coefficients.shape[1] != number:
            return self._take_coefficients()
        return self._coefficients

    def _take_coefficients(self) -> Tensor:
        """Take the penalty coefficients of units where the gates are now."""
        active = {site: gate.active_prob.detach().float() for site, gate in self.guide.posterior().items()}
        return self._put_coefficients(self._budget.coefficients(active))

    def _put_coefficients(self, coefficients: Tensor) -> Tensor:
        """Keep coefficients, and the share of each gate in a mean over those that have one."""
        priced = (coefficients != 0).float()
        self._shares = priced / priced.sum(1, keepdim=True).clamp(min=1)
        self._coefficients = coefficients
        return coefficients

    def _follow(self) -> None:
        """Move this target's tensors to where the guide's gates have moved."""
        like = next(iter(self.guide.locations()), None)
        if like is None or like.device == self.budget.device:
            return
        self._budget.to(like.device)
        self._move(like.device)
        self._coefficients = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, beside the guide's state."""
        return {**super().state_dict(), "coefficients": self._coefficients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a ValueError says that it has another number of constraints."""
        super().load_state_dict(state)
        self._coefficients = None
        self._before = [] if self.step <= self.start else None
        if (coefficients := state["coefficients"]) is not None:
            self._put_coefficients(coefficients.to(self._integral))


class ActiveTarget(Controller):
    r"""Keeps the gates that a network computes for each example to a number of active ones while it trains.

    For n gates of each of B examples the penalty of :class:`SparsityTarget` is

    .. math:: \mu e^v E[L_0], \qquad E[L_0] = \frac{1}{B} \sum_{i=1}^B \sum_{j=1}^n P(z_{ij} \neq 0), \qquad
        \mu = e^I \frac{\operatorname{rms}(\nabla_a \text{loss})}{\operatorname{rms}(\nabla_a E[L_0])},

    where a are the locations of all gates of a batch, such as their logits. As there, what is counted is deterministic:
    :math:`L_0` is the mean over a batch of the number of test gates of an example that are not 0. Ten times its log
    ratio to ``active``, between -3 and 3, is v, and I is the sum of these, between -1 and 1, from a small start. Gates
    move by their gradients only, so the number is met in the mean of many examples. With random gates their
    mean number is :math:`E[L_0]`.

    Args:
        active: number of active gates of an example, in the mean, above 0.
        steps: number of optimiser steps, at least 10, which says how fast I moves. The number is met after about half
            of them, and further ones go on alike.

    Attributes:
        multiplier: :math:`\mu`, the price of an active gate of an example in nats, shape ``()``; 0 at first.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> _ = torch.manual_seed(0)
        >>> encoder, target = torch.nn.Linear(8, 32), ActiveTarget(5, steps=200)
        >>> optimiser = torch.optim.Adam(encoder.parameters(), 0.03)
        >>> for _ in range(200):
        ...     gate = L0Gate.from_logits(encoder(torch.randn(256, 8)))
        ...     target.add_gradient(gate.distribution)
        ...     optimiser.zero_grad()
        ...     (gate().sum(1) - 10).square().mean().backward()
        ...     optimiser.step()
        ...     target.ascend()
        >>> gate = L0Gate.from_logits(encoder(torch.randn(1000, 8)))
        >>> 4.5 < (gate.test_gate != 0).sum() / 1000 < 5.5
        tensor(True)

    References:
        As for :class:`SparsityTarget`; Rajamanoharan et al. (2024), arXiv:2407.14435, for L0 of sparse autoencoders.
    """

    def __init__(self, active: float, *, steps: int) -> None:
        if not active > 0:
            raise ValueError(f"Expected a number of active gates above 0, but got {active}.")
        expect_count(_LEAST_STEPS, steps=steps)
        super().__init__(torch.tensor(_FIRST), int(_FALL * steps))
        self.active = active
        self._violations: list[Tensor] = []  # of the batches of this step

    def add_gradient(self, gates: GateDistribution) -> None:
        """Let the backward pass, before which it is called, add the penalty's gradient to that of the gates' locations.

        Without gradients nothing happens. A step may have several batches.

        Args:
            gates: gates of a batch, those of an example in the last dimension of ``batch_shape``, such as the
                ``distribution`` of :meth:`L0Gate.from_logits <pyro_l0.nn.L0Gate.from_logits>`, or what a Pyro guide
                samples from. Several layers have a target each.

        Raises:
            ValueError: the gates are parameters, or an example has no more than ``active``.
        """
        location: Tensor = getattr(gates, next(iter(gates.learned)))
        if not location.requires_grad:
            return
        if location.is_leaf or location.shape[-1] <= self.active:
            raise ValueError(
                f"Expected more than {self.active} gates that a network computes for each example, but got gates of "
                f"shape {tuple(location.shape)}. Give parameters to a SparsityTarget."
            )
        self._move(location.device)
        with torch.no_grad():
            slopes = gates.active_slope.float() / location.shape[:-1].numel()
            violation = torch.log((gates.test_gate != 0).sum(-1).float().mean() / self.active)

        def add(grad: Tensor) -> Tensor:
            self._violations.append(violation)
            self._take_scales(grad.float().nan_to_num(0.0, 0.0, 0.0).square().mean(), slopes.square().mean())
            multiplier = self.multiplier * torch.exp((violation / _FAR).clamp(-_MOST_AT_ONCE, _MOST_AT_ONCE))
            return grad + (multiplier * slopes).to(grad)

        location.register_hook(add)

    def ascend(self) -> None:
        """Advance one step, after the optimiser's: the multiplier follows the number of active gates.

        Raises:
            ValueError: no backward pass has reached the gates since the last step.
        """
        if not self._violations:
            raise ValueError(
                "Expected a backward pass through the gates in every step, but got none; call add_gradient before it."
            )
        self._integrate(torch.stack(self._violations).mean(), 1)
        self._violations = []
        self.step += 1


def _grad(location: Tensor) -> Tensor:
    return torch.zeros_like(location) if location.grad is None else location.grad
