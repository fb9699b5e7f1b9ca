"""What the examples of Bayesian networks share: a network whose depth is learned, and its training."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import command
from common.data import Images
from common.paths import OpenUnits

__all__ = ["InputSkipMLP", "fit"]


class InputSkipMLP(nn.Module):
    """A multilayer perceptron in which each layer reads the input as well as the units before it.

    A layer that is not needed can thus close as a whole, so the depth is learned (arXiv:2503.10496). The activation
    must be zero at zero.
    """

    def __init__(self, *sizes: int, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        first, *hidden, last = sizes
        self.activation = activation
        self.inputs = OpenUnits(first)
        widths = [first, *(size + first for size in hidden)]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in zip(widths, [*hidden, last], strict=True))
        self.units = nn.ModuleList(OpenUnits(size) for size in hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        x = read = self.inputs(x)
        *hidden, last = self.layers
        for layer, units in zip(hidden, self.units, strict=True):
            read = torch.cat([units(self.activation(layer(read))), x], -1)
        out: Tensor = last(read)
        return out


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
        command.advance(len(x) // batch)
        after()
    net.eval()
