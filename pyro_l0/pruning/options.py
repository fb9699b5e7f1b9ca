"""The arguments of a pruning run, checked before anything is computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real

import torch
from torch import nn

from pyro_l0.expect import expect, expect_count
from pyro_l0.nn.calls import refuse_computed
from pyro_l0.pruning.batches import Loader
from pyro_l0.training.epochs import Stream
from pyro_l0.training.processes import same_everywhere

__all__ = ["check_budget", "check_callables", "check_distil", "check_network", "count_steps", "with_length"]

_LEAST_STEPS = 10  # with gates
_AFTER, _LEAST_AFTER = 0.35, 0.25  # of all steps, the part after the cut: the second where few would have gates
_FEW_STEPS = 300  # with gates


def with_length(loader: Iterable[object], steps_per_epoch: int | None, accumulate: int) -> Loader:
    """A loader with a length, which a stream has by ``steps_per_epoch``."""
    if steps_per_epoch is not None:
        expect_count(1, steps_per_epoch=steps_per_epoch, accumulate=accumulate)
        return Stream(loader, steps_per_epoch * accumulate)
    with suppress(TypeError):  # of a DataLoader whose data set has none
        if isinstance(loader, Loader) and len(loader):
            return loader
    raise ValueError(
        f"Expected a loader with a length, of at least one batch, such as a DataLoader or a list of batches, but got "
        f"{loader!r}; of a stream, give steps_per_epoch too."
    )


def count_steps(loader: Loader, epochs: int, finetune: float | None, accumulate: int) -> tuple[int, int]:
    """The number of steps with gates and of those after the cut."""
    length = len(loader)
    expect_count(1, epochs=epochs, accumulate=accumulate)
    steps = epochs * -(-length // accumulate)
    if finetune is None:
        finetune = min(_AFTER, max(_LEAST_AFTER, 1 - _FEW_STEPS / steps))
    expect(Real, "a number", finetune=finetune)
    if not 0 <= finetune <= 0.9:
        raise ValueError(f"Expected finetune from 0 to 0.9, the part of the epochs after the cut, but got {finetune}.")
    further = round(finetune * steps)
    if steps - further < _LEAST_STEPS:
        raise ValueError(
            f"Expected at least {_LEAST_STEPS} steps with gates, but epochs={epochs} of {length} batches, "
            f"accumulate={accumulate} and finetune={finetune} give {steps - further}; give more epochs."
        )
    if not same_everywhere(steps):
        raise ValueError(f"Expected loaders of one length in all processes, but there are others than {length}.")
    return steps - further, further


def check_budget(budget: object) -> None:
    """Check that a budget is a fraction, several falling ones, or fractions by name."""
    several = isinstance(budget, Sequence) and not isinstance(budget, str)
    given = budget if isinstance(budget, Sequence) and several else [budget]
    given = list(budget.values()) if isinstance(budget, Mapping) else list(given)
    if any(isinstance(value, bool) or not isinstance(value, Real) for value in given):
        raise TypeError(
            f"Expected a budget of a number, a list of them or a dict by names of costs, but got {budget!r}."
        )
    values = [float(value) for value in given if isinstance(value, Real)]
    if not values or not all(0 < value < 1 for value in values):
        raise ValueError(
            f"Expected a budget between 0 and 1, the fraction of the cost that may be left, but got {budget!r}."
        )
    if several and any(b >= a for a, b in itertools.pairwise(values)):
        raise ValueError(f"Expected budgets that fall from one to the next, but got {budget!r}.")


def check_distil(distil: object, pretrained: bool) -> None:
    """Check the weight and the temperature of distillation."""
    if not pretrained:
        raise ValueError("Expected a network that was trained before to distil from, but pretrained is False.")
    if not isinstance(distil, (tuple, list)) or len(distil) != 2:
        raise TypeError(
            f"Expected distil to be (weight, temperature), or (weight, function) where outputs are no class logits, "
            f"but got {distil!r}."
        )
    weight, by = distil
    for name, value, most in (("weight", weight, 1.0), *([] if callable(by) else [("temperature", by, math.inf)])):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"Expected a number for distil's {name}, but got {value!r}.")
        if not 0 < float(value) <= most or value == math.inf:
            raise ValueError(f"Expected a {name} for distil above 0{' and up to 1' * (most == 1)}, but got {value}.")


def check_callables(callbacks: object, autocast: object, loss_fn: object, **others: object) -> None:
    """Check the functions, and the type for autocast."""
    if not callable(loss_fn):
        raise TypeError(f"Expected loss_fn(outputs, targets) that returns the loss, but got {loss_fn!r}.")
    for name, value in others.items():
        if value is not None and not callable(value):
            raise TypeError(f"Expected {name} to be a function, but got {type(value).__name__}: {value!r}.")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TypeError(f"Expected a list of callbacks, but got {callbacks!r}.")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"Expected autocast to be a type of numbers, such as torch.bfloat16, but got {autocast!r}.")


def check_network(network: object) -> torch.device:
    """Where a network is; refuses one that can't be copied or trained."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"Expected a network, a torch.nn.Module, but got {network!r}.")
    inner = "_orig_mod" if hasattr(network, "_orig_mod") else "module"  # of torch.compile and of data parallelism
    if inner == "_orig_mod" or isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(
            f"Expected the network itself, but got a {type(network).__name__} around it; give network.{inner}."
        )
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "Expected gradients to be switched on, but got a call inside of torch.no_grad() or inference_mode(); "
            "call it outside of them."
        )
    first = next(network.parameters(), None)
    if first is None:
        raise ValueError(f"Expected a network with parameters, but {type(network).__name__} has none.")
    refuse_computed(network)
    return first.device
