"""The handler under which a loss runs a model and a guide, which can record sites without Pyro's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any

import pyro
import torch
from pyro.distributions import Delta, Distribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine import runtime
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

from pyro_l0.fast.switch import is_on

__all__ = ["Record", "Site", "free_name", "is_deterministic", "is_drawn", "is_likelihood", "sample", "sole_record"]

Site = Any  # a message of Pyro's

# What all sites that are recorded without Pyro's messages have in common.
_PLAIN = {"type": "sample", "scale": 1.0, "mask": None, "cond_indep_stack": (), "args": (), "kwargs": {}}


class Record(Messenger):
    """Record the sample sites of a run, with the values of another run where it has them.

    Pyro's ``trace`` and ``replay`` in one, without the parameters, arguments and graph that they keep at the cost of a
    good part of a small network's step. Parameters still reach the handlers outside.
    """

    def __init__(self, values: Mapping[str, Site] | None = None) -> None:
        super().__init__()
        self.values = values or {}
        self.sites: dict[str, Site] = {}
        self.joint_draws: dict[str, object] = {}  # of several sites, by each of them

    def _process_message(self, msg: Site) -> None:
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        other = self._other(msg["name"])
        if other is not None:
            if msg["value"] is not None and not torch.equal(torch.as_tensor(msg["value"]), other["value"]):
                raise ValueError(
                    f"Expected plate {msg['name']!r} of the guide to take the part of the data that the model is "
                    "given, but it draws its own. Give the guide create_plates, a function of the model's arguments "
                    f"that returns pyro.plate({msg['name']!r}, size, subsample=...)."
                )
            msg["done"] = True
            msg["value"] = other["value"]
            msg["infer"] = other["infer"]

    def _postprocess_message(self, msg: Site) -> None:
        if msg["type"] == "sample" and not msg["infer"].get("_do_not_trace"):
            self._keep(msg.copy())

    def _other(self, name: str) -> Site | None:
        other = self.values.get(name)
        if other is not None and other["is_observed"]:
            raise RuntimeError(f"Site {name!r} of the guide is observed, but the model's is latent.")
        return other

    def _keep(self, site: Site) -> None:
        if site["name"] in self.sites:
            raise RuntimeError(f"Multiple sample sites named {site['name']!r}.")
        self.sites[site["name"]] = site

    def sample(self, name: str, fn: Callable[[], Tensor], value: Tensor | None = None, joint: object = None) -> Tensor:
        """``pyro.sample(name, fn)`` for a latent site when no other handler is active, in a third of the time."""
        other = self._other(name)
        if other is not None:
            value = other["value"]
        drawn = fn() if value is None else value
        self._keep({**_PLAIN, "name": name, "fn": fn, "value": drawn, "is_observed": False, "infer": {}})
        if joint is not None:
            self.joint_draws[name] = joint
        return drawn

    def observe(self, name: str, fn: Distribution, value: Tensor) -> None:
        """``pyro.sample(name, fn, obs=value)`` when no other handler is active."""
        self._keep({**_PLAIN, "name": name, "fn": fn, "value": value, "is_observed": True, "infer": {}})


class SharedRows(Messenger):
    """Let a subsampled plate draw its rows once for all particles."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Site) -> None:
        if not site_is_subsample(msg) or msg["value"] is not None:
            return
        if msg["name"] not in self._rows:
            with temporarily_pop_interpreter_stack() if torch._C._are_functorch_transforms_active() else nullcontext():
                self._rows[msg["name"]] = msg["fn"].sample()
        msg["value"], msg["done"] = self._rows[msg["name"]], True


def is_deterministic(site: Site) -> bool:
    """Whether a recorded site holds a value that follows from others: ``pyro.deterministic``, or reparameterised."""
    fn = site["fn"]
    return bool(site["is_observed"]) and getattr(fn, "_mask", None) is False and isinstance(fn.base_dist, Delta)


def is_drawn(site: Site) -> bool:
    """Whether a recorded site is a sample site, other than that of a plate's rows."""
    return site["type"] == "sample" and not site_is_subsample(site)


def draws_rows(site: Site) -> bool:
    """Whether a site is that of a plate which takes a part of its rows, anew in every run."""
    if site["type"] != "sample" or not site_is_subsample(site):
        return False
    size = site["fn"].subsample_size
    return size is not None and size < site["fn"].size


def is_likelihood(site: Site) -> bool:
    """Whether a recorded site scores data: it is observed, or a factor."""
    return is_drawn(site) and bool(site["is_observed"]) and not is_deterministic(site)


def sole_record() -> Record | None:
    """The active record if no other handler could tell a site from a message; None with fast off.

    What collects parameters alone, as ``SVI.step`` does, passes over sites; so does what draws the rows of plates.
    """
    stack = runtime._PYRO_STACK
    if not stack or type(stack[-1]) is not Record or not is_on("record"):
        return None
    # A subclass may do more.
    alone = all(type(x) is SharedRows or (type(x) is TraceMessenger and x.param_only) for x in stack[:-1])
    return stack[-1] if alone else None


def sample(name: str, fn: TorchDistributionMixin) -> Tensor:
    """``pyro.sample``, without its messages where that makes no difference; a site is drawn once in a run.

    A gate that is called several times asks again for its site, and gets the same value as long as a handler that
    records sites is active.
    """
    record = sole_record()
    for sites in _recorded() if record is None else (record.sites,):
        if name in sites:
            if sites[name].get("fn") is not fn:
                raise RuntimeError(
                    f"Expected sites of different names, but two gates are called {name!r}, or another site is called "
                    "so. Call name_gates(network) of the whole network before."
                )
            again: Tensor = sites[name]["value"]
            return again
    value: Tensor = pyro.sample(name, fn) if record is None else record.sample(name, fn)
    return value


def free_name(stem: str) -> str:
    """The stem with the first number that makes it the name of no site recorded so far.

    Raises:
        RuntimeError: no handler records sites.
    """
    recorded = list(_recorded())
    if not recorded:
        raise RuntimeError(
            "Expected a gate with a name, or a run whose sites are recorded, but got neither; call "
            "pyro_l0.nn.gate.name_gates(network) before."
        )
    names = (f"{stem}{number}" for number in count())
    return next(name for name in names if not any(name in sites for sites in recorded))


def _recorded() -> Iterator[Mapping[str, Site]]:
    """Of each active handler that records, of Pyro or of ours, the sites so far by name."""
    for handler in runtime._PYRO_STACK:
        if isinstance(handler, Record):
            yield handler.sites
        elif isinstance(handler, TraceMessenger) and not handler.param_only:
            yield handler.trace.nodes
