"""Predictions of several networks together, and how good and how well calibrated they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from scipy.stats import rankdata
from torch import Tensor, nn

__all__ = ["Reliability", "Scores", "auroc", "predictive", "reliability", "scores"]


class Scores(NamedTuple):
    """Percentage of errors, nats, Brier score (0 to 2) and expected calibration error (0 to 1); smaller is better."""

    error: float
    nll: float
    brier: float
    ece: float


class Reliability(NamedTuple):
    """By bin: mean probability of the most probable class, how often it is right, and the number of examples."""

    confidence: Tensor
    accuracy: Tensor
    examples: Tensor


@torch.no_grad()
def predictive(networks: Iterable[nn.Module], x: Tensor, batch_size: int = 1000) -> Tensor:
    """Average the class probabilities of networks; each stays in its mode, so that dropout may stay on."""
    total, count = torch.zeros(()), 0
    for network in networks:
        total = total + torch.cat([network(part).softmax(-1) for part in x.split(batch_size)])
        count += 1
    return total / count


def reliability(probs: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """Compare accuracy with confidence, in bins of equal width (Guo et al. 2017, arXiv:1706.04599)."""
    confidence, guess = probs.max(-1)
    index = (confidence * bins).long().clamp(max=bins - 1)
    count = torch.bincount(index, minlength=bins)
    some = count.clamp(min=1)
    of_confidence = torch.bincount(index, confidence.double(), bins) / some
    accuracy = torch.bincount(index, (guess == labels).double(), bins) / some
    return Reliability(of_confidence, accuracy, count)


def scores(probs: Tensor, labels: Tensor, bins: int = 15) -> Scores:
    """Score predicted probabilities, shape ``(n, classes)``, by integer labels, shape ``(n,)``."""
    found = reliability(probs, labels, bins)
    of_label = probs.gather(1, labels[:, None])[:, 0]
    smallest = torch.finfo(probs.dtype).tiny
    brier = probs.square().sum(1) - 2 * of_label + 1
    gap = (found.confidence - found.accuracy).abs() * found.examples / len(labels)
    error = 100 * (probs.argmax(-1) != labels).double().mean()
    nll = -of_label.clamp(min=smallest).log().mean()
    return Scores(float(error), float(nll), float(brier.mean()), float(gap.sum()))


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Estimate the probability that a score is larger outside a distribution than inside; ties count half."""
    ranks = rankdata(torch.cat([inside, outside]).double().numpy(force=True))
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))
