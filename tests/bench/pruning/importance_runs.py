"""Prune a trained network to half of its multiply-adds and to a twentieth, by gates and by importance scores.

A small residual network learns scikit-learn's digits, or an MLP 784-300-100 learns MNIST (``--data mnist``). Then each
method prunes a copy of it to every budget in the same number of steps, training on meanwhile: gates by
``pyro_l0.prune``, and the scores of ``importance.py``: L1 norms of the weights, Taylor and Fisher. L1 is run twice,
with the same fraction of each layer and ranked over all layers; Taylor and Fisher keep a floor of units per layer, and
``--methods`` has them without it. Where there are several ways of one score, the table has the one of the smallest test
error at the end, which favours the scores.

``python examples/prune_pretrained.py`` takes two to three minutes on one core. With seed 1 the dense network has an
error of 1.1 %. Expect all methods between 0.5 and 2 % with half or 30 % of the multiply-adds, and differences at 5 %:
12 % by gates (8 to 12 % over seeds 1 to 7), 13 % by L1, 28 % by Taylor and Fisher. A test image is 0.28 %.

The table has the test error in percent when the last unit had closed and at the end, mean and standard deviation over
the seeds, and the part of the budget that the network uses. Writes a JSON file per run, ``pruned.md`` and
``pruned.png`` to ``--out``. Runs that are already there are not repeated; runs of other options are refused.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch, whose import takes seconds
    from common import command

    command.answer_signals()

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_l0
from common import command
from common.data import load_images
from common.importance import prune_by_importance, train
from common.options import check
from common.sweep import read_result, side_by_side, write_json
from pyro_l0.nn import Gate, insert_gates, suggest_gates
from pyro_l0.training import Checkpoint

__all__ = ["MethodName", "Options", "Problem", "ResidualNetwork", "Shuffled", "main", "pretrain", "prune", "table"]

MethodName = Literal["gates", "l1", "l1_global", "taylor", "taylor_floor", "fisher", "fisher_floor"]
TITLES: dict[MethodName, str] = {
    "gates": "gates (pyro_l0.prune)",
    "l1": "L1, the same fraction of each layer",
    "l1_global": "L1, over all layers",
    "taylor": "Taylor per multiply-add",
    "taylor_floor": "Taylor per multiply-add, with a floor",
    "fisher": "Fisher per multiply-add",
    "fisher_floor": "Fisher per multiply-add, with a floor",
}
METHODS: tuple[MethodName, ...] = get_args(MethodName)
DENSE_EPOCHS, EPOCHS = {"digits": 15, "mnist": 5}, {"digits": 15, "mnist": 2}
ENTRIES = ("method", "budget", "seed", "dense", "cut", "end", "used")
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        data: embedded digits, or MNIST.
        data_dir: folder with MNIST's four files; downloaded if not given.
        methods: which methods.
        budgets: largest fractions of the multiply-adds, each a run.
        epochs: passes over the training images while a network is pruned; 15 on the digits and 2 on MNIST if not given.
        seeds: each a dense network, and a run.
        jobs: runs side by side, one thread each.
        out: folder for the results, the table and the plot.
    """

    data: Literal["digits", "mnist"] = "digits"
    data_dir: Path | None = None
    methods: tuple[MethodName, ...] = ("gates", "l1", "l1_global", "taylor_floor", "fisher_floor")
    budgets: tuple[float, ...] = (0.5, 0.3, 0.1, 0.05)
    epochs: int | None = None
    seeds: tuple[int, ...] = (1,)
    jobs: int = 1
    out: Path = field(default=Path("runs/prune_pretrained"))


class Shuffled:
    """Passes over some data in whole batches, shuffled anew in each.

    Args:
        x: the inputs.
        y: their targets.
        batch_size: examples per batch.
        count: batches per pass, if not as many as there are.
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, count: int | None = None) -> None:
        self.x, self.y, self.batch_size = x, y, batch_size
        self.count = len(x) // batch_size if count is None else count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.x)).split(self.batch_size)[: self.count]:
            yield self.x[chosen], self.y[chosen]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is trained, and pruned.

    Attributes:
        make: makes the network without gates.
        batches: the training data.
        test_x: inputs to measure the error on.
        test_y: their classes.
        dense_epochs: passes over the training data before the pruning.
        epochs: passes while it is pruned.
        finetune: the part of them that gates leave to the network as cut; of :func:`pyro_l0.prune`'s choice if None.
    """

    make: Callable[[], nn.Module]
    batches: Shuffled
    test_x: Tensor
    test_y: Tensor
    dense_epochs: int
    epochs: int
    finetune: float | None = None

    @property
    def example(self) -> Tensor:
        """What the network is called with."""
        return self.test_x[:1]

    @torch.no_grad()
    def error(self, network: nn.Module) -> float:
        """Test error in percent."""
        network.eval()
        wrong = [network(x).argmax(1) != y for x, y in zip(self.test_x.split(500), self.test_y.split(500), strict=True)]
        return 100 * float(torch.cat(wrong).float().mean())


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut.

    Args:
        in_maps: feature maps that come in.
        maps: feature maps that go out.
        stride: of the first convolution and the shortcut.
    """

    def __init__(self, in_maps: int, maps: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_maps, maps, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(maps)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(maps, maps, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(maps)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module | None = None
        if in_maps != maps or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(in_maps, maps, 1, stride, bias=False), nn.BatchNorm2d(maps))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, maps, height / stride, width / stride)``."""
        hidden = self.relu1(self.norm1(self.conv1(x)))
        beside = x if self.shortcut is None else self.shortcut(x)
        out: Tensor = self.relu2(self.norm2(self.conv2(hidden)) + beside)
        return out


class ResidualNetwork(nn.Module):
    """A convolution, a residual block for each width, from the second on of stride 2, and a classifier.

    Args:
        channels: of the images.
        widths: feature maps of each block.
        stride: of the first convolution.
    """

    def __init__(self, channels: int, widths: Sequence[int], stride: int = 1) -> None:
        super().__init__()
        first = widths[0]
        self.stem = nn.Sequential(
            nn.Conv2d(channels, first, 3, stride, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU()
        )
        pairs = itertools.pairwise((first, *widths))
        self.blocks = nn.Sequential(*(Block(m, n, 2 if i else 1) for i, (m, n) in enumerate(pairs)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ten classes, shape ``(batch, 10)``."""
        logits: Tensor = self.head(self.blocks(self.stem(x)))
        return logits


def _digits_network() -> nn.Module:
    return ResidualNetwork(1, (16, 32))


def mlp() -> nn.Module:
    """The MLP 784-300-100 on images."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def _problem(options: Options) -> Problem:
    images = load_images(options.data, options.data_dir)
    train_x, test_x = (x.unflatten(1, images.image_shape) for x in (images.train_x, images.test_x))
    make, batch_size = (_digits_network, 64) if options.data == "digits" else (mlp, 100)
    batches, epochs = Shuffled(train_x, images.train_y, batch_size), options.epochs or EPOCHS[options.data]
    return Problem(make, batches, test_x, images.test_y, DENSE_EPOCHS[options.data], epochs)


def pretrain(problem: Problem, seed: int, path: Path) -> nn.Module:
    """The dense network of a seed, trained, or read from where it was written when it was."""
    described = {"seed": seed, "epochs": problem.dense_epochs, "batches": len(problem.batches)}
    checkpoint = Checkpoint(path, described)
    torch.manual_seed(seed)
    network = problem.make()
    if path.exists():
        checkpoint.load(network.load_state_dict)
    else:
        train(network, problem.batches, problem.dense_epochs * len(problem.batches), F.cross_entropy)
        checkpoint.save(network.state_dict())
    return network


def places(network: nn.Module, example: Tensor) -> dict[str, Gate]:
    """Gates for every method: behind activations, or the max pools after them, and behind what flattens images.

    Places on the same units, as in a residual stream, have one gate, because what these units cost leaves only where
    all of them are closed. Parts of units, as the pixels of a flattened map, have none.
    """
    gates: dict[str, Gate] = {}
    for place in suggest_gates(network, example).locations:
        before = network.get_submodule(place.path)
        if isinstance(before, nn.ReLU | nn.MaxPool2d | nn.Flatten) and not place.is_composite:
            shared = [gates[path] for path in place.coupled if path in gates]
            gates[place.path] = shared[0] if shared else place.gate
    return gates


def prune(problem: Problem, network: nn.Module, method: MethodName, budget: float, seed: int) -> Row:
    """Prune a copy of a trained network by one method; how it did is a row of the table.

    Args:
        problem: data, and how long.
        network: the network without gates.
        method: which method.
        budget: largest fraction of the multiply-adds.
        seed: of what the method draws.
    """
    torch.manual_seed(seed)
    pyro.set_rng_seed(seed)
    gated = insert_gates(network, places(network, problem.example))
    row: Row = {"method": method, "budget": budget, "seed": seed, "dense": problem.error(network)}
    if method != "gates":
        steps = problem.epochs * len(problem.batches)
        found = prune_by_importance(
            gated, method, budget, problem.batches, steps, F.cross_entropy, problem.example, problem.error
        )
        units = {site: int(gate.sum()) for site, gate in found.gates.items()}
        return {**row, "cut": found.cut, "end": found.end, "used": found.fraction / budget, "units": units}
    example, epochs, share, error = problem.example, problem.epochs, problem.finetune, problem.error
    pruned = pyro_l0.prune(
        gated, F.cross_entropy, problem.batches, example, budget, epochs=epochs, finetune=share, evaluate=error
    )
    left, full = pruned.report.left["macs"]
    units = {site: sum(value > 0 for value in gate) for site, gate in pruned.plan.gates.items()}
    return {**row, "cut": pruned.report.cut, "end": pruned.report.end, "used": left / full / budget, "units": units}


def main(options: Options) -> list[Row]:
    """Run what is missing, write the table and the plot; returns one row per budget, method and seed.

    Raises:
        ValueError: an option is outside its range, a run in ``out`` has other options or is damaged, or another
            comparison is at work there.
    """
    check(options)
    with command.folder(options.out):
        return _compare(options)


Task = tuple[Options, float, MethodName, int]  # with budget and seed


def _compare(options: Options) -> list[Row]:
    command.advise("the runs that are finished stay, and the same command goes on with the others")
    untrained = [(options, seed) for seed in options.seeds if not _dense(options, seed).exists()]
    side_by_side(_pretrain, untrained, options.jobs)
    tasks: list[Task] = list(itertools.product([options], options.budgets, options.methods, options.seeds))
    side_by_side(_run, [task for task in tasks if not _result(task).exists()], options.jobs)
    rows = [read_result(_result(task), _described(options), ENTRIES) for task in tasks]
    text = table(rows)
    (options.out / "pruned.md").write_text(text + "\n")
    _plot(rows, options.out / "pruned.png")
    print(text)
    return rows


def _result(task: Task) -> Path:
    options, budget, method, seed = task
    return options.out / f"{method}-{budget:g}-{seed}.json"


def _described(options: Options) -> Row:
    """What a run in the folder must agree in."""
    return {"data": options.data, "epochs": options.epochs}


def _dense(options: Options, seed: int) -> Path:
    return options.out / f"dense-{seed}.pt"


def _pretrain(task: tuple[Options, int]) -> None:
    options, seed = task
    torch.set_num_threads(1)
    pretrain(_problem(options), seed, _dense(options, seed))


def _run(task: Task) -> None:
    options, budget, method, seed = task
    torch.set_num_threads(1)
    problem = _problem(options)
    row = prune(problem, pretrain(problem, seed, _dense(options, seed)), method, budget, seed)
    write_json(_result(task), {**row, "options": _described(options)})


def summaries(rows: Sequence[Row]) -> dict[float, dict[MethodName, list[Row]]]:
    """Rows by budget and method; of several ways of one score, the one of the smallest mean error at the end."""
    found: dict[float, dict[MethodName, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["budget"], {}).setdefault(row["method"], []).append(row)
    best: dict[float, dict[MethodName, list[Row]]] = {}
    for budget, methods in found.items():
        ways = itertools.groupby(sorted(methods, key=METHODS.index), _family)
        names = [min(names, key=lambda name, methods=methods: _mean(methods[name], "end")) for _, names in ways]
        best[budget] = {name: methods[name] for name in names}
    return best


def _family(method: MethodName) -> str:
    return method.partition("_")[0]


def table(rows: Sequence[Row]) -> str:
    """Rows of budgets and methods, as Markdown."""
    dense = list({row["seed"]: row for row in rows}.values())
    lines = [
        f"Test error of the dense network: {_spread(dense, 'dense')} %.",
        "",
        "| budget | method | error at the cut, % | error at the end, % | part of the budget used | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for budget, methods in summaries(rows).items():
        for method, found in methods.items():
            errors = f"{_spread(found, 'cut')} | {_spread(found, 'end')}"
            lines.append(f"| {budget:g} | {TITLES[method]} | {errors} | {_mean(found, 'used'):.3f} | {len(found)} |")
    return "\n".join(lines)


def _mean(rows: Sequence[Row], entry: str) -> float:
    return statistics.fmean(row[entry] for row in rows)


def _spread(rows: Sequence[Row], entry: str) -> str:
    """Mean and standard deviation, the latter of several seeds alone."""
    mean = f"{_mean(rows, entry):.2f}"
    return mean if len(rows) == 1 else f"{mean} ± {statistics.stdev(row[entry] for row in rows):.2f}"


def _plot(rows: Sequence[Row], path: Path) -> None:
    """Error at the end against the multiply-adds that are left."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    lines: dict[str, list[tuple[float, float]]] = {}
    for budget, methods in summaries(rows).items():
        for method, found in methods.items():
            point = budget * _mean(found, "used"), _mean(found, "end")
            lines.setdefault(TITLES[method].partition(",")[0], []).append(point)
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.axhline(_mean(rows, "dense"), color="0.5", lw=0.8, label="dense")
    axes.set(xscale="log", xlabel="multiply-adds, of the dense network's", ylabel="test error, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
