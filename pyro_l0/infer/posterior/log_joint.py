"""A model's log joint density as a function of one vector, with its gates of two values summed out exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to
from torch.utils._pytree import tree_map

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateSupport
from pyro_l0.distributions.wrappers import find_gate
from pyro_l0.fast.record import Site, is_deterministic
from pyro_l0.infer.reparam import RectifyReparam

__all__ = ["MOST_GATES", "LogJoint", "Piece"]

MOST_GATES = 12  # 4,096 values of the gates in every evaluation
_NOTHING = 60.0  # nats below the largest term of a sum: without them no weight is a denormal number, which are slow
_AT_ONCE = 8192  # runs of the model under one torch.vmap

Model = Callable[..., object]
_Result = TypeVar("_Result")


class Piece(NamedTuple):
    """Where a site lies in a vector.

    Attributes:
        start: its first entry.
        shape: its shape there.
        dtype: its type.
    """

    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def places(self) -> Tensor:
        """Its entries' places, in one row."""
        return torch.arange(self.start, self.start + self.shape.numel())

    def of(self, vector: Tensor) -> Tensor:
        """The site's entries of a vector."""
        return vector[self.start : self.start + self.shape.numel()].reshape(self.shape).to(self.dtype)


class LogJoint:
    """The log joint density of a model at places on the real line.

    Gates with a density between their atoms are reparameterised: their place is that of the variable before
    rectification. Gates of two values are an argument of their own. Many places or gates are evaluated in one run of
    the model under ``torch.vmap``, so that the model needs no dimension for them.

    Args:
        model: a Pyro model.
        args: its arguments.
        kwargs: its keyword arguments.

    Attributes:
        sites: the sites of one run, reparameterised.
        gates: names of the latent gates with atoms.
        latent: where every continuous latent site lies in the vector.
        switches: where every site of gates of two values lies in the vector of those.
        start: the vector of that run.
        codes: all values of the gates of two values, shape ``(2 ** n, n)``.

    Raises:
        ValueError: a latent site is discrete, data are drawn at random, or gates of two values are too many or decide
            what the model runs.
    """

    def __init__(self, model: Model, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.gates = [name for name, site in _run(model, args, kwargs).items() if _has_atoms(site)]
        reparameterised = poutine.reparam(model, _reparameterise)
        self._model: Model = lambda: reparameterised(*args, **kwargs)
        self.sites = _run(self._model, (), {})
        self.latent: dict[str, Piece] = {}
        self.switches: dict[str, Piece] = {}
        start: list[Tensor] = [torch.zeros(0)]
        switch_count = 0
        for name, site in self.sites.items():
            if _has_atoms(site):
                self.switches[name] = Piece(switch_count, site["value"].shape, site["value"].dtype)
                switch_count += site["value"].numel()
            elif not site["is_observed"]:
                real = _to_real(name, site)
                self.latent[name] = Piece(sum(map(torch.Tensor.numel, start)), real.shape, real.dtype)
                start.append(real.flatten())
        self.start = torch.cat([x.to(start[-1].device) for x in start])
        if switch_count > MOST_GATES:
            raise ValueError(_too_many(self.switches, switch_count))
        self.codes = _codes(switch_count, self.start)
        self._vectorises = self._check_vectorised()

    def __call__(self, vector: Tensor, code: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The log joint density at one place, and the values of the latent and the deterministic sites there.

        Args:
            vector: shape ``(n,)``.
            code: gates of two values.

        Returns:
            The density with respect to the vector and counting measure of the gates, shape ``()``; values by site.
        """
        latent = {name: piece.of(vector) for name, piece in self.latent.items()}
        gates = {name: piece.of(code) for name, piece in self.switches.items()}
        # A check of values would branch on what torch.vmap maps.
        with pyro.validation_enabled(False), _Place(latent, gates) as place:
            self._model()
        return place.log_prob, place.values

    def table(self, vector: Tensor) -> Tensor:
        """Log joint densities at one place for all values of the gates, shape ``(len(codes),)``."""
        if len(self.codes) == 1:
            return self(vector, self.codes[0])[0].unsqueeze(0)
        table: Tensor = torch.vmap(lambda code: self(vector, code)[0])(self.codes)
        return table

    def potential(self, vector: Tensor) -> Tensor:
        """Minus the log density at one place, gates of two values summed out, shape ``()``."""
        table = self.table(vector)
        seen = table > table.detach().amax() - _NOTHING
        return -torch.where(seen, table, -torch.inf).logsumexp(0)

    @torch.no_grad()
    def tables(self, vectors: Tensor) -> Tensor:
        """The tables of many places, shape ``(many, len(codes))``."""
        return self._many(self.table, (vectors,), max(1, _AT_ONCE // len(self.codes)))

    @torch.no_grad()
    def many(self, vectors: Tensor, codes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What a call returns, for many places and as many gates at once."""
        return self._many(self, (vectors, codes), _AT_ONCE)

    def _many(self, function: Callable[..., _Result], inputs: tuple[Tensor, ...], at_once: int) -> _Result:
        if self._vectorises:
            result: _Result = torch.vmap(function, chunk_size=at_once)(*inputs)
            return result
        rows = [function(*row) for row in zip(*inputs, strict=True)]
        stacked: _Result = tree_map(lambda *x: torch.stack(x), *rows)
        return stacked

    @torch.no_grad()
    def _check_vectorised(self) -> bool:
        """Whether the model runs under ``torch.vmap`` and says there what it says by itself.

        Raises:
            ValueError: it does not, although it has gates to be summed out.
        """
        codes = self.codes[[0, -1]]
        alone = torch.stack([self(self.start, code)[0] for code in codes])
        try:
            together = torch.vmap(lambda code: self(self.start, code)[0])(codes)
            cause = f"its log densities are {together.tolist()} then, and {alone.tolist()} one by one"
            good = torch.allclose(together, alone, rtol=1e-3, atol=1e-3, equal_nan=True)
        except (RuntimeError, ValueError) as error:
            cause, good = str(error).split("\n")[0], False
        if not good and self.switches:
            raise ValueError(
                f"Expected a model that runs for all values of the gates at {sorted(self.switches)} at once, under "
                f"torch.vmap, but {cause}. Let no Python code branch on a gate or read its value (.item(), if, numpy), "
                "and write into no tensor in place."
            )
        return good


class _Place(Messenger):
    """Give latent sites their values and add up the log probabilities."""

    def __init__(self, latent: Mapping[str, Tensor], gates: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._latent, self._gates = latent, gates
        self.log_prob = torch.zeros(())
        self.values: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Site) -> None:
        if site_is_subsample(msg):
            return _refuse_random_data(msg)
        if msg["is_observed"]:
            return
        name = msg["name"]
        if name in self._gates:
            msg["value"] = self._gates[name]
        else:
            # The support may hang on other sites, so that the transform is made anew.
            real, transform = self._latent[name], biject_to(msg["fn"].support)
            msg["value"] = transform(real)
            self.log_prob = self.log_prob + transform.log_abs_det_jacobian(real, msg["value"]).sum()
        msg["done"] = True

    def _pyro_post_sample(self, msg: Site) -> None:
        if site_is_subsample(msg):
            return
        fixed = is_deterministic(msg)
        if fixed or not msg["is_observed"]:
            self.values[msg["name"]] = msg["value"]
        if not fixed:
            log_prob = msg["fn"].log_prob(msg["value"], *msg["args"], **msg["kwargs"])
            self.log_prob = self.log_prob + scale_and_mask(log_prob, msg["scale"], msg["mask"]).sum()


def _refuse_random_data(plate: Site) -> None:
    size, drawn = plate["fn"].size, plate["fn"].subsample_size
    if plate["value"] is None and drawn is not None and drawn < size:
        raise ValueError(
            f"Expected a model of all its data, but plate {plate['name']!r} draws {drawn} of {size} anew in every run, "
            "and a sampler would follow another posterior at every step. Leave subsample_size out."
        )


def _run(model: Model, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Site]:
    """The sample sites of one run, with every check that Pyro makes of them."""
    trace = poutine.trace(model).get_trace(*args, **kwargs)
    trace.compute_log_prob()
    nodes: dict[str, Site] = trace.nodes
    return {name: site for name, site in nodes.items() if site["type"] == "sample" and not site_is_subsample(site)}


def _has_atoms(site: Site) -> bool:
    """Whether a site is a latent gate that is 0 or 1 with positive probability."""
    gate = find_gate(site["fn"])
    return gate is not None and not site["is_observed"] and isinstance(gate.support, GateSupport)


def _reparameterise(site: Site) -> RectifyReparam | None:
    """How Pyro is to reparameterise a site: gates with a density between their atoms, nothing else."""
    return RectifyReparam() if _has_atoms(site) and not isinstance(find_gate(site["fn"]), BernoulliGate) else None


def _to_real(name: str, site: Site) -> Tensor:
    """A latent site's value on the real line.

    Raises:
        ValueError: there is none, as for a discrete site.
    """
    try:
        real: Tensor = biject_to(site["fn"].support).inv(site["value"].detach())
    except NotImplementedError:
        raise ValueError(
            f"Expected latent site {name!r} to be continuous or a gate, but got {site['fn']}, which no sampler of "
            "continuous variables can move; sum it out in the model, or use a BernoulliGate if it takes 0 and 1."
        ) from None
    return real


def _too_many(switches: Mapping[str, Piece], count: int) -> str:
    """Why gates are not summed out."""
    return (
        f"Expected at most {MOST_GATES} BernoulliGate gates, whose 2 ** {MOST_GATES} values a sampler sums out at each "
        f"step, but got {count} at {sorted(switches)}. Give these sites gates that a sampler moves, such as "
        "HardConcrete.from_active_prob(rate, one_given_active=0.9), or fit AutoSpikeSlab in the place of sampling."
    )


def _codes(count: int, like: Tensor) -> Tensor:
    """All values of some gates, shape ``(2 ** count, count)``."""
    rows = torch.arange(2**count, device=like.device).unsqueeze(-1)
    return (rows >> torch.arange(count, device=like.device) & 1).to(like.dtype)
