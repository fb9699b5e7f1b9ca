"""A network in, a smaller one out, in one call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyro
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.expect import expect
from pyro_l0.infer.target.budget import BudgetTooSmallError, Cost
from pyro_l0.nn import Gate, NetworkCost, fix_gates
from pyro_l0.nn.engine import Example
from pyro_l0.nn.gate import gate_names
from pyro_l0.pruning.batches import BatchLoss, LossFunction, share
from pyro_l0.pruning.checkpoint import Checkpoint, checksum, numbers, told
from pyro_l0.pruning.notes import Note, largest_unit, looks_untrained, notes_on
from pyro_l0.pruning.options import check_callables, check_network, check_target, count_steps, with_length
from pyro_l0.pruning.phases import MakeOptimiser, MakeSchedule
from pyro_l0.pruning.places import GatedNetwork, put_gates
from pyro_l0.pruning.result import Pruned, PruningReport
from pyro_l0.pruning.run import Callback, Cut, Evaluate, Run, Settings
from pyro_l0.pruning.stream import Stream, some_batches

__all__ = ["prune"]

_ROOM = 0.5  # of a budget, which the least network may take
Counted = Literal["macs", "weights", "parameters"]


def prune(
    network: nn.Module,
    loss_fn: LossFunction,
    loader: Iterable[object],
    example: Example,
    target: float | Sequence[float] | Mapping[str, float] = 0.3,
    *,
    of: Counted | Cost | Mapping[str, Cost] = "macs",
    epochs: int,
    steps_per_epoch: int | None = None,
    pretrained: bool = True,
    finetune: float | None = None,
    gates: Mapping[str, Gate] | None = None,
    evaluate: Evaluate | None = None,
    optimiser: MakeOptimiser | None = None,
    schedule: MakeSchedule | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Pruned:
    """Prune a network down to a budget, and train what is left.

    Gates go to where a closed one makes the network smaller: behind units whose layers alone read them, and on the
    heads of attention. They train with the weights by the L0 objective under a :class:`~pyro_l0.infer.SparsityTarget`,
    for the first part of the epochs; then closed units are taken out, statistics of BatchNorm are renewed, and the
    smaller network trains on. Nothing needs to be tuned: more epochs are better, some hundreds of steps the least.

    Args:
        network: any module that runs in eager torch; it is not changed. With :class:`~pyro_l0.nn.Gate` layers of your
            own, these are used.
        loss_fn: is called with the network's outputs and the targets, and returns the loss, of shape ``()``.
        loader: gives batches, such as a ``DataLoader`` or a list of them. A tuple or list is inputs and, last, targets;
            of any other batch all is input, and the targets are the batch itself. Inputs are a tensor, several, or a
            dict of keywords. What is random in it should come from torch, numpy or Python's generators, or from the
            ``DataLoader``'s own, all of which a checkpoint keeps.
        example: what the network is called with, as :func:`~pyro_l0.compaction.compact` takes it; a small batch.
        target: largest fraction of the cost that may be left, in (0, 1). Several falling ones give a network each,
            from one run with gates; a dict gives one by name of several costs, all of which hold.
        of: what is counted: multiply-adds, weights or parameters; or a differentiable cost of your own, of gates by
            site, or several by name.
        epochs: passes over the loader; the last one with gates may be cut short. Several targets take the last part,
            without gates, once for each.
        steps_per_epoch: of a loader without a length, such as a stream; each epoch goes on where the last one ended,
            and the loader begins anew at its end. A resumed run passes by the batches that were taken of the pass.
        pretrained: whether the network was trained before. One from scratch learns for a while before gates move.
        finetune: the part of the epochs that comes after the cut, from 0 to 0.9; 35 % of them if not given, and less,
            down to a quarter, where fewer than 300 steps would have gates.
        gates: by module path, the gates to put behind modules, if it is not the places above; see
            :func:`~pyro_l0.nn.suggest_gates`. One gate at several paths acts alike there, as on a residual stream.
        evaluate: takes a network in evaluation mode and returns its error, of which smaller is better; for the report.
        optimiser: makes the optimiser of some parameters; Adam with a rate of 1e-3 if not given. Gates have their own.
        schedule: makes a scheduler of an optimiser and a number of steps, for the phase with gates and for the one
            after; if not given, rates are constant, and fall to 0 by a cosine over the last half of the latter.
        accumulate: batches for each step.
        autocast: the type of numbers for :class:`torch.autocast`, such as ``torch.bfloat16``.
        callbacks: are called after every epoch with its entry of the history.
        checkpoint: a file that is written after every epoch, with a SHA-256 of all that is in it; a file of an earlier
            version, which has none, is read as it is. The one before it stays as ``.previous``; while the run lasts
            ``.lock`` says which process holds the file.
        resume: go on from that file, bit for bit, if it is there.
        device: where to train; where the network is, if not given. ``loader`` may give batches on another.
        progress: whether to print every epoch to the standard error.

    Under ``torchrun``, call it in every process of an initialised group, each with its own share of the data: gradients
    are averaged, and all processes return the same network.

    Returns:
        The smaller network and how it came about.

    Raises:
        ValueError: there is no place for a gate, the target is below the cost of one unit per site, an option is
            out of range, or the checkpoint is damaged, was changed, is of another run or held by another process.
        TypeError: an option or a loss is of another kind.
        FileExistsError: the checkpoint is there, and ``resume`` is False.
        FloatingPointError: the training diverged; a checkpoint stays as it was before.

    Warns:
        UserWarning: what may have gone better, as in the report's notes; with other notes than on a large unit or on
            sites at their floor.

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
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 22, whose price of a weight the target finds.
    """
    home = check_network(network)
    check_target(target)
    expect(bool, "True or False", pretrained=pretrained, resume=resume, progress=progress)
    check_callables(callbacks, autocast, loss_fn, evaluate=evaluate, optimiser=optimiser, schedule=schedule)
    if resume and checkpoint is None:
        raise ValueError("Expected a checkpoint to resume from, but got none; give checkpoint=, the file of that run.")
    loader = with_length(loader, steps_per_epoch, accumulate)
    settings = Settings(
        *count_steps(loader, epochs, finetune, accumulate),
        accumulate,
        optimiser,
        schedule,
        evaluate,
        callbacks,
        progress,
    )
    device = home if device is None else torch.device(device)
    example = tree_map_only(Tensor, lambda x: x.to(device), example)
    given = copy.deepcopy(network).to(device)
    share(given)
    placed = put_gates(given, example, gates, lambda gated: _suffices(NetworkCost(gated, example), target, of))
    loss = BatchLoss(loss_fn, device, autocast)
    run = Run(placed.network, example, loader, loss, settings)
    counts = NetworkCost(placed.network, example)
    costs = _costs(counts, target, of)
    with Checkpoint.held(checkpoint, resume), pyro.get_param_store().scope():
        batch = next(some_batches(loader))
        try:
            run.start(batch, target, costs if isinstance(target, Mapping) else costs["cost"], pretrained)
        except BudgetTooSmallError as error:
            raise ValueError(f"{error}{placed.reasons}") from error
        dense = fix_gates(given, {site: torch.ones(gate.size) for site, gate in gate_names(given).items()}).to(device)
        untrained = pretrained and looks_untrained(dense, loss, batch)
        start = _Start(placed, counts, costs, untrained, run.error(dense))
        file = None
        if checkpoint is not None:
            described = _described(given, target, of, pretrained, autocast, run, counts)
            file = Checkpoint(checkpoint, described, loader)
            file.load(device, run.load_state_dict)  # after all else that draws random numbers
        run.train(len(target) if isinstance(target, Sequence) else 1, file)
        results = [_result(run, cut, start) for cut in run.cuts]
    for text in dict.fromkeys(note.text for _, notes in results for note in notes if note.is_warning):
        warnings.warn(text, stacklevel=2)
    *on_the_way, last = (pruned for pruned, _ in results)
    return replace(last, on_the_way=tuple(on_the_way))


@dataclass(frozen=True)
class _Start:
    """What is known before the first step."""

    placed: GatedNetwork
    counts: NetworkCost
    costs: Mapping[str, Cost]
    untrained: bool
    error: float | None


def _suffices(
    counts: NetworkCost, target: float | Sequence[float] | Mapping[str, float], of: str | Cost | Mapping[str, Cost]
) -> bool:
    """Whether a network with one open gate per site is well within its budget."""
    if callable(of):
        return True
    budgets = (
        target if isinstance(target, Mapping) else {"cost": min(target) if isinstance(target, Sequence) else target}
    )
    costs = _costs(counts, target, of)
    least = {site: (torch.arange(size) < 1).float() for site, size in counts.sizes.items()}
    full = {site: torch.ones(size) for site, size in counts.sizes.items()}
    return all(
        float(costs[name](least)) <= _ROOM * budget * float(costs[name](full)) for name, budget in budgets.items()
    )


def _costs(
    counts: NetworkCost, target: float | Sequence[float] | Mapping[str, float], of: str | Cost | Mapping[str, Cost]
) -> dict[str, Cost]:
    """The costs by the names of the budgets."""
    own = dict(of) if isinstance(of, Mapping) else {}
    known: dict[str, Cost] = {"macs": counts.macs, "weights": counts.weights, "parameters": counts.parameters, **own}
    if isinstance(target, Mapping):
        unknown = [name for name in target if name not in known]
        if unknown or not target:
            raise ValueError(
                f"Expected targets by the names of costs, {', '.join(known)}, but got {sorted(target)}; give costs of "
                "your own in of={name: cost}."
            )
        return {name: known[name] for name in target}
    if callable(of):
        return {"cost": of}
    if not isinstance(of, str) or of not in known:
        raise ValueError(f"Expected of to be one of {', '.join(known)}, or a cost of your own, but got {of!r}.")
    return {"cost": known[of]}


def _described(
    network: nn.Module,
    target: object,
    of: object,
    pretrained: bool,
    autocast: torch.dtype | None,
    run: Run,
    counts: NetworkCost,
) -> dict[str, Any]:
    """What a run and the one that goes on from its checkpoint must agree in."""
    assert run.phase is not None
    settings, groups = run.settings, run.phase.optimiser.param_groups
    of_epoch = [len(run.loader)] if isinstance(run.loader, Stream) else []
    return {
        "network": checksum(network.state_dict()),
        "target": repr(target),
        "of": of if isinstance(of, str) else "a cost of the user's",
        "steps": [settings.gated_steps, settings.further_steps, settings.accumulate, *of_epoch],
        "pretrained": pretrained,
        "autocast": str(autocast),
        "optimiser": type(run.phase.optimiser).__name__,
        "schedule": type(run.phase.schedule).__name__,
        "gates": counts.sizes,
        "loss": told(run.loss.function),
        "optimiser's numbers": numbers([{key: x for key, x in group.items() if key != "params"} for group in groups]),
    }


@torch.no_grad()
def _result(run: Run, cut: Cut, start: _Start) -> tuple[Pruned, list[Note]]:
    """What is returned of the network at a budget, and the notes on it."""
    assert run.phase is not None
    assert cut.compacted is not None
    network = cut.compacted.network.eval()
    is_open = {site: (gate != 0).float() for site, gate in cut.gates.items()}
    everything = {site: torch.ones_like(gate) for site, gate in is_open.items()}
    if cut.refusal is not None:
        is_open = everything
    left = {
        name: (float(count(is_open)), float(count(everything)))
        for name, count in (
            ("macs", start.counts.macs),
            ("weights", start.counts.weights),
            ("parameters", start.counts.parameters),
        )
    }
    largest = largest_unit(cut.report.budget, start.costs, cut.gates)
    steps = run.settings.gated_steps + run.settings.further_steps
    notes = notes_on(cut.report, largest, steps, start.untrained, (start.error, cut.error), start.placed.in_the_way)
    notes += [Note(finding, True) for finding in run.findings]
    if cut.refusal is not None:
        notes.append(Note(f"The network is whole, with fixed gates, as it could not be cut: {cut.refusal}", True))
    report = PruningReport(
        target=cut.report,
        left=left,
        dense=start.error,
        cut=cut.error,
        end=run.error(network),
        largest_unit=largest,
        skipped=start.placed.skipped,
        notes=tuple(note.text for note in notes),
    )
    pruned = Pruned(network, report, cut.compacted.certificate, tuple(run.history), cut.compacted.plan)
    return pruned, notes
