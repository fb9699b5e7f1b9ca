"""Gradients of the data and of the price for the gates, by runs of a loss that leave everything as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pyro.infer.elbo import ELBOModule
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_l0.fast.record import Record
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.elbo.watch import Watch
from pyro_l0.infer.guides.auto_gate import AutoGate

__all__ = ["Loss", "Pulls", "arguments_of", "first_batches", "measure_pulls", "objective_of", "untouched"]

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Pulls:
    """Gradients for the locations of the gates, by site."""

    data: dict[str, Tensor]  # shape ``(draws, gates)``; of the whole loss where its price is not known separately
    price: dict[str, Tensor] | None  # shape ``(gates,)``; None where it is not known

    def mean(self, name: str) -> Tensor | None:
        """The mean gradient of a site, its price included."""
        if name not in self.data:
            return None
        data = self.data[name].mean(0)
        return data if self.price is None else data + self.price[name]


def objective_of(loss: Loss | None) -> L0_ELBO | None:
    """The objective of a loss that is ``L0_ELBO(...)(model, guide)``; None for any other."""
    elbo = loss.elbo if isinstance(loss, ELBOModule) else None
    return elbo if isinstance(elbo, L0_ELBO) else None


def arguments_of(batch: object) -> tuple[object, ...]:
    """The arguments of a loss in a batch."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def first_batches(batches: Iterable[object], number: int) -> list[object]:
    """The first of some batches; a loader's own generator is left as it was."""
    holders = [batches, getattr(batches, "sampler", None)]
    found = (getattr(holder, "generator", None) for holder in holders)
    generators = [(x, x.get_state()) for x in found if isinstance(x, torch.Generator)]
    first = [batch for batch, _ in zip(batches, range(number), strict=False)]
    for generator, state in generators:
        generator.set_state(state)
    return first


def measure_pulls(loss: Loss, batches: Sequence[object], locations: dict[str, Tensor], draws: int) -> Pulls:
    """Gradients over some draws, which go through the batches in turn.

    An ``L0_ELBO(...)(model, guide)`` is split into data and price. Sites without ``requires_grad`` are left out.
    """
    asked = {name: x for name, x in locations.items() if x.requires_grad}
    elbo = objective_of(loss)
    runs = [arguments_of(batches[i % len(batches)]) for i in range(draws)]
    if elbo is None or not isinstance(loss, ELBOModule):
        rows, price = [_gradients(loss(*run), asked) for run in runs], None
    else:
        free, priced = _probe(elbo), _probe(elbo)
        free.lam, free.weight_decay, free.kl_scale = 0.0, 0.0, 0.0
        rows = [_gradients(free.differentiable_loss(loss.model, loss.guide, *run), asked) for run in runs]
        with Record() as record:
            loss.guide(*runs[0])
        total = sum(priced.evaluate(loss.model, record, {}, runs[0], {}).analytic, torch.zeros(()))
        price = dict(zip(asked, _gradients(total, asked), strict=True))
    return Pulls({name: torch.stack([row[i] for row in rows]) for i, name in enumerate(asked)}, price)


def _probe(elbo: L0_ELBO) -> L0_ELBO:
    """A copy of an objective whose runs leave its step, its baseline and its watch alone."""
    probe = copy.copy(elbo)
    probe._watch = Watch()
    probe.estimator = copy.copy(elbo.estimator)
    return probe


def _gradients(loss: Tensor, asked: dict[str, Tensor]) -> list[Tensor]:
    if not (asked and loss.requires_grad):
        return [torch.zeros(x.numel()) for x in asked.values()]
    found = torch.autograd.grad(loss, list(asked.values()), materialize_grads=True)
    return [x.detach().flatten().float().cpu() for x in found]


@contextmanager
def untouched(guide: object, devices: Iterable[torch.device]) -> Iterator[None]:
    """A context in which losses may be run, with gradients on; at its end, what they changed is put back.

    This covers the random states of torch, NumPy and Python, and the buffers of every module that is called, such as
    BatchNorm's running statistics. Take gradients by ``torch.autograd.grad``, which leaves ``.grad`` alone.
    """
    saved: dict[nn.Module, dict[str, tuple[Tensor, Tensor]]] = {}

    def save(module: nn.Module, inputs: object) -> None:
        if module not in saved:
            saved[module] = {name: (x, x.detach().clone()) for name, x in module._buffers.items() if x is not None}

    watches = guide._watches if isinstance(guide, AutoGate) else []
    state = get_rng_state()
    hook = register_module_forward_pre_hook(save)
    try:
        if isinstance(guide, AutoGate):
            guide._watches = []  # these runs do not count as training
        cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        with torch.random.fork_rng(cuda), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hook.remove()
        set_rng_state(state)
        if isinstance(guide, AutoGate):
            guide._watches = watches
        for module, held in saved.items():
            _put_back(module, held)


@torch.no_grad()
def _put_back(module: nn.Module, held: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (buffer, value) in held.items():
        module._buffers[name] = buffer
        if not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(value)):
            buffer.copy_(value)
