"""What a diagnosis knows of a training: the gates of each site, how they move, and gradients of data and price."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from pyro.infer.elbo import ELBOModule
from pyro.optim import PyroOptim
from pyro.optim.clipped_adam import ClippedAdam
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor, nn
from torch.distributions import transform_to
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.fast.record import Record
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.parameters import GateGuide
from pyro_l0.infer.runs import Watch
from pyro_l0.infer.target.sparsity_target import SparsityTarget, closing_locations

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Pulls:
    """Gradients for the locations of the gates, by site."""

    data: dict[str, Tensor]  # shape ``(draws, gates)``; of the whole loss where its price is not known separately
    price: dict[str, Tensor] | None  # shape ``(gates,)``; None where it is not known

    def mean(self, name: str) -> Tensor | None:
        """The mean gradient of a site, its price included."""
        if name not in self.data:
            return None
        data = self.data[name].mean(0)
        return data if self.price is None else data + self.price[name]


def objective_of(loss: Loss | None) -> L0_ELBO | None:
    """The objective of a loss that is ``L0_ELBO(...)(model, guide)``; None for any other."""
    elbo = loss.elbo if isinstance(loss, ELBOModule) else None
    return elbo if isinstance(elbo, L0_ELBO) else None


def arguments_of(batch: object) -> tuple[object, ...]:
    """The arguments of a loss in a batch."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def first_batches(batches: Iterable[object], number: int) -> list[object]:
    """The first of some batches; a loader's own generator is left as it was."""
    holders = [batches, getattr(batches, "sampler", None)]
    found = (getattr(holder, "generator", None) for holder in holders)
    generators = [(x, x.get_state()) for x in found if isinstance(x, torch.Generator)]
    first = [batch for batch, _ in zip(batches, range(number), strict=False)]
    for generator, state in generators:
        generator.set_state(state)
    return first


def measure_pulls(loss: Loss, batches: Sequence[object], locations: dict[str, Tensor], draws: int) -> Pulls:
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
    return Pulls({name: torch.stack([row[i] for row in rows]) for i, name in enumerate(asked)}, price)


def _probe(elbo: L0_ELBO) -> L0_ELBO:
    """A copy of an objective whose runs leave its step, its baseline and its watch alone."""
    probe = copy.copy(elbo)
    probe._watch = Watch()
    probe.estimator = copy.copy(elbo.estimator)
    return probe


def _gradients(loss: Tensor, asked: dict[str, Tensor]) -> list[Tensor]:
    if not (asked and loss.requires_grad):
        return [torch.zeros(x.numel()) for x in asked.values()]
    found = torch.autograd.grad(loss, list(asked.values()), materialize_grads=True)
    return [x.detach().flatten().float().cpu() for x in found]


@contextmanager
def untouched(guide: object, devices: Iterable[torch.device]) -> Iterator[None]:
    """A context in which losses may be run, with gradients on; at its end, what they changed is put back.

    This covers the random states of torch, NumPy and Python, and the buffers of every module that is called, such as
    BatchNorm's running statistics. Take gradients by ``torch.autograd.grad``, which leaves ``.grad`` alone.
    """
    saved: dict[nn.Module, dict[str, tuple[Tensor, Tensor]]] = {}

    def save(module: nn.Module, inputs: object) -> None:
        if module not in saved:
            saved[module] = {name: (x, x.detach().clone()) for name, x in module._buffers.items() if x is not None}

    watches = guide._watches if isinstance(guide, AutoGate) else []
    state = get_rng_state()
    hook = register_module_forward_pre_hook(save)
    try:
        if isinstance(guide, AutoGate):
            guide._watches = []  # these runs do not count as training
        cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        with torch.random.fork_rng(cuda), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hook.remove()
        set_rng_state(state)
        if isinstance(guide, AutoGate):
            guide._watches = watches
        for module, held in saved.items():
            _put_back(module, held)


@torch.no_grad()
def _put_back(module: nn.Module, held: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (buffer, value) in held.items():
        module._buffers[name] = buffer
        if not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(value)):
            buffer.copy_(value)


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
