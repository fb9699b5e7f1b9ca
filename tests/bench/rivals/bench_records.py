"""Gates on records of a survey, beside l0-python: python tests/bench/rivals/bench_records.py --out FILE

Needs ``pip install l0-python`` (0.6.2 here). On the data of ``examples/survey_calibration.py``, each row is a choice of
at most ``--records`` records: "gates" in one run with a budget; "l0-python" with the settings of its page, protected
records starting open, and its price found by a bisection of at most ten runs that ends within 2 % of the budget, in
``--between``; "least squares", nonnegative weights by SciPy, where protected records weigh at least 1 and which has no
budget. "fitted" adds the example's fit of the weights that are left. Seconds are of processor time, all runs together.
FILE takes a line of JSON for each method and seed, and a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import nnls
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from survey_calibration import POPULATION, Figures, Options, Survey, choose, figures, fit, survey

RUNS, NEAR, EPOCHS = 10, 0.98, 2000
METHODS = ("gates", "l0-python", "least squares")


def rival(found: Survey, records: int, seed: int, low: float, high: float) -> Tensor:
    """Weights by l0-python, of the best of at most ten prices between two."""
    from l0.calibration import SparseCalibrationWeights

    totals = np.full(len(found.shares), 1e6)  # its relative errors are by the target plus 1
    matrix, size = sparse.csr_matrix(totals[:, None] * found.shares.numpy()), len(found.protected)
    best = torch.zeros(size).double()
    for _ in range(RUNS):
        price = (low * high) ** 0.5
        torch.manual_seed(seed)
        model = SparseCalibrationWeights(
            size,
            beta=0.35,
            init_keep_prob=np.where(found.protected.numpy(), 1 - 1e-6, 0.5),
            init_weights=POPULATION / size,
            log_weight_jitter_sd=0.05,
            seed=seed,
        )
        model.fit(matrix, totals, lambda_l0=price, lambda_l2=1e-8, lr=0.15, epochs=EPOCHS, loss_type="relative")
        weights = model.get_weights(deterministic=True).detach().double()
        number = int((weights > 0).sum())
        print(f"  price {price:.3g}: {number} records", flush=True)
        low, high = (price, high) if number > records else (low, price)
        if int((best > 0).sum()) < number <= records:
            best = weights
        if NEAR * records <= number <= records:
            break
    return best


def least_squares(found: Survey) -> Tensor:
    """Nonnegative weights, of the protected records 1 and what is added."""
    least = found.protected.double()
    return least + torch.tensor(nnls(found.shares.numpy(), (1 - found.shares @ least).numpy())[0])


def rows(by: str, seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of a method, as it comes and fitted."""
    found, records, case = survey(seed), options.records, {"records_at_most": options.records, "seed": seed}
    if options.unprotected:
        found = found._replace(protected=torch.zeros_like(found.protected))
    torch.manual_seed(seed)
    start = time.process_time()
    if by == "gates":
        weights = choose(found, records, options.evenness, Options.steps)
    else:
        weights = rival(found, records, seed, *options.between) if by == "l0-python" else least_squares(found)
    yield {"by": by, **case, **figures(found, weights)._asdict(), "seconds": time.process_time() - start}
    weights = fit(found, weights)
    yield {"by": f"{by}, fitted", **case, **figures(found, weights)._asdict(), "seconds": time.process_time() - start}


def main() -> None:
    """Run what is missing in the file, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--evenness", type=float, default=Options.evenness)
    parser.add_argument("--unprotected", action="store_true", help="in a file of its own")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--between", nargs=2, type=float, default=[1e-6, 1e-1], help="prices of l0-python")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for seed, by in itertools.product(options.seeds, options.methods):
        if any((x["by"], x["records_at_most"], x["seed"]) == (by, options.records, seed) for x in lines):
            continue
        new = list(rows(by, seed, options))
        with options.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in new)
        lines += new
    print("by", *Figures._fields, "seconds", sep=" | ")
    chosen = [line for line in lines if line["records_at_most"] == options.records and line["seed"] in options.seeds]
    for name in dict.fromkeys(line["by"] for line in chosen):
        cells = [name]
        for field in (*Figures._fields, "seconds"):
            values = [line[field] for line in chosen if line["by"] == name]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        print(*cells, sep=" | ")


if __name__ == "__main__":
    main()
