"""What a diagnosis found, what it could not check, and how both print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Diagnosis", "Finding", "Unchecked"]


@dataclass(frozen=True)
class Finding:
    """One fault of a run with gates.

    Attributes:
        code: a stable name, such as ``"gates-not-trained"``; :func:`~pyro_l0.diagnostics.diagnose` lists all.
        sites: the gate sites concerned (for BatchNorm the layers).
        seen: what was seen, in numbers.
        remedy: what to do.
    """

    code: str
    sites: tuple[str, ...]
    seen: str
    remedy: str

    def __str__(self) -> str:
        where = f" at {', '.join(map(repr, self.sites))}" if self.sites else ""
        return f"{self.code}{where}: {self.seen}\n    {self.remedy}"


class Unchecked(NamedTuple):
    """Something that could not be checked.

    Attributes:
        what: what was not checked.
        give: the argument of ``diagnose`` that it takes.
    """

    what: str
    give: str

    def __str__(self) -> str:
        return f"{self.what}: give {self.give}"


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`~pyro_l0.diagnostics.diagnose` returns; it prints as text.

    Attributes:
        findings: the faults.
        unchecked: what was not checked, and what to give for it.
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[Unchecked, ...] = ()

    @property
    def codes(self) -> tuple[str, ...]:
        """The findings' codes in order, each once."""
        return tuple(dict.fromkeys(finding.code for finding in self.findings))

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings] or ["Nothing is wrong with what was checked."]
        if self.unchecked:
            lines += ["Not checked:", *(f"    {what}" for what in self.unchecked)]
        return "\n".join(lines)
