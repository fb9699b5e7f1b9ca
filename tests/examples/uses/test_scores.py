"""Scores of predictions against their definitions, with labels that are drawn from the predictions."""

import pytest
import torch

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
