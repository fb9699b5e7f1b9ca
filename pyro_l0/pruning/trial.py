"""A network cut in several ways: each is trained for a few steps and measured on batches that these did not see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from pyro_l0.pruning.phases import BatchLoss, Loader, Phase, groups
from pyro_l0.training.processes import gather

__all__ = ["compare"]

_HELD_OUT = 20  # steps' batches, or half of a pass where that is fewer


def compare(
    phases: Mapping[str, Phase], loader: Loader, loss: BatchLoss, steps: int, accumulate: int, epoch: int
) -> dict[str, float]:
    """Train networks for some steps on the same batches, and return their mean losses on others, in evaluation mode.

    The first batches of a pass are held out, and as many are left out of each pass that the steps take. In several
    processes a loss is the mean over all, so that these decide alike; one that is not a number counts as infinite.
    """
    number = max(1, min(_HELD_OUT, -(-len(loader) // accumulate) // 2))
    first = groups(loader, accumulate, epoch)
    held_out = list(islice(first, number))
    for group in islice(itertools.chain(first, _later(loader, accumulate, epoch + 1, number)), steps):
        for phase in phases.values():
            phase.step(group)
    losses = {name: _mean(phase.network, loss, held_out) for name, phase in phases.items()}
    everywhere = gather(losses)
    return {name: sum(each[name] for each in everywhere) / len(everywhere) for name in losses}


def _later(loader: Loader, accumulate: int, epoch: int, start: int) -> Iterator[list[object]]:
    """The groups of passes from an epoch on, each without its first; until a pass gives none."""
    for each in itertools.count(epoch):
        groups_left = islice(groups(loader, accumulate, each), start, None)
        if (group := next(groups_left, None)) is None:
            return
        yield group
        yield from groups_left


@torch.no_grad()
def _mean(network: nn.Module, loss: BatchLoss, held_out: Sequence[Sequence[object]]) -> float:
    network.eval()
    losses = [float(loss(network, batch)) for group in held_out for batch in group]
    mean = sum(losses) / len(losses)
    return math.inf if math.isnan(mean) else mean
