"""What targets, shrinking and diagnostics ask of a guide over gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from pyro_l0.distributions.gate import GateDistribution

__all__ = ["GateGuide", "check_guide"]


class GateGuide(Protocol):
    """A guide over gates: :class:`~pyro_l0.infer.AutoGate`, or any of your own with the methods that are asked for.

    :class:`~pyro_l0.infer.SparsityTarget` asks for ``posterior``, ``test_gates`` and ``locations``,
    :class:`~pyro_l0.compaction.Shrinker` for ``posterior`` and ``keep``,
    :func:`~pyro_l0.diagnostics.gradients.measure_gradient` for a call, ``posterior`` and ``locations``.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Sample the gates' sites; takes the model's arguments."""

    def posterior(self) -> Mapping[str, GateDistribution]:
        """The posterior gates by site, differentiable for the guide's parameters."""

    def test_gates(self) -> Mapping[str, Tensor]:
        """The deterministic gates that prune, by site, without gradients."""

    def locations(self) -> Sequence[Tensor]:
        """The parameter that places the gates of each site of :meth:`posterior`, in its order and with its shape.

        It is the first learned parameter of their family, on the real line; a SparsityTarget moves it.
        """

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Keep the units at some positions of some sites; a site that keeps none is removed.

        Args:
            units: by site, the indices of the units that stay, shape ``(n,)``.

        Returns:
            For each parameter replaced, the new one (None if its site was removed) and the positions that it holds.
        """


def check_guide(guide: object, asked: str, *methods: str) -> None:
    """Refuse a guide without the methods that are needed."""
    missing = [name for name in methods if not hasattr(guide, name)]
    if missing:
        raise TypeError(
            f"Expected a guide over gates with {', '.join(methods)} for {asked}, but got a {type(guide).__name__} "
            f"without {', '.join(missing)}; give the AutoGate itself, not a list or a function that holds it, or write "
            "the methods of pyro_l0.infer.guides.protocol.GateGuide."
        )
