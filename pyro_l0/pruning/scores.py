"""What the units of a trained network are worth by scores, and the gates that keep the best of them in a budget."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn

from pyro_l0.nn import fix_gates
from pyro_l0.nn.engine import Example, analyse, record
from pyro_l0.nn.engine.readers import Use, find_readers, find_writers
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names
from pyro_l0.pruning.phases import BatchLoss, evaluate_mode
from pyro_l0.training.processes import gather

__all__ = ["magnitudes", "slopes", "unit_scores"]

_BATCHES = 10  # of a pass
Scores = dict[str, Tensor]  # by gate site, of every unit, shape ``(size,)``


def unit_scores(gated: nn.Module, example: Example, loss: BatchLoss, batches: Iterable[object]) -> dict[str, Scores]:
    r"""Scores of the units behind a network's gates, by their names; each over its mean at the site.

    With :math:`g_b` the derivative of the loss of batch b by a unit's gate, all gates being 1, they are

    - L1: the mean of :math:`\sum |w|` over the layers that write or read the unit;
    - Taylor: :math:`|\sum_b g_b|`, what the loss changes without the unit, in first order;
    - Fisher: :math:`\sum_b g_b^2`.

    A score that is zero everywhere, as slopes are where the loss is least, is left out.

    References:
        Molchanov et al. (2019), arXiv:1906.10771, eq. 8; Theis et al. (2018), arXiv:1801.05787, eq. 5; Torch-Pruning
        1.6.1, ``GroupMagnitudeImportance``, for L1 and the means.
    """
    found = slopes(gated, loss, islice(batches, _BATCHES))
    scores = {
        "L1": magnitudes(gated, example),
        "Taylor": {site: slope.sum(0).abs() for site, slope in found.items()},
        "Fisher": {site: slope.square().sum(0) for site, slope in found.items()},
    }
    scaled = {
        name: {site: (x / x.mean().clamp(min=torch.finfo(x.dtype).tiny)).float() for site, x in each.items()}
        for name, each in scores.items()
    }
    return {name: each for name, each in scaled.items() if any(bool(x.any()) for x in each.values())}


def slopes(gated: nn.Module, loss: BatchLoss, batches: Iterable[object]) -> Scores:
    """By site, the derivatives of each batch's loss by the gates where all are 1, shape ``(batches, size)``.

    In evaluation mode; of several processes the batches of all.
    """
    sites = gate_names(gated)
    paths = {module: path for path, module in gated.named_modules()}
    network = fix_gates(gated, {site: torch.ones(gate.size, dtype=torch.float64) for site, gate in sites.items()})
    evaluate_mode(network.to(loss.device))
    values: list[Tensor] = []
    for gate in sites.values():
        fixed = network.get_submodule(paths[gate])
        assert isinstance(fixed, FixedGate)
        values.append(fixed.value.requires_grad_())
    rows = [torch.autograd.grad(loss(network, batch), values, materialize_grads=True) for batch in batches]
    slopes_here = {
        site: torch.stack(of_gates).cpu() for site, of_gates in zip(sites, zip(*rows, strict=True), strict=True)
    }
    everywhere = gather(slopes_here)
    return {site: torch.cat([of_process[site] for of_process in everywhere]) for site in slopes_here}


@torch.no_grad()
def magnitudes(gated: nn.Module, example: Example) -> Scores:
    """By site, sums of the absolute weights that write or read a unit: means over their layers, shape ``(size,)``."""
    maps = analyse(record(gated, example), {}).maps
    weights = dict(gated.named_parameters(remove_duplicate=False))
    sums = {site: torch.zeros(gate.size, dtype=torch.float64) for site, gate in gate_names(gated).items()}
    layers = dict.fromkeys(sums, 0)
    for use in (*find_writers(maps), *find_readers(maps)):
        if use.weight.names and use.weight.names[0] in weights:
            entries = _by_entry(weights[use.weight.names[0]].abs(), use).flatten(1).sum(1).cpu().double()
            sums[use.site].index_add_(0, torch.from_numpy(use.units), entries[torch.from_numpy(use.entries)])
            layers[use.site] += 1
    return {site: total / max(layers[site], 1) for site, total in sums.items()}


def _by_entry(weight: Tensor, use: Use) -> Tensor:
    """A weight with one row for each entry that is read or written, of all groups."""
    if use.groups == 1:
        return weight.movedim(use.dim, 0)
    parts: Tensor = weight.unflatten(0, (use.groups, -1)).movedim(2, 1)  # groups, their inputs, their outputs
    return parts.flatten(0, 1)
