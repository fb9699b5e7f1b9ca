"""Costs of random networks against counts of what ``compact`` makes of them.

``python tests/bench/fuzz_cost.py --cases 500 --seed 0`` takes about four minutes of one processor. A network is
a chain of random pieces: layers, layers of groups, depthwise layers in series, squeeze-and-excite, residual sums,
concatenations, modules that are used twice, gated halves, norms, and a flatten at the end; it has gates behind pieces
or where ``suggest_gates`` puts them. Six vectors of closed gates, from few to most, are drawn for each. The weights,
multiply-adds and parameters that ``NetworkCost`` says are left are compared with those of the compacted network, which
``Module.parameters`` and torch's counter count. The first difference is printed with its network and stops the run.
Where compaction leaves one unit of a dimension, it may be there only because none can't be: the cost may be less.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate, NetworkCost, insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names, name_gates

SIDE = 4


class Excited(nn.Module):
    """Squeeze and excite."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(size, inner, 1), nn.Conv2d(inner, size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Beside(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.relu(self.inner(x)))


def _piece(rng: random.Random, size: int, is_gated: bool) -> tuple[list[nn.Module], int]:
    """Some modules, and the number of maps that they return."""
    new = rng.choice((2, 4, 6, 8))

    def gate(size: int, chance: float = 0.7) -> list[nn.Module]:
        return [L0Gate(size, dim=1)] if is_gated and rng.random() < chance else []

    def conv(read: int, write: int, groups: int = 1) -> nn.Module:
        kernel = rng.choice((1, 3))
        return nn.Conv2d(read, write, kernel, padding=kernel // 2, groups=groups, bias=rng.random() < 0.7)

    def own(size: int) -> list[nn.Module]:
        return [conv(size, size, size), rng.choice((nn.ReLU, nn.Identity, nn.Tanh))(), *gate(size)]

    kind = rng.choice(("plain", "plain", "norm", "own", "groups", "excite", "sum", "beside", "twice", "halves", "many"))
    if kind == "own":
        return [module for _ in range(rng.choice((1, 2, 5, 20))) for module in own(size)], size
    if kind == "many":
        return [x for _ in range(rng.choice((3, 12))) for x in (conv(size, size), nn.ReLU(), *gate(size))], size
    if kind == "groups":
        return [conv(size, new, 2), nn.ReLU(), *gate(new)], new
    if kind == "excite":
        times = rng.choice((1, 2, 4))
        return [x for _ in range(times) for x in (Excited(size, rng.choice((2, 4))), *gate(size))], size
    if kind == "sum":
        return [
            Residual(nn.Sequential(conv(size, new), nn.ReLU(), *gate(new), conv(new, size), *gate(size, 0.4)))
        ], size
    if kind == "beside":
        branches = [nn.Sequential(conv(size, 4), *gate(4)), nn.Sequential(nn.ReLU(), *gate(size, 0.3))]
        return [Beside(*branches)], 4 + size
    if kind == "twice":
        return [Twice(nn.Sequential(conv(size, size), *gate(size)))], size
    if kind == "halves":
        return [conv(size, 2 * new), *gate(2 * new, 0.4), nn.GLU(1), *gate(new)], new
    norm = [nn.BatchNorm2d(new)] if kind == "norm" else []
    return [conv(size, new), *norm, nn.ReLU(), *gate(new)], new


def make(seed: int) -> tuple[nn.Module, Tensor]:
    """A network with gates, in float64 and evaluation mode, and an example."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    is_gated, size = rng.random() < 0.6, rng.choice((2, 4, 8))
    layers: list[nn.Module] = [nn.Conv2d(3, size, 3, padding=1), *([L0Gate(size, dim=1)] if is_gated else [])]
    for _ in range(rng.randint(1, 4)):
        more, size = _piece(rng, size, is_gated)
        layers += more
    if rng.random() < 0.5:
        layers += [nn.Flatten(), nn.Linear(size * SIDE**2, 3)]
    else:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, 5), nn.ReLU(), nn.Linear(5, 3)]
    network, x = nn.Sequential(*layers).double().eval(), torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
    if not is_gated:
        network = insert_gates(network, suggest_gates(network, x))
    name_gates(network)
    return network, x


def counts(network: nn.Module, example: Tensor, names: frozenset[str]) -> dict[str, float]:
    """Weights, multiply-adds and parameters by torch; of parameters those of some names, others are folded biases."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(example)
    found = {name: p for name, p in network.named_parameters() if name in names}
    return {
        "weights": sum(p.numel() for p in found.values() if p.dim() > 1),
        "macs": counter.get_total_flops() // 2 / len(example),
        "parameters": sum(p.numel() for p in found.values()),
    }


def difference(seed: int) -> str | None:
    """What is wrong with the costs of one random network; None if nothing is."""
    network, example = make(seed)
    gates = {site: gate.size for site, gate in gate_names(network).items()}
    if not gates:
        return None
    cost = NetworkCost(network, example)
    whole = {name: p.shape for name, p in network.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    for chance in (0.0, 0.01, 0.05, 0.2, 0.5, 0.9):
        active = {s: (torch.rand(n, generator=generator) >= chance).double() for s, n in gates.items()}
        small = compact(network, active, example).network
        right = counts(small, example, frozenset(whole))
        is_least = any(1 in p.shape and p.shape != whole[name] for name, p in small.named_parameters() if name in whole)
        for unit, count in right.items():
            measure: Callable[..., Tensor] = getattr(cost, unit)
            found = measure(active).item()
            if found > count or (found < count and not is_least):
                closed = {site: (z == 0).nonzero().flatten().tolist() for site, z in active.items()}
                return f"seed {seed}, {unit}: cost {found}, network {count}\n{network}\nclosed {closed}\n{small}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"seed {options.seed}", flush=True)
    refused = 0
    for seed in range(options.seed, options.seed + options.cases):
        try:
            found = difference(seed)
        except ValueError as error:
            if not str(error).startswith("Expected to count"):
                raise
            refused += 1
            print(f"seed {seed}: {error}", flush=True)
        else:
            if found is not None:
                sys.exit(found)
    print(f"{options.cases} cases, {refused} refused, no difference")


if __name__ == "__main__":
    main()
