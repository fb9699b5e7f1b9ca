"""Cross-fitted training: weights see some folds of the data, gates are judged by the others."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_l0.distributions import HardConcrete
from pyro_l0.infer import L0_ELBO, GateGuide, SparsityTarget
from pyro_l0.nn import Gate, fix_gates
from pyro_l0.selection.input_gates import SITE, GatedNetworks, InputGates
from pyro_l0.selection.responses import Response

__all__ = ["Fold", "refit", "train_gates"]

_BATCH, _JUDGES = 128, 512  # observations per network that a step trains the weights by, and the gates
_LEARNING_RATE, _WEIGHT_DECAY = 3e-3, 1e-2
_GATE_PATH, _GATE_RATE = 36.0, 0.1  # the way of log alpha over all steps, and the most that a step goes
_NOISE_RATE = 0.01
_BETAS = (0.9, 0.99)
_START = 0.9  # P(z != 0): nearly open, so that interactions are learned before anything is closed
_MOST = 4.0  # log alpha; a gate that is open for certain would take long to close again
_WARM_UP = 0.2  # of the steps, while the price rises
_TAIL = 0.15  # of the steps, at the end; a target falls to its budget between warm-up and tail
_DUAL_RATE = 30.0  # nats per observation and unit of violation, over all steps
_LOOK = 25  # steps between looks at the held-out loss


class Fold(NamedTuple):
    """Observations that one network is trained on, and those that it never sees; their numbers."""

    train: Tensor
    held_out: Tensor


def train_gates(
    networks: Sequence[nn.Module],
    response: Response,
    x: Tensor,
    y: Tensor,
    folds: Sequence[Fold],
    *,
    n_features: int | None,
    steps: int,
) -> Tensor:
    r"""Train one network per fold and the gates that all share.

    The objective is Eq. 22 of the L0 paper, with the weights of each network following the observations of its fold and
    the gates, like the noise scale, those that it has not seen. So an input by which a network only memorises closes,
    and the likelihood is honest about the noise. Without a number of features the price of an open gate is
    :math:`\log p + \frac12 \log n` nats: what it takes to say which of p inputs, and the BIC's half logarithm. With a
    number the price is found by :class:`~pyro_l0.infer.SparsityTarget`, and the noise scale stays 1, where no
    likelihood is so steep that the price comes too late.

    Args:
        networks: one per fold, of inputs ``(B, p)``; trained in place.
        response: what their outputs mean; its parameters are trained in place.
        x: standardised inputs, shape ``(n, p)``.
        y: encoded observations, shape ``(n,)``.
        folds: the observations of each network.
        n_features: inputs that are wanted, or None.
        steps: of the optimisers.

    Returns:
        P(z != 0) of each gate, the mean over the last 15 % of the steps, shape ``(p,)``.

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; Yamada et al. (2020), Feature Selection using Stochastic
        Gates, arXiv:1810.04247.
    """
    n, p = x.shape
    start = HardConcrete.from_active_prob(torch.full((p,), _START).to(x))
    model, guide = GatedNetworks(networks, response, n, start), InputGates(start, n)
    guide.close(SITE, (x == x[0]).all(0).nonzero().flatten())
    training = _Training(model, guide, n, steps, learn_noise=n_features is None)
    price = math.log(p) + 0.5 * math.log(n) if n_features is None else 0.0
    warm_up, tail = round(_WARM_UP * steps), math.ceil(_TAIL * steps)
    active = torch.zeros_like(guide.log_alpha.detach())
    model.train()
    for step in range(steps):
        if step == warm_up and n_features is not None and n_features < p:
            training.aim(n_features, steps - tail - warm_up)
        # What a network has at its start is wrong as often as right: the gates wait until it has learned.
        move = 2 * step >= warm_up
        training.step(price * min(1.0, step / max(1, warm_up)), x, y, folds, move_gates=move)
        if step >= steps - tail:
            active += guide.gates().active_prob.detach() / tail
    return active


class _Training:
    """The optimiser's steps: weights by the observations of their folds, gates and noise by the others."""

    def __init__(self, model: GatedNetworks, guide: InputGates, size: int, steps: int, *, learn_noise: bool) -> None:
        self._model, self._guide, self._size = model, guide, size
        self._elbo = L0_ELBO("l0")
        self._loss = self._elbo(model, guide)
        self._target: SparsityTarget | None = None
        self._weights = list(model.networks.parameters())
        noise = list(model.response.parameters()) if learn_noise else []
        self._judged = [guide.log_alpha, *noise]
        groups = [
            {"params": self._weights, "lr": _LEARNING_RATE, "weight_decay": _WEIGHT_DECAY},
            {"params": guide.log_alpha, "lr": min(_GATE_RATE, _GATE_PATH / steps)},
            {"params": noise, "lr": _NOISE_RATE},
        ]
        self._optimiser = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=0.0, fused=True)

    def aim(self, n_features: int, steps: int) -> None:
        """From now on, raise a price until no more features are open; the half is for rounding."""
        budget = (n_features + 0.5) / len(self._guide.log_alpha)
        rate = _DUAL_RATE * self._size / steps
        guide = cast(GateGuide, self._guide)  # of which a target needs no other methods
        self._target = SparsityTarget(guide, {SITE: budget}, dual_rate=rate, warm_up=steps)

    def _fit_of(self, x: Tensor, y: Tensor) -> Tensor:
        """Negative log likelihood of the networks at a draw of the gates, whose price is no concern of the weights."""
        with torch.no_grad():
            gated = x * self._guide.gates().rsample(y.shape)
        return -self._model.distribution(gated).log_prob(y.flatten()).mean()

    def step(self, price: float, x: Tensor, y: Tensor, folds: Sequence[Fold], *, move_gates: bool = True) -> None:
        """One step of everything, with a price of an open gate in nats."""
        self._elbo.lam = price / self._size  # the gates of every observation pay
        rows = _batch([fold.train for fold in folds], _BATCH)
        gradients = torch.autograd.grad(self._fit_of(x[rows], y[rows]), self._weights)
        rows = _batch([fold.held_out for fold in folds], _JUDGES)
        held_out = self._loss(x[rows], y[rows])
        if self._target is not None:
            held_out = held_out + self._target.penalty()
        gradients += torch.autograd.grad(held_out, self._judged)
        for parameter, gradient in zip([*self._weights, *self._judged], gradients, strict=True):
            parameter.grad = gradient
        if not move_gates:
            self._guide.log_alpha.grad = None
        self._optimiser.step()
        with torch.no_grad():
            self._guide.log_alpha.clamp_(max=_MOST)
        if self._target is not None:
            self._target.ascend()


def _batch(parts: Sequence[Tensor], size: int) -> Tensor:
    """Numbers of random observations, as many of each part, shape ``(M, B)``; whole parts where they are small."""
    size = min(size, min(len(part) for part in parts))
    return torch.stack([part[torch.randperm(len(part))[:size]] for part in parts])


def refit(
    network: nn.Module, selected: Tensor, response: Response, x: Tensor, y: Tensor, fold: Fold, *, steps: int
) -> nn.Module:
    """A copy of a network that reads the selected inputs alone, trained on; the best on the held-out observations.

    Args:
        network: of inputs ``(B, p)``; not changed.
        selected: which inputs it reads, shape ``(p,)``.
        response: what its outputs mean.
        x: standardised inputs, shape ``(n, p)``.
        y: encoded observations, shape ``(n,)``.
        fold: the observations to train on, and those that tell when to stop.
        steps: of the optimiser.
    """
    gated = nn.Sequential(Gate(len(selected)), network)
    net = fix_gates(gated, {"0": selected.to(x)})
    optimiser = torch.optim.AdamW(
        net.parameters(), lr=_LEARNING_RATE, betas=_BETAS, weight_decay=_WEIGHT_DECAY, fused=True
    )
    schedule = CosineAnnealingLR(optimiser, steps)
    best, state = math.inf, copy.deepcopy(net.state_dict())

    def loss(rows: Tensor) -> Tensor:
        return -response.distribution(response.output(net(x[rows]))).log_prob(y[rows]).mean()

    for step in range(1, steps + 1):
        net.train()
        optimiser.zero_grad()
        loss(_batch([fold.train], _BATCH)[0]).backward()
        optimiser.step()
        schedule.step()
        if step % _LOOK == 0 or step == steps:
            net.eval()
            with torch.no_grad():
                now = float(loss(fold.held_out))
            if now < best:
                best, state = now, copy.deepcopy(net.state_dict())
    net.load_state_dict(state)
    return net.eval()
