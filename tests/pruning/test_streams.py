"""Loaders without a length: streams that go on from epoch to epoch, and from where a killed run stood."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

from pyro_l0.training.epochs import Stream
from tests.pruning.networks import Mlp, StoppedError, X, Y, prune_with, same, stopping

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


class Shuffled(IterableDataset):
    """Batches in an order and with noise from torch's generator; it notes which were read."""

    def __init__(self, number=6):
        self.number, self.read = number, []

    def __iter__(self):
        for i in torch.randperm(self.number).tolist():
            self.read.append(i)
            x = X[40 * i : 40 * i + 40]
            yield x + 0.01 * torch.randn(x.shape), Y[40 * i : 40 * i + 40]


def generator(number=None):
    """Batches without an end, or so many."""
    for i in itertools.count() if number is None else range(number):
        yield X[40 * (i % 8) : 40 * (i % 8) + 40], Y[40 * (i % 8) : 40 * (i % 8) + 40]


LOADERS = {
    "data set": lambda: DataLoader(Shuffled(), None),
    "workers' queue": lambda: DataLoader(Shuffled(), None, generator=torch.Generator().manual_seed(4)),
    "generator": generator,
    "list": lambda: list(generator(5)),
}


def run(loader, stop=None, path=None, resume=False, kind=Mlp, **options):
    torch.manual_seed(3)
    settings = {"epochs": 6, "steps_per_epoch": 8, "finetune": 0.34, "callbacks": [stopping(stop)], **options}
    network = kind()
    if resume:
        torch.rand(17)  # what came before in the resumed process is of no account
    return prune_with(network, F.cross_entropy, loader, X[:2], 0.4, checkpoint=path, resume=resume, **settings)


@pytest.mark.parametrize(("name", "stop"), [("data set", 3), ("workers' queue", 6), ("generator", 3), ("list", 6)])
def test_a_killed_run_goes_on_in_the_middle_of_a_pass(name, stop, tmp_path):
    """Bit for bit; epochs of 8 steps are no whole passes."""
    whole = run(LOADERS[name]())
    assert [entry["step"] for entry in whole.history] == [8, 16, 24, 32, 40, 48]
    with pytest.raises(StoppedError):
        run(LOADERS[name](), stop, tmp_path / "run.pt")
    resumed = run(LOADERS[name](), path=tmp_path / "run.pt", resume=True)
    assert same(resumed.network, whole.network)
    assert resumed.history == whole.history


def test_every_batch_is_taken_in_turn():
    """From epoch to epoch, and from pass to pass."""
    data = Shuffled(5)
    stream = Stream(data, 3)
    assert len(stream) == 3
    for _ in range(5):
        assert len(list(stream)) == 3
    assert [sorted(data.read[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    once = Stream(iter(range(10)), 4)
    assert list(once.some()) == [0]
    assert (list(once), list(once)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert list(once.some()) == list(range(8))
    with pytest.raises(ValueError, match=r"again and again, but it ended after 10; .* such as a DataLoader"):
        list(once)
    with pytest.raises(ValueError, match="ended after 0"):
        list(Stream([], 3))
