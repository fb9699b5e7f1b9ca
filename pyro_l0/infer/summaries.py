"""What draws of gates and slabs say of the coefficients that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.infer.slabs import Shape


class Summary(NamedTuple):
    """Of each entry of a site: of a slab's coefficients z * w, or of another latent variable.

    Attributes:
        active_prob: P(z != 0) of the entry's gate; None for a variable that has none.
        mean: posterior mean, in the site's shape.
        sd: posterior standard deviation.
        lower: 5 % quantile.
        upper: 95 % quantile.
    """

    active_prob: Tensor | None
    mean: Tensor
    sd: Tensor
    lower: Tensor
    upper: Tensor

    @classmethod
    def of(cls, draws: Tensor, active_prob: Tensor | None) -> Summary:
        """From draws, shape ``(n, *shape)``."""
        lower, upper = quantiles(draws, (0.05, 0.95))
        return cls(active_prob, draws.mean(0), draws.std(0), lower, upper)

    def __str__(self) -> str:
        """A row for each entry."""
        columns = {
            "P(z != 0)": self.active_prob,
            "mean": self.mean,
            "sd": self.sd,
            "5 %": self.lower,
            "95 %": self.upper,
        }
        found = {title: x.reshape(-1).tolist() for title, x in columns.items() if x is not None}
        head = " " * 6 + "".join(f"{title:>11}" for title in found)
        rows = zip(*found.values(), strict=True)
        return "\n".join([head, *(f"{i:6d}" + "".join(f"{x:11.3f}" for x in row) for i, row in enumerate(rows))])


def products(draws: Mapping[str, Tensor], slab: Mapping[str, str], places: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Coefficients z * w of each slab site, shape ``(n, *shape of the slab)``.

    Args:
        draws: of all sites, shape ``(n, *shape)``.
        slab: the gate site of each slab site.
        places: of each slab site, the gates' shape along its dimensions.
    """
    return {name: draws[name] * draws[gate].reshape(-1, *places[name]) for name, gate in slab.items()}


def quantiles(draws: Tensor, probs: Sequence[float]) -> Tensor:
    """Quantiles of draws, shape ``(len(probs), *shape)`` for draws of shape ``(n, *shape)``."""
    return torch.quantile(draws, torch.tensor(probs, dtype=draws.dtype, device=draws.device), dim=0)
