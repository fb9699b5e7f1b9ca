"""Shrinks a network, its guide and its optimiser while they train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor, nn

from pyro_l0.compaction.comparison import check_hooks, check_rewriting, check_trainable
from pyro_l0.compaction.optimiser import Replaced, add_biases, check_state, layer_slices, move
from pyro_l0.compaction.plan import Plan, plan_graph
from pyro_l0.compaction.rewrite import rewrite, rewrite_graph
from pyro_l0.nn.fixed import check_gates
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.graph import GateGraph
from pyro_l0.nn.reading import read_network
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
        """The posterior gates by site."""

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Drop all but some units of some sites."""


class GateObjective(Protocol):
    """What shrinking asks of an objective; :class:`~pyro_l0.infer.L0_ELBO` has it."""

    square_norm: dict[str, Callable[[], Tensor]]

    def drop(self, sites: Collection[str]) -> None:
        """Forget the coefficients of some sites."""


class ShrinkerState(TypedDict):
    """What a resumed run needs: the plans as JSON, and by site for how long each gate has been closed."""

    plans: list[str]
    streaks: dict[str, Tensor]


class Replica(NamedTuple):
    """A network inside another module, with the guide of its gates, such as an average over steps.

    Attributes:
        holder: the module that holds the network.
        path: the network's path in it.
        guide: the guide of the network's gates.
    """

    holder: nn.Module
    path: str
    guide: GatePosterior


class Shrinker:
    """Takes the units whose gates are closed for good out of a network while it trains, so that later steps cost less.

    A unit leaves when P(z != 0) of its gate was at most ``threshold`` (above the least that its family reaches, which
    is 0 for most) and its test gate was 0 at ``patience`` calls of :meth:`step` in a row; call it once per epoch. The
    unit, the weights that read and write it, its gate's parameters, their places in the optimiser's state and in the
    replicas go with it. A smaller threshold and more patience are more conservative. A gate that would have opened
    again is the only thing that is lost: the objective's prices stay what they are, and what leaves would have been
    closed in all but ``threshold`` of the coming steps. An open gate that no longer reaches the output leaves too, and
    its price with it.

    Args:
        holder: the module that holds the network; the network in it is replaced.
        path: the network's path in ``holder``.
        guide: the guide of its gates.
        example_input: one batch of the network's inputs, for the shapes; it is kept.
        optimiser: trains the network's and the guide's parameters.
        elbo: an objective whose coefficients by site lose the sites that leave.
        replicas: averaged copies of the network and the guide, which shrink with them.
        threshold: P(z != 0) below which a gate counts as closed.
        patience: calls in a row that a gate must be closed.

    Raises:
        ValueError: ``threshold`` is not in (0, 1) or ``patience`` is not positive, the guide lacks a gate of the
            network, layers are parametrised or share weights, or the network would train otherwise once it is written
            anew from the operations on its input: it has hooks, code under ``if self.training``, ``no_grad`` blocks
            or custom backward functions. Outputs and gradients are compared in training mode, under one seed.

    Note:
        A shrinking replaces parameters. The optimiser's are exchanged; a list that was read before is stale, so that
        ``clip_grad_norm_(parameters)`` would clip nothing. Read it in every step, as in
        ``clip_grad_norm_(model.parameters(), 1.0)``, or when :meth:`step` was True.

    Example:
        >>> import pyro
        >>> from pyro_l0.infer import AutoGate
        >>> from pyro_l0.nn import Gate
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1)))
        >>> guide = AutoGate(model)
        >>> _ = guide(torch.ones(1, 2))
        >>> optimiser = torch.optim.Adam([*model.parameters(), *guide.parameters()])
        >>> shrinker = Shrinker(model, "0", guide, torch.ones(1, 2), optimiser, patience=1)
        >>> with torch.no_grad():
        ...     _ = next(guide.parameters())[1].fill_(-9.0)
        >>> shrinker.step(), model[0].get_submodule("0")
        (True, Linear(in_features=2, out_features=2, bias=True))
    """

    def __init__(
        self,
        holder: nn.Module,
        path: str,
        guide: GatePosterior,
        example_input: Tensor,
        optimiser: torch.optim.Optimizer,
        elbo: GateObjective | None = None,
        replicas: Sequence[Replica] = (),
        *,
        threshold: float = 0.01,
        patience: int = 3,
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"Expected threshold strictly between 0 and 1, but got {threshold}.")
        if patience < 1:
            raise ValueError(f"Expected patience of at least 1, but got {patience}.")
        self.main = Replica(holder, path, guide)
        self.replicas = list(replicas)
        self.example_input = example_input
        self.optimiser = optimiser
        self.elbo = elbo
        self.threshold = threshold
        self.patience = patience
        network = holder.get_submodule(path)
        gates = gate_names(network)
        check_trainable(network)
        missing = gates.keys() - guide.posterior().keys()
        if missing:
            raise ValueError(
                f"Expected the guide to hold the network's gates, but it has none for {sorted(missing)}; call it once "
                "with the model's arguments, and name the gates as the model does."
            )
        check_rewriting(network, example_input)
        self._sizes = {site: gate.size for site, gate in gates.items()}
        self._kept = {site: torch.arange(gate.size) for site, gate in gates.items()}
        self._streaks = {site: torch.zeros(gate.size, dtype=torch.long) for site, gate in gates.items()}
        self._plans: list[Plan] = []

    @property
    def kept(self) -> dict[str, Tensor]:
        """By site, the units of the network at the start that are still in it."""
        return dict(self._kept)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that were carried out, in order."""
        return tuple(self._plans)

    def full(self, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values by site in the sizes of the network at the start; units that left have 0.

        Args:
            gates: values of the units that are left, by site.
        """
        full = {}
        for site, size in self._sizes.items():
            like = gates.get(site)
            full[site] = torch.zeros(size) if like is None else like.new_zeros(size)
            if like is not None:
                full[site][self._kept[site].to(like.device)] = like
        return full

    @torch.no_grad()
    def step(self) -> bool:
        """Look at the gates, and shrink if some are closed for good; True if the network was replaced.

        Then take ``parameters()`` anew: a list from before holds tensors that are no longer trained.
        """
        posterior = self.main.guide.posterior()
        for site, gate in posterior.items():
            if site not in self._streaks:  # a gate elsewhere
                continue
            # A family without exact zeros is at its least probability always, and never closed.
            unlikely = gate.active_prob - gate.least_active_prob <= self.threshold
            closed = (unlikely & (gate.test_gate == 0)).cpu()
            self._streaks[site] = torch.where(closed, self._streaks[site] + 1, 0)
        open_gates = {site: (streak < self.patience).float() for site, streak in self._streaks.items()}
        if all(bool(gate.all()) for gate in open_gates.values()):
            return False
        network = self.main.holder.get_submodule(self.main.path)
        like = next(network.parameters())
        open_gates = {site: gate.to(like) for site, gate in open_gates.items()}
        check_gates(network, open_gates)
        graph = read_network(network, self.example_input)
        found = plan_graph(graph, open_gates, self.example_input.shape, keep_gates=True)
        if not next(reversed(found.kept.values())):
            warnings.warn(
                "All gates of a layer are closed for good, so that the network's output would be a constant; it is "
                "left as it is. Lower the price of open gates, or train them more slowly.",
                stacklevel=2,
            )
            return False
        check_state(self.optimiser)
        check_hooks(network)
        self._carry_out(found, graph)
        return True

    def state_dict(self) -> ShrinkerState:
        """What a resumed run needs, as plain values."""
        return {
            "plans": [found.to_json() for found in self._plans],
            "streaks": {site: streak.clone() for site, streak in self._streaks.items()},
        }

    def load_state_dict(self, state: ShrinkerState) -> None:
        """Shrink the networks as those were whose state this is; load their parameters afterwards.

        Args:
            state: from :meth:`state_dict`, of a shrinker of the same networks before their first shrinking.

        Raises:
            ValueError: the state is of another network.
        """
        for text in state["plans"]:
            network, found = self.main.holder.get_submodule(self.main.path), Plan.from_json(text)
            like = next(network.parameters())
            self._carry_out(found, read_network(network, like.new_zeros(found.input_shape)))
        if state["streaks"].keys() != self._streaks.keys():
            raise ValueError(f"Expected the state of gate sites {sorted(self._streaks)}.")
        self._streaks = {site: streak.clone() for site, streak in state["streaks"].items()}

    def _carry_out(self, found: Plan, graph: GateGraph) -> None:
        units: dict[str, Tensor] = {site: torch.empty(0, dtype=torch.long) for site in self._kept}
        for name, site in graph.gates.items():
            units[site] = torch.tensor(found.kept[name], dtype=torch.long)
        replaced = self._replace(self.main, found, graph, units)
        for replica in self.replicas:
            self._replace(replica, found, None, units)
        move(self.optimiser, replaced)
        add_biases(self.optimiser, graph, self.main.holder.get_submodule(self.main.path))
        for site, index in units.items():
            self._kept[site] = self._kept[site][index]
            self._streaks[site] = self._streaks[site][index]
        gone = [site for site, index in units.items() if not len(index)]
        for site in gone:
            del self._kept[site], self._streaks[site]
        if self.elbo is not None:
            self.elbo.drop(gone)
            if self.elbo.square_norm:  # of the layers that are there now
                self.elbo.square_norm = square_norms(self.main.holder.get_submodule(self.main.path), self.example_input)
        self._plans.append(found)

    def _replace(self, replica: Replica, found: Plan, graph: GateGraph | None, units: Mapping[str, Tensor]) -> Replaced:
        """Put the smaller network in the place of one; return what became of its parameters if its graph is given."""
        old = replica.holder.get_submodule(replica.path)
        if graph is None:
            small = rewrite(old, found, keep_gates=True)
        else:
            small = rewrite_graph(graph, found, next(old.parameters()), keep_gates=True)
        modes = {path: module.training for path, module in old.named_modules()}
        for path, module in small.named_modules():
            module.training = modes.get(path, modes.get(path.rpartition(".")[0], old.training))
        replaced: Replaced = {} if graph is None else layer_slices(graph, found, small)
        parent, _, name = replica.path.rpartition(".")
        setattr(replica.holder.get_submodule(parent), name, small)
        for parameter, (new, index) in replica.guide.keep(units).items():
            replaced[parameter] = new, (index,)
        for parameter in replaced:  # in a list that is stale now, whose norm of gradients should be seen to be wrong
            parameter.grad = None
        return replaced
