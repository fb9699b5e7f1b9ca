"""The file of a run: whole at every moment, held by one process, and refused by name when it is anything else."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_l0.compaction.storage import hold
from tests.pruning.networks import StoppedError, prune_with, stopping

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


def run(path, stop=None, resume=False, loss=F.mse_loss, **options):
    """Prune a small network from a seed; ``stop`` is the epoch whose end is not reached."""
    torch.manual_seed(3)
    x = torch.randn(60, 4)
    loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), 20, shuffle=True)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    settings = {"epochs": 6, "finetune": 0.34, "pretrained": False, "callbacks": [stopping(stop)], **options}
    return prune_with(network, loss, loader, x[:2], 0.5, checkpoint=path, resume=resume, **settings)


@pytest.mark.parametrize("epoch", [2, 6])
def test_the_state_is_one_dict(tmp_path, epoch):
    """Of the gates' controller there is nothing any more when they are cut; the steps of both are one number."""
    path = tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        run(path, stop=epoch)
    state = torch.load(path, weights_only=True)["state"]
    control = {"steps", "locations", "gate_optimiser", "integral", "of_loss", "of_penalty", "coefficients"}
    phase = {"network", "optimiser", "schedule"}
    run_s = {"step", "epoch", "tuned", "findings", "history", "cuts", "latency"}
    assert state.keys() == run_s | phase | (control if epoch == 2 else set())
    assert state["step"] == 3 * state["epoch"] == 3 * (epoch - 1)


def test_no_link_is_written_through(tmp_path):
    """Neither one that waits at a name that a saver may use nor one in the file's place."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("run.pt.tmp", "run.pt.previous"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(StoppedError):
        run(tmp_path / "run.pt", stop=3)
    assert precious.read_text() == "mine"
    (tmp_path / "run.pt.lock").unlink()
    (tmp_path / "run.pt.lock").symlink_to(precious)
    with pytest.raises(OSError, match=r"run\.pt\.lock"), hold(tmp_path / "run.pt"):
        pass
    assert precious.read_text() == "mine"


HELD = """
import pathlib, sys
from pyro_l0.compaction.storage import hold
with hold(pathlib.Path(sys.argv[1])):
    print(flush=True)
    input()
"""


@pytest.mark.slow
def test_a_file_that_another_run_holds_is_refused(tmp_path):
    """In another process and in this one; whoever ended holds nothing, whatever it left behind."""
    path = tmp_path / "run.pt"
    other = subprocess.Popen([sys.executable, "-c", HELD, path], stdin=-1, stdout=-1)
    other.stdout.readline()
    held = r"run\.pt' to be a file that no other run writes, but one holds it"
    with pytest.raises(ValueError, match=held):
        run(path)
    other.kill()
    other.communicate()
    with hold(path):
        with pytest.raises(ValueError, match=held):
            run(path)
        refused = subprocess.run([sys.executable, "-c", HELD, path], check=False, stderr=subprocess.PIPE)
        assert b"no other run writes" in refused.stderr
