"""What epochs cost beside their training: python tests/bench/steps/bench_epochs.py [--epochs 50 200 800]

Runs README's first command, ``python examples/mnist.py``, for so many epochs, each in a process of its own, and prints
the seconds of the whole command as its parent sees them, those that it prints, those of the training with gates, and
what the epochs cost beside it: their measuring, their checks and the checkpoints, in percent of the training.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.timing import options_of, table_head, table_row

ROOT = Path(__file__).parents[3]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--epochs", type=int, nargs="+", default=[50, 200, 800])
    table_head("epochs", "whole, s", "printed, s", "training, s", "beside it, %")
    for epochs in parser.parse_args().epochs:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "examples/mnist.py", "--epochs", str(epochs), "--out", folder]
            start = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            whole = time.perf_counter() - start
            found = json.loads((Path(folder) / "metrics.json").read_text())
        training = found["training_seconds"]
        beside = 100 * (found["epochs_seconds"] / training - 1)
        table_row(epochs, f"{whole:.1f}", f"{found['seconds']:.1f}", f"{training:.1f}", f"{beside:.1f}")


if __name__ == "__main__":
    main()
