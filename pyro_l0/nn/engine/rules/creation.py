"""Rules of operations that make tensors from nothing but sizes."""

from __future__ import annotations

import torch

from pyro_l0.nn.engine.maps import Maps, rule
from pyro_l0.nn.engine.slots import CONSTANT, VARIES, ZERO
from pyro_l0.nn.engine.tape import Operation

__all__ = ["create"]


_ORDERED = ("aten::arange", "aten::linspace", "aten::logspace", "aten::hann_window", "aten::hamming_window")
_LIKE = "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"


@rule(*(f"aten::{name}" for name in _LIKE.split()))
def create_like(maps: Maps, operation: Operation) -> None:
    """Nothing is read but the sizes, which are those of the input."""
    create(maps, operation)
    maps.keeps_place(operation.value("self"), operation.output)


@rule("aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty")
def create(maps: Maps, operation: Operation) -> None:
    """Nothing is read; zeros are zero, random numbers vary, and other tensors are constant."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(operation.function, "tags", ())
    number = operation.arguments.get("fill_value", operation.arguments.get("s"))
    is_zero = operation.name in ("aten::zeros", "aten::new_zeros", "aten::zeros_like") or number == 0
    state = VARIES if is_random else ZERO if is_zero else CONSTANT
    for output in operation.made:
        maps.set_state(output, state)
        if operation.name in _ORDERED and output.shape[0] > 1:  # which numbers they are, code can't say of fewer
            maps.pin(maps.axes[output][0].block)
