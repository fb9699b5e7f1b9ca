"""What each of the faster ways buys: python tests/bench/steps/bench_fast.py

Training steps with one flag of ``pyro_l0.fast`` closed, over the same steps with all on; MLP 784-300-100 at several
batch sizes, fused Adam, and with ``--wrn DEPTH WIDTH`` a wide residual network at a batch of 128 in place of it. One
network takes all ways in turn, in one process and on one thread. Times are the process's own, so that a machine that
does other work disturbs them little; printed is the median over ``--rounds`` rounds of the ratio within a round.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from cifar_wrn import Options, Run
from common.data import Images
from pyro_l0 import fast
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.infer.elbo.elbo import Objective
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.square_norms import square_norms
from tests.bench.steps.bench_step import GROUP_SIZES, LAM, NUM_DATA, SIZES, Model
from tests.bench.timing import Step, medians, options_of, seconds_in_turn

# The flags that a loss meets; "all" switches every one off.
FLAGS: dict[Objective, tuple[str, ...]] = {
    "l0": ("joint_draws", "gated_weights", "record", "all"),
    "free_energy": ("joint_draws", "kl", "gated_weights", "record", "all"),
}


def mlp_step(objective: Objective, batch: int) -> Step:
    """A step of the MLP; Eq. 22 with the expected weight decay."""
    torch.manual_seed(0)
    x, y = torch.rand(batch, SIZES[0]), torch.randint(0, 10, (batch,))
    model = Model()
    name_gates(model)
    decay = {"weight_decay": 5e-4 * NUM_DATA} if objective == "l0" else {}
    norms = square_norms(model.net, x[:1]) if decay else None
    elbo = L0_ELBO(objective, lam=LAM, group_size=GROUP_SIZES, square_norm=norms, **decay)
    loss = elbo(model, AutoGate(model))
    loss(x, y)
    optimiser = torch.optim.Adam(loss.parameters(), 1e-3, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        loss(x, y).backward()
        optimiser.step()

    return step


def wrn_step(depth: int, width: int, batch: int) -> Step:
    """A step of the wide residual network as the example takes it."""
    x, y = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (batch,))
    run = Run(Images(x, y, x[:2], y[:2], (3, 32, 32)), Options(depth=depth, width=width))
    run.net.train()
    index = torch.arange(batch)

    def step() -> None:
        run.optimiser.zero_grad()
        (run.loss(*run.batch(index)) / len(run.train_x)).backward()
        run.optimiser.step()

    return step


def without(step: Step, flag: str) -> Step:
    def run() -> None:
        with fast.disabled(*(() if flag == "all" else (flag,))):
            step()

    return run


def ratios(step: Step, flags: tuple[str, ...], rounds: int, repeats: int) -> tuple[float, dict[str, float]]:
    """Median seconds of a step with all flags on, and the median ratio to it with each of some off."""
    steps = {"none": step, **{flag: without(step, flag) for flag in flags}}
    seconds = seconds_in_turn(steps, rounds, repeats, time.process_time)
    base = seconds.pop("none")
    found = {flag: [x / b for x, b in zip(values, base, strict=True)] for flag, values in seconds.items()}
    return statistics.median(base), medians(found)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--objectives", nargs="+", choices=FLAGS, default=list(FLAGS))
    parser.add_argument("--batches", type=int, nargs="+", default=[100, 250, 500])
    parser.add_argument("--wrn", type=int, nargs=2, metavar=("DEPTH", "WIDTH"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.wrn is not None:
        depth, width = options.wrn
        settings = [(f"WRN-{depth}-{width}, 128", lambda: wrn_step(depth, width, 128), FLAGS["l0"], 1)]
    else:
        settings = [
            (f"MLP, {objective}, {batch}", partial(mlp_step, objective, batch), FLAGS[objective], 5)
            for objective in options.objectives
            for batch in options.batches
        ]
    for name, make, flags, repeats in settings:
        base, found = ratios(make(), flags, options.rounds, repeats)
        each = ", ".join(f"{flag} {ratio:.3f}" for flag, ratio in found.items())
        print(f"{name:24s}{1e3 * base:9.2f} ms a step; closed: {each}", flush=True)


if __name__ == "__main__":
    main()
