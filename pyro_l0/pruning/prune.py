"""A network in, a smaller one out, in one call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyro
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.infer.budget import Cost
from pyro_l0.nn import Gate, NetworkCost
from pyro_l0.nn.engine import Example
from pyro_l0.pruning.batches import BatchLoss, Loader, LossFunction
from pyro_l0.pruning.checkpoint import Checkpoint, checksum
from pyro_l0.pruning.notes import largest_unit, looks_untrained, notes_on
from pyro_l0.pruning.phases import MakeOptimiser, MakeSchedule
from pyro_l0.pruning.places import GatedNetwork, put_gates
from pyro_l0.pruning.result import Pruned, PruningReport
from pyro_l0.pruning.run import Callback, Cut, Evaluate, Run, Settings

__all__ = ["prune"]

_ROOM = 0.5  # of a budget, which the least network may take
Counted = Literal["macs", "weights", "parameters"]


def prune(
    network: nn.Module,
    loss_fn: LossFunction,
    loader: Loader,
    example: Example,
    target: float | Sequence[float] | Mapping[str, float] = 0.3,
    *,
    of: Counted | Cost | Mapping[str, Cost] = "macs",
    epochs: int,
    pretrained: bool = True,
    finetune: float = 0.25,
    gates: Mapping[str, Gate] | None = None,
    evaluate: Evaluate | None = None,
    optimiser: MakeOptimiser | None = None,
    schedule: MakeSchedule | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | None = None,
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
        loader: gives batches, and has a length, such as a ``DataLoader``. A tuple or list is inputs and, last, targets;
            of any other batch all is input, and the targets are the batch itself. Inputs are a tensor, several, or a
            dict of keywords.
        example: what the network is called with, as :func:`~pyro_l0.compaction.compact` takes it; a small batch.
        target: largest fraction of the cost that may be left, in (0, 1). Several falling ones give a network each,
            from one run with gates; a dict gives one by name of several costs, all of which hold.
        of: what is counted: multiply-adds, weights or parameters; or a differentiable cost of your own, of gates by
            site, or several by name.
        epochs: passes over the loader. Several targets take the last part, without gates, once for each.
        pretrained: whether the network was trained before. One from scratch learns for a while before gates move.
        finetune: the part of the epochs that comes after the cut, from 0 to 0.9.
        gates: by module path, the gates to put behind modules, if it is not the places above; see
            :func:`~pyro_l0.nn.suggest_gates`.
        evaluate: takes a network in evaluation mode and returns its error, of which smaller is better; for the report.
        optimiser: makes the optimiser of some parameters; Adam with a rate of 1e-3 if not given. Gates have their own.
        schedule: makes a scheduler of an optimiser and a number of steps, for the phase with gates and for the one
            after; a constant rate and a cosine to 0 if not given.
        accumulate: batches for each step.
        autocast: the type of numbers for :class:`torch.autocast`, such as ``torch.bfloat16``.
        callbacks: are called after every epoch with its entry of the history.
        checkpoint: a file that is written after every epoch.
        resume: go on from that file, bit for bit, if it is there.
        device: where to train; where the network is, if not given. ``loader`` may give batches on another.
        progress: whether to print every epoch to the standard error.

    Under ``torchrun``, call it in every process of an initialised group, each with its own share of the data: gradients
    are averaged, and all processes return the same network.

    Returns:
        The smaller network and how it came about.

    Raises:
        ValueError: there is no place for a gate, the target is below the cost of one unit per site, an option is
            out of range, or the checkpoint is of another run.
        FileExistsError: the checkpoint is there, and ``resume`` is False.
        FloatingPointError: the training diverged.

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
    steps = _check(loader, epochs, finetune, accumulate)
    device = next(network.parameters()).device if device is None else torch.device(device)
    example = tree_map_only(Tensor, lambda x: x.to(device), example)
    given = copy.deepcopy(network).to(device)
    placed = put_gates(given, example, gates, lambda gated: _suffices(NetworkCost(gated, example), target, of))
    loss = BatchLoss(loss_fn, device, autocast)
    further = round(finetune * steps)
    settings = Settings(steps - further, further, accumulate, optimiser, schedule, evaluate, callbacks, progress)
    run = Run(placed.network, example, loader, loss, settings)
    counts = NetworkCost(placed.network, example)
    costs = _costs(counts, target, of)
    with pyro.get_param_store().scope():
        batch = next(iter(loader))
        cost = costs if isinstance(target, Mapping) else costs["cost"]
        run.start(batch, target, cost, pretrained)
        file = None
        if checkpoint is not None:
            file = Checkpoint(checkpoint, _described(given, target, of, steps, settings, counts), loader, resume)
            run.resume(file)
        untrained = pretrained and looks_untrained(given, loss, batch)
        start = _Start(placed, counts, costs, steps, untrained, run.error(given))
        run.train(len(target) if isinstance(target, Sequence) else 1, file)
        results = [_result(run, cut, start) for cut in run.cuts]
    for note in results[-1].report.notes:
        if "largest unit" not in note and "floor" not in note:
            warnings.warn(note, stacklevel=2)
    return replace(results[-1], on_the_way=tuple(results[:-1]))


@dataclass(frozen=True)
class _Start:
    """What is known before the first step."""

    placed: GatedNetwork
    counts: NetworkCost
    costs: Mapping[str, Cost]
    steps: int
    untrained: bool
    error: float | None


def _check(loader: Loader, epochs: int, finetune: float, accumulate: int) -> int:
    """The number of steps, after the options were checked."""
    if not isinstance(loader, Loader) or not len(loader):
        raise ValueError(f"Expected a loader with a length, of at least one batch, but got {loader!r}.")
    for name, value in (("epochs", epochs), ("accumulate", accumulate)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Expected {name} of at least 1, but got {value!r}.")
    if not 0 <= finetune <= 0.9:
        raise ValueError(f"Expected finetune from 0 to 0.9, the part of the epochs after the cut, but got {finetune}.")
    return epochs * -(-len(loader) // accumulate)


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
    network: nn.Module, target: object, of: object, steps: int, settings: Settings, counts: NetworkCost
) -> dict[str, Any]:
    """What a run and the one that goes on from its checkpoint must agree in."""
    return {
        "network": checksum(network),
        "target": repr(target),
        "of": of if isinstance(of, str) else "a cost of the user's",
        "steps": [steps, settings.gated_steps, settings.further_steps, settings.accumulate],
        "gates": counts.sizes,
    }


@torch.no_grad()
def _result(run: Run, cut: Cut, start: _Start) -> Pruned:
    """What is returned of the network at a budget."""
    assert run.phase is not None
    assert cut.compacted is not None
    network = cut.compacted.network.eval()
    is_open = {site: (gate != 0).float() for site, gate in cut.gates.items()}
    everything = {site: torch.ones_like(gate) for site, gate in is_open.items()}
    left = {
        name: (float(count(is_open)), float(count(everything)))
        for name, count in (
            ("macs", start.counts.macs),
            ("weights", start.counts.weights),
            ("parameters", start.counts.parameters),
        )
    }
    largest = largest_unit(run.phase.target, start.costs, cut.gates)
    notes = notes_on(cut.report, largest, start.steps, start.untrained, (start.error, cut.error))
    report = PruningReport(
        target=cut.report,
        left=left,
        dense=start.error,
        cut=cut.error,
        end=run.error(network),
        largest_unit=largest,
        skipped=start.placed.skipped,
        notes=tuple(notes),
    )
    return Pruned(network, report, cut.compacted.certificate, tuple(run.history), cut.compacted.plan)
