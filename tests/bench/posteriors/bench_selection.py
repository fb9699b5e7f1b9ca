"""Variable selection beside abess on seven designs: python tests/bench/posteriors/bench_selection.py

Features are independent standard normal, and the first of them have effects. A design is n, p, the effects and the
deviation of the noise, which is estimated. Ours is SpikeSlabRegressor as it comes, with select(.05), select(.1), which
is its default, or the features with a PIP above .5, the median probability model. abess chooses its support size by
EBIC, out of all sizes that it tries by default (here 0 to p, at most 100) and out of 0 to 20. Every line: means over
the seeds of F1 and of the share of the selected that is false, and seconds of one fit on one core. --seeds N takes so
many seeds (100), --design part of a name; of many rows there is one seed, as abess by default takes a minute.
bench_rivals.py has more tools, bench_wide.py more features.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyro_l0.selection import SpikeSlabRegressor

LEVELS = (0.05, 0.1)
Array = NDArray[np.float64]
# What a method selects, by the way in which it does.
Selections = dict[str, NDArray[np.intp]]
Method = Callable[[Array, Array, int], Selections]


@dataclass(frozen=True)
class Published:
    """A design: observations, features, the effects of the first ones, the noise's deviation, and seeds at the most."""

    name: str
    n: int = 100
    p: int = 200
    effects: tuple[float, ...] = (3.0, -2.0, 1.5, -1.0, 0.5)
    noise: float = 1.0
    most_seeds: int = 100

    def drawn(self, seed: int) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(self.n, self.p))
        return x, x[:, : len(self.effects)] @ np.array(self.effects) + self.noise * rng.normal(size=self.n)

    def scores(self, chosen: NDArray[np.intp]) -> tuple[float, float]:
        """F1 and the share of the chosen that is false."""
        right = int((chosen < len(self.effects)).sum())
        f1 = 2 * right / (len(chosen) + len(self.effects))
        return f1, (len(chosen) - right) / max(len(chosen), 1)


DESIGNS = (
    Published("base"),
    Published("n = 200", n=200),
    Published("p = 500", p=500),
    Published("ten effects", effects=tuple(np.linspace(3.0, 0.3, 10))),
    Published("sigma = 2", noise=2.0),
    Published("weak", effects=(1.0, -0.8, 0.6, -0.4, 0.2)),
    Published("many rows", 100_000, 100, (1.0, -1.0, 0.8, -0.8, 0.5, -0.5, 0.3, -0.3), most_seeds=1),
)


def ours(x: Array, y: Array, seed: int) -> Selections:
    model = SpikeSlabRegressor(random_state=seed).fit(x, y)
    found = {f"ours, {level}": model.select(level) for level in LEVELS}
    return {**found, "ours, PIP > .5": np.flatnonzero(model.pip_ > 0.5)}


def abess(x: Array, y: Array, seed: int) -> Selections:
    from abess.linear import LinearRegression

    return {"abess": np.flatnonzero(LinearRegression(ic_type="ebic").fit(x, y).coef_)}


def abess_few(x: Array, y: Array, seed: int) -> Selections:
    """With the sizes 0 to 20 alone, as one who expects few effects calls it."""
    from abess.linear import LinearRegression

    model = LinearRegression(ic_type="ebic", support_size=range(21))
    return {"abess, 0 to 20": np.flatnonzero(model.fit(x, y).coef_)}


METHODS: tuple[Method, ...] = (ours, abess, abess_few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--design", default="", help="part of a name")
    options = parser.parse_args()
    for design in DESIGNS:
        if options.design not in design.name:
            continue
        rows: dict[str, list[tuple[float, float, float]]] = {}
        for seed in range(min(options.seeds, design.most_seeds)):
            x, y = design.drawn(seed)
            for method in METHODS:
                start = time.process_time()
                selections = method(x, y, seed)
                seconds = time.process_time() - start
                for way, chosen in selections.items():
                    rows.setdefault(way, []).append((*design.scores(chosen), seconds))
        for way, found in rows.items():
            f1, false, mean_seconds = np.mean(found, axis=0)
            print(f"{design.name:12} {way:15} F1 {f1:.3f}  FDR {false:.3f}  {mean_seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
