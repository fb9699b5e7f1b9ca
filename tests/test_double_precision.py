"""The whole library under a default of double precision, in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
torch.set_default_dtype(torch.float64)
import pyro, pyro.distributions as dist
from torch import nn
from pyro_l0 import BernoulliGate, HardConcrete, prune
from pyro_l0.compaction import compact
from pyro_l0.diagnostics import to_arviz
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget, check_fit, factor, fit
from pyro_l0.nn import Gate, NetworkCost
from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabRegressor

pyro.set_rng_seed(0)
x = torch.randn(200, 4)
y = x @ torch.tensor([1.0, 0.0, -1.0, 0.0]) + torch.randn(200)

for dtype in (torch.float64, torch.float32):
    net = nn.Sequential(Gate(4), nn.Linear(4, 16), nn.Tanh(), Gate(16), nn.Linear(16, 1)).to(dtype)
    def model(x, y):
        factor("y", -(net(x)[:, 0] - y).square().sum())
    data = x.to(dtype), y.to(dtype)
    guide = AutoGate(model)
    guide(*data)
    cost = NetworkCost(net, data[0][:2])
    loss = L0_ELBO("l0", lam=0.01, group_size=cost.group_sizes)(model, guide)
    target = SparsityTarget(guide, 0.5, cost.macs, steps=60)
    weights = torch.optim.Adam(net.parameters(), 1e-2)
    gates = torch.optim.Adam(guide.locations(), **target.optimiser_options)
    for _ in range(60):
        weights.zero_grad(), gates.zero_grad()
        loss(*data).backward()
        target.add_gradient()
        weights.step(), gates.step()
        target.ascend()
    assert target.fraction()[0] <= 0.5
    assert compact(net, guide.test_gates(), data[0]).certificate < 1e-5
    plain = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)).to(dtype)
    batches = [tuple(part[i : i + 40] for part in data) for i in range(0, 200, 40)]
    found = prune(plain, nn.functional.mse_loss, batches, data[0][:2], 0.5, epochs=60, pretrained=False)
    assert next(found.network.parameters()).dtype == dtype

def regression(x, y):
    with pyro.plate("features", 4):
        z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.3)))
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ (z * w), 1.0), obs=y)

guide = AutoSpikeSlab(regression, slab={"w": "z"}, gates="autoregressive", slabs="structured")
fit(regression, guide, x, y, seed=0)
check_fit(regression, guide, x, y)
assert guide.active_probs()["z"].dtype == torch.float64
to_arviz(regression, guide, x, y, draws=10, seed=0)
assert SpikeSlabRegressor(random_state=0).fit(x.numpy(), y.numpy()).pip_[0] > 0.9
SpikeSlabClassifier(random_state=0).fit(x.numpy(), (y > 0).numpy())
assert HardConcrete.from_active_prob(0.5).active_prob.dtype == torch.float64
"""


@pytest.mark.slow
def test_everything_runs_under_a_default_of_double_precision():
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
