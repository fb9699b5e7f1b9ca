"""What the examples' training runs share: data on a device, a part of every batch, and a count of what is left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cifar import Cifar
from data import Images
from processes import check_shares, parallel, place, random_states, set_random_state
from pyro_l0.compaction import Shrinker
from pyro_l0.compaction.plan import Plan
from pyro_l0.infer import AutoGate
from pyro_l0.nn import NetworkCost

__all__ = ["MEASURES", "GatedRun", "check_finite"]

# What every run measures.
MEASURES = (
    "test_error_percent",
    "architecture",
    "weights_left",
    "macs_left",
    "parameters_left",
    "expected_weights",
    "expected_macs",
)


class GatedRun:
    """The part of a run that does not depend on its network and its data.

    Args:
        images: the data, moved to ``device``.
        batch_size: examples per step, over all processes.
        seed: seed of everything random.
        device: where to train.

    A subclass sets the attributes below; with a shrinker, what is counted is the network at the start.
    """

    cost: NetworkCost
    loss: nn.Module
    parallel: nn.Module

    def __init__(self, images: Images | Cifar, batch_size: int, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.train_x, self.train_y, self.test_x, self.test_y = (
            x.to(self.device) for x in (images.train_x, images.train_y, images.test_x, images.test_y)
        )
        self.processes, self.process = place()
        check_shares(len(self.train_x), batch_size, self.processes)
        self.shrinker: Shrinker | None = None

    @property
    def plans(self) -> Sequence[Plan]:
        """By which the network has shrunk so far."""
        return () if self.shrinker is None else self.shrinker.plans

    def parts(self) -> dict[str, Any]:
        """What has a ``state_dict``, by its name in a checkpoint; None for what this run does without."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, random numbers included."""
        states = {name: None if part is None else part.state_dict() for name, part in self.parts().items()}
        return {**states, "random": random_states(self.device)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned.

        Raises:
            Exception: an entry is missing, of another kind or of another shape.
        """
        if self.shrinker is not None:
            self.shrinker.load_state_dict(state["shrinker"])
        for name, part in self.parts().items():
            if part is not None and part is not self.shrinker:
                part.load_state_dict(state[name])
        set_random_state(state["random"], self.device)

    def shrink(self) -> None:
        """Take out what is closed for good, if a shrinker is there."""
        if self.shrinker is not None:
            self.shrinker.step()

    def after_shrinking(self) -> None:
        """Make anew what depends on the parameters."""
        self.parallel = parallel(self.loss)

    def full(self, gates: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gates in the sizes of the network at the start."""
        return gates if self.shrinker is None else self.shrinker.full(gates)

    def active_prob(self, guide: AutoGate) -> Mapping[str, Tensor]:
        """P(z != 0) by gate site, in the sizes of the network at the start."""
        return self.full({name: gate.active_prob for name, gate in guide.posterior().items()})

    def left(self, gates: Mapping[str, Tensor], active: Mapping[str, Tensor]) -> dict[str, Any]:
        """What is left of the network: :data:`MEASURES` without the error.

        Args:
            gates: the test gates.
            active: from :meth:`active_prob`.
        """
        open_gates = {name: (gate != 0).float() for name, gate in self.full(gates).items()}
        return {
            "architecture": [int(gate.sum()) for gate in open_gates.values()],
            "weights_left": int(self.cost.weights(open_gates)),
            "macs_left": int(self.cost.macs(open_gates)),
            "parameters_left": int(self.cost.parameters(open_gates)),
            "expected_weights": float(self.cost.weights(active)),
            "expected_macs": float(self.cost.macs(active)),
        }


def check_finite(loss: float, *modules: nn.Module) -> None:
    """Stop a training that has diverged, before its state replaces a good checkpoint.

    Args:
        loss: mean loss of an epoch.
        modules: what was trained.

    Raises:
        FloatingPointError: the loss or a parameter is not finite.
    """
    parameters = [(name, p) for module in modules for name, p in module.named_parameters()]
    broken = [name for name, p in parameters if not bool(p.isfinite().all())]
    if broken or not math.isfinite(loss):
        raise FloatingPointError(
            f"Expected the training to stay finite, but got a mean loss of {loss} and values that are not finite in "
            f"{', '.join(broken) or 'no parameter'}; take smaller learning rates, prices or noise. The checkpoint "
            "of the epoch before stays."
        )
