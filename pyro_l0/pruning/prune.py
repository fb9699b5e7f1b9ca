"""A network in, a smaller one out, in one call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.callbacks.budget import named_costs
from pyro_l0.compaction.certificate import refuse_another
from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.control.budget import Budget, Budgets, Cost
from pyro_l0.nn import NetworkCost, fix_gates
from pyro_l0.nn.calls import record_example, refuse_computed, refuse_idle, refuse_wrapped
from pyro_l0.nn.engine import Example, calls_of
from pyro_l0.nn.engine.record import copied, example_of
from pyro_l0.nn.gate import GateLayer, gate_names
from pyro_l0.pruning.insertion_points import gates_at_least, gates_in_step, put_gates
from pyro_l0.pruning.latency import measure_latency
from pyro_l0.pruning.phases import BatchLoss, Distillation, LossFunction, Training, held_norms, trained_modules
from pyro_l0.pruning.result import Note, Pruned, PruningReport, choice_of, largest_unit, notes_on, notes_on_latency
from pyro_l0.pruning.run import Cut, Run
from pyro_l0.training.epochs import Checkpoint, saved_entry, some_batches
from pyro_l0.training.epochs import epochs as train_epochs
from pyro_l0.training.processes import in_first, rank, share

_TIMED_FRACTION = 0.75  # of a budget of time, which the least network may take as measured
Counted = Literal["macs", "weights", "parameters", "latency"]


def prune(
    network: nn.Module,
    loss_fn: LossFunction | None,
    loader: Iterable[object],
    example: Example,
    budget: Budgets = 0.3,
    *,
    cost: Counted | Cost | Mapping[str, Cost] = "macs",
    epochs: int,
    pretrained: bool = True,
    gates: Mapping[str, GateLayer] | None = None,
    at_least: Mapping[str, float] | None = None,
    multiple_of: int | None = None,
    training: Training | None = None,
) -> Pruned:
    """Prune a network down to a budget, and train what is left.

    Gates go where a closed one makes the network smaller: behind units that only their own layers read, and on the
    heads of attention. They train with the weights by the L0 objective under a :class:`~pyro_l0.infer.SparsityTarget`,
    for the first part of the epochs. Then closed units are removed, statistics of BatchNorm are recomputed (but not
    those that the network's ``train`` holds in evaluation mode), and the smaller network is fine-tuned. Give at least
    some hundreds of steps; more epochs are better. Usually nothing else needs tuning.

    A network that was trained before is also cut at once, by the best of three scores of its units (L1, Taylor,
    Fisher), and what is left trains beside the gates, for as many steps in all. Of both small networks the one with the
    lower loss on held-out batches stays, and the report says which.

    With ``Training(weights="frozen")`` the gates train alone for all epochs, and weights and statistics stay: the
    result is what a frozen network can do without.

    Under ``torchrun``, call it in every process of an initialised group, each with its own share of the data: gradients
    are averaged, and all processes return the same network.

    Args:
        network: any module that runs in eager torch; it is not changed. If it has gates, as after
            :func:`~pyro_l0.nn.insert_gates`, these are trained, from where they are.
        loss_fn: is called with the network's outputs and the targets, and returns the loss, of shape ``()``. None if
            the training distils with weight 1, which needs no targets.
        loader: gives batches, such as a ``DataLoader`` or a list of them. A tuple or list is inputs and, last, targets;
            any other batch is all input, and also its own targets. Inputs are a tensor, several, or a dict of keywords.
            Draw its random numbers from torch's, numpy's, Python's or the ``DataLoader``'s own generators; a checkpoint
            keeps all of these.
        example: what the network is called with, as :func:`~pyro_l0.compaction.compact` takes it; a small batch.
        budget: largest fraction of the cost that may be left, in (0, 1). Several falling ones give a network each,
            from one run with gates; a dict gives a budget for each of several costs by name, and all hold.
        cost: what is counted: multiply-adds, weights or parameters; or a differentiable cost of your own, of gates by
            site, or several by name. ``"latency"`` is the time of a call with the example on the device, as
            :class:`~pyro_l0.pruning.Latency` measures it before the training; the report has the pruned
            network's.
        epochs: passes over the loader; the last one with gates may be cut short. With several budgets the last part,
            without gates, runs once for each.
        pretrained: whether the network was trained before. If not, it learns for a while before gates move.
        gates: by module path, the gates to put behind modules, instead of the locations above; see
            :func:`~pyro_l0.nn.suggest_gates`. One gate at several paths is shared, as on a residual stream.
        at_least: by module path, how many units stay at each gate behind or inside the module: a whole number, or a
            fraction up to 1.0, which keeps all. The path ``""`` is the whole network.
        multiple_of: the number of units that stay is a multiple of this, such as 8 or 64 for hardware, unless all stay;
            heads of attention count by their features.
        training: optimiser, schedule, distillation, checkpoint and all else that concerns the training, as a
            :class:`~pyro_l0.pruning.Training`; its defaults suit most networks.

    Returns:
        The smaller network, with a report, a certificate and the history of the run.

    Raises:
        ValueError: the network can't be copied, a gate changes no output, there is no insertion point for one, the
            budget is below the cost of one unit per site, an argument is out of range, or the checkpoint is damaged,
            was changed, is of another run or held by another process.
        TypeError: an argument or the loss has the wrong type.
        FileExistsError: the checkpoint exists, and the training does not resume.
        FileNotFoundError: the checkpoint's folder does not exist.
        FloatingPointError: the training diverged; the checkpoint of the epoch before stays.

    Warns:
        UserWarning: a note of the report on what to change; notes on a large unit or on sites at their minimum only
            stand there.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from pyro_l0 import prune
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(512, 8)
        >>> data = DataLoader(TensorDataset(x, x[:, 0] * x[:, 1]), 32, shuffle=True)
        >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
        >>> result = prune(net, nn.MSELoss(), data, x[:2], 0.25, epochs=30, pretrained=False)
        >>> result.network[0].out_features
        16

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 22; the target finds the price of a weight.
    """
    # Check the arguments, and copy the network to where it trains.
    training = Training() if training is None else training
    _check(network, loss_fn, pretrained, epochs, at_least, multiple_of, training)
    batches = training.with_length(loader)
    gated_steps, further_steps = training.count_steps(batches, epochs)
    home = next((p.device for p in network.parameters()), "cpu")
    device = torch.device(home if training.device is None else training.device)
    example = tree_map_only(Tensor, lambda x: x.to(device), example_of(example, network))
    given = copied(network).to(device)
    share(given)
    if training.weights == "frozen":
        for p in _weights(given):
            p.requires_grad_(False)
    loss, batch = BatchLoss(loss_fn, device, training.autocast), next(some_batches(batches))

    # Insert the gates: as many as the costs need to get well below the budget.
    own = cost if isinstance(cost, Mapping) else {}
    is_timed = "latency" in (budget if isinstance(budget, Mapping) else [cost]) and "latency" not in own
    path = training.checkpoint if is_timed and training.resume else None
    measured = None if path is None else saved_entry(path, "latency")
    latency_of = cache(lambda gated: measure_latency(gated, example, measured) if is_timed else None)
    counts_of = lru_cache(1)(lambda gated: NetworkCost(gated, example))  # of the last alone, as they hold activations

    def suffices(gated: nn.Module, fraction: float) -> bool:
        counts = counts_of(gated)
        if measured is not None:
            return bool(sum(counts.sizes.values()) == measured["gates"])  # as the run chose
        if callable(cost) or not counts.sizes:
            return True
        like = {site: torch.ones(size) for site, size in counts.sizes.items()}

        def fits(latency: Cost | None, part: float) -> bool:
            return Budget(budget, named_costs(budget, cost, counts, latency), like).is_within(part)

        # What is too large by its multiply-adds is not timed.
        return fits(counts.macs if is_timed else None, fraction) and (
            not is_timed or fits(latency_of(gated), max(fraction, _TIMED_FRACTION))
        )

    dense = fix_gates(given, {site: torch.ones(gate.size) for site, gate in gate_names(given).items()}).to(device)
    if training.distil is not None:
        loss.teach(Distillation(dense.eval(), *training.distil), batch)
    trained = trained_modules(dense, loss, batch)  # before what takes longer
    recording = record_example(given, example)
    gated = put_gates(given, recording, gates, suffices)
    at_home = tree_map_only(Tensor, lambda x: x.to(home), calls_of(example))
    gated.network.to(home)
    in_first(lambda: refuse_another(network, gated.network, at_home, None))  # whose network all processes train
    refuse_idle(gated.network.to(device), example)
    called = {name.rpartition(".")[0] for name in recording.named}
    del recording  # and the activations in it
    gated.skipped.update(dict.fromkeys(trained - called, "only the training uses it, and it is not counted"))

    # Make the costs of the gates, and their limits.
    counts, latency = counts_of(gated.network), latency_of(gated.network)
    in_step = {} if multiple_of is None else gates_in_step(gated.network, example, multiple_of)
    run = Run(
        gated=gated,
        example=example,
        budget=budget,
        costs=named_costs(budget, cost, counts, latency),
        latency=latency,
        counts=counts,
        least=gates_at_least(gated.network, at_least or {}),
        in_step=in_step,
        pretrained=pretrained,
        loader=batches,
        loss=loss,
        gated_steps=gated_steps,
        further_steps=further_steps,
        training=training,
    )

    # Run the training with gates and, at each budget, without.
    with Checkpoint.held(training.checkpoint, training.resume):
        run.start(dense, batch)
        file = None
        if training.checkpoint is not None:
            limits = {"at_least": at_least and dict(at_least), "multiple_of": multiple_of}
            file = Checkpoint(training.checkpoint, run.settings(given, cost) | limits, batches)
            file.load(run.load_state_dict, device)
        for entry in train_epochs(run, file):
            if training.progress and rank() == 0:
                _print(entry, "with gates" if run.tuned < 0 else "compacted")
            for callback in training.callbacks:
                callback(entry)
        run.finish()

        # Report on the network at each budget.
        results = [_result(run, cut) for cut in run.cuts]
    for text in dict.fromkeys(note.text for _, notes in results for note in notes if note.is_warning):
        warnings.warn(text, stacklevel=2)
    *intermediate, last = (pruned for pruned, _ in results)
    return replace(last, on_the_way=tuple(intermediate))


def _check(
    network: nn.Module,
    loss_fn: LossFunction | None,
    pretrained: bool,
    epochs: int,
    at_least: object,
    multiple_of: int | None,
    training: Training,
) -> None:
    """Refuse what would go wrong later, or silently."""
    expect(nn.Module, "a torch.nn.Module", network=network)
    expect(bool, "True or False", pretrained=pretrained)
    expect(Training, "a Training", training=training)
    expect(Mapping | None, "a dict of numbers of units, or of fractions, by module path", at_least=at_least)
    expect_count(1, epochs=epochs, multiple_of=1 if multiple_of is None else multiple_of)
    if training.distil is not None and not pretrained:
        raise ValueError("Expected a network that was trained before to distil from, but pretrained is False.")
    if loss_fn is None and (training.distil is None or training.distil[0] < 1):
        raise ValueError(
            f"Expected a loss function, but got None with distil={training.distil}; give one, or "
            "Training(distil=(1.0, temperature)), which compares with the given network alone."
        )
    if training.weights == "frozen" and not pretrained:
        raise ValueError("Expected a network that was trained before its weights are frozen, but pretrained is False.")
    refuse_wrapped(network)
    refuse_computed(network)
    if training.weights == "trained" and not any(p.requires_grad for p in _weights(network)):
        raise ValueError(
            "Expected weights to train, but none of the network requires a gradient; give "
            'training=Training(weights="frozen") to train gates alone, or call network.requires_grad_().'
        )


def _weights(network: nn.Module) -> list[nn.Parameter]:
    """The parameters of a network but those of gates."""
    gates = {p for gate in gate_names(network).values() for p in gate.parameters()}
    return [p for p in network.parameters() if p not in gates]


def _print(entry: Mapping[str, Any], phase: str) -> None:
    found = ", ".join(f"{name} {entry[name]:.4g}" for name in ("loss", "fraction", "error") if name in entry)
    print(f"epoch {entry['epoch']:.0f}, step {entry['step']:.0f}, {phase}: {found}", file=sys.stderr, flush=True)


@torch.no_grad()
def _result(run: Run, cut: Cut) -> tuple[Pruned, list[Note]]:
    """The pruned network at a budget with its counts, and notes on what may have gone better."""
    assert cut.compacted is not None
    network, removed = cut.compacted.network.eval(), cut.compacted.removed
    counts = NetworkCost(network, run.example), run.counts
    left = {name: tuple(getattr(x, f"total_{name}") for x in counts) for name in ("macs", "weights", "parameters")}
    if run.latency is not None:
        left["latency"] = run.latency.compare(network)
    largest = largest_unit(cut.report.budget, run.costs, cut.gates, run.in_step)
    steps, errors = run.gated_steps + run.further_steps, (run.dense_error, cut.error if cut.by == "gates" else None)
    notes = notes_on(cut.report, largest, steps, run.looks_untrained, errors, run.gated.in_the_way)
    notes += [Note(finding, True) for finding in run.findings]
    if run.latency is not None:
        notes += notes_on_latency(left["latency"], cut.report.budget)
    if held := len(held_norms(network)):
        text = f"{held} BatchNorm layers keep their statistics, as the network's train() holds them in evaluation mode."
        notes.append(Note(text, False))
    if cut.refusal is not None:
        notes.append(Note(f"The network is whole, with fixed gates, as it could not be cut: {cut.refusal}", True))
    report = PruningReport(
        target=cut.report,
        left=left,
        dense=run.dense_error,
        cut=cut.error,
        end=run.error(network),
        largest_unit=largest,
        skipped=run.gated.skipped,
        units={site: (len(gate) - len(removed.get(site, ())), len(gate)) for site, gate in cut.gates.items()},
        notes=tuple(note.text for note in notes),
        choice=choice_of(cut.by, cut.losses, run.trial_steps[1]),
    )
    return Pruned(network, report, cut.compacted.certificate, tuple(run.history), cut.compacted.plan), notes
