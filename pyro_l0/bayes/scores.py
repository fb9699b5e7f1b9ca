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
    """What :func:`scores` returns; smaller is better.

    Attributes:
        error: Percentage of examples whose most probable class is wrong.
        nll: Mean negative log likelihood, in nats.
        brier: Mean squared distance of the probabilities from the label's, from 0 to 2.
        ece: Expected calibration error, from 0 to 1.
    """

    error: float
    nll: float
    brier: float
    ece: float


class Reliability(NamedTuple):
    """What :func:`reliability` returns: tensors of shape ``(bins,)``, zero in empty bins.

    Attributes:
        confidence: Mean probability of the most probable class.
        accuracy: Share of examples where this class is right.
        examples: Number of examples.
    """

    confidence: Tensor
    accuracy: Tensor
    examples: Tensor


@torch.no_grad()
def predictive(networks: Iterable[nn.Module], x: Tensor, batch_size: int = 1000) -> Tensor:
    """Average the class probabilities of several networks, such as draws of a posterior or an ensemble.

    Args:
        networks: Networks whose outputs are logits. Each stays in its mode, so that dropout may stay on.
        x: Inputs, shape ``(n, ...)``.
        batch_size: Examples per call of a network.

    Returns:
        Probabilities, shape ``(n, classes)``.

    Raises:
        ValueError: ``networks`` is empty.

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
    """Compare accuracy with confidence, in bins of confidence (Guo et al. 2017, arXiv:1706.04599).

    Args:
        probs: Class probabilities, shape ``(n, classes)``.
        labels: Integer classes, shape ``(n,)``.
        bins: Number of bins of equal width.

    Returns:
        Confidence, accuracy and number of examples of each bin.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: The shapes do not match.

    Example:
        >>> reliability(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]), bins=2).accuracy
        tensor([0.0000, 0.5000], dtype=torch.float64)
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
    """Score predicted probabilities: error, log likelihood, Brier score and calibration error.

    Args:
        probs: Class probabilities, shape ``(n, classes)``.
        labels: Integer classes, shape ``(n,)``.
        bins: Number of bins of the calibration error.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: The shapes do not match.

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
    """Estimate the probability that a score is larger outside a distribution than inside; ties count half.

    Args:
        inside: A score of test data, such as the entropy of its predictions, shape ``(n,)``.
        outside: The same score of data from elsewhere, shape ``(m,)``.

    Raises:
        TypeError: An argument is not a tensor.

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
