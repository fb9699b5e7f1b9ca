"""A network in, a smaller one out, in one call."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import pyro
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.expect import expect, expect_count
from pyro_l0.infer import AutoGate, SparsityTarget
from pyro_l0.infer.target.budget import BudgetTooSmallError, Cost
from pyro_l0.nn import Gate, NetworkCost, fix_gates
from pyro_l0.nn.calls import record_example, refuse_computed
from pyro_l0.nn.engine import Example
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.gate import gate_names
from pyro_l0.pruning.latency import Latency, measure_latency
from pyro_l0.pruning.phases import (
    BatchLoss,
    Distil,
    Distillation,
    Loader,
    LossFunction,
    MakeOptimiser,
    MakeSchedule,
    trained_modules,
)
from pyro_l0.pruning.places import check_limits, gates_at_least, gates_in_step, put_gates
from pyro_l0.pruning.result import (
    Note,
    Pruned,
    PruningReport,
    largest_unit,
    looks_untrained,
    notes_on,
    notes_on_latency,
)
from pyro_l0.pruning.run import Cut, Evaluate, Run
from pyro_l0.training.epochs import Checkpoint, Stream, checksum, saved_entry, some_batches
from pyro_l0.training.epochs import epochs as train_epochs
from pyro_l0.training.processes import rank, same_everywhere, share


def told(value: object) -> str:
    """A text that tells a user's function from others: its name, and the names and numbers in its code and around it.

    A module goes by its own text, its numbers and its tensors, any other object by its class.
    """
    if isinstance(value, partial):
        return f"{told(value.func)} of {numbers([value.args, value.keywords])}"
    if isinstance(value, nn.Module):
        return f"{value} {numbers(vars(value))} {checksum(value.state_dict())}"
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if not isinstance(value, FunctionType):
        return str(name)
    around = []
    for cell in value.__closure__ or ():
        with suppress(ValueError):  # it is empty
            around.append(cell.cell_contents)
    code = value.__code__
    names = () if value.__module__.startswith("torch.") else code.co_names  # which change from version to version
    return f"{name} {names} {numbers([code.co_consts, value.__defaults__, value.__kwdefaults__, around])}"


def numbers(value: object, name: str = "") -> list[str]:
    """The numbers and tensors in nested containers, with their places; flags and all else are left out."""
    if isinstance(value, (Mapping, list, tuple)):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [x for key, entry in entries for x in numbers(entry, f"{name}.{key}")]
    if isinstance(value, Tensor):
        return [f"{name} {checksum({'': value})}"]
    return [f"{name} {value}"] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


_LEAST_STEPS = 10  # with gates
_AFTER, _LEAST_AFTER = 0.35, 0.25  # of all steps, the part after the cut: the second where few would have gates
_FEW_STEPS = 300  # with gates


def with_length(loader: Iterable[object], steps_per_epoch: int | None, accumulate: int) -> Loader:
    """A loader with a length, which a stream has by ``steps_per_epoch``."""
    if steps_per_epoch is not None:
        expect_count(1, steps_per_epoch=steps_per_epoch, accumulate=accumulate)
        return Stream(loader, steps_per_epoch * accumulate)
    with suppress(TypeError):  # of a DataLoader whose data set has none
        if isinstance(loader, Loader) and len(loader):
            return loader
    raise ValueError(
        f"Expected a loader with a length, of at least one batch, such as a DataLoader or a list of batches, but got "
        f"{loader!r}; of a stream, give steps_per_epoch too."
    )


def count_steps(loader: Loader, epochs: int, finetune: float | None, accumulate: int) -> tuple[int, int]:
    """The number of steps with gates and of those after the cut."""
    length = len(loader)
    expect_count(1, epochs=epochs, accumulate=accumulate)
    steps = epochs * -(-length // accumulate)
    if finetune is None:
        finetune = min(_AFTER, max(_LEAST_AFTER, 1 - _FEW_STEPS / steps))
    expect(Real, "a number", finetune=finetune)
    if not 0 <= finetune <= 0.9:
        raise ValueError(f"Expected finetune from 0 to 0.9, the part of the epochs after the cut, but got {finetune}.")
    further = round(finetune * steps)
    if steps - further < _LEAST_STEPS:
        raise ValueError(
            f"Expected at least {_LEAST_STEPS} steps with gates, but epochs={epochs} of {length} batches, "
            f"accumulate={accumulate} and finetune={finetune} give {steps - further}; give more epochs."
        )
    if not same_everywhere(steps):
        raise ValueError(f"Expected loaders of one length in all processes, but there are others than {length}.")
    return steps - further, further


def check_budget(budget: object) -> None:
    """Check that a budget is a fraction, several falling ones, or fractions by name."""
    several = isinstance(budget, Sequence) and not isinstance(budget, str)
    given = budget if isinstance(budget, Sequence) and several else [budget]
    given = list(budget.values()) if isinstance(budget, Mapping) else list(given)
    if any(isinstance(value, bool) or not isinstance(value, Real) for value in given):
        raise TypeError(
            f"Expected a budget of a number, a list of them or a dict by names of costs, but got {budget!r}."
        )
    values = [float(value) for value in given if isinstance(value, Real)]
    if not values or not all(0 < value < 1 for value in values):
        raise ValueError(
            f"Expected a budget between 0 and 1, the fraction of the cost that may be left, but got {budget!r}."
        )
    if several and any(b >= a for a, b in itertools.pairwise(values)):
        raise ValueError(f"Expected budgets that fall from one to the next, but got {budget!r}.")


def check_distil(distil: object, pretrained: bool) -> None:
    """Check the weight and the temperature of distillation."""
    if not pretrained:
        raise ValueError("Expected a network that was trained before to distil from, but pretrained is False.")
    if not isinstance(distil, (tuple, list)) or len(distil) != 2:
        raise TypeError(
            f"Expected distil to be (weight, temperature), or (weight, function) where outputs are no class logits, "
            f"but got {distil!r}."
        )
    weight, by = distil
    for name, value, most in (("weight", weight, 1.0), *([] if callable(by) else [("temperature", by, math.inf)])):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"Expected a number for distil's {name}, but got {value!r}.")
        if not 0 < float(value) <= most or value == math.inf:
            raise ValueError(f"Expected a {name} for distil above 0{' and up to 1' * (most == 1)}, but got {value}.")


def check_callables(callbacks: object, autocast: object, loss_fn: object, **others: object) -> None:
    """Check the functions, and the type for autocast."""
    if not callable(loss_fn):
        raise TypeError(f"Expected loss_fn(outputs, targets) that returns the loss, but got {loss_fn!r}.")
    for name, value in others.items():
        if value is not None and not callable(value):
            raise TypeError(f"Expected {name} to be a function, but got {type(value).__name__}: {value!r}.")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TypeError(f"Expected a list of callbacks, but got {callbacks!r}.")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"Expected autocast to be a type of numbers, such as torch.bfloat16, but got {autocast!r}.")


def check_network(network: object) -> torch.device:
    """Where a network is; refuses one that can't be copied or trained."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"Expected a network, a torch.nn.Module, but got {network!r}.")
    inner = "_orig_mod" if hasattr(network, "_orig_mod") else "module"  # of torch.compile and of data parallelism
    if inner == "_orig_mod" or isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(
            f"Expected the network itself, but got a {type(network).__name__} around it; give network.{inner}."
        )
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "Expected gradients to be switched on, but got a call inside of torch.no_grad() or inference_mode(); "
            "call it outside of them."
        )
    first = next(network.parameters(), None)
    if first is None:
        raise ValueError(f"Expected a network with parameters, but {type(network).__name__} has none.")
    refuse_computed(network)
    return first.device


_TIMED_ROOM = 0.75  # of a budget of time, which the least network may take as measured
Budgets = float | Sequence[float] | Mapping[str, float]
Counted = Literal["macs", "weights", "parameters", "latency"]


def prune(
    network: nn.Module,
    loss_fn: LossFunction,
    loader: Iterable[object],
    example: Example,
    budget: Budgets = 0.3,
    *,
    cost: Counted | Cost | Mapping[str, Cost] = "macs",
    epochs: int,
    steps_per_epoch: int | None = None,
    pretrained: bool = True,
    finetune: float | None = None,
    gates: Mapping[str, Gate] | None = None,
    at_least: Mapping[str, float] | None = None,
    multiple_of: int | None = None,
    distil: Distil | None = None,
    evaluate: Evaluate | None = None,
    make_optimiser: MakeOptimiser | None = None,
    schedule: MakeSchedule | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    callbacks: Sequence[Callable[[Mapping[str, float]], None]] = (),
    checkpoint: str | Path | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Pruned:
    """Prune a network down to a budget, and train what is left.

    Gates go where a closed one makes the network smaller: behind units that only their own layers read, and on the
    heads of attention. They train with the weights by the L0 objective under a :class:`~pyro_l0.infer.SparsityTarget`,
    for the first part of the epochs. Then closed units are removed, statistics of BatchNorm are recomputed, and the
    smaller network is fine-tuned. Nothing needs tuning. Give at least some hundreds of steps; more epochs are better.

    Args:
        network: any module that runs in eager torch; it is not changed. If it has :class:`~pyro_l0.nn.Gate` layers,
            these are used.
        loss_fn: is called with the network's outputs and the targets, and returns the loss, of shape ``()``.
        loader: gives batches, such as a ``DataLoader`` or a list of them. A tuple or list is inputs and, last, targets;
            any other batch is all input, and also its own targets. Inputs are a tensor, several, or a dict of keywords.
            Draw its random numbers from torch's, numpy's, Python's or the ``DataLoader``'s own generators; a checkpoint
            keeps all of these.
        example: what the network is called with, as :func:`~pyro_l0.compaction.compact` takes it; a small batch.
        budget: largest fraction of the cost that may be left, in (0, 1). Several falling ones give a network each,
            from one run with gates; a dict gives a budget for each of several costs by name, and all hold.
        cost: what is counted: multiply-adds, weights or parameters; or a differentiable cost of your own, of gates by
            site, or several by name. ``"latency"`` is the time of a call with the example on the device, as
            :class:`~pyro_l0.pruning.latency.Latency` measures it before the training; the report has the pruned
            network's.
        epochs: passes over the loader; the last one with gates may be cut short. With several budgets the last part,
            without gates, runs once for each.
        steps_per_epoch: length of an epoch for a loader without a length, such as a stream. Each epoch continues where
            the last one ended, and the loader starts again at its end. A resumed run skips the batches already taken.
        pretrained: whether the network was trained before. If not, it learns for a while before gates move.
        finetune: fraction of the epochs that comes after the cut, from 0 to 0.9; by default 0.35, and less, down to
            0.25, if fewer than 300 steps would have gates.
        gates: by module path, the gates to put behind modules, instead of the locations above; see
            :func:`~pyro_l0.nn.suggest_gates`. One gate at several paths is shared, as on a residual stream.
        at_least: by module path, how many units stay at each gate behind or inside the module: a whole number, or a
            fraction up to 1.0, which keeps all. The path ``""`` is the whole network.
        multiple_of: the number of units that stay is a multiple of this, such as 8 or 64 for hardware, unless all stay;
            heads of attention count by their features.
        distil: weight and temperature of distillation from the given network, such as ``(0.5, 2.0)``, with gates and
            after the cut; ``loss_fn`` should then be a mean. If outputs are not class logits or targets not integers,
            give a function of the network's and the given one's outputs in place of the temperature; see
            :class:`~pyro_l0.pruning.phases.Distillation`.
        evaluate: takes a network in evaluation mode and returns its error (smaller is better), for the report.
        make_optimiser: makes an optimiser for given parameters; by default Adam with a learning rate of 1e-3. Gates
            have their own.
        schedule: makes a scheduler from an optimiser and a number of steps, for the phase with gates and for the one
            after; by default learning rates are constant, and fall to 0 by a cosine over the last half of the latter.
        accumulate: number of batches for each step.
        autocast: type of numbers for :class:`torch.autocast`, such as ``torch.bfloat16``.
        callbacks: are called after every epoch with its entry of the history.
        checkpoint: a file that is written after every epoch, with a SHA-256 of its contents. The one before stays as
            ``.previous``; during the run ``.lock`` says which process holds the file.
        resume: continue from that file, bit for bit, if it exists.
        device: where to train; by default where the network is. ``loader`` may give batches on another.
        progress: whether to print every epoch to the standard error.

    Under ``torchrun``, call it in every process of an initialised group, each with its own share of the data: gradients
    are averaged, and all processes return the same network.

    Returns:
        The smaller network, with a report, a certificate and the history of the run.

    Raises:
        ValueError: no gate can be placed, the budget is below the cost of one unit per site, an option is
            out of range, or the checkpoint is damaged, was changed, is of another run or held by another process.
        TypeError: an option or the loss has the wrong type.
        RuntimeError: gradients are switched off.
        FileExistsError: the checkpoint exists, and ``resume`` is False.
        FileNotFoundError: the checkpoint's folder does not exist.
        FloatingPointError: the training diverged; the checkpoint of the epoch before stays.

    Warns:
        UserWarning: what may have gone better, as in the report's notes, except on a large unit or on sites at their
            minimum.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from pyro_l0 import prune
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(512, 8)
        >>> data = DataLoader(TensorDataset(x, x[:, 0] * x[:, 1]), 32, shuffle=True)
        >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
        >>> result = prune(net, nn.functional.mse_loss, data, x[:2], 0.25, epochs=30, pretrained=False)
        >>> result.network[0].out_features
        16

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 22; the target finds the price of a weight.
    """
    home = check_network(network)
    expect(bool, "True or False", pretrained=pretrained, resume=resume, progress=progress)
    check_budget(budget)
    check_callables(callbacks, autocast, loss_fn, evaluate=evaluate, make_optimiser=make_optimiser, schedule=schedule)
    check_limits(at_least, multiple_of)
    if distil is not None:
        check_distil(distil, pretrained)
    if resume and checkpoint is None:
        raise ValueError("Expected a checkpoint to resume from, but got none; give checkpoint=, the file of that run.")
    loader = with_length(loader, steps_per_epoch, accumulate)
    gated_steps, further_steps = count_steps(loader, epochs, finetune, accumulate)
    device = home if device is None else torch.device(device)
    example = tree_map_only(Tensor, lambda x: x.to(device), example)
    given = copied(network).to(device)
    share(given)
    is_timed = _is_timed(budget, cost)
    measured = saved_entry(checkpoint, "latency") if is_timed and resume and checkpoint is not None else None
    latencies: dict[nn.Module, Latency] = {}

    def suffices(gated: nn.Module, room: float) -> bool:
        counts = NetworkCost(gated, example)
        if measured is not None:
            return bool(sum(counts.sizes.values()) == measured["gates"])  # as the run chose
        if callable(cost) or not _suffices(counts, _costs(counts, budget, cost, counts.macs), budget, room):
            return callable(cost)
        if is_timed:
            latencies[gated] = measure_latency(gated, example, None)
        return _suffices(counts, _costs(counts, budget, cost, latencies.get(gated)), budget, max(room, _TIMED_ROOM))

    loss, batch = BatchLoss(loss_fn, device, autocast), next(some_batches(loader))
    dense = fix_gates(given, {site: torch.ones(gate.size) for site, gate in gate_names(given).items()}).to(device)
    is_frozen = not any(p.requires_grad for p in dense.parameters())  # which is refused below
    trained = set[str]() if is_frozen else trained_modules(dense, loss, batch)  # before what takes longer
    placed = put_gates(given, example, gates, suffices)
    called = {name.rpartition(".")[0] for name in record_example(given, example).named}
    placed.skipped.update(dict.fromkeys(trained - called, "only the training uses it, and it is not counted"))
    counts = NetworkCost(placed.network, example)
    latency = latencies.get(placed.network)
    if is_timed and latency is None:
        latency = measure_latency(placed.network, example, measured)
    run = Run(
        placed,
        example,
        counts,
        _costs(counts, budget, cost, latency),
        loader,
        loss,
        gated_steps,
        further_steps,
        len(budget) if isinstance(budget, Sequence) else 1,
        accumulate,
        make_optimiser,
        schedule,
        evaluate,
        gates_in_step(placed.network, example, multiple_of) if multiple_of is not None else {},
        latency,
    )
    least = gates_at_least(placed.network, at_least or {})
    costs = run.costs if isinstance(budget, Mapping) else run.costs["cost"]

    def make_target(guide: AutoGate) -> SparsityTarget:
        return SparsityTarget(
            guide,
            budget,
            costs,
            steps=gated_steps,
            pretrained=pretrained,
            at_least=least,
            multiple_of=run.in_step,
            on_budget=run.on_budget,
        )

    with Checkpoint.held(checkpoint, resume), pyro.get_param_store().scope():
        if distil is not None:
            loss.teach(Distillation(dense.eval(), *distil), batch)
        try:
            run.start(batch, make_target)
        except BudgetTooSmallError as error:
            raise ValueError(f"{error}{placed.reasons}") from error
        run.looks_untrained = pretrained and looks_untrained(dense, loss, batch)
        run.dense_error = run.error(dense)
        file = None
        if checkpoint is not None:
            limits = {"at_least": at_least and dict(at_least), "multiple_of": multiple_of}
            described = _described(given, budget, cost, pretrained, autocast, run) | limits
            file = Checkpoint(checkpoint, described, loader)
            file.load(run.load_state_dict, device)
        for entry in train_epochs(run, file):
            if progress and rank() == 0:
                _print(entry, "compacted" if run.tuning else "with gates")
            for callback in callbacks:
                callback(entry)
        run.finish()
        results = [_result(run, cut) for cut in run.cuts]
    for text in dict.fromkeys(note.text for _, notes in results for note in notes if note.is_warning):
        warnings.warn(text, stacklevel=3)  # where the function is called that takes the retired names
    *intermediate, last = (pruned for pruned, _ in results)
    return replace(last, on_the_way=tuple(intermediate))


def _print(entry: Mapping[str, Any], phase: str) -> None:
    found = ", ".join(f"{name} {entry[name]:.4g}" for name in ("loss", "fraction", "error") if name in entry)
    print(f"epoch {entry['epoch']:.0f}, step {entry['step']:.0f}, {phase}: {found}", file=sys.stderr, flush=True)


def _suffices(counts: NetworkCost, costs: Mapping[str, Cost], budget: Budgets, room: float) -> bool:
    """Whether a network with one open gate per site takes no more than a part of its budget."""
    smallest = min(budget) if isinstance(budget, Sequence) else budget
    budgets = smallest if isinstance(smallest, Mapping) else {"cost": smallest}
    least = {site: (torch.arange(size) < 1).float() for site, size in counts.sizes.items()}
    full = {site: torch.ones(size) for site, size in counts.sizes.items()}
    return all(float(costs[name](least)) <= room * part * float(costs[name](full)) for name, part in budgets.items())


def _is_timed(budget: Budgets, cost: object) -> bool:
    """Whether the latency is a cost, and none of the user's own."""
    if isinstance(budget, Mapping):
        return "latency" in budget and not (isinstance(cost, Mapping) and "latency" in cost)
    return isinstance(cost, str) and cost == "latency"


def _costs(
    counts: NetworkCost, budget: Budgets, cost: str | Cost | Mapping[str, Cost], latency: Cost | None
) -> dict[str, Cost]:
    """The costs by the names of the budgets."""
    known: dict[str, Cost] = {"macs": counts.macs, "weights": counts.weights, "parameters": counts.parameters}
    known |= ({} if latency is None else {"latency": latency}) | (dict(cost) if isinstance(cost, Mapping) else {})
    if isinstance(budget, Mapping):
        unknown = [name for name in budget if name not in known]
        if unknown or not budget:
            raise ValueError(
                f"Expected budgets by the names of costs, {', '.join(known)}, but got {sorted(budget)}; give costs of "
                "your own in cost={name: cost}."
            )
        return {name: known[name] for name in budget}
    if callable(cost):
        return {"cost": cost}
    if not isinstance(cost, str) or cost not in known:
        raise ValueError(f"Expected cost to be one of {', '.join(known)}, or a cost of your own, but got {cost!r}.")
    return {"cost": known[cost]}


def _described(
    network: nn.Module, budget: object, cost: object, pretrained: bool, autocast: torch.dtype | None, run: Run
) -> dict[str, Any]:
    """What a run and the one that resumes its checkpoint must agree in."""
    groups, taught = run.phase.optimiser.param_groups, run.loss.distillation
    of_epoch = [len(run.loader)] if isinstance(run.loader, Stream) else []
    return {
        "network": checksum(network.state_dict()),
        "budget": repr(budget),
        "cost": cost if isinstance(cost, str) else "a cost of the user's",
        "steps": [run.gated_steps, run.further_steps, run.accumulate, *of_epoch],
        "pretrained": pretrained,
        "autocast": str(autocast),
        "optimiser": type(run.phase.optimiser).__name__,
        "schedule": type(run.phase.schedule).__name__,
        "gates": run.counts.sizes,
        "loss": told(run.loss.function),
        "distil": taught and [taught.weight, told(taught.by) if callable(taught.by) else taught.by],
        "optimiser's numbers": numbers([{key: x for key, x in group.items() if key != "params"} for group in groups]),
    }


@torch.no_grad()
def _result(run: Run, cut: Cut) -> tuple[Pruned, list[Note]]:
    """What is returned of the network at a budget, and the notes on it."""
    assert cut.compacted is not None
    network, removed = cut.compacted.network.eval(), cut.compacted.removed
    full = {site: torch.ones_like(gate) for site, gate in cut.gates.items()}
    is_open = full if cut.refusal is not None else {site: (gate != 0).float() for site, gate in cut.gates.items()}
    counts = {"macs": run.counts.macs, "weights": run.counts.weights, "parameters": run.counts.parameters}
    left = {name: (float(count(is_open)), float(count(full))) for name, count in counts.items()}
    if run.latency is not None:
        left["latency"] = run.latency.compare(network)
    largest = largest_unit(cut.report.budget, run.costs, cut.gates, run.in_step)
    steps, errors = run.gated_steps + run.further_steps, (run.dense_error, cut.error)
    notes = notes_on(cut.report, largest, steps, run.looks_untrained, errors, run.placed.in_the_way)
    notes += [Note(finding, True) for finding in run.findings]
    if run.latency is not None:
        notes += notes_on_latency(left["latency"], cut.report.budget)
    if cut.refusal is not None:
        notes.append(Note(f"The network is whole, with fixed gates, as it could not be cut: {cut.refusal}", True))
    report = PruningReport(
        target=cut.report,
        left=left,
        dense=run.dense_error,
        cut=cut.error,
        end=run.error(network),
        largest_unit=largest,
        skipped=run.placed.skipped,
        units={site: (len(gate) - len(removed.get(site, ())), len(gate)) for site, gate in cut.gates.items()},
        notes=tuple(note.text for note in notes),
    )
    return Pruned(network, report, cut.compacted.certificate, tuple(run.history), cut.compacted.plan), notes
