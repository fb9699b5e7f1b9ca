"""A run that was killed and goes on from its file ends bit for bit as one that was not."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from pyro_l0.nn import L0Gate
from tests.pruning.networks import Mlp, ResidualCnn, StoppedError, X, Y, digit_batches, prune_with, same, stopping

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


def run(kind=Mlp, budget=0.4, seed=3, stop=None, path=None, resume=False, generator=False, **options):
    """Prune a network from a seed; ``stop`` is the epoch whose end is not reached."""
    torch.manual_seed(seed)
    network = kind()
    own = {"generator": torch.Generator().manual_seed(5)} if generator else {}
    loader = DataLoader(TensorDataset(X, Y), 40, shuffle=True, **own)
    settings = {"epochs": 6, "finetune": 0.34, "checkpoint": path, "resume": resume, "callbacks": [stopping(stop)]}
    if resume:
        torch.rand(17)  # what came before in the resumed process is of no account
    return prune_with(network, F.cross_entropy, loader, X[:2], budget, **{**settings, **options})


def check_resumed(tmp_path, stop, **options):
    whole = run(**options)
    path = tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        run(stop=stop, path=path, **options)
    resumed = run(path=path, resume=True, **options)
    assert same(resumed.network, whole.network)
    assert resumed.history == whole.history
    assert resumed.report == whole.report
    assert resumed.plan == whole.plan
    assert len(resumed.on_the_way) == len(whole.on_the_way)
    for one, other in zip(resumed.on_the_way, whole.on_the_way, strict=True):
        assert same(one.network, other.network)
        assert one.report == other.report
    return whole


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (4, {}),  # gates move in the first four epochs; the fifth and the sixth train what was cut
        (6, {}),
        (3, {"budget": [0.6, 0.3]}),
        (8, {"budget": [0.6, 0.3]}),  # networks that wait for their training are in the file, too
        (3, {"at_least": {"second": 9}, "multiple_of": 4}),
        (3, {"distil": (0.5, 2.0)}),
        (6, {"kind": lambda: Mlp(dropout=0.2), "generator": True}),  # random numbers of the loader and of dropout
    ],
)
def test_in_each_phase(tmp_path, stop, options):
    """With one budget and with several, each of which a network meets."""
    whole = check_resumed(tmp_path, stop, **options)
    budgets = options.get("budget", 0.4)
    found = [one.report.target.budget["cost"] for one in (*whole.on_the_way, whole)]
    assert found == pytest.approx(budgets if isinstance(budgets, list) else [budgets])
    assert all(one.report.target.of_budget <= 1 for one in whole.on_the_way)


def test_with_several_budgets_at_once(tmp_path):
    """While the gates move, each with its own multiplier."""
    whole = check_resumed(tmp_path, 3, budget={"macs": 0.5, "parameters": 0.4})
    assert set(whole.report.target.budget) == {"macs", "parameters"}


@pytest.mark.slow
def test_with_batch_norm_and_a_user_s_optimiser(tmp_path):
    """And a function for the error that draws random numbers of its own."""
    error_loader = DataLoader(TensorDataset(X, Y), 100)  # even this one draws from torch's generator

    def error(network):
        wrong = [float((network(x).argmax(1) != y).float().sum()) for x, y in error_loader]
        return sum(wrong) / len(Y)

    check_resumed(
        tmp_path,
        6,
        kind=lambda: ResidualCnn(4),
        budget=0.5,
        evaluate=error,
        make_optimiser=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
        make_schedule=lambda optimiser, steps: torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.05, total_steps=steps),
    )


def test_a_finished_run_hands_out_its_network_again(tmp_path):
    path = tmp_path / "run.pt"
    first = run(path=path)
    assert same(run(path=path, resume=True).network, first.network)


@pytest.mark.slow
def test_a_file_of_another_run_is_refused(tmp_path):
    """By the name of what differs."""
    path = tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        run(path=path, stop=3)
    content = path.read_bytes()
    for other, name in (
        ({"seed": 4}, "network"),
        ({"budget": 0.3}, "budget"),
        ({"cost": "weights"}, "cost"),
        ({"epochs": 7}, "steps"),
        ({"accumulate": 2}, "steps"),
        ({"pretrained": False}, "pretrained"),
        ({"autocast": torch.bfloat16}, "autocast"),
        ({"at_least": {"second": 9}, "multiple_of": 4}, "at_least, multiple_of"),
        ({"distil": (0.5, 2.0)}, "distil"),
        ({"make_optimiser": lambda parameters: torch.optim.SGD(parameters, 0.1)}, "optimiser"),
        ({"generator": True}, "loader's generators"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint of this run.*differs in {name}[;,]"):
            run(path=path, resume=True, **other)
    assert path.read_bytes() == content
    with pytest.raises(FileExistsError, match="resume=True"):
        run(path=path)


def test_where_a_file_can_not_be(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        run(path=tmp_path / "no" / "run.pt")
    with pytest.raises(ValueError, match="checkpoint to resume from"):
        run(resume=True)


def test_workers_that_persist_give_whole_epochs():
    """The iterator of such a loader is one for all passes: nothing may pass over it in the midst of an epoch."""
    seen = []

    class Noting(torch.nn.Module):
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


@pytest.mark.parametrize("other", [{"temperature": 0.2}, {"temperature": 0.6, "gamma": -0.2}])
def test_gates_of_other_options_are_another_run(tmp_path, other):
    path = tmp_path / "run.pt"

    def gates(options):
        return {"second": L0Gate(24, family_options=options)}

    with pytest.raises(StoppedError):
        run(stop=2, path=path, budget=0.8, gates=gates({"temperature": 0.6}))
    with pytest.raises(ValueError, match="gates"):
        run(path=path, resume=True, budget=0.8, gates=gates(other))
