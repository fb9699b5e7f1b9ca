"""Averaged weights, inputs that are selected once, and the training of a compacted network by both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_l0.compaction.layers import Select
from pyro_l0.training.epochs import check_finite

__all__ = ["AVERAGE_POWER", "Average", "SelectedInputs", "retrain"]

AVERAGE_POWER = 9
LEARNING_RATE = 1e-3  # of the retraining, at its start


class Average:
    """Averaged parameters of one module in another of the same shape, listed once and not per step.

    Polynomial-decay averaging with power k = 9: step t enters with a weight of (k + 1) / (t + k), so that the average
    covers about the last tenth of the steps taken, however many they are (Shamir, Zhang 2013, arXiv:1212.1824).
    ``steps`` is how many the averages hold already.
    """

    def __init__(self, averaged: nn.Module, module: nn.Module, steps: int = 0) -> None:
        self.pair = list(averaged.parameters()), list(module.parameters())
        self.steps = steps

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters."""
        self.steps += 1
        torch._foreach_lerp_(*self.pair, (AVERAGE_POWER + 1) / (self.steps + AVERAGE_POWER))


class SelectedInputs:
    """Selects the inputs that a smaller network reads once for all examples, not in every step.

    A network that lost some of its inputs begins by selecting the others. Inside :meth:`of` it does not, and accepts
    examples from the tensor that the context yields; shrink and save it outside.
    """

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
        self._index: Tensor | None = None
        self._selected = inputs

    @contextmanager
    def of(self, network: nn.Module) -> Iterator[Tensor]:
        """The examples with the inputs that the network reads; all inputs, not copied, if it reads all."""
        select = next((m for m in network.modules() if isinstance(m, Select) and m.reads_input), None)
        if select is None:
            yield self.inputs
            return
        if self._index is None or not torch.equal(self._index, select.index):  # a shrinking may leave them as they are
            self._index = select.index.clone()
            self._selected = select(self.inputs)
        select.is_done = True
        try:
            yield self._selected
        finally:
            select.is_done = False


def retrain(network: nn.Module, x: Tensor, y: Tensor, epochs: int, batch_size: int, noise: float = 0.0) -> None:
    """Train a compacted network further in place, without gates, by Adam with a step that falls to 0, and averaged.

    ``noise`` is the standard deviation of normal noise on the pixels, whose values are in [0, 1].
    """
    network.train()
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, epochs * -(-len(x) // batch_size))
    averaged = copy.deepcopy(network)
    average = Average(averaged, network)
    with SelectedInputs(x).of(network) as train_x:
        for _ in range(epochs):
            for index in torch.randperm(len(x)).to(x.device).split(batch_size):
                batch = train_x[index]
                if noise:
                    batch = batch + noise * torch.randn_like(batch)
                optimiser.zero_grad()
                F.cross_entropy(network(batch), y[index]).backward()
                optimiser.step()
                falling.step()
                average.update()
    check_finite(epochs, 0.0, network, averaged)
    network.load_state_dict(averaged.state_dict())
    network.eval()
