"""What joint draws of gates, slabs and other latents say of the coefficients that gates and slabs make."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.infer.elbo.slabs import Places, Switch, gate_site

__all__ = ["JointDraws", "Summary"]


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


class JointDraws:
    """A posterior over gates and slabs that can be drawn from.

    Attributes:
        slab: the gate site of each slab site.
    """

    slab: dict[str, Switch]
    _places: Mapping[str, Places]  # of each slab site

    @abstractmethod
    def draws(self, number: int) -> dict[str, Tensor]:
        """Joint draws by site, shape ``(number, *shape of the site)``."""

    @abstractmethod
    def active_probs(self, draws: int = 40_000) -> dict[str, Tensor]:
        """Marginal P(z != 0) of every gate, by site and in its shape."""

    @abstractmethod
    def _is_gate(self, name: str) -> bool: ...

    def coefficients(self, number: int) -> dict[str, Tensor]:
        """Draws of the coefficients z * w, by slab site.

        Args:
            number: n.

        Returns:
            Shape ``(n, *shape of the slab)``.
        """
        return self.products(self.draws(number))

    def quantiles(self, probs: Sequence[float], draws: int = 10_000) -> dict[str, Tensor]:
        """Quantiles of the coefficients z * w by slab site, and of the latents that are neither gates nor slabs.

        Args:
            probs: in [0, 1].
            draws: from which they are taken.

        Returns:
            Shape ``(len(probs), *shape of the site)``.
        """
        return {name: _quantiles(x, probs) for name, x in self._effects(draws).items()}

    def summary(self, draws: int = 10_000) -> dict[str, Summary]:
        """Of the coefficients z * w by slab site, and of the other latents; ``print`` shows each as a table.

        Args:
            draws: from which all but P(z != 0) is taken.
        """
        probs = self.active_probs()
        found = {}
        for name, values in self._effects(draws).items():
            lower, upper = _quantiles(values, (0.05, 0.95))
            of_gates = None
            if name in self.slab:
                of_gates = self._places[name].of(probs[gate_site(self.slab[name])]).expand(values.shape[1:])
            found[name] = Summary(of_gates, values.mean(0), values.std(0), lower, upper)
        return found

    def products(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The coefficients z * w of joint draws, by slab site and in the slab's shape."""
        return {name: draws[name] * self._places[name].of(draws[gate_site(x)], 1) for name, x in self.slab.items()}

    def _effects(self, number: int) -> dict[str, Tensor]:
        """Draws of the coefficients, and of the latents that are neither gates nor slabs."""
        draws = self.draws(number)
        others = {name: x for name, x in draws.items() if name not in self.slab and not self._is_gate(name)}
        return {**self.products(draws), **others}


def _quantiles(draws: Tensor, probs: Sequence[float]) -> Tensor:
    return torch.quantile(draws, torch.tensor(probs, dtype=draws.dtype, device=draws.device), dim=0)
