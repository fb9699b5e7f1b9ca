"""Which units stay whatever their gates say, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pyro_l0.nn.engine.analysis import Analysis, analyse
from pyro_l0.nn.engine.dependence import Dependence
from pyro_l0.nn.engine.formulas import TRUE
from pyro_l0.nn.engine.record import Recording

__all__ = ["Report", "Stay", "report"]


@dataclass(frozen=True)
class Stay:
    """Units that stay on one side of a gate, or on both, when they are closed.

    Attributes:
        site: the gate's site.
        units: which of its units.
        where: ``"in front"``: the weights that write them stay; ``"behind"``: those that read them do; or ``"both"``.
        why: the operation and the module that need them.
    """

    site: str
    units: tuple[int, ...]
    where: str
    why: str

    @property
    def verdict(self) -> str:
        """Where the units stay, and why."""
        place = "on both sides of" if self.where == "both" else self.where if self.where == "behind" else "in front of"
        return f"stay {place} the gate ({self.why})"

    def __str__(self) -> str:
        return f"gate {self.site!r}, {_ranges(self.units)}: {self.verdict}"


@dataclass(frozen=True)
class Report:
    """Answer of :meth:`~pyro_l0.nn.NetworkCost.report`; it prints as text.

    Attributes:
        stays: units that stay, a line for each range with one reason.
    """

    stays: tuple[Stay, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.stays)) or "every unit leaves with its gate"


def report(recording: Recording, dependence: Dependence) -> Report:
    """What keeps units of a network, found by closing half of the gates and then the others."""
    closings = [
        {site: (torch.arange(size) + shift) % 2 == 0 for site, size in dependence.sizes.items()} for shift in (0, 1)
    ]
    analyses = [analyse(recording, closing) for closing in closings]
    lines: dict[tuple[str, str, str], list[int]] = {}
    for site in dependence.sizes:
        for unit, (front, behind) in enumerate(_sides(dependence, site)):
            if front or behind:
                where = "both" if front and behind else "in front" if front else "behind"
                lines.setdefault((site, where, _why(analyses[unit % 2], site, unit, behind)), []).append(unit)
    return Report(tuple(Stay(site, tuple(units), where, why) for (site, where, why), units in lines.items()))


def _sides(dependence: Dependence, site: str) -> list[tuple[bool, bool]]:
    """For each unit, whether it stays for sure in front of its gate, and behind."""
    call = next(call for call in dependence.maps.gates if call.site == site)
    front, behind = (dependence.kept(axis) == TRUE for axis in (call.front, call.behind))
    return list(zip(front.tolist(), behind.tolist(), strict=True))


def _why(analysis: Analysis, site: str, unit: int, is_behind: bool) -> str:
    call = next(call for call in analysis.maps.gates if call.site == site)
    return analysis.solution.reason(call.behind if is_behind else call.front, unit)


def _ranges(units: Sequence[int]) -> str:
    """Units in words, such as ``units 0-3, 7``."""
    breaks = np.flatnonzero(np.diff(units) != 1) + 1
    parts = [(part[0], part[-1]) for part in np.split(np.array(units), breaks)]
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return f"unit{'s' if len(units) > 1 else ''} {', '.join(texts)}"
