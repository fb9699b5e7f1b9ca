"""Budgets beside Cooper's: python tests/bench/pruning/bench_budgets.py --data-dir MNIST --out FILE

The three budgets that Gallego-Posada et al. (2022, arXiv:2208.04425) give their constrained hard concrete on MNIST, by
``SparsityTarget`` and by Cooper itself (``pip install --no-deps cooper-optim==1.0.1``), with one loop: the gates and
their start, batches of 128, Adam at 7e-4 for the weights and no weight decay, all as in the paper, and averaged
weights. Cooper has the paper's dual ascent (plain gradient steps on the multipliers of the *expected* numbers of gates,
at a rate of 1e-4 for 200 epochs), dual restarts, the gates' rate and limits, and medians as deterministic gates.

Methods: ``budget`` gives a target what Cooper is given, as a bound on the *open* gates: those of each site, or of all
sites with as many parameters as each switches alone. ``size`` gives it what the paper's networks had left in the end,
parameters and for LeNet-5 multiply-adds. ``cooper`` is the rival. Errors are of the test images at the last epoch, and
what is left is counted as in the paper's repository: parameters with biases, and a multiply-add for every weight's use,
bias, pooled value and rectified one.

FILE gets a JSON line per run; what is there is not run again. ``--cells``, ``--methods``, ``--seeds`` and ``--epochs``
(of the MLP and LeNet-5) choose runs. ``--table`` prints what is there, and ``--seconds`` times a step of the full
networks by each method, in turns.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.averages import Average
from common.data import Images, load_mnist
from common.mnist_run import Options, Run
from common.networks import NetworkName
from pyro_l0.compaction import compact
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import fix_gates
from tests.bench.timing import medians, options_of, seconds_in_turn

BATCH, LEARNING_RATE, DUAL_RATE, EPOCHS = 128, 7e-4, 1e-4, 200
TIMED_STEPS = 20
LIMIT = math.log(100)  # of the rival's log alpha, either way
Gates = Mapping[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """A network with a budget, and what the paper's repository reports.

    Attributes:
        network: name of the network.
        budget: largest expected density: of all gates, in parameters that they switch, or of each site.
        published: test error, parameters and multiply-adds in percent, each with its 95 % interval.
    """

    network: NetworkName
    budget: tuple[float, ...]
    published: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]

    @property
    def size(self) -> dict[str, float]:
        """The fractions that the paper's networks had left, as budgets."""
        sizes = {"parameters": self.published[1][0] / 100, "macs": self.published[2][0] / 100}
        return sizes if self.network == "lenet5" else {"parameters": sizes["parameters"]}


# get_results/saved_dataframes/*_table_normalized.csv of github.com/gallego-posada/constrained_sparsity
CELLS = {
    "mlp": Cell("mlp", (0.33,), ((1.768, 0.081), (26.576, 0.346), (26.661, 0.347))),
    "mlp-layers": Cell("mlp", (0.3, 0.3, 0.3), ((2.192, 0.115), (7.588, 0.133), (7.617, 0.133))),
    "lenet5-layers": Cell("lenet5", (0.5, 0.3, 0.7, 0.1), ((0.906, 0.053), (2.349, 0.098), (14.864, 0.305))),
}
FULL = {"mlp": (266_610, 267_010), "lenet5": (431_080, 2_327_130)}  # all_models_stats.csv of that repository
METHODS = ("budget", "size", "cooper")


class BudgetRun(Run):
    """A run towards a cell's budget, or its published size, by a target."""

    def __init__(self, images: Images, cell: Cell, epochs: int, seed: int, is_size: bool, shrink: bool = True) -> None:
        self.cell, self.is_size = cell, is_size
        super().__init__(images, run_options(cell, epochs, seed, shrink))

    def _target(self) -> SparsityTarget:
        steps = self.options.epochs * self.batches
        if self.is_size:
            counts: dict[str, Callable[[Gates], Tensor]] = {name: getattr(self.cost, name) for name in self.cell.size}
            costs = {name: lambda gates, count=count: count(self.full(gates)) for name, count in counts.items()}
            return SparsityTarget(self.guide, self.cell.size, costs, steps=steps)
        sites = list(self.group_sizes)
        if len(self.cell.budget) > 1:
            return SparsityTarget(self.guide, dict(zip(sites, self.cell.budget, strict=True)), steps=steps)
        return SparsityTarget(
            self.guide, self.cell.budget[0], lambda gates: self.switched(self.full(gates)), steps=steps
        )

    def switched(self, active: Gates) -> Tensor:
        """The parameters that gates switch, each with all others open."""
        return torch.stack([p.sum() * self.group_sizes[site] for site, p in active.items()]).sum()

    def deterministic(self) -> dict[str, Tensor]:
        """The gates of the network that counts."""
        return dict(self.guide.test_gates())


class CooperRun(BudgetRun):
    """A run towards a cell's budget by Cooper, in whose hands the steps are."""

    def _target(self) -> None:
        """None; the constraint is made with the optimiser, which holds it."""

    def _optimiser(self) -> torch.optim.Adam:
        import cooper

        weights = [p for p in self.model.parameters() if p.requires_grad]
        faster = EPOCHS / self.options.epochs  # in a shorter training gates and multipliers go as far
        gates = {"params": list(self.guide.parameters()), "lr": LEARNING_RATE * faster}
        primal = torch.optim.Adam([{"params": weights}, gates], LEARNING_RATE, fused=True)
        self.multiplier = cooper.multipliers.DenseMultiplier(num_constraints=len(self.cell.budget))
        constraint = cooper.Constraint(cooper.ConstraintType.INEQUALITY, multiplier=self.multiplier)
        limits = torch.tensor(self.cell.budget)
        full = self.switched({site: torch.ones(gate.shape) for site, gate in self.guide.test_gates().items()})

        class Problem(cooper.ConstrainedMinimizationProblem):
            """The mean loss, with expected densities that exceed their limits."""

            def __init__(self) -> None:
                super().__init__()
                self.density = constraint

            def compute_cmp_state(problem, x: Tensor, y: Tensor) -> Any:  # noqa: N805
                active = {site: gate.active_prob for site, gate in self.guide.posterior().items()}
                is_whole = len(limits) == 1
                one = (self.switched(active) / full).view(1) if is_whole else None
                density = torch.stack([p.mean() for p in active.values()]) if one is None else one
                state = cooper.ConstraintState(violation=density - limits)
                return cooper.CMPState(self.loss(x, y) / len(self.train_x), {constraint: state})

        dual = torch.optim.SGD(self.multiplier.parameters(), DUAL_RATE * faster, maximize=True)
        self.cooper = cooper.optim.SimultaneousOptimizer(Problem(), primal, dual)
        return primal

    def train_epoch(self) -> float:
        """One pass over the training images in a new order; the mean loss per example."""
        average = Average(self.averaged, self.weights, self.steps)
        batches = self.shuffled()
        total = torch.zeros(())
        for index in batches:
            rolled = self.cooper.roll({"x": self.train_x[index], "y": self.train_y[index]})
            (violated,) = (state.violation > 0 for state in rolled.cmp_state.observed_constraints.values())
            self.multiplier.weight.data *= violated  # a dual restart, which Cooper has no more
            for location in self.guide.locations():
                location.data.clamp_(-LIMIT, LIMIT)
            average.update()
            total += rolled.loss.detach()
        self.steps = average.steps
        return float(total) / len(batches)

    def deterministic(self) -> dict[str, Tensor]:
        """Medians, as in the paper."""
        return {site: gate.median for site, gate in self.guide.posterior().items()}


def run_options(cell: Cell, epochs: int, seed: int, shrink: bool) -> Options:
    """What all methods share."""
    same: dict[str, Any] = {"data": "mnist", "network": cell.network, "lam": (0.0,), "shrink": shrink}
    return Options(**same, epochs=epochs, seed=seed, batch_size=BATCH, learning_rate=LEARNING_RATE)


def counts(network: nn.Module, example: Tensor) -> tuple[int, int]:
    """Parameters and multiply-adds of a plain network, as in the paper's repository."""
    macs = [0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            of_bias = 0 if module.bias is None else 1
            macs[0] += output.numel() * (module.weight[0].numel() + of_bias)
        elif isinstance(module, nn.MaxPool2d):
            macs[0] += inputs[0].numel()
        elif isinstance(module, nn.ReLU):
            # The paper's networks rectify what is left after pooling.
            macs[0] += output.numel() // (4 if output.dim() == 4 else 1)

    hooks = [module.register_forward_hook(count) for module in network.modules()]
    network(example)
    for hook in hooks:
        hook.remove()
    return sum(p.numel() for p in network.parameters()), macs[0]


def make(images: Images, cell: Cell, method: str, epochs: int, seed: int, shrink: bool = True) -> BudgetRun:
    """A run by one of the methods; the rival's gates never close far enough for units to leave."""
    kind = CooperRun if method == "cooper" else BudgetRun
    return kind(images, cell, epochs, seed, method == "size", shrink and method != "cooper")


def train(images: Images, name: str, method: str, epochs: int, seed: int) -> dict[str, Any]:
    """Train by a method, and measure."""
    cell = CELLS[name]
    run = make(images, cell, method, epochs, seed)
    start = time.process_time()
    for _ in range(epochs):
        run.train_epoch()
        if run.shrinker is not None:
            run.shrinker.step()
    seconds = time.process_time() - start
    gates = run.deterministic()
    small = compact(run.plain(), gates, run.test_x[:100], before=run.plans).network
    full, left = FULL[cell.network], counts(small, run.test_x[:1])
    is_open = run.full({site: (gate != 0).float() for site, gate in gates.items()})
    active = run.full({site: gate.active_prob.detach() for site, gate in run.guide.posterior().items()})
    return {
        "cell": name,
        "method": method,
        "epochs": epochs,
        "seed": seed,
        "error": run.error(fix_gates(run.plain(), gates)),
        "parameters": 100 * left[0] / full[0],
        "macs": 100 * left[1] / full[1],
        "open": [int(gate.sum()) for gate in is_open.values()],
        "used": used(run, is_open),
        "expected": used(run, active),
        "seconds": seconds,
    }


def used(run: BudgetRun, active: Gates) -> list[float]:
    """Densities by constraint, over the budgets."""
    full = {site: torch.ones_like(p) for site, p in active.items()}
    if run.is_size:
        pairs = [(getattr(run.cost, name), limit) for name, limit in run.cell.size.items()]
        return [float(cost(active) / cost(full)) / limit for cost, limit in pairs]
    if len(run.cell.budget) == 1:
        return [float(run.switched(active) / run.switched(full)) / run.cell.budget[0]]
    return [float(p.mean()) / limit for p, limit in zip(active.values(), run.cell.budget, strict=True)]


def interval(values: list[float]) -> str:
    """Mean and 95 % interval, as in the paper: 1.96 standard errors."""
    mean = f"{statistics.mean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {1.96 * statistics.stdev(values) / math.sqrt(len(values)):.2f}"


def table(rows: list[dict[str, Any]]) -> str:
    """The runs by cell, method and epochs, beside what the paper's repository has."""
    lines = ["| cell | method | epochs | seeds | error % | parameters % | multiply-adds % | of its budget | seconds |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, cell in CELLS.items():
        published = " | ".join(f"{mean:.2f} ± {half:.2f}" for mean, half in cell.published)
        lines.append(f"| {name} | published | {EPOCHS} | 5 | {published} | | |")
        own = [row for row in rows if row["cell"] == name]
        for method, epochs in sorted({(row["method"], row["epochs"]) for row in own}):
            group = [row for row in own if (row["method"], row["epochs"]) == (method, epochs)]
            shown = [interval([row[key] for row in group]) for key in ("error", "parameters", "macs")]
            key = "expected" if method == "cooper" else "used"
            values = list(itertools.chain.from_iterable(row[key] for row in group))
            seconds = statistics.mean(row["seconds"] for row in group)
            spread = f"{min(values):.3f} to {max(values):.3f} | {seconds:.0f}"
            lines.append(f"| {name} | {method} | {epochs} | {len(group)} | {' | '.join(shown)} | {spread} |")
    return "\n".join(lines)


def time_steps(images: Images, rounds: int) -> None:
    """Processor milliseconds of a step of the full networks by each method in turns, while gates move."""
    first = slice(BATCH * TIMED_STEPS)
    few = Images(images.train_x[first], images.train_y[first], images.test_x, images.test_y, images.image_shape)
    for name, cell in CELLS.items():
        runs = {method: make(few, cell, method, 5_000, 0, shrink=False) for method in ("budget", "cooper")}
        target = runs["budget"].target
        assert target is not None
        target.step = target.start
        steps = {method: run.train_epoch for method, run in runs.items()}
        seconds = medians(seconds_in_turn(steps, rounds, clock=time.process_time))
        shown = (f"{method} {1000 * value / TIMED_STEPS:.2f} ms" for method, value in seconds.items())
        print(f"{name}: {', '.join(shown)}", flush=True)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", choices=CELLS, nargs="+", default=list(CELLS))
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3, 4, 5))
    parser.add_argument("--epochs", type=int, nargs=2, default=(EPOCHS, EPOCHS), metavar=("MLP", "LENET5"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seconds", type=int, metavar="ROUNDS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = load_mnist(options.data_dir)
    if options.seconds:
        time_steps(images, options.seconds)
        return
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["cell"], row["method"], row["epochs"], row["seed"]) for row in rows}
    wanted = itertools.product(options.seeds, options.cells, options.methods)
    for seed, name, method in () if options.table else wanted:
        epochs = options.epochs[CELLS[name].network == "lenet5"]
        if (name, method, epochs, seed) not in done:
            rows.append(train(images, name, method, epochs, seed))
            with options.out.open("a") as file:
                print(json.dumps(rows[-1]), file=file)
    print(table(rows))


if __name__ == "__main__":
    main()
