"""What the examples of Bayesian networks share: their training."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import Images

__all__ = ["fit"]


def fit(
    net: nn.Module,
    images: Images,
    steps: int,
    optimiser: torch.optim.Optimizer,
    price: Callable[[], Tensor],
    after: Callable[[], object] = lambda: None,
) -> None:
    """Train on the loss of all data plus a price, with rates that fall over the second half; ``after`` each epoch."""
    x, y, batch = images.train_x, images.train_y, min(500, len(images.train_x) // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, max(0.02, 2 * (1 - step / steps))))
    net.train()
    step = 0
    while step < steps:
        for index in torch.randperm(len(x))[: len(x) // batch * batch].split(batch):
            optimiser.zero_grad()
            (len(x) * F.cross_entropy(net(x[index]), y[index]) + price()).backward()
            optimiser.step()
            schedule.step()
        step += len(x) // batch
        after()
    net.eval()
