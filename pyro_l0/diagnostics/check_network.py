"""Whether the deterministic network is the one that was trained: its error, and the statistics of its BatchNorm."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_l0.diagnostics.findings import Finding
from pyro_l0.diagnostics.pulls import arguments_of
from pyro_l0.infer.guide import GateGuide
from pyro_l0.nn.fixed import fix_gates

__all__ = ["Error", "check_gap", "check_statistics"]

Error = Callable[..., float | Tensor]
_GAP = 0.1
_DEVIATIONS = 4.0
_MEAN_OFF = 1.0  # standard deviations
_SCALE_OFF = math.log(4.0)


class Gap(NamedTuple):
    """The error of the network with its test gates, and with sampled ones; the standard error of their difference."""

    fixed: float
    sampled: float
    deviation: float


@torch.no_grad()
def measure_gap(network: nn.Module, guide: GateGuide, error: Error, batches: Sequence[object], draws: int) -> Gap:
    """Errors in eval mode over some batches, each with draws of its own."""

    def errors(gates: Mapping[str, Tensor]) -> Tensor:
        fixed = fix_gates(network, gates).eval()
        return torch.tensor([float(error(fixed, *arguments_of(batch))) for batch in batches])

    fixed = errors(guide.test_gates())
    sampled = torch.stack([errors({k: gate.sample() for k, gate in guide.posterior().items()}) for _ in range(draws)])
    deviation = float(sampled.mean(1).std() / math.sqrt(draws))
    return Gap(float(fixed.mean()), float(sampled.mean()), deviation)


def check_gap(network: nn.Module, guide: GateGuide, error: Error, batches: Sequence[object]) -> Iterator[Finding]:
    """Find errors of sampled and of deterministic gates that are far from each other."""
    gap = measure_gap(network, guide, error, batches, draws=8)
    apart = gap.sampled - gap.fixed
    if abs(apart) > _GAP + _DEVIATIONS * gap.deviation:
        more = "sampled" if apart > 0 else "deterministic"
        remedy = (
            "Sampled gates wreck the network that training sees: start its gates further open (init_active_prob), or train "
            "longer with them."
            if apart > 0
            else "The network was trained with gates that pruning closes: train the gates longer or at a larger rate until "
            "they are decided, and fine-tune the network with its gates fixed."
        )
        yield Finding(
            "sampled-gap",
            (),
            f"the error is {gap.fixed:.3g} with deterministic gates and {gap.sampled:.3g} with sampled ones; the "
            f"{more} network is worse.",
            remedy,
        )


class Statistics(NamedTuple):
    """How far a layer's running statistics are from those of the batches, means over its channels."""

    mean: float
    scale: float


@torch.no_grad()
def measure_statistics(
    network: nn.Module, gates: Mapping[str, Tensor], batches: Sequence[object]
) -> dict[str, Statistics]:
    """The running statistics of each BatchNorm layer beside those of batches in the deterministic network.

    Returns:
        By layer: the distance of the means in standard deviations of the batches, and of the variances' logs.
    """
    fixed = fix_gates(network, gates).eval()
    kept = {name: copy.deepcopy(x) for name, x in fixed.named_modules() if _is_tracking(x)}
    for name, layer in fixed.named_modules():
        if name in kept and isinstance(layer, _BatchNorm):
            layer.reset_running_stats()
            layer.momentum = None  # the mean over batches
            layer.train()
    for batch in batches:
        inputs = arguments_of(batch)[0]
        fixed(*inputs) if isinstance(inputs, tuple | list) else fixed(inputs)
    found = {}
    for name, layer in fixed.named_modules():
        if name not in kept or not isinstance(layer, _BatchNorm) or not int(layer.num_batches_tracked or 0):
            continue
        mean, variance = layer.running_mean, layer.running_var
        old_mean, old_variance = kept[name].running_mean, kept[name].running_var
        assert mean is not None and variance is not None and old_mean is not None and old_variance is not None
        alive = variance > 1e-3 * variance.max()
        if bool(alive.any()):
            off = (old_mean - mean).abs() / variance.sqrt()
            ratio = torch.log(old_variance / variance).abs()
            found[name] = Statistics(float(off[alive].mean()), float(ratio[alive].mean()))
    return found


def _is_tracking(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None


def check_statistics(network: nn.Module, gates: Mapping[str, Tensor], batches: Sequence[object]) -> Iterator[Finding]:
    """Find BatchNorm layers whose running statistics are not those of the deterministic network."""
    found = measure_statistics(network, gates, batches)
    off = {name: x for name, x in found.items() if x.mean > _MEAN_OFF or x.scale > _SCALE_OFF}
    if off:
        worst = max(off.values(), key=lambda x: max(x.mean / _MEAN_OFF, x.scale / _SCALE_OFF))
        yield Finding(
            "batch-norm-of-another-network",
            tuple(off),
            f"running means are {worst.mean:.2g} standard deviations and running variances a factor of "
            f"{math.exp(min(worst.scale, 50.0)):.3g} from those of the batches under the deterministic gates.",
            "Recalibrate: run some batches through fix_gates(network, guide.test_gates()) in training mode, or through "
            "the compacted network, before it is evaluated.",
        )
