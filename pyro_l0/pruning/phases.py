"""How pruning trains: what a user sets, and the two phases, with gates under a budget and without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import DistributedSampler

from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.expect import expect, expect_count
from pyro_l0.nn.engine.record import copied
from pyro_l0.training.epochs import Stream, some_batches
from pyro_l0.training.processes import average_buffers, average_gradients, gather

_SUM = 1e-3  # how far sums of probabilities are from 1, at most


@runtime_checkable
class Loader(Protocol):
    """What gives batches, again and again; a :class:`torch.utils.data.DataLoader` is one."""

    def __len__(self) -> int:
        """The number of batches of an epoch."""

    def __iter__(self) -> Iterator[object]:
        """The batches of an epoch."""


_LEAST_STEPS = 10  # with gates
_AFTER, _LEAST_AFTER = 0.35, 0.25  # of all steps, the part after the cut: the second where few would have gates
_FEW_STEPS = 300  # with gates
Weights = Literal["trained", "frozen"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How :func:`~pyro_l0.prune` trains. Make one and use it for any number of networks; the defaults suit most.

    Attributes:
        weights: ``"trained"``, or ``"frozen"``, which trains the gates alone. The network is in evaluation mode, as are
            its BatchNorm and dropout; its weights get no gradient and its buffers stay. All epochs have gates, and the
            cut network, whose weights need no gradient either, is not trained. A weight that it keeps is as it was,
            times a gate between 0 and 1 where there is one.
        make_optimiser: makes an optimiser for given parameters; by default Adam with a learning rate of 1e-3. Gates
            have their own.
        make_schedule: makes a scheduler from an optimiser and a number of steps, for the phase with gates and for the
            one after; by default learning rates are constant, and fall to 0 by a cosine over the last half of the
            latter.
        finetune: fraction of the epochs that comes after the cut, from 0 to 0.9; by default 0.35, and less, down to
            0.25, if fewer than 300 steps would have gates; 0 for frozen weights.
        distil: weight and temperature of distillation from the given network, such as ``(0.5, 2.0)``, with gates and
            after the cut; the loss should then be a mean. If outputs are not class logits or targets not integers,
            give a function of the network's and the given one's outputs instead of the temperature; see
            :class:`~pyro_l0.pruning.Distillation`. With weight 1 and ``loss_fn=None`` it needs no targets.
        accumulate: number of batches for each step.
        steps_per_epoch: length of an epoch for a loader without a length, such as a stream. Each epoch continues where
            the last one ended, and the loader starts again at its end. A resumed run skips the batches already taken.
        autocast: type of numbers for :class:`torch.autocast`, such as ``torch.bfloat16``.
        device: where to train; by default where the network is. The loader may give batches on another.
        evaluate: takes a network in evaluation mode and returns its error (smaller is better), for the report and,
            after the cut, for the history.
        callbacks: are called after every epoch with its entry of the history.
        progress: whether to print every epoch to the standard error.
        checkpoint: a file that is written after epochs, at most for a hundredth of the time, with a SHA-256. The one
            before stays as ``.previous``, and ``.lock``, by which a run holds the file.
        resume: continue from that file, bit for bit, if it exists. A loss of other numbers is refused if it is a module
            or a ``functools.partial``; any other function goes by its name.

    Raises:
        ValueError: a number is out of range, or ``resume`` has no ``checkpoint``.
        TypeError: a value has the wrong type.

    Example:
        >>> from torch.optim import SGD
        >>> from pyro_l0.pruning import Training
        >>> training = Training(make_optimiser=lambda params: SGD(params, 0.1), accumulate=4)
    """

    weights: Weights = "trained"
    make_optimiser: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    make_schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    finetune: float | None = None
    distil: tuple[float, float | Callable[..., Tensor]] | None = None
    accumulate: int = 1
    steps_per_epoch: int | None = None
    autocast: torch.dtype | None = None
    device: torch.device | str | None = None
    evaluate: Callable[[nn.Module], float] | None = None
    callbacks: Sequence[Callable[[Mapping[str, float]], None]] = ()
    progress: bool = False
    checkpoint: str | Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        expect(bool, "True or False", progress=self.progress, resume=self.resume)
        expect(torch.dtype | None, "a type of numbers, such as torch.bfloat16", autocast=self.autocast)
        expect(Sequence, "a list of functions", callbacks=self.callbacks)
        expect(Real | None, "a number", finetune=self.finetune)
        expect_count(1, accumulate=self.accumulate)
        if self.steps_per_epoch is not None:
            expect_count(1, steps_per_epoch=self.steps_per_epoch)
        if self.finetune is not None and not 0 <= self.finetune <= 0.9:
            raise ValueError(f"Expected finetune from 0 to 0.9, a part of the epochs, but got {self.finetune}.")
        if self.weights not in get_args(Weights):
            raise ValueError(f'Expected weights to be "trained" or "frozen", but got {self.weights!r}.')
        for_weights = {name: getattr(self, name) for name in ("make_optimiser", "make_schedule", "finetune")}
        if self.weights == "frozen" and (unused := [name for name, value in for_weights.items() if value]):
            raise ValueError(
                f'Expected no {" and no ".join(unused)} with weights="frozen", which are not trained, but got '
                f"{', '.join(f'{name}={for_weights[name]!r}' for name in unused)}; leave it out, or train the weights."
            )
        weight, by = (1, 1) if self.distil is None else self.distil
        if not 0 < weight <= 1 or not (callable(by) or 0 < by < math.inf):
            raise ValueError(
                f"Expected distil=(weight, temperature) with a weight in (0, 1] and a finite temperature above 0, or a "
                f"function instead of it, but got {self.distil}."
            )
        if self.resume and self.checkpoint is None:
            raise ValueError("Expected a checkpoint to resume from, but got none; give that run's file as checkpoint.")

    def with_length(self, loader: Iterable[object]) -> Loader:
        """A loader with a length, which a stream has by ``steps_per_epoch``."""
        if self.steps_per_epoch is not None:
            return Stream(loader, self.steps_per_epoch * self.accumulate)
        with suppress(TypeError):  # of a DataLoader whose data set has none
            if isinstance(loader, Loader) and len(loader):
                return loader
        raise ValueError(
            f"Expected a loader with a length, of at least one batch, such as a DataLoader or a list of batches, but "
            f"got {loader!r}; of a stream, give steps_per_epoch too."
        )

    def count_steps(self, loader: Loader, epochs: int) -> tuple[int, int]:
        """The number of steps with gates and of those after the cut."""
        length, finetune = len(loader), 0.0 if self.weights == "frozen" else self.finetune
        steps = epochs * -(-length // self.accumulate)
        if finetune is None:
            finetune = min(_AFTER, max(_LEAST_AFTER, 1 - _FEW_STEPS / steps))
        further = round(finetune * steps)
        if steps - further < _LEAST_STEPS:
            raise ValueError(
                f"Expected at least {_LEAST_STEPS} steps with gates, but epochs={epochs} of {length} batches, "
                f"accumulate={self.accumulate} and finetune={finetune} give {steps - further}; give more epochs."
            )
        if len({*gather(steps)}) > 1:
            raise ValueError(f"Expected loaders of one length in all processes, but there are others than {length}.")
        return steps - further, further


@dataclass(frozen=True)
class Distillation:
    r"""A loss that also compares a network's outputs with those of a teacher; ``Training(distil=...)`` makes it.

    .. math:: (1 - w) L + w T^2 \operatorname{KL}(\operatorname{softmax}(t / T) \,\|\, \operatorname{softmax}(s / T)),

    where L is the loss on the targets, s and t are the class logits of network and teacher, and the KL in nats is a
    mean over examples and positions. A function of both outputs can replace T; it returns the factor of w.

    Class logits are the outputs, or their entry ``logits``; targets are the batch's, or their entry ``labels``. There
    is an integer target for each vector of logits, whose dimension is the second or the last one; negative targets,
    such as transformers' -100, are left out of the mean. Without a loss function there are no targets, and logits have
    the shape ``(batch, classes)``.

    Attributes:
        teacher: the teacher, in evaluation mode.
        weight: w, in (0, 1].
        by: the temperature, or a function of the network's and the teacher's outputs that returns shape ``()``.

    Example:
        >>> distillation = Distillation(nn.Linear(2, 3), weight=0.5, by=2.0)
        >>> logits, targets = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0])
        >>> float(distillation.divergence(logits, logits, targets))
        0.0

    References:
        Hinton, Vinyals, Dean (2015), arXiv:1503.02531; section 2.
    """

    teacher: nn.Module
    weight: float
    by: float | Callable[..., Tensor]

    def divergence(self, outputs: object, taught: object, targets: object) -> Tensor:
        """The factor of w, shape ``()``: T² KL in nats, or the function's value."""
        if callable(self.by):
            return self.by(outputs, taught)
        logits, other = _entry(outputs, "logits"), _entry(taught, "logits")
        if targets is None and isinstance(logits, Tensor) and logits.dim() == 2:
            dim, is_counted = 1, torch.ones_like(logits[:, 0], dtype=torch.bool)
        else:
            dim, is_counted = _classes(logits, _entry(targets, "labels"))
        assert isinstance(logits, Tensor)
        assert isinstance(other, Tensor)
        student, teacher = (
            F.log_softmax(x.to(torch.promote_types(x.dtype, torch.float32)) / self.by, dim) for x in (logits, other)
        )
        each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim)
        return self.by**2 * (each * is_counted).sum() / is_counted.sum().clamp(min=1)

    def check(self, taught: object) -> None:
        """Refuse outputs that are probabilities already, of which a softmax makes others."""
        logits = None if callable(self.by) else _entry(taught, "logits")
        if isinstance(logits, Tensor) and logits.dim() > 1 and bool((logits >= 0).all()):
            sums = (logits.sum(dim) - 1 for dim in (1, -1))
            if any(bool((far.abs() < _SUM).all()) for far in sums):
                raise ValueError(
                    "Expected class logits to distil from, but the network returns probabilities; return the logits, "
                    "or give distil=(weight, function) with a function of the network's and the teacher's outputs."
                )


def _entry(value: object, name: str) -> object:
    """What a dict or a data class has under a name, or the value itself."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, value)


def _classes(logits: object, targets: object) -> tuple[int, Tensor]:
    """The dimension of the classes, and which positions count."""
    if isinstance(logits, Tensor) and isinstance(targets, Tensor) and not targets.is_floating_point():
        shape = tuple(logits.shape)
        dims = {dim for dim in (1, len(shape) - 1) if dim < len(shape) > 1 < shape[dim]}
        fitting = [dim for dim in dims if shape[:dim] + shape[dim + 1 :] == tuple(targets.shape)]
        if len(fitting) == 1:
            return fitting[0], targets >= 0
    got = [
        f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in (logits, targets)
    ]
    got[1] = "no targets" if targets is None else got[1]
    raise ValueError(
        f"Expected class logits to distil from, and for each vector of them an integer target, but got {got[0]} and "
        f"{got[1]}; for other outputs give distil=(weight, function) with a function of the network's and the "
        "teacher's outputs, such as torch.nn.functional.mse_loss."
    )


LossFunction = Callable[..., Tensor]  # of outputs and targets
_BATCHES = 20  # for statistics of BatchNorm


class BatchLoss:
    """The loss of a network on a batch: the mean over it, or the sum, of shape ``()``.

    A tuple or a list is inputs and, last, targets; of anything else all is input, and the targets are the batch itself,
    as is the one entry of a tuple that has no more. Inputs are a tensor, several in a tuple or a list, or keywords in a
    dict, as in an example of the network's. With a ``distillation`` a part of it compares the outputs with a teacher's,
    and without a function all of it.
    """

    distillation: Distillation | None = None

    def __init__(self, function: LossFunction | None, device: torch.device, autocast: torch.dtype | None) -> None:
        self.function, self.device, self._autocast = function, device, autocast

    def __call__(self, network: nn.Module, batch: object) -> Tensor:
        """The loss of a batch, mixed with that of distillation if there is any, shape ``()``."""
        inputs, targets = self.split(batch)
        outputs = self.outputs(network, inputs)
        loss = None if self.function is None else self.of_outputs(outputs, targets)
        if self.distillation is not None:
            taught = self._taught(self.distillation, inputs)
            with self._context():
                other = self.distillation.divergence(outputs, taught, None if loss is None else targets)
            loss = other if loss is None else torch.lerp(loss, other.to(loss), self.distillation.weight)
        assert loss is not None
        return loss

    def of_outputs(self, outputs: object, targets: object) -> Tensor:
        """The user's function of outputs and targets, in the context of mixed precision."""
        assert self.function is not None
        with self._context():
            return self.function(outputs, targets)

    def teach(self, distillation: Distillation, batch: object) -> None:
        """Learn from a teacher, too; a batch shows whether its outputs can be learned from."""
        distillation.check(self._taught(distillation, self.split(batch)[0]))
        self.distillation = distillation

    def outputs(self, network: nn.Module, inputs: object) -> object:
        """What the network returns: inputs that are a dict go in by name, a tuple by position."""
        with self._context():
            if isinstance(inputs, Mapping):
                return network(**inputs)
            if not isinstance(inputs, (tuple, list)):
                return network(inputs)
            try:
                return network(*inputs)
            except TypeError as error:
                error.add_note(
                    f"The batch gave {len(inputs)} inputs, as only its last item is targets; put several targets into "
                    "one, such as (image, (label, box))."
                )
                raise

    def split(self, batch: object) -> tuple[object, object]:
        """Inputs and targets on the device; both are the whole batch where it is a dict or has one item."""
        if isinstance(batch, Mapping):
            batch = dict(batch)  # moved as such, whatever its class
        batch = tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), batch)
        if not isinstance(batch, (tuple, list)):
            return batch, batch
        if len(batch) == 1:
            return batch[0], batch[0]
        *inputs, targets = batch
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets

    @torch.no_grad()
    def _taught(self, distillation: Distillation, inputs: object) -> object:
        return self.outputs(distillation.teacher, inputs)

    def _context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)


def groups(loader: Loader, size: int, epoch: int) -> Iterator[list[object]]:
    """The batches of an epoch, so many for each step; what is left over at the end makes a smaller group."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)
    group: list[object] = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def held_norms(network: nn.Module) -> set[nn.Module]:
    """The BatchNorm layers that the network's own ``train`` holds in evaluation mode, with their running statistics."""
    modes = {module: module.training for module in network.modules()}
    network.train()
    held: set[nn.Module] = {
        m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and not m.training
    }
    for module, training in modes.items():
        module.training = training
    return held


@torch.no_grad()
def renew_statistics(network: nn.Module, loader: Loader, loss: BatchLoss) -> None:
    """Take the running statistics of BatchNorm anew, as means over a few batches, but those of :func:`held_norms`.

    After units were removed the old ones describe inputs that no longer exist. The network's mode stays.
    """
    held = held_norms(network)
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m not in held]
    if not norms:
        return
    modes = {module: module.training for module in network.modules()}
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
        norm.train()
    try:
        for batch in islice(some_batches(loader), _BATCHES):
            loss.outputs(network, loss.split(batch)[0])
        average_buffers(network)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training


def trained_modules(network: nn.Module, loss: BatchLoss, batch: object) -> set[str]:
    """The paths of the modules whose own parameters a loss trains; a copy is called, with random numbers of its own.

    There are none in a frozen network.
    """
    if not any(p.requires_grad for p in network.parameters()):
        return set()
    trained = copied(network).train()
    with torch.random.fork_rng([loss.device] if loss.device.type == "cuda" else []):
        loss(trained, batch).backward()
    return {name.rpartition(".")[0] for name, p in trained.named_parameters() if p.grad is not None}


_LEARNING_RATE, _EPS = 1e-3, 1e-15  # of Adam; with so small an eps a loss of another scale takes the same steps


class Phase:
    """A network that is trained for so many steps: without gates, or with L0Gates under a budget, drawn for each batch.

    The weights are trained by Adam if nothing else is given: with gates at a constant rate, and without at one that
    falls to 0 by a cosine over the last half of the steps, but for those ``beside`` gates. Frozen weights have no
    optimiser.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: BatchLoss,
        steps: int,
        training: Training,
        budget: NetworkBudget | None = None,
        beside: int = 0,
    ) -> None:
        self.network, self.budget, self._loss = network, budget, loss
        gates = set[nn.Parameter]()
        if budget is not None:
            budget.start(steps, 0, network.parameters())
            gates.update(budget.gates.parameters())
        self._weights: list[nn.Parameter] = []
        self.optimiser: Optimizer | None = None
        self.schedule: LRScheduler | None = None
        if training.weights == "trained":
            self._weights = [p for p in network.parameters() if p not in gates]
            self.optimiser = _optimiser(self._weights, training)
            make = training.make_schedule or (partial(_falling_late, beside) if budget is None else None)
            self.schedule = None if make is None else make(self.optimiser, steps)

    def step(self, group: Sequence[object]) -> Tensor:
        """Take a step on some batches; the mean loss, or NaN where a gradient of the gates is not finite."""
        if self.optimiser is None:
            evaluate_mode(self.network)
            if self.budget is not None:
                self.budget.gates.train()
        else:
            self.network.train()
            self.optimiser.zero_grad()
        total = torch.zeros(())
        for batch in group:
            loss = self._loss(self.network, batch) / len(group)
            loss.backward()
            total = total.to(loss.device) + loss.detach()
        locations = [] if self.budget is None else self.budget.gates.locations()
        average_gradients([*self._weights, *locations])  # together, as not every process need have used the gates
        for location in locations:
            if location.grad is not None:  # the budget takes NaN as 0
                total = total + 0 * location.grad.sum()
        if self.optimiser is not None:
            self.optimiser.step()
        if self.schedule is not None:
            self.schedule.step()
        if self.budget is not None:
            self.budget.step()
        return total

    def state_dict(self) -> dict[str, Any]:
        """Tensors of network, optimiser and schedule, with which a resumed run continues the phase."""
        own: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimiser": None if self.optimiser is None else self.optimiser.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
        }
        return own if self.budget is None else self.budget.state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the network has to have the same shapes."""
        self.network.load_state_dict(state["network"])
        if self.optimiser is not None:
            self.optimiser.load_state_dict(state["optimiser"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.budget is not None:
            self.budget.load_state_dict(state)


def evaluate_mode(network: nn.Module) -> None:
    """Evaluation mode; recurrent layers without dropout, which compute the same in both, stay in training mode.

    In evaluation mode cuDNN has no backward pass of them.
    """
    network.eval()
    for module in network.modules():
        if isinstance(module, nn.RNNBase) and not module.dropout:
            module.train()


def _optimiser(trained: Iterable[nn.Parameter], training: Training) -> Optimizer:
    parameters = [p for p in trained if p.requires_grad]
    if training.make_optimiser is None:
        is_fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
        return torch.optim.Adam(parameters, _LEARNING_RATE, eps=_EPS, fused=is_fused)
    made = training.make_optimiser(parameters)
    own = {id(p) for p in parameters}
    if any(id(p) not in own for group in made.param_groups for p in group["params"]):
        raise ValueError(
            "Expected an optimiser of the parameters that it is given, which are those of a copy of the network, but "
            "got one of others; write make_optimiser=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    return made


def _falling_late(beside: int, optimiser: Optimizer, steps: int) -> LRScheduler:
    """A constant rate, and a cosine to 0 over the last half: the smaller the network, the more it has to learn anew.

    It is the half of the steps after the first ones, beside gates.
    """

    def rate(step: int) -> float:
        fallen = max(0.0, 2 * (step - beside) / (steps - beside) - 1)
        return (1 + math.cos(math.pi * fallen)) / 2

    return LambdaLR(optimiser, rate)
