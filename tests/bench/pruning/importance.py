"""Pruning by importance scores of units: what gates are compared with, at equal steps and multiply-adds.

Each score says what a unit is worth; units of the least worth close, round by round, until the multiply-adds are
within the budget of the round, and a closed unit stays closed. The budget falls to its final value by a cubic in 30
rounds over 2 % to 75 % of the steps; then BatchNorm's statistics are renewed and the rest of the steps trains what is
left. Units and their costs come from the library, so that residual sums count.

- l1: the absolute weights that write and read a unit, each over their layer's mean, as Torch-Pruning normalises them;
  the same fraction of every site closes.
- l1_global: the same numbers, ranked over all sites.
- taylor: mean over batches of the squared derivative of the batch's loss by the gate (Molchanov et al. 2019,
  arXiv:1906.10771, eq. 8), over the multiply-adds that leave with the unit.
- fisher: mean over examples of the squared derivative of an example's loss by the gate (Theis et al. 2018,
  arXiv:1801.05787, eq. 5 and 9), over the multiply-adds likewise.

A site keeps at least one unit; with ``taylor_floor`` and ``fisher_floor`` three quarters of what the same fraction of
every site would leave, as with gates.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_l0.nn import NetworkCost, fix_gates
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.engine.readers import Use, find_readers, find_writers
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names, name_gates

__all__ = ["SCORES", "Batches", "Outcome", "Units", "derivatives", "prune_by_importance", "train"]

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets; a mean over the examples
Batches = Iterable[tuple[Tensor, Tensor]]  # one pass over the data, each time it is iterated over

LEARNING_RATE = 1e-3
ROUNDS = 30
GRID = 1000  # of fractions
FLOOR = 0.75
START, CUT = 0.02, 0.75  # of the steps
SCORE_BATCHES, RENEWAL_BATCHES = 10, 20
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Outcome(NamedTuple):
    """A pruned network with its gates fixed, and how it did."""

    network: nn.Module
    gates: dict[str, Tensor]
    cut: float  # what was measured when the last unit had closed
    end: float  # and after the last step
    fraction: float  # multiply-adds that are left, of the full network's


class Units:
    """The units of a gated network that can close: a copy whose gates are fixed to 1, or 0 later, and what each costs.

    ``network`` is the copy, which is trained; ``gates`` has its gates' values by site, of which a change acts at once.
    """

    def __init__(self, gated: nn.Module, example: Tensor) -> None:
        sizes = {site: gate.size for site, gate in name_gates(gated).items()}
        self._cost = NetworkCost(gated, example)
        maps = analyse(record(gated, example), {}).maps
        self._uses = [use for use in (*find_writers(maps), *find_readers(maps)) if use.weight.names]
        self.network = fix_gates(gated, {site: torch.ones(size) for site, size in sizes.items()})
        paths: dict[nn.Module, str] = {module: path for path, module in gated.named_modules()}
        fixed = {site: self.network.get_submodule(paths[gate]) for site, gate in gate_names(gated).items()}
        self.layers = {site: layer for site, layer in fixed.items() if isinstance(layer, FixedGate)}
        self.gates = {site: layer.value for site, layer in self.layers.items()}

    def fraction(self, gates: Mapping[str, Tensor]) -> float:
        """Multiply-adds with given gates, of those with every gate open."""
        return float(self._cost.macs(gates)) / self._cost.total_macs

    def prices(self) -> dict[str, Tensor]:
        """By site, the multiply-adds that leave with each unit, of those with every gate open; shape ``(size,)``."""
        active = {site: gate.clone().requires_grad_() for site, gate in self.gates.items()}
        macs = self._cost.macs(active) / self._cost.total_macs
        found = torch.autograd.grad(macs, list(active.values()), materialize_grads=True)
        return dict(zip(active, found, strict=True))

    def norms(self) -> dict[str, Tensor]:
        """By site, how large the weights are that write and read each unit; shape ``(size,)``.

        Of each layer it is the sum of the absolute weights in the unit's slice, without those of closed units on the
        other side, over the mean of the open units; and of several layers, the mean.
        """
        with torch.no_grad():
            named = dict(self.network.named_parameters(remove_duplicate=False))
            weights = {use.weight.names[0]: named[use.weight.names[0]].abs() for use in self._uses}
            for use in self._uses:
                if use.groups == 1:  # in groups, no column is read by all
                    _by_entry(weights[use.weight.names[0]], use)[use.entries[self._is_closed(use)]] = 0.0
            totals = {site: torch.zeros_like(gate) for site, gate in self.gates.items()}
            layers = dict.fromkeys(totals, 0)
            for use in self._uses:
                entries = _by_entry(weights[use.weight.names[0]], use).flatten(1).sum(1)
                norms = torch.zeros_like(totals[use.site])
                norms.index_add_(0, torch.from_numpy(use.units), entries[torch.from_numpy(use.entries)])
                mean = norms[self.gates[use.site] > 0].mean()
                totals[use.site] += norms / mean if mean > 0 else norms
                layers[use.site] += 1
        return {site: total / max(layers[site], 1) for site, total in totals.items()}

    def _is_closed(self, use: Use) -> Any:
        return self.gates[use.site].numpy()[use.units] == 0

    def close(self, scores: Mapping[str, Tensor], budget: float, least: Mapping[str, int]) -> None:
        """Close open units of the least score until the multiply-adds are within a budget, but for so many of a site.

        Units that a later one made needless reopen, the best first.
        """
        places: list[tuple[float, int, str]] = []
        start = 0
        for site, gate in self.gates.items():
            is_open = gate.nonzero().flatten()
            ranked = is_open[scores[site][is_open].argsort(descending=True, stable=True)]
            places += [(float(scores[site][unit]), start + unit, site) for unit in ranked[least[site] :].tolist()]
            start += len(gate)
        places.sort()
        order = torch.tensor([place for _, place, _ in places], dtype=torch.long)
        before = torch.cat(list(self.gates.values()))

        def closed(number: int) -> Tensor:
            return before.index_fill(0, order[:number], 0.0)

        number = bisect.bisect_left(range(len(places) + 1), True, key=lambda n: self._fits(closed(n), budget))
        if number > len(places):
            smallest = self.fraction(self._apart(closed(len(places))))
            raise ValueError(f"Expected a budget of at least {smallest:.3g}, that of {dict(least)}, but got {budget}.")
        gates, full = closed(number), set[str]()
        for _, place, site in reversed(places[:number]):
            if site not in full:
                gates[place] = 1.0
                if not self._fits(gates, budget):
                    gates[place] = 0.0
                    full.add(site)
        for site, gate in self._apart(gates).items():
            self.gates[site].copy_(gate)

    def least(self, budget: float, floor: float) -> dict[str, int]:
        """By site, a part of the number of units that the same fraction of every site leaves within a budget."""

        def number(kept: int, size: int) -> int:
            return max(1, round(kept / GRID * size))

        def exceeds(kept: int) -> bool:
            first = {site: torch.arange(len(gate)) < number(kept, len(gate)) for site, gate in self.gates.items()}
            return self.fraction({site: gate.float() for site, gate in first.items()}) > budget

        kept = max(0, bisect.bisect_left(range(GRID + 1), True, key=exceeds) - 1)
        return {site: max(1, round(floor * number(kept, len(gate)))) for site, gate in self.gates.items()}

    def _fits(self, gates: Tensor, budget: float) -> bool:
        return self.fraction(self._apart(gates)) <= budget

    def _apart(self, gates: Tensor) -> dict[str, Tensor]:
        sizes = [len(gate) for gate in self.gates.values()]
        return dict(zip(self.gates, gates.split(sizes), strict=True))


def _by_entry(weight: Tensor, use: Use) -> Tensor:
    """A weight with what reads or writes one entry in each row; a view, unless in groups."""
    if use.groups == 1:
        return weight.movedim(use.dim, 0)
    parts: Tensor = weight.unflatten(0, (use.groups, -1)).movedim(2, 1)  # groups, their inputs, their outputs
    return parts.flatten(0, 1)


def derivatives(units: Units, x: Tensor, y: Tensor, loss_fn: Loss) -> dict[str, Tensor]:
    """By site, the derivative of each example's loss by each gate, shape ``(examples, size)``; in evaluation mode."""
    probes = {site: torch.ones(len(x), len(gate), requires_grad=True) for site, gate in units.gates.items()}

    def multiply(probe: Tensor, layer: FixedGate, inputs: tuple[Tensor]) -> Tensor:
        shape = [1] * inputs[0].dim()
        shape[0], shape[layer.dim] = probe.shape
        return inputs[0] * probe.view(shape)

    hooks = [layer.register_forward_pre_hook(partial(multiply, probes[site])) for site, layer in units.layers.items()]
    units.network.eval()
    try:
        loss = loss_fn(units.network(x), y)
    finally:
        for hook in hooks:
            hook.remove()
    found = torch.autograd.grad(len(x) * loss, list(probes.values()))
    return dict(zip(probes, found, strict=True))


def _l1(units: Units, batches: Batches, loss_fn: Loss) -> dict[str, Tensor]:
    """The rank within the site, which closes the same fraction of each."""
    ranks = {}
    for site, norms in units.norms().items():
        order = torch.where(units.gates[site] > 0, norms, -1.0).argsort().argsort()
        ranks[site] = (order + 1) / len(order)
    return ranks


def _l1_global(units: Units, batches: Batches, loss_fn: Loss) -> dict[str, Tensor]:
    return units.norms()


def _taylor(units: Units, batches: Batches, loss_fn: Loss) -> dict[str, Tensor]:
    return _per_price(units, batches, loss_fn, lambda found: found.mean(0).square())


def _fisher(units: Units, batches: Batches, loss_fn: Loss) -> dict[str, Tensor]:
    return _per_price(units, batches, loss_fn, lambda found: found.square().mean(0))


def _per_price(units: Units, batches: Batches, loss_fn: Loss, reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What the derivatives by the gates are over some batches, per unit of cost; infinite for units without a cost."""
    totals = {site: torch.zeros_like(gate) for site, gate in units.gates.items()}
    for x, y in itertools.islice(batches, SCORE_BATCHES):
        for site, found in derivatives(units, x, y, loss_fn).items():
            totals[site] += reduce(found)
    prices = units.prices()
    return {site: torch.where(prices[site] > 0, total / prices[site], torch.inf) for site, total in totals.items()}


SCORES: dict[str, Callable[[Units, Batches, Loss], dict[str, Tensor]]] = {
    "l1": _l1,
    "l1_global": _l1_global,
    "taylor": _taylor,
    "taylor_floor": _taylor,
    "fisher": _fisher,
    "fisher_floor": _fisher,
}


def prune_by_importance(
    gated: nn.Module,
    score: str,
    budget: float,
    batches: Batches,
    steps: int,
    loss_fn: Loss,
    example: Tensor,
    measure: Callable[[nn.Module], float],
) -> Outcome:
    """Prune a trained network in rounds by a score to a fraction of its multiply-adds, and train it on.

    ``measure`` is what is to be known of the network when it is pruned and at the end, such as its error.
    """
    units = Units(gated, example)
    least = units.least(budget, FLOOR if score.endswith("_floor") else 0.0)
    first, last = START * steps, CUT * steps
    rounds = {int(first + (last - first) * number / ROUNDS): number / ROUNDS for number in range(1, ROUNDS + 1)}
    cut = math.nan

    def prune(step: int) -> None:
        nonlocal cut
        if step in rounds:
            so_far = budget + (1 - budget) * (1 - rounds[step]) ** 3
            units.close(SCORES[score](units, batches, loss_fn), so_far, least)
            if rounds[step] == 1:
                renew_statistics(units.network, batches)
                cut = measure(units.network)

    train(units.network, batches, steps, loss_fn, prune)
    gates = {site: gate.clone() for site, gate in units.gates.items()}
    return Outcome(units.network, gates, cut, measure(units.network), units.fraction(gates))


def train(
    network: nn.Module,
    batches: Batches,
    steps: int,
    loss_fn: Loss,
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train in place by Adam, whose steps fall to 0 by a cosine over the last quarter."""
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, partial(_rate, steps=steps))
    for step, (x, y) in enumerate(itertools.islice(_endless(batches), steps)):
        before_step(step)
        network.train()
        optimiser.zero_grad()
        loss_fn(network(x), y).backward()
        optimiser.step()
        schedule.step()


def _rate(step: int, steps: int) -> float:
    done = max(0.0, (step / steps - CUT) / (1 - CUT))
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))


@torch.no_grad()
def renew_statistics(network: nn.Module, batches: Batches) -> None:
    """Take BatchNorm's running statistics anew, as means over some batches."""
    norms = [module for module in network.modules() if isinstance(module, NORMS)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all batches
    network.train()
    for x, _ in itertools.islice(_endless(batches), RENEWAL_BATCHES):
        network(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _endless(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches
