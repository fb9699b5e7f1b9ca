"""What a diagnosis knows of a training: its gates, the parameter groups that hold them, gradients of data and price."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from pyro.infer.elbo import ELBOModule
from pyro.optim import PyroOptim
from pyro.optim.clipped_adam import ClippedAdam
from torch import Tensor, nn
from torch.distributions import transform_to
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.infer.control.sparsity_target import closing_locations
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.parameters import GateGuide
from pyro_l0.infer.record import Record
from pyro_l0.infer.runs import Watch, forked_generators

Loss = Callable[..., Tensor]
AnyOptimiser = Optimizer | PyroOptim
# Their step is at most about the rate, whatever the size of the gradient.
_NORMALISED = (Adam, Adamax, NAdam, RAdam, AdamW, RMSprop, Adagrad, ClippedAdam)
_NEVER = -29.0  # on the scale of log alpha, where every gate is closed that closes at all


class ParamGroup(NamedTuple):
    """A parameter, and what the optimiser's group that holds it says."""

    parameter: Tensor
    optimiser: Optimizer
    options: dict[str, object]

    def number(self, *names: str) -> float:
        """The largest of some options, 0 for those that the group does not have."""
        values = [self.options.get(name) for name in names]
        return max((float(x) for x in values if isinstance(x, float | int | Tensor)), default=0.0)

    @property
    def rate(self) -> float:
        """The learning rate, or the largest of a schedule, where it is known."""
        return self.number("lr", "initial_lr", "max_lr")

    @property
    def is_normalised(self) -> bool:
        """Whether a step is as long as the rate, whatever the size of the gradient, as in Adam."""
        return isinstance(self.optimiser, _NORMALISED)

    @property
    def is_decoupled(self) -> bool:
        """Whether the weight decay is not part of the gradient, as in AdamW."""
        return isinstance(self.optimiser, AdamW) or bool(self.options.get("decoupled_weight_decay"))

    @property
    def steps(self) -> int | None:
        """How many steps were taken; None if the optimiser does not count them."""
        step = self.optimiser.state.get(self.parameter, {}).get("step")
        return None if step is None else int(step)

    def longest_step(self, gradient: Tensor | None) -> float | None:
        """How far one step moves at most; None if it is not known."""
        if self.is_normalised:
            return self.rate
        if gradient is None or not isinstance(self.optimiser, SGD):
            return None
        return self.rate * float(gradient.abs().max()) / max(1 - self.number("momentum"), 1e-3)


def group_of(parameter: Tensor, optimisers: Iterable[AnyOptimiser]) -> ParamGroup | None:
    """The parameter group of some optimisers that holds a parameter; None if none does."""
    for each in optimisers:
        optimiser = each if isinstance(each, Optimizer) else _pyros_optimiser(each, parameter)
        for group in [] if optimiser is None else optimiser.param_groups:
            if optimiser is not None and any(x is parameter for x in group["params"]):
                return ParamGroup(parameter, optimiser, group)
    return None


def _pyros_optimiser(optimiser: PyroOptim, parameter: Tensor) -> Optimizer | None:
    """The optimiser that Pyro has for a parameter, or will make of one that asks for a gradient."""
    if optimiser.optim_objs:
        found = optimiser.optim_objs.get(parameter)
        scheduled = getattr(found, "optimizer", found)
        return scheduled if isinstance(scheduled, Optimizer) else None
    arguments = optimiser.pt_optim_args
    if not parameter.requires_grad or not isinstance(arguments, dict):
        return None
    return cast(Callable[..., Optimizer], optimiser.pt_optim_constructor)([parameter], **arguments)


@dataclass(frozen=True)
class GateSite:
    """One site, every tensor flat and in float32 or more."""

    name: str
    gate: GateDistribution  # its posterior, without gradients
    parameter: Tensor  # the guide's, which sets the location of its gates
    group: ParamGroup | None  # in which an optimiser holds the parameter; None if none does
    test_gate: Tensor
    location: Tensor  # where the gates are, on the scale of the parameter
    closing: Tensor  # where their test gates become 0 there; -inf if it can't close them, or it is not known
    start: float | None  # where the guide put them before training; None if that is not known

    @property
    def is_open(self) -> Tensor:
        """Which gates are open in the deterministic network, bool: those whose test gate is above 0."""
        return self.test_gate > 0

    def interior_draws(self, draws: int) -> float:
        """How many draws of the open gates are expected to have a gradient."""
        logs = (self.gate.log_prob_zero, self.gate.log_prob_one)
        closed, opened = (torch.exp(x.detach()).flatten()[self.is_open] for x in logs)
        return draws * float((1 - torch.maximum(closed, opened)).sum())


@torch.no_grad()
def gate_sites(guide: GateGuide, optimisers: Sequence[AnyOptimiser], is_opened: bool) -> list[GateSite]:
    """The sites of a guide; ``is_opened`` where a target has opened them, so that their start is not known."""
    sites = []
    for (name, gate), parameter in zip(guide.posterior().items(), guide.locations(), strict=True):
        current = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
        start = _start(guide, name, gate) if isinstance(guide, AutoGate) and not is_opened else None
        test_gate, location, closing = (x.flatten() for x in (gate.test_gate, current, _closing(gate, current)))
        group = group_of(parameter, optimisers)
        sites.append(GateSite(name, gate, parameter, group, test_gate, location, closing, start))
    return sites


def _closing(gate: GateDistribution, current: Tensor) -> Tensor:
    key, constraint = next(iter(gate.learned.items()))
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


class Contributions(NamedTuple):
    """What data and price contribute to the gradients of the gates' locations, by site."""

    data: dict[str, Tensor]  # shape ``(draws, gates)``; of the whole loss where its price is not known separately
    price: dict[str, Tensor] | None  # shape ``(gates,)``; None where it is not known


def measure_contributions(
    loss: Loss, batches: Sequence[object], locations: dict[str, Tensor], draws: int
) -> Contributions:
    """Gradients over some draws, which go through the batches in turn.

    An ``L0_ELBO(...)(model, guide)`` is split into data and price. Sites without ``requires_grad`` are left out.
    """
    asked = {name: x for name, x in locations.items() if x.requires_grad}
    elbo = objective_of(loss)
    runs = [arguments_of(batches[i % len(batches)]) for i in range(draws)]
    if elbo is None or not isinstance(loss, ELBOModule):
        rows, price = [_gradients(loss(*run), asked) for run in runs], None
    else:
        free, priced = _probe(elbo), _probe(elbo)
        free.lam, free.weight_decay, free.kl_scale = 0.0, 0.0, 0.0
        rows = [_gradients(free.differentiable_loss(loss.model, loss.guide, *run), asked) for run in runs]
        with Record() as record:
            loss.guide(*runs[0])
        total = sum(priced.evaluate(loss.model, record, {}, runs[0], {}).analytic, torch.zeros(()))
        price = dict(zip(asked, _gradients(total, asked), strict=True))
    return Contributions({name: torch.stack([row[i] for row in rows]) for i, name in enumerate(asked)}, price)


def _probe(elbo: L0_ELBO) -> L0_ELBO:
    """A copy of an objective whose runs leave its step, its baseline and its watch alone."""
    probe = copy.copy(elbo)
    probe._watch, probe.estimator = Watch(), copy.copy(elbo.estimator)
    return probe


def _gradients(loss: Tensor, asked: dict[str, Tensor]) -> list[Tensor]:
    if not (asked and loss.requires_grad):
        return [torch.zeros(x.numel()) for x in asked.values()]
    found = torch.autograd.grad(loss, list(asked.values()), materialize_grads=True)
    return [x.detach().flatten().float().cpu() for x in found]


def objective_of(loss: Loss | None) -> L0_ELBO | None:
    """The objective of a loss that is ``L0_ELBO(...)(model, guide)``; None for any other."""
    elbo = loss.elbo if isinstance(loss, ELBOModule) else None
    return elbo if isinstance(elbo, L0_ELBO) else None


def arguments_of(batch: object) -> tuple[object, ...]:
    """What a loss is called with for a batch: its entries if it is a tuple or a list, else the batch alone."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def first_batches(batches: Iterable[object], number: int) -> list[object]:
    """The first of some batches; a loader's own generator is left as it was."""
    found = (getattr(x, "generator", None) for x in (batches, getattr(batches, "sampler", None)))
    generators = [(x, x.get_state()) for x in found if isinstance(x, torch.Generator)]
    first = [batch for batch, _ in zip(batches, range(number), strict=False)]
    for generator, state in generators:
        generator.set_state(state)
    return first


@contextmanager
def untouched() -> Iterator[None]:
    """A context in which losses may be run, with gradients on; at its end, what they changed is put back.

    This covers the random states of torch, NumPy and Python, and the buffers of every module that is called, such as
    BatchNorm's running statistics. Take gradients by ``torch.autograd.grad``, which leaves ``.grad`` alone.
    """
    saved: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}

    def save(module: nn.Module, inputs: object) -> None:
        for name, x in module._buffers.items():
            if x is not None and (module, name) not in saved:
                saved[module, name] = x, x.detach().clone()

    hook = register_module_forward_pre_hook(save)
    try:
        with forked_generators(), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hook.remove()
        with torch.no_grad():
            for (module, name), (buffer, value) in saved.items():
                module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
