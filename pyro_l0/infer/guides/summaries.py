"""Summaries of joint draws of gates, slabs and other latents."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyro_l0.infer.slabs import Alignment, GateSite, gate_site

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["JointDraws", "SiteSummary", "Summary", "entry", "import_arviz"]

VERDICTS = ("ok", "unchecked", "wrong")
_DRAWS = 10_000


class SiteSummary(NamedTuple):
    """Summary of each entry of a site, in the site's shape; ``print`` shows it as a table.

    Attributes:
        active_probs: P(z != 0) of the entry's gate; None for a variable that has none.
        mean: posterior mean.
        sd: posterior standard deviation.
        lower: quantile at 5 %.
        upper: quantile at 95 %.
        r_hat: rank-normalised split r-hat of chains; None for independent draws.
        ess: bulk effective sample size of chains; None for independent draws.
        check: of a guide's entries, 0 where it is right, 1 where unchecked, 2 where wrong (by ``check_fit``).
    """

    active_probs: Tensor | None
    mean: Tensor
    sd: Tensor
    lower: Tensor
    upper: Tensor
    r_hat: Tensor | None = None
    ess: Tensor | None = None
    check: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the site's value, which all its fields have."""
        return self.mean.shape

    def __str__(self) -> str:
        """A table with a row for each entry of the site, in its order."""
        return printed(Summary({"": self}).to_frame().reset_index(drop=True))


class Summary(dict[str, SiteSummary]):
    """Summary of a posterior by site; ``print`` shows it as a table.

    Args:
        sites: summaries by site: of the coefficients z * w for a slab, and of the other latents.
        notes: sentences to print below the table.
    """

    def __init__(self, sites: Mapping[str, SiteSummary], notes: Sequence[str] = ()) -> None:
        super().__init__(sites)
        self.notes = tuple(notes)

    def to_frame(self) -> pd.DataFrame:
        """A pandas table: a row for each entry, such as ``w[1, 0]``, and columns by statistic.

        They are ``active_probs``, ``mean``, ``sd``, ``lower`` (5 %), ``upper`` (95 %), of chains ``r_hat``, ``ess``, of
        guides ``check`` in words.
        Indices are those of the tensors: of two plates without ``dim``, Pyro puts the outer one last.
        """
        import pandas as pd  # takes half a second

        frames = []
        for name, site in self.items():
            columns = {key: x.reshape(-1).tolist() for key, x in site._asdict().items() if x is not None}
            if site.check is not None:
                columns["check"] = [VERDICTS[code] for code in columns["check"]]
            labels = [entry(name, site.mean.shape, i) for i in range(site.mean.numel())]
            frames.append(pd.DataFrame(columns, index=labels))
        found = pd.concat(frames)
        return found[[key for key in SiteSummary._fields if key in found]]

    def __str__(self) -> str:
        """A table with a row for each entry of all sites, and below it the notes on what is unsure."""
        return "\n".join([printed(self.to_frame()), *self.notes])


def printed(frame: pd.DataFrame, most: int | None = None) -> str:
    """A table as text, of at most some rows."""
    text: str = frame.to_string(float_format="{:.3f}".format, na_rep="", max_rows=most)
    return text


def entry(name: str, shape: torch.Size, i: int) -> str:
    """An entry of a site in words, such as ``w[1, 0]``."""
    index = [int(k) for k in torch.unravel_index(torch.tensor(i), shape)] if shape else []
    return f"{name}{index}" if index else name


def import_arviz() -> Any:
    """Import arviz without the warning that it gives once a day, which is an error under ``python -W error``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
        try:
            import arviz
        except FileNotFoundError:
            # arviz writes the day of its warning to a file of one name. Where two processes do so at the same moment,
            # one finds its file gone; at the second try it reads the day that the other has written.
            import arviz
    return arviz


class JointDraws:
    """A posterior over gates and slabs with joint draws.

    Attributes:
        slab: the gate site of each slab site.
    """

    slab: dict[str, GateSite]
    _alignments: Mapping[str, Alignment]  # of each slab site
    _fixed: Mapping[str, Tensor]  # values of gate sites that are observed

    @abstractmethod
    def draws(self, n: int) -> dict[str, Tensor]:
        """Joint draws by site, shape ``(n, *shape of the site)``."""

    @abstractmethod
    def active_probs(self) -> dict[str, Tensor]:
        """Marginal P(z != 0) of every gate, by site and in its shape."""

    @abstractmethod
    def _is_gate(self, name: str) -> bool: ...

    def coefficients(self, n: int) -> dict[str, Tensor]:
        """n joint draws of the coefficients z * w by slab site, shape ``(n, *shape of the slab)``."""
        return self.products(self.draws(n))

    def quantiles(self, probs: float | Sequence[float], draws: int | None = None) -> dict[str, Tensor]:
        """Quantiles of the coefficients z * w by slab site, and of the latents that are neither gates nor slabs.

        Those of chains are of every sample, by its name in ``samples``, such as ``"z * w"``.

        Args:
            probs: probabilities in [0, 1].
            draws: number of draws; 10,000 by default, or all that a sampler made.

        Returns:
            By site, shape ``(len(probs), *shape of the site)``; for a single number, the site's shape.
        """
        return {name: _quantiles(x, probs) for name, x in self._summarised(draws).items()}

    def interval(self, level: float = 0.9, draws: int | None = None) -> dict[str, Tensor]:
        """Central intervals of probability ``level``, as :meth:`quantiles`; shape ``(2, *shape of the site)``."""
        return self.quantiles(((1 - level) / 2, (1 + level) / 2), draws)

    def summary(self, draws: int | None = None) -> Summary:
        """Summary of the coefficients z * w by slab site, and of the other latents.

        Args:
            draws: number of draws for all but P(z != 0); as for :meth:`quantiles`.
        """
        found = {}
        probs = self.active_probs()
        for name, values in self._summarised(draws).items():
            lower, upper = _quantiles(values, (0.05, 0.95))
            found[name] = SiteSummary(self._active(name, values, probs), values.mean(0), values.std(0), lower, upper)
        return Summary(found)

    def products(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The coefficients z * w of joint draws, by slab site and in the slab's shape."""
        gates = {**{name: x.unsqueeze(0) for name, x in self._fixed.items()}, **draws}
        return {name: draws[name] * self._alignments[name].of(gates[gate_site(x)], 1) for name, x in self.slab.items()}

    def _summarised(self, n: int | None) -> dict[str, Tensor]:
        """Draws of the coefficients, and of the latents that are neither gates nor slabs."""
        return self.shown(self.draws(_DRAWS if n is None else n))

    def shown(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of joint draws, those of the coefficients z * w and of the latents that are neither gates nor slabs."""
        others = {name: x for name, x in draws.items() if name not in self.slab and not self._is_gate(name)}
        return {**self.products(draws), **others}

    def _active(self, name: str, values: Tensor, probs: Mapping[str, Tensor]) -> Tensor | None:
        """P(z != 0) of each entry of a site, of which these are draws."""
        if name not in self.slab:
            return None
        probs = {**{gate: (x != 0).to(x) for gate, x in self._fixed.items()}, **probs}
        return self._alignments[name].of(probs[gate_site(self.slab[name])]).expand(values.shape[1:])


def _quantiles(draws: Tensor, probs: float | Sequence[float]) -> Tensor:
    return torch.quantile(draws, torch.tensor(probs, dtype=draws.dtype, device=draws.device), dim=0)
