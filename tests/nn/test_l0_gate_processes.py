"""L0Gates in two processes of torch: the same draws, the same gates, and a budget."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget, factor
from pyro_l0.nn import L0Gate, NetworkCost, NetworkGates
from pyro_l0.training.processes import average_gradients
from tests.processes import in_two

WAYS = ("ddp", "fsdp", "fully_shard")


class Joint(nn.Module):
    """A model that holds its network."""

    def __init__(self, network, model):
        super().__init__()
        self.network, self.model = network, model

    def forward(self, x, y):
        self.model(x, y)


class Classifier(nn.Module):
    """With a checkpointed body, where it is asked for."""

    def __init__(self, sync_draws=True, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        first, second = (L0Gate(n, sync_draws=sync_draws) for n in (10, 7))
        self.body = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), first, nn.Linear(10, 7), nn.ReLU(), second)
        self.head = nn.Linear(7, 3)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.head(self.body(x))
        return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant))


def data(rank):
    return torch.linspace(-1, 1, 48).view(8, 6).sin() + 0.1 * rank, torch.arange(8) % 3


def wrapped(network, way, ignored):
    if way == "ddp":
        return DistributedDataParallel(network)
    if way == "fsdp":
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(network, device_id=cpu, ignored_states=ignored, use_orig_params=True)
    return fully_shard(network, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(ignored))


def same(value):
    both = [torch.empty_like(value) for _ in range(2)]
    distributed.all_gather(both, value.detach().contiguous())
    return torch.equal(*both)


def train(rank, way):
    """A run with a budget, and the network that is left of it, which the first process makes alone."""
    x, y = data(rank)
    network = Classifier()
    plain = copy.deepcopy(network)
    gates = NetworkGates(network)
    target = SparsityTarget(gates, 0.4, NetworkCost(network, x).macs, steps=60)
    of_gates = set(gates.parameters())
    model = wrapped(network, way, list(of_gates))
    weights = [p for p in model.parameters() if p not in of_gates]
    options = {"params": gates.locations(), **target.optimiser_options}
    optimiser = torch.optim.Adam([{"params": weights, "lr": 1e-2}, options])
    torch.manual_seed(10 + rank)  # other noise
    draws = []
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average_gradients(gates.locations())
        target.add_gradient()
        optimiser.step()
        target.ascend()
        draws.append(torch.cat(list(gates().values())))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    before = torch.stack(draws[:15])  # the gates have moved
    found = {"draws": same(torch.stack(draws)), "random": bool((before != before[0]).any())}
    found |= {"gates": same(torch.cat(gates.locations())), "fraction": float(target.fraction())}
    if rank == 0:
        plain.load_state_dict(state)
        found["certificate"] = float(compact(plain, gates.test_gates(), x).certificate)
    return found


def gradients(rank, sync_draws, reentrant=None):
    """Those of two steps under DDP."""
    x, y = data(rank)
    network = Classifier(sync_draws, reentrant)
    model = DistributedDataParallel(network)
    torch.manual_seed(20 + rank)
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in network.parameters()])


def trained_as_a_model(rank):
    """A network whose gates are left to a guide, under DDP; its steps, and whether the processes agree."""
    x, y = data(rank)
    network = Classifier()

    def model(x, y):
        factor("y", -F.cross_entropy(network(x), y))

    guide = AutoGate(model)
    guide(x, y)
    loss = L0_ELBO("l0", lam=0.1)(Joint(network, model), guide)
    parallel = DistributedDataParallel(loss)
    optimiser = torch.optim.Adam(parallel.parameters())
    for _ in range(3):
        optimiser.zero_grad()
        parallel(x, y).backward()
        optimiser.step()
    return same(torch.cat([p.flatten() for p in (*network.parameters(), *guide.parameters())]))


def work(rank, folder):
    found = {way: train(rank, way) for way in WAYS}
    found["model"] = trained_as_a_model(rank)
    for sync_draws in (True, False):
        once = gradients(rank, sync_draws)
        for reentrant in (True, False):
            again = gradients(rank, sync_draws, reentrant)
            found[f"{sync_draws}, {reentrant}"] = torch.allclose(once, again, rtol=0, atol=1e-7)
    own = L0Gate(50, sync_draws=False)
    torch.manual_seed(10 + rank)
    found["own draws"] = same(own())
    network, x = Classifier(), data(rank)[0]
    budget = NetworkBudget(network, x, 0.4, pretrained=True)
    budget.start(10, 0, network.parameters())
    budget.step()  # the first step, before the gates move
    with pytest.raises(ValueError, match="Expected gradients of the gates' locations, but none has one"):
        budget.step()
    sharded = Classifier()
    wrapped(sharded, "fully_shard", [])
    with pytest.raises(ValueError, match="whole in every process, but FSDP sharded its parameters"):
        NetworkGates(sharded).locations()
    return found


@pytest.mark.slow  # starts two processes
def test_two_processes_have_the_same_gates(tmp_path):
    """Each draws its own where it is asked to; a checkpointed block has the gradients of one that is not."""
    both = in_two(work, tmp_path)
    for found in both:
        for way in WAYS:
            assert found[way]["draws"]
            assert found[way]["random"]
            assert found[way]["gates"]
            assert 0.3 < found[way]["fraction"] <= 0.4
        for case in ("True, True", "True, False", "False, True", "False, False"):
            assert found[case], case
        assert not found["own draws"]
        assert found["model"]
    assert all(both[0][way]["certificate"] < 1e-5 for way in WAYS)
