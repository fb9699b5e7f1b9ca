"""Ways to train and kinds of data that users bring."""

import warnings
from collections import UserDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from pyro_l0 import prune
from pyro_l0.nn import L0Gate
from pyro_l0.nn.gate import GateLayer
from pyro_l0.pruning import Training
from pyro_l0.pruning.phases import BatchLoss, Phase
from tests.networks import Net
from tests.pruning.networks import Mlp, X, Y, prune_with, same, train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


def pruned(network=None, data=None, loss=F.cross_entropy, budget=0.4, epochs=4, **options):
    data = data if data is not None else DataLoader(TensorDataset(X, Y), 40, shuffle=True)
    return prune_with(network or Mlp(), loss, data, options.pop("example", X[:2]), budget, epochs=epochs, **options)


def counted_macs(network):
    """Of the dense layers of an MLP, from the shapes of its weights."""
    return sum(layer.weight.numel() for layer in network.modules() if isinstance(layer, nn.Linear))


def test_precisions():
    """Autocast outputs are bfloat16 and weights stay in float32, in both phases; a double network stays one."""
    kinds = []

    def loss(outputs, targets):
        kinds.append(outputs.dtype)
        return F.cross_entropy(outputs.float(), targets)

    result = pruned(loss=loss, autocast=torch.bfloat16)
    assert set(kinds) == {torch.bfloat16}
    assert {p.dtype for p in result.network.parameters()} == {torch.float32}
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    result = pruned(Mlp().double(), DataLoader(TensorDataset(X.double(), Y), 40), example=X[:2].double())
    assert {p.dtype for p in result.network.parameters()} == {torch.float64}
    assert result.certificate < 1e-10
    assert 0.9 <= result.report.target.of_budget <= 1


def test_accumulated_gradients_of_the_cut_network_are_those_of_the_big_batch():
    """Where no gates are drawn and batches have one size, but for rounding."""
    networks = [Mlp().double() for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    loss = BatchLoss(F.cross_entropy, torch.device("cpu"), None)
    images, classes = X.double(), Y
    training = Training(make_optimiser=lambda parameters: torch.optim.SGD(parameters, 0.5))
    whole, parts = (Phase(net, loss, 10, training) for net in networks)
    for _ in range(3):
        one = whole.step([(images, classes)])
        other = parts.step([(images[i : i + 80], classes[i : i + 80]) for i in range(0, 320, 80)])
        assert one.item() == pytest.approx(other.item(), rel=1e-12)
    for p, q in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_accumulation_takes_fewer_steps():
    """A group of what is left over at the end of an epoch counts as one."""
    result = pruned(accumulate=3, epochs=6)
    assert result.report.target.steps == 6 * 3 - round(0.25 * 18)
    assert result.history[-1]["step"] == 6 * 3


def test_the_rate_after_the_cut():
    """Constant over half of the steps, and to 0 by a cosine over the others."""
    tuning = Phase(nn.Linear(2, 2), BatchLoss(F.mse_loss, torch.device("cpu"), None), 40, Training())
    rates = []
    for _ in range(40):
        rates.append(1000 * tuning.optimiser.param_groups[0]["lr"])
        tuning.step([(torch.ones(1, 2), torch.zeros(1, 2))])
    assert rates[:21] == [1.0] * 21
    assert rates[30] == pytest.approx(0.5)
    assert tuning.optimiser.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 3e-3, weight_decay=0.05)


def one_cycle(optimiser, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=steps)


@pytest.mark.parametrize(("optimiser", "schedule"), [(sgd, None), (adamw, None), (sgd, one_cycle)])
def test_a_user_s_optimiser_and_schedule(optimiser, schedule):
    """They are asked for once for each phase and for a cut by each score, with its steps, and the loss falls."""
    made, lengths = [], []

    def make(parameters):
        made.append(optimiser(parameters))
        return made[-1]

    def make_schedule(of, steps):
        lengths.append(steps)
        return schedule(of, steps)

    result = pruned(make_optimiser=make, make_schedule=schedule and make_schedule, epochs=6, budget=0.7)
    assert len(made) == 5
    assert lengths == ([36, 48, 48, 48, 12] if schedule else [])
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_several_targets_from_one_run():
    """A network each, within its own budget, which its report says, and none is a part of another."""
    result = pruned(budget=[0.7, 0.4, 0.2], epochs=8)
    assert len(result.on_the_way) == 2
    full = counted_macs(Mlp())
    for one, target in zip((*result.on_the_way, result), (0.7, 0.4, 0.2), strict=True):
        used = counted_macs(one.network) / full / target
        assert used <= 1
        assert one.report.target.of_budget == pytest.approx(used)
        assert one.report.target.budget["cost"] == pytest.approx(target)
        assert one.report.largest_unit <= 0.2
    largest = [one.report.largest_unit for one in (*result.on_the_way, result)]
    assert largest == sorted(largest)  # of a smaller budget a unit takes more


def test_a_cost_of_one_s_own():
    """The number of units of the first layer, alone and beside parameters."""

    def units(gates):
        return gates["first.1"].sum()

    gates = {"first": L0Gate(32), "second": L0Gate(24)}
    result = pruned(budget=0.25, cost=units, gates=gates)
    assert result.network.first.out_features == 8
    assert result.network.second.out_features == 24
    assert type(result.network.first) is nn.Linear
    alone = pruned(budget=0.7, gates={"second": L0Gate(24)}, network=Mlp(8, 24))  # the other layer keeps its units
    assert alone.network.first.out_features == 8
    assert alone.network.second.out_features < 24
    both = pruned(budget={"units": 0.5, "weights": 0.4}, cost={"units": units}, gates=gates)
    assert both.network.first.out_features <= 16
    assert counted_macs(both.network) <= 0.4 * counted_macs(Mlp())


@pytest.mark.parametrize("gate", [L0Gate, partial(L0Gate, family="exponential")])
def test_a_network_that_has_gates(gate):
    """They are the ones that are used, and the error of the network as given is that with all of them open."""
    network = nn.Sequential(nn.Flatten(), gate(64), nn.Linear(64, 16), nn.ReLU(), gate(16), nn.Linear(16, 10))
    with torch.no_grad():
        plain = nn.Sequential(*(layer for layer in network if not isinstance(layer, GateLayer)))
        expected = float(F.cross_entropy(plain(X), Y))
    result = pruned(network, evaluate=lambda net: float(F.cross_entropy(net(X), Y)))
    assert result.report.dense == pytest.approx(expected, rel=1e-5)
    assert set(result.report.target.open) == {"1", "4"}
    assert result.network(X[:3]).shape == (3, 10)
    assert counted_macs(result.network) <= 0.4 * counted_macs(plain)
    assert not network._forward_hooks


def test_a_network_with_checkpointed_blocks():
    """It is pruned as any other; tests/nn/test_recompute.py has its draws and gradients."""

    class Checkpointed(Mlp):
        def forward(self, images):
            return self.last(checkpoint(self.hidden, images.flatten(1), use_reentrant=False))

        def hidden(self, x):
            return self.second(self.dropout(F.relu(self.first(x))))

    left, full = pruned(Checkpointed(dropout=0.1)).report.left["macs"]
    assert left <= 0.4 * full


def test_frozen_parameters_stay_as_they_are():
    """What does not require gradients is not trained, loses its units with the others, and requires none later."""
    network = Mlp()
    network.first.requires_grad_(False)
    result = pruned(network, epochs=5)
    assert not result.network.first.weight.requires_grad
    assert result.network.second.weight.requires_grad
    rows = {tuple(row) for row in network.first.weight.tolist()}
    assert result.network.first.out_features < 32
    assert all(tuple(row) in rows for row in result.network.first.weight.tolist())


class TestBatches:
    """What a loader may give."""

    def test_a_list_of_pairs_and_an_uneven_last_batch(self):
        batches = [(X[i : i + 40], Y[i : i + 40]) for i in range(0, 320, 40)]
        assert pruned(data=batches).report.target.of_budget <= 1
        loader = DataLoader(TensorDataset(X, Y), 50, shuffle=True)  # 7 batches, of 20 at last
        assert pruned(data=loader).report.target.steps == 21

    @pytest.mark.parametrize(
        "data", [list(X.flatten(1).split(40)), DataLoader(TensorDataset(X.flatten(1)), 40)], ids=["tensors", "tuples"]
    )
    def test_an_autoencoder(self, data):
        """The batch is the targets, too; a TensorDataset of one tensor gives tuples of one."""
        network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
        result = pruned(network, data, F.mse_loss, example=torch.zeros(2, 64))
        assert 0.9 <= result.report.target.of_budget <= 1

    @pytest.mark.parametrize("nested", [False, True])
    def test_several_inputs(self, nested):
        """Side by side before the targets, or in a tuple of their own, of which collating makes a list."""

        def both(net, image, more):
            return net.out(F.relu(net.left(image.flatten(1)) + net.right(more)))

        network = Net(both, left=nn.Linear(64, 16), right=nn.Linear(3, 16), out=nn.Linear(16, 10))
        more = torch.randn(320, 3)
        data = [((x, m), y) if nested else (x, m, y) for x, m, y in zip(X, more, Y, strict=True)]
        assert pruned(network, DataLoader(data, 40), example=(X[:2], more[:2])).report.target.of_budget <= 1

    @pytest.mark.parametrize("is_dict", [False, True])
    def test_keywords(self, is_dict):
        """A dict, or another mapping, goes into the network whole, and to the loss as targets."""

        def with_loss(net, images, labels=None):
            outputs = net.inner(images)
            return {"outputs": outputs, "loss": None if labels is None else F.cross_entropy(outputs, labels)}

        class Batch(dict if is_dict else UserDict):
            pass

        batches = [Batch(images=X[i : i + 40], labels=Y[i : i + 40]) for i in range(0, 320, 40)]
        network, loss = Net(with_loss, inner=Mlp()), lambda outputs, batch: outputs["loss"]
        assert pruned(network, batches, loss, example={"images": X[:2]}).report.target.of_budget <= 1


def test_several_draws_of_the_same_seed_and_a_loss_of_another_scale():
    """A run is a function of its seed, and a loss a thousand times as large prunes the same units."""

    def run(times):
        torch.manual_seed(1)
        return pruned(loss=lambda outputs, y: times * F.cross_entropy(outputs, y))

    first, again, larger = run(1.0), run(1.0), run(1024.0)
    assert same(first.network, again.network)
    assert first.plan == again.plan == larger.plan


def test_progress_and_history(capsys):
    """An entry for each epoch, in the history, at the callbacks and on the standard error."""
    seen = []
    result = pruned(callbacks=[seen.append], progress=True, evaluate=lambda net: 0.5)
    assert tuple(seen) == result.history
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == len(seen) == 4
    assert "fraction" in printed.err.splitlines()[0]
    assert seen[-1]["error"] == 0.5
    fractions = [entry["fraction"] for entry in seen]
    assert fractions == sorted(fractions, reverse=True)


def test_nothing_is_said_of_a_healthy_run():
    """No warning where a trained network had enough steps and fine units; its errors are those of the report."""
    torch.manual_seed(0)
    x = torch.randn(1200, 8)
    y = x[:, 0] * x[:, 1] + 0.3 * torch.randn(1200)
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    train(network, [(x[:800], y[:800])], 300, F.mse_loss, 1e-2)

    def error(net):
        assert not net.training
        assert not torch.is_grad_enabled()
        return float(F.mse_loss(net(x[800:]), y[800:]))

    loader = DataLoader(TensorDataset(x[:800], y[:800]), 50, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = prune(network, F.mse_loss, loader, x[:2], 0.5, epochs=25, training=Training(evaluate=error))
    assert result.report.notes == ()
    assert result.network[0].out_features == 32
    with torch.no_grad():
        assert (result.report.dense, result.report.end) == (error(network.eval()), error(result.network))
    assert "as given" in str(result.report)


@pytest.mark.parametrize(("batches", "after"), [(20, 5), (400, 100), (450, 150), (600, 210), (2000, 700)])
def test_the_part_after_the_cut(batches, after):
    """35 % of the steps, unless fewer than 300 would have gates, and at least a quarter."""
    assert Training().count_steps([0] * batches, 1) == (batches - after, after)
    assert Training(finetune=0.4).count_steps([0] * batches, 1) == (
        batches - round(0.4 * batches),
        round(0.4 * batches),
    )
