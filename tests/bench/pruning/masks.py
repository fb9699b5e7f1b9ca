"""Variants of ``prune`` without noise: masks that are not drawn, noise that ends, and weights that wait for the cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pyro_l0 import HardConcrete
from pyro_l0.distributions.gate import JointDraw
from pyro_l0.maths import hard_concrete
from pyro_l0.pruning import phases

__all__ = ["MASKS", "drawn_as", "schedule"]

MASKS = ("mean", "relu", "falling", "fixed", "fixed-mean", "fixed-relu")
Gates = Sequence[HardConcrete]
DRAW, NOISE = HardConcrete.draw_jointly, hard_concrete.logistic_noise
GATED_STEPS = 650  # of 1,000


def drawn_as(method: str) -> AbstractContextManager[object]:
    """Within it, gates in training have the values of a variant."""
    draws = {"mean": by_mean, "relu": by_relu, "falling": partial(falling, steps=itertools.count())}
    draw = draws.get(method.removeprefix("fixed-"))
    return patch.object(HardConcrete, "draw_jointly", staticmethod(draw)) if draw else nullcontext()


def schedule(method: str) -> Callable[[Optimizer, int], LRScheduler] | None:
    """Without a rate until the cut for the ``fixed`` ones, whose weights wait for it; the usual one for others."""
    made = iter([lambda optimiser, steps: LambdaLR(optimiser, lambda step: 0.0), phases._falling_late])
    return (lambda optimiser, steps: next(made)(optimiser, steps)) if method.startswith("fixed") else None


def by_mean(gates: Gates) -> JointDraw:
    """The test gates, with the derivatives of the gates' means."""
    return _with_values(gates, [(gate.test_gate, gate.mean) for gate in gates])


def by_relu(gates: Gates) -> JointDraw:
    """Lines from 0 where test gates close to 1 where gates start, about 7.7 further, with the same slope beyond."""
    lines = [(gate.log_alpha + math.log(11)) / 7.7 for gate in gates]
    return _with_values(gates, [(line.clamp(0, 1), line) for line in lines])


def _with_values(gates: Gates, values: list[tuple[Tensor, Tensor]]) -> JointDraw:
    """The first of each pair, with the derivatives of the second; as many random numbers are taken as by draws."""
    return DRAW(gates)._replace(draws=[like + (value - like).detach() for value, like in values])


def falling(gates: Gates, steps: Iterator[int]) -> JointDraw:
    """Draws whose noise falls to nothing over the last third of the steps with gates."""
    size = min(1.0, max(0.0, 3 * (1 - next(steps) / GATED_STEPS)))
    with patch.object(hard_concrete, "logistic_noise", lambda *args: size * NOISE(*args)):
        return DRAW(gates)
