"""What pulls at gates: the gradients of the data and of the price for their locations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pyro.infer.elbo import ELBOModule
from torch import Tensor

from pyro_l0.diagnostics.untouched import probe_of
from pyro_l0.fast.record import Record
from pyro_l0.infer.elbo.elbo import L0_ELBO

__all__ = ["Loss", "Pulls", "measure_pulls", "objective_of"]

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Pulls:
    """Gradients for the locations of the gates, by site.

    Attributes:
        data: of the data's terms at each draw, shape ``(draws, gates)``; of the whole loss where its price is not known
            apart.
        price: of the price, shape ``(gates,)``; None where it is not known.
    """

    data: dict[str, Tensor]
    price: dict[str, Tensor] | None


def objective_of(loss: Loss | None) -> L0_ELBO | None:
    """The objective of a loss that is ``L0_ELBO(...)(model, guide)``; None for any other."""
    elbo = loss.elbo if isinstance(loss, ELBOModule) else None
    return elbo if isinstance(elbo, L0_ELBO) else None


def arguments_of(batch: object) -> tuple[object, ...]:
    """The arguments of a loss in a batch."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def measure_pulls(loss: Loss, batches: Sequence[object], locations: dict[str, Tensor], draws: int) -> Pulls:
    """Gradients over some draws, which go through the batches in turn.

    Args:
        loss: of a batch; an ``L0_ELBO(...)(model, guide)`` comes apart into data and price.
        batches: at least one.
        locations: the parameter of each site; those that ask for no gradient have none here.
        draws: how many.
    """
    asked = {name: x for name, x in locations.items() if x.requires_grad}
    elbo = objective_of(loss)
    runs = [arguments_of(batches[i % len(batches)]) for i in range(draws)]
    if elbo is None or not isinstance(loss, ELBOModule):
        return Pulls(_stacked(asked, [_gradients(loss(*run), asked) for run in runs]), None)
    free = probe_of(elbo)
    free.lam, free.weight_decay, free.kl_scale = 0.0, 0.0, 0.0
    data = [_gradients(free.differentiable_loss(loss.model, loss.guide, *run), asked) for run in runs]
    return Pulls(_stacked(asked, data), _price(probe_of(elbo), loss, runs[0], asked))


def _price(probe: L0_ELBO, loss: ELBOModule, run: tuple[object, ...], asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the terms that do not depend on what is drawn."""
    with Record() as record:
        loss.guide(*run)
    total = sum(probe.evaluate(loss.model, record, {}, run, {}).analytic, torch.zeros(()))
    return dict(zip(asked, _gradients(total, asked), strict=True))


def _gradients(loss: Tensor, asked: dict[str, Tensor]) -> list[Tensor]:
    if not (asked and loss.requires_grad):
        return [torch.zeros(x.numel()) for x in asked.values()]
    found = torch.autograd.grad(loss, list(asked.values()), materialize_grads=True)
    return [x.detach().flatten().float().cpu() for x in found]


def _stacked(asked: dict[str, Tensor], rows: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(asked)}
