"""Two processes under torchrun hold the same state and learn as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mnist
from mnist import Options

SCRIPT = """
import json, sys
import torch
from torch import distributed
from data import load_digits
from training import Run, process_group

torch.set_num_threads(1)
with process_group("cpu") as first:
    run = Run(load_digits(), gate_learning_rate=0.03, lam=(0.1,), shrink=True, seed=1)
    for _ in range(30):
        run.train_epoch()
    own = torch.cat([p.detach().flatten() for p in [*run.trained.parameters(), *run.averaged.parameters()]])
    both = [torch.empty_like(own) for _ in range(2)]
    distributed.all_gather(both, own)
    draws = [torch.empty(1) for _ in range(2)]
    distributed.all_gather(draws, torch.rand(1))
    if first:
        print(json.dumps({
            "equal": torch.equal(*both),
            "same_noise": torch.equal(*draws),
            "left": len(own),
            **run.measure(),
        }))
"""


def torchrun(*arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_processes_agree(tmp_path):
    """Parameters and averages equal to the last bit, across shrinkings; accuracy as that of one process."""
    (tmp_path / "script.py").write_text(SCRIPT)
    out = json.loads(torchrun("script.py", cwd=tmp_path).strip().splitlines()[-1])
    assert out["equal"]
    assert not out["same_noise"]
    single = mnist.Run(mnist.load_digits(), gate_learning_rate=0.03, lam=(0.1,), shrink=True, seed=1)
    for _ in range(30):
        single.train_epoch()
    one = single.measure()
    # 360 images at an error near 4 %: three standard deviations of the difference are 4.4 points.
    assert abs(out["test_error_percent"] - one["test_error_percent"]) < 4.4
    assert sum(out["architecture"]) == pytest.approx(sum(one["architecture"]), rel=0.15)


def test_the_example_under_torchrun(tmp_path):
    """One process writes; resuming needs as many processes."""
    script = str(Path(mnist.__file__))
    options = ["--epochs", "2", "--out", str(tmp_path)]
    out = torchrun(script, *options, cwd=tmp_path)
    assert out.count("test error, final epoch") == 1
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert len(state["run"]["random"]) == 2
    torchrun(script, "--epochs", "3", "--out", str(tmp_path), "--resume", cwd=tmp_path)
    with pytest.raises(ValueError, match="as many processes as the checkpoint has, 2, but got 1"):
        mnist.main(Options(epochs=4, out=tmp_path, resume=True))
