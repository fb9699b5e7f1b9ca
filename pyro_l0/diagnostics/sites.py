"""What a diagnosis knows of a training: where the gates of each site stand, and how an optimiser moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from pyro.optim import PyroOptim
from pyro.optim.clipped_adam import ClippedAdam
from torch import Tensor
from torch.distributions import transform_to
from torch.optim import Optimizer

from pyro_l0.diagnostics.pulls import Pulls
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.protocol import GateGuide
from pyro_l0.infer.target.positions import closing_locations
from pyro_l0.infer.target.sparsity_target import SparsityTarget

__all__ = ["AnyOptimiser", "GateSite", "Holding", "Training", "gate_sites"]

AnyOptimiser = Optimizer | PyroOptim
# Their step is at most about the rate, whatever the size of the gradient.
_NORMALISED = (
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    ClippedAdam,
)
_NEVER = -29.0  # on the scale of log alpha, where every gate is closed that closes at all


@dataclass(frozen=True)
class Holding:
    """A parameter and the parameter group in which an optimiser holds it."""

    parameter: Tensor
    optimiser: Optimizer
    group: dict[str, object]

    def _number(self, *names: str) -> float:
        """The largest of some settings of the group, 0 for those that it does not have."""
        values = [self.group.get(name) for name in names]
        return max((float(x) for x in values if isinstance(x, float | int | Tensor)), default=0.0)

    def _state(self, name: str) -> Tensor | None:
        value = self.optimiser.state.get(self.parameter, {}).get(name)
        return torch.as_tensor(value).detach() if isinstance(value, Tensor | float | int) else None

    @property
    def rate(self) -> float:
        """The learning rate, or the largest of a schedule, where it is known."""
        return self._number("lr", "initial_lr", "max_lr")

    @property
    def decay(self) -> float:
        """The weight decay."""
        return self._number("weight_decay")

    @property
    def is_normalised(self) -> bool:
        """Whether a step is as long as the rate, whatever the size of the gradient, as in Adam."""
        return isinstance(self.optimiser, _NORMALISED)

    @property
    def is_decoupled(self) -> bool:
        """Whether the decay is not part of the gradient, as in AdamW."""
        return isinstance(self.optimiser, torch.optim.AdamW) or bool(self.group.get("decoupled_weight_decay"))

    @property
    def steps(self) -> int | None:
        """How many steps were taken; None if the optimiser does not count them."""
        step = self._state("step")
        return None if step is None else int(step.max())

    def gradient_size(self) -> Tensor | None:
        """Root mean square of the gradient of each gate that the optimiser has seen, shape of the parameter."""
        square, step = self._state("exp_avg_sq"), self.steps
        betas = self.group.get("betas")
        if square is not None and step and isinstance(betas, tuple):
            return (square.float() / (1 - float(betas[1]) ** step)).sqrt()
        gradient = self.parameter.grad
        return None if gradient is None else gradient.detach().float().abs()

    def longest_step(self, gradient: Tensor | None) -> float | None:
        """How far one step moves at most, by a gradient where the optimiser has none yet; None if it is not known."""
        if self.is_normalised:
            return self.rate
        if not isinstance(self.optimiser, torch.optim.SGD):
            return None
        buffer, momentum = self._state("momentum_buffer"), self._number("momentum")
        if buffer is not None:
            return self.rate * float(buffer.abs().max())
        seen = self.gradient_size()
        gradient = gradient if seen is None else seen
        return None if gradient is None else self.rate * float(gradient.abs().max()) / max(1 - momentum, 1e-3)


@dataclass(frozen=True)
class GateSite:
    """One site, every tensor flat and in float32 or more."""

    name: str
    gate: GateDistribution  # its posterior, without gradients
    parameter: Tensor  # the guide's, which sets the location of its gates
    holding: Holding | None  # how an optimiser holds the parameter; None if none does
    test_gate: Tensor
    location: Tensor  # where the gates are, on the scale of the parameter
    closing: Tensor  # where their test gates become 0 there; -inf if it can't close them, or it is not known
    start: float | None  # where the guide put them before training; None if that is not known

    @property
    def is_open(self) -> Tensor:
        """Which gates are open in the deterministic network."""
        return self.test_gate > 0

    @property
    def distance(self) -> Tensor:
        """How far each open gate is from closing, for those that can close."""
        found = (self.location - self.closing)[self.is_open]
        return found[found.isfinite()]

    def interior_draws(self, draws: int) -> float:
        """How many draws of the open gates are expected to have a gradient."""
        logs = (self.gate.log_prob_zero, self.gate.log_prob_one)
        closed, opened = (torch.exp(x.detach()).flatten()[self.is_open] for x in logs)
        return draws * float((1 - torch.maximum(closed, opened)).sum())


@dataclass(frozen=True)
class Training:
    """A training at one step; what is None is not known."""

    sites: Sequence[GateSite]
    optimisers: int  # how many were given
    elbo: L0_ELBO | None
    target: SparsityTarget | None
    pulls: Pulls | None  # gradients for the gates
    steps_left: int | None  # of the optimiser until the end

    @property
    def counted(self) -> int | None:
        """Steps that the optimiser has taken with the gates."""
        known = [site.holding.steps for site in self.sites if site.holding is not None]
        return max((steps for steps in known if steps is not None), default=None)

    @property
    def steps(self) -> int | None:
        """Steps taken, by what the optimiser or the objective counts."""
        return self.elbo.step if self.counted is None and self.elbo is not None else self.counted

    @property
    def has_gate_kl(self) -> bool:
        """Whether the objective compares the gates with a prior."""
        return self.elbo is not None and any(term.name == "kl_gate" for term in self.elbo.objective_terms)

    def gradient(self, site: GateSite) -> Tensor | None:
        """The mean gradient of a site, its price included."""
        return None if self.pulls is None else self.pulls.mean(site.name)

    def total_steps(self, site: GateSite) -> int | None:
        """Steps with a site's gates, taken and to come."""
        if site.holding is None or self.steps_left is None:
            return None
        return self.steps_left + (site.holding.steps or 0)


@torch.no_grad()
def gate_sites(guide: GateGuide, optimisers: Sequence[AnyOptimiser], is_opened: bool) -> list[GateSite]:
    """The sites of a guide; ``is_opened`` where a target has opened them, so that their start is not known."""
    sites = []
    for (name, gate), parameter in zip(guide.posterior().items(), guide.locations(), strict=True):
        flat = parameter.detach().flatten()
        location = flat.to(torch.promote_types(flat.dtype, torch.float32))
        start = _start(guide, name, gate) if isinstance(guide, AutoGate) and not is_opened else None
        holding = _find_holding(parameter, optimisers)
        test_gate = gate.test_gate.detach().flatten()
        closing = _closing(gate, parameter.detach()).flatten()
        sites.append(GateSite(name, gate, parameter, holding, test_gate, location, closing, start))
    return sites


def _closing(gate: GateDistribution, parameter: Tensor) -> Tensor:
    key, constraint = next(iter(gate.learned.items()))
    current = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
    if not torch.allclose(transform_to(constraint)(current), getattr(gate, key).to(current), rtol=1e-2):
        return torch.full_like(current, -math.inf)
    closing = closing_locations(gate).to(current)
    return torch.where(closing > _NEVER, closing, -math.inf)


def _start(guide: AutoGate, name: str, gate: GateDistribution) -> float | None:
    """Where a guide put the gates of a site, on the scale of the parameter, if that is one number."""
    rate = guide.init_active_prob
    rate = rate.get(name, 0.9) if not isinstance(rate, float | int) else rate
    key, constraint = next(iter(gate.learned.items()))
    try:
        first = type(gate).from_active_prob(torch.tensor(rate), **gate.fixed_options)
    except ValueError:  # another rate per gate
        return None
    location = transform_to(constraint).inv(getattr(first, key))
    return float(location) if location.numel() == 1 else None


def _find_holding(parameter: Tensor, optimisers: Sequence[AnyOptimiser]) -> Holding | None:
    for optimiser in (x for each in optimisers for x in _torch_optimisers(each, parameter)):
        for group in optimiser.param_groups:
            if any(x is parameter for x in group["params"]):
                return Holding(parameter, optimiser, group)
    return None


def _torch_optimisers(optimiser: AnyOptimiser, parameter: Tensor) -> list[Optimizer]:
    if isinstance(optimiser, Optimizer):
        return [optimiser]
    if optimiser.optim_objs:
        found = optimiser.optim_objs.get(parameter)
        scheduled = getattr(found, "optimizer", found)
        return [scheduled] if isinstance(scheduled, Optimizer) else []
    # SVI has not stepped yet, and will make one of these for every parameter that asks for a gradient.
    arguments = optimiser.pt_optim_args
    if not parameter.requires_grad or not isinstance(arguments, dict):
        return []
    make = cast(Callable[..., Optimizer], optimiser.pt_optim_constructor)
    return [make([parameter], **arguments)]
