"""Checks of a training: losses that are not finite, sites whose gates have all closed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pyro_l0.distributions.gate import find_gate
from pyro_l0.fast.record import Site

EVERY = 100  # steps between two checks that make the host wait for a device
_CLOSED = 0.01  # P(z != 0) above the family's minimum

Explain = Callable[[], str]


class Watch:
    """Losses that are still to be checked, and sites that have closed.

    In main memory every loss is checked at once. On an accelerator that would make the host wait in every step: there
    the terms of the last steps are kept, and every hundredth step checks all of them at once.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[int, str, Tensor]] = []
        self._closed: set[str] = set()

    def loss(self, step: int, loss: Tensor, parts: Mapping[str, Tensor], explain: Explain) -> None:
        """Check the loss of a step, now or later; raises if it is not finite."""
        if loss.device.type == "cpu":
            self.value(step, loss.item(), explain)
        elif loss.device.type != "meta":
            self._unread += [(step, name, part.detach()) for name, part in parts.items()]
            if len(self._unread) >= EVERY * len(parts):
                self._check_unread(step, explain)

    def value(self, step: int, value: float, explain: Explain) -> None:
        """Check a loss whose value is known."""
        if not math.isfinite(value):
            self._check_unread(step, explain)
            raise ValueError(f"The loss is {value} at step {step}: {explain()}")

    def _check_unread(self, now: int, explain: Explain) -> None:
        unread, self._unread = self._unread, []
        values = torch.stack([part.float() for _, _, part in unread]).tolist() if unread else []
        for (step, name, _), value in zip(unread, values, strict=True):
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value} at step {step}; when checked at step {now}: {explain()}")

    def gates(self, step: int, guide: Mapping[str, Site]) -> None:
        """Warn once for a site whose test gates are all 0 and P(z != 0) near its minimum; every hundredth step."""
        if step % EVERY:
            return
        found = {name: find_gate(site["fn"]) for name, site in guide.items() if self._is_checked(name, site)}
        gates = {name: gate for name, gate in found.items() if gate is not None and gate.batch_shape.numel()}
        devices = [gate._like.device.type for gate in gates.values()]
        if not gates or devices[0] == "meta" or (step == 0 and devices[0] != "cpu"):
            return
        with torch.no_grad():
            excess = [(g.active_prob - g.least_active_prob + g.test_gate).max().float() for g in gates.values()]
            most_of_site = torch.stack(excess).tolist()
        for name, most in zip(gates, most_of_site, strict=True):
            if most < _CLOSED:
                self._closed.add(name)
                warnings.warn(
                    f"All gates of site {name!r} are closed at step {step}: P(z != 0) is at most {most:.2g}, where the "
                    "likelihood hardly sees them. Lower their price lam (or the prior's demands), slow their learning "
                    "rate or start them further open, unless the site is meant to go.",
                    stacklevel=4,
                )

    def _is_checked(self, name: str, site: Site) -> bool:
        if site["type"] != "sample" or name in self._closed:
            return False
        return all(frame.full_size in (None, frame.size) for frame in site["cond_indep_stack"])


def number_of_bad(x: float | Tensor) -> int:
    """How many of a tensor's or a number's values are not finite; reads them."""
    return int((~torch.isfinite(torch.as_tensor(x))).sum())


def bad_values(site: Site) -> list[str]:
    """What is not finite at a recorded site: an observed value, or parameters of its distribution."""
    found = []
    if site["is_observed"] and (bad := number_of_bad(site["value"])):
        found.append(f"what is observed at {site['name']!r} holds {bad} values that are not finite")
    fn = site["fn"]
    while fn is not None:
        for parameter in fn.arg_constraints:
            # Not a property that is computed from another parameter.
            value = fn.__dict__.get(parameter, fn.__dict__.get(f"_{parameter}"))
            if value is not None and (bad := number_of_bad(value)):
                found.append(f"{parameter} of {type(fn).__name__} at {site['name']!r} holds {bad} that are not finite")
        fn = getattr(fn, "base_dist", None)
    return found
