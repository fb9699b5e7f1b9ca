"""A family's parameters: their constraints, their conversion and rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_l0.maths import host
from pyro_l0.maths.special import Number


class Bounded(constraints.Constraint):
    """Finite reals strictly between two limits; torch's own constraints admit infinities."""

    def __init__(self, lower: float = -math.inf, upper: float = math.inf) -> None:
        self.lower = lower
        self.upper = upper
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether each value satisfies it."""
        return torch.isfinite(value) & (value > self.lower) & (value < self.upper)

    def __repr__(self) -> str:
        if self.lower > -math.inf:
            return f"finite and greater than {self.lower:g}"
        if self.upper < math.inf:
            return f"finite and less than {self.upper:g}"
        return "finite"


def as_parameters(shared: Mapping[str, Number], **full: Number) -> tuple[list[Tensor], list[Number]]:
    """Bring a family's parameters to one floating type and one batch shape: the full ones, and those that are shared.

    Full ones become tensors of the batch's shape. Of shared ones numbers stay numbers, and so does a scalar tensor in
    main memory that needs no gradient; other tensors stay the objects they are. Half precision becomes float32, because
    atoms are found by exact comparison and bfloat16 rounds interior values to 1.
    """
    named = {**full, **shared}
    dtypes = [x.dtype for x in named.values() if isinstance(x, Tensor)] or [torch.get_default_dtype()]
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    device = next((x.device for x in full.values() if isinstance(x, Tensor)), None)

    def convert(x: Number) -> Number:
        if not isinstance(x, Tensor):
            return float(x)
        if x.ndim == 0 and host.constant(x):
            return float(x)
        return x.to(dtype)

    shared_values = [convert(x) for x in shared.values()]
    full_values = [torch.as_tensor(x, dtype=dtype, device=device) for x in full.values()]
    try:
        batch_shape = torch.broadcast_shapes(
            *(x.shape for x in (*full_values, *shared_values) if isinstance(x, Tensor))
        )
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(torch.as_tensor(x).shape)}" for name, x in named.items())
        raise ValueError(f"Expected parameters whose shapes broadcast, but got {shapes}.") from error
    return [x.expand(batch_shape) for x in full_values], shared_values


def check_rate(name: str, value: float | Tensor, family: str, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse a probability outside the open range that a family can reach, if its values can be told."""
    try:
        rate = torch.as_tensor(value)
    except RuntimeError as error:  # of what is no number
        raise TypeError(f"Expected {name} to be a number or a tensor, but got {value!r}.") from error
    if host.opaque(rate):
        return
    if not bool(((rate > low) & (rate < high)).all()):
        raise ValueError(
            f"Expected {name} strictly between {low:g} and {high:g}, the range that {family} can reach, "
            f"but got {value}."
        )
