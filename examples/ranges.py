"""Which values the examples' options may have; asked before anything is loaded, made or trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

__all__ = ["RULES", "check"]

LARGEST = 1e6  # of a factor; more than anybody means, and far from what overflows float32


@dataclass(frozen=True)
class Rule:
    """What values an option may have.

    Args:
        expected: the end of "Expected epochs ...".
        holds: whether a value is one of them.
    """

    expected: str
    holds: Callable[[Any], bool]


def at_least(least: int) -> Rule:
    """Whole numbers from one on, as far as torch counts."""
    return Rule(f"of at least {least}", lambda x: x >= least)


def below(most: int) -> Rule:
    """No whole numbers above one."""
    return Rule(f"of at most {most}", lambda x: x <= most)


NOT_HUGE = Rule(f"of at most {LARGEST:g}", lambda x: x <= LARGEST)
POSITIVE = (Rule("to be finite and positive", lambda x: 0 < x < math.inf), NOT_HUGE)
NOT_NEGATIVE = (Rule("to be finite and not negative", lambda x: 0 <= x < math.inf), NOT_HUGE)
RATE = (Rule("strictly between 0 and 1", lambda x: 0 < x < 1),)
NUMBER = (at_least(1), below(2**31 - 1))
SEED = (at_least(0), below(2**32 - 1))

# An option means the same in every example. Of one with several values each is held to the rules, and one that is not
# given (None) to none.
RULES: dict[str, tuple[Rule, ...]] = {
    "batch": (at_least(1),),
    "batch_size": NUMBER,
    "beta": POSITIVE,
    "budgets": RATE,
    "depth": (at_least(10), below(1000)),
    "draws": (at_least(2), below(2**31 - 1)),
    "epochs": NUMBER,
    "epsilon": RATE,
    "gate_learning_rate": POSITIVE,
    "hold_out": (at_least(0),),
    "jobs": (at_least(1), below(1000)),
    "lam": NOT_NEGATIVE,
    "lams": NOT_NEGATIVE,
    "learning_rate": POSITIVE,
    "max_steps": NUMBER,
    "prior_active_prob": RATE,
    "retrain": (at_least(0), below(2**31 - 1)),
    "retrain_noise": (Rule("of at least 0 and finite", lambda x: 0 <= x < math.inf), NOT_HUGE),
    "seed": SEED,
    "seeds": SEED,
    "slab_scale": POSITIVE,
    "steps": NUMBER,
    "strength": POSITIVE,
    "target": RATE,
    "weight_decay": NOT_NEGATIVE,
    "width": (at_least(1), below(100)),
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
        for entry in value if isinstance(value, tuple) else () if value is None else (value,):
            for rule in RULES.get(name, ()):
                if not rule.holds(entry):
                    raise ValueError(f"Expected {name} {rule.expected}, but got {entry}.")
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
