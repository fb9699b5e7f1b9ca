"""A pruning run: steps with gates, a cut at each budget, steps with what was cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.compaction import compact
from pyro_l0.compaction.compact import compact_or_fix
from pyro_l0.compaction.storage import Compacted
from pyro_l0.infer import AutoGate, SparsityTarget
from pyro_l0.infer.target.budget import Cost
from pyro_l0.infer.target.sparsity_target import TargetReport
from pyro_l0.nn import Gate, NetworkCost
from pyro_l0.nn.engine import Example
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.pruning.latency import Latency
from pyro_l0.pruning.phases import (
    BatchLoss,
    FineTuning,
    GatedPhase,
    Loader,
    MakeOptimiser,
    MakeSchedule,
    groups,
    renew_statistics,
)
from pyro_l0.pruning.places import GatedNetwork
from pyro_l0.pruning.result import FEW_STEPS
from pyro_l0.training.epochs import check_finite, some_batches
from pyro_l0.training.processes import average_buffers

__all__ = ["Cut", "Evaluate", "Run"]

# Notes tell of undecided gates, and a branch may close.
_TOLD_OTHERWISE = ("undecided-gates", "site-collapsed")
Evaluate = Callable[[nn.Module], float]


@dataclass
class Cut:
    """The network at a budget."""

    budget: float  # of several at once, the first
    gates: dict[str, Tensor]  # deterministic, by site
    state: dict[str, Tensor]  # the network's tensors with gates
    report: TargetReport  # of the target
    compacted: Compacted | None = None  # what was cut, and is trained further
    error: float | None = None  # of what was cut, before that; None without a function that says
    refusal: str | None = None  # why the network is whole, with fixed gates; None if it was cut


@dataclass
class Run:
    """A run and how far it has come."""

    placed: GatedNetwork
    example: Example
    counts: NetworkCost  # what the network's parts cost
    costs: Mapping[str, Cost]  # by the names of the budgets, what must stay within them
    loader: Loader
    loss: BatchLoss
    gated_steps: int
    further_steps: int  # with each network that was cut
    budgets: int  # how many networks there will be
    accumulate: int  # batches for each step
    make_optimiser: MakeOptimiser | None  # of weights
    make_schedule: MakeSchedule | None  # of their optimiser, in each of the two phases
    evaluate: Evaluate | None  # the error of a network
    in_step: Mapping[str, int]  # by site, how many units leave together, if not each alone
    latency: Latency | None  # where that is a cost
    cuts: list[Cut] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    epoch: int = 0
    tuned: int = -1  # which cut is being trained further
    tuning: FineTuning | None = None
    findings: list[str] = field(default_factory=list)  # on the gates, when they were done
    looks_untrained: bool = False  # though it was said to be trained
    dense_error: float | None = None  # of the network as it was given

    def start(self, batch: object, make_target: Callable[[AutoGate], SparsityTarget]) -> None:
        """Make the phase with gates; the guide sees them at a batch."""
        self.phase = GatedPhase(
            self.placed.network, self.loss, batch, make_target, self.make_optimiser, self.make_schedule
        )

    def on_budget(self, budget: float, gates: dict[str, Tensor]) -> None:
        """Keep the network as it is at a budget."""
        average_buffers(self.placed.network)
        state = {name: value.detach().clone() for name, value in self.placed.network.state_dict().items()}
        gates = {site: gate.detach().clone() for site, gate in gates.items()}
        report = self.phase.target.report()
        if len(report.budget) == 1:  # which may be an intermediate one
            report = replace(report, budget=dict.fromkeys(report.budget, budget))
        self.cuts.append(Cut(budget, gates, state, report))

    @property
    def _ends(self) -> list[int]:
        """The last steps of the phases."""
        return [self.gated_steps + i * self.further_steps for i in range(self.budgets + 1)]

    @property
    def is_done(self) -> bool:
        """Whether all steps are taken."""
        return self.step >= self._ends[-1]

    def advance(self) -> dict[str, Any]:
        """Pass over the loader once, or up to the last step of a phase."""
        if self.step == self._ends[self.tuned + 1]:
            self._cut_next()
        until = next(end for end in self._ends if end > self.step)
        phase = self.phase if self.tuning is None else self.tuning
        # A phase begins with an iterator of its own: what goes on between two may pass over the loader, too.
        total, taken = torch.zeros((), device=self.loss.device), 0
        for group in groups(self.loader, self.accumulate, self.epoch):
            self.step += 1
            total += phase.step(group)
            taken += 1
            if self.step == until:
                break
        if not taken:
            raise ValueError("Expected a loader that gives batches again and again, but it gave none.")
        self.epoch += 1
        average_buffers(phase.network)  # of which a file keeps those of one process
        mean = float(total) / taken
        check_finite(self.epoch, mean, phase.network)
        entry = {"epoch": float(self.epoch), "step": float(self.step), "loss": mean}
        if self.tuning is None:
            return {**entry, "fraction": float(self.phase.target.fraction()[0])}
        entry["fraction"] = float(next(iter(self.cuts[self.tuned].report.fraction.values())))
        error = self.error(self.tuning.network)
        return entry if error is None else {**entry, "error": error}

    def finish(self) -> None:
        """Cut what is not cut yet, where there are no further steps."""
        while self.tuned + 1 < self.budgets:
            self._cut_next()

    def _cut_next(self) -> None:
        """Take the units out of the network at the next budget, and make ready to train it further."""
        if self.tuned < 0 and self.gated_steps + self.further_steps >= FEW_STEPS:
            found = self.phase.diagnose(some_batches(self.loader)).findings
            self.findings = [f"{x.code}: {x.seen} {x.remedy}" for x in found if x.code not in _TOLD_OTHERWISE]
        self.tuned += 1
        cut = self.cuts[self.tuned]
        network = self._compact(cut).network
        renew_statistics(network, self.loader, self.loss)
        cut.error = self.error(network)
        self._tune(network)

    def _tune(self, network: nn.Module) -> None:
        if self.further_steps:
            steps, make_optimiser, make_schedule = self.further_steps, self.make_optimiser, self.make_schedule
            self.tuning = FineTuning(network, self.loss, steps, make_optimiser, make_schedule)

    def _compact(self, cut: Cut) -> Compacted:
        network = copied(self.placed.network)
        network.load_state_dict(cut.state)
        compacted, refusal = compact_or_fix(network, cut.gates, self.example)
        if refusal is not None:
            cut.refusal = str(refusal)
        elif left := _sites_left(network, compacted.network):
            # Gates between 0 and 1 that no weights could take: training goes on with all of the unit.
            gates = {site: (gate != 0).to(gate) if site in left else gate for site, gate in cut.gates.items()}
            compacted = compact(network, gates, self.example)
        cut.compacted = compacted
        return compacted

    @torch.no_grad()
    def error(self, network: nn.Module) -> float | None:
        """What the user's function says of a network in evaluation mode."""
        if self.evaluate is None:
            return None
        training = network.training
        network.eval()
        error = float(self.evaluate(network))
        network.train(training)
        return error

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        cuts = [
            {
                "budget": cut.budget,
                "gates": cut.gates,
                "state": cut.state,
                "report": vars(cut.report),
                "error": cut.error,
                "network": None if cut.compacted is None else cut.compacted.network.state_dict(),
            }
            for cut in self.cuts
        ]
        return {
            "step": self.step,
            "epoch": self.epoch,
            "tuned": self.tuned,
            "findings": self.findings,
            "history": self.history,
            "phase": self.phase.state_dict(),
            "tuning": None if self.tuning is None else self.tuning.state_dict(),
            "cuts": cuts,
            "latency": None if self.latency is None else self.latency.measured,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.step, self.epoch, self.tuned = state["step"], state["epoch"], state["tuned"]
        self.history, self.findings = list(state["history"]), list(state["findings"])
        self.phase.load_state_dict(state["phase"])
        self.cuts = []
        for saved in state["cuts"]:
            gates = {site: gate.to(self.loss.device) for site, gate in saved["gates"].items()}
            report = saved["report"]
            cut = Cut(saved["budget"], gates, saved["state"], TargetReport(**report), error=saved["error"])
            if saved["network"] is not None:
                self._compact(cut).network.load_state_dict(saved["network"])
            self.cuts.append(cut)
        compacted = self.cuts[self.tuned].compacted if self.tuned >= 0 else None
        if state["tuning"] is not None and compacted is not None:
            self._tune(compacted.network)
            assert self.tuning is not None
            self.tuning.load_state_dict(state["tuning"])


def _sites_left(gated: nn.Module, compacted: nn.Module) -> set[str]:
    """The sites whose gates a compacted network still has."""
    sites = {
        path: module.site_name or path
        for path, module in gated.named_modules(remove_duplicate=False)
        if isinstance(module, Gate)
    }
    left = [path for path, module in compacted.named_modules() if isinstance(module, FixedGate)]
    return {site for path, site in sites.items() if any(x == path or x.startswith(f"{path}.") for x in left)}
