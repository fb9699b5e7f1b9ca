"""Which parameters of a model's gates depend on what the model draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.distributions.wrappers import find_gate

__all__ = ["DrawsElsewhere", "inherited_options"]

# A fair coin that sets a temperature stays unnoticed once in a thousand set-ups.
_REDRAWS = 10

Options = Mapping[str, Mapping[str, Any]]


class DrawsElsewhere(Messenger):
    """Notice whether a model draws random numbers before a gate of its, other than for gates.

    Pyro's messages do not tell: a guide for a part of a model does not see the other part's sites.

    Attributes:
        found: whether there was such a draw.
    """

    found: bool = False

    def __enter__(self) -> Any:
        self._state = _generators()
        return super().__enter__()

    def _process_message(self, msg: Any) -> None:
        if not self.found and _is_gate(msg):
            self.found = not all(map(torch.equal, self._state, _generators()))

    def _postprocess_message(self, msg: Any) -> None:
        if not self.found and _is_gate(msg):
            self._state = _generators()


def _is_gate(msg: Any) -> bool:
    return msg["type"] == "sample" and find_gate(msg["fn"]) is not None


def inherited_options(
    family: type[GateDistribution], prototype: Trace, draws: bool, run: Callable[[], Trace]
) -> dict[str, dict[str, Any]]:
    """The options that posterior gates take over from their priors: those that no latent variable changes.

    Args:
        family: the posterior gates'.
        prototype: trace of a run of the model.
        draws: whether the model drew other things than gates before a gate.
        run: runs the model again.
    """
    options = _prior_options(family, prototype)
    usual = family.from_active_prob(0.5).fixed_options
    special = {
        name: {key: value for key, value in fixed.items() if not _same(value, usual[key])}
        for name, fixed in options.items()
    }
    # What depends on draws of several gates is a tensor, behind them.
    behind = [name for name, site in prototype.iter_stochastic_nodes() if find_gate(site["fn"]) is not None][1:]
    if not draws and not any(isinstance(x, Tensor) for name in behind for x in special.get(name, {}).values()):
        return options
    drawn = _drawn_options(special, lambda: _prior_options(family, run()))
    return {
        name: {key: value for key, value in fixed.items() if (name, key) not in drawn}
        for name, fixed in options.items()
    }


def _prior_options(family: type[GateDistribution], trace: Trace) -> dict[str, dict[str, Any]]:
    """The parameters of priors of a family that a guide does not learn."""
    priors = {name: find_gate(site["fn"]) for name, site in trace.iter_stochastic_nodes()}
    return {name: prior.fixed_options for name, prior in priors.items() if type(prior) is family}


def _drawn_options(first: Options, draw: Callable[[], Options]) -> set[tuple[str, str]]:
    """The options that other draws of a model change; random numbers elsewhere stay what they were.

    Args:
        first: options by site from one run of the model.
        draw: runs the model again.

    Returns:
        Site and name of each.
    """
    left = {(site, key) for site, options in first.items() for key in options}
    drawn: set[tuple[str, str]] = set()
    state = pyro.util.get_rng_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        for _ in range(_REDRAWS):
            if not left:
                break
            again = draw()
            drawn |= {(site, key) for site, key in left if not _same(first[site][key], again.get(site, {}).get(key))}
            # A tensor that is there before the run depends on no draw.
            lasting = {(site, key) for site, key in left if _is_tensor(first[site][key], again.get(site, {}).get(key))}
            left -= drawn | lasting
    pyro.util.set_rng_state(state)
    return drawn


def _is_tensor(x: Any, y: Any) -> bool:
    """Whether two options are one tensor."""
    return isinstance(x, Tensor) and x is y


def _same(x: Any, y: Any) -> bool:
    """Whether two options, each a number or a tensor, are equal."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and torch.equal(x, y)
    return not isinstance(x, Tensor) and not isinstance(y, Tensor) and bool(x == y)


def _generators() -> list[Tensor]:
    """The states of torch's generators, of the devices in use."""
    states = [torch.get_rng_state()]
    return states + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else states
