"""Kills an example's process in the midst of an epoch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import mnist

SECONDS = ("seconds", "epochs_seconds", "training_seconds")
EXAMPLES = Path(mnist.__file__).parent
SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pyro_l0.training import Checkpoint
sys.modules[Checkpoint.__module__]._SPARING = 0
save = Checkpoint.save
def slow_save(self, state):
    save(self, state)
    if len(state["history"]) == int(sys.argv[3]):
        Path(sys.argv[2], "now").touch()
        time.sleep(3600)
Checkpoint.save = slow_save
"""


def run_and_kill(statement, out, after):
    """Run a statement that trains in ``out`` (a Path of that name), and kill -9 it in the epoch after some."""
    out.mkdir()
    root = EXAMPLES.parent
    process = subprocess.Popen(
        [sys.executable, "-c", f"{SCRIPT}\nout = Path(sys.argv[2])\n{statement}", str(EXAMPLES), str(out), str(after)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(root)},
        stderr=subprocess.DEVNULL,
    )
    while not (out / "now").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "metrics.json").exists()
    (out / "now").unlink()


def without_seconds(metrics):
    """What two runs that do the same must agree in."""
    for entry in metrics["history"]:
        del entry["seconds"]
    return {name: value for name, value in metrics.items() if name not in (*SECONDS, "options")}
