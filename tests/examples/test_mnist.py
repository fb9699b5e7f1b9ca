"""The main example: what it writes, what it refuses, and that a stopped run ends like an uninterrupted one."""

import dataclasses
import itertools
import json

import pytest
import torch
from torch import nn

import mnist
from common.data import load_digits
from common.networks import mlp
from mnist import Options
from pyro_l0.compaction import load_compacted
from pyro_l0.nn.gate import name_gates
from tests.examples.killing import stopped_and_resumed, without_seconds

KEYS = {
    "test_error_percent",
    "best_test_error_percent",
    "architecture",
    "weights",
    "weights_left",
    "macs",
    "macs_left",
    "expected_l0",
    "seconds",
    "history",
}


def saved(folder):
    """The network in a run's folder."""
    plain = mlp((64, 300, 100, 10))
    name_gates(plain, prefix="net.")
    return load_compacted(plain, folder / "pruned").network


@pytest.mark.parametrize("objective", ["l0", "free_energy", "spike_slab"])
def test_every_objective_writes_its_files(objective, tmp_path, capsys):
    """Two epochs on the digits."""
    lam = () if objective == "spike_slab" else (0.05,)
    metrics = mnist.main(Options(objective=objective, epochs=2, lam=lam, out=tmp_path))
    assert metrics.keys() >= KEYS
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert (metrics["weights"], metrics["macs"], metrics["architecture"]) == (50_200, 50_200, [64, 300, 100])
    assert 0 < metrics["expected_l0"] < metrics["weights"]
    assert [entry["epoch"] for entry in metrics["history"]] == [1, 2]
    assert metrics["test_error_percent"] == metrics["history"][-1]["test_error_percent"]
    assert {"training.png", "inputs.png", "checkpoint.pt"} <= {path.name for path in tmp_path.iterdir()}
    printed = capsys.readouterr().out
    assert "weights left" in printed
    assert metrics["findings"][0].startswith("rate-too-small at 'net.0', 'net.3', 'net.6'")  # 30 steps
    assert metrics["findings"][0] in printed


@pytest.mark.parametrize(("family", "beta"), [("hard_concrete", 0.5), ("exponential", 6.0)])
def test_histograms_of_gates(family, beta):
    """Those of 4,000 draws, within five standard errors; a unit that has left counts as closed."""
    run = mnist.Run(load_digits(), Options(family=family, beta=beta, lam=(0.05,)))
    run.units[0] += 16
    shares = run.gate_shares()
    for (site, gate), units in zip(run.guide.posterior().items(), run.units, strict=True):
        draws = gate.sample((4000,))
        counts = torch.histc(draws, 20, 0.0, 1.0)
        counts[0] += 4000 * (units - draws.shape[-1])
        expected = torch.tensor(shares[site])
        assert (counts / (4000 * units) - expected).abs().max() < 5 * (0.25 / counts.sum()) ** 0.5
        assert expected.sum() == pytest.approx(1.0)


def test_multiply_adds_under_dropout():
    """Figure 3's line: each weight is used with the product of the rates of both its units."""
    run = mnist.Run(load_digits(), Options(lam=(0.05,)))
    assert run.dropout_macs() == pytest.approx(64 * 300 * 0.4 + 300 * 100 * 0.25 + 100 * 10 * 0.5)


@pytest.mark.slow
def test_the_default_run(tmp_path):
    """A tenth of the weights, and nothing to find fault with; by chance the error is 90 %."""
    torch.set_num_threads(1)
    metrics = mnist.main(Options(out=tmp_path))
    assert metrics["test_error_percent"] <= 40
    assert 0.08 * metrics["weights"] < metrics["weights_left"] <= 0.1 * metrics["weights"]
    assert metrics["target"]["undecided"] <= 0.05
    assert metrics["findings"] == []


def test_the_digits_have_a_target_if_no_price_is_given():
    """For Eq. 22; it is the retraining's and the prices' default, too."""
    default = Options()
    assert (default.budget, default.prices, default.retraining) == (0.1, (0.0,), 67)
    for options in (
        Options(lam=(0.05,)),
        Options(objective="free_energy"),
        Options(data="mnist"),
        Options(family="bernoulli"),
    ):
        assert (options.budget, options.retraining) == (None, 0)
    assert Options(target=0.3).budget == 0.3


@pytest.mark.slow
def test_retraining_the_compacted_network(tmp_path):
    """The small network is trained in place, and what is saved is what was measured; noise makes it another one."""
    images = load_digits()
    outputs = []
    for noise in (0.0, 0.1):
        metrics = mnist.main(Options(epochs=3, retrain=2, retrain_noise=noise, out=tmp_path, shrink=True))
        with torch.no_grad():
            outputs.append(saved(tmp_path)(images.test_x))
        error = 100 * float((outputs[-1].argmax(-1) != images.test_y).float().mean())
        assert metrics["retrained_error_percent"] == pytest.approx(error)
    assert not torch.allclose(*outputs)
    assert json.loads((tmp_path / "metrics.json").read_text())["retrained_error_percent"] == pytest.approx(error)


@pytest.mark.slow
@pytest.mark.parametrize(("target_of", "shrink"), [("macs", True), ("weights", False), ("parameters", True)])
def test_a_target_is_met_with_nothing_else_to_choose(target_of, shrink, tmp_path):
    """By the network that is saved, whose costs are counted here by hand; it is trained further, for a third longer."""
    options = Options(epochs=12, target=0.15, target_of=target_of, shrink=shrink, out=tmp_path)
    metrics = mnist.main(options)
    sizes = [*metrics["architecture"], 10]
    weights = sum(a * b for a, b in itertools.pairwise(sizes))
    full, used = (50_200, weights) if target_of != "parameters" else (50_610, weights + sum(sizes[1:]))
    # A pixel is 1.9 % of this budget at most.
    assert 0.9 * 0.15 <= used / full <= 0.15
    assert metrics["target"]["fraction"] == pytest.approx(used / full)
    assert metrics[f"{target_of}_left"] == used
    assert metrics["target"]["undecided"] <= 0.05
    plans = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["state"]["shrinker"]
    assert (plans is not None and len(plans["plans"]) > 0) == shrink
    assert sum(layer.weight.numel() for layer in saved(tmp_path).modules() if isinstance(layer, nn.Linear)) == weights
    # Only in the last epochs is the network within the budget.
    assert metrics["history"][0]["architecture"] == [64, 300, 100]
    met = [entry["test_error_percent"] for entry in metrics["history"] if entry[f"{target_of}_left"] <= 0.15 * full]
    assert 0 < len(met) < 12
    assert metrics["best_test_error_percent"] == min(met)
    assert metrics["retrained_error_percent"] < 45  # by chance 90


def test_the_gates_learning_rate_is_a_choice(tmp_path):
    """Not given, it follows from the number of steps."""
    images = load_digits()
    given = mnist.Run(images, Options(target=0.1, epochs=2, gate_learning_rate=0.5))
    assert given.optimiser.param_groups[1]["lr"] == 0.5
    rates = [mnist.Run(images, Options(target=0.1, epochs=n)).optimiser.param_groups[1]["lr"] for n in (4, 40)]
    assert rates[0] == pytest.approx(10 * rates[1], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("done", [1, 5])
def test_stop_and_resume_with_a_target(done, tmp_path, monkeypatch):
    """While the gates still wait, and while the budget falls and units leave: the same metrics to the last bit."""
    options = Options(epochs=7, target=0.2, shrink=True, retrain=0, out=tmp_path)
    straight = mnist.main(dataclasses.replace(options, out=tmp_path / "straight"))
    is_time = lambda run: run.steps == done * run.batches  # noqa: E731
    resumed = stopped_and_resumed(mnist.main, options, mnist.Run, is_time, monkeypatch)
    assert without_seconds(resumed) == without_seconds(straight)
    assert len(straight["history"]) == 7


WHOLE = {"shrink": True, "target": 0.9, "epochs": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of two epochs of three, with everything that one can hold."""
    out = tmp_path_factory.mktemp("trained")
    torch.manual_seed(1)
    mnist.main(Options(out=out, **WHOLE))
    (out / "checkpoint.pt.previous").replace(out / "checkpoint.pt")
    return out / "checkpoint.pt"


def test_fewer_epochs_than_the_checkpoint_has(tmp_path):
    """Two would be reported as one."""
    mnist.main(Options(epochs=2, lam=(0.05,), out=tmp_path))
    with pytest.raises(ValueError, match=r"Expected epochs of at least 2, as many as .*checkpoint\.pt has, but got 1"):
        mnist.main(Options(epochs=1, lam=(0.05,), out=tmp_path, resume=True))


def test_options_that_change_the_training_are_those_of_the_checkpoint(trained):
    """By name; what comes afterwards is free."""
    for other, name in (
        ({"target": 0.8}, "target"),
        ({"target_of": "weights"}, "target"),
        ({"epochs": 4}, "target"),  # along which a budget falls
        ({"gate_learning_rate": 0.01}, "learning_rates"),
        ({"seed": 2}, "seed"),
        ({"weight_decay": 1e-3}, "weight_decay"),
        ({"hold_out": 10}, "hold_out"),
        ({"batch_size": 50}, "batch_size"),
    ):
        with pytest.raises(ValueError, match=f"differs in .*{name}"):
            mnist.main(Options(**{"out": trained.parent, "resume": True, **WHOLE, **other}))
