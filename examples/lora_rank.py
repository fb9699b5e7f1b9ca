"""How many ranks does the LoRA adapter of each layer need? A gate per rank, half of the ranks as budget, then merged.

A network of four hidden layers learns scikit-learn's digits and is frozen. Then it is adapted to each of two other
tasks by h = W x + B diag(z) A x in every layer (Hu et al., 2021, arXiv:2106.09685). The gates z train with A and B
until half of the ranks are closed; in the end W + B diag(z) A takes the place of W. Beside them stand equal ranks in
all layers, half of the ranks and all, after as many steps. It is known where a change suffices: in the first layer for
images that are turned by 90 degrees ("rotated"), and in the last if class k is called k + 1 ("renamed").

``python examples/lora_rank.py`` takes about a minute on one core and writes ``lora_rank.png`` to ``--out``. Expect a
test loss of 0.120 ± 0.015 by gates and 0.171 ± 0.016 by equal ranks on rotated images, 0.075 ± 0.016 and 0.082 ± 0.015
on renamed classes, and most ranks in the first two layers for the former and in the last two for the latter.
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import copy
import itertools
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from common.data import load_digits
from common.sweep import spread
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import L0Gate, NetworkGates
from pyro_l0.plots import figure_axes, plot_bars, save_figure

__all__ = ["Options", "Result", "main"]

WIDTH, LAYERS, CLASSES = 64, 5, 10  # WIDTH is the number of pixels, too
RANK, BUDGET = 8, 0.5  # ranks of every adapter, and how many of all are left
GATED = 0.6  # of the steps; the rest trains the ranks that are left
LEARNING_RATE, BATCH = 3e-3, 64
NOISE = 0.2  # on the pixels while training
KINDS = ("all ranks", "half, uniform", "half, gates")
TASKS = {
    "rotated": lambda x, y: (x.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1), y),
    "renamed": lambda x, y: (x, (y + 1) % CLASSES),
}

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        steps: of the frozen network and of each adaptation.
        seeds: each a run.
        out: folder for the picture.
    """

    steps: int = 1500
    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = field(default=Path("runs/lora_rank"))


class Result(NamedTuple):  # of a merged network on the test images
    loss: float  # cross-entropy in nats
    error: float  # in percent
    ranks: list[int]  # by layer
    merging: float  # largest difference of its outputs from those of the network with adapters


def main(options: Options) -> dict[tuple[str, str], list[Result]]:
    """Print the table and draw the picture; returns the results of each seed by task and choice of the ranks."""
    command.check(options)
    digits = load_digits()
    train, test = (digits.train_x, digits.train_y), (digits.test_x, digits.test_y)
    results: dict[tuple[str, str], list[Result]] = {key: [] for key in itertools.product(TASKS, KINDS)}
    with command.folder(options.out):
        for seed in options.seeds:
            torch.manual_seed(seed)
            hidden = [layer for _ in range(LAYERS - 1) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
            network = nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))
            _train(network, train, options.steps)
            network.requires_grad_(False)
            for task, kind in results:
                torch.manual_seed(seed)
                result = _adapt(network, kind, TASKS[task](*train), TASKS[task](*test), options.steps)
                results[task, kind].append(result)
        print("task      ranks           test loss         error in %       ranks by layer")
        for (task, kind), of_seeds in results.items():
            loss, error = spread([r.loss for r in of_seeds]), spread([r.error for r in of_seeds])
            print(f"{task}   {kind:13s}   {loss}     {error}    {' '.join(map(str, _mean_ranks(of_seeds)))}")
        merging = max(result.merging for of_seeds in results.values() for result in of_seeds)
        print(f"merging changes no output by more than {merging:.1e}")
        _plot(results, options.out / "lora_rank.png")
    return results


class Adapter(nn.Module):
    """A frozen layer W and its change B diag(z) A, which is 0 at the start."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, rank))
        self.z = torch.ones(rank)  # in a gated network anew at every call

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + F.linear(F.linear(x, self.a) * self.z, self.b)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        layer = copy.deepcopy(self.frozen)
        layer.weight += self.b * self.z @ self.a
        return layer


class Adapted(nn.Module):
    """A frozen network with an adapter in every layer, and gates of their ranks."""

    def __init__(self, network: nn.Sequential, rank: int, gated: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Adapter(x, rank) if isinstance(x, nn.Linear) else x for x in network))
        self.adapters = [x for x in self.layers if isinstance(x, Adapter)]
        # One site for all layers: a target leaves some gates of every site open, and a layer may lose all ranks here.
        self.ranks = L0Gate(len(self.adapters), rank) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks:
            for adapter, z in zip(self.adapters, self.ranks(), strict=True):
                adapter.z = z
        return self.layers(x)


def _adapt(network: nn.Sequential, kind: str, train: Examples, test: Examples, steps: int) -> Result:
    adapted = Adapted(network, RANK // 2 if kind == "half, uniform" else RANK, gated=kind == "half, gates")
    gates = NetworkGates(adapted) if adapted.ranks else None
    target = SparsityTarget(gates, {"ranks": BUDGET}, steps=int(GATED * steps)) if gates else None
    _train(adapted, train, steps, target)
    with torch.no_grad():
        outputs = adapted.eval()(test[0])
        merged = nn.Sequential(*(x.merged() if isinstance(x, Adapter) else x for x in adapted.layers))(test[0])
    error = 100 * float((merged.argmax(1) != test[1]).float().mean())
    ranks = [int((adapter.z != 0).sum()) for adapter in adapted.adapters]
    return Result(float(F.cross_entropy(merged, test[1])), error, ranks, float((merged - outputs).abs().max()))


def _train(network: nn.Module, train: Examples, steps: int, target: SparsityTarget | None = None) -> None:
    """Train weights, and with a target gates, in place."""
    locations = target.guide.locations() if target else []
    weights = [w for w in network.parameters() if w.requires_grad and not any(w is gate for gate in locations)]
    optimiser = torch.optim.Adam(weights, LEARNING_RATE)
    schedule = LambdaLR(optimiser, lambda step: 1 - step / steps)
    if target:  # the gates' step size is the target's throughout
        optimiser_of_gates = torch.optim.Adam(locations, **target.optimiser_options)
    for _ in range(steps):
        chosen = torch.randint(len(train[0]), (BATCH,))
        x, y = train[0][chosen], train[1][chosen]
        network.zero_grad()
        F.cross_entropy(network(x + NOISE * torch.randn_like(x)), y).backward()
        optimiser.step()
        schedule.step()
        if target:
            target.add_gradient()
            optimiser_of_gates.step()
            target.ascend()


def _mean_ranks(results: list[Result]) -> list[float]:
    return [round(statistics.mean(ranks), 1) for ranks in zip(*(r.ranks for r in results), strict=True)]


def _plot(results: dict[tuple[str, str], list[Result]], path: Path) -> None:
    """The mean ranks of each layer beside the losses, with their deviations."""
    ranks, losses = figure_axes(1, 2, figsize=(9, 3.4))
    left = {task: _mean_ranks(results[task, KINDS[-1]]) for task in TASKS}
    plot_bars(left, [str(layer) for layer in range(1, LAYERS + 1)], ylabel=f"mean rank, of {RANK}", axes=ranks)
    ranks.axhline(BUDGET * RANK, color="0.5", lw=0.8)  # uniform ranks
    found = {task: [[result.loss for result in results[task, kind]] for kind in KINDS] for task in TASKS}
    means = {task: [statistics.mean(values) for values in of_kinds] for task, of_kinds in found.items()}
    spreads = {
        task: [statistics.stdev(values) if len(values) > 1 else 0.0 for values in of_kinds]
        for task, of_kinds in found.items()
    }
    plot_bars(means, KINDS, ylabel="test loss, nats", spreads=spreads, axes=losses)
    save_figure((ranks, losses), path)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
