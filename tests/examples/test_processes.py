"""Two processes under torchrun hold the same state and learn as one does."""

import json
import os
import subprocess
import sys
import time

import pytest

import mnist
from common.data import load_digits
from mnist import Options
from tests.processes import HANGS

SCRIPT = """
import json, sys, weakref
import torch
from torch import distributed
from common.data import load_digits
from mnist import Options, Run
from pyro_l0.training import process_group

torch.set_num_threads(1)
with process_group("cpu") as first:
    group = weakref.ref(distributed.group.WORLD)
    options = Options(**json.loads(sys.argv[1]))
    run = Run(load_digits(), options)
    for _ in range(options.epochs):
        run.train_epoch()
    own = torch.cat([p.detach().flatten() for p in [*run.weights.parameters(), *run.averaged.parameters()]])
    both = [torch.empty_like(own) for _ in range(2)]
    distributed.all_gather(both, own)
    draws = [torch.empty(1) for _ in range(2)]
    distributed.all_gather(draws, torch.rand(1))
    if first:
        print(json.dumps({
            "equal": torch.equal(*both),
            "same_noise": torch.equal(*draws),
            "fraction": None if run.target is None else float(run.target.fraction()),
            **run.measure(),
        }))
if group() is not None:
    sys.exit("the group outlives its end, and so do its threads")
"""


def torchrun(*arguments, cwd):
    """What two processes print; a failure shows what each of them printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # No look-up of this machine's name, which may be slow or lead nowhere: all that is needed is on the loopback.
    environment["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    logs = cwd / f"logs-{time.monotonic_ns()}"
    launch = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "--redirects", "3"]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "--log-dir", str(logs), *arguments]
    with (cwd / "launcher").open("w+") as launcher:
        try:
            code = subprocess.run(
                command, cwd=cwd, env=environment, stdout=launcher, stderr=launcher, timeout=HANGS, check=False
            ).returncode
        except subprocess.TimeoutExpired as error:
            code = str(error)
        launcher.seek(0)
        printed = {"the launcher": launcher.read()}
    for path in sorted(logs.rglob("std*.log")):
        printed[f"process {path.parent.name}, {path.stem}"] = path.read_text()
    if code != 0:
        pytest.fail(f"torchrun: {code}\n" + "\n".join(f"--- {name}\n{text[-4000:]}" for name, text in printed.items()))
    return "".join(text for name, text in printed.items() if name.endswith("stdout"))


def test_a_failure_shows_what_both_processes_printed(tmp_path):
    """The outputs and the errors of each, not the launcher's summary alone."""
    script = "import os, sys\nprint('out of', os.environ['RANK'])\nsys.exit(f'error of {os.environ[\"RANK\"]}')"
    (tmp_path / "script.py").write_text(script)
    with pytest.raises(pytest.fail.Exception) as caught:
        torchrun("script.py", cwd=tmp_path)
    assert "--- process 0, stdout" in caught.value.msg
    assert "--- process 1, stdout" in caught.value.msg
    assert "out of" in caught.value.msg  # the launcher may stop the slower one before it prints
    assert "error of" in caught.value.msg


PRICED = {"gate_learning_rate": 0.03, "lam": (0.1,), "shrink": True, "seed": 1, "epochs": 30}


@pytest.mark.slow
@pytest.mark.parametrize("options", [PRICED, {"target": 0.2, "shrink": True, "seed": 1, "epochs": 15}])
def test_two_processes_agree(options, tmp_path):
    """Parameters and averages equal to the last bit, across shrinkings; both learn, as one process does."""
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = torchrun("script.py", json.dumps(options), cwd=tmp_path)
    out = json.loads(printed.strip().splitlines()[-1])
    assert out["equal"], printed
    assert not out["same_noise"], printed
    single = mnist.Run(load_digits(), Options(**options))
    for _ in range(options["epochs"]):
        single.train_epoch()
    one = single.measure()
    # Half of what chance has, and ten times of what is seen; neither kept all of its units.
    assert max(out["test_error_percent"], one["test_error_percent"]) < 45
    assert max(sum(out["architecture"]), sum(one["architecture"])) < 464
    if "target" in options:
        assert 0.19 < out["fraction"] <= 0.2
