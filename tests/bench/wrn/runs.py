"""Runs of the wide residual network beside the example's: without gates, and under a budget in place of a price."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_wrn import NUM_CLASSES, Options, Run, falling
from common.data import Images
from common.residual import wide_resnet
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import Gate

__all__ = ["BudgetRun", "DropoutRun"]


class _Loss(nn.Module):
    """A network's loss over all images, from a batch."""

    def __init__(self, net: nn.Module, num_data: int) -> None:
        super().__init__()
        self.net, self.num_data = net, num_data

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.num_data * F.cross_entropy(self.net(images), labels)


class DropoutRun(Run):
    """The network with dropout in the place of its gates; data, schedule and weight decay as with gates.

    At a rate of 0 it is the dense network.
    """

    entries = ("loss", "test_error_percent", "macs_left", "expected_macs")

    def __init__(self, images: Images, options: Options, rate: float = 0.3) -> None:
        super().__init__(images, options)
        torch.manual_seed(options.seed)
        self.net = wide_resnet(options.depth, options.width, None, NUM_CLASSES[options.data]).to(options.device)
        for module in list(self.net.modules()):
            for name, child in module.named_children():
                if isinstance(child, Gate):
                    setattr(module, name, nn.Dropout(rate))
        self.loss = _Loss(self.net, len(self.train_x))
        self.optimiser = torch.optim.SGD(
            self.net.parameters(), options.learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.schedule = falling(self.optimiser, options.epochs)

    def measure(self) -> dict[str, Any]:
        macs = self.cost.total_macs
        return {"test_error_percent": self.error(self.net), "macs_left": macs, "expected_macs": macs}

    def parts(self) -> dict[str, Any]:
        return {"net": self.net, "optimiser": self.optimiser, "schedule": self.schedule}


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
