"""Whether several Markov chains agree, and their effective sample size.

Vehtari, Gelman, Simpson, Carpenter, Buerkner (2021), "Rank-normalization, folding, and localization: an improved R-hat
for assessing convergence of MCMC", arXiv:1903.08008.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bulk_ess", "r_hat"]


def r_hat(draws: Tensor) -> Tensor:
    """Rank-normalised split r-hat: 1 where chains agree in location and in spread (section 4.1 of the paper).

    Takes draws of shape ``(chains, n, *shape)``, n at least 4, and gives ``shape`` in float64: the larger one of the
    draws and of their distances from the median. Chains that never move and agree have 1; those that never move and
    differ have infinity or a very large number.
    """
    split = _halves(draws)
    folded = (split - _median(split)[:, None, None]).abs()
    return torch.maximum(_potential_reduction(split), _potential_reduction(folded)).reshape(draws.shape[2:])


def bulk_ess(draws: Tensor) -> Tensor:
    """Effective sample size of rank-normalised split chains (section 4.2 of the paper), for the bulk of the draws.

    Takes draws of shape ``(chains, n, *shape)``, n at least 8, and gives ``shape`` in float64. Autocorrelations are
    added up to the first pair of lags with a negative sum, and pairs do not increase (Geyer). Draws that are all the
    same count in full.
    """
    split = _halves(draws)
    _, chains, n = split.shape
    scores = _normal_scores(split)
    covariance = _autocovariance(scores).mean(1)
    within = covariance[:, :1] * n / (n - 1)
    total = within * (n - 1) / n + scores.mean(-1).var(-1, keepdim=True)
    correlation = 1 - (within - covariance) / total
    correlation[:, 0] = 1.0
    pairs = correlation[:, : (n - 1) // 2 * 2].unflatten(-1, (-1, 2))
    sums = pairs.sum(-1)
    inside = (sums >= 0).cumprod(-1)
    stop = inside.sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)
    # The even lag of the pair that ends the sum is kept, once, if it is positive.
    last = pairs[..., 0].gather(-1, stop).clamp(min=0).squeeze(-1)
    time = -1 + 2 * (sums.cummin(-1).values * inside).sum(-1) + last
    size = torch.tensor(float(chains * n), dtype=time.dtype, device=time.device)
    ess = size / torch.maximum(time, 1 / size.log10())
    return torch.where(_constant(split), size, ess).reshape(draws.shape[2:])


def _halves(draws: Tensor) -> Tensor:
    """Both halves of each chain as chains of their own, shape ``(numel, 2 * chains, n // 2)``, in float64."""
    chains, n = draws.shape[:2]
    flat = draws.detach().double().reshape(chains, n, -1)
    return torch.cat((flat[:, : n // 2], flat[:, n - n // 2 :])).permute(2, 0, 1).contiguous()


def _median(split: Tensor) -> Tensor:
    """Of all chains' draws, half way between the two in the middle."""
    ordered = split.flatten(1).sort(-1).values
    middle = ordered.shape[-1] // 2  # halves of chains have an even number of draws in all
    return 0.5 * (ordered[:, middle - 1] + ordered[:, middle])


def _normal_scores(split: Tensor) -> Tensor:
    """Normal quantiles of the ranks among all chains, eq. 14; draws that are equal share their mean rank."""
    flat = split.flatten(1)
    ordered = flat.sort(-1).values
    rank = (torch.searchsorted(ordered, flat) + torch.searchsorted(ordered, flat, right=True) + 1).double() / 2
    scores: Tensor = torch.special.ndtri((rank - 0.375) / (flat.shape[-1] + 0.25))
    return scores.reshape(split.shape)


def _potential_reduction(split: Tensor) -> Tensor:
    """Root of the variance of all draws' normal scores over that within the chains, eq. 1 to 4."""
    n, scores = split.shape[-1], _normal_scores(split)
    between, within = scores.mean(-1).var(-1), scores.var(-1).mean(-1)
    return torch.where(_constant(split), 1.0, ((n - 1) / n + between / within).sqrt())


def _autocovariance(split: Tensor) -> Tensor:
    """At lags 0 to n - 1, each divided by n."""
    n = split.shape[-1]
    centred = split - split.mean(-1, keepdim=True)
    spectrum = torch.fft.rfft(centred, 2 * n)
    sums: Tensor = torch.fft.irfft(spectrum * spectrum.conj(), 2 * n)
    return sums[..., :n] / n


def _constant(split: Tensor) -> Tensor:
    """Whether all draws of all chains are the same."""
    return split.amax((1, 2)) == split.amin((1, 2))
