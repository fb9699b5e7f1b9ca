"""Sparsity as a constraint: the deterministic network keeps to a budget, without a setting to tune."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from pyro_l0.expect import expect
from pyro_l0.infer.guides.protocol import GateGuide, check_guide
from pyro_l0.infer.target.budget import Budget, Choice, Cost, read_budgets
from pyro_l0.infer.target.positions import CLOSED, HIGHEST, LOWEST, OPENED, GatePositions
from pyro_l0.infer.target.report import TargetReport
from pyro_l0.infer.target.schedule import LEAST_DISTANCE, BudgetSchedule

__all__ = ["SparsityTarget", "TargetState"]

OnBudget = Callable[[float, dict[str, Tensor]], None]
_START = 0.999  # P(z != 0) at the start, or all but one gate in expectation where that is more
_BETAS, _EPS = (0.9, 0.99), 1e-15
_MEMORY = 0.98  # of the moving averages of squared gradients
_GAIN, _FAR, _MOST = 10.0, 0.1, 6.0  # of the multiplier's logarithm: speed, clipped violation, largest size
_HARDENING = 10.0  # of the logarithm of positions in the last steps: what stands at OPENED or further stays on its side


class TargetState(TypedDict):
    """What a resumed run needs of a target."""

    step: int
    integral: Tensor
    of_loss: Tensor
    of_penalty: Tensor
    prices: Tensor | None


class SparsityTarget:
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
            :class:`~pyro_l0.infer.guides.protocol.GateGuide`. Its gates are opened.
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
        settled: steps until the final budget holds.
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
        budget: float | Sequence[float] | Mapping[str, float],
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
        budgets, costs, self._intermediate = read_budgets(budget, cost, gates)
        self._schedule = BudgetSchedule(steps, pretrained)
        self.steps, self.start, self.settled = steps, self._schedule.start, self._schedule.settled
        self._budget = Budget(costs, budgets, gates, at_least, multiple_of)
        self._positions = GatePositions(guide)
        self._on_budget = on_budget
        number = sum(gate.numel() for gate in gates.values())
        self.gate_learning_rate = self._schedule.rate(self._positions.open_all(max(_START, 1 - 1 / number)))
        self.step = 0
        # At the loss's scale for gates that can go just far enough; the further they can go, the weaker a penalty does.
        self._integral = torch.full_like(self._budget.final, -math.log(self._schedule.distance / LEAST_DISTANCE))
        self._of_loss = torch.zeros_like(self._integral)
        self._of_penalty = torch.zeros_like(self._integral)
        self._prices: Tensor | None = None
        self._shares = torch.zeros(0)

    # ------------------------------------------------------------ state of a run

    @property
    def budget(self) -> Tensor:
        """Final budgets, shape ``(k,)``."""
        return self._budget.final

    @property
    def total(self) -> Tensor:
        """Costs of the full network, shape ``(k,)``."""
        return self._budget.total

    @property
    def optimiser_options(self) -> dict[str, float | tuple[float, float]]:
        """Keywords for the parameter group of ``guide.locations()`` in Adam, whatever the loss's scale.

        An AutoGate over hard concretes has no other parameters. Leave those of other families out of the optimiser: at
        this rate they would move far from where gates close.
        """
        return {"lr": self.gate_learning_rate, "betas": _BETAS, "eps": _EPS, "weight_decay": 0.0}

    @property
    def multiplier(self) -> Tensor:
        """The multiplier of each constraint in nats, shape ``(k,)``."""
        # Where no gate has a price yet, both averages are 0.
        return torch.sqrt(self._of_loss / self._of_penalty.clamp(min=1e-30)) * torch.exp(self._integral)

    @property
    def saturated(self) -> Tensor:
        """Whether a multiplier has reached its maximum above the loss's scale, shape ``(k,)``."""
        return self._integral >= _MOST

    @torch.no_grad()
    def fraction(self) -> Tensor:
        """Cost of the deterministic network as a fraction of the full one's, shape ``(k,)``."""
        self._follow()
        return self._budget.fraction({site: is_open.float() for site, is_open in self._open().items()})

    @torch.no_grad()
    def report(self) -> TargetReport:
        """The progress so far."""
        tests, names = self.guide.test_gates(), self._budget.names
        fraction = self.fraction()
        values = torch.cat([gate.flatten() for gate in tests.values()]) if tests else torch.ones(1)
        opened = {site: (int((gate != 0).sum()), gate.numel()) for site, gate in tests.items()}
        expected = self._budget.fraction({site: gate.active_prob for site, gate in self.guide.posterior().items()})
        per_unit = self.multiplier / (expected * self.total)
        return TargetReport(
            step=self.step,
            steps=self.steps,
            fraction=dict(zip(names, fraction.tolist(), strict=True)),
            budget=dict(zip(names, self.budget.tolist(), strict=True)),
            undecided=float(((values > 0) & (values < 1)).float().mean()),
            multiplier=dict(zip(names, per_unit.tolist(), strict=True)),
            at_minimum=tuple(site for site, (n, _) in opened.items() if n <= self._budget.minimums[site]),
            open=opened,
        )

    # ------------------------------------------------------------ steps

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
        prices = self._prices_of(len(grad))
        slopes = prices * self._positions.slopes()
        self._of_loss.lerp_(self._shares @ grad.nan_to_num(0.0, 0.0, 0.0).square(), 1 - _MEMORY)
        self._of_penalty.lerp_((slopes.square() * self._shares).sum(1), 1 - _MEMORY)
        added = (self.multiplier @ slopes).split([location.numel() for location in locations])
        for location, more in zip(locations, added, strict=True):
            location.grad = _grad(location) + more.view(location.shape).to(location)

    @torch.no_grad()
    def ascend(self) -> None:
        """Advance one step, after the optimiser's; when due, check the deterministic network and harden its gates."""
        self.step += 1
        if not self.start <= self.step <= self.steps or not self.guide.locations():
            return
        if self._schedule.is_check(self.step):
            self._check()
        if self.settled <= self.step < self.steps:
            positions = self._positions.read()
            # Meanwhile Adam can push a gate by a quarter of that distance, in units of about eight: by less than this.
            hardening = _HARDENING * self._schedule.distance / LEAST_DISTANCE
            harder = positions * (1 + hardening / (self.steps - self.settled))
            self._positions.write(harder.clamp(LOWEST, HIGHEST))
        if self.step == self.steps and self._on_budget is not None:
            self._on_budget(float(self.budget[0]), dict(self.guide.test_gates()))

    def _check(self) -> None:
        """Put the deterministic network onto the curve, and let the multiplier follow."""
        self._follow()
        self._positions.follow()
        if self.step > self.start:  # where no gate has moved yet, none is better than another
            self._keep_to_curve()
        self._take_prices()

    def _keep_to_curve(self) -> None:
        schedule, interval = self._schedule, self._schedule.interval
        budget = schedule.budget(self.step, self.budget)
        violation = torch.log(self.fraction() / budget)
        faster = _GAIN * (violation / _FAR).clamp(-1, 1) * interval / (self.settled - self.start)
        self._integral = (self._integral + faster).clamp(-_MOST, _MOST)
        before = 1.0
        if self.step > self.start + interval:
            before = float(schedule.budget(self.step - interval, self.budget)[0])
        for intermediate in self._intermediate:
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
        wanted = Choice(self._budget, budget, positions, now, self._prices_of(len(now)), shapes).open > 0
        # Until the end a gate can go back; those of the last check are decided.
        opened, closed = (OPENED, CLOSED) if self.step < self.steps else (HIGHEST, LOWEST)
        moved = torch.where(wanted & ~now, opened, torch.where(now & ~wanted, closed, positions))
        self._positions.write(moved.clamp(LOWEST, HIGHEST))

    # ------------------------------------------------------------ the guide

    def _open(self) -> dict[str, Tensor]:
        return {site: gate != 0 for site, gate in self.guide.test_gates().items()}

    def _prices_of(self, number: int) -> Tensor:
        """The prices at the last check; new ones if the number of gates has changed since."""
        if self._prices is None or self._prices.shape[1] != number:
            return self._take_prices()
        return self._prices

    def _take_prices(self) -> Tensor:
        """Take the prices of units where the gates are now."""
        active = {site: gate.active_prob.detach().float() for site, gate in self.guide.posterior().items()}
        return self._put_prices(self._budget.prices(active))

    def _put_prices(self, prices: Tensor) -> Tensor:
        """Keep prices, and the share of each gate in a mean over those that have one."""
        priced = (prices != 0).float()
        self._shares = priced / priced.sum(1, keepdim=True).clamp(min=1)
        self._prices = prices
        return prices

    def _follow(self) -> None:
        """Move this target's tensors to where the guide's gates have moved."""
        like = next(iter(self.guide.locations()), None)
        if like is None or like.device == self.budget.device:
            return
        self._budget.to(like.device)
        for name in ("_integral", "_of_loss", "_of_penalty"):
            setattr(self, name, getattr(self, name).to(like.device))
        self._prices = None

    # ------------------------------------------------------------ resuming

    def state_dict(self) -> TargetState:
        """What a resumed run needs, beside the guide's state."""
        return {
            "step": self.step,
            "integral": self._integral.clone(),
            "of_loss": self._of_loss.clone(),
            "of_penalty": self._of_penalty.clone(),
            "prices": self._prices,
        }

    def load_state_dict(self, state: TargetState) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: the state has another number of constraints.
        """
        if state["integral"].shape != self._integral.shape:
            raise ValueError(
                f"Expected the state of {len(self._integral)} constraints, but got {len(state['integral'])}."
            )
        self.step = state["step"]
        self._integral, self._of_loss, self._of_penalty = (
            x.to(self._integral).clone() for x in (state["integral"], state["of_loss"], state["of_penalty"])
        )
        self._prices = None
        if state["prices"] is not None:
            self._put_prices(state["prices"].to(self._integral))


def _grad(location: Tensor) -> Tensor:
    return torch.zeros_like(location) if location.grad is None else location.grad
