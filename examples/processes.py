"""Several processes that train one network: how they meet, what each has of a batch, and their random numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["check_shares", "parallel", "place", "process_group", "random_states", "set_random_state", "shuffled"]


@contextmanager
def process_group(device: str) -> Iterator[bool]:
    """Join the processes that ``torchrun`` started, if it did; yields whether this is the first of them.

    Args:
        device: ``"cpu"`` joins by gloo, ``"cuda"`` by NCCL with one GPU per process, and by gloo for what lies on the
            host, such as the random states of a checkpoint.
    """
    if "WORLD_SIZE" not in os.environ:
        yield True
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield distributed.get_rank() == 0
        distributed.barrier()  # a process that leaves early takes the others' connection along
    finally:
        distributed.destroy_process_group()


def check_shares(num_data: int, batch_size: int, processes: int) -> None:
    """Refuse batches that have no example for every process.

    Args:
        num_data: examples in the data set.
        batch_size: examples per step; the last batch has what is left.
        processes: which share every batch.

    Raises:
        ValueError: the last batch has fewer examples than there are processes.
    """
    last = num_data % batch_size or batch_size
    if last < processes:
        raise ValueError(
            f"Expected at least {processes} examples in every batch, one per process, but the last of {num_data} "
            f"examples in batches of {batch_size} has {last}; hold out another number or take other batches."
        )


def place() -> tuple[int, int]:
    """How many processes train together, and which of them this is."""
    return (distributed.get_world_size(), distributed.get_rank()) if distributed.is_initialized() else (1, 0)


def parallel(loss: nn.Module) -> nn.Module:
    """A loss whose gradients are averaged over the processes; to be made again when its parameters are others."""
    return DistributedDataParallel(loss) if place()[0] > 1 else loss


def shuffled(num_data: int, device: torch.device) -> Tensor:
    """A random order of all examples, the same in all processes."""
    order = torch.randperm(num_data).to(device)
    if place()[0] > 1:
        distributed.broadcast(order, 0)
    return order


def random_states(device: torch.device) -> Tensor:
    """The random number generators of all processes, one per row: the host's, and behind it the device's.

    Args:
        device: where the gates are drawn.
    """
    own = torch.get_rng_state()
    if device.type != "cpu":
        own = torch.cat([own, torch.get_device_module(device).get_rng_state(*_numbered(device))])
    if not distributed.is_initialized():
        return own[None]
    states = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(states, own)
    return torch.stack(states)


def set_random_state(states: Tensor, device: torch.device) -> None:
    """Go on with this process's generators.

    Args:
        states: from :func:`random_states`.
        device: as there.

    Raises:
        ValueError: they are of another number of processes, or of another kind of device.
    """
    processes, process = place()
    if len(states) != processes:
        raise ValueError(f"Expected as many processes as the checkpoint has, {len(states)}, but got {processes}.")
    own = states[process].clone()
    host = torch.get_rng_state().numel()
    if own.numel() < host or (own.numel() > host) != (device.type != "cpu"):
        raise ValueError(f"Expected random states of {device.type}, but the checkpoint has {own.numel()} bytes.")
    torch.set_rng_state(own[:host])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(own[host:], *_numbered(device))


def _numbered(device: torch.device) -> tuple[torch.device, ...]:
    """The device as an argument where it is not the current one of its kind."""
    return () if device.index is None else (device,)
