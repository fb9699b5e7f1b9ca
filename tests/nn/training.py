"""Training of a network and its gates at a price, for tests of what closes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pyro_l0.infer import L0_ELBO, AutoGate

__all__ = ["trained_gates"]


def trained_gates(
    network: nn.Module, model: Callable[..., None], *data: Tensor, lam: float, steps: int
) -> dict[str, Tensor]:
    """Train in place by Eq. 22 and return the test gates."""
    guide = AutoGate(model)
    loss = L0_ELBO("l0", lam=lam)(model, guide)
    loss(*data)
    groups = [{"params": network.parameters(), "lr": 0.02}, {"params": guide.parameters(), "lr": 0.2}]
    optimiser = torch.optim.Adam(groups)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(*data).backward()
        optimiser.step()
    return dict(guide.test_gates())
