"""Blocks that the terms of an objective are evaluated over: a recorded site, or the gates of several sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import scale_and_mask, sum_rightmost
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_l0.distributions.gate import (
    GateDistribution,
    JointDraw,
    active_prob,
    concatenate,
    inside_events,
    side_by_side,
    sum_open,
)
from pyro_l0.fast.record import Site
from pyro_l0.infer.elbo.coefficients import Options, check_names
from pyro_l0.infer.elbo.dependence import own_densities
from pyro_l0.infer.elbo.pairs import check_auxiliary, check_draws, check_pair, check_slabs
from pyro_l0.infer.elbo.slabs import gate_site
from pyro_l0.infer.guides.drawn import Drawn

Kind = Literal["observed", "slab", "other", "gates"]


class Run(NamedTuple):
    """The recorded sites of one run of a model and its guide, by name."""

    model: dict[str, Site]
    guide: Mapping[str, Site]
    joint_draws: Mapping[str, object]  # that sites of the guide are from
    at_draws: bool = False  # whether the log ratio of binary gates is taken at their draws, not its mean


def as_in_model(model: Mapping[str, Site], guide: Mapping[str, Site]) -> Mapping[str, Site]:
    """A guide's sites, with the scales and masks of the model's where the guide leaves these to the model."""
    left = {x: site for x, site in guide.items() if x in model and site["infer"].get("as_in_model")}
    return {**guide, **{x: {**site, "scale": model[x]["scale"], "mask": model[x]["mask"]} for x, site in left.items()}}


class Block:
    """Sites that a :class:`~pyro_l0.infer.elbo.terms.Term` takes at once: one, or gates of several drawn jointly.

    Args:
        kind: what the sites are: ``"gates"``, ``"slab"``, ``"observed"`` or ``"other"``.
        names: the sites.
        run: the run that they come from; a term may look up its other sites.
        joint: the gates' joint draw, outside of plates and masks; None for a single site.
    """

    def __init__(self, kind: Kind, names: Sequence[str], run: Run, joint: JointDraw | None = None) -> None:
        self.kind = kind
        self.names = names
        self.run = run
        self.joint = joint

    @property
    def name(self) -> str:
        """The name of the site, or of the first one."""
        return self.names[0]

    @property
    def prior(self) -> Site:
        """The site in the model."""
        return self.run.model[self.names[0]]

    @property
    def posterior(self) -> Site:
        """The site in the guide."""
        return self.run.guide[self.names[0]]

    @cached_property
    def apart(self) -> list[Block]:
        """The block's sites one by one."""
        return [Block(self.kind, (name,), self.run) for name in self.names]

    @cached_property
    def active_prob(self) -> Tensor:
        """P(z != 0) and 0 where masked, in the shape of one site, or of several side by side, shape ``(n,)``."""
        return active_prob(self.posterior["fn"]) if self.joint is None else self.joint.active_prob

    @cached_property
    def pair(self) -> tuple[TorchDistribution, TorchDistribution] | None:
        """Posterior and prior, each one gate for all sites; None if the priors do not combine to one."""
        if self.joint is None:
            q = self.posterior["fn"]
            return q.base_dist if isinstance(q, Drawn) else q, self.prior["fn"]
        priors = [inside_events(self.run.model[name]["fn"]) for name in self.names]
        prior = concatenate(priors) if all(isinstance(fn, GateDistribution) for fn in priors) else None
        posterior = concatenate(self.joint.gates)
        return None if prior is None or type(prior) is not type(posterior) else (posterior, prior)

    @property
    def shapes(self) -> list[torch.Size]:
        """Shape of each site's gates."""
        return [self.active_prob.shape] if self.joint is None else [draw.shape for draw in self.joint.draws]

    def open_gates(self, weights: Sequence[float | Tensor], norms: Tensor | None = None) -> Tensor:
        """Sum of P(z != 0) times a weight per site and, if given, times a number per gate; under scale and mask."""
        active = self.active_prob
        if self.joint is None:
            site = self.posterior
            value = weights[0] * (active if norms is None else norms * active)
            if site["mask"] is not None or isinstance(site["scale"], Tensor):
                value = sum_rightmost(value, site["fn"].event_dim)
            return self.total(value)
        if norms is not None and len(set(weights)) == 1:
            return torch.dot(weights[0] * norms.to(active.dtype), active)
        sizes = tuple(shape.numel() for shape in self.shapes)
        if norms is None:
            return sum_open(active, weights, sizes)
        each = side_by_side(tuple(map(float, weights)), sizes, active.dtype, active.device)
        return torch.dot(norms.to(active.dtype) * each, active)

    def total(self, value: Tensor) -> Tensor:
        """Sum of a number per entry of the batch under scale and mask; those of a joint draw are 1 and None."""
        total: Tensor = scale_and_mask(value, self.posterior["scale"], self.posterior["mask"]).sum()
        return total


def blocks_of(run: Run, options: Options) -> Iterator[Block]:
    """The blocks of a run: sites of other kinds as they come, then the gates; refuses what does not fit."""
    model, joint_draws = run.model, run.joint_draws
    guide = own_densities(options.slab, model, run.guide)
    run = run._replace(guide=guide)
    gates: dict[str, GateDistribution] = {}
    for name, site in model.items():
        if site["type"] != "sample" or site_is_subsample(site):
            continue
        if site["is_observed"]:
            yield Block("observed", (name,), run)
            continue
        gate = check_pair(name, site, guide.get(name))
        if gate is not None:
            if options.estimator is None:
                check_draws(name, gate)
            gates[name] = gate
        elif name not in options.slab:
            yield Block("other", (name,), run)
        elif (of := gate_site(options.slab[name])) in guide and of in model:
            yield Block("slab", (name,), run)
    for name, site in guide.items():
        if site["type"] == "sample" and name not in model and not site_is_subsample(site):
            check_auxiliary(name, site)
            yield Block("other", (name,), run)
    check_names(options, gates)
    check_slabs(options.slab, gates, model)
    groups: dict[int | str, list[str]] = {}
    for name in guide:
        if name in gates:
            groups.setdefault(id(joint_draws[name]) if name in joint_draws else name, []).append(name)
    for names in groups.values():
        joint = joint_draws.get(names[0])
        yield Block("gates", names, run, joint if isinstance(joint, JointDraw) else None)
