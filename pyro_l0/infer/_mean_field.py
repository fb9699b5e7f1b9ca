"""How a mean-field guide draws its sites: each by itself, or the gates of one kind together, in less time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import pyro
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from pyro_l0.distributions.gate import GateDistribution, concatenate
from pyro_l0.fast.record import Record
from pyro_l0.fast.switch import is_open
from pyro_l0.infer._plans import GatePlan, Plan, parameters_of, site_key


class MeanField:
    """Draws sites that do not depend on one another; such a guide's one place that knows this.

    Args:
        plans: what is known of each site.
        modules: the sites' parameters.
    """

    def __init__(self, plans: Mapping[str, Plan], modules: nn.ModuleDict) -> None:
        self._plans = plans
        self._modules = modules
        self._kept: dict[str, tuple[GateDistribution, TorchDistributionMixin]] = {}
        self._together: list[list[str]] = []
        templates = {name: plan.template for name, plan in plans.items() if isinstance(plan, GatePlan)}
        for name, template in templates.items():
            for group in self._together:
                if concatenate([templates[group[0]], template]) is not None:
                    group.append(name)
                    break
            else:
                self._together.append([name])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}}

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of a site."""
        return parameters_of(self._modules[site_key(name)])

    def draw(self, plates: Mapping[str, pyro.plate]) -> dict[str, Tensor]:
        """Sample every site in its plates."""
        values: dict[str, Tensor] = {}
        for name, plan in self._plans.items():
            parameters: Mapping[str, Tensor] = self.parameters(name)
            with ExitStack() as stack:
                for plate in plan.plates:
                    stack.enter_context(plates[plate])
                if plan.plates:  # each parameter is full-sized, and a subsampled plate picks its rows
                    parameters = {key: pyro.subsample(x, event_dim=plan.event_dim) for key, x in parameters.items()}
                values[name] = pyro.sample(name, plan.in_events(plan.posterior(parameters)))
        return values

    def draw_for(self, record: Record) -> dict[str, Tensor]:
        """Sample every site, outside of plates, for a loss that looks at sites alone: gates of one kind in one draw."""
        values: dict[str, Tensor] = {}
        for names in self._together if is_open("joint_draws") else []:
            gates, fns = zip(*map(self._gate, names), strict=True)
            joint = gates[0].draw_jointly(gates)
            for name, fn, draw in zip(names, fns, joint.draws, strict=True):
                values[name] = record.sample(name, fn, draw, joint=joint)
        for name, plan in self._plans.items():
            if name not in values:
                is_gate = isinstance(plan, GatePlan)
                fn = self._gate(name)[1] if is_gate else plan.in_events(plan.posterior(self.parameters(name)))
                values[name] = record.sample(name, fn)
        return values

    def _gate(self, name: str) -> tuple[GateDistribution, TorchDistributionMixin]:
        """The gates of a site, and these in events; kept from step to step if they hold the parameters themselves."""
        kept, parameters = self._kept.get(name), self.parameters(name)
        if kept is None or not _holds(kept[0], parameters):
            plan = self._plans[name]
            assert isinstance(plan, GatePlan)
            gate = plan.posterior(parameters)
            kept = gate, plan.in_events(gate)
            if _holds(gate, parameters):
                self._kept[name] = kept
        return kept


def _holds(gate: GateDistribution, parameters: Mapping[str, Tensor]) -> bool:
    return all(getattr(gate, key) is x for key, x in parameters.items())
