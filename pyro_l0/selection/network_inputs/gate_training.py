"""Cross-fitted training: weights see some folds of the data, gates are judged by the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_l0.distributions import HardConcrete
from pyro_l0.infer import L0_ELBO
from pyro_l0.selection.network_inputs.cross_fitting import (
    BATCH,
    BETAS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    CrossFit,
    Fold,
    random_rows,
)
from pyro_l0.selection.network_inputs.input_gates import GatedNetworks, InputGates

__all__ = ["train_gates"]

_JUDGES = 512  # observations per network that a step moves the gates by
_GATE_PATH, _GATE_RATE = 36.0, 0.1  # how far log alpha moves over all steps, and in one step at most
_NOISE_RATE = 0.01
_START = 0.9  # P(z != 0): nearly open, so that interactions are learned before anything is closed
_MOST = 4.0  # log alpha; a gate beyond would take long to close again
_WARM_UP = 0.2  # of the steps, while the price rises
_TAIL = 0.15  # of the steps, at the end


def train_gates(fit: CrossFit, *, steps: int) -> Tensor:
    r"""Train one network per fold and the gates that all share; gives P(z != 0) over the last 15 % of the steps.

    The objective is Eq. 22 of the L0 paper, with the weights of each network following the observations of its fold and
    the gates, like the noise scale, those that it has not seen. So an input by which a network only memorises closes,
    and the likelihood is honest about the noise. The price of an open gate is :math:`\log p + \frac12 \log n` nats:
    what it takes to say which of p inputs, and the BIC's half logarithm.
    """
    networks, response, x, y, folds = fit
    n, p = x.shape
    start = HardConcrete.from_active_prob(torch.full((p,), _START).to(x))
    model, guide = GatedNetworks(networks, response, n, start), InputGates(start, n)
    guide.close((x == x[0]).all(0).nonzero().flatten())
    training = _Training(model, guide, n, steps)
    price = math.log(p) + 0.5 * math.log(n)
    warm_up, tail = round(_WARM_UP * steps), math.ceil(_TAIL * steps)
    active = torch.zeros_like(guide.log_alpha.detach())
    model.train()
    for step in range(steps):
        # An untrained network is wrong as often as right: the gates wait until it has learned.
        move = 2 * step >= warm_up
        training.step(price * min(1.0, step / max(1, warm_up)), x, y, folds, move_gates=move)
        if step >= steps - tail:
            active += guide.gates().active_prob.detach() / tail
    return active


class _Training:
    """The optimiser's steps: weights by the observations of their folds, gates and noise by the others."""

    def __init__(self, model: GatedNetworks, guide: InputGates, size: int, steps: int) -> None:
        self._model, self._guide, self._size = model, guide, size
        self._elbo = L0_ELBO("l0")
        self._loss = self._elbo(model, guide)
        self._weights = list(model.networks.parameters())
        noise = list(model.response.parameters())
        self._judged = [guide.log_alpha, *noise]
        groups = [
            {"params": self._weights, "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
            {"params": guide.log_alpha, "lr": min(_GATE_RATE, _GATE_PATH / steps)},
            {"params": noise, "lr": _NOISE_RATE},
        ]
        self._optimiser = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)

    def step(self, price: float, x: Tensor, y: Tensor, folds: Sequence[Fold], *, move_gates: bool = True) -> None:
        """One step of everything, with a price of an open gate in nats."""
        self._elbo.lam = price / self._size  # the gates of every observation pay
        rows = random_rows([fold.train for fold in folds], BATCH)
        with torch.no_grad():  # the price of the gates does not affect the weights
            gated = x[rows] * self._guide.gates().rsample(rows.shape)
        nll = -self._model.distribution(gated).log_prob(y[rows].flatten()).mean()
        gradients = torch.autograd.grad(nll, self._weights)
        rows = random_rows([fold.held_out for fold in folds], _JUDGES)
        held_out = self._loss(x[rows], y[rows])
        gradients += torch.autograd.grad(held_out, self._judged)
        for parameter, gradient in zip([*self._weights, *self._judged], gradients, strict=True):
            parameter.grad = gradient
        if not move_gates:
            self._guide.log_alpha.grad = None
        self._optimiser.step()
        with torch.no_grad():
            self._guide.log_alpha.clamp_(max=_MOST)
