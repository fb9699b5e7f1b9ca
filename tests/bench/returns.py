"""Returns into a package that was left before, in the order of first calls: python tests/bench/returns.py

A reader follows `prune`, `compact`, `fit` or a step of `L0_ELBO` function by function, each once, in the order in which
they are first called. A return is a step into a package that he has left before. The numbers behind it are those with
the first, the first two ... packages of ``TOGETHER`` taken as one with another.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import pyro_l0
from pyro_l0 import BernoulliGate, HardConcrete, prune
from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, fit
from pyro_l0.nn import insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names

ROOT = Path(pyro_l0.__file__).parent
TOGETHER = {"fast": "nn", "training": "pruning", "callbacks": "pruning", "maths": "distributions", "compaction": "nn"}


def packages(run: Callable[[], object]) -> list[str]:
    """The package of each function of ours that a call runs, in the order of their first calls."""
    seen, found = set(), []

    def note(frame: FrameType, event: str, _: object) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and code not in seen and ROOT in path.parents and not code.co_name.startswith("<"):
            seen.add(code)
            found.append(path.relative_to(ROOT).parts[0])

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def returns(visited: Sequence[str]) -> int:
    """How often a package is entered that was left before."""
    entered = [name for before, name in zip(["", *visited], visited, strict=False) if name != before]
    return len(entered) - len(set(entered))


def spike_slab(x: Tensor, y: Tensor) -> None:
    with pyro.plate("features", 6):
        z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.2)))
        slab = pyro.sample("slab", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 60):
        pyro.sample("y", dist.Normal(x @ (z * slab), 0.5), obs=y)


def gated(x: Tensor, y: Tensor) -> None:
    weights = pyro.param("weights", torch.zeros(6))
    with pyro.plate("features", 6):
        z = pyro.sample("z", HardConcrete(log_alpha=torch.tensor(0.0)))
    with pyro.plate("rows", 60):
        pyro.sample("y", dist.Normal(x @ (z * weights), 0.5), obs=y)


def main() -> None:
    warnings.simplefilter("ignore")
    pyro.set_rng_seed(0)
    network = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    batch = torch.randn(32, 10), torch.randint(0, 3, (32,))
    layer = insert_gates(network, suggest_gates(network, batch[0]), batch[0])
    closed = {site: (torch.arange(gate.size) % 2).float() for site, gate in gate_names(layer).items()}
    x = torch.randn(60, 6)
    y = x[:, 0] + 0.5 * torch.randn(60)
    guide = AutoSpikeSlab(spike_slab, slab={"slab": "z"})
    svi = SVI(gated, AutoGate(gated), pyro.optim.Adam({"lr": 0.01}), L0_ELBO())
    runs: dict[str, Callable[[], object]] = {
        "prune": lambda: prune(network, F.cross_entropy, [batch, batch], batch[0], 0.5, epochs=40),
        "compact": lambda: compact(layer, closed, batch[0]),
        "fit": lambda: fit(spike_slab, guide, x, y, steps=30, seed=0),
        "step": lambda: svi.step(x, y),
    }
    for name, run in runs.items():
        visited = packages(run)
        joined = [returns([dict([*TOGETHER.items()][:k]).get(room, room) for room in visited]) for k in range(1, 6)]
        print(f"{name:8} {len(visited)} functions, {returns(visited)} returns, joined {joined}")


if __name__ == "__main__":
    main()
