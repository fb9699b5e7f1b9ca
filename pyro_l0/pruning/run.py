"""A pruning run: steps with gates, a cut at each budget, steps with what was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.compaction import compact
from pyro_l0.compaction.compact import compact_or_fix
from pyro_l0.compaction.storage import Compacted
from pyro_l0.diagnostics import diagnose
from pyro_l0.infer import SparsityTarget
from pyro_l0.infer.control.budget import Budgets, BudgetTooSmallError, Cost
from pyro_l0.infer.control.sparsity_target import TargetReport
from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.engine import Example
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import GateLayer
from pyro_l0.pruning.insertion_points import GatedNetwork
from pyro_l0.pruning.latency import Latency
from pyro_l0.pruning.phases import (
    BatchLoss,
    Loader,
    Phase,
    Training,
    groups,
    renew_statistics,
)
from pyro_l0.pruning.result import FEW_STEPS, looks_untrained
from pyro_l0.pruning.scores import unit_scores
from pyro_l0.pruning.trial import compare
from pyro_l0.training.epochs import Stream, check_finite, checksum, some_batches
from pyro_l0.training.processes import average_buffers

__all__ = ["Cut", "Run", "named"]

_AS_WANTED = "site-collapsed"  # a branch may close
_TRIAL = 0.1  # of the steps after a cut


@dataclass
class Cut:
    """The network as it was when a budget was reached, and what became of it."""

    budget: float  # of several at once, the first
    gates: dict[str, Tensor]  # deterministic, by site
    state: dict[str, Tensor] | None  # the network's tensors with gates; None as it was given
    report: TargetReport  # of the target
    compacted: Compacted | None = None  # what was cut, and is trained further
    error: float | None = None  # of what was cut, before that; None without a function that says
    refusal: str | None = None  # why the network is whole, with fixed gates; None if it was cut
    by: str = "gates"  # or the score of units that chose them
    losses: dict[str, float] = field(default_factory=dict)  # after a trial, by what the gates were chosen by


@dataclass
class Run:
    """A run of ``prune``: what it was given, its phases, and how many steps of them are taken."""

    gated: GatedNetwork
    example: Example
    budget: Budgets
    costs: Mapping[str, Cost]  # by the names of the budgets, what must stay within them
    latency: Latency | None  # where that is a cost
    counts: NetworkCost  # what the network's parts cost
    least: Mapping[str, int]  # by site, how many units stay
    in_step: Mapping[str, int]  # by site, how many units leave together, if not each alone
    pretrained: bool
    loader: Loader
    loss: BatchLoss
    gated_steps: int
    further_steps: int  # with each network that was cut
    training: Training
    cuts: list[Cut] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    epoch: int = 0
    tuned: int = -1  # which cut is being trained further
    scored: dict[int, tuple[Cut, Phase]] = field(default_factory=dict)  # cut at once, and trained beside the gates
    findings: list[str] = field(default_factory=list)  # on the gates, when they were done
    looks_untrained: bool = False  # though it was said to be trained
    dense_error: float | None = None  # of the network as it was given

    def start(self, dense: nn.Module, batch: object) -> None:
        """Make the phase with gates, and look at the network as it was given, with a batch."""
        self.control = NetworkBudget(
            self.gated.network,
            None,  # a copy is cut at each budget
            self.budget,
            self.costs,
            pretrained=self.pretrained,
            at_least=self.least,
            multiple_of=self.in_step,
            on_budget=self.on_budget,
        )
        try:
            self.phase = Phase(self.gated.network, self.loss, self.gated_steps, self.training, self.control)
        except BudgetTooSmallError as error:
            raise ValueError(f"{error}{self.gated.reasons}") from error
        self._given = _tensors(self.gated.network)
        is_known = self.pretrained and self.loss.function is not None
        self.looks_untrained = is_known and looks_untrained(dense, self.loss, batch)
        self.dense_error = self.error(dense)

    @property
    def target(self) -> SparsityTarget:
        """The target that moves the gates; there is none before the gates train."""
        assert self.control.target is not None
        return self.control.target

    @property
    def _is_frozen(self) -> bool:
        """Whether weights and buffers stay."""
        return self.training.weights == "frozen"

    def _average_buffers(self, network: nn.Module) -> None:
        """Give all processes the mean of their buffers, unless these stay, bit for bit."""
        if not self._is_frozen:
            average_buffers(network)

    @property
    def budgets(self) -> int:
        """How many networks there will be."""
        return len(self.budget) if isinstance(self.budget, Sequence) else 1

    def on_budget(self, budget: float, gates: dict[str, Tensor]) -> None:
        """Keep network, test gates and report, as they are where the gates have come to a budget."""
        self._average_buffers(self.gated.network)
        state = _tensors(self.gated.network)
        gates = {site: gate.detach().clone() for site, gate in gates.items()}
        report = self.target.report()
        if len(report.budget) == 1:  # which may be an intermediate one
            report = replace(report, budget=dict.fromkeys(report.budget, budget))
        self.cuts.append(Cut(budget, gates, state, report))

    @property
    def _ends(self) -> list[int]:
        """At which step each phase is over: that with gates, then one for each budget."""
        return [self.gated_steps + i * self.further_steps for i in range(self.budgets + 1)]

    @property
    def is_done(self) -> bool:
        """Whether the steps of all phases are taken."""
        return self.step >= self._ends[-1]

    def advance(self) -> dict[str, Any]:
        """Pass over the loader once, or up to the last step of a phase."""
        before, length = self.step, -(-len(self.loader) // self.training.accumulate)
        if self.step == 0 and self.trial_steps[0]:
            self._cut_by_scores()
        if self.step == self._ends[self.tuned + 1]:
            self._cut_next()
        # The steps of a trial are some of the epoch's, or of several.
        left = length - (self.step - before) % length
        until = min(self.step + left, next(end for end in self._ends if end > self.step))
        # A phase begins with an iterator of its own: what goes on between two may pass over the loader, too.
        total, taken = torch.zeros((), device=self.loss.device), 0
        for group in groups(self.loader, self.training.accumulate, self.epoch):
            self.step += 1
            total = total + self.phase.step(group)
            if self.tuned < 0 and self.step > self.trial_steps[0]:  # so many steps were taken before
                for _, phase in self.scored.values():
                    phase.step(group)
            taken += 1
            if self.step == until:
                break
        if not taken:
            raise ValueError("Expected a loader that gives batches again and again, but it gave none.")
        self.epoch += 1
        for phase in (self.phase, *(phase for _, phase in self.scored.values())):
            self._average_buffers(phase.network)  # of which a file keeps those of one process
        mean = float(total) / taken
        check_finite(self.epoch, mean, self.phase.network)
        entry = {"epoch": float(self.epoch), "step": float(self.step), "loss": mean}
        if self.tuned < 0:
            return {**entry, "fraction": float(self.target.fraction()[0])}
        entry["fraction"] = float(next(iter(self.cuts[self.tuned].report.fraction.values())))
        error = self.error(self.phase.network)
        return entry if error is None else {**entry, "error": error}

    def finish(self) -> None:
        """Cut what is not cut yet, where there are no further steps."""
        while self.tuned + 1 < self.budgets:
            self._cut_next()

    def _cut_next(self) -> None:
        """Take the units out of the network at the next budget, and make ready to train it further."""
        if self.tuned < 0 and self.gated_steps + self.further_steps >= FEW_STEPS:
            found = diagnose(
                self.control.gates,
                [x for x in (self.phase.optimiser, self.control.optimiser) if x is not None],
                loss=partial(self.loss, self.phase.network),
                batches=([batch] for batch in some_batches(self.loader)),
                target=self.target,
            ).findings
            self.findings = [f"{x.code}: {x.seen} {x.remedy}" for x in found if x.code != _AS_WANTED]
        self.tuned += 1
        cut = self.cuts[self.tuned]
        self._cut(cut)
        if not self.further_steps:
            return
        self.phase = self._phase_of(cut)
        if self.tuned in self.scored:
            other, phase = self.scored.pop(self.tuned)
            steps, phases = self.trial_steps[1], {cut.by: self.phase, other.by: phase}
            losses = compare(phases, self.loader, self.loss, steps, self.training.accumulate, self.epoch)
            self.step += steps
            best = min((cut, other), key=lambda each: losses[each.by])
            best.losses = losses
            best.report = replace(best.report, step=cut.report.step, multiplier=cut.report.multiplier)
            self.cuts[self.tuned], self.phase = best, phases[best.by]

    @property
    def trial_steps(self) -> tuple[int, int]:
        """After how many steps cuts by scores are compared with each other, and the best with that by gates; or 0."""
        is_compared = (
            self.pretrained and self.further_steps >= 1 / _TRIAL and len(self.loader) > self.training.accumulate
        )
        first, second = (int(_TRIAL * steps) for steps in (self.gated_steps, self.further_steps))
        return (first, second) if is_compared else (0, 0)

    def _cut_by_scores(self) -> None:
        """Cut the network as it was given to each budget by each score, and keep the best of a trial."""
        steps = self.trial_steps[0]
        scores = unit_scores(self.gated.network, self.example, self.loss, some_batches(self.loader))
        limits = self.target.report().budget
        falling = self.budget if isinstance(self.budget, Sequence) else [next(iter(limits.values()))]
        for i, budget in enumerate(falling):
            held = dict.fromkeys(limits, budget) if len(limits) == 1 else limits
            phases: dict[str, Phase] = {}
            cuts: dict[str, Cut] = {}
            for name, values in scores.items():
                gates = self.target.best_within(values, held)
                cut = Cut(budget, gates, None, replace(self.target.report(gates), budget=held), by=name)
                self._cut(cut)
                if cut.refusal is None:
                    cuts[name], phases[name] = cut, self._phase_of(cut)
            if cuts:
                losses = compare(phases, self.loader, self.loss, steps, self.training.accumulate, self.epoch)
                best = min(losses, key=losses.__getitem__)
                self.scored[i] = cuts[best], phases[best]

    def _cut(self, cut: Cut) -> None:
        """Compact the network of a cut, renew its running statistics unless weights are frozen, and take its error."""
        network = self._compact(cut).network
        if not self._is_frozen:
            renew_statistics(network, self.loader, self.loss)
        cut.error = self.error(network)

    def _phase_of(self, cut: Cut) -> Phase:
        """The training of a cut network; that of scores takes the steps with gates, too."""
        assert cut.compacted is not None
        beside = 0 if cut.by == "gates" else self.gated_steps
        steps = beside + self.further_steps
        return Phase(cut.compacted.network, self.loss, steps, self.training, beside=beside)

    def _compact(self, cut: Cut) -> Compacted:
        network = copied(self.gated.network)
        network.load_state_dict(self._given if cut.state is None else cut.state)
        compacted, refusal = compact_or_fix(network, cut.gates, self.example)
        if refusal is not None:
            cut.refusal = str(refusal)
        elif not self._is_frozen and (left := _sites_left(network, compacted.network)):
            # Gates between 0 and 1 that no weights could take: training goes on with all of the unit.
            gates = {site: (gate != 0).to(gate) if site in left else gate for site, gate in cut.gates.items()}
            compacted = compact(network, gates, self.example)
        cut.compacted = compacted
        return compacted

    @torch.no_grad()
    def error(self, network: nn.Module) -> float | None:
        """What the user's function says of a network in evaluation mode."""
        if self.training.evaluate is None:
            return None
        was_training = network.training
        network.eval()
        error = float(self.training.evaluate(network))
        network.train(was_training)
        return error

    def settings(self, given: nn.Module, cost: object) -> dict[str, Any]:
        """What this run and the one that resumes its checkpoint must agree in, with the network and cost given."""
        optimiser, taught = self.phase.optimiser, self.loss.distillation
        of_epoch = [len(self.loader)] if isinstance(self.loader, Stream) else []
        param_groups = [] if optimiser is None else optimiser.param_groups
        options = [{key: x for key, x in group.items() if key != "params"} for group in param_groups]
        return {
            "network": checksum(given.state_dict()),
            "budget": repr(self.budget),
            "cost": cost if isinstance(cost, str) else "a cost of the user's",
            "steps": [self.gated_steps, self.further_steps, self.training.accumulate, *of_epoch],
            "pretrained": self.pretrained,
            "autocast": str(self.training.autocast),
            "optimiser": type(optimiser).__name__,
            "schedule": type(self.phase.schedule).__name__,
            "gates": {site: _kind(gate) for site, gate in self.control.gates.sites.items()},
            "loss": named(self.loss.function),
            "distil": taught and [taught.weight, named(taught.by) if callable(taught.by) else taught.by],
            "optimiser's numbers": numbers(options),
        }

    def state_dict(self) -> dict[str, Any]:
        """One flat dict of what a resumed run needs: steps, cuts, findings and the tensors of the phase."""
        return self.phase.state_dict() | {
            "step": self.step,
            "epoch": self.epoch,
            "tuned": self.tuned,
            "findings": self.findings,
            "history": self.history,
            "cuts": [_entries(cut) for cut in self.cuts],
            "scored": {i: (_entries(cut), phase.state_dict()) for i, (cut, phase) in self.scored.items()},
            "latency": None if self.latency is None else self.latency.measured,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, also in the middle of a phase."""
        self.step, self.epoch, self.tuned = state["step"], state["epoch"], state["tuned"]
        self.history, self.findings = list(state["history"]), list(state["findings"])
        self.cuts = [self._saved_cut(saved) for saved in state["cuts"]]
        self.scored = {}
        for i, (saved, of_phase) in state["scored"].items():
            cut = self._saved_cut(saved)
            self.scored[i] = cut, self._phase_of(cut)
            self.scored[i][1].load_state_dict(of_phase)
        if self.further_steps and self.tuned >= 0:
            self.phase = self._phase_of(self.cuts[self.tuned])
        self.phase.load_state_dict(state)

    def _saved_cut(self, saved: Mapping[str, Any]) -> Cut:
        """A cut as a file has it (:func:`_entries`), compacted again if it was."""
        gates = {site: gate.to(self.loss.device) for site, gate in saved["gates"].items()}
        cut = Cut(
            **{key: x for key, x in saved.items() if key != "network"}
            | {"gates": gates, "report": TargetReport(**saved["report"])}
        )
        if saved["network"] is not None:
            self._compact(cut).network.load_state_dict(saved["network"])
        return cut


def _entries(cut: Cut) -> dict[str, Any]:
    """A cut as plain values and tensors; of the compacted network its tensors alone."""
    kept = {name: getattr(cut, name) for name in ("budget", "gates", "state", "error", "by", "losses")}
    network = None if cut.compacted is None else cut.compacted.network.state_dict()
    return kept | {"report": vars(cut.report), "network": network}


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Detached copies of the tensors of a network's state, by name."""
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


def _sites_left(gated: nn.Module, compacted: nn.Module) -> set[str]:
    """The sites whose gates a compacted network still has."""
    sites = {
        path: module.site_name or path
        for path, module in gated.named_modules(remove_duplicate=False)
        if isinstance(module, GateLayer)
    }
    left = [path for path, module in compacted.named_modules() if isinstance(module, FixedGate)]
    return {site for path, site in sites.items() if any(x == path or x.startswith(f"{path}.") for x in left)}


def _kind(gate: L0Gate) -> list[str]:
    """The family of gates, their number, and what of them is not learned."""
    gates = gate.distribution
    fixed = [f"{name}={getattr(gates, name)}" for name in gates.defaults if name not in gates.learned]
    return [type(gates).__name__, str(gates.batch_shape.numel()), *fixed]


def named(value: object) -> str:
    """A function or class by its name, with the numbers of a partial function; a module by its text and its numbers."""
    if isinstance(value, partial):
        return f"{named(value.func)} of {numbers([value.args, value.keywords])}"
    if isinstance(value, nn.Module):
        return f"{value} {numbers(vars(value))} {checksum(value.state_dict())}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def numbers(value: object, name: str = "") -> list[str]:
    """The numbers and tensors in nested containers, with their paths; flags and all else are left out."""
    if isinstance(value, (Mapping, list, tuple)):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [x for key, entry in entries for x in numbers(entry, f"{name}.{key}")]
    if isinstance(value, Tensor):
        return [f"{name} {checksum({'': value})}"]
    return [f"{name} {value}"] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
