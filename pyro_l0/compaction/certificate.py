"""Whether a smaller network computes the same as the one that it was made from, and has the same gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_l0.compaction.slice import Kept, cut

__all__ = ["Call", "Certificate", "another_size", "calls_of", "certify", "is_constant", "tolerance_of"]

Call = tuple[tuple[object, ...], dict[str, object]]
"""Positional arguments and keywords of one call of a network."""

_SEED = 0
_ROWS = 4  # of random inputs
# What rounding explains, relative to the output. Half precisions round every product with a gate.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Certificate:
    """Largest differences between two networks, each relative to the largest absolute entry of its kind.

    Attributes:
        outputs: on all examples, on another number of rows and on random inputs, in evaluation mode.
        gradients: of a random function of the outputs with respect to every parameter and input that is left.
        training_outputs: in training mode without dropout, under one seed; None where the modes of the network can't
            be compared: it can't be called so, draws random numbers of the shapes of units that left, or normalises
            closed units by statistics that are not what training would make of them.
        training_gradients: as above.
    """

    outputs: float
    gradients: float
    training_outputs: float | None
    training_gradients: float | None

    @property
    def largest(self) -> float:
        """The largest of all; not a number if one is not."""
        found = (self.outputs, self.gradients, self.training_outputs, self.training_gradients)
        numbers = [value for value in found if value is not None]
        return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference between two networks of one type that rounding explains."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.get_default_dtype()])


def calls_of(example: object) -> list[Call]:
    """The calls that an example describes.

    Args:
        example: a tensor, a tuple of positional arguments, a dict of keywords, or a list of such calls.
    """
    if isinstance(example, list):
        return [call for entry in example for call in calls_of(entry)]
    if isinstance(example, Mapping):
        return [((), {str(name): value for name, value in example.items()})]
    return [(example if isinstance(example, tuple) else (example,), {})]


def certify(
    reference: nn.Module, small: nn.Module, calls: Sequence[Call], kept: Kept, scales: Mapping[str, Tensor]
) -> Certificate:
    """Compare a smaller network with the one that it was made from, both in float64 if they take it.

    Args:
        reference: its gates are fixed; not changed.
        small: not changed.
        calls: all examples.
        kept: by name of the reference's parameters, what is left of them.
        scales: by name of a weight, the gates of its inputs (dimension 1) that went into it.
    """
    networks, calls = _doubled(reference, small, calls)
    batches = [*calls, *(_with_rows(call) for call in calls), *_random_calls(calls)]
    pairs = [_pair(networks, call, training=False) for call in batches]
    differences = [_gradient_difference(pair, kept, scales) for pair in pairs]
    trained: list[tuple[_Run, _Run]] = []
    for call in (_with_rows(call) for call in calls):
        if not _runs(networks[0], call):
            return Certificate(_difference(pairs), max_or_nan(differences), None, None)
        trained.append(_pair(networks, call, training=True))
    outputs = _difference(trained)
    gradients = max_or_nan([_gradient_difference(pair, kept, scales) for pair in trained])
    if max(outputs, gradients) > tolerance_of(torch.float32) and _is_random(networks[0], calls):
        return Certificate(_difference(pairs), max_or_nan(differences), None, None)
    return Certificate(_difference(pairs), max_or_nan(differences), outputs, gradients)
