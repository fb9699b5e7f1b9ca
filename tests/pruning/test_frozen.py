"""Gates that are trained over frozen weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0 import prune
from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.nn import L0Gate, NetworkCost, NetworkGates, fix_gates, insert_gates
from pyro_l0.pruning import Training
from pyro_l0.pruning.phases import BatchLoss, Distillation, Phase
from tests.networks import Net
from tests.pruning.networks import (
    BATCHES,
    ResidualCnn,
    StoppedError,
    VisionTransformer,
    X,
    prune_with,
    same,
    stopping,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps
CPU = torch.device("cpu")
UNITS = {"blocks.0.bn1": L0Gate(8, dim=1), "blocks.1.bn1": L0Gate(8, dim=1)}


@pytest.fixture(scope="module")
def residual():
    """A network with BatchNorm that was trained."""
    torch.manual_seed(0)
    return train(ResidualCnn(), BATCHES, epochs=4).requires_grad_(False)


def masks(network, loss=F.cross_entropy, data=BATCHES, budget=0.5, epochs=4, **options):
    return prune_with(network, loss, data, X[:2], budget, epochs=epochs, weights="frozen", **options)


def test_a_phase_trains_gates_alone(residual):
    """The one optimiser holds the gates, which move; all else stays bit for bit, and dropout and BatchNorm are off."""
    torch.manual_seed(0)
    network = nn.Sequential(insert_gates(residual, UNITS), nn.Dropout(0.5))
    budget = NetworkBudget(network, None, 0.5, NetworkCost(network, X[:2]).macs, pretrained=True)
    phase = Phase(network, BatchLoss(F.cross_entropy, CPU, None), 20, Training(weights="frozen"), budget)
    of_gates = {id(gate) for gate in budget.gates.parameters()}
    before = {name: value.clone() for name, value in network.state_dict(keep_vars=True).items()}
    locations = [value.detach().clone() for value in budget.gates.locations()]
    for step in range(20):
        phase.step([BATCHES[step % len(BATCHES)]])
    assert phase.optimiser is None
    assert {id(p) for group in budget.optimiser.param_groups for p in group["params"]} == of_gates
    assert {id(p) for p in budget.optimiser.state} == of_gates
    assert all(bool((now != was).any()) for now, was in zip(budget.gates.locations(), locations, strict=True))
    left = {name: value for name, value in network.state_dict(keep_vars=True).items() if id(value) not in of_gates}
    assert len(left) == len(residual.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in left.items())
    assert not any(value.requires_grad or value.grad is not None for value in left.values())
    assert {m for m in network.modules() if m.training} == set(budget.gates.sites.values())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_pruned_network_is_the_frozen_one_with_its_test_gates(residual, tmp_path, requires_grad):
    """Whether or not it came with gradients: slices of its weights, those that read a unit times the unit's gate."""
    network = insert_gates(residual, UNITS).requires_grad_(requires_grad)
    for gate in NetworkGates(network).sites.values():
        gate.requires_grad_()
    result = masks(network, checkpoint=tmp_path / "run.pt")
    (cut,) = torch.load(tmp_path / "run.pt")["state"]["cuts"]
    weights = {name: value for name, value in cut["state"].items() if "l0_gates" not in name}
    assert all(torch.equal(value, residual.state_dict()[name]) for name, value in weights.items())
    assert len(weights) == len(residual.state_dict())
    assert all(entry["epoch"] and "error" not in entry for entry in result.history)
    assert result.report.target.steps == 4 * len(BATCHES)
    assert not any(p.requires_grad for p in result.network.parameters())
    for i in (0, 1):
        z = cut["gates"][f"blocks.{i}.bn1.1"]
        is_open = z != 0
        assert not bool(is_open.all())
        before, after = residual.blocks[i], result.network.blocks[i]
        assert torch.equal(after.conv1.weight, before.conv1.weight[is_open])
        for name, value in after.bn1.named_buffers():
            was = before.bn1.get_buffer(name)
            assert torch.equal(value, was[is_open] if was.dim() else was)
        assert same(after.bn2, before.bn2)
    assert same(result.network.stem, residual.stem)
    fixed = fix_gates(network, cut["gates"]).eval()
    torch.testing.assert_close(result.network(X), fixed(X), rtol=1e-4, atol=1e-5)
    assert result.certificate < 1e-5


class Plain(nn.Module):
    """A gate's units go out as they are, and into a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, images):
        h = F.relu(self.first(images.flatten(1)))
        return self.last(F.normalize(h))


def test_gates_between_0_and_1_that_no_weight_takes_stay(tmp_path):
    """With nothing to train afterwards the pruned network keeps them; its outputs are those with the gates."""
    torch.manual_seed(0)
    network = insert_gates(
        train(Plain(), BATCHES).requires_grad_(False), {"first": L0Gate(12, family_options={"zeta": 1.001})}
    )
    result = masks(network, epochs=2, checkpoint=tmp_path / "run.pt")
    (cut,) = torch.load(tmp_path / "run.pt")["state"]["cuts"]
    z = cut["gates"]["first.1"]
    assert bool(((z > 0) & (z < 1)).any())
    fixed = fix_gates(network, cut["gates"]).eval()
    torch.testing.assert_close(result.network(X), fixed(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", [2.0, F.mse_loss], ids=["temperature", "function"])
def test_masks_without_labels(residual, by):
    """Batches of images alone, and no loss function: the masked network is to be like the given one."""
    images = [x for x, _ in BATCHES]
    result = masks(residual, None, images, 0.6, epochs=2, distil=(1.0, by))
    assert result.report.target.of_budget <= 1
    loss = BatchLoss(None, CPU, None)
    loss.teach(Distillation(residual.eval(), 1.0, by), images[0])
    assert float(loss(residual, images[0])) == pytest.approx(0, abs=1e-6)
    assert float(loss(result.network, images[0])) > 1e-3


def test_heads_and_units_of_a_transformer():
    """Their weights stay, and slices of them are left."""
    torch.manual_seed(0)
    network = train(VisionTransformer(), BATCHES).requires_grad_(False)
    result = masks(network, epochs=3)
    assert result.report.left["macs"][0] <= 0.5 * result.report.left["macs"][1]
    assert same(result.network.embed, network.embed)


def test_a_recurrent_layer():
    """It is in training mode, as cuDNN asks for, where that computes the same; its weights are those of open units."""
    torch.manual_seed(0)
    layer = nn.LSTM(8, 12, batch_first=True)
    network = Net(lambda net, x: net.last(net.lstm(x.squeeze(1))[0][:, -1]), lstm=layer, last=nn.Linear(12, 10))
    result = masks(train(network, BATCHES).requires_grad_(False), epochs=2)
    rows = {tuple(row) for row in layer.weight_ih_l0.tolist()}
    assert all(tuple(row) in rows for row in result.network.lstm.weight_ih_l0.tolist())
    assert result.network.lstm.hidden_size < 12


def test_a_resumed_run_ends_as_one_that_was_not_stopped(residual, tmp_path):
    torch.manual_seed(0)
    whole = masks(residual)
    torch.manual_seed(0)
    with pytest.raises(StoppedError):
        masks(residual, checkpoint=tmp_path / "run.pt", callbacks=[stopping(3)])
    torch.manual_seed(1)
    assert same(masks(residual, checkpoint=tmp_path / "run.pt", resume=True).network, whole.network)


def test_a_loop_of_one_s_own(residual):
    """Gates alone are in training mode, one draw a call; a gate that no call reaches is refused."""
    gated = insert_gates(residual, UNITS).eval()
    gates = NetworkGates(gated).train()
    assert not gated.training
    assert not torch.equal(gated(X), gated(X))
    assert gates.eval() is gates
    assert torch.equal(gated(X), gated(X))

    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = L0Gate(64), L0Gate(3)

        def forward(self, x):
            return self.used(x)

    network = Idle().eval()
    NetworkGates(network).train()
    with pytest.raises(ValueError, match="first training call did not reach 'idle'"):
        network(X.flatten(1))


REFUSED = {
    "no loss": (dict(loss=None), "a loss function, but got None with distil=None"),
    "no loss, and labels": (dict(loss=None, distil=(0.5, 2.0)), r"a loss function, but got None with distil=\(0.5"),
    "untrained": (dict(pretrained=False), "trained before its weights are frozen"),
    "fine-tuning": (dict(finetune=0.3), 'no finetune with weights="frozen".*finetune=0.3; leave it out'),
    "an optimiser": (dict(make_optimiser=torch.optim.SGD), "no make_optimiser with weights"),
    "few steps": (dict(epochs=1), "at least 10 steps with gates"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(residual, case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        masks(residual, **options)


def test_refused_weights_and_a_frozen_network(residual):
    """The message of a frozen network says what to give."""
    with pytest.raises(ValueError, match='weights to be "trained" or "frozen", but got \'fixed\''):
        Training(weights="fixed")
    for network in (residual, insert_gates(residual, UNITS)):
        with pytest.raises(ValueError, match=r'none.*requires a gradient; give training=Training\(weights="frozen"'):
            prune(network, F.cross_entropy, BATCHES, X[:2], epochs=3)


def test_logits_by_position_need_a_function(residual):
    """Without targets nothing says which dimension holds the classes."""
    maps = nn.Sequential(residual.stem, nn.Conv2d(8, 10, 1)).requires_grad_(False)
    with pytest.raises(ValueError, match=r"shape \(40, 10, 4, 4\) and no targets; for other outputs give distil="):
        masks(maps, None, [x for x, _ in BATCHES], distil=(1.0, 2.0), gates={"0": L0Gate(8, dim=1)})
