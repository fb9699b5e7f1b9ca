"""How a mean-field guide draws its sites: each by itself, or the gates of one kind together, in less time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

import pyro
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_l0.distributions.gate import GateDistribution, concatenate
from pyro_l0.fast.record import Record
from pyro_l0.fast.switch import is_open
from pyro_l0.infer._posteriors import GatesPosterior, SitePosterior


class Drawing(Protocol):
    """How a guide draws its sites."""

    def draw(self, plates: Mapping[str, pyro.plate]) -> dict[str, Tensor]:
        """Sample every site in its plates."""
        ...

    def draw_for(self, record: Record) -> dict[str, Tensor]:
        """Sample every site, outside of plates, for a loss that looks at sites alone."""
        ...


class MeanField:
    """Draws sites that do not depend on one another; the one piece of a guide that knows that they don't."""

    def __init__(self, posteriors: Mapping[str, SitePosterior]) -> None:
        self._posteriors = posteriors
        self._kept: dict[str, tuple[GateDistribution, TorchDistributionMixin]] = {}
        self._groups: list[list[str]] = []  # sites that can be drawn jointly
        templates = {name: x.template for name, x in posteriors.items() if isinstance(x, GatesPosterior)}
        for name, template in templates.items():
            for group in self._groups:
                if concatenate([templates[group[0]], template]) is not None:
                    group.append(name)
                    break
            else:
                self._groups.append([name])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}}

    def draw(self, plates: Mapping[str, pyro.plate]) -> dict[str, Tensor]:
        """Sample every site in its plates."""
        values: dict[str, Tensor] = {}
        for name, posterior in self._posteriors.items():
            parameters: Mapping[str, Tensor] = posterior.parameters
            with ExitStack() as stack:
                for plate in posterior.plates:
                    stack.enter_context(plates[plate])
                if posterior.plates:  # each parameter is full-sized, and a subsampled plate picks its rows
                    parameters = {k: pyro.subsample(x, event_dim=posterior.event_dim) for k, x in parameters.items()}
                values[name] = pyro.sample(name, posterior.in_events(posterior.distribution(parameters)))
        return values

    def draw_for(self, record: Record) -> dict[str, Tensor]:
        """Sample every site, outside of plates, for a loss that looks at sites alone: gates of one kind in one draw."""
        values: dict[str, Tensor] = {}
        for names in self._groups if is_open("joint_draws") else []:
            gates, fns = zip(*map(self._gates, names), strict=True)
            joint = gates[0].draw_jointly(gates)
            for name, fn, draw in zip(names, fns, joint.draws, strict=True):
                values[name] = record.sample(name, fn, draw, joint=joint)
        for name, x in self._posteriors.items():
            if name not in values:
                gates_alone = isinstance(x, GatesPosterior)
                fn = self._gates(name)[1] if gates_alone else x.in_events(x.distribution(x.parameters))
                values[name] = record.sample(name, fn)
        return values

    def _gates(self, name: str) -> tuple[GateDistribution, TorchDistributionMixin]:
        """The gates of a site, and these in events; kept from step to step if they hold the parameters themselves."""
        posterior, kept = self._posteriors[name], self._kept.get(name)
        if kept is None or not _holds(kept[0], posterior.parameters):
            assert isinstance(posterior, GatesPosterior)
            gates = posterior.distribution(posterior.parameters)
            kept = gates, posterior.in_events(gates)
            if _holds(gates, posterior.parameters):
                self._kept[name] = kept
        return kept


def _holds(gates: GateDistribution, parameters: Mapping[str, Tensor]) -> bool:
    return all(getattr(gates, key) is x for key, x in parameters.items())
