"""Several processes that train one network: how they meet, and what they share."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn

__all__ = [
    "average_buffers",
    "average_gradients",
    "gather",
    "in_first",
    "process_group",
    "processes",
    "rank",
    "share",
    "share_value",
]

_T = TypeVar("_T")


@contextmanager
def process_group(device: str | torch.device = "cpu") -> Iterator[bool]:
    """A context in which the processes that ``torchrun`` started form a group; without ``torchrun`` it does nothing.

    Args:
        device: where the processes train. On CUDA each takes the GPU of its local rank and communicates by NCCL, and by
            gloo for tensors on the CPU, such as the random states of a checkpoint.

    Yields:
        Whether this is the first process, the one that prints and writes.

    Example:
        >>> with process_group("cpu") as is_first:  # in a script run by torchrun or python
        ...     if is_first:
        ...         print("training")
        training
    """
    if "WORLD_SIZE" not in os.environ:
        yield True
        return
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Its functions have the group of that moment as a default. Were they first imported later, as the first step of an
    # optimiser does, the group would outlive its end, and its threads could abort the process when Python exits.
    importlib.import_module("torch.distributed.nn")
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    try:
        yield rank() == 0
        distributed.barrier()  # a process that leaves early takes the others' connection along
    finally:
        distributed.destroy_process_group()


def processes() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Which of them this is; the first, 0, prints and writes."""
    return distributed.get_rank() if processes() > 1 else 0


def gather(value: _T) -> list[_T]:
    """What each of the processes has; any value that can be pickled."""
    found = [value] * processes()
    if processes() > 1:
        distributed.all_gather_object(found, value)
    return found


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give all processes the mean of their gradients; what has none counts as 0."""
    if processes() == 1:
        return
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    _average([p.grad for p in trained if p.grad is not None])


@torch.no_grad()
def average_buffers(network: nn.Module) -> None:
    """Give all processes the mean of their buffers, such as statistics of BatchNorm."""
    if processes() > 1:
        _average([buffer for buffer in network.buffers() if buffer.is_floating_point()])


@torch.no_grad()
def share(network: nn.Module) -> None:
    """Give all processes the tensors of the first."""
    if processes() > 1:
        for value in network.state_dict().values():
            distributed.broadcast(value, 0)


def share_value(value: _T) -> _T:
    """What the first process has, in all of them; any value that can be pickled."""
    if processes() == 1:
        return value
    found = [value]
    distributed.broadcast_object_list(found, 0)
    return found[0]


def in_first(act: Callable[[], object]) -> None:
    """Do something in the first process alone; an OSError or a ValueError of it is raised in all."""
    refusal: Exception | None = None
    if rank() == 0:
        try:
            act()
        except (OSError, ValueError) as error:
            refusal = error
    refusal = share_value(refusal)
    if refusal is not None:
        raise refusal


def _average(values: list[Tensor]) -> None:
    """Average tensors over the processes, in place."""
    if not values:
        return
    flat = torch.cat([value.flatten().to(torch.promote_types(value.dtype, torch.float32)) for value in values])
    distributed.all_reduce(flat)
    flat /= processes()
    for value, part in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(part.view(value.shape))
