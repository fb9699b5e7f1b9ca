"""Sparsity as a constraint: a budget that the deterministic network meets at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TypedDict

import torch
from torch import Tensor

from pyro_l0.distributions.gate import GateDistribution, concatenate
from pyro_l0.distributions.parameters import check_rate
from pyro_l0.infer.guide import GateGuide, check_guide

Cost = Callable[[Mapping[str, Tensor]], Tensor]
_FAR = 1.25  # times the budget
# Of the budget; a unit has no price where the network without it would cost less. In a LeNet-5 of a tenth of its
# multiply-adds the first maps, a sixth of the budget, lose theirs, and the second ones, a twentieth, always keep it.
_OVERSHOOT = 0.92
_WASTE = 0.95  # of the budget; a gate that would leave less than this closes after all others
_PATIENCE = 50  # updates of a multiplier that grows without effect, before a warning


class TargetState(TypedDict):
    """What a resumed run needs of a target."""

    multiplier: Tensor
    step: int
    prices: Tensor | None
    rest: Tensor
    last: Tensor
    stuck: int


class SparsityTarget:
    r"""At most a given fraction of the weights, the multiply-adds or the open units, by dual ascent.

    Instead of a price of an open weight, the budget is given, and the price is found: to the loss in nats comes
    :meth:`penalty`, :math:`\mu \log (E[c(z)] / c(1))`, and after every step of the optimiser :meth:`ascend` raises the
    multiplier :math:`\mu` while the *deterministic* network (test gates) costs more than the budget and sets it to 0
    when it does not (a dual restart), so that a network within its budget is not pruned further. The gradient goes
    through the expected cost, the multiplier follows the actual one: expected counts do not tell what pruning leaves,
    since a hard concrete gate may be open with probability 0.3 while its test gate is 0.

    Costs are compared by their logs, so that the last halving of a network counts as much as the first. The budget that
    counts falls from 1 to its final value over ``warm_up`` steps, by the same factor in each, so that every halving
    gets as many of them; a network is not cut down before it has learned, nor in the last steps. A map of an early
    layer may be a sixth of what a budget allows: near the budget the units without which less than 92 % of it would be
    used have no price, and smaller ones leave. :meth:`project` makes up for the last units at the end.

    Args:
        guide: the gates' guide, after its first call; an AutoGate, or another :class:`~pyro_l0.infer.GateGuide`.
        budget: largest fraction of the cost of the full network, in (0, 1); or by site, the largest fraction of open
            units.
        cost: cost of given gates by site (P(z != 0) or 0 and 1), a tensor of shape ``()``, such as
            :meth:`NetworkCost.macs <pyro_l0.nn.NetworkCost.macs>`; not with a budget by site.
        total: cost of the full network, shape ``(k,)``; of the guide's gates, all open, if not given.
        dual_rate: growth of the multiplier, in nats per step and unit of violation, the log of the cost over the
            budget. The default suits batches of 100: per epoch the multiplier then grows by 0.3 nats per example and
            unit of violation.
        warm_up: steps until the final budget holds.
        every: steps between two looks at the deterministic network.

    Attributes:
        multiplier: :math:`\mu` in nats, shape ``(k,)`` for k constraints.
        total: cost of the full network, shape ``(k,)``.

    Raises:
        ValueError: a budget is outside (0, 1), names an unknown site, or comes with a cost where there should be none.

    Example:
        >>> import pyro
        >>> from pyro_l0 import HardConcrete
        >>> from pyro_l0.infer import AutoGate
        >>> def model():
        ...     pyro.sample("z", HardConcrete(torch.zeros(10)).to_event(1))
        >>> guide = AutoGate(model)
        >>> _ = guide()
        >>> target = SparsityTarget(guide, {"z": 0.3}, warm_up=0)
        >>> target.fraction()
        tensor([1.])
        >>> target.project()
        >>> target.fraction()
        tensor([0.3000])

    References:
        Gallego-Posada et al. (2022), Controlled Sparsity via Constrained Optimization, arXiv:2208.04425; Cotter et al.
        (2019), arXiv:1804.06500 (a proxy for the gradient, the true constraint for the multiplier).
    """

    def __init__(
        self,
        guide: GateGuide,
        budget: float | Mapping[str, float],
        cost: Cost | None = None,
        *,
        total: Tensor | None = None,
        dual_rate: float = 30.0,
        warm_up: int = 0,
        every: int = 10,
    ) -> None:
        check_guide(guide, "a SparsityTarget", "posterior", "test_gates", "close")
        gates = guide.test_gates()
        by_site = isinstance(budget, Mapping)
        budgets = dict(budget) if isinstance(budget, Mapping) else {"budget": budget}
        for name, value in budgets.items():
            if by_site and name not in gates:
                raise ValueError(f"Expected a budget by gate site, one of {sorted(gates)}, but got {name!r}.")
            check_rate(f"budget[{name!r}]" if by_site else "budget", value, "a target")
        if by_site == (cost is not None):
            raise ValueError("Expected a cost with one budget for the network, and none with budgets by site.")
        for option, number, least in (("dual_rate", dual_rate, 0.0), ("warm_up", warm_up, 0), ("every", every, 1)):
            if not number >= least:
                raise ValueError(f"Expected {option} of at least {least}, but got {number}.")
        self.guide = guide
        self.dual_rate = dual_rate
        self.warm_up = warm_up
        self.every = every
        self.step = 0
        like = next(iter(gates.values()))
        self.budget = torch.tensor(list(budgets.values()), dtype=like.dtype, device=like.device)
        self.multiplier = torch.zeros_like(self.budget)
        self._sites = list(budgets) if by_site else []
        self._cost = cost
        whole = {name: torch.ones_like(gate) for name, gate in gates.items()}
        self.total = self._raw(whole) if total is None else total
        self._prices: Tensor | None = None
        self._rest = torch.zeros_like(self.multiplier[0])
        self._last = torch.zeros_like(self.budget)
        self._stuck = 0

    def _raw(self, gates: Mapping[str, Tensor]) -> Tensor:
        if self._cost is not None:
            return self._cost(gates).reshape(1)
        return torch.stack([gates[site].sum() for site in self._sites])

    def penalty(self) -> Tensor:
        r"""What to add to the loss, in nats; shape ``()``.

        To first order in P(z != 0) from where the gates stood at the first call after a look at the network, which
        takes the prices of the units: :math:`\mu` times the derivative of the log of the expected cost, and 0 for those
        that would overshoot the budget.
        """
        gates = self.guide.posterior()
        if not gates:  # all have left
            return torch.zeros_like(self.multiplier[0])
        joint = concatenate(list(gates.values()))
        active = (
            torch.cat([gate.active_prob.flatten() for gate in gates.values()]) if joint is None else joint.active_prob
        )
        self._follow(active.device)
        if self._prices is None or len(self._prices) != len(active):  # units may have left since
            self._prices, self._rest = self._linearise(gates, active)
        return torch.dot(self._prices.to(active), active) + self._rest.to(active)

    def _linearise(self, gates: Mapping[str, GateDistribution], active: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty's gradient with respect to P(z != 0), and its value without the product of both."""
        shapes = {name: gate.batch_shape for name, gate in gates.items()}
        with torch.inference_mode(False), torch.enable_grad():
            active = active.detach().clone().requires_grad_()
            value = (self.multiplier * torch.log(self._raw(_apart(active, shapes)) / self.total)).sum()
            (prices,) = torch.autograd.grad(value, active)
            if self._cost is not None:  # the gates of one site cost the same
                is_open = torch.cat([gate.test_gate.flatten() != 0 for gate in gates.values()])
                z = is_open.to(active).requires_grad_()
                used = self._raw(_apart(z, shapes)) / self.total / self.budget
                (saved,) = torch.autograd.grad(used.sum(), z)
                large = is_open & (used.detach() - saved < _OVERSHOOT)
                others = is_open & ~large & (saved > 0)
                prices = torch.where(large & others.any(), 0.0, prices)
        return prices, value.detach() - torch.dot(prices, active.detach())

    @torch.no_grad()
    def fraction(self) -> Tensor:
        """Cost of the deterministic network as a fraction of the full one's, shape ``(k,)``."""
        gates = {name: (gate != 0).to(gate) for name, gate in self.guide.test_gates().items()}
        for gate in gates.values():
            self._follow(gate.device)
        return self._fraction(gates)

    def _fraction(self, gates: Mapping[str, Tensor]) -> Tensor:
        return self._raw(gates) / self.total

    def _follow(self, device: torch.device) -> None:
        """Move this target's tensors to where the guide's gates have moved."""
        if self.multiplier.device == device:
            return
        for name in ("budget", "multiplier", "total", "_rest", "_last"):
            setattr(self, name, getattr(self, name).to(device))
        self._prices = None if self._prices is None else self._prices.to(device)

    @torch.no_grad()
    def ascend(self) -> None:
        """Update the multiplier; after every step of the optimiser. Nothing is read back from the device."""
        self.step += 1
        if self.step % self.every:
            return
        done = min(1.0, self.step / self.warm_up) if self.warm_up else 1.0
        violation = torch.log(self.fraction() / self.budget**done)
        raised = self.multiplier + self.dual_rate * self.every * violation
        self.multiplier = torch.where(violation > 0, raised, 0.0)
        self._prices = None

    @torch.no_grad()
    def check(self) -> None:
        """Warn if the target is stuck; once per epoch, since it reads the device.

        Warns:
            UserWarning: the multiplier keeps growing while the cost does not fall, or a site has no open gate left.
        """
        fraction = self.fraction()
        falls = bool((fraction < self._last - 1e-3).any())
        grows = self.step >= self.warm_up and bool((self.multiplier > 0).any())
        self._stuck = self._stuck + 1 if grows and not falls else 0
        self._last = fraction
        if self._stuck == _PATIENCE:
            warnings.warn(
                f"The multiplier has grown to {self.multiplier.max().item():.3g} nats over {_PATIENCE} checks while "
                f"the cost stays at {fraction.tolist()} of the full network's: the gates hardly move. Raise their "
                "learning rate.",
                stacklevel=2,
            )
        for name, gate in self.guide.test_gates().items():
            if not bool((gate != 0).any()):
                warnings.warn(
                    f"No gate of site {name!r} is open in the deterministic network: the layer is dead. Lower the dual "
                    "rate, lengthen the warm-up or set budgets by site.",
                    stacklevel=2,
                )

    @torch.no_grad()
    def project(self) -> None:
        """Close the least valuable open gates until the deterministic network is within its budget.

        At the end of training. Gates are closed one by one, by their P(z != 0) from below, by setting the guide's
        parameters far down; one whose closing would leave less than 95 % of the budget waits until no other is left.
        Those that a later one made needless, such as units that were closed before a map, stay open. A site keeps its
        last gate. With averaged weights, the averaged guide's target is what counts.

        Warns:
            UserWarning: after training, the network is further than a quarter above its budget.

        Raises:
            ValueError: no network with an open gate per site is within the budget.
        """
        fraction = self.fraction()
        if self.step and bool((fraction > _FAR * self.budget).any()):
            has, allowed = ([round(x, 4) for x in values.tolist()] for values in (fraction, self.budget))
            warnings.warn(
                f"The network still has {has} of the cost where {allowed} are allowed. Closing the rest at once costs "
                "accuracy; train longer after the warm-up, or raise the gates' learning rate or the dual rate.",
                stacklevel=2,
            )
        open_gates = {name: (gate != 0).to(gate) for name, gate in self.guide.test_gates().items()}
        closed = self._close(open_gates)
        if bool((self._fraction(open_gates) > self.budget).any()):
            raise ValueError(f"Expected a budget that one open gate per site meets, but got {self.budget.tolist()}.")
        leaving: dict[str, list[int]] = {}
        for name, i in reversed(closed):  # those that a later one made needless stay open
            gate = open_gates[name].view(-1)
            gate[i] = 1.0
            if bool((self._fraction(open_gates) > self.budget).any()):
                gate[i] = 0.0
                leaving.setdefault(name, []).append(i)
        for name, places in leaving.items():
            self.guide.close(name, torch.tensor(places))

    def _close(self, open_gates: dict[str, Tensor]) -> list[tuple[str, int]]:
        """Close gates, the least probable first, until the budget holds or each site has but one.

        Args:
            open_gates: 1 for gates that are open, 0 for others; changed to what is left.

        Returns:
            Site and place in the flattened site of those that were closed, in their order.
        """
        order = sorted(
            (prob, name, i)
            for name, gate in self.guide.posterior().items()
            for i, prob in enumerate(gate.active_prob.flatten().tolist())
            if open_gates[name].view(-1)[i]
        )
        closed: list[tuple[str, int]] = []
        # First without the gates that would waste the budget, such as the map of an early layer; then with them.
        for least in (_WASTE * self.budget, 0.0 * self.budget):
            for _, name, i in order:
                over = self._fraction(open_gates) > self.budget
                if not bool(over.any()):
                    break
                site = open_gates[name].view(-1)
                concerned = not self._sites or (name in self._sites and bool(over[self._sites.index(name)]))
                if not site[i] or site.sum() <= 1 or not concerned:
                    continue
                site[i] = 0.0
                if bool((over & (self._fraction(open_gates) < least)).any()):
                    site[i] = 1.0
                else:
                    closed.append((name, i))
        return closed

    def state_dict(self) -> TargetState:
        """What a resumed run needs."""
        return {
            "multiplier": self.multiplier.clone(),
            "step": self.step,
            "prices": self._prices,
            "rest": self._rest,
            "last": self._last,
            "stuck": self._stuck,
        }

    def load_state_dict(self, state: TargetState) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            ValueError: the state is of another number of constraints.
        """
        if state["multiplier"].shape != self.multiplier.shape:
            raise ValueError(
                f"Expected the state of {len(self.multiplier)} constraints, but got {len(state['multiplier'])}."
            )
        self.multiplier = state["multiplier"].to(self.multiplier).clone()
        self.step, self._stuck = state["step"], state["stuck"]
        self._prices = None if state["prices"] is None else state["prices"].to(self.multiplier.device)
        self._rest = state["rest"].to(self.multiplier.device)
        self._last = state["last"].to(self.multiplier).clone()


def _apart(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The entries of each site in its shape."""
    pieces = flat.split([shape.numel() for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
