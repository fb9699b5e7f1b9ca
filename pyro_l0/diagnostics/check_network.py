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
from pyro_l0.infer.guides.protocol import GateGuide
from pyro_l0.nn.fixed import fix_gates

__all__ = ["Error", "check_gap", "check_statistics"]

Error = Callable[..., float | Tensor]
_GAP_BEFORE = 0.3  # of the errors; in the first steps, healthy trainings show up to 0.25
_GAP_AT_END = 0.1
_DEVIATIONS = 3.0
_MEAN_OFF = 0.5  # standard deviations; healthy trainings stay below 0.2
_SCALE_OFF = math.log(3.0)  # and below log 1.8
_ALIVE = 1e-3  # of a layer's largest variance; below, a channel says the same of every input
_YOUNG = 50  # batches, in which running statistics get to where they belong


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


def check_gap(
    network: nn.Module, guide: GateGuide, error: Error, batches: Sequence[object], is_end: bool
) -> Iterator[Finding]:
    """Find errors of sampled and of deterministic gates that are far apart; at the end they may differ less."""
    gap = measure_gap(network, guide, error, batches, draws=8)
    apart = gap.sampled - gap.fixed
    if abs(apart) > (_GAP_AT_END if is_end else _GAP_BEFORE) + _DEVIATIONS * gap.deviation:
        more = "sampled" if apart > 0 else "deterministic"
        remedy = (
            "Sampled gates wreck the network that training sees: start its gates further open (init_active_prob), or "
            "train longer with them."
            if apart > 0
            else "The network was trained with gates that pruning closes: train the gates longer or at a larger rate "
            "until they are decided, and fine-tune the network with its gates fixed."
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
    batches: int


@torch.no_grad()
def measure_statistics(
    network: nn.Module, gates: Mapping[str, Tensor], batches: Sequence[object]
) -> dict[str, Statistics]:
    """The running statistics of each BatchNorm layer beside those of batches in the deterministic network.

    Returns:
        By layer: the distance of the means in standard deviations of the batches, that of the variances' logs, and how
        many batches the running statistics have seen.
    """
    fixed = fix_gates(network, gates).eval()
    layers = {name: layer for name, layer in fixed.named_modules() if isinstance(layer, _BatchNorm)}
    kept = {name: copy.deepcopy(layer) for name, layer in layers.items() if layer.running_mean is not None}
    for name in kept:
        layers[name].reset_running_stats()
        layers[name].momentum = None  # the mean over batches
        layers[name].train()
    for batch in batches:
        inputs = arguments_of(batch)[0]
        fixed(*inputs) if isinstance(inputs, tuple | list) else fixed(inputs)
    found = {}
    for name, old in kept.items():
        new = layers[name]
        assert new.running_mean is not None
        assert new.running_var is not None
        alive = new.running_var > _ALIVE * new.running_var.max()
        if int(torch.as_tensor(new.num_batches_tracked)) and bool(alive.any()):
            off = (torch.as_tensor(old.running_mean) - new.running_mean).abs() / new.running_var.sqrt()
            ratio = torch.log(torch.as_tensor(old.running_var) / new.running_var).abs()
            seen = int(torch.as_tensor(old.num_batches_tracked))
            found[name] = Statistics(float(off[alive].mean()), float(ratio[alive].mean()), seen)
    return found


def check_statistics(
    network: nn.Module, gates: Mapping[str, Tensor], batches: Sequence[object], steps: int | None
) -> Iterator[Finding]:
    """Find BatchNorm layers whose running statistics are not those of the deterministic network.

    Args:
        network: with gates.
        gates: the deterministic ones.
        batches: whose statistics count.
        steps: of the training, where they are known: at its beginning young statistics are none of this network yet.
    """
    off = {
        name: x
        for name, x in measure_statistics(network, gates, batches).items()
        if (x.mean > _MEAN_OFF or x.scale > _SCALE_OFF) and (steps is None or max(steps, x.batches) >= _YOUNG)
    }
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
