"""Checks of the deterministic network: its error, and the statistics of its BatchNorm, beside those in training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_l0.diagnostics.findings import Finding, Unchecked
from pyro_l0.diagnostics.pulls import arguments_of
from pyro_l0.diagnostics.sites import Training
from pyro_l0.infer.guides.protocol import GateGuide
from pyro_l0.nn.fixed import fix_gates

__all__ = ["Error", "check_network"]

Error = Callable[..., float | Tensor]
_DRAWS = 8
_GAP_BEFORE = 0.3  # of the errors; in the first steps, healthy trainings show up to 0.25
_GAP_AT_END = 0.1
_DEVIATIONS = 3.0
_MEAN_OFF = 0.5  # standard deviations; healthy trainings stay below 0.2
_SCALE_OFF = math.log(3.0)  # and below log 1.8
_ALIVE = 1e-3  # of a layer's largest variance; below, a channel says the same of every input
_YOUNG = 50  # batches, in which running statistics get to where they belong


def check_network(
    training: Training,
    guide: GateGuide,
    network: nn.Module | None,
    error: Error | None,
    batches: Sequence[object] | None,
) -> Iterator[Finding | Unchecked]:
    """Whether the deterministic network is the one that was trained."""
    target = training.target
    if network is None or not batches:
        yield Unchecked("the statistics of BatchNorm", "network and batches")
    elif target is not None and target.start < target.step < target.settled:
        # While a budget falls, the deterministic network changes faster than running statistics follow.
        yield Unchecked("the statistics of BatchNorm", "a target whose budget holds, later in the training")
    else:
        yield from _check_statistics(network, guide.test_gates(), batches, training.steps)
    if network is None or not batches or error is None:
        yield Unchecked("the error with sampled and with deterministic gates", "network, batches and error")
    else:
        yield from _check_gap(network, guide, error, batches, training.steps_left == 0)


@torch.no_grad()
def _check_gap(
    network: nn.Module, guide: GateGuide, error: Error, batches: Sequence[object], is_end: bool
) -> Iterator[Finding]:
    """Find errors of sampled and of deterministic gates that are far apart; at the end they may differ less."""

    def errors(gates: Mapping[str, Tensor]) -> Tensor:
        fixed = fix_gates(network, gates).eval()
        return torch.tensor([float(error(fixed, *arguments_of(batch))) for batch in batches])

    fixed = float(errors(guide.test_gates()).mean())
    draws = [errors({name: gate.sample() for name, gate in guide.posterior().items()}) for _ in range(_DRAWS)]
    sampled = torch.stack(draws).mean(1)
    apart = float(sampled.mean()) - fixed
    if abs(apart) > (_GAP_AT_END if is_end else _GAP_BEFORE) + _DEVIATIONS * float(sampled.std() / math.sqrt(_DRAWS)):
        more = "sampled" if apart > 0 else "deterministic"
        remedy = (
            "Sampled gates disturb the network too much: start them further open (init_active_prob), or train longer."
            if apart > 0
            else "The network was trained with gates that pruning closes: train the gates longer or at a larger rate, "
            "until they are decided, and fine-tune the network with its gates fixed."
        )
        yield Finding(
            "sampled-gap",
            (),
            f"the error is {fixed:.3g} with deterministic gates and {fixed + apart:.3g} with sampled ones; the "
            f"{more} network is worse.",
            remedy,
        )


def _check_statistics(
    network: nn.Module, gates: Mapping[str, Tensor], batches: Sequence[object], steps: int | None
) -> Iterator[Finding]:
    """Find BatchNorm layers whose running statistics are not those of the deterministic network.

    At the beginning of a training, running statistics have not reached those of any network yet.
    """
    off: dict[str, tuple[float, float]] = {}
    for name, (old, new) in _layers(network, gates, batches).items():
        variance = new.get_buffer("running_var")
        alive = variance > _ALIVE * variance.max()
        if not int(torch.as_tensor(new.num_batches_tracked)) or not bool(alive.any()):
            continue
        off_mean = old.get_buffer("running_mean") - new.get_buffer("running_mean")
        mean = float((off_mean.abs() / variance.sqrt())[alive].mean())
        scale = float(torch.log(old.get_buffer("running_var") / variance).abs()[alive].mean())
        seen = int(torch.as_tensor(old.num_batches_tracked))
        if (mean > _MEAN_OFF or scale > _SCALE_OFF) and (steps is None or max(steps, seen) >= _YOUNG):
            off[name] = mean, scale
    if off:
        mean, scale = max(off.values(), key=lambda x: max(x[0] / _MEAN_OFF, x[1] / _SCALE_OFF))
        yield Finding(
            "batch-norm-of-another-network",
            tuple(off),
            f"running means are {mean:.2g} standard deviations and running variances a factor of "
            f"{math.exp(min(scale, 50.0)):.3g} from those of the batches under the deterministic gates.",
            "Before evaluating it, run some batches in training mode through fix_gates(network, guide.test_gates()), "
            "or through the compacted network.",
        )


@torch.no_grad()
def _layers(
    network: nn.Module, gates: Mapping[str, Tensor], batches: Sequence[object]
) -> dict[str, tuple[_BatchNorm, _BatchNorm]]:
    """Each BatchNorm layer with its running statistics, and with those of batches in the deterministic network."""
    fixed = fix_gates(network, gates).eval()
    found = {
        name: (copy.deepcopy(layer), layer)
        for name, layer in fixed.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    }
    for _, layer in found.values():
        layer.reset_running_stats()
        layer.momentum = None  # the mean over batches
        layer.train()
    for batch in batches:
        inputs = arguments_of(batch)[0]
        fixed(*inputs) if isinstance(inputs, tuple | list) else fixed(inputs)
    return found
