"""Which values the options of a command line may have; checked before anything is loaded, made or trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

__all__ = ["RULES", "check"]

Rule = tuple[str, Callable[[Any], bool]]  # the end of "Expected epochs ...", and whether a value is as expected
LARGEST = 1e6  # of a factor; more than anybody means, and far from what overflows float32


def whole(least: int, most: int = 2**31 - 1) -> Rule:
    """Whole numbers from one to another."""
    return f"of at least {least} and at most {most}", lambda x: least <= x <= most


POSITIVE: Rule = (f"to be finite and positive, at most {LARGEST:g}", lambda x: 0 < x <= LARGEST)
NOT_NEGATIVE: Rule = (f"to be finite and not negative, at most {LARGEST:g}", lambda x: 0 <= x <= LARGEST)
RATE: Rule = ("strictly between 0 and 1", lambda x: 0 < x < 1)
SEED = whole(0, 2**32 - 1)

# An option means the same in every example. Each value of several is checked; one that is not given (None) is not.
RULES: dict[str, Rule] = {
    "batch": whole(1),
    "batch_size": whole(1),
    "beta": POSITIVE,
    "budgets": RATE,
    "depth": whole(10, 1000),
    "draws": whole(2),
    "epochs": whole(1),
    "epsilon": RATE,
    "gate_learning_rate": POSITIVE,
    "hold_out": whole(0),
    "jobs": whole(1, 1000),
    "lam": NOT_NEGATIVE,
    "lams": NOT_NEGATIVE,
    "learning_rate": POSITIVE,
    "max_steps": whole(1),
    "prior_active_prob": RATE,
    "retrain": whole(0),
    "retrain_noise": NOT_NEGATIVE,
    "seed": SEED,
    "seeds": SEED,
    "slab_scale": POSITIVE,
    "steps": whole(1),
    "strength": POSITIVE,
    "target": RATE,
    "weight_decay": NOT_NEGATIVE,
    "width": whole(1, 100),
}
SWEPT = ("budgets", "families", "lams", "methods", "seeds", "strength")  # each value is a run


def check(options: Any) -> None:
    """Refuse values that no run should start with.

    Args:
        options: dataclass of a script's options.

    Raises:
        ValueError: a value is outside its range, or the machine has no such device; names the option, what was
            expected and what arrived.
        FileNotFoundError: ``data_dir`` is no folder.
    """
    for name in (field.name for field in fields(options)):
        value = getattr(options, name)
        expected, holds = RULES.get(name, ("", lambda x: True))
        for entry in value if isinstance(value, tuple) else () if value is None else (value,):
            if not holds(entry) or (isinstance(entry, float) and math.isnan(entry)):
                raise ValueError(f"Expected {name} {expected}, but got {entry}.")
        if name in SWEPT and len(set(value)) != max(len(value), 1):
            raise ValueError(f"Expected {name} with at least one value and none of them twice, but got {value}.")
    if getattr(options, "device", "cpu") != "cpu":
        _check_device(options.device)
    data_dir = getattr(options, "data_dir", None)
    if data_dir is not None and options.data == "digits":
        raise ValueError("Expected data_dir with data='mnist' only; the digits are embedded.")
    if data_dir is not None and not data_dir.is_dir():
        raise FileNotFoundError(f"{data_dir}: expected the data's folder, found no such folder.")


def _check_device(device: str) -> None:
    # What a device lacks shows when it is used: a build without it, a driver, a second GPU, "meta" without values.
    try:
        torch.ones((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Expected device to be one of this machine, but got {device!r}: {reason}") from error
