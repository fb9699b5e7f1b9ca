"""A run of the wide residual network beside the example's: under a budget instead of a price."""

from __future__ import annotations

from typing import Any

import torch

from cifar_wrn import Options, Run, falling
from common.data import Images
from pyro_l0.infer import SparsityTarget

__all__ = ["BudgetRun"]


class BudgetRun(Run):
    """Gates under a budget of the multiply-adds, moved by Adam as the target asks, with plain weight decay."""

    def __init__(self, images: Images, options: Options, budget: float = 0.5) -> None:
        super().__init__(images, options)
        self.elbo.weight_decay = 0.0  # in expectation it would close gates, and the target would open them again
        *weights, _ = self.optimiser.param_groups
        for group in weights:
            group["weight_decay"] = 5e-4
        self.optimiser.param_groups = weights
        steps = options.epochs * -(-len(self.train_x) // options.batch_size)
        self.target = SparsityTarget(self.guide, budget, lambda gates: self.cost.macs(self.full(gates)), steps=steps)
        self.gate_optimiser = torch.optim.Adam(self.guide.locations(), **self.target.optimiser_options)
        self.schedule = falling(self.optimiser, options.epochs)

    def update(self) -> None:
        self.target.add_gradient()
        super().update()
        self.gate_optimiser.step()
        self.target.ascend()
        self.gate_optimiser.zero_grad()

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "target": self.target, "gate_optimiser": self.gate_optimiser}
