"""What callbacks and ``prune`` share: a budget over L0Gates, from the first step to the compacted network."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.compaction.compact import compact_or_fix
from pyro_l0.compaction.storage import Compacted
from pyro_l0.infer import SparsityTarget
from pyro_l0.infer.control.budget import Budgets, Cost
from pyro_l0.infer.control.sparsity_target import OnBudget
from pyro_l0.nn import NetworkCost, NetworkGates
from pyro_l0.nn.engine import Example
from pyro_l0.nn.engine.record import example_of
from pyro_l0.training.processes import average_gradients

__all__ = ["NetworkBudget", "named_costs"]


def named_costs(
    budget: Budgets, cost: str | Cost | Mapping[str, Cost], counts: NetworkCost, latency: Cost | None = None
) -> dict[str, Cost]:
    """The costs that must stay within budgets, by the budgets' names; a function alone is ``"cost"``."""
    if callable(cost) and not isinstance(budget, Mapping):
        return {"cost": cost}
    own = cost if isinstance(cost, Mapping) else {}
    known: dict[str, Cost] = {"macs": counts.macs, "weights": counts.weights, "parameters": counts.parameters}
    known |= {} if latency is None else {"latency": latency}
    if taken := sorted(known.keys() & own):
        raise ValueError(
            f"Expected costs of your own under other names than {', '.join(known)}, but got {taken[0]!r}, which is "
            "counted here; leave the function out, or rename it."
        )
    known |= own
    named: Mapping[str, object] = budget if isinstance(budget, Mapping) else own
    names = {name: name for name in named} or {"cost": str(cost)}
    asked = {*own} or {"a function" if callable(cost) else str(cost)} - {"macs"}  # the default, if nothing is asked for
    free = sorted(asked - names.keys()) if named else []
    if free or not known.keys() >= {*names.values()}:
        raise ValueError(
            f"Expected costs by name, of {', '.join(known)}, with a budget for each, but got {[*names.values()]}"
            f"{f' and none for {free}' if free else ''}; give costs of your own in cost={{name: cost}}."
        )
    return {key: known[name] for key, name in names.items()}


class NetworkBudget:
    """Keeps a network's L0Gates to a budget while the loop of another library trains it.

    The gates have an optimiser of their own. Between the backward pass and the step of the loop's optimiser it moves
    the gates and removes their gradients, so the loop's optimiser, weight decay and schedule leave them alone.
    :class:`~pyro_l0.callbacks.lightning.BudgetCallback` has an example.

    Args:
        network: the network with L0Gates, part of what the loop trains.
        example: what the network is called with, as :class:`~pyro_l0.nn.NetworkCost` takes it; None if the network is
            not to be compacted, as after :func:`~pyro_l0.nn.gate_lora_ranks`.
        budget: largest fraction of the full network's cost, in (0, 1), or several, as for
            :class:`~pyro_l0.infer.SparsityTarget`.
        cost: what is counted: multiply-adds, weights or parameters; or a differentiable function of gates by site, or
            several by the names of their budgets, of which these three are known. Without an example it is the open
            gates of the sites by whose names budgets are given, or a function.
        pretrained: whether the network was trained before. If not, it learns for a quarter of the steps first.
        at_least: by gate site, how many of its gates never close.
        multiple_of: by gate site, a number: the open gates are a multiple of it, or all of the site's.
        on_budget: is called with each budget that is met, as by SparsityTarget.

    Attributes:
        gates: the network's :class:`~pyro_l0.nn.NetworkGates`.
        target: the budget's SparsityTarget, once the training has begun.
        optimiser: the optimiser of the gates, once the training has begun.
        compacted: what :func:`~pyro_l0.compaction.compact` made of the network, once the training has ended; None
            without an example.

    Raises:
        ValueError: the network has no L0Gate, does not take the example, or uses gates in a way that has no cost.
    """

    def __init__(
        self,
        network: nn.Module,
        example: Example | None,
        budget: Budgets,
        cost: Literal["macs", "weights", "parameters"] | Cost | Mapping[str, Cost] = "macs",
        *,
        pretrained: bool = False,
        at_least: Mapping[str, int] | None = None,
        multiple_of: Mapping[str, int] | None = None,
        on_budget: OnBudget | None = None,
    ) -> None:
        self.gates = NetworkGates(network)
        self._cost: Cost | Mapping[str, Cost] | None = None if isinstance(cost, str) else cost
        if example is not None:
            self._cost = named_costs(budget, cost, NetworkCost(network, example))
        self._example = None if example is None else example_of(example, network)
        self._network, self._budget = network, budget
        self._options: dict[str, Any] = {
            "pretrained": pretrained,
            "at_least": at_least,
            "multiple_of": multiple_of,
            "on_budget": on_budget,
        }
        self._saved: Mapping[str, Any] | None = None
        self.target: SparsityTarget | None = None
        self.compacted: Compacted | None = None

    @property
    def is_training(self) -> bool:
        """Whether the training has begun and nothing was compacted yet."""
        return self.target is not None and self.compacted is None

    def start(self, steps: float, done: int, trained: Iterable[nn.Parameter]) -> None:
        """Open the gates, or continue from a loaded state; call it once the network is on its device.

        Args:
            steps: total number of steps of the loop's optimiser.
            done: number of steps already taken.
            trained: the parameters whose gradients are not scaled when :meth:`step` is called.

        Raises:
            ValueError: the number of steps is unknown, below ten or not as before; the state of earlier steps is
                missing; a gate is not trained.
        """
        if self.compacted is not None:
            return
        if not 0 < steps < math.inf:
            raise ValueError(f"Expected a known number of steps, but the trainer has {steps}. Give it max_steps.")
        known = set(trained)
        lost = [site for site, gate in self.gates.sites.items() if gate.location not in known]
        if lost:
            raise ValueError(
                f"Expected gates that are trained with their network, but gate {lost[0]!r} is not. Train a module that "
                "holds the network given here; for precision 16-mixed its optimiser takes all parameters, not fused."
            )
        was, taken = (self._saved["steps"], self._saved["step"]) if self._saved else (int(steps), 0)
        if (was, taken) != (steps, done):
            raise ValueError(
                f"Expected to go on after {taken} of {was} steps, where the callback's state is from, but the trainer "
                f"is at {done} of {steps}. Resume a training with this callback and with as many steps, or begin anew."
            )
        locations = self.gates.locations()
        self.target = SparsityTarget(self.gates, self._budget, self._cost, steps=int(steps), **self._options)
        self.optimiser = torch.optim.Adam([{"params": locations, **self.target.optimiser_options}])
        if self._saved:
            self.load_state_dict(self._saved)
            self._saved = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the gates, after the backward pass."""
        if self.target is None or self.compacted is not None:
            return
        locations = self.gates.locations()
        if any(location.grad is not None for location in locations):  # without any, add_gradient raises
            average_gradients(locations)  # for gates that DDP or FSDP ignores; DDP's own averages stay as they are
        for location in locations:
            if location.grad is not None:  # may overflow in float16; the scaler then skips the step of the weights
                location.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.target.add_gradient()
        self.optimiser.step()
        for parameter in self.gates.parameters():
            parameter.grad = None
        self.target.ascend()

    def metrics(self) -> dict[str, float]:
        """What is logged: the fraction of the (first) cost, its multiplier in nats per unit, and open gates."""
        assert self.target is not None
        report = self.target.report()
        return {
            "l0/fraction": next(iter(report.fraction.values())),
            "l0/multiplier": next(iter(report.multiplier.values())),
            "l0/open_gates": float(sum(number for number, _ in report.open.values())),
        }

    def finish(self) -> nn.Module:
        """Compact the network after the last step; if it cannot be cut, it stays whole with fixed gates and a warning.

        If the training ended early, the gates are first put onto the budget, with a warning.
        """
        assert self.target is not None
        if self.target.step < self.target.steps:
            self.target.project()
            warnings.warn(
                f"Expected {self.target.steps} steps, but the training ended after {self.target.step}, so its last "
                "gates closed at once. Train to the end for a better network.",
                stacklevel=2,
            )
        if self._example is None:
            return self._network
        device = self.gates.locations()[0].device
        example = tree_map_only(Tensor, lambda x: x.to(device), self._example)
        self.compacted, refusal = compact_or_fix(self._network, self.gates.test_gates(), example)
        if refusal is not None:
            warnings.warn(
                f"The network came back whole, with fixed gates, as it could not be cut: {refusal}", stacklevel=2
            )
        return self.compacted.network

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs besides the network's parameters; empty before the start.

        It has the gates' locations, as checkpoints of a peft adapter do not.
        """
        if self.target is None:
            return {}
        locations = [location.detach().clone() for location in self.gates.locations()]
        own = {"steps": self.target.steps, "locations": locations, "gate_optimiser": self.optimiser.state_dict()}
        return self.target.state_dict() | own

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, at once if the training has begun, and at the next :meth:`start`."""
        if self.target is None:
            self._saved = state_dict
            return
        for location, value in zip(self.gates.locations(), state_dict["locations"], strict=True):
            location.copy_(value)
        self.target.load_state_dict(state_dict)
        self.optimiser.load_state_dict(state_dict["gate_optimiser"])
