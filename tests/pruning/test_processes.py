"""Two processes of a group prune one network together."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pyro_l0 import prune
from tests.processes import in_two
from tests.pruning.networks import ResidualCnn, digits, prune_with


def work(rank, folder):
    torch.manual_seed(rank)  # other weights, other noise
    network, (x, y) = ResidualCnn(4), digits(320)
    data = TensorDataset(x, y)
    loader = DataLoader(data, 20, sampler=DistributedSampler(data, 2, rank))
    path = str(folder / "run.pt")
    options = {"epochs": 4, "checkpoint": path, "pretrained": False}
    found = {}
    try:
        prune(network, F.cross_entropy, loader, x[:2], 0.5, epochs=4 + rank)
    except ValueError as error:
        found["refused"] = str(error)
    result = prune_with(network, F.cross_entropy, loader, x[:2], 0.5, **options)
    again = prune_with(network, F.cross_entropy, loader, x[:2], 0.5, resume=True, **options)
    own = torch.cat([value.flatten().double() for value in result.network.state_dict().values()])
    resumed = torch.cat([value.flatten().double() for value in again.network.state_dict().values()])
    both = [torch.empty_like(own) for _ in range(2)]
    distributed.all_gather(both, own)
    found["equal"] = torch.equal(*both)
    found["resumed"] = torch.equal(own, resumed)
    found["of_budget"] = result.report.target.of_budget
    found["random"] = len(torch.load(path, weights_only=True)["random"])
    found["loss"] = result.history[-1]["loss"] < result.history[0]["loss"]
    means = [b for name, b in result.network.named_buffers() if "running_mean" in name]
    found["moved"] = any(bool((b != 0).any()) for b in means)
    return found


@pytest.mark.slow  # starts two processes
def test_they_return_one_network(tmp_path):
    """Bit for bit, statistics of BatchNorm included, though their data, noise and first weights differ.

    Loaders of two lengths are refused: one process would wait for the other at the end.
    """
    for found in in_two(work, tmp_path):
        assert found["equal"]
        assert found["resumed"]
        assert found["random"] == 2
        assert found["loss"]
        assert found["moved"]
        assert 0.8 < found["of_budget"] <= 1
        assert "loaders of one length in all processes" in found["refused"]
