"""Batches of any loader: what of them goes into the network, what into the loss, and on which device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from torch.utils.data import DistributedSampler

from pyro_l0.pruning.distillation import Distillation
from pyro_l0.training.epochs import some_batches
from pyro_l0.training.processes import average_buffers

__all__ = ["BatchLoss", "Loader", "LossFunction", "groups", "renew_statistics", "trained_modules"]

LossFunction = Callable[..., Tensor]
_BATCHES = 20  # for statistics of BatchNorm


@runtime_checkable
class Loader(Protocol):
    """What gives batches, again and again; a :class:`torch.utils.data.DataLoader` is one."""

    def __len__(self) -> int:
        """The number of batches of an epoch."""

    def __iter__(self) -> Iterator[object]:
        """The batches of an epoch."""


class BatchLoss:
    """The loss of a network on a batch: the mean over it, or the sum, of shape ``()``.

    A tuple or a list is inputs and, last, targets; of anything else all is input, and the targets are the batch itself,
    as is the one entry of a tuple that has no more. Inputs are a tensor, several in a tuple or a list, or keywords in a
    dict, as in an example of the network's. With a ``distillation`` a part of it compares the outputs with a teacher's.
    """

    distillation: Distillation | None = None

    def __init__(self, function: LossFunction, device: torch.device, autocast: torch.dtype | None) -> None:
        self.function, self.device, self._autocast = function, device, autocast

    def __call__(self, network: nn.Module, batch: object) -> Tensor:
        """The loss, shape ``()``; one that is no number, or that no gradient passes, is refused."""
        inputs, targets = self.split(batch)
        outputs = self.outputs(network, inputs)
        loss = self.of_outputs(outputs, targets)
        if self.distillation is not None:
            taught = self._taught(self.distillation, inputs)
            other = self._one(self.distillation.divergence, "distil's function", outputs, taught, targets)
            loss = torch.lerp(loss, other.to(loss), self.distillation.weight)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError(
                "Expected a loss that depends on the network's outputs, but no gradient passes; return it from loss_fn "
                "as a tensor that was not detached."
            )
        return loss

    def of_outputs(self, outputs: object, targets: object) -> Tensor:
        """The loss of what a network returned."""
        return self._one(self.function, "loss_fn(outputs, targets)", outputs, targets)

    def teach(self, distillation: Distillation, batch: object) -> None:
        """Learn from a teacher, too; a batch shows whether its outputs can be learned from."""
        distillation.check(self._taught(distillation, self.split(batch)[0]))
        self.distillation = distillation

    def outputs(self, network: nn.Module, inputs: object) -> object:
        """What the network returns."""
        with self._context():
            if isinstance(inputs, Mapping):
                return network(**inputs)
            if not isinstance(inputs, (tuple, list)):
                return network(inputs)
            try:
                return network(*inputs)
            except TypeError as error:
                error.add_note(
                    f"The batch gave {len(inputs)} inputs, as only its last item is targets; put several targets into "
                    "one, such as (image, (label, box))."
                )
                raise

    def split(self, batch: object) -> tuple[object, object]:
        """Inputs and targets, on the device."""
        if isinstance(batch, Mapping):
            batch = dict(batch)  # moved as such, whatever its class
        batch = tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), batch)
        if not isinstance(batch, (tuple, list)):
            return batch, batch
        if len(batch) == 1:
            return batch[0], batch[0]
        *inputs, targets = batch
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets

    @torch.no_grad()
    def _taught(self, distillation: Distillation, inputs: object) -> object:
        return self.outputs(distillation.teacher, inputs)

    def _one(self, function: Callable[..., Tensor], name: str, *given: object) -> Tensor:
        """The number that a function returns, shape ``()``."""
        with self._context():
            loss = function(*given)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(
                f"Expected {name} to return a tensor of one number, but got {got}; take the mean over the batch."
            )
        return loss.reshape(())

    def _context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)


def groups(loader: Loader, size: int, epoch: int) -> Iterator[list[object]]:
    """The batches of an epoch, so many for each step; what is left over at the end makes a smaller group."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)
    group: list[object] = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


@torch.no_grad()
def renew_statistics(network: nn.Module, loader: Loader, loss: BatchLoss) -> None:
    """Take the running statistics of BatchNorm anew, as means over a few batches.

    After units were removed the old ones describe inputs that no longer exist. The network's mode stays.
    """
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    modes = {module: module.training for module in network.modules()}
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
        norm.train()
    try:
        for batch in islice(some_batches(loader), _BATCHES):
            loss.outputs(network, loss.split(batch)[0])
        average_buffers(network)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training


def trained_modules(network: nn.Module, loss: BatchLoss, batch: object) -> set[str]:
    """The paths of the modules whose own parameters a loss trains; a copy is called, with random numbers of its own."""
    copied = copy.deepcopy(network).train()
    with torch.random.fork_rng([loss.device] if loss.device.type == "cuda" else []):
        loss(copied, batch).backward()
    return {name.rpartition(".")[0] for name, p in copied.named_parameters() if p.grad is not None}
