"""NOTEARS and DAGMA, by their authors' code, on the data of examples/causal_graph.py, as they are and standardised.

``python tests/bench/rivals/bench_causal.py`` needs both on the path: DAGMA (Bello et al., 2022, arXiv:2209.08037) by
``pip install --no-deps --target FOLDER dagma``, which also needs scipy and tqdm, and NOTEARS (Zheng et al., 2018,
arXiv:1803.01422, and 2020, arXiv:1909.13189) by ``git clone https://github.com/xunzheng/notears FOLDER``. Options are
those of their pages: NOTEARS has the prices of its demos (0.1; 0.01 and 0.01 with 10 hidden units), DAGMA its defaults,
with 10 hidden units, too. Neither page advises to standardise data or not to.

Prints each structural Hamming distance as it comes, then means and standard deviations. The gates' distances on the
same data are printed by ``python examples/causal_graph.py`` with and without ``--standardise``. With linear data a
search takes seconds, with perceptrons minutes.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from causal_graph import random_data, structural_distance
from tests.bench.timing import options_of

Search = Callable[[np.ndarray], np.ndarray]  # weights of edges, below the threshold 0, from data


def searches(kind: str, nodes: int) -> dict[str, Search]:
    """Each tool with its own options."""
    if kind == "linear":
        from dagma.linear import DagmaLinear
        from notears.linear import notears_linear

        return {
            "NOTEARS": lambda x: notears_linear(x, lambda1=0.1, loss_type="l2"),
            # Its default list of s is changed by a fit: here each has its own.
            "DAGMA": lambda x: DagmaLinear("l2").fit(x, s=[1.0, 0.9, 0.8, 0.7, 0.6]),
        }
    from dagma.nonlinear import DagmaMLP, DagmaNonlinear
    from notears.nonlinear import NotearsMLP, notears_nonlinear

    sizes = [nodes, 10, 1]
    return {
        "NOTEARS": lambda x: notears_nonlinear(NotearsMLP(sizes), x, lambda1=0.01, lambda2=0.01),
        "DAGMA": lambda x: DagmaNonlinear(DagmaMLP(sizes)).fit(x),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--kinds", nargs="+", default=["linear", "perceptrons"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[10, 20])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--tools", nargs="+", default=["NOTEARS", "DAGMA"])
    parser.add_argument("--standardise", action="store_true", help="give all variables variance 1")
    options = parser.parse_args()
    results = []
    for kind, nodes, tool in itertools.product(options.kinds, options.nodes, options.tools):
        distances = []
        for seed in options.seeds:
            torch.set_default_dtype(torch.float32)  # both tools need and set double
            torch.manual_seed(seed)
            x, truth = random_data(kind, nodes)
            if options.standardise:
                x = (x - x.mean(0)) / x.std(0)
            torch.set_default_dtype(torch.float64)
            start = time.process_time()
            weights = searches(kind, nodes)[tool](x.double().numpy())
            distances.append(structural_distance(torch.as_tensor(weights) != 0, truth))
            seconds = time.process_time() - start
            print(f"{kind}, {nodes} nodes, seed {seed}, {tool}: {distances[-1]}, {seconds:.0f} s", flush=True)
        results.append((kind, nodes, tool, np.mean(distances), np.std(distances, ddof=min(1, len(distances) - 1))))
    print("data", "standardised" if options.standardise else "as they are")
    for kind, nodes, tool, mean, spread in results:
        print(f"{kind:12s}{nodes:7d}   {tool:8s}{mean:8.2f} ± {spread:.2f}")


if __name__ == "__main__":
    main()
