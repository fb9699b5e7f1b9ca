"""What pruning refuses and what it warns of, each by name."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pyro_l0 import prune
from pyro_l0.infer.control.sparsity_target import TargetReport
from pyro_l0.nn import L0Gate
from pyro_l0.pruning.result import notes_on
from tests.networks import Net
from tests.pruning.networks import BATCHES, Mlp, X, Y, prune_with, train


def pruned(network=None, loss=F.cross_entropy, data=BATCHES, example=X[:2], budget=0.4, epochs=3, **options):
    return prune_with(Mlp() if network is None else network, loss, data, example, budget, epochs=epochs, **options)


class Stream(IterableDataset):
    """Without a length."""

    def __iter__(self):
        return iter(BATCHES)


REFUSED = {
    "no network": (dict(network=F.relu), TypeError, "network to be a torch.nn.Module"),
    "a compiled network": (dict(network=torch.compile(Mlp())), TypeError, "OptimizedModule.*give network._orig_mod"),
    "a parallel network": (dict(network=nn.DataParallel(Mlp())), TypeError, "a DataParallel.*give network.module"),
    "a frozen network": (
        dict(network=Mlp().requires_grad_(False)),
        ValueError,
        "Expected weights to train, but none",
    ),
    "an optimiser of other parameters": (
        dict(make_optimiser=lambda _: torch.optim.SGD(Mlp().parameters(), 0.1)),
        ValueError,
        "optimiser of the parameters that it is given.*copy of the network",
    ),
    "a file in no folder": (dict(checkpoint="no/run.pt"), FileNotFoundError, "No such file or directory"),
    "no file": (dict(resume=True), ValueError, "checkpoint to resume from"),
    "no insertion point": (
        dict(network=Net(lambda net, x: net.only(x.flatten(1)), only=nn.Linear(64, 10))),
        ValueError,
        "an insertion point behind which.*found none; write L0Gates.*only: it makes the network's output",
    ),
    "a stream": (dict(data=DataLoader(Stream(), None)), ValueError, "loader with a length.*steps_per_epoch"),
    "a generator": (dict(data=(batch for batch in BATCHES)), ValueError, "loader with a length.*generator"),
    "no batch": (dict(data=[]), ValueError, r"at least one batch.*but got \[\]"),
    "few steps": (dict(epochs=1), ValueError, "at least 10 steps with gates, but epochs=1 of 8 batches.*give 6"),
    "no epochs": (dict(epochs=0), ValueError, "epochs of at least 1, but got 0"),
    "half an epoch": (dict(epochs=1.5), TypeError, "epochs to be a whole number"),
    "finetune": (dict(finetune=1), ValueError, "finetune from 0 to 0.9.*got 1"),
    "accumulate": (dict(accumulate=0), ValueError, "accumulate of at least 1"),
    "target of 1": (dict(budget=1), ValueError, "budget strictly between 0 and 1.*got 1"),
    "target in per cent": (dict(budget=30), ValueError, "budget strictly between 0 and 1.*got 30"),
    "no targets": (dict(budget=[]), ValueError, r"got \[\]"),
    "rising targets": (dict(budget=[0.2, 0.5]), ValueError, "budgets that fall"),
    "unknown cost": (dict(budget={"flops": 0.3}), ValueError, "costs by name, of macs, weights, parameters.*flops"),
    "a count's name": (
        dict(budget={"macs": 0.3}, cost={"macs": lambda gates: gates["0"].sum()}),
        ValueError,
        "costs of your own under other names than macs.*but got 'macs'",
    ),
    "unknown count": (dict(cost="flops"), ValueError, "costs by name, of macs.*'flops'"),
    "below a unit": (dict(budget=0.01), ValueError, "one open gate per site meet, which cost.*larger budget"),
    "too few gates": (
        dict(gates={"second": L0Gate(24)}, budget=0.3),
        ValueError,
        "puts gates behind second, dropout, which can meet it",
    ),
    "gates at no path": (dict(gates={"frist": L0Gate(32)}), ValueError, "'frist'; there are 'first'"),
    "a gate of no size": (dict(gates={"first": L0Gate(31)}), ValueError, "Expected 31 units"),
    "no gates": (dict(gates={}), ValueError, "a network with L0Gates, but it has none"),
    "steps per epoch": (dict(steps_per_epoch=0), ValueError, "steps_per_epoch of at least 1"),
    "half a step per epoch": (dict(steps_per_epoch=2.5), TypeError, "steps_per_epoch to be a whole number"),
    "at least, in front": (dict(at_least={"first": 3}), ValueError, "behind 'second', 'dropout', but got 'first'"),
    "at least too many": (dict(at_least={"second": 25}), ValueError, r"at_least\['second'\] from 0 to the 24.*got 25"),
    "at least too large a part": (dict(at_least={"second": 1.5}), ValueError, "from 0 to the 24 units.*got 1.5"),
    "at least for all": (dict(at_least=0.5), TypeError, "at_least to be a dict of numbers of units"),
    "at least too costly": (dict(at_least={"": 0.9}), ValueError, "at_least and multiple_of keep open meet"),
    "multiple of 0": (dict(multiple_of=0), ValueError, "multiple_of of at least 1, but got 0"),
    "multiple of 8.0": (dict(multiple_of=8.0), TypeError, "multiple_of to be a whole number"),
    "multiple too costly": (dict(multiple_of=64), ValueError, "at_least and multiple_of keep open meet, which cost"),
    "distil's weight": (dict(distil=(0, 2.0)), ValueError, r"a weight in \(0, 1\] and a finite temperature above 0"),
    "distil's temperature": (dict(distil=(0.5, float("nan"))), ValueError, "a finite temperature above 0"),
    "distil's function": (dict(distil=(0.5, lambda a, b: a - b)), RuntimeError, "implicitly created only for scalar"),
    "untrained teacher": (dict(distil=(0.5, 2.0), pretrained=False), ValueError, "to distil from, but pretrained is F"),
    "probabilities": (
        dict(network=nn.Sequential(Mlp(), nn.Softmax(1)), distil=(0.5, 2.0)),
        ValueError,
        "but the network returns probabilities",
    ),
    "one callback": (dict(callbacks=print), TypeError, "callbacks to be a list of functions"),
    "autocast": (dict(autocast=True), TypeError, "autocast to be a type of numbers"),
    "a loss per example": (
        dict(loss=lambda o, y: F.cross_entropy(o, y, reduction="none")),
        RuntimeError,
        "grad can be implicitly created only for scalar outputs",
    ),
    "a loss that is no tensor": (
        dict(loss=lambda o, y: F.cross_entropy(o, y).item()),
        AttributeError,
        "'float' object has no attribute 'backward'",
    ),
    "a loss without gradients": (
        dict(loss=lambda o, y: F.cross_entropy(o.detach(), y)),
        RuntimeError,
        "does not require grad",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    """Before anything is trained."""
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        pruned(**options)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("epoch", [2, 5])
def test_a_loss_that_is_not_finite(tmp_path, epoch):
    """The run ends in that epoch, and the file holds the one before, with finite weights."""
    calls, spoils, path, network = [], [True], tmp_path / "run.pt", Mlp()

    def loss(outputs, targets):
        bad = any(spoils) and len(outputs) == 40 and torch.is_grad_enabled() and len(calls) >= 8 * (epoch - 1) + 3
        if torch.is_grad_enabled():
            calls.append(1)
        return F.cross_entropy(outputs, targets) * (float("nan") if bad else 1.0)

    with pytest.raises(FloatingPointError, match="smaller learning rate"):
        pruned(network, loss=loss, epochs=5, finetune=0.4, pretrained=False, checkpoint=path)
    state = torch.load(path, weights_only=True)["state"]
    assert state["epoch"] == epoch - 1
    assert all(value.isfinite().all() for value in state["network"].values())
    spoils.clear()
    calls.clear()
    resumed = pruned(network, loss=loss, epochs=5, finetune=0.4, pretrained=False, checkpoint=path, resume=True)
    assert resumed.history[-1]["step"] == 40


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_that_are_not_finite():
    """After the very last step, where all losses were finite."""

    class Spoiling(torch.optim.SGD):
        def step(self):
            super().step()
            made.append(1)
            if len(made) == 24:
                self.param_groups[0]["params"][-1].data[0] = torch.inf

    made = []
    with pytest.raises(FloatingPointError, match="weights are not after epoch"):
        pruned(make_optimiser=lambda parameters: Spoiling(parameters, 0.01))


def test_few_steps_are_reported():
    with pytest.warns(UserWarning, match="24 steps are few.*300") as caught:
        result = prune(train(Mlp(), [(X, Y)], 150), F.cross_entropy, BATCHES, X[:2], epochs=3)
    assert {str(warning.message) for warning in caught} <= set(result.report.notes)
    assert caught[0].filename == __file__
    assert "24 steps are few" in str(result.report)


@pytest.mark.filterwarnings("ignore:24 steps are few")
def test_a_network_that_looks_untrained():
    """Unless it is said to be; a trained one does not look so."""
    with pytest.warns(UserWarning, match="looks untrained.*pretrained=False"):
        pruned()
    result = pruned(pretrained=False)
    assert not any("untrained" in note for note in result.report.notes)
    assert result.report.skipped["last"] == "it makes the network's output"
    assert not result.plan.gates.keys() & result.report.skipped.keys()
    assert not any("untrained" in note for note in pruned(train(Mlp(), [(X, Y)], 150)).report.notes)


def test_several_targets():
    """They are one item of the batch; beside each other all but the last would be inputs."""
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3") as caught:
        pruned(data=[(x, y, y) for x, y in BATCHES])
    assert "gave 2 inputs" in caught.value.__notes__[0]
    assert "(image, (label, box))" in caught.value.__notes__[0]


def test_what_the_doctor_finds():
    """Gates that stay where they are; its code begins the note, which is a warning."""
    network = nn.Sequential(nn.Flatten(), L0Gate(64), nn.Linear(64, 16), nn.ReLU(), L0Gate(16), nn.Linear(16, 10))
    network[1].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"gates-not-trained: requires_grad of their parameters is False") as caught:
        result = pruned(network, epochs=38, pretrained=False)
    assert [str(warning.message) for warning in caught] == [note for note in result.report.notes if "not-" in note]


def test_units_that_take_much_and_minima():
    """From what a target says of itself; gates at their minimum are noted and not warned of."""
    reached = TargetReport(
        step=400,
        steps=400,
        fraction={"cost": 0.1},
        budget={"cost": 0.1},
        undecided=0.06,
        multiplier={"cost": 1.0},
        at_minimum=("first.1",),
        open={"first.1": (3, 32)},
    )
    notes = notes_on(reached, 0.07, 400, False, (0.02, 0.5), {"stem": "its size is written into code"})
    expected = {"largest unit takes 7.0%": False, "first.1": False, "was 0.02 and is 0.5": True, "'stem'": True}
    for words, is_warning in expected.items():
        assert [note.is_warning for note in notes if words in note.text] == [is_warning]
    healthy = notes_on(reached, 0.01, 400, False, (-0.98, -0.97), {})
    assert len(healthy) == 1  # an error below 0 has no multiple to compare with


class _Picky(nn.Module):
    """Takes eight units or four, which no operation shows."""

    def forward(self, x):
        if len(x.mT) not in (4, 8):
            raise RuntimeError("eight units, or four")
        return x


def test_a_network_that_cannot_be_cut_comes_back_whole(tmp_path):
    """Trained, with fixed gates; the warning names the line, and the checkpoint stays."""
    torch.manual_seed(0)
    x = torch.randn(256, 3)
    data = DataLoader(TensorDataset(x, x[:, :1].sin()), 32)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), _Picky(), nn.Linear(8, 1))
    options = dict(gates={"2": L0Gate(8)}, epochs=40, pretrained=False, checkpoint=tmp_path / "run.pt")
    with pytest.warns(UserWarning, match=r"whole, with fixed gates.*line \d+ of"):
        result = prune_with(network, F.mse_loss, data, x[:2], 0.65, **options)
    assert result.network[0].out_features == 8
    assert result.report.left["macs"][0] == result.report.left["macs"][1]
    assert (tmp_path / "run.pt").exists()
    assert len(result.network(x).unique()) > 100
