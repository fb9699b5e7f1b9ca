"""The L0Gates of a network as targets, shrinking and diagnostics ask for them, and the price of open gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Real

import torch
from torch import Tensor, nn

from pyro_l0.distributions.gate import GateDistribution, concatenate, sum_open
from pyro_l0.nn.gate_layer import gate_names
from pyro_l0.nn.l0_gate import L0Gate

__all__ = ["NetworkGates", "penalty"]

Cost = float | Mapping[str, float] | Callable[[Mapping[str, Tensor]], Tensor]


class NetworkGates:
    """The :class:`~pyro_l0.nn.L0Gate` modules of a network, by site, with the methods of a guide over gates.

    :class:`~pyro_l0.infer.SparsityTarget`, :class:`~pyro_l0.compaction.Shrinker` and
    :func:`~pyro_l0.diagnostics.diagnose` take it in place of a guide. A site is named after the gate's module path.

    Args:
        network: a network with L0Gates.

    Attributes:
        sites: the network's own L0Gates by site.

    Raises:
        ValueError: the network has no L0Gate.
        TypeError: ``network`` is not a module.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), L0Gate(3, init_jitter=0.0), nn.Linear(3, 2))
        >>> gates = NetworkGates(network)
        >>> gates.test_gates()
        {'2': tensor([0.6744, 0.6744, 0.6744])}
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        _some_l0_gates(network)
        self._follow()

    def _follow(self) -> None:
        self.sites = _l0_gates(self._network)
        self._held = {site: dict(gate.named_parameters()) for site, gate in self.sites.items()}

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """A value of each gate, by site and in its shape; random in training mode. Arguments are ignored."""
        return {site: gate() for site, gate in self.sites.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The gates' parameters, for their own parameter group of an optimiser."""
        for gate in self.sites.values():
            yield from gate.parameters()

    def posterior(self) -> dict[str, GateDistribution]:
        """The gates' distributions by site, differentiable in their parameters."""
        return {site: gate.distribution for site, gate in self.sites.items()}

    def locations(self) -> list[nn.Parameter]:
        """The parameter that places the gates of each site, in the order of :meth:`posterior`."""
        return [gate.location for gate in self.sites.values()]

    @torch.no_grad()
    def test_gates(self) -> dict[str, Tensor]:
        """The deterministic gates that prune, by site and in its shape."""
        return {site: gate.test_gate for site, gate in self.sites.items()}

    @torch.no_grad()
    def active_probs(self) -> dict[str, Tensor]:
        """P(z != 0) of each gate, by site and in its shape."""
        return {site: gate.active_prob for site, gate in self.sites.items()}

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Follow the network after some units of some sites were removed; a site that keeps none is removed.

        Args:
            units: by site, the indices of the units that stay, shape ``(n,)``.

        Returns:
            For each parameter replaced, the new one (None if its site was removed) and the indices that it holds.
        """
        before = self._held
        self._follow()
        replaced: dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]] = {}
        for site, index in units.items():
            now = self._held.get(site, {})
            replaced.update({old: (now.get(name), index) for name, old in before[site].items()})
        return replaced


def penalty(network: nn.Module, cost: Cost) -> Tensor:
    r"""The price of a network's open L0Gates in nats, shape ``()``; add it to the task's loss.

    The sum is Eq. 22.

    .. math:: \sum_j c_j P(z_j \neq 0) \quad \text{for prices } c, \qquad c(P(z \neq 0)) \quad \text{for a function } c.

    With prices :math:`\lambda |g|` by site it is the penalty of ``L0_ELBO("l0", lam=lam, group_size=sizes)``.

    Args:
        network: a network with L0Gates.
        cost: the price of each open gate in nats, one for all or by site, such as ``{site: lam * size for site, size in
            cost.group_sizes.items()}``; or a function of P(z != 0) by site, such as ``NetworkCost.macs``.

    Raises:
        ValueError: the network has no L0Gate, or a site has no price.

    Example:
        >>> network = nn.Sequential(L0Gate(4, init_active_prob=0.5, init_jitter=0.0), nn.Linear(4, 2))
        >>> round(float(penalty(network, 0.1).detach()), 4)
        0.2
    """
    gates = _some_l0_gates(network)
    if callable(cost):
        return cost({site: gate.active_prob for site, gate in gates.items()})
    prices = dict.fromkeys(gates, float(cost)) if isinstance(cost, Real) else cost
    if not isinstance(prices, Mapping) or prices.keys() != gates.keys():
        raise ValueError(
            f"Expected cost to be a price, a function, or a price for each of the gates {sorted(gates)}, but got "
            f"{cost!r}."
        )
    each = [gate.distribution for gate in gates.values()]
    joint = concatenate(each)
    if joint is not None:
        return sum_open(joint.active_prob, list(prices.values()), [x.batch_shape.numel() for x in each])
    return torch.stack([price * x.active_prob.sum() for price, x in zip(prices.values(), each, strict=True)]).sum()


def _l0_gates(network: nn.Module) -> dict[str, L0Gate]:
    return {site: gate for site, gate in gate_names(network).items() if isinstance(gate, L0Gate)}


def _some_l0_gates(network: nn.Module) -> dict[str, L0Gate]:
    gates = _l0_gates(network)
    if not gates:
        raise ValueError("Expected a network with L0Gates, but it has none. Put some in, by insert_gates say.")
    return gates
