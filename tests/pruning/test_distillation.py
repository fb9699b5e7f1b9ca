"""Distillation from the network that was given, against formulas by hand, and in both phases."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.pruning.phases import BatchLoss, Distillation
from tests.pruning.networks import BATCHES, Mlp, X, prune_with, same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


def divergence(logits, taught, targets, temperature=2.0):
    return Distillation(nn.Identity(), 0.5, temperature).divergence(logits, taught, targets)


def by_hand(student, teacher, temperature):
    """T² Σ p log(p / q) of two lists of logits."""
    tops = [[math.exp(x / temperature) for x in logits] for logits in (teacher, student)]
    p, q = ([x / sum(top) for x in top] for top in tops)
    return temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_the_loss_by_hand():
    """The mean over the examples, whichever class they have."""
    student, teacher = (
        torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]]),
        torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 4.0]]),
    )
    each = [by_hand(s, t, 2.5) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)]
    found = divergence(student, teacher, torch.tensor([2, 0]), 2.5)
    assert float(found) == pytest.approx(sum(each) / 2, rel=1e-5)
    assert divergence(teacher, teacher, torch.tensor([2, 0])) == 0


def test_the_weight_is_between_both():
    """(1 - w) of the task's and w of the other, of the outputs of the network that is called."""
    torch.manual_seed(0)
    student, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    loss = BatchLoss(F.cross_entropy, torch.device("cpu"), None)
    loss.teach(Distillation(teacher, 0.3, 4.0), (x, y))
    expected = 0.7 * F.cross_entropy(student(x), y) + 0.3 * divergence(student(x), teacher(x), y, 4.0)
    torch.testing.assert_close(loss(student, (x, y)), expected)
    loss(student, (x, y)).backward()
    assert student.weight.grad is not None
    assert teacher.weight.grad is None


@dataclass
class Outputs:
    """As transformers return them."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, lambda x: Outputs(x)], ids=["dict", "data class"])
def test_logits_inside_of_outputs(wrap):
    """With targets alone, or under their name in a batch of keywords."""
    student, teacher, y = torch.randn(4, 3), torch.randn(4, 3), torch.arange(4) % 3
    expected = divergence(student, teacher, y)
    assert divergence(wrap(student), wrap(teacher), y) == expected
    assert divergence(wrap(student), wrap(teacher), {"labels": y, "input_ids": y}) == expected


def test_positions():
    """Classes are the last dimension or the second; a target below 0 takes its position out."""
    student, teacher = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    y = torch.arange(10).view(2, 5) % 3
    whole = divergence(student, teacher, y)
    torch.testing.assert_close(divergence(student.mT, teacher.mT, y), whole)
    torch.testing.assert_close(divergence(student.flatten(0, 1), teacher.flatten(0, 1), y.flatten()), whole)
    y[:, 2:] = -100
    torch.testing.assert_close(divergence(student, teacher, y), divergence(student[:, :2], teacher[:, :2], y[:, :2]))
    assert divergence(student, teacher, torch.full_like(y, -100)) == 0


@pytest.mark.parametrize(
    ("logits", "targets"),
    [
        (torch.randn(4, 3), torch.randn(4, 3)),  # a regression, or several labels at once
        (torch.randn(4, 1), torch.zeros(4, dtype=torch.long)),
        (torch.randn(4), torch.zeros(4)),
        (torch.randn(4, 3, 3), torch.zeros(4, 3, dtype=torch.long)),  # either dimension may be that of the classes
        ({"outputs": torch.randn(4, 3)}, torch.zeros(4, dtype=torch.long)),
        (torch.randn(4, 3), {"images": torch.zeros(4)}),
    ],
)
def test_what_is_no_class_logit_is_refused(logits, targets):
    with pytest.raises(ValueError, match=r"integer target, but got .*distil=\(weight, function\)"):
        divergence(logits, logits, targets)


def test_outputs_of_another_kind():
    """By a function of both networks' outputs: a regression follows its teacher where there is little else to learn."""
    torch.manual_seed(1)
    x = torch.randn(320, 3)
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    data = [(part, torch.zeros(40, 2)) for part in x.split(40)]
    options = dict(epochs=12, make_optimiser=lambda parameters: torch.optim.Adam(parameters, 1e-2))
    results = [
        prune_with(network, F.mse_loss, data, x[:2], 0.6, distil=d, **options) for d in (None, (1.0, F.mse_loss))
    ]
    with torch.no_grad():
        errors = [float(F.mse_loss(result.network(x), network(x))) for result in results]
    assert errors[1] < 0.2 * errors[0]


def test_both_phases_follow_the_teacher():
    """Where all of the weight is on it, targets change no bit; what it teaches is what it says in evaluation mode."""
    torch.manual_seed(0)
    teacher = Mlp(dropout=0.1)
    state = {name: value.clone() for name, value in teacher.state_dict().items()}
    with torch.no_grad():
        expected = [teacher.eval()(x) for x, _ in BATCHES]
    teacher.train()
    heard = []

    def by(outputs, taught):
        if outputs.requires_grad:
            heard.append(min(float((taught - x).abs().max()) for x in expected))
        return F.mse_loss(outputs, taught)

    networks, losses = [], []
    for shift in (0, 1):
        torch.manual_seed(1)
        targets = [(x, (y + shift) % 10) for x, y in BATCHES]
        result = prune_with(teacher, F.cross_entropy, targets, X[:2], 0.5, epochs=6, distil=(1.0, by))
        networks.append(result.network)
        losses.append([entry["loss"] for entry in result.history])
    assert losses[0] == losses[1]
    assert same(*networks)
    assert len(heard) >= 2 * 6 * len(BATCHES)  # every step, and what looks at the network between them
    assert max(heard) < 1e-5  # the same weights and images: rounding
    assert all(torch.equal(value, state[name]) for name, value in teacher.state_dict().items())
