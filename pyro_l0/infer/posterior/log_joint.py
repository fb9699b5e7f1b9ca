"""A model's log joint density as a function of one vector, with its binary gates summed out exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateSupport, find_gate
from pyro_l0.infer.guides.mean_field import SUM_OUT, Layout
from pyro_l0.infer.record import Site, is_deterministic
from pyro_l0.infer.reparam import RectifyReparam
from pyro_l0.infer.runs import is_scaled, log_prob, of_rows, sample_sites, seeded
from pyro_l0.infer.target import POINTS, InferenceTarget, Point
from pyro_l0.maths.backend import Context, apply

__all__ = ["MOST_GATES", "LogJoint", "recorded_with_slope"]


Function = Callable[[Tensor], Tensor]


def recorded_with_slope(function: Function, example: Tensor, other: Tensor) -> Function:
    """The same function, differentiable once, without the Python code around its operations.

    Pyro's handlers, ``torch.vmap`` and autograd take longer than the operations of a small model; and what does not
    depend on the argument is computed once. A function that cannot be recorded, or whose recording with ``example``
    does not give what it gives at ``other``, is returned itself.
    """

    def with_slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = function(x)
        return torch.cat((value.detach().unsqueeze(0), torch.autograd.grad(value, x)[0]))

    try:
        record: GraphModule = make_fx(with_slope)(example)
        _fold_constants(record)
        same = torch.allclose(record(other), with_slope(other), rtol=1e-4, atol=1e-4, equal_nan=True)
    except Exception:  # whatever the recorder does not know: the function itself then says what is wrong with it
        return function
    return (lambda x: apply(_WithSlope, x, record)) if same else function


class _WithSlope(torch.autograd.Function):
    """A value whose gradient is computed beside it."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, record: Function) -> Tensor:
        both = record(x)
        ctx.save_for_backward(both[1:])
        return both[0].clone()

    @staticmethod
    def backward(ctx: Context[None], out: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return out * slope, None


@torch.no_grad()
def _fold_constants(record: GraphModule) -> None:
    """Compute now what does not depend on an argument, such as the prior of gates of a fixed rate."""
    operations = [node for node in record.graph.nodes if node.op == "call_function"]
    if any(node.target._schema.is_mutable for node in operations if isinstance(node.target, torch._ops.OpOverload)):
        return  # a constant may be written to
    known = {node: getattr(record, str(node.target)) for node in record.graph.nodes if node.op == "get_attr"}
    for node in operations:
        if not node.all_input_nodes or all(given in known for given in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = value = node.target(*args, **kwargs)
            if isinstance(value, Tensor) and any(user not in known for user in node.users):
                name = f"_folded_{node.name}"
                record.register_buffer(name, value)
                with record.graph.inserting_before(node):
                    node.replace_all_uses_with(record.graph.get_attr(name))
    record.graph.eliminate_dead_code()
    record.recompile()


MOST_GATES = 12  # 4,096 values of the gates in every evaluation
_NOTHING = 60.0  # nats below the largest term of a sum: without them no weight is a denormal number, which are slow
_AT_ONCE = 8192  # runs of the model under one torch.vmap


class LogJoint:
    """The log joint density of a model at points on the real line.

    Gates with a density between their atoms are reparameterised: the vector has the variable before rectification.
    Binary gates are an argument of their own. Many points or gates are evaluated in one run of the model under
    ``torch.vmap``, so that the model needs no dimension for them.

    Attributes:
        sites: the sites of one run, reparameterised, whose vector is ``start``.
        gates: names of the latent gates with atoms.
        latent: the continuous latent sites; ``binary``, those of binary gates.
        codes: all values of the binary gates, shape ``(2 ** n, n)``.
    """

    def __init__(self, target: InferenceTarget) -> None:
        self.gates = [name for name, site in _checked_run(target).items() if _has_atoms(site)]
        self._target = replace(target, model=poutine.reparam(target.model, _reparameterise))
        self.sites = _checked_run(self._target)
        latent = {name: site for name, site in self.sites.items() if not site["is_observed"] and not _has_atoms(site)}
        for name, site in latent.items():
            if site["fn"].support.is_discrete:
                raise NotImplementedError(f"Site {name!r} is discrete, {site['fn']}: {SUM_OUT}")
        self.latent = _layout(latent)
        self.binary = Layout({name: site for name, site in self.sites.items() if _has_atoms(site)})
        values = {name: site["value"].detach() for name, site in self.sites.items()}
        start = self.latent.together(values)
        self.start = start.to(torch.promote_types(start.dtype, torch.get_default_dtype()))
        if self.binary.size > MOST_GATES:
            raise ValueError(
                f"Expected at most {MOST_GATES} BernoulliGate gates, whose values are summed out at each step, but got "
                f"{self.binary.size} at {sorted(self.binary.shapes)}. Use gates that a sampler moves, such as "
                "HardConcrete.from_active_prob(rate, one_given_active=0.9), or fit AutoSpikeSlab instead."
            )
        self._target.check_repeats({name: values[name] for name in (*self.latent.shapes, *self.binary.shapes)})
        self.codes = _codes(self.binary.size, self.start)
        self._vectorises = self._check_vectorised()
        self._check_density()

    def __call__(self, vector: Tensor, code: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The log joint density at one point, and the values of the latent and the deterministic sites there.

        The density is with respect to the vector and counting measure of the binary gates, shape ``()``.
        """
        given = {**self.latent.reals(vector), **self.binary.reals(code)}
        given = {name: x.to(self.sites[name]["value"].dtype) for name, x in given.items()}
        # A check of values would branch on what torch.vmap maps.
        with pyro.validation_enabled(False), _At(given, self.binary.shapes) as run:
            self._target.run()
        return run.log_prob, run.values

    def table(self, vector: Tensor) -> Tensor:
        """Log joint densities at one point for all values of the gates, shape ``(len(codes),)``."""
        if len(self.codes) == 1:
            return self(vector, self.codes[0])[0].unsqueeze(0)
        table: Tensor = torch.vmap(lambda code: self(vector, code)[0])(self.codes)
        return table

    def potential(self, vector: Tensor) -> Tensor:
        """Minus the log density at one point, binary gates summed out, shape ``()``."""
        table = self.table(vector)
        seen = table > table.detach().amax() - _NOTHING
        return -torch.where(seen, table, -torch.inf).logsumexp(0)

    @torch.no_grad()
    def tables(self, vectors: Tensor) -> Tensor:
        """The tables of many points, shape ``(many, len(codes))``."""
        at_once = max(1, _AT_ONCE // len(self.codes))
        return of_rows(self.table, vectors, mapped=self._vectorises, at_once=at_once)

    @torch.no_grad()
    def many(self, vectors: Tensor, codes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What a call returns, for many points and as many gates at once."""
        return of_rows(self, vectors, codes, mapped=self._vectorises, at_once=_AT_ONCE)

    @torch.no_grad()
    def _check_vectorised(self) -> bool:
        """Whether the model gives the same under ``torch.vmap``; refuses one that does not and has binary gates."""
        codes = self.codes[[0, -1]]
        alone = torch.stack([self(self.start, code)[0] for code in codes])
        try:
            together = torch.vmap(lambda code: self(self.start, code)[0])(codes)
            cause = f"its log densities are {together.tolist()} then, and {alone.tolist()} one by one"
            good = torch.allclose(together, alone, rtol=1e-3, atol=1e-3, equal_nan=True)
        except (RuntimeError, ValueError) as error:
            cause, good = str(error).split("\n")[0], False
        if not good and self.binary.size:
            raise ValueError(
                f"Expected a model that runs for all values of the gates at {sorted(self.binary.shapes)} at once, "
                f"under torch.vmap, but {cause}. Let no Python code branch on a gate or read its value (.item(), if, "
                "numpy), and write into no tensor in place."
            )
        return good

    @torch.no_grad()
    def _check_density(self) -> None:
        """Raise a ValueError if the density is not the model's log joint, up to a constant, at random points."""
        with seeded(0):
            vectors = 0.5 * torch.randn(POINTS, self.latent.size).to(self.start)
            codes = self.codes[torch.randint(len(self.codes), (POINTS,))]
        values = self.many(vectors, codes)[1]
        points = [{x: values[x][i] for x in (*self.latent.shapes, *self.binary.shapes)} for i in range(POINTS)]
        advice = "Let no code of the model depend on how many dimensions its draws have."
        self._target.check(self._densities, points, "sample_posterior", advice)

    def _densities(self, points: Sequence[Point]) -> Tensor:
        """Log densities with respect to the values of the sites, shape ``(n,)``."""
        vectors, codes, jacobians = [], [], []
        for point in points:
            sites: dict[str, Site] = self._target.trace_at(point).nodes
            latent = _layout({name: sites[name] for name in self.latent.shapes})  # supports may differ between points
            vectors.append(latent.together(point).to(self.start))
            codes.append(self.binary.together(point).to(self.start))
            jacobians.append(latent.log_jacobian(vectors[-1]))
        return self.many(torch.stack(vectors), torch.stack(codes))[0] - torch.stack(jacobians)


def _layout(sites: Mapping[str, Site]) -> Layout:
    return Layout(sites, {name: biject_to(site["fn"].support) for name, site in sites.items()})


class _At(Messenger):
    """Give latent sites their values, on the real line but for binary gates, and add up the log probabilities."""

    def __init__(self, given: Mapping[str, Tensor], binary: Collection[str]) -> None:
        super().__init__()
        self._given, self._binary = given, binary
        self.log_prob = torch.zeros(())
        self.values: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Site) -> None:
        if site_is_subsample(msg) or msg["is_observed"]:
            return
        msg["value"] = given = self._given[msg["name"]]
        if msg["name"] not in self._binary:
            transform = biject_to(msg["fn"].support)  # anew: the support may depend on other sites
            msg["value"] = transform(given)
            self.log_prob = self.log_prob + transform.log_abs_det_jacobian(given, msg["value"]).sum()
        msg["done"] = True

    def _pyro_post_sample(self, msg: Site) -> None:
        if site_is_subsample(msg):
            return
        fixed = is_deterministic(msg)
        if fixed or not msg["is_observed"] or find_gate(msg["fn"]) is not None:
            self.values[msg["name"]] = msg["value"]
        if not fixed:
            self.log_prob = self.log_prob + log_prob(msg).sum()


def _checked_run(target: InferenceTarget) -> dict[str, Site]:
    """The sample sites of one run, with every check that Pyro makes of them."""
    trace = poutine.trace(target.run).get_trace()
    trace.compute_log_prob()
    sites = sample_sites(trace)
    for name, site in sites.items():
        if _has_atoms(site) and not isinstance(find_gate(site["fn"]), BernoulliGate) and is_scaled(site):
            raise ValueError(
                f"Expected gate site {name!r} without a scale or a mask, as the power of its density is that of no "
                f"clipped variable, but got {site['fn']} under one. Take a BernoulliGate, which may have both."
            )
    return sites


def _has_atoms(site: Site) -> bool:
    """Whether a site is a latent gate that is 0 or 1 with positive probability."""
    gate = find_gate(site["fn"])
    return gate is not None and not site["is_observed"] and isinstance(gate.support, GateSupport)


def _reparameterise(site: Site) -> RectifyReparam | None:
    """Reparameterise gates with a density between their atoms, nothing else."""
    return RectifyReparam() if _has_atoms(site) and not isinstance(find_gate(site["fn"]), BernoulliGate) else None


def _codes(count: int, like: Tensor) -> Tensor:
    """All values of some gates, shape ``(2 ** count, count)``."""
    rows = torch.arange(2**count, device=like.device).unsqueeze(-1)
    return (rows >> torch.arange(count, device=like.device) & 1).to(like.dtype)
