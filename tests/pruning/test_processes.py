"""Two processes of a group prune one network together."""

import json
import multiprocessing
import os
import socket
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pyro_l0 import prune
from tests.pruning.networks import ResidualCnn, digits


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def work(rank, port, folder):
    """What each process does; what it found goes into a file of its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    found = {}
    try:
        distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        torch.manual_seed(rank)  # other weights, other noise
        network, (x, y) = ResidualCnn(4), digits(320)
        data = TensorDataset(x, y)
        loader = DataLoader(data, 20, sampler=DistributedSampler(data, 2, rank))
        path = os.path.join(folder, "run.pt")
        options = {"epochs": 4, "checkpoint": path, "pretrained": False}
        try:
            prune(network, F.cross_entropy, loader, x[:2], 0.5, epochs=4 + rank)
        except ValueError as error:
            found["refused"] = str(error)
        result = prune(network, F.cross_entropy, loader, x[:2], 0.5, **options)
        again = prune(network, F.cross_entropy, loader, x[:2], 0.5, resume=True, **options)
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
    except Exception:  # the other process is told by a file as well
        found["error"] = traceback.format_exc()
    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(found, file)
    os._exit(0)  # a group that failed would wait for the other process


def in_two(folder):
    context = multiprocessing.get_context("spawn")
    port = free_port()
    both = [context.Process(target=work, args=(rank, port, str(folder))) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(200)
        if process.is_alive():
            process.kill()
            pytest.fail("a process hangs")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow  # starts two processes
def test_they_return_one_network(tmp_path):
    """Bit for bit, statistics of BatchNorm included, though their data, noise and first weights differ.

    Loaders of two lengths are refused: one process would wait for the other at the end.
    """
    for found in in_two(tmp_path):
        assert "error" not in found, found["error"]
        assert found["equal"]
        assert found["resumed"]
        assert found["random"] == 2
        assert found["loss"]
        assert found["moved"]
        assert 0.8 < found["of_budget"] <= 1
        assert "loaders of one length in all processes" in found["refused"]
