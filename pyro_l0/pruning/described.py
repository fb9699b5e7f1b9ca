"""What a run and the one that resumes it must agree in: a network, a loss and an optimiser as texts and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType

from torch import Tensor, nn

from pyro_l0.training.epochs import checksum

__all__ = ["numbers", "told"]


def told(value: object) -> str:
    """A text that tells a user's function from others: its name, and the names and numbers in its code and around it.

    A module goes by its own text, its numbers and its tensors, any other object by its class.
    """
    if isinstance(value, partial):
        return f"{told(value.func)} of {numbers([value.args, value.keywords])}"
    if isinstance(value, nn.Module):
        return f"{value} {numbers(vars(value))} {checksum(value.state_dict())}"
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if not isinstance(value, FunctionType):
        return str(name)
    around = []
    for cell in value.__closure__ or ():
        with suppress(ValueError):  # it is empty
            around.append(cell.cell_contents)
    code = value.__code__
    names = () if value.__module__.startswith("torch.") else code.co_names  # which change from version to version
    return f"{name} {names} {numbers([code.co_consts, value.__defaults__, value.__kwdefaults__, around])}"


def numbers(value: object, name: str = "") -> list[str]:
    """The numbers and tensors in nested containers, with their places; flags and all else are left out."""
    if isinstance(value, (Mapping, list, tuple)):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [x for key, entry in entries for x in numbers(entry, f"{name}.{key}")]
    if isinstance(value, Tensor):
        return [f"{name} {checksum({'': value})}"]
    return [f"{name} {value}"] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
