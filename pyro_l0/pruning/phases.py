"""The two phases of pruning: training with gates under a budget, and fine-tuning what was cut."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pyro_l0.diagnostics import diagnose
from pyro_l0.diagnostics.doctor import Diagnosis
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget, factor
from pyro_l0.pruning.batches import BatchLoss
from pyro_l0.training.processes import average_gradients

__all__ = ["FineTuning", "GatedPhase", "MakeOptimiser", "MakeSchedule", "Phase"]

MakeOptimiser = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer, int], LRScheduler]
_PARTS = ("network", "guide", "target", "optimiser", "gate_optimiser", "schedule")  # those that a phase has
_LEARNING_RATE, _EPS = 1e-3, 1e-15  # of Adam; with so small an eps a loss of another scale takes the same steps


class Phase(ABC):
    """A part of the training."""

    network: nn.Module

    @abstractmethod
    def loss_of(self, batch: object) -> Tensor:
        """The loss of a batch, shape ``()``."""

    @abstractmethod
    def update(self) -> None:
        """Move the parameters along their gradients."""

    def parts(self) -> dict[str, Any]:
        """What has a ``state_dict``, by its name in a checkpoint."""
        found = {name: getattr(self, name, None) for name in _PARTS}
        return {name: part for name, part in found.items() if part is not None}

    def step(self, group: Sequence[object]) -> Tensor:
        """Take a step of the optimiser on some batches; the mean loss, without a graph."""
        self.network.train()
        for part in self.parts().values():
            if isinstance(part, Optimizer):
                part.zero_grad()
        total = torch.zeros(())
        for batch in group:
            loss = self.loss_of(batch) / len(group)
            loss.backward()
            total = total.to(loss.device) + loss.detach()
        self.update()
        return total

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for name, part in self.parts().items():
            part.load_state_dict(state[name])


class _Model(nn.Module):
    """A network's loss as a Pyro model."""

    def __init__(self, network: nn.Module, loss: BatchLoss) -> None:
        super().__init__()
        self.network, self._loss = network, loss

    def forward(self, batch: object) -> None:
        """Run the network on a batch."""
        factor("loss", -self._loss(self.network, batch))


class GatedPhase(Phase):
    """A network with gates, its guide, its target and their optimisers; gates are drawn for each batch.

    The guide sees the gates, which have their names, at ``batch``. The weights are trained by Adam at a constant rate
    if nothing else is given.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: BatchLoss,
        batch: object,
        make_target: Callable[[AutoGate], SparsityTarget],
        make_optimiser: MakeOptimiser | None = None,
        make_schedule: MakeSchedule | None = None,
    ) -> None:
        self.network = network
        model = _Model(network, loss)
        self.guide = AutoGate(model, init_jitter=0.0)
        network.eval()  # whose statistics stay as they are
        with torch.no_grad():
            self.guide(batch)
        self.guide.to(loss.device)
        self._loss = L0_ELBO("l0")(model, self.guide)
        self.target = make_target(self.guide)
        self.optimiser = _optimiser(network, make_optimiser)
        gate_options: dict[str, Any] = dict(self.target.optimiser_options)
        self.gate_optimiser = torch.optim.Adam(self.guide.locations(), **gate_options)
        self.schedule = None if make_schedule is None else make_schedule(self.optimiser, self.target.steps)

    def loss_of(self, batch: object) -> Tensor:
        """The loss with a draw of the gates; FloatingPointError if it is not finite."""
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

    def update(self) -> None:
        """Move weights and gates, and then the target's multiplier."""
        average_gradients([*self.network.parameters(), *self.guide.parameters()])
        self.target.add_gradient()
        self.optimiser.step()
        self.gate_optimiser.step()
        if self.schedule is not None:
            self.schedule.step()
        self.target.ascend()

    def diagnose(self, loader: Iterable[object]) -> Diagnosis:
        """What is wrong with the gates; nothing is changed, random numbers included."""
        optimisers = [self.optimiser, self.gate_optimiser]
        batches = ([batch] for batch in loader)
        return diagnose(self.guide, optimisers, loss=self._loss, batches=batches, target=self.target)


class FineTuning(Phase):
    """A compacted network that is trained further, without gates, for so many steps.

    By Adam if nothing else is given, at a constant rate that falls to 0 by a cosine over the last half of the steps.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: BatchLoss,
        steps: int,
        make_optimiser: MakeOptimiser | None = None,
        make_schedule: MakeSchedule | None = None,
    ) -> None:
        self.network, self._loss = network, loss
        self.optimiser = _optimiser(network, make_optimiser)
        self.schedule = (make_schedule or _falling_late)(self.optimiser, steps)

    def loss_of(self, batch: object) -> Tensor:
        """The loss without gates."""
        return self._loss(self.network, batch)

    def update(self) -> None:
        """Move the weights."""
        average_gradients(self.network.parameters())
        self.optimiser.step()
        self.schedule.step()


def _optimiser(network: nn.Module, make: MakeOptimiser | None) -> Optimizer:
    parameters = [p for p in network.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("Expected a network with parameters that are trained, but none requires gradients.")
    if make is None:
        is_fused = parameters[0].device.type in ("cpu", "cuda")
        return torch.optim.Adam(parameters, _LEARNING_RATE, eps=_EPS, fused=is_fused)
    made = make(parameters)
    own = {id(p) for p in parameters}
    if any(id(p) not in own for group in made.param_groups for p in group["params"]):
        raise ValueError(
            "Expected an optimiser of the parameters that it is given, which are those of a copy of the network, but "
            "got one of others; write make_optimiser=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    return made


def _falling_late(optimiser: Optimizer, steps: int) -> LRScheduler:
    """A constant rate, and a cosine to 0 over the last half: the smaller the network, the more it has to learn anew."""

    def rate(step: int) -> float:
        fallen = max(0.0, 2 * step / steps - 1)
        return (1 + math.cos(math.pi * fallen)) / 2

    return LambdaLR(optimiser, rate)
