"""Which units stay whatever their gates say, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from pyro_l0.nn.engine.analysis import Analysis, analyse
from pyro_l0.nn.engine.dependency import Dependencies
from pyro_l0.nn.engine.tape import Recording

__all__ = ["Report", "Stay", "report"]


@dataclass(frozen=True)
class Stay:
    """Units that stay on one side of a gate, or on both, when they are closed."""

    site: str
    units: tuple[int, ...]
    where: str  # ``"in front"``: weights that write them stay; ``"behind"``: those that read them; or ``"both"``
    why: str  # the operation and the module that need them

    @property
    def verdict(self) -> str:
        """Where the units stay, and why."""
        place = "on both sides of" if self.where == "both" else self.where if self.where == "behind" else "in front of"
        return f"stay {place} the gate ({self.why})"

    def __str__(self) -> str:
        return f"gate {self.site!r}, {_ranges(self.units)}: {self.verdict}"


@dataclass(frozen=True)
class Report:
    """What :meth:`~pyro_l0.nn.NetworkCost.report` returns; it prints as text.

    Attributes:
        stays: the units that stay, by gate site, side of the gate and reason.
    """

    stays: tuple[Stay, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.stays)) or "every unit leaves with its gate"


def report(recording: Recording, dependencies: Dependencies) -> Report:
    """Find what keeps units of a network, by closing half of the gates and then the others."""
    closings = [
        {site: (torch.arange(size) + shift) % 2 == 0 for site, size in dependencies.sizes.items()} for shift in (0, 1)
    ]
    analyses = [analyse(recording, closing) for closing in closings]
    lines: dict[tuple[str, str, str], list[int]] = {}
    for site, unit, front, behind in _staying(dependencies):
        where = "both" if front and behind else "in front" if front else "behind"
        lines.setdefault((site, where, _why(analyses[unit % 2], site, unit, behind)), []).append(unit)
    return Report(tuple(Stay(site, tuple(units), where, why) for (site, where, why), units in lines.items()))


def _staying(dependencies: Dependencies) -> Iterator[tuple[str, int, bool, bool]]:
    """Each gate's units that stay in front of it or behind it, where it and those on the same units are closed.

    A gate on a whole branch has no units behind it.
    """
    formulas, units = dependencies.formulas, dependencies.maps.slots.units()
    starts = dict(zip(dependencies.sizes, accumulate(dependencies.sizes.values(), initial=0), strict=False))
    calls = {call.site: call for call in dependencies.maps.gates}
    together: dict[int, set[int]] = {}
    for site, call in calls.items():
        for unit, common in enumerate(units[call.front.block].tolist()):
            together.setdefault(common, set()).add(starts[site] + unit)
    for site, call in calls.items():
        sides = zip(dependencies.kept(call.front).tolist(), dependencies.kept(call.behind).tolist(), strict=True)
        for unit, (front, behind) in enumerate(sides):
            closed = together[units[call.front.block][unit]]
            stays = formulas.holds(front, closed), not call.is_whole and formulas.holds(behind, closed)
            if any(stays):
                yield site, unit, *stays


def _why(analysis: Analysis, site: str, unit: int, is_behind: bool) -> str:
    call = next(call for call in analysis.maps.gates if call.site == site)
    axis = call.behind if is_behind else call.front
    if not analysis.solution.stays[analysis.solution.units[axis.block][unit]]:
        return "other gates are open"
    reason = analysis.solution.reason(axis, unit)
    path, is_computed, _ = reason.rpartition(" in ")[2].partition(".parametrizations.")
    if is_computed:
        reason += f"; remove it first: torch.nn.utils.parametrize.remove_parametrizations on {path!r}"
    return reason


def _ranges(units: Sequence[int]) -> str:
    """Units in words, such as ``units 0-3, 7``."""
    breaks = np.flatnonzero(np.diff(units) != 1) + 1
    parts = [(part[0], part[-1]) for part in np.split(np.array(units), breaks)]
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return f"unit{'s' if len(units) > 1 else ''} {', '.join(texts)}"
