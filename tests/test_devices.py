"""A training step on torch's meta device, which holds shapes and no numbers.

There a tensor that stayed behind in main memory and every read back by the host raise, as they would stall a step on an
accelerator. So these tests show without one that a step keeps to one device and asks for no value.
"""

from __future__ import annotations

from typing import Any, get_args

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor, nn

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget, factor
from pyro_l0.infer.elbo.elbo import Objective
from pyro_l0.infer.elbo.estimators import EstimatorName
from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.square_norms import square_norms
from tests.cases import FAMILIES

NUM_DATA = 100
ESTIMATORS: tuple[EstimatorName, ...] = get_args(EstimatorName)
MLP, CONVOLUTIONS = "dense layers", "convolutions"


def network(kind: str) -> tuple[nn.Module, Tensor]:
    """A small network of each kind of gated layer, and a batch for it."""
    if kind == MLP:
        return nn.Sequential(L0Gate(6), nn.Linear(6, 5), nn.ReLU(), L0Gate(5), nn.Linear(5, 3)), torch.randn(4, 6)
    maps = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), L0Gate(4, dim=1), nn.Conv2d(4, 5, 3), nn.ReLU()]
    return nn.Sequential(*maps, L0Gate(5, dim=1), nn.Flatten(), L0Gate(80), nn.Linear(80, 3)), torch.randn(8, 2, 8, 8)


class Model(nn.Module):
    """A network and its likelihood."""

    def __init__(self, net: nn.Module, in_plate: bool = False) -> None:
        super().__init__()
        self.net = net
        self.in_plate = in_plate

    def forward(self, x: Tensor, y: Tensor) -> None:
        logits = self.net(x)
        if self.in_plate:
            with pyro.plate("data", NUM_DATA, subsample=torch.arange(len(x))):
                pyro.sample("y", dist.Categorical(logits=logits, validate_args=False), obs=y)
        else:
            factor("y", -NUM_DATA * F.cross_entropy(logits, y))


def train_on_meta(loss: Any, data: tuple[Tensor, ...], target: SparsityTarget | None = None) -> None:
    """Some steps after moving everything; all parameters get gradients, and nothing comes back."""
    data = tuple(x.to("meta") for x in data)
    loss.to("meta")
    optimiser = torch.optim.Adam(loss.parameters(), foreach=True)
    for _ in range(2):
        optimiser.zero_grad()
        value = loss(*data)
        value.backward()
        if target is not None:
            target.add_gradient()
        optimiser.step()
        if target is not None:
            target.ascend()
        assert value.device.type == "meta"
    missing = [name for name, p in loss.named_parameters() if p.grad is None or p.device.type != "meta"]
    assert not missing


def gated_step(
    kind: str,
    objective: Objective = "l0",
    family: type[GateDistribution] = HardConcrete,
    estimator: EstimatorName | None = None,
    *,
    decay: bool = False,
    budget: bool = False,
    particles: int = 1,
    in_plate: bool = False,
) -> None:
    """Train a gated network on the meta device."""
    torch.manual_seed(0)
    net, x = network(kind)
    model, y = Model(net, in_plate), torch.zeros(len(x), dtype=torch.long)
    name_gates(model)
    cost = NetworkCost(net, x)
    guide = AutoGate(model, family)
    elbo = L0_ELBO(
        objective,
        lam=0.1,
        group_size=cost.group_sizes,
        weight_decay=0.1 if decay else 0.0,
        square_norm=square_norms(net, x) if decay else None,
        estimator=estimator,
        num_particles=particles,
    )
    loss = elbo(model, guide)
    loss(x, y)
    target = SparsityTarget(guide, 0.3, cost.macs, steps=2000) if budget else None
    if target is not None:
        target.step = target.start + 1  # a look at the deterministic network, which reads the device, is some steps off
    train_on_meta(loss, (x, y), target)


STEPS: tuple[dict[str, Any], ...] = (
    *({"objective": objective, "family": f.gate} for f in FAMILIES for objective in ("l0", "free_energy")),
    *({"objective": objective, "family": BernoulliGate, "estimator": "arm"} for objective in ("l0", "free_energy")),
    *({"family": BernoulliGate, "estimator": x, "particles": 2, "objective": "free_energy"} for x in ESTIMATORS),
    *({"decay": True}, {"budget": True}, {"decay": True, "budget": True}),
    *({"objective": "free_energy", "particles": 2}, {"in_plate": True}),
)


@pytest.mark.parametrize("kind", [MLP, CONVOLUTIONS])
@pytest.mark.parametrize(
    "step", STEPS, ids=lambda step: ", ".join(getattr(x, "__name__", f"{k} {x}") for k, x in step.items())
)
def test_a_network_trains_without_reading_the_device(kind: str, step: dict[str, Any]) -> None:
    """Every family, objective and estimator, weight decay, targets, particles and plates."""
    gated_step(kind, **step)


def regression(x: Tensor, y: Tensor) -> None:
    """Spike and slab in a plate, with data in a subsampled one."""
    zero = x.new_zeros(())
    with pyro.plate("features", 5):
        z = pyro.sample("z", HardConcrete(zero, validate_args=False))
        w = pyro.sample("w", dist.Normal(zero, zero + 1.0, validate_args=False))
    with pyro.plate("data", NUM_DATA, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal(x @ (z * w), 0.5, validate_args=False), obs=y)


def regression_with_noise(x: Tensor, y: Tensor) -> None:
    """The same with the noise as a latent that is no gate."""
    zero = x.new_zeros(())
    noise = pyro.sample("noise", dist.LogNormal(zero, zero + 1.0, validate_args=False))
    z = pyro.sample("z", HardConcrete(zero, validate_args=False).expand([5]).to_event(1))
    with pyro.plate("data", NUM_DATA, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal(x @ z, noise, validate_args=False), obs=y)


def test_spike_and_slab_in_plates_trains_without_reading_the_device() -> None:
    torch.manual_seed(0)
    data = torch.randn(8, 5), torch.randn(8)
    with pyro.validation_enabled(False):
        loss = L0_ELBO("spike_slab", slab={"w": "z"})(regression, AutoSpikeSlab(regression, slab={"w": "z"}))
        loss(*data)
        train_on_meta(loss, data)


def test_a_list_of_guides_trains_without_reading_the_device() -> None:
    torch.manual_seed(0)
    data = torch.randn(8, 5), torch.randn(8)
    # A move to the meta device makes new parameters, of which Pyro's global store does not hear.
    with pyro.validation_enabled(False), pyro.settings.context(module_local_params=True):
        guide = AutoGuideList(regression_with_noise)
        guide.append(AutoGate(regression_with_noise))
        guide.append(AutoNormal(pyro.poutine.block(regression_with_noise, expose=["noise"])))
        loss = L0_ELBO("free_energy")(regression_with_noise, guide)
        loss(*data)
        train_on_meta(loss, data)


def test_a_read_back_by_the_host_would_be_noticed() -> None:
    class Reading(Model):
        def forward(self, x: Tensor, y: Tensor) -> None:
            if self.net(x).sum() > 0:
                super().forward(x, y)

    net, x = network(MLP)
    model = Reading(net)
    name_gates(model)
    loss = L0_ELBO("l0")(model, AutoGate(model))
    y = torch.zeros(len(x), dtype=torch.long)
    loss(x, y)
    with pytest.raises(RuntimeError, match=r"[Mm]eta"):
        train_on_meta(loss, (x, y))
