"""A pruning run: steps with gates, a cut at each budget, steps with what was cut."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.compaction import compact
from pyro_l0.compaction.compact import compact_or_fix
from pyro_l0.compaction.storage import Compacted
from pyro_l0.infer.target.budget import Cost
from pyro_l0.infer.target.report import TargetReport
from pyro_l0.nn import Gate
from pyro_l0.nn.engine import Example
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.pruning.batch_norm import renew_statistics
from pyro_l0.pruning.batches import BatchLoss, Loader, average_buffers, groups, is_first
from pyro_l0.pruning.checkpoint import Checkpoint
from pyro_l0.pruning.notes import FEW_STEPS
from pyro_l0.pruning.phases import FineTuning, GatedPhase, MakeOptimiser, MakeSchedule, TargetOptions
from pyro_l0.pruning.stream import some_batches

__all__ = ["Cut", "Run", "Settings"]

# By a note on the gates; and a branch may close.
_TOLD_OTHERWISE = ("undecided-gates", "site-collapsed")
Evaluate = Callable[[nn.Module], float]
Callback = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True)
class Settings:
    """How a run goes on, whatever is pruned.

    Attributes:
        gated_steps: steps with gates.
        further_steps: steps with each network that was cut.
        accumulate: batches for each step.
        make_optimiser: of weights.
        make_schedule: of their optimiser, in each of the two phases.
        evaluate: the error of a network.
        callbacks: are called after every epoch with its entry of the history.
        progress: whether to print these entries to the standard error.
    """

    gated_steps: int
    further_steps: int
    accumulate: int
    make_optimiser: MakeOptimiser | None
    make_schedule: MakeSchedule | None
    evaluate: Evaluate | None
    callbacks: Sequence[Callback]
    progress: bool


@dataclass
class Cut:
    """The network at a budget.

    Attributes:
        budget: the budget; of several at once, the first.
        gates: deterministic gates by site.
        state: the network's tensors with gates.
        report: of the target.
        compacted: what was cut, and is trained further.
        error: of what was cut, before; None without a function that says.
        refusal: why the network is whole, with fixed gates; None if it was cut.
    """

    budget: float
    gates: dict[str, Tensor]
    state: dict[str, Tensor]
    report: TargetReport
    compacted: Compacted | None = None
    error: float | None = None
    refusal: str | None = None


@dataclass
class Run:
    """One run and how far it has come.

    Args:
        gated: the network with gates.
        example: what it is called with.
        loader: gives batches.
        loss: of a batch.
        settings: how it goes on.
    """

    gated: nn.Module
    example: Example
    loader: Loader
    loss: BatchLoss
    settings: Settings
    cuts: list[Cut] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 0
    epoch: int = 0
    tuned: int = -1  # which cut is being trained further
    phase: GatedPhase | None = None
    tuning: FineTuning | None = None
    findings: list[str] = field(default_factory=list)  # on the gates, when they were done

    def start(
        self,
        batch: object,
        budget: float | Sequence[float] | Mapping[str, float],
        cost: Cost | Mapping[str, Cost],
        pretrained: bool,
    ) -> None:
        """Make the phase with gates.

        Args:
            batch: at which the guide sees the gates.
            budget: of the target.
            cost: of the target.
            pretrained: whether the network was trained before.
        """
        settings = self.settings
        options = TargetOptions(budget, cost, settings.gated_steps, pretrained, self.on_budget)
        self.phase = GatedPhase(self.gated, self.loss, batch, options, settings.make_optimiser, settings.make_schedule)

    def on_budget(self, budget: float, gates: dict[str, Tensor]) -> None:
        """Keep the network as it is at a budget."""
        assert self.phase is not None
        average_buffers(self.gated)
        state = {name: value.detach().clone() for name, value in self.gated.state_dict().items()}
        gates = {site: gate.detach().clone() for site, gate in gates.items()}
        report = self.phase.target.report()
        if len(report.budget) == 1:  # which may be one on the way
            report = replace(report, budget=dict.fromkeys(report.budget, budget))
        self.cuts.append(Cut(budget, gates, state, report))

    def train(self, number: int, checkpoint: Checkpoint | None) -> None:
        """Go on to the end.

        Args:
            number: of budgets.
            checkpoint: written after every epoch.

        Raises:
            FloatingPointError: the loss is not finite any more.
            ValueError: the loader gives no batch.
        """
        settings = self.settings
        ends = [settings.gated_steps + i * settings.further_steps for i in range(number + 1)]
        while self.step < ends[-1]:
            if self.step == ends[self.tuned + 1]:
                self._cut_next()
            self._epoch(until=next(end for end in ends if end > self.step))
            if checkpoint is not None:
                checkpoint.save(self.state_dict())
        while self.tuned + 1 < number:  # with no steps to take
            self._cut_next()

    def _epoch(self, until: int) -> None:
        """Pass over the loader once, or up to the last step of a phase."""
        # A phase begins with an iterator of its own: what goes on between two may pass over the loader, too.
        total, taken = torch.zeros((), device=self.loss.device), 0
        for group in groups(self.loader, self.settings.accumulate, self.epoch):
            total += self._step(group)
            taken += 1
            if self.step == until:
                break
        if not taken:
            raise ValueError("Expected a loader that gives batches again and again, but it gave none.")
        self.epoch += 1
        average_buffers(self._network)  # of which a file keeps those of one process
        self._report_epoch(float(total) / taken)

    @property
    def _network(self) -> nn.Module:
        """What is being trained."""
        return self.gated if self.tuning is None else self.tuning.network

    def _step(self, group: Sequence[object]) -> Tensor:
        phase = self.phase if self.tuned < 0 else self.tuning
        assert phase is not None
        self.step += 1
        return phase.step(group)

    def _cut_next(self) -> None:
        """Take the units out of the network at the next budget, and make ready to train it further."""
        if self.tuned < 0 and self.settings.gated_steps + self.settings.further_steps >= FEW_STEPS:
            assert self.phase is not None
            found = self.phase.diagnose(some_batches(self.loader)).findings
            self.findings = [f"{x.code}: {x.seen} {x.remedy}" for x in found if x.code not in _TOLD_OTHERWISE]
        self.tuned += 1
        cut = self.cuts[self.tuned]
        self._compact(cut)
        assert cut.compacted is not None
        network = cut.compacted.network
        renew_statistics(network, self.loader, self.loss)
        cut.error = self.error(network)
        settings = self.settings
        if settings.further_steps:
            self.tuning = FineTuning(
                network, self.loss, settings.further_steps, settings.make_optimiser, settings.make_schedule
            )

    def _compact(self, cut: Cut) -> None:
        network = copy.deepcopy(self.gated)
        network.load_state_dict(cut.state)
        cut.compacted, refusal = compact_or_fix(network, cut.gates, self.example)
        if refusal is not None:
            cut.refusal = str(refusal)
            return
        left = _sites_left(network, cut.compacted.network)
        if left:  # gates between 0 and 1 that no weights could take; training goes on with all of the unit
            gates = {site: (gate != 0).to(gate) if site in left else gate for site, gate in cut.gates.items()}
            cut.compacted = compact(network, gates, self.example)

    @torch.no_grad()
    def error(self, network: nn.Module) -> float | None:
        """What the user's function says of a network in evaluation mode."""
        if self.settings.evaluate is None:
            return None
        training = network.training
        network.eval()
        error = float(self.settings.evaluate(network))
        network.train(training)
        return error

    def _report_epoch(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"Expected the training to stay finite, but the mean loss of epoch {self.epoch} is {loss}; take a "
                "smaller learning rate. A checkpoint holds the epoch before."
            )
        assert self.phase is not None
        if not all(bool(p.isfinite().all()) for p in self._network.parameters()):
            raise FloatingPointError(
                f"Expected the training to stay finite, but weights are not after epoch {self.epoch}; take a smaller "
                "learning rate, or look for a gradient that is not finite. A checkpoint holds the epoch before."
            )
        entry = {"epoch": float(self.epoch), "step": float(self.step), "loss": loss}
        gated = self.tuned < 0
        if gated:
            entry["fraction"] = float(self.phase.target.fraction()[0])
        elif self.tuning is not None:
            error = self.error(self.tuning.network)
            entry["fraction"] = float(next(iter(self.cuts[self.tuned].report.fraction.values())))
            if error is not None:
                entry["error"] = error
        self.history.append(entry)
        if self.settings.progress and is_first():
            what = "with gates" if gated else "compacted"
            print(
                f"epoch {self.epoch}, step {self.step}, {what}: "
                + ", ".join(f"{name} {entry[name]:.4g}" for name in ("loss", "fraction", "error") if name in entry),
                file=sys.stderr,
                flush=True,
            )
        for callback in self.settings.callbacks:
            callback(entry)

    # ------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        assert self.phase is not None
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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        assert self.phase is not None
        self.step, self.epoch, self.tuned = state["step"], state["epoch"], state["tuned"]
        self.history, self.findings = list(state["history"]), list(state["findings"])
        self.phase.load_state_dict(state["phase"])
        settings, device = self.settings, self.loss.device
        self.cuts = []
        for saved in state["cuts"]:
            gates = {site: gate.to(device) for site, gate in saved["gates"].items()}
            cut = Cut(saved["budget"], gates, saved["state"], TargetReport(**saved["report"]), error=saved["error"])
            if saved["network"] is not None:
                self._compact(cut)
                assert cut.compacted is not None
                cut.compacted.network.load_state_dict(saved["network"])
            self.cuts.append(cut)
        compacted = self.cuts[self.tuned].compacted if self.tuned >= 0 else None
        if state["tuning"] is not None and compacted is not None:
            self.tuning = FineTuning(
                compacted.network, self.loss, settings.further_steps, settings.make_optimiser, settings.make_schedule
            )
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
