"""Backward elimination of inputs, judged by networks that have learned to do without any of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_l0.selection.network_inputs.cross_fitting import BATCH, CrossFit, random_rows, weights_optimiser

__all__ = ["eliminate", "held_out_losses", "train_for_subsets"]

_SHARE = 0.05  # of the inputs that have to go, closed at once
_ROUNDING = 100  # epsilons of the mean loss: what a network's order of additions may change


def train_for_subsets(fit: CrossFit, *, steps: int) -> None:
    """Train networks behind random gates, so that they know the best prediction from every subset of the inputs.

    Each observation draws the probability of an open gate from U(0, 1), so that any number of open gates is as likely
    as any other, and then its gates. A closed input is 0, the mean of a standardised one.
    """
    networks, response, x, y, folds = fit
    optimiser = weights_optimiser(q for network in networks for q in network.parameters())
    schedule = CosineAnnealingLR(optimiser, steps)
    for network in networks:
        network.train()
    for _ in range(steps):
        rows = random_rows([fold.train for fold in folds], BATCH)
        gates = torch.rand(*rows.shape, x.shape[1]).to(x) < torch.rand(*rows.shape, 1).to(x)
        outputs = [response.output(net(part)) for net, part in zip(networks, x[rows] * gates, strict=True)]
        loss = -response.distribution(torch.cat(outputs)).log_prob(y[rows].flatten()).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


@torch.no_grad()
def held_out_losses(fit: CrossFit, is_open: Tensor) -> Tensor:
    """Negative log likelihoods of all observations, shape ``(n,)``, by the networks that have never seen them.

    The networks, in evaluation mode, see the inputs that are open, shape ``(p,)``.
    """
    networks, response, x, y, folds = fit
    losses = torch.zeros(len(y)).to(x)
    for network, (_, rows) in zip(networks, folds, strict=True):
        output = response.output(network(x[rows] * is_open))
        losses[rows] = -response.distribution(output).log_prob(y[rows])
    return losses


def eliminate(fit: CrossFit, *, n_features: int, alone: Tensor) -> Tensor:
    """Close the inputs whose loss harms the held-out likelihood least, until ``n_features`` are left.

    Gives ranks, shape ``(p,)``: 1 for kept inputs, larger the earlier an input was closed. Losses of near duplicates
    differ by less than their noise, and the least one would depend on the seed. Of all inputs whose closing is within
    one standard error of the best (Breiman et al. 1984), those that explain least ``alone``, on any scale, are closed.

    In each round a twentieth of those that have to go is closed, at least one: two near duplicates that were closed at
    once would both be missed. That takes about 20 p evaluations of the loss where few inputs are left, and at most
    p²/2. Constant inputs go first.
    """
    for network in fit.networks:
        network.eval()
    x = fit.x
    varies = (x != x[0]).any(0)
    alone = torch.where(varies, alone.to(x), -torch.inf)
    is_open, ranks = torch.ones_like(varies), torch.ones(len(varies), dtype=torch.long, device=x.device)
    while (surplus := int(is_open.sum()) - n_features) > 0:
        candidates = is_open.nonzero().flatten()
        losses = []
        for j in candidates.tolist():
            rest = is_open.clone()
            rest[j] = False
            losses.append(held_out_losses(fit, rest))
        order = _least_missed(torch.stack(losses), alone[candidates])
        is_open[candidates[order[: max(1, int(_SHARE * surplus))]]] = False
        ranks[~is_open] += 1
    return ranks


def _least_missed(losses: Tensor, alone: Tensor) -> Tensor:
    """Candidates in the order in which they may go, from the losses of each observation without each candidate."""
    means = losses.mean(1)
    if bool(means.isnan().any()):
        raise ValueError("Expected a net whose outputs stay finite in training, but its loss became nan.")
    best = losses[means.argmin()]
    above = losses - best
    # Losses of exact copies differ by rounding alone, which may exceed its own standard error.
    rounding = _ROUNDING * torch.finfo(losses.dtype).eps * best.abs().mean()
    is_tied = above.mean(1) <= above.std(1) / math.sqrt(losses.shape[1]) + rounding
    is_tied |= alone.isinf()
    by_loss = means.argsort(stable=True)
    by_alone = alone.argsort(stable=True)
    return torch.cat([by_alone[is_tied[by_alone]], by_loss[~is_tied[by_loss]]])
