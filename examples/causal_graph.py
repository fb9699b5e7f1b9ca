"""Which variable causes which? L0 gates on the edges of a structural equation model.

Data come from random graphs with an edge per node on average. A node is a linear function of its parents, or a random
perceptron of them, plus standard normal noise. A model has a gate for each of the d (d - 1) edges. Its loss has the
negative log-likelihood with one noise variance, where log |det(I - Jacobian)| keeps cycles from being rewarded (Ng et
al. 2020, arXiv:2006.10201), a price per open edge (half of log n as in BIC, and the prior log-odds of an edge), and
tr (I + P/d)^d - d of the probabilities P of edges, which is 0 without cycles (Yu et al. 2019, arXiv:1904.10098), at a
weight that grows. Some copies start at once, and the one of the lowest loss counts.

``python examples/causal_graph.py`` takes one to two minutes on one core; the gallery compares with ``--steps
4000 --nodes 10 20 --seeds 1 2 3``. The table has structural Hamming distances: edges that are missing, too many or
turned round. Variances grow along the edges of such data, which gives the order away, so two baselines without any
search stand beside: nodes in the order of their variances, or of the R2 of a regression on all others, each regressed
on those before it (sortnregress, Reisach et al. 2021, arXiv:2102.13647; 2023, arXiv:2303.18211). ``--standardise``
takes the variances away; ``tests/bench/rivals/bench_causal.py`` has NOTEARS and DAGMA on the same data. Writes a
picture of each kind and size to ``--out``.
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from sklearn.linear_model import LassoLarsIC, LinearRegression
from torch import Tensor, nn

from common.figures import figure_axes, save_figure
from common.plots import plot_edges
from pyro_l0.nn import L0Gate

__all__ = ["Options", "acyclic", "find_graph", "main", "random_data", "structural_distance"]

KINDS = ("linear", "perceptrons")
HIDDEN, BATCH = 10, 50
RATE, GATE_RATE, DECAY = 1e-2, 2e-2, 1e-2
FIRST_WEIGHT, LAST_WEIGHT = 1e-3, 10.0  # of the measure of cycles, in nats per example
EXAMPLES, COPIES = {"linear": 1000, "perceptrons": 200}, {"linear": 48, "perceptrons": 4}


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        kinds: of models.
        nodes: sizes of the graphs, at least 3.
        steps: of every search.
        seeds: each a graph of each size and kind.
        standardise: give all variables variance 1.
        out: folder for the pictures.
    """

    kinds: tuple[Literal["linear", "perceptrons"], ...] = KINDS
    nodes: tuple[int, ...] = (10,)
    steps: int = 2000
    seeds: tuple[int, ...] = (1,)
    standardise: bool = False
    out: Path = field(default=Path("runs/causal_graph"))


def main(options: Options) -> dict[tuple[str, int], Tensor]:
    """Print the table, write the pictures; returns edges and distances of each seed by kind and size."""
    command.check(options)
    rows: dict[tuple[str, int], Tensor] = {}
    with command.folder(options.out):
        command.plan(len(options.kinds) * len(options.nodes) * len(options.seeds) * options.steps)
        print("data          nodes         edges           L0       by variance       by R2")
        for kind, nodes in itertools.product(options.kinds, options.nodes):
            found = []
            for seed in options.seeds:
                torch.manual_seed(seed)
                x, truth = random_data(kind, nodes)
                if options.standardise:
                    x = (x - x.mean(0)) / x.std(0)
                graph = find_graph(kind, x, options.steps)
                graphs = graph, *(sorted_regressions(x, key) for key in (x.var(0), explained(x)))
                found.append([float(truth.sum()), *(float(structural_distance(each, truth)) for each in graphs)])
            rows[kind, nodes] = torch.tensor(found)
            spread = (f"{y.mean():8.2f} ± {y.std(correction=int(len(y) > 1)):.2f}" for y in rows[kind, nodes].T)
            print(f"{kind:12s}{nodes:7d}", *spread, flush=True)
            plot({"true graph": truth, "L0": graph}, options.out / f"{kind}-{nodes}.png")
    return rows


def random_data(kind: str, nodes: int) -> tuple[Tensor, Tensor]:
    """Data, shape ``(n, d)``, and the graph that made them; entry (i, j) is true for an edge from i to j."""
    order = torch.randperm(nodes)
    graph = torch.zeros(nodes, nodes, dtype=torch.bool)
    graph[order[:, None], order] = (torch.rand(nodes, nodes) < 2 / (nodes - 1)).triu(1)
    x = torch.zeros(EXAMPLES[kind], nodes)
    for node in order:
        parents = x[:, graph[:, node]]
        width = 1 if kind == "linear" else 100
        sizes = (parents.shape[1], width), (width,)
        first, second = ((0.5 + 1.5 * torch.rand(size)) * (2 * torch.randint(2, size) - 1) for size in sizes)
        mean = (parents @ first)[:, 0] if kind == "linear" else torch.sigmoid(parents @ first) @ second
        x[:, node] = mean + torch.randn(len(x))
    return x, graph


class Linear(nn.Module):
    """Negative log-likelihood of linear models, in nats."""

    def __init__(self, x: Tensor, copies: int) -> None:
        super().__init__()
        self.n, self.gram = len(x), x.T @ x / len(x)
        self.weight = nn.Parameter(torch.zeros(copies, *self.gram.shape))

    def forward(self, gate: Tensor) -> Tensor:
        """Of the edges' gates, shape ``(copies, d, d)``."""
        residual = torch.eye(len(self.gram)) - gate * self.weight
        squared = (residual * (self.gram @ residual)).sum((1, 2))
        return self.n * (len(self.gram) / 2 * squared.log() - torch.linalg.slogdet(residual).logabsdet)


class Perceptrons(nn.Module):
    """The same of a perceptron per node; while training on a random part of the data."""

    def __init__(self, x: Tensor, copies: int) -> None:
        super().__init__()
        self.x, d = x, x.shape[1]
        self.first = nn.Parameter(torch.randn(copies, d, d, HIDDEN) / math.sqrt(d))
        self.bias = nn.Parameter(torch.zeros(copies, 1, d, HIDDEN))
        self.second = nn.Parameter(torch.zeros(copies, 1, d, HIDDEN))

    def forward(self, gate: Tensor) -> Tensor:
        x = self.x[torch.randint(len(self.x), (BATCH,))] if self.training else self.x
        first = gate[..., None] * self.first
        units = torch.tanh((x @ first.flatten(2)).unflatten(2, first.shape[2:]) + self.bias)
        residual = x - (units * self.second).sum(-1)
        residual = residual - residual.mean(1, keepdim=True)
        slope = ((1 - units.square()) * self.second).transpose(1, 2)  # (copies, d, n, HIDDEN)
        jacobian = (slope @ first.permute(0, 2, 3, 1)).transpose(1, 2)  # (copies, n, d out, d in)
        volume = torch.linalg.slogdet(torch.eye(x.shape[1]) - jacobian).logabsdet.mean(1)
        decay = DECAY * (self.first.square().sum((1, 2, 3)) + self.second.square().sum((1, 2, 3)))
        return len(self.x) * (x.shape[1] / 2 * residual.square().mean((1, 2)).log() - volume) + decay


def find_graph(kind: str, x: Tensor, steps: int) -> Tensor:
    """The graph of the best copy, as :func:`random_data` returns it."""
    n, d = x.shape
    copies, edges = COPIES[kind], 1 - torch.eye(d)
    model = (Linear if kind == "linear" else Perceptrons)(x - x.mean(0), copies)
    gates = L0Gate(copies, d, d, init_active_prob=0.5)
    rates = [{"params": model.parameters(), "lr": RATE}, {"params": gates.parameters(), "lr": GATE_RATE}]
    optimiser = torch.optim.Adam(rates, betas=(0.9, 0.99))
    price = math.log(n) / 2 + math.log(d - 2)  # an edge in d - 1 is there
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, (steps - step) / (0.3 * steps))
        weight = n * FIRST_WEIGHT * (LAST_WEIGHT / FIRST_WEIGHT) ** min(1.0, step / (0.7 * steps))
        prob = gates.active_prob * edges
        cycles = torch.matrix_power(torch.eye(d) + prob / d, d).diagonal(dim1=1, dim2=2).sum(1) - d
        loss = model(gates() * edges) + price * prob.sum((1, 2)) + weight * cycles
        optimiser.zero_grad()
        loss.sum().backward()
        optimiser.step()
        command.advance()
    with torch.no_grad():
        model.eval(), gates.eval()
        graphs = torch.stack([acyclic(*copy) for copy in zip(gates() * edges, gates.active_prob, strict=True)])
        loss = model(gates() * graphs) + price * graphs.sum((1, 2))
    return graphs[loss.argmin()]


def acyclic(gate: Tensor, probability: Tensor) -> Tensor:
    """Open edges, without the least probable ones as long as there is a cycle."""
    graph = gate > 0
    while torch.linalg.matrix_exp(graph.double()).trace() > len(graph) + 1e-6:
        graph.view(-1)[torch.where(graph, probability, torch.inf).argmin()] = False
    return graph


def explained(x: Tensor) -> Tensor:
    """R2 of a regression of each node on all others."""
    return 1 - 1 / torch.linalg.inv(torch.corrcoef(x.T.double())).diagonal()


def sorted_regressions(x: Tensor, key: Tensor) -> Tensor:
    """Each node regressed on those of a smaller key, by an adaptive lasso whose penalty BIC chooses."""
    order, values, graph = key.argsort().tolist(), x.double().numpy(), torch.zeros(x.shape[1], x.shape[1]).bool()
    for i, node in enumerate(order[1:], 1):
        before, y = values[:, order[:i]], values[:, node]
        size = abs(LinearRegression().fit(before, y).coef_)
        graph[order[:i], node] = torch.as_tensor(LassoLarsIC("bic").fit(before * size, y).coef_ * size != 0)
    return graph


def structural_distance(graph: Tensor, truth: Tensor) -> int:
    """Pairs of nodes whose edge is missing, too much or turned round."""
    different = graph != truth
    return int((different | different.T).triu(1).sum())


def plot(graphs: dict[str, Tensor], path: Path) -> None:
    """Nodes on a circle; edges that the true graph lacks are dashed."""
    edges = {name: [(i, j) for i, j in graph.nonzero().tolist()] for name, graph in graphs.items()}
    truth = graphs["true graph"]
    angles = [i * 2 * math.pi / len(truth) for i in range(len(truth))]
    positions = {i: (math.cos(angle), math.sin(angle)) for i, angle in enumerate(angles)}
    panels = figure_axes(1, len(graphs), figsize=(6, 3.45))
    for axes, (name, graph) in zip(panels, graphs.items(), strict=True):
        title = f"{name}, distance {structural_distance(graph, truth)}"
        plot_edges(edges[name], positions, known=edges["true graph"], title=title, names=False, axes=axes)
        axes.set(aspect="equal", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1))
    save_figure(panels, path)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
