"""The two phases of pruning: training with gates under a budget, and training what was cut further."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pyro_l0.diagnostics import diagnose
from pyro_l0.diagnostics.findings import Diagnosis
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget, factor
from pyro_l0.infer.target.budget import Cost
from pyro_l0.infer.target.sparsity_target import OnBudget
from pyro_l0.pruning.batches import BatchLoss, average_gradients

__all__ = ["FineTuning", "GatedPhase", "MakeOptimiser", "MakeSchedule", "Phase", "TargetOptions"]

MakeOptimiser = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer, int], LRScheduler]
_LEARNING_RATE, _EPS = 1e-3, 1e-15  # of Adam; with so small an eps a loss of another scale takes the same steps


class Phase(Protocol):
    """A part of the training."""

    def step(self, group: Sequence[object]) -> Tensor:
        """Take a step of the optimiser on some batches; the mean loss, without a graph."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""


@dataclass(frozen=True)
class TargetOptions:
    """What a :class:`~pyro_l0.infer.SparsityTarget` takes beside its guide."""

    budget: float | Sequence[float] | Mapping[str, float]
    cost: Cost | Mapping[str, Cost]
    steps: int
    pretrained: bool
    on_budget: OnBudget


class _Model(nn.Module):
    """A network's loss as a Pyro model."""

    def __init__(self, network: nn.Module, loss: BatchLoss) -> None:
        super().__init__()
        self.network, self._loss = network, loss

    def forward(self, batch: object) -> None:
        """Run the network on a batch."""
        factor("loss", -self._loss(self.network, batch))


class GatedPhase:
    """A network with gates, its guide, its target and their optimisers.

    Args:
        network: with gates, which have their names.
        loss: of a batch.
        batch: one, at which the guide sees the gates.
        options: of the target.
        make_optimiser: of the weights; Adam if not given.
        make_schedule: of the weights' optimiser; a constant rate if not given.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: BatchLoss,
        batch: object,
        options: TargetOptions,
        make_optimiser: MakeOptimiser | None,
        make_schedule: MakeSchedule | None,
    ) -> None:
        self.network = network

        model = _Model(network, loss)
        self.guide = AutoGate(model, init_jitter=0.0)
        network.eval()  # whose statistics stay as they are
        with torch.no_grad():
            self.guide(batch)
        self.guide.to(loss.device)
        self._loss = L0_ELBO("l0")(model, self.guide)
        self.target = SparsityTarget(
            self.guide,
            options.budget,
            options.cost,
            steps=options.steps,
            pretrained=options.pretrained,
            on_budget=options.on_budget,
        )
        self.optimiser = _optimiser(network, make_optimiser)
        self.gate_optimiser = torch.optim.Adam(self.guide.locations(), **_options(self.target))
        self.schedule = None if make_schedule is None else make_schedule(self.optimiser, options.steps)

    def step(self, group: Sequence[object]) -> Tensor:
        """Take a step on some batches, with a draw of the gates for each; the mean loss, without a graph."""
        self.network.train()
        self.optimiser.zero_grad()
        self.gate_optimiser.zero_grad()
        total = torch.zeros(())
        for batch in group:
            loss = self._finite_loss(batch) / len(group)
            loss.backward()
            total = total.to(loss.device) + loss.detach()
        average_gradients([*self.network.parameters(), *self.guide.parameters()])
        self.target.add_gradient()
        self.optimiser.step()
        self.gate_optimiser.step()
        if self.schedule is not None:
            self.schedule.step()
        self.target.ascend()
        return total

    def _finite_loss(self, batch: object) -> Tensor:
        try:
            loss: Tensor = self._loss(batch)
        except ValueError as error:
            if " at step " not in str(error):
                raise
            raise FloatingPointError(
                f"Expected the training to stay finite; take a smaller learning rate. A checkpoint holds the epoch "
                f"before. {error}"
            ) from error
        return loss

    def diagnose(self, loader: Iterable[object]) -> Diagnosis:
        """What is wrong with the gates; nothing is changed, random numbers included."""
        optimisers = [self.optimiser, self.gate_optimiser]
        batches = ([batch] for batch in loader)
        return diagnose(self.guide, optimisers, loss=self._loss, batches=batches, target=self.target)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        parts = {
            "network": self.network,
            "guide": self.guide,
            "target": self.target,
            "optimiser": self.optimiser,
            "gate_optimiser": self.gate_optimiser,
        }
        return parts if self.schedule is None else {**parts, "schedule": self.schedule}


class FineTuning:
    """A compacted network that is trained further, without gates.

    Args:
        network: the network.
        loss: of a batch.
        steps: how many there will be.
        make_optimiser: Adam if not given.
        make_schedule: a constant rate that falls to 0 by a cosine over the last half of the steps if not given.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: BatchLoss,
        steps: int,
        make_optimiser: MakeOptimiser | None,
        make_schedule: MakeSchedule | None,
    ) -> None:
        self.network, self._loss = network, loss
        self.optimiser = _optimiser(network, make_optimiser)
        self.schedule = (make_schedule or _falling_late)(self.optimiser, steps)

    def step(self, group: Sequence[object]) -> Tensor:
        """Take a step on some batches; the mean loss, without a graph."""
        self.network.train()
        self.optimiser.zero_grad()
        total = torch.zeros(())
        for batch in group:
            loss = self._loss(self.network, batch) / len(group)
            loss.backward()
            total = total.to(loss.device) + loss.detach()
        average_gradients(self.network.parameters())
        self.optimiser.step()
        self.schedule.step()
        return total

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])


def _optimiser(network: nn.Module, make: MakeOptimiser | None) -> Optimizer:
    parameters = [p for p in network.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("Expected a network with parameters that are trained, but none requires gradients.")
    if make is not None:
        made = make(parameters)
        own = {id(p) for p in parameters}
        if any(id(p) not in own for group in made.param_groups for p in group["params"]):
            raise ValueError(
                "Expected an optimiser of the parameters that it is given, which are those of a copy of the network, "
                "but got one of others; write optimiser=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
            )
        return made
    is_fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.Adam(parameters, _LEARNING_RATE, eps=_EPS, fused=is_fused)


def _falling_late(optimiser: Optimizer, steps: int) -> LRScheduler:
    """A constant rate, and a cosine to 0 over the last half: the smaller the network, the more it has to learn anew."""

    def rate(step: int) -> float:
        fallen = max(0.0, 2 * step / steps - 1)
        return (1 + math.cos(math.pi * fallen)) / 2

    return LambdaLR(optimiser, rate)


def _options(target: SparsityTarget) -> dict[str, Any]:
    return dict(target.optimiser_options)
