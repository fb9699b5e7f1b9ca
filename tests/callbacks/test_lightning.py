"""A budget in Lightning's loop, from the first step to the small network."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import L0Gate, NetworkCost, NetworkGates

lightning = pytest.importorskip("lightning.pytorch")
BudgetCallback = pytest.importorskip("pyro_l0.callbacks.lightning").BudgetCallback
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|The number of training batches):UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
X = torch.linspace(-1, 1, 240).view(40, 6).sin()
Y = (X.sum(1) > 0).long()
LOADER = DataLoader(TensorDataset(X, Y), 8)


def network():
    torch.manual_seed(0)
    layers = nn.Linear(6, 10), nn.ReLU(), L0Gate(10), nn.Linear(10, 7), nn.ReLU(), L0Gate(7), nn.Linear(7, 2)
    return nn.Sequential(*layers)


class Classifier(lightning.LightningModule):
    """As a user writes it, with a schedule and weight decay."""

    bad_step = -1

    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss * float("inf") if self.global_step == self.bad_step else loss

    def test_step(self, batch, index):
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimiser = torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 20, 0.5)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(module, callback, *others, ckpt_path=None, loader=LOADER, **options):
    silent = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = dict.fromkeys(silent, False) | {"max_epochs": 12, "log_every_n_steps": 10, "accelerator": "cpu"} | options
    trainer = lightning.Trainer(callbacks=[callback, *others], **options)
    torch.manual_seed(1)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def float16():
    """On a CPU it is asked for as a plugin."""
    return lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def test_a_network_within_the_budget_replaces_the_other():
    module = Classifier()
    given = module.net
    callback = BudgetCallback(module.net, X[:2], 0.4)
    trainer = fit(module, callback)
    assert callback.target.step == callback.target.steps == 60
    assert 0.3 < float(callback.target.fraction()) <= 0.4
    assert module.net is callback.compacted.network
    assert not [m for m in module.modules() if isinstance(m, L0Gate)]
    assert torch.allclose(module.net.eval()(X), given.eval()(X), atol=1e-5)
    logged = trainer.logged_metrics
    assert logged["l0/fraction"] == callback.target.fraction()
    assert logged["l0/open_gates"] == module.net[0].out_features + module.net[3].out_features
    assert logged["l0/multiplier"] > 0
    assert trainer.test(module, LOADER, verbose=False)[0]["loss"] > 0
    before = module.net[0].weight.clone()
    fit(module.train(), callback, max_epochs=1)  # what follows trains the small network
    assert module.net is callback.compacted.network
    assert not torch.equal(module.net[0].weight, before)


@pytest.mark.slow
def test_gates_are_those_of_a_plain_loop():
    """Neither schedule, weight decay nor clipping of the module's optimiser has a part in them."""
    module, net = Classifier(), network()
    given = NetworkGates(module.net)
    fit(module, BudgetCallback(module.net, X[:2], 0.4, "parameters", pretrained=True), gradient_clip_val=0.1)
    gates = NetworkGates(net)
    target = SparsityTarget(gates, 0.4, NetworkCost(net, X[:2]).parameters, steps=60, pretrained=True)
    weights = [p for p in net.parameters() if p not in set(gates.parameters())]
    optimiser = torch.optim.AdamW(weights, 1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 20, 0.5)
    of_gates = torch.optim.Adam([{"params": gates.locations(), **target.optimiser_options}])
    torch.manual_seed(1)
    for _ in range(12):
        for x, y in LOADER:
            optimiser.zero_grad()
            of_gates.zero_grad()
            F.cross_entropy(net(x), y).backward()
            target.add_gradient()
            of_gates.step()
            nn.utils.clip_grad_norm_(weights, 0.1)
            optimiser.step()
            schedule.step()
            target.ascend()
    assert all(torch.equal(a, b) for a, b in zip(gates.locations(), given.locations(), strict=True))


class Multipliers(lightning.Callback):
    """Those of a budget after each batch."""

    def __init__(self, budget):
        self.budget, self.values = budget, []

    def on_train_batch_end(self, trainer, module, *args):
        self.values.append(float(self.budget.target.multiplier))


@pytest.mark.slow
def test_accumulated_gradients_and_mixed_precision():
    """Float16 gradients come unscaled, so the multiplier is that of float32; an overflow leaves the gates finite.

    The largest one is compared: rounding lets a gate close some steps later, which moves the last ones by any factor.
    """
    found = {}
    for name, bad_step in (("32-true", -1), ("16-mixed", 30), ("bf16-mixed", -1)):
        module = Classifier()
        module.bad_step = bad_step
        options = {"plugins": [float16()]} if name == "16-mixed" else {"precision": name}
        loader = DataLoader(TensorDataset(X, Y), 4)
        callback = BudgetCallback(module.net, X[:2], 0.4)
        multipliers = Multipliers(callback)
        fit(module, callback, multipliers, loader=loader, accumulate_grad_batches=2, **options)
        assert callback.target.steps == 60
        assert 0.3 < float(callback.target.fraction()) <= 0.4
        found[name] = max(multipliers.values)
    assert found["16-mixed"] == pytest.approx(found["32-true"], rel=0.05)
    assert found["bf16-mixed"] == pytest.approx(found["32-true"], rel=0.05)


class Seeded(Classifier):
    """The draws of a step are the same in any run, as Lightning does not keep the generator's state."""

    def training_step(self, batch, index):
        torch.manual_seed(self.global_step)
        return super().training_step(batch, index)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_a_checkpoint_resumes_bit_for_bit(tmp_path):
    found = []
    every = lightning.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=30, save_top_k=-1)
    for path, others in ((None, [every]), (tmp_path / "step=30.ckpt", [])):
        module = Seeded()
        callback = BudgetCallback(module.net, X[:2], 0.4)
        fit(module, callback, *others, ckpt_path=path, enable_checkpointing=bool(others))
        assert callback.target.step == 60
        found.append(module.net.eval()(X))
    assert torch.equal(*found)
    module = Classifier()
    with pytest.raises(ValueError, match=r"after 30 of 60 steps, .* but the trainer is at 30 of 100"):
        fit(module, BudgetCallback(module.net, X[:2], 0.4), max_epochs=20, ckpt_path=tmp_path / "step=30.ckpt")
    trainer = fit(module, lightning.Callback(), max_epochs=6)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"after 0 of 60 steps, .* but the trainer is at 30 of 60"):
        fit(module, BudgetCallback(module.net, X[:2], 0.4), ckpt_path=tmp_path / "other.ckpt")


@pytest.mark.slow
def test_a_training_that_ends_early_is_within_the_budget():
    class Stop(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.should_stop = trainer.current_epoch == 5

    module = Classifier()
    callback = BudgetCallback(module.net, X[:2], 0.4)
    with pytest.warns(UserWarning, match="Expected 60 steps, but the training ended after 30"):
        fit(module, callback, Stop())
    assert float(callback.target.fraction()) <= 0.4
    assert module.net is callback.compacted.network


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class WithoutGates(Classifier):
    """Its optimiser has the weights alone, which is right, but for a scaler of gradients."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), 0.1)


def test_refusals():
    module = Classifier()
    for make, error in (
        (lambda: BudgetCallback(nn.Linear(6, 2), X, 0.4), "a network with L0Gates, but it has none"),
        (lambda: fit(Manual(), BudgetCallback(module.net, X, 0.4)), "has 1 and steps by itself. Use SparsityTarget"),
        (lambda: fit(Classifier(), BudgetCallback(module.net, X, 0.4)), "but gate '2' is not. Train a module that"),
        (lambda: fit(module, BudgetCallback(module.net, X, 0.4), max_epochs=1), "at least 10, but got 5"),
        (lambda: fit(module, BudgetCallback(module.net, X, 0.4), max_epochs=-1), "has inf. Give it max_steps"),
    ):
        with pytest.raises(ValueError, match=error):
            make()
    module = WithoutGates()
    with pytest.raises(ValueError, match="for precision 16-mixed its optimiser takes all parameters"):
        fit(module, BudgetCallback(module.net, X, 0.4), plugins=[float16()])
