"""Cross-fitting: several networks, each of which is trained on its own part of the observations."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_l0.nn import Gate, fix_gates
from pyro_l0.selection.network_inputs.responses import Response

__all__ = ["CrossFit", "Fold", "random_rows", "refit", "weights_optimiser"]

BATCH = 128  # observations per network that a step trains the weights by
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 1e-2
BETAS = (0.9, 0.99)
_CHECK = 25  # steps between checks of the held-out loss


class Fold(NamedTuple):
    """Indices of the observations that one network is trained on, and of those that it never sees."""

    train: Tensor
    held_out: Tensor


class CrossFit(NamedTuple):
    """Networks with the observations that they are trained on and judged by."""

    networks: Sequence[nn.Module]  # one per fold, of inputs (B, p); trained in place
    response: Response  # what their outputs mean
    x: Tensor  # standardised inputs, shape (n, p)
    y: Tensor  # encoded observations, shape (n,)
    folds: Sequence[Fold]  # the observations of each network


def weights_optimiser(weights: Iterable[nn.Parameter]) -> AdamW:
    """The optimiser of networks' weights."""
    return AdamW(weights, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def random_rows(parts: Sequence[Tensor], size: int) -> Tensor:
    """Indices of random observations, as many of each part, shape ``(M, B)``; whole parts where they are small."""
    size = min(size, min(len(part) for part in parts))
    return torch.stack([part[torch.randperm(len(part))[:size]] for part in parts])


def refit(fit: CrossFit, number: int, selected: Tensor, *, steps: int) -> nn.Module:
    """A copy of a network that reads the selected inputs alone, trained on; the best on its held-out observations."""
    networks, response, x, y, folds = fit
    fold = folds[number]
    gated = nn.Sequential(Gate(len(selected)), networks[number])
    net = fix_gates(gated, {"0": selected.to(x)})
    optimiser = weights_optimiser(net.parameters())
    schedule = CosineAnnealingLR(optimiser, steps)
    best, state = math.inf, copy.deepcopy(net.state_dict())

    def loss(rows: Tensor) -> Tensor:
        return -response.distribution(response.output(net(x[rows]))).log_prob(y[rows]).mean()

    for step in range(1, steps + 1):
        net.train()
        optimiser.zero_grad()
        loss(random_rows([fold.train], BATCH)[0]).backward()
        optimiser.step()
        schedule.step()
        if step % _CHECK == 0 or step == steps:
            net.eval()
            with torch.no_grad():
                now = float(loss(fold.held_out))
            if now < best:
                best, state = now, copy.deepcopy(net.state_dict())
    net.load_state_dict(state)
    return net.eval()
