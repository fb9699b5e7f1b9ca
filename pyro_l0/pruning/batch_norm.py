"""Statistics of BatchNorm that belong to the network as it is now."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_l0.pruning.batches import BatchLoss, Loader
from pyro_l0.training.processes import average_buffers
from pyro_l0.training.stream import some_batches

__all__ = ["renew_statistics"]

_BATCHES = 20


@torch.no_grad()
def renew_statistics(network: nn.Module, loader: Loader, loss: BatchLoss) -> None:
    """Take the running statistics of BatchNorm anew, as means over a few batches.

    After units were removed the old ones describe inputs that no longer exist.

    Args:
        network: in any mode, in which it stays.
        loader: gives the batches.
        loss: knows what of a batch goes into the network.
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
