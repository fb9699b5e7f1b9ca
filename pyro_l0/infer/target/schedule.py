"""When a budget falls, and how fast gates may move, from the number of steps alone."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["LEAST_DISTANCE", "BudgetSchedule"]

_LEAST_STEPS = 10
_CHECKS = 100
# How far a gate may go while the budget falls, in distances from where it starts to where it closes: so far at least if
# all of its gradients have one sign, and so far if they have none, when Adam's steps add up like a random walk's.
LEAST_DISTANCE, _WALK = 4.0, 1 / 6
# Of the steps with gates: what passes before the first gate moves, and of the rest, what passes until the budget holds.
_WARM_UP_PRETRAINED, _WARM_UP, _FALL = 0.08 / 3, 0.8 / 3, 0.8


class BudgetSchedule:
    """Phases of a training with gates: they wait until ``start``, the budget falls, it holds from ``settled`` on.

    A network that was not pretrained learns for a while first. The deterministic network is checked at intervals.
    """

    def __init__(self, steps: int, pretrained: bool) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < _LEAST_STEPS:
            raise ValueError(f"Expected steps to be an integer of at least {_LEAST_STEPS}, but got {steps!r}.")
        wait = int((_WARM_UP_PRETRAINED if pretrained else _WARM_UP) * steps)
        self.steps = steps
        self.start = max(wait, min(20, int(steps / 7.5)))
        rest = steps - self.start
        self.settled = self.start + int(_FALL * rest)
        self.interval = max(1, round(rest / _CHECKS))

    @property
    def distance(self) -> float:
        """How far a gate can go while the budget falls; the more steps, the weaker a force that closes it.

        In proportion to the root of the number of steps, gates go by the mean of their gradients, and what is noise
        moves them equally far in runs of any length.
        """
        return max(LEAST_DISTANCE, _WALK * math.sqrt(self.settled - self.start))

    def rate(self, unit: float) -> float:
        """The gates' step size under Adam, for the distance from where they start to where they close."""
        return self.distance * unit / (self.settled - self.start)

    def is_check(self, step: int) -> bool:
        """Whether the deterministic network is checked after so many steps."""
        return step == self.steps or (self.start <= step < self.steps and (step - self.start) % self.interval == 0)

    def budget(self, step: int, final: Tensor) -> Tensor:
        """What holds until the check after the one at a step: from 1 to the final budget, by a cubic curve."""
        done = min(1.0, max(0.0, (step + self.interval - self.start) / (self.settled - self.start)))
        return final + (1 - final) * (1 - done) ** 3
