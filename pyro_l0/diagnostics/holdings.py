"""How an optimiser holds a parameter: at what rate, with what decay, and how far it can move it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from pyro.optim import PyroOptim
from pyro.optim.clipped_adam import ClippedAdam
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["AnyOptimiser", "Holding", "find_holding"]

AnyOptimiser = Optimizer | PyroOptim
# Whose step is at most about the rate, whatever the size of the gradient.
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


@dataclass(frozen=True)
class Holding:
    """A parameter as one optimiser holds it."""

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
        """The learning rate, or a schedule's largest, where it is known."""
        return self._number("lr", "initial_lr", "max_lr")

    @property
    def decay(self) -> float:
        """The weight decay."""
        return self._number("weight_decay")

    @property
    def is_normalised(self) -> bool:
        """Whether a step is as long as the rate, whatever the size of the gradient, as Adam's."""
        return isinstance(self.optimiser, _NORMALISED)

    @property
    def decays_apart(self) -> bool:
        """Whether the decay is no part of the gradient, as in AdamW."""
        return isinstance(self.optimiser, torch.optim.AdamW) or bool(self.group.get("decoupled_weight_decay"))

    @property
    def steps(self) -> int | None:
        """How many steps were taken; None if the optimiser does not count them."""
        step = self._state("step")
        return None if step is None else int(step.max())

    def gradient_size(self) -> Tensor | None:
        """Root mean square of the gradient of each gate as the optimiser has seen it, shape of the parameter."""
        square, step = self._state("exp_avg_sq"), self.steps
        betas = self.group.get("betas")
        if square is not None and step and isinstance(betas, tuple):
            return (square.float() / (1 - float(betas[1]) ** step)).sqrt()
        gradient = self.parameter.grad
        return None if gradient is None else gradient.detach().float().abs()

    def longest_step(self, gradient: Tensor | None) -> float | None:
        """How far one step moves at most; None if it can't be told.

        Args:
            gradient: of each entry, where the optimiser has none yet.
        """
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


def find_holding(parameter: Tensor, optimisers: Sequence[AnyOptimiser]) -> Holding | None:
    """How one of some optimisers holds a parameter; None if none does."""
    for optimiser in optimisers:
        for each in _torch_optimisers(optimiser, parameter):
            for group in each.param_groups:
                if any(x is parameter for x in group["params"]):
                    return Holding(parameter, each, group)
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


def steps_taken(holdings: Sequence[Holding | None]) -> int | None:
    """The most steps that were taken with any of some parameters; None if that is not known."""
    known = [holding.steps for holding in holdings if holding is not None]
    counted = [steps for steps in known if steps is not None]
    return max(counted) if counted else None


def spacing(x: Tensor) -> Tensor:
    """Distance between neighbouring numbers of a tensor's type, at its entries."""
    exponent = torch.floor(torch.log2(x.detach().float().abs().clamp(min=1e-30)))
    return torch.finfo(x.dtype).eps * torch.exp2(exponent)
