"""Scores of predictions against their definitions, and the Bayesian perceptron's table of them."""

import pytest
import torch

from bayesian_mlp import Options, main
from common.scores import auroc, reliability, scores


def test_scores_by_hand():
    probs = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.9, 0.1]])
    found = scores(probs, torch.tensor([0, 0, 0]), bins=10)
    assert found.error == pytest.approx(100 / 3)
    assert found.nll == pytest.approx(-float(torch.tensor([0.6, 0.3, 0.9]).log().mean()), rel=1e-6)
    assert found.brier == pytest.approx((2 * 0.16 + 2 * 0.49 + 2 * 0.01) / 3, rel=1e-6)
    assert found.ece == pytest.approx((0.4 + 0.7 + 0.1) / 3, rel=1e-6)


def test_calibrated_predictions_have_no_calibration_error():
    """Labels drawn from the probabilities; probabilities that are too sure have one."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(100_000, 4)
    labels = torch.distributions.Categorical(logits=logits).sample()
    assert scores(logits.softmax(-1), labels).ece < 0.005
    assert scores((3 * logits).softmax(-1), labels).ece > 0.05
    found = reliability(logits.softmax(-1), labels)
    assert int(found.examples.sum()) == 100_000
    assert found.examples[0] == 0


def test_auroc_is_the_share_of_ordered_pairs():
    torch.manual_seed(0)
    inside, outside = torch.randn(50).round(decimals=1), (torch.randn(60) + 0.5).round(decimals=1)
    pairs = outside[:, None] - inside
    expected = ((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean()
    assert auroc(inside, outside) == pytest.approx(float(expected))


def test_every_method_has_a_row(tmp_path):
    options = Options(data="digits", hidden=(8,), steps=30, draws=2, seeds=(1,), out=tmp_path)
    rows = main(options)
    assert list(rows) == ["median", "draws", "deterministic", "ensemble of 5", "dropout"]
    assert (tmp_path / "reliability.png").exists()


@pytest.mark.slow
def test_few_weights_tell_breast_cancer(tmp_path):
    """A handful of a thousand weights; the more frequent class alone errs in 37 of 100."""
    options = Options(
        data="cancer", hidden=(20, 20), steps=1500, prior_active_prob=0.02, rivals=False, seeds=(1,), out=tmp_path
    )
    (row,) = main(options)["draws"]
    assert row["error"] < 18
    assert 1 <= row["weights"] <= 50
