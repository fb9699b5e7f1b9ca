"""Time of a training step with gates: python tests/bench/steps/bench_step.py

MLP 784-300-100, batch 100, fused Adam, one thread. All steps run in turn within one process; the ratios are those of
the medians over ``--rounds`` rounds. Baselines: the same loss written by hand on plain tensors (with this library's
KL function, so that only what lies around it is compared), and the dense network without gates. The likelihood is
the same call of ``cross_entropy`` in all of them.
``--torch`` instead takes the processor time of a plain loop with ``L0Gate`` and ``penalty``, at batches of 100 and 500
and compiled.
"""

from __future__ import annotations

import itertools
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.infer import L0_ELBO, AutoGate, factor
from pyro_l0.infer.elbo.elbo import Objective
from pyro_l0.maths import hard_concrete_kl, quadrature
from pyro_l0.nn import L0Gate, NetworkGates, penalty
from pyro_l0.nn.gate import name_gates
from tests.bench.timing import Step, medians, options_of, seconds_in_turn

NUM_DATA, BATCH, LAM, SIZES = 60_000, 100, 0.1, (784, 300, 100, 10)
GROUP_SIZES = {"net.0": 300.0, "net.3": 100.0, "net.6": 10.0}


class Model(nn.Module):
    """A gated network and its likelihood."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(SIZES):
            layers += [L0Gate(fan_in), nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor, y: Tensor) -> None:
        factor("y", -NUM_DATA * F.cross_entropy(self.net(x), y))  # as the examples do


class DenseModel(Model):
    """The same network without gates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for layer in self.net if not isinstance(layer, L0Gate)))


def library_step(objective: Objective, x: Tensor, y: Tensor) -> Step:
    """One step of ``L0_ELBO(...)(model, guide)`` with a torch optimiser."""
    model = Model()
    name_gates(model)
    loss = L0_ELBO(objective, lam=LAM, group_size=GROUP_SIZES)(model, AutoGate(model))
    loss(x, y)
    return _step(lambda: loss(x, y), loss)


def hand_step(objective: Objective, x: Tensor, y: Tensor) -> Step:
    """The same loss on plain tensors."""
    linear = nn.ModuleList([nn.Linear(m, n) for m, n in itertools.pairwise(SIZES)])
    log_alpha = nn.ParameterList([torch.full((n,), 0.6) for n in SIZES[:-1]])
    prior = torch.tensor(-1.6)
    beta, gamma, zeta = 2 / 3, -0.1, 1.1
    shift = beta * math.log(-gamma / zeta)
    stretch = quadrature.make_stretch(gamma, zeta, torch.float32)
    rule = quadrature.gauss_legendre(5, torch.float32)

    def loss() -> Tensor:
        h, penalty = x, torch.zeros(())
        for i, layer in enumerate(linear):
            u = torch.rand_like(log_alpha[i]).clamp(1e-7, 1 - 1e-7)
            s = torch.sigmoid((torch.log(u) - torch.log1p(-u) + log_alpha[i]) / beta)
            h = layer(h * (s * (zeta - gamma) + gamma).clamp(0, 1))
            h = F.relu(h) if i < 2 else h
            price = LAM * list(GROUP_SIZES.values())[i]
            penalty = penalty + price * torch.sigmoid(log_alpha[i] - shift).sum()
            if objective == "free_energy":
                kl = hard_concrete_kl.same_temperature(log_alpha[i], prior, beta, stretch, rule)
                penalty = penalty + kl.sum()
        return NUM_DATA * F.cross_entropy(h, y) + penalty

    return _step(loss, nn.ModuleList([linear, log_alpha]))


def dense_step(x: Tensor, y: Tensor) -> Step:
    net = DenseModel().net
    return _step(lambda: NUM_DATA * F.cross_entropy(net(x), y), net)


def torch_step(x: Tensor, y: Tensor, is_gated: bool, is_compiled: bool = False) -> Step:
    """One step of a plain loop, with L0Gates or dense."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(SIZES):
        layers += [L0Gate(fan_in)] * is_gated + [nn.Linear(fan_in, fan_out), nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    if is_gated:
        NetworkGates(net)  # draws all gates once a call
    prices = {site.removeprefix("net."): LAM * size for site, size in GROUP_SIZES.items()}

    def loss() -> Tensor:
        task = NUM_DATA * F.cross_entropy(net(x), y)
        return task + penalty(net, prices) if is_gated else task

    return _step(torch.compile(loss, fullgraph=True) if is_compiled else loss, net)


def time_torch(rounds: int) -> None:
    """Plain loops, each beside the dense network's."""
    for batch in (100, 500):
        x, y = torch.rand(batch, SIZES[0]), torch.randint(0, 10, (batch,))
        kinds = {"": False, ", compiled": True}
        steps = {f"dense{kind}": torch_step(x, y, False, compiled) for kind, compiled in kinds.items()}
        steps |= {f"L0Gate{kind}": torch_step(x, y, True, compiled) for kind, compiled in kinds.items()}
        seconds = medians(seconds_in_turn(steps, rounds, 20, time.process_time))
        for kind in kinds:
            dense, gated = seconds[f"dense{kind}"], seconds[f"L0Gate{kind}"]
            figures = f"dense {1e3 * dense:.3f} ms, L0Gate {1e3 * gated:.3f} ms, ratio {gated / dense:.3f}"
            print(f"batch {batch}{kind}: {figures}")


def svi_step(objective: Objective | None, x: Tensor, y: Tensor) -> Step:
    """One step of Pyro's SVI: with gates, or of the dense network if there is no objective."""
    model = Model() if objective is not None else DenseModel()

    def registered(x: Tensor, y: Tensor) -> None:
        pyro.module("svi " + str(objective), model)
        model(x, y)

    adam = pyro.optim.Adam({"lr": 1e-3, "fused": True})
    if objective is None:
        svi = SVI(registered, lambda x, y: None, adam, Trace_ELBO())
    else:
        name_gates(model)
        loss = L0_ELBO(objective, lam=LAM, group_size=GROUP_SIZES)
        svi = SVI(registered, AutoGate(registered), adam, loss)
    return lambda: svi.step(x, y)


def _step(loss: Callable[[], Tensor], module: nn.Module) -> Step:
    optimiser = torch.optim.Adam(module.parameters(), 1e-3, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return step


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--svi", action="store_true", help="processor time of Pyro's SVI, and nothing else")
    parser.add_argument("--torch", action="store_true", help="plain loops with L0Gate, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.rand(BATCH, SIZES[0]), torch.randint(0, 10, (BATCH,))
    if options.torch:
        time_torch(options.rounds)
        return
    if options.svi:
        steps = {"dense": dense_step(x, y), "dense, SVI": svi_step(None, x, y)}
        for name in ("l0", "free_energy"):
            steps |= {name: library_step(name, x, y), f"{name}, SVI": svi_step(name, x, y)}
        seconds = medians(seconds_in_turn(steps, options.rounds, 5, time.process_time))
        for name, value in seconds.items():
            print(f"{name:24s}{1e3 * value:8.3f} ms a step, / dense by SVI {value / seconds['dense, SVI']:6.3f}")
        return
    steps = {
        "dense": dense_step(x, y),
        "l0": library_step("l0", x, y),
        "l0 by hand": hand_step("l0", x, y),
        "free_energy": library_step("free_energy", x, y),
        "free_energy by hand": hand_step("free_energy", x, y),
    }
    seconds = medians(seconds_in_turn(steps, options.rounds, 20))
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, {options.rounds} rounds in turn")
    for name, value in seconds.items():
        print(f"{name:24s}{1e3 * value:8.3f} ms a step")
    for name, base in (
        ("l0", "l0 by hand"),
        ("free_energy", "free_energy by hand"),
        ("l0", "dense"),
        ("free_energy", "dense"),
        ("l0 by hand", "dense"),
    ):
        print(f"{name + ' / ' + base:40s}{seconds[name] / seconds[base]:8.3f}")


if __name__ == "__main__":
    main()
