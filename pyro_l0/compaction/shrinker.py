"""Shrinks a network, its guide and its optimiser in place while they train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import NamedTuple, Protocol, TypedDict, cast

import torch
from torch import Tensor, distributed, nn

from pyro_l0.compaction.apply import apply_in_place, check_state, constants_of, move
from pyro_l0.compaction.calls import is_constant
from pyro_l0.compaction.compact import check_network, search
from pyro_l0.compaction.plan import Plan
from pyro_l0.expect import expect, expect_count
from pyro_l0.nn.engine import Example, calls_of
from pyro_l0.nn.engine.record import example_of
from pyro_l0.nn.fixed import fix_gates
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.square_norms import square_norms

__all__ = ["GateObjective", "GatePosterior", "Replica", "Shrinker", "ShrinkerState"]


class _Posterior(Protocol):
    @property
    def active_prob(self) -> Tensor: ...

    @property
    def least_active_prob(self) -> Tensor: ...

    @property
    def test_gate(self) -> Tensor: ...


class GatePosterior(Protocol):
    """What shrinking asks of a guide; :class:`~pyro_l0.infer.AutoGate` has it."""

    def posterior(self) -> Mapping[str, _Posterior]:
        """The gates' distributions by site, of the units that are left."""

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Drop all but some units of some sites."""


class GateObjective(Protocol):
    """What shrinking asks of an objective; :class:`~pyro_l0.infer.L0_ELBO` has it."""

    square_norm: dict[str, Callable[[], Tensor]]

    def drop(self, sites: Collection[str]) -> None:
        """Leave out the coefficients and norms of sites that have left the model."""


class ShrinkerState(TypedDict):
    """What a resumed run needs: the plans as JSON, and by site for how long each gate has been closed."""

    plans: list[str]
    streaks: dict[str, Tensor]


class Replica(NamedTuple):
    """A copy of the network with the guide of its gates, such as an average over steps, for ``Shrinker``.

    Attributes:
        network: the copy.
        guide: the guide of its gates.
    """

    network: nn.Module
    guide: GatePosterior


class Shrinker:
    """Removes units whose gates are closed for good from a network while it trains, so that later steps cost less.

    Call :meth:`step` once per epoch. It removes a unit if at ``patience`` calls in a row P(z != 0) of its gate was at
    most ``threshold`` (above the minimum of its family, which is 0 for most) and its test gate was 0. It also removes
    the weights that read and write the unit, its gate's parameters, and their parts of the optimiser's state and of the
    replicas. A smaller threshold and more patience are more conservative. What is removed would have been closed in all
    but ``threshold`` of the coming steps; only a gate that would have opened again is lost. An open gate that no longer
    reaches the output is removed too, with its price; other prices of the objective stay.

    The network remains the same module, with its methods, hooks, ``no_grad`` blocks, code for training and
    checkpointing, and its parameters remain the same objects: their values, gradients and optimiser states are cut.
    Before that, a copy is cut and certified to have the same outputs and gradients. If an interrupt comes between the
    first cut and the last, go on from a checkpoint.

    Args:
        network: any module with gates; changed in place.
        guide: the guide of its gates, or :class:`~pyro_l0.nn.NetworkGates`.
        example: what the network is called with, a small batch: a tensor, a tuple of positional arguments, a dict of
            keywords, or a list of such calls, which it keeps.
        optimiser: trains the network's and the guide's parameters: Adam, AdamW, SGD, or another whose state has the
            shapes of the parameters.
        elbo: an objective whose coefficients by site are dropped for removed sites.
        replicas: averaged copies of the network and the guide, which shrink with them.
        threshold: P(z != 0) at or below which a gate counts as closed.
        patience: number of calls in a row at which a gate must be closed.
        on_shrink: called after every shrinking, also by :meth:`load_state_dict`.

    Raises:
        TypeError: the guide lacks a method, or an option has the wrong type.
        ValueError: ``threshold`` is not in (0, 1) or ``patience`` is not positive, the guide lacks a gate of the
            network, or the network does not accept the example.

    Note:
        Parameters have other shapes after a shrinking. Renew what was made for the old ones, in ``on_shrink`` or when
        :meth:`step` returns True: ``DistributedDataParallel`` would silently skip a synchronisation and then fail. The
        guide's parameters are replaced, also in the optimiser.

    Example:
        >>> from pyro_l0.infer import AutoGate
        >>> from pyro_l0.nn import L0Gate
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 1))
        >>> guide = AutoGate(network)
        >>> _ = guide(torch.ones(1, 2))
        >>> optimiser = torch.optim.Adam([*network.parameters(), *guide.parameters()])
        >>> shrinker = Shrinker(network, guide, torch.ones(1, 2), optimiser, patience=1)
        >>> with torch.no_grad():
        ...     _ = next(guide.parameters())[1].fill_(-9.0)
        >>> shrinker.step(), network[0]
        (True, Linear(in_features=2, out_features=2, bias=True))
    """

    def __init__(
        self,
        network: nn.Module,
        guide: GatePosterior,
        example: Example,
        optimiser: torch.optim.Optimizer,
        elbo: GateObjective | None = None,
        replicas: Sequence[Replica] = (),
        *,
        threshold: float = 0.01,
        patience: int = 3,
        on_shrink: Callable[[], object] | None = None,
    ) -> None:
        if not (hasattr(guide, "posterior") and hasattr(guide, "keep")):
            raise TypeError(f"Expected a guide with posterior() and keep(), such as an AutoGate, but got {guide!r}.")
        expect(Real, "a number", threshold=threshold)
        expect_count(1, patience=patience)
        if not 0 < threshold < 1:
            raise ValueError(f"Expected threshold strictly between 0 and 1, but got {threshold}.")
        self.main = Replica(network, guide)
        self.replicas = list(replicas)
        self.example = example_of(example, network)
        self.optimiser = optimiser
        self.elbo = elbo
        self.threshold = threshold
        self.patience = patience
        self.on_shrink = on_shrink
        gates = gate_names(network)
        missing = gates.keys() - guide.posterior().keys()
        if missing:
            raise ValueError(
                f"Expected the guide to hold the network's gates, but it has none for {sorted(missing)}; call it once "
                "with the model's arguments, and name the gates as the model does."
            )
        check_network(network, example)
        self._sizes = {site: gate.size for site, gate in gates.items()}
        self._remaining = {site: torch.arange(gate.size) for site, gate in gates.items()}
        self._streaks = {site: torch.zeros(gate.size, dtype=torch.long) for site, gate in gates.items()}
        self._plans: list[Plan] = []
        self._tried: dict[str, Tensor] = {}  # gates for which nothing could leave

    @property
    def remaining(self) -> dict[str, Tensor]:
        """By site, the indices of the units that are left, in the numbering at the start."""
        return dict(self._remaining)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans applied so far, in order."""
        return tuple(self._plans)

    def full(self, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Extend values by site to the sizes of the network at the start, with 0 for removed units.

        Args:
            gates: values of the units that are left, by site, shape ``(n,)``.
        """
        full = {}
        for site, size in self._sizes.items():
            like = gates.get(site)
            full[site] = torch.zeros(size) if like is None else like.new_zeros(size)
            if like is not None:
                full[site][self._remaining[site].to(like.device)] = like
        return full

    @torch.no_grad()
    def step(self) -> bool:
        """Check the gates, shrink if some are closed for good, and return whether the network shrank.

        Raises:
            ValueError: the optimiser's state cannot be cut, or the example does not use all of a module of which units
                are removed.
            CompactionError: the smaller network would not compute the same; nothing has changed.
        """
        self._count()
        open_gates = {site: streak < self.patience for site, streak in self._streaks.items()}
        if all(bool(gate.all()) for gate in open_gates.values()) or _equal(open_gates, self._tried):
            return False
        network = self.main.network
        like = next(network.parameters())
        # Numbers that open gates may have.
        gates = {
            site: torch.linspace(0.5, 1.0, len(gate)).to(like) * gate.to(like) for site, gate in open_gates.items()
        }
        if is_constant(fix_gates(network, gates), calls_of(self.example)):
            warnings.warn(
                "All gates of a layer are closed for good, so that the network's output would be a constant; it is "
                "left as it is. Lower the price of open gates, or train them more slowly.",
                stacklevel=2,
            )
            return False
        found = search(network, gates, self.example, keep_gates=True)
        if not found.plan.remaining and not found.plan.changes:
            self._tried = open_gates
            return False
        self._norms(found.network)  # which may be refused
        check_state(self.optimiser, [p for name, p in network.named_parameters() if name in found.plan.remaining])
        self._apply(found.plan, self.example)
        return True

    def _count(self) -> None:
        """Note for how long each gate has been closed."""
        for site, gate in self.main.guide.posterior().items():
            if site not in self._streaks:  # a gate elsewhere
                continue
            # A family without exact zeros is always at its minimum, and never closed.
            unlikely = gate.active_prob - gate.least_active_prob <= self.threshold
            closed = (unlikely & (gate.test_gate == 0)).cpu()
            self._streaks[site] = torch.where(closed, self._streaks[site] + 1, 0)

    def state_dict(self) -> ShrinkerState:
        """What a resumed run needs, as plain values."""
        return {
            "plans": [found.to_json() for found in self._plans],
            "streaks": {site: streak.clone() for site, streak in self._streaks.items()},
        }

    def load_state_dict(self, state: ShrinkerState) -> None:
        """Repeat the shrinkings of a run on fresh networks; load their parameters afterwards.

        Args:
            state: from :meth:`state_dict` of a shrinker of the same networks.

        Raises:
            ValueError: the state is of another network.
        """
        for text in state["plans"]:
            self._apply(Plan.from_json(text), None)
        if state["streaks"].keys() != self._streaks.keys():
            raise ValueError(f"Expected the state of gate sites {sorted(self._streaks)}.")
        self._streaks = {site: streak.clone() for site, streak in state["streaks"].items()}

    def _apply(self, plan: Plan, example: Example | None) -> None:
        """Shrink everything; without an example, to load parameters afterwards."""
        copies = [self.main, *self.replicas]
        constants = [None if example is None else constants_of(one.network, plan, calls_of(example)) for one in copies]
        units = {change.site: torch.tensor(change.units, dtype=torch.long) for change in plan.changes.values()}
        gone = [site for site, index in units.items() if not len(index)]
        for one, constant in zip(copies, constants, strict=True):
            apply_in_place(one.network, plan, constant, self.optimiser if one is self.main else None)
            replaced = one.guide.keep(units)
            if one is self.main:
                move(self.optimiser, replaced)
        for site, index in units.items():
            self._remaining[site] = self._remaining[site][index]
            self._streaks[site] = self._streaks[site][index]
        for site in gone:
            del self._remaining[site], self._streaks[site]
        if self.elbo is not None:
            self.elbo.drop(gone)
            self.elbo.square_norm = self._norms(self.main.network)
        self._plans.append(plan)
        if self.on_shrink is not None:
            self.on_shrink()
        elif distributed.is_available() and distributed.is_initialized():
            warnings.warn(
                "Expected on_shrink where several processes train: parameters have other shapes now, and a "
                "DistributedDataParallel made before would leave out a synchronisation; wrap the network anew there.",
                stacklevel=3,
            )

    def _norms(self, network: nn.Module) -> dict[str, Callable[[], Tensor]]:
        if self.elbo is None or not self.elbo.square_norm:
            return {}
        return square_norms(network, cast(Tensor, self.example))


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(gate, other[site]) for site, gate in one.items())
