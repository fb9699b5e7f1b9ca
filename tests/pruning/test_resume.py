"""Killed runs that go on bit for bit, their file, which is of one run alone, and runs of two processes."""

import itertools
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from pyro_l0 import prune
from pyro_l0.compaction.storage import hold
from pyro_l0.nn import L0Gate
from pyro_l0.pruning.run import named
from pyro_l0.training.epochs import Stream
from tests.processes import in_two
from tests.pruning.networks import (
    Mlp,
    ResidualCnn,
    StoppedError,
    X,
    Y,
    digit_batches,
    digits,
    prune_with,
    same,
    stopping,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


def run(kind=Mlp, budget=0.4, seed=3, stop=None, path=None, resume=False, loss=F.cross_entropy, loader=None, **options):
    """Prune a network from a seed; ``stop`` is the epoch whose end is not reached."""
    torch.manual_seed(seed)
    network = kind()
    data = DataLoader(TensorDataset(X, Y), 40, shuffle=True) if loader is None else loader()
    settings = {"epochs": 6, "finetune": 0.34, "checkpoint": path, "resume": resume, "callbacks": [stopping(stop)]}
    if resume:
        torch.rand(17)  # what came before in the resumed process is of no account
    return prune_with(network, loss, data, X[:2], budget, **settings | options)


def own_generator():
    return DataLoader(TensorDataset(X, Y), 40, shuffle=True, generator=torch.Generator().manual_seed(5))


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


def error(network):
    """It draws random numbers of its own: even this loader does, from torch's generator."""
    wrong = [float((network(x).argmax(1) != y).float().sum()) for x, y in DataLoader(TensorDataset(X, Y), 100)]
    return sum(wrong) / len(Y)


def sgd(rate, **options):
    """A factory of optimisers."""
    return lambda parameters: torch.optim.SGD(parameters, rate, **options)


def one_cycle(optimiser, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.05, total_steps=steps)


IN_THE_MIDST = {"steps_per_epoch": 8}  # which are no whole passes
RESUMED = {
    "gates move": (4, {}),  # in the first four epochs; the fifth and the sixth train what was cut
    "what was cut is trained": (6, {}),
    "budgets one after the other": (3, {"budget": [0.6, 0.3]}),
    "networks that wait for their training": (8, {"budget": [0.6, 0.3]}),
    "budgets at once": (3, {"budget": {"macs": 0.5, "parameters": 0.4}}),
    "units that stay": (3, {"at_least": {"second": 9}, "multiple_of": 4}),
    "distillation": (3, {"distil": (0.5, 2.0)}),
    "random numbers of the loader and of dropout": (6, {"kind": lambda: Mlp(dropout=0.2), "loader": own_generator}),
    "a stream": (3, {"loader": lambda: DataLoader(Shuffled(), None)} | IN_THE_MIDST),
    "a stream by workers' queue": (
        6,
        {"loader": lambda: DataLoader(Shuffled(), None, generator=torch.Generator().manual_seed(4))} | IN_THE_MIDST,
    ),
    "a generator": (3, {"loader": generator} | IN_THE_MIDST),
    "a list": (6, {"loader": lambda: list(generator(5))} | IN_THE_MIDST),
    "batch norm and a user's optimiser": (
        6,
        {"kind": lambda: ResidualCnn(4), "budget": 0.5, "evaluate": error}
        | {"make_optimiser": sgd(0.05, momentum=0.9), "make_schedule": one_cycle},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "user" in name else []) for name in RESUMED]
)
def test_a_killed_run_goes_on(name, tmp_path):
    """In each phase, with each kind of budget, of which a network each is met, and in the middle of a pass."""
    stop, options = RESUMED[name]
    whole, path = run(**options), tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        run(stop=stop, path=path, **options)
    resumed = run(path=path, resume=True, **options)
    assert (resumed.history, resumed.plan) == (whole.history, whole.plan)
    pairs = list(zip((*resumed.on_the_way, resumed), (*whole.on_the_way, whole), strict=True))
    assert all(same(one.network, other.network) and one.report == other.report for one, other in pairs)
    budget = options.get("budget", 0.4)
    budgets = [
        part if isinstance(part, dict) else {"cost": part}
        for part in (budget if isinstance(budget, list) else [budget])
    ]
    assert [dict(one.report.target.budget) for one, _ in pairs] == [pytest.approx(part) for part in budgets]
    assert all(one.report.target.of_budget <= 1 for one in whole.on_the_way)
    if "steps_per_epoch" in options:
        assert [entry["step"] for entry in whole.history] == [8, 16, 24, 32, 40, 48]


def test_every_batch_of_a_stream_is_taken_in_turn():
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


def test_a_finished_run_hands_out_its_network_again(tmp_path):
    path = tmp_path / "run.pt"
    first = run(path=path)
    assert same(run(path=path, resume=True).network, first.network)


def weigh(outputs, targets, weight):
    return weight * F.cross_entropy(outputs, targets)


def weighted(weight):
    """A loss with a number."""
    return partial(weigh, weight=weight)


def gates(**options):
    return {"second": L0Gate(24, family_options=options)}


FIRST = {"budget": 0.8, "loss": weighted(2.0), "make_optimiser": sgd(0.01), "gates": gates(temperature=0.6)}
OTHERS = {
    "network": [{"seed": 4}],
    "budget": [{"budget": 0.7}],
    "cost": [{"cost": "weights"}],
    "steps": [{"epochs": 7}, {"accumulate": 2}],
    "pretrained": [{"pretrained": False}],
    "autocast": [{"autocast": torch.bfloat16}],
    "at_least, multiple_of": [{"at_least": {"second": 4}, "multiple_of": 2}],
    "distil": [{"distil": (0.5, 2.0)}],
    "loader's generators": [{"loader": own_generator}],
    "loss": [{"loss": weighted(3.0)}, {"loss": F.cross_entropy}, {"loss": nn.CrossEntropyLoss()}],
    "optimiser, optimiser's numbers": [{"make_optimiser": lambda parameters: torch.optim.Adam(parameters, 0.01)}],
    "optimiser's numbers": [{"make_optimiser": sgd(0.02)}],
    "gates": [{"gates": gates(temperature=0.2)}, {"gates": gates(temperature=0.6, gamma=-0.2)}],
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The file of a run that was stopped."""
    path = tmp_path_factory.mktemp("stopped") / "run.pt"
    with pytest.raises(StoppedError):
        run(path=path, stop=2, **FIRST)
    return path


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_run_is_refused(name, stopped):
    """By the name of what differs; the file stays."""
    content = stopped.read_bytes()
    for other in OTHERS[name]:
        with pytest.raises(ValueError, match=f"checkpoint of this run.*differs in {name};"):
            run(path=stopped, resume=True, **FIRST | other)
    with pytest.raises(FileExistsError, match="resume=True"):
        run(path=stopped, **FIRST)
    assert stopped.read_bytes() == content


def test_equal_arguments_made_anew_are_of_one_run(stopped, tmp_path):
    path = shutil.copy(stopped, tmp_path / "run.pt")
    again = {"loss": weighted(2.0), "make_optimiser": sgd(0.01), "gates": gates(temperature=0.6)}
    run(path=path, resume=True, **FIRST | again)


def test_losses_have_texts_that_tell_them_apart():
    """And equal ones have equal texts, so that a run goes on in another process."""
    makers = [
        lambda: F.mse_loss,
        lambda: lambda a, b: F.l1_loss(a, b),
        lambda: nn.CrossEntropyLoss(),
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])),
        lambda: weighted(2.0),
        lambda: weighted(torch.tensor([1.0])),
        lambda: weigh,
        lambda: torch.nn.functional.logsigmoid,
    ]
    texts = [named(make()) for make in makers]
    assert texts == [named(make()) for make in makers]
    assert len(set(texts)) == len(texts)


def test_workers_that_persist_give_whole_epochs():
    """The iterator of such a loader is one for all passes: nothing may pass over it in the midst of an epoch."""
    seen = []

    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Mlp()

        def forward(self, images):
            if self.training:
                seen.append(len(images))
            return self.inner(images)

    loader = digit_batches(120, 20, num_workers=1, persistent_workers=True)
    result = prune_with(Noting(), F.cross_entropy, loader, X[:2], 0.5, epochs=5, finetune=0.3)
    assert type(result.network.inner) is Mlp
    assert sum(entry["step"] == 30 for entry in result.history) == 1
    assert [entry["epoch"] for entry in result.history] == list(range(1, len(result.history) + 1))
    assert seen[-9:] == [20] * 9


@pytest.mark.parametrize("epoch", [2, 6])
def test_the_state_is_one_dict(tmp_path, epoch):
    """Of the gates' controller there is nothing any more when they are cut; the steps of both are one number."""
    path = tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        run(path=path, stop=epoch)
    state = torch.load(path, weights_only=True)["state"]
    control = {"steps", "locations", "gate_optimiser", "integral", "of_loss", "of_penalty", "coefficients"}
    phase = {"network", "optimiser", "schedule"}
    run_s = {"step", "epoch", "tuned", "findings", "history", "cuts", "scored", "latency"}
    assert state.keys() == run_s | phase | (control if epoch == 2 else set())
    assert state["step"] == 8 * state["epoch"] == 8 * (epoch - 1)


def test_no_link_is_written_through(tmp_path):
    """Neither one that waits at a name that a saver may use nor one in the file's place."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("run.pt.tmp", "run.pt.previous"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(StoppedError):
        run(path=tmp_path / "run.pt", stop=3)
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
        run(path=path)
    other.kill()
    other.communicate()
    with hold(path):
        with pytest.raises(ValueError, match=held):
            run(path=path)
        refused = subprocess.run([sys.executable, "-c", HELD, path], check=False, stderr=subprocess.PIPE)
        assert b"no other run writes" in refused.stderr


def in_a_process(rank, folder):
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
def test_two_processes_return_one_network(tmp_path):
    """Bit for bit, statistics of BatchNorm included, though their data, noise and first weights differ.

    Loaders of two lengths are refused: one process would wait for the other at the end.
    """
    for found in in_two(in_a_process, tmp_path):
        assert found["equal"]
        assert found["resumed"]
        assert found["random"] == 2
        assert found["loss"]
        assert found["moved"]
        assert 0.8 < found["of_budget"] <= 1
        assert "loaders of one length in all processes" in found["refused"]
