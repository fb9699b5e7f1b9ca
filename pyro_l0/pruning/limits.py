"""How many units of its modules a pruned network keeps: at least so many, or a multiple of a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

import numpy as np
from torch import nn

from pyro_l0.expect import expect, expect_count
from pyro_l0.nn import Gate
from pyro_l0.nn.engine import Example, analyse, record
from pyro_l0.nn.engine.readers import find_readers, find_writers
from pyro_l0.nn.gate_layer import gate_names
from pyro_l0.nn.hooks import hooks_of

__all__ = ["check_limits", "gates_at_least", "gates_in_step"]


def check_limits(at_least: object, multiple_of: object) -> None:
    """Check what can be checked without the gates."""
    expect(Mapping | None, "a dict of numbers of units, or of fractions, by module path", at_least=at_least)
    for path, number in at_least.items() if isinstance(at_least, Mapping) else ():
        name = f"at_least[{path!r}]"
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"Expected {name} to be a number of units or a fraction of them, but got {number!r}.")
        if not float(number) >= 0 or not (isinstance(number, int) or float(number) <= 1):
            raise ValueError(f"Expected {name} to be a whole number of units, or a fraction to 1.0, but got {number}.")
    if multiple_of is not None:
        expect_count(1, multiple_of=multiple_of)


def gates_at_least(gated: nn.Module, at_least: Mapping[str, float]) -> dict[str, int]:
    """By site, how many gates never close: as many as the paths of modules ask that hold it, or that it stands behind.

    A whole number is one of units, and any other a fraction of those at each site, rounded up.
    """
    sites = {gate: site for site, gate in gate_names(gated).items()}
    hooked = [(path, hook.gate) for path, hook in hooks_of(gated) if isinstance(hook.gate, Gate)]
    behind = {gate for _, gate in hooked}
    own = [(path, x) for path, x in gated.named_modules() if isinstance(x, Gate) and x not in behind]
    found: dict[str, int] = {}
    for path, number in at_least.items():
        gates = [gate for at, gate in own + hooked if not path or at == path or at.startswith(f"{path}.")]
        if not gates:
            there = ", ".join(repr(at) for at, _ in own + hooked)
            raise ValueError(f"Expected at_least by the paths of modules, with gates behind {there}, but got {path!r}.")
        for gate in gates:
            units = number if isinstance(number, int) else math.ceil(number * gate.size - 1e-6)
            if units > gate.size:
                raise ValueError(
                    f"Expected at_least[{path!r}] to be no more than the {gate.size} units of gate site "
                    f"{sites[gate]!r}, but got {number}; a fraction suits modules with several sites."
                )
            found[sites[gate]] = max(found.get(sites[gate], 0), units)
    return found


def gates_in_step(gated: nn.Module, example: Example, multiple_of: int) -> dict[str, int]:
    """By site, a number of which a multiple of its gates is open.

    With it every dimension of a weight that belongs to the site keeps a multiple of ``multiple_of``: of heads of 64
    features any number will do for 8.
    """
    entries = dict.fromkeys(gate_names(gated), 0)
    maps = analyse(record(gated, example), {}).maps
    for use in (*find_writers(maps), *find_readers(maps)):
        for number in np.unique(np.bincount(use.units)).tolist():
            entries[use.site] = math.gcd(entries[use.site], number)
    return {site: multiple_of // math.gcd(multiple_of, number or 1) for site, number in entries.items()}
