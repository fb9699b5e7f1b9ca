"""What the runs of ``mnist.py`` and ``cifar_wrn.py`` share: data on a device, a count of what is left, their state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, distributed, nn
from tqdm import tqdm

from common import command
from common.data import Images
from pyro_l0.compaction import Plan, Shrinker
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import NetworkCost
from pyro_l0.training import Checkpoint, epochs
from pyro_l0.training.epochs import check_finite
from pyro_l0.training.processes import processes, rank

__all__ = ["GatedRun", "check_shares", "train"]


class GatedRun:
    """A run of a number of epochs, for :func:`pyro_l0.training.epochs`; a subclass sets the attributes below.

    In a process group every process takes its share of each batch and a gate sample of its own; gradients are averaged
    and all processes hold the same state after every step. Costs are counted for the network at the start.
    """

    options: Any
    net: nn.Module
    guide: AutoGate
    elbo: L0_ELBO
    cost: NetworkCost
    group_sizes: Mapping[str, float]
    optimiser: torch.optim.Optimizer
    moments: tuple[str, ...]  # what the optimiser keeps of each parameter
    test_batch = 1000
    entries: tuple[str, ...] = (  # of the history, beside the epoch and its seconds
        "loss",
        "test_error_percent",
        "architecture",
        "weights_left",
        "macs_left",
        "parameters_left",
        "expected_macs",
    )

    def __init__(self, images: Images, options: Any) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = torch.device(options.device)
        self.train_x, self.train_y, self.test_x, self.test_y = (
            x.to(self.device) for x in (images.train_x, images.train_y, images.test_x, images.test_y)
        )
        check_shares(len(self.train_x), options.batch_size, processes())
        self.history: list[dict[str, Any]] = []
        self.shrinker: Shrinker | None = None
        self.steps = 0

    def train_epoch(self) -> float:
        """One pass over the training images in a new order; the mean loss."""
        raise NotImplementedError

    def parts(self) -> dict[str, Any]:
        """What has a ``state_dict``, by its name in a checkpoint; None for what this run does without."""
        raise NotImplementedError

    def shuffled(self) -> tuple[Tensor, ...]:
        """This process's part of every batch of an epoch, as indices in a random order."""
        order = torch.randperm(len(self.train_x)).to(self.device)
        if processes() > 1:
            distributed.broadcast(order, 0)
        return tuple(index[rank() :: processes()] for index in order.split(self.options.batch_size))

    def mean(self, total: Tensor, number: int) -> float:
        """The mean over all processes of a sum of so many losses."""
        if processes() > 1:
            distributed.all_reduce(total)
        return float(total) / processes() / number

    @property
    def is_done(self) -> bool:
        """Whether all epochs are over."""
        return len(self.history) >= self.options.epochs

    def advance(self) -> dict[str, Any]:
        """Train for an epoch, take out what is closed for good, and measure; its seconds are those of the training.

        What an epoch made is checked once, and no earlier epoch's.
        """
        start, epoch = time.perf_counter(), len(self.history) + 1
        loss = self.train_epoch()
        entry = {"epoch": epoch, "loss": loss, "seconds": time.perf_counter() - start}
        for place in not_finite({"loss": loss, **self._states()}):
            check_finite(epoch, loss, *(part for part in self.parts().values() if isinstance(part, nn.Module)))
            raise FloatingPointError(f"Expected finite values after epoch {epoch}, but got others at state{place}.")
        if self.shrinker is not None:
            self.shrinker.step()
        entry |= self.measure()
        for place in not_finite(entry):
            raise FloatingPointError(f"Expected finite values after epoch {epoch}, but got others at entry{place}.")
        return entry

    @property
    def plans(self) -> Sequence[Plan]:
        """By which the network has shrunk so far."""
        return () if self.shrinker is None else self.shrinker.plans

    @property
    def gates(self) -> AutoGate:
        """The guide of the gates that count."""
        return self.guide

    def plain(self) -> nn.Module:
        """The network that counts, with its gates."""
        return self.net

    def inputs(self, x: Tensor) -> Tensor:
        """What the network makes its predictions of."""
        return x

    def full(self, gates: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gates in the sizes of the network at the start."""
        return gates if self.shrinker is None else self.shrinker.full(gates)

    @torch.no_grad()
    def error(self, network: nn.Module, gates: Mapping[str, Tensor] | None = None) -> float:
        """Test error in percent, of a network with gates under given ones."""
        was_training = network.training
        network.eval()
        with poutine.condition(data=gates or {}):
            predicted = torch.cat([network(self.inputs(x)).argmax(-1) for x in self.test_x.split(self.test_batch)])
        network.train(was_training)
        return 100 * float((predicted != self.test_y).float().mean())

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Test error under the test gates, and what is left of the network."""
        gates = self.gates.test_gates()
        active = self.full({name: gate.active_prob for name, gate in self.gates.posterior().items()})
        is_open = {name: (gate != 0).float() for name, gate in self.full(gates).items()}
        return {
            "test_error_percent": self.error(self.plain(), gates),
            "architecture": [int(gate.sum()) for gate in is_open.values()],
            "weights_left": int(self.cost.weights(is_open)),
            "macs_left": int(self.cost.macs(is_open)),
            "parameters_left": int(self.cost.parameters(is_open)),
            "expected_macs": float(self.cost.macs(active)),
            "expected_l0": sum(float(p.sum()) * self.group_sizes[name] for name, p in active.items()),
            "active_rate": {name: float(p.mean()) for name, p in active.items()},
        }

    def _states(self) -> dict[str, Any]:
        return {name: None if part is None else part.state_dict() for name, part in self.parts().items()}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, random numbers apart."""
        return {**self._states(), "steps": self.steps, "history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; whatever is missing or of another kind is an error."""
        for place in not_finite(state):
            raise ValueError(f"expected finite values, but got others at state{place}")
        if self.shrinker is not None:
            self.shrinker.load_state_dict(state["shrinker"])
        for name, part in self.parts().items():
            if part is not None and part is not self.shrinker:
                part.load_state_dict(state[name])
        self.steps, self.history = state["steps"], state["history"]
        for i, entry in enumerate(self.history):
            missing = [name for name in ("epoch", "seconds", *self.entries) if name not in entry]
            if missing or entry["epoch"] != i + 1:
                raise ValueError(f"expected {', '.join(missing) or f'epoch {i + 1}'}, but got an entry of {entry}")
        if self.steps:
            self._check_moments()

    def waiting(self) -> Sequence[nn.Parameter]:
        """Parameters that had no gradient so far."""
        return ()

    def _check_moments(self) -> None:
        """Refuse a state of the optimiser that lacks a parameter's, which would start anew without a word."""
        waiting = {id(parameter) for parameter in self.waiting()}
        for parameter in (p for group in self.optimiser.param_groups for p in group["params"]):
            found = self.optimiser.state.get(parameter, {})
            shapes = {tuple(x.shape) for x in found.values() if isinstance(x, Tensor) and x.dim()}
            lacks = id(parameter) not in waiting and not set(self.moments) <= set(found)
            if lacks or not shapes <= {tuple(parameter.shape)}:
                raise ValueError(f"expected {self.moments} of each parameter, but {parameter.shape} has {shapes}")


def not_finite(value: object) -> Iterator[str]:
    """Where in nested containers there are values that are not finite, as indices."""
    if isinstance(value, (Mapping, list, tuple)):
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from (f"[{key!r}]{place}" for place in not_finite(entry))
    elif isinstance(value, float):
        yield from () if math.isfinite(value) else ("",)
    elif isinstance(value, Tensor) and not math.isfinite(value.sum()):  # which costs a fifth of a look at each value
        yield from () if bool(value.isfinite().all()) else ("",)


def check_shares(num_data: int, batch_size: int, number: int) -> None:
    """Refuse batches that have no example for every one of some processes."""
    last = num_data % batch_size or batch_size
    if last < number:
        raise ValueError(
            f"Expected at least {number} examples in every batch, one per process, but the last of {num_data} "
            f"examples in batches of {batch_size} has {last}; hold out another number or take other batches."
        )


def train(
    run: GatedRun, path: Path, fingerprint: dict[str, Any], resume: bool, first: bool, after: float = 0.0
) -> None:
    """Train a run to its end, with checkpoints.

    The ``first`` process shows a progress bar on a terminal, and elsewhere prints some twenty lines. Both have the time
    that is left to the whole command: what it trains ``after`` the last epoch takes as long as so many epochs, and its
    pictures about a fifth of what came before the first epoch, imports above all.
    ``fingerprint`` is what the checkpoint and the run that resumes it must agree in.
    """
    before = time.perf_counter() - command.began()
    checkpoint = Checkpoint(path, fingerprint)
    if resume:
        checkpoint.load(run.load_state_dict, run.device)
        if len(run.history) > run.options.epochs:
            expected = f"epochs of at least {len(run.history)}, as many as {path} has"
            raise ValueError(f"Expected {expected}, but got {run.options.epochs}.")
    else:
        checkpoint.save(run.state_dict())
    command.advise(f"{path} holds all but the last moments, and the same command with --resume goes on from there")
    total, hidden = run.options.epochs, None if first else True  # None: shown on a terminal alone
    begun, done = time.perf_counter(), len(run.history)
    look = "{n_fmt}/{total_fmt} epochs |{bar}| {rate_fmt}{postfix}"
    bar = tqdm(epochs(run, checkpoint), initial=done, total=total, unit="epoch", disable=hidden, bar_format=look)
    for entry in bar:
        share = 100 * entry["expected_macs"] / run.cost.total_macs
        each = (time.perf_counter() - begun) / (entry["epoch"] - done)
        left = bar.format_interval((total - entry["epoch"] + after) * each + before / 5)
        progress = f"error {entry['test_error_percent']:.2f} %, expected MACs {share:.1f} %, {left} left"
        bar.set_postfix_str(progress)
        if first and bar.disable and entry["epoch"] % max(1, total // 20) == 0:
            print(f"epoch {entry['epoch']} of {total}: {progress}", flush=True)
