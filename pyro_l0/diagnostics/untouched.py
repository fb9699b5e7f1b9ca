"""Runs of a loss that leave everything as it was: random states, BatchNorm's statistics, what a guide watches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.elbo.watch import Watch
from pyro_l0.infer.guides.auto_gate import AutoGate

__all__ = ["first_batches", "probe_of", "untouched"]


@contextmanager
def untouched(guide: object, devices: Iterable[torch.device]) -> Iterator[None]:
    """A context in which losses may be run, with gradients on; what that changes is put back at its end.

    These are the random states of torch, NumPy and Python, and the buffers of every module that is called, such as
    BatchNorm's running statistics. Gradients are to be taken by ``torch.autograd.grad``, which leaves ``.grad`` alone.
    """
    saved: dict[int, tuple[nn.Module, dict[str, tuple[Tensor, Tensor]]]] = {}

    def save(module: nn.Module, inputs: object) -> None:
        if id(module) not in saved:
            held = {name: (x, x.detach().clone()) for name, x in module._buffers.items() if x is not None}
            saved[id(module)] = module, held

    watches = vars(guide).get("_watches") if isinstance(guide, AutoGate) else None
    state = get_rng_state()
    hook = register_module_forward_pre_hook(save)
    try:
        if isinstance(guide, AutoGate):
            guide._watches = []  # what it tells of a training does not count these runs
        cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        with (
            torch.random.fork_rng(cuda),
            torch.inference_mode(False),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        hook.remove()
        set_rng_state(state)
        if isinstance(guide, AutoGate) and watches is not None:
            guide._watches = watches
        for module, held in saved.values():
            _put_back(module, held)


@torch.no_grad()
def _put_back(module: nn.Module, held: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (buffer, value) in held.items():
        module._buffers[name] = buffer
        if not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(value)):
            buffer.copy_(value)


def probe_of(elbo: L0_ELBO) -> L0_ELBO:
    """A copy of an objective whose runs leave its step, its baseline and what it watches alone."""
    probe = copy.copy(elbo)
    probe._watch = Watch()
    probe.estimator = copy.copy(elbo.estimator)
    return probe


def first_batches(batches: Iterable[object], number: int) -> list[object]:
    """The first of some batches; a loader's own generator is left as it was."""
    holders = [batches, getattr(batches, "sampler", None)]
    found = (getattr(holder, "generator", None) for holder in holders)
    generators = [(x, x.get_state()) for x in found if isinstance(x, torch.Generator)]
    first = [batch for batch, _ in zip(batches, range(number), strict=False)]
    for generator, state in generators:
        generator.set_state(state)
    return first
