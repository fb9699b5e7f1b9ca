"""What the examples train by: averages of the weights, the model's likelihood, what an epoch costs beside its steps."""

import math
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from common import command, gated_run
from common.averages import AVERAGE_POWER, Average
from common.data import load_digits
from common.mnist_run import Options, Run
from common.networks import Classifier
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import L0Gate, fix_gates


def test_averages_reach_back_over_a_tenth_of_the_steps():
    """The weight of step s among t grows as s (s + 1) ... (s + k - 1); averages that are taken up again go on."""
    module = nn.Linear(2, 1).double()
    averaged = nn.Linear(2, 1).double()
    average = Average(averaged, module)
    for step in range(1, 501):
        if step == 200:
            average = Average(averaged, module, average.steps)
        nn.init.constant_(module.weight, step)
        average.update()
    weights = [math.prod(range(s, s + AVERAGE_POWER)) for s in range(1, 501)]
    mean = sum(s * weight for s, weight in enumerate(weights, 1)) / sum(weights)
    torch.testing.assert_close(averaged.weight, torch.full_like(averaged.weight, mean))
    torch.testing.assert_close(averaged.bias, module.bias)  # one value throughout
    assert 0.9 < mean / 500 < 0.92


def test_the_likelihood_is_that_of_a_plate():
    """The classifier's loss and gradients are those of a Categorical in a subsampled plate."""
    x, y = torch.rand(6, 4), torch.randint(0, 3, (6,))
    net = nn.Sequential(L0Gate(4), nn.Linear(4, 3))
    classifier = Classifier(net, 50)

    def plated(x, y):
        logits = classifier.net(x)
        with pyro.plate("data", 50, subsample=torch.arange(6)):
            pyro.sample("labels", dist.Categorical(logits=logits), obs=y)

    guide = AutoGate(classifier)
    guide(x, y)
    found = []
    for model in (classifier, plated):
        torch.manual_seed(0)
        loss = L0_ELBO("l0", lam=0.1).differentiable_loss(model, guide, x, y)
        parameters = [*net.parameters(), *guide.parameters()]
        found.append([loss, *torch.autograd.grad(loss, parameters)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


RUNS = {
    "a target": {},
    "a price": {"lam": (0.05,)},
    "shrinking": {"shrink": True, "epochs": 1999},
    "slabs": {"objective": "spike_slab"},
}


@pytest.fixture(params=RUNS.values(), ids=RUNS.keys())
def run(request):
    """A run of one epoch, in which it took two steps."""
    run = Run(load_digits().hold_out(1397), Options(batch_size=20, **request.param))
    run.history.append(run.advance())
    return run


def test_an_epoch_looks_at_no_earlier_one(run, monkeypatch):
    """As many values are checked after 800 epochs as after two."""
    seen, look = [], gated_run.not_finite

    def counting(value):
        seen.append(value)
        return look(value)

    monkeypatch.setattr(gated_run, "not_finite", counting)
    numbers = []
    for length in (1, 60, 800):
        run.history = run.history[:1] * length
        seen.clear()
        run.advance()
        numbers.append(len(seen))
    assert numbers[0] == numbers[1] == numbers[2] > 20


def spoil_moments(run):
    next(state for state in run.optimiser.state.values() if state)["exp_avg"].view(-1)[-1] = -math.inf


def spoil_averages(run):
    run.averaged[0][1].bias.data[3] = math.nan


@pytest.mark.parametrize("spoil", [spoil_moments, spoil_averages], ids=["moments", "averages"])
def test_what_an_epoch_made_is_checked(spoil, monkeypatch):
    """Not the weights and the loss alone; and what was measured."""
    run = Run(load_digits().hold_out(1397), Options(batch_size=20))
    run.advance()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "train_epoch", lambda run: 0.5)
        patch.setattr(Run, "measure", lambda run: {"test_error_percent": 1.0, "active_rate": {"net.0": math.nan}})
        with pytest.raises(FloatingPointError, match=r"got others at entry\['active_rate'\]\['net.0'\]"):
            run.advance()
        spoil(run)
        with pytest.raises(FloatingPointError, match="finite"):
            run.advance()
    with pytest.raises(ValueError, match=r"expected finite values, but got others at state\['"):
        run.load_state_dict(run.state_dict())


def test_the_error_is_that_of_fixed_gates(run):
    """Of the network that counts, which is not copied for it, and stays as it was."""
    gates = {site: (torch.arange(len(gate)) % 3 / 2) for site, gate in run.gates.test_gates().items()}
    plain = run.plain().train()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        run.test_y = fix_gates(plain, gates)(run.test_x).argmax(-1)
    assert len(run.test_y.unique()) > 1
    assert run.error(plain, gates) == 0.0
    assert run.error(plain, {site: torch.zeros_like(x) for site, x in gates.items()}) > 0.0
    assert plain.training


class Clocked:
    """A run whose epochs take two seconds each on a clock of its own."""

    def __init__(self, epochs):
        self.options, self.device = SimpleNamespace(epochs=epochs), torch.device("cpu")
        self.cost, self.history, self.now = SimpleNamespace(total_macs=10), [], 100.0

    is_done = property(lambda self: len(self.history) == self.options.epochs)

    def advance(self):
        self.now += 2.0
        return {"epoch": len(self.history) + 1, "expected_macs": 5, "test_error_percent": 1.0}

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


@pytest.mark.parametrize(("after", "start", "done"), [(0.0, 100.0, 0), (5.0, 90.0, 0), (5.0, 50.0, 4)])
def test_the_time_that_is_left_is_that_of_the_command(after, start, done, tmp_path, capsys, monkeypatch):
    """Epochs, what is trained after them, and a fifth of what came before; of a resumed one, its own epochs count."""
    run = Clocked(10)
    monkeypatch.setattr(gated_run, "time", SimpleNamespace(perf_counter=lambda: run.now))
    monkeypatch.setattr(command, "began", lambda: start)
    run.history = [{"epoch": i + 1} for i in range(done)]
    gated_run.Checkpoint(tmp_path / "run.pt", {}).save(run.state_dict())
    gated_run.train(run, tmp_path / "run.pt", {}, done > 0, True, after)
    lines = capsys.readouterr().out.splitlines()
    left = [2 * (10 - epoch + after) + (100 - start) / 5 for epoch in range(done + 1, 11)]
    assert [line[-10:-5] for line in lines] == [f"00:{int(seconds):02d}" for seconds in left]
