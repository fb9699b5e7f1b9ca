"""Predictions of several networks together, and how good and how well calibrated they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from scipy.stats import rankdata
from torch import Tensor, nn

from pyro_l0.expect import expect, expect_count

__all__ = ["Reliability", "Scores", "auroc", "predictive", "reliability", "scores"]


class Scores(NamedTuple):
    """Of predicted probabilities, smaller is better.

    Attributes:
        error: percent of examples whose likeliest class is another.
        nll: mean negative log likelihood, in nats.
        brier: mean squared distance of the probabilities from the label's, from 0 to 2.
        ece: expected calibration error, from 0 to 1.
    """

    error: float
    nll: float
    brier: float
    ece: float


class Reliability(NamedTuple):
    """Confidence and accuracy by bins of equal width, each of shape ``(bins,)``; zeros in empty bins.

    Attributes:
        confidence: mean probability of the likeliest class.
        accuracy: share of examples where it is right.
        examples: how many there are.
    """

    confidence: Tensor
    accuracy: Tensor
    examples: Tensor


@torch.no_grad()
def predictive(networks: Iterable[nn.Module], x: Tensor, batch_size: int = 1000) -> Tensor:
    """Class probabilities averaged over networks, such as draws of a posterior or an ensemble.

    Args:
        networks: whose outputs are logits; each stays in its mode, so that a network with dropout may be drawn.
        x: inputs, shape ``(n, ...)``.
        batch_size: of each call.

    Returns:
        Shape ``(n, classes)``.

    Raises:
        ValueError: there is no network.

    Example:
        >>> predictive([nn.Identity(), nn.Identity()], torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
    """
    expect_count(1, batch_size=batch_size)
    total, count = torch.zeros(()), 0
    for network in networks:
        total = total + torch.cat([network(part).softmax(-1) for part in x.split(batch_size)])
        count += 1
    if not count:
        raise ValueError("Expected at least one network, but got none.")
    return total / count


def reliability(probs: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """Confidence and accuracy in bins of confidence (Guo et al. 2017, arXiv:1706.04599).

    Args:
        probs: of each class, shape ``(n, classes)``.
        labels: shape ``(n,)``.
        bins: of equal width.

    Raises:
        ValueError: shapes do not fit each other.
    """
    _check(probs, labels)
    expect_count(1, bins=bins)
    confidence, guess = probs.max(-1)
    index = (confidence * bins).long().clamp(max=bins - 1)
    count = torch.bincount(index, minlength=bins)
    some = count.clamp(min=1)
    of_confidence = torch.bincount(index, confidence.double(), bins) / some
    accuracy = torch.bincount(index, (guess == labels).double(), bins) / some
    return Reliability(of_confidence, accuracy, count)


def scores(probs: Tensor, labels: Tensor, bins: int = 15) -> Scores:
    """Error, log likelihood, Brier score and calibration error of predicted probabilities.

    Args:
        probs: of each class, shape ``(n, classes)``.
        labels: shape ``(n,)``.
        bins: of the calibration error.

    Raises:
        ValueError: shapes do not fit each other.

    Example:
        >>> scores(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
        Scores(error=0.0, nll=0.164..., brier=0.05..., ece=0.15...)
    """
    found = reliability(probs, labels, bins)
    of_label = probs.gather(1, labels[:, None])[:, 0]
    smallest = torch.finfo(probs.dtype).tiny
    brier = probs.square().sum(1) - 2 * of_label + 1
    gap = (found.confidence - found.accuracy).abs() * found.examples / len(labels)
    error = 100 * (probs.argmax(-1) != labels).double().mean()
    nll = -of_label.clamp(min=smallest).log().mean()
    return Scores(float(error), float(nll), float(brier.mean()), float(gap.sum()))


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that a score is larger outside of a distribution than inside, ties counting half.

    Args:
        inside: a score such as the predictive entropy of test data, shape ``(n,)``.
        outside: the same of data from elsewhere, shape ``(m,)``.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
        0.875
    """
    expect(Tensor, "a tensor", inside=inside, outside=outside)
    ranks = rankdata(torch.cat([inside, outside]).double().numpy(force=True))
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def _check(probs: Tensor, labels: Tensor) -> None:
    expect(Tensor, "a tensor", probs=probs, labels=labels)
    if probs.dim() != 2 or labels.shape != probs.shape[:1] or not len(labels):
        raise ValueError(
            f"Expected probabilities of shape (n, classes) and n labels, but got {tuple(probs.shape)} and "
            f"{tuple(labels.shape)}."
        )
