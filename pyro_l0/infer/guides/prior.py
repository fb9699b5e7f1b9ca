"""Which parameters of a model's gates, and which supports of its latents, depend on what the model draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from pyro_l0.distributions.gate import GateDistribution, find_gate
from pyro_l0.fast.record import Site
from pyro_l0.infer.generators import generators_kept
from pyro_l0.maths.special import Number

# A fair coin that sets a temperature stays unnoticed once in a thousand set-ups.
_REDRAWS = 10

_Options = dict[tuple[str, str], Number]  # by site and name


class DrawsElsewhere(Messenger):
    """Notices whether a model draws random numbers before a gate, other than for gates.

    Pyro's messages do not tell: a guide for a part of a model does not see the other part's sites.
    """

    found: bool = False

    def __enter__(self) -> Self:
        self._state = _generators()
        return super().__enter__()

    def _process_message(self, msg: Site) -> None:
        if not self.found and _is_gate(msg):
            self.found = not all(map(torch.equal, self._state, _generators()))

    def _postprocess_message(self, msg: Site) -> None:
        if not self.found and _is_gate(msg):
            self._state = _generators()


def _is_gate(msg: Site) -> bool:
    return msg["type"] == "sample" and find_gate(msg["fn"]) is not None


def inherited_options(
    family: type[GateDistribution], prototype: Trace, draws: bool, run: Callable[[], Trace]
) -> dict[str, dict[str, Number]]:
    """The options by site that posterior gates take over from their priors: those that no latent variable changes.

    ``draws`` says whether the model drew other things than gates before a gate, ``run`` runs it again.
    """
    options = _prior_options(family, prototype)
    usual = family.from_active_prob(0.5).fixed_options
    special = {key: value for key, value in options.items() if not _same(value, usual[key[1]])}
    # What depends on draws of several gates is a tensor, behind them.
    behind = [name for name, site in prototype.iter_stochastic_nodes() if find_gate(site["fn"]) is not None][1:]
    drawn: set[tuple[str, str]] = set()
    if draws or any(isinstance(value, Tensor) and name in behind for (name, _), value in special.items()):
        drawn = _drawn_options(special, lambda: _prior_options(family, run()))
    inherited: dict[str, dict[str, Number]] = {}
    for (name, key), value in options.items():
        if (name, key) not in drawn:
            inherited.setdefault(name, {})[key] = value
    return inherited


def _prior_options(family: type[GateDistribution], trace: Trace) -> _Options:
    """The parameters of priors of a family that a guide does not learn."""
    priors = {name: find_gate(site["fn"]) for name, site in trace.iter_stochastic_nodes()}
    return {
        (name, key): value
        for name, prior in priors.items()
        if type(prior) is family
        for key, value in prior.fixed_options.items()
    }


def _drawn_options(first: _Options, draw: Callable[[], _Options]) -> set[tuple[str, str]]:
    """The options that differ in further runs of a model; random numbers elsewhere stay as they were."""
    left, drawn = set(first), set()
    with generators_kept():
        for _ in range(_REDRAWS):
            if not left:
                break
            again = draw()
            drawn |= {key for key in left if not _same(first[key], again.get(key))}
            # A tensor that exists before the run depends on no draw.
            lasting = {key for key in left if isinstance(first[key], Tensor) and first[key] is again.get(key)}
            left -= drawn | lasting
    return drawn


def check_supports(sites: Mapping[str, Site], run: Callable[[], Trace]) -> None:
    """Refuse latents whose support depends on what the model draws, as ``run`` shows: a guide's would not follow."""
    bounds = {name: found for name, site in sites.items() if (found := _bounds(site))}
    if bounds:
        with generators_kept():
            again = run()
        for name, found in bounds.items():
            if name not in again or not all(map(torch.equal, found, _bounds(again.nodes[name]))):
                raise ValueError(
                    f"Expected latent site {name!r} to have the same support in every run, but that of its prior "
                    f"{sites[name]['fn']} depends on what the model draws. Sample a number of a fixed support, and "
                    "transform it in the model."
                )


def _bounds(site: Site) -> list[Tensor]:
    """The tensors that bound a latent's support; none of a gate's."""
    if find_gate(site["fn"]) is not None:
        return []
    support = getattr(site["fn"], "support", None)
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return [x for x in vars(support).values() if isinstance(x, Tensor)] if support is not None else []


def _same(x: Number | None, y: Number | None) -> bool:
    """Whether two options, each a number or a tensor, are equal."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and torch.equal(x, y)
    return not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y


def _generators() -> list[Tensor]:
    """The states of torch's generators, of the devices in use."""
    states = [torch.get_rng_state()]
    return states + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else states
