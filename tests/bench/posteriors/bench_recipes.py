"""Do three of the how-to pages keep their word? python tests/bench/posteriors/bench_recipes.py [--part PART]

The functions are those of the pages, which are run first, but for Lorenz's system. ``dynamics``: of ten noisy paths of
each system, how many get exactly the right terms, and the terms missed and false in the mean, beside pysindy with its
defaults, on the same library, and with its smoothed derivatives. ``intervention``: 100 series like the page's, how
often a 90 % interval of the average effect holds the true one, with the local level and without. ``changepoints``: 50
series like the page's, the share of the sets of probability .9 or more that hold a change, and the share of the changes
that a set holds.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))

import run_code

from tests.bench.timing import options_of, table_head, table_row

ROOT = Path(__file__).parents[3]
Array = NDArray[np.float64]


def page(name: str) -> dict[str, Any]:
    """What the cells of a page define."""
    *_, cells = run_code.programs(ROOT / "docs" / "howto" / f"{name}.md", with_cells=True)
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(cells.code, found)
    return found


def pysindys(t: Array, states: Array, is_pendulum: bool) -> dict[str, NDArray[np.bool_]]:
    """The terms that pysindy chooses, shape ``(d, k)``."""
    import pysindy

    library = pysindy.PolynomialLibrary(2)
    # Its sines and cosines are in the page's order.
    library = library + pysindy.FourierLibrary(1) if is_pendulum else library
    derivatives = {"pysindy": pysindy.FiniteDifference(), "pysindy, smoothed": pysindy.SmoothedFiniteDifference()}
    found = {}
    for name, derivative in derivatives.items():
        model = pysindy.SINDy(feature_library=library, differentiation_method=derivative)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = model.fit(states, t=t).coefficients() != 0
    return found


class System(NamedTuple):
    """What the page calls a system and its library; the window, the times and the start; right terms; noises."""

    name: str
    library: str
    width: int
    end: int
    step: float
    start: list[float]
    right: set[tuple[int, int]]
    noises: tuple[float, ...]


SYSTEMS = (
    System(
        "lorenz",
        "quadratic",
        100,
        10,
        0.002,
        [-8, 8, 27],
        {(0, 1), (0, 2), (1, 1), (1, 2), (1, 6), (2, 3), (2, 5)},
        (0.1, 0.5, 1.0),
    ),
    System("pendulum", "trigonometric", 50, 20, 0.005, [2.5, 0.0], {(0, 2), (1, 2), (1, 6)}, (0.01, 0.05, 0.1)),
)


def lorenz(t: float, s: Array) -> list[float]:
    """Derivatives of Lorenz's system."""
    x, y, z = s
    return [10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z]


def quadratic(states: Array) -> Array:
    """All terms up to squares and products."""
    x, y, z = states.T
    return np.stack([np.ones(len(x)), x, y, z, x * x, x * y, x * z, y * y, y * z, z * z], 1)


def dynamics() -> None:
    known = {**page("dynamics"), "lorenz": lorenz, "quadratic": quadratic}
    table_head("system", "noise", "method", "exactly right, of 10", "missed", "false")
    for system in SYSTEMS:
        t = np.arange(0, system.end, system.step)
        solved = solve_ivp(known[system.name], (0, system.end), system.start, t_eval=t, rtol=1e-9, atol=1e-9)
        right = np.zeros((len(system.start), 10), dtype=bool)
        right[tuple(np.transpose(list(system.right)))] = True
        for noise in system.noises:
            rows: dict[str, list[tuple[bool, int, int]]] = {}
            for seed in range(10):
                states = solved.y.T + noise * np.random.default_rng(seed).normal(size=solved.y.T.shape)
                models = known["equations"](t, states, known[system.library], width=system.width)
                ours = np.array([np.isin(np.arange(10), model.select()) for model in models])
                others = pysindys(t, states, system.name == "pendulum")
                for name, chosen in {"ours": ours, **others}.items():
                    missed, false = int((right & ~chosen).sum()), int((chosen & ~right).sum())
                    rows.setdefault(name, []).append((missed + false == 0, missed, false))
            for name, found in rows.items():
                exactly, missed, false = np.sum(found, axis=0)
                table_row(system.name, noise, name, exactly, f"{missed / 10:.1f}", f"{false / 10:.1f}")


def intervention() -> None:
    known = page("intervention")
    table_head("level", "90 % intervals that hold", "their mean width")
    for name, ratios in (("random walk", known["intervention"].__defaults__[0]), ("none", (0.0,))):
        holds, widths = [], []
        for seed in range(100):
            rng = np.random.default_rng(seed)
            x, y = known["series"](rng)
            effect = known["intervention"](y, x, before=70, ratios=ratios)[2].mean(1)
            low, high = np.quantile(effect, [0.05, 0.95])
            holds.append(low <= 1 <= high)
            widths.append(high - low)
        table_row(name, sum(holds), f"{np.mean(widths):.2f}")


def changepoints() -> None:
    known = page("changepoints")
    level, changes = known["level"], {60, 110, 160}
    sets, right, held = 0, 0, 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        found = known["changepoints"](level + 0.7 * rng.normal(size=len(level)))[1]
        times = [{k + 2 for k in each.features} for each in found]
        sets += len(times)
        right += sum(bool(each & changes) for each in times)
        held += sum(any(change in each for each in times) for change in changes)
    print(f"{sets} sets, of which {right / sets:.3f} hold a change; {held} of {3 * 50} changes in a set")


PARTS = {part.__name__: part for part in (dynamics, intervention, changepoints)}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--part", choices=tuple(PARTS), help="all, if it is not given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, part in PARTS.items():
        if options.part in (None, name):
            part()
            print(flush=True)


if __name__ == "__main__":
    main()
