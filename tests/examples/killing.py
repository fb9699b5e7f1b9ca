"""Kills an example's process in the midst of an epoch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import checkpoint

EXAMPLES = Path(checkpoint.__file__).parent
SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import checkpoint
save = checkpoint.save
def slow_save(path, state):
    save(path, state)
    if len(state["history"]) == int(sys.argv[3]):
        Path(sys.argv[2], "now").touch()
        time.sleep(60)
checkpoint.save = slow_save
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
    deadline = time.monotonic() + 60
    while not (out / "now").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "metrics.json").exists()
    (out / "now").unlink()
