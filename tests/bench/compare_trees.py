"""The benchmarks of two checkouts in turn: python tests/bench/compare_trees.py OLD NEW --data-dir MNIST

Runs ``bench_step``, ``bench_training --epochs 2`` and ``bench_wrn --rounds 4`` of OLD and NEW alternately, one
command at a time, and prints for each figure the medians over the rounds and their ratio. All figures are
themselves ratios to a baseline in the same process, so that load which comes and goes falls on both sides of each.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

# The figures: in each line that a benchmark prints, what it is called and its value.
FIGURES = {
    "bench_step.py": re.compile(r"^(?P<name>(?:l0|l0, plate|free_energy) / [a-z0-9_ ]+?) +(?P<value>[0-9.]+)$"),
    "bench_training.py": re.compile(
        r"^(?P<name>gated[^:]*, without shrinking): .* step, (?P<value>[0-9.]+) of a dense"
    ),
    "bench_wrn.py": re.compile(r"^(?P<name>gated) .* ratio (?P<value>[0-9.]+)$"),
}


def figures(tree: Path, bench: str, options: list[str]) -> dict[str, float]:
    """Run a benchmark of one checkout."""
    script = next((tree / "tests" / "bench").rglob(bench))
    command = [sys.executable, str(script), *options]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True).stdout
    found = {m["name"]: float(m["value"]) for line in output.splitlines() if (m := FIGURES[bench].match(line))}
    if not found:
        raise RuntimeError(f"Expected figures of {bench}, but {tree} printed:\n{output}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    training = ["--data-dir", str(options.data_dir.resolve()), "--epochs", "2", "--weight-decay", "5e-4"]
    commands = {
        "bench_step.py": ["--rounds", "30"],
        "bench_training.py": training,
        "bench_wrn.py": ["--rounds", "4"],
    }
    for bench, arguments in commands.items():
        found: dict[str, dict[str, list[float]]] = {}
        for round_ in range(options.rounds):
            sides = [("old", options.old), ("new", options.new)]
            for side, tree in sides if round_ % 2 == 0 else sides[::-1]:
                for name, value in figures(tree.resolve(), bench, arguments).items():
                    found.setdefault(name, {"old": [], "new": []})[side].append(value)
        for name, values in found.items():
            old, new = statistics.median(values["old"]), statistics.median(values["new"])
            print(f"{bench:20s}{name:40s} old {old:7.3f}  new {new:7.3f}  new / old {new / old:6.3f}", flush=True)


if __name__ == "__main__":
    main()
