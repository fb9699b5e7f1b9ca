"""A target of inference: a model with its arguments, of whose trace a method makes what it samples or fits.

What that is (products of gates and slabs, an expansion, a rate found to be conjugate) is compared with the log joint
density of the trace before it is used. The trace shares no code with the methods: Pyro runs the model at values of all
its latent sites, and adds up every site under its scale and mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from pyro import poutine
from pyro.distributions import Beta, Normal
from pyro.poutine import Trace
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import find_gate, innermost, inside_events
from pyro_l0.infer.record import Record, Site, draws_rows, is_deterministic, is_drawn, is_likelihood
from pyro_l0.infer.runs import Args, Kwargs, Program, is_scaled, log_prob, record_run, seeded, without_scales
from pyro_l0.infer.slabs import GateSite

__all__ = ["POINTS", "ConjugateRate", "InferenceTarget", "Point"]

POINTS = 8  # at which a density is compared with the trace's
_CLOSE, _RELATIVE = 1e-3, 1e-4  # nats by which changes of a log density may differ, and their share of it
_ROUNDING = 100  # errors of rounding in its sum
_SLIGHT = 1e-3  # rounding of derivatives in float32, relative
_RATES = torch.tensor([0.2, 0.35, 0.6, 0.85], dtype=torch.float64)  # at which a rate is tried
_ODDS, _LOGS = torch.logit(_RATES), torch.stack([_RATES.log(), (-_RATES).log1p(), torch.ones_like(_RATES)], 1)

Point = Mapping[str, Tensor]  # values of all latent sites, and of the rows of plates where these are drawn


class ConjugateRate(NamedTuple):
    """A variable of one entry that is Beta(open, closed) but for gates that are open with it as their probability."""

    name: str
    gates: tuple[str, ...]
    open: Tensor
    closed: Tensor
    weights: Tensor  # how often each of the gates counts
    shape: torch.Size

    def parameters(self, gates: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Those of its Beta given n draws of the gates by site, shapes ``(n, 1)``."""
        among = torch.cat([gates[name].reshape(len(gates[name]), -1) for name in self.gates], 1).detach()
        weights = self.weights.to(among)
        opened = (among @ weights).unsqueeze(1)
        return self.open.to(among) + opened, self.closed.to(among) + weights.sum() - opened


@dataclass(frozen=True, eq=False)
class InferenceTarget:
    """The posterior of a model's latent sites given its arguments, and what its trace says of it.

    Attributes:
        model: a Pyro model.
        args: its arguments.
        kwargs: its keyword arguments.
        slab: the gate site of each slab site.
    """

    model: Program
    args: Args = ()
    kwargs: Kwargs = field(default_factory=dict)
    slab: Mapping[str, GateSite] = field(default_factory=dict)

    def run(self) -> object:
        """Call the model with its arguments, under whatever handlers are active."""
        return self.model(*self.args, **self.kwargs)

    @cached_property
    def sites(self) -> dict[str, Site]:
        """The sites of one run, whose values are drawn when this is first read; priors have scales and masks in them.

        Raises:
            ValueError: see :meth:`check_repeats`, or a slab or a gate is under a scale that its prior cannot take.
        """
        nodes: dict[str, Site] = poutine.trace(self.run).get_trace().nodes
        found = {name: site for name, site in nodes.items() if is_drawn(site) and not is_deterministic(site)}
        self.check_repeats({name: site["value"] for name, site in found.items() if not site["is_observed"]})
        return without_scales(found, self.slab)

    @property
    def latent(self) -> dict[str, Tensor]:
        """By name, the values that the latent sites have in the run of ``sites``."""
        return {name: site["value"] for name, site in self.sites.items() if not site["is_observed"]}

    def at(self, values: Mapping[str, Tensor]) -> dict[str, Site]:
        """The sites of a run with some latent values held, by name; latent sites without a value are drawn."""
        return without_scales(self.stated_at(values), self.slab)

    def stated_at(self, values: Mapping[str, Tensor]) -> dict[str, Site]:
        """The sites as the model states them, at values of latent sites; those of others are drawn."""
        record = Record({name: {"value": x, "is_observed": False, "infer": {}} for name, x in values.items()})
        with record:
            self.run()
        return record.sites

    def with_guide(self, sites: Mapping[str, Site]) -> dict[str, Site]:
        """The sites, under the model's scales and masks, at the values of a guide's."""
        return record_run(self.model, self.args, self.kwargs, 0, sites).sites

    def trace_at(self, point: Point) -> Trace:
        """A run at values of the latent sites, with the log densities of all sites."""
        with poutine.block(), torch.no_grad():
            trace = poutine.trace(poutine.condition(self.run, data=dict(point))).get_trace()
            trace.compute_log_prob()
        return trace

    def check_repeats(self, point: Point) -> None:
        """Refuse a model whose log joint density is another one in a second run at the same values."""
        with seeded(0):
            first, again = self.trace_at(point), self.trace_at(point)
        sites = {name: site for name, site in first.nodes.items() if site["type"] == "sample"}
        moved = [name for name, site in sites.items() if not _is_close(site, again.nodes.get(name))]
        rows = [name for name, site in sites.items() if draws_rows(site) and name not in point]
        if rows or moved:
            how = "Draw it by pyro.sample, hide no site by poutine.block, and sum out what is discrete."
            drawn = f"that of {', '.join(map(repr, moved))} is not: something is drawn that is no site. {how}"
            part = (
                "draws a part of the data anew. Leave subsample_size out, hand the part on by subsample=..., or fit a "
                "mean field, AutoSpikeSlab(model, slab), to it."
            )
            raise ValueError(
                "Expected a model whose log joint is the same in every run at the same values of its sites, but "
                f"{f'plate {rows[0]!r} {part}' if rows else drawn}"
            )

    @torch.no_grad()
    def check(
        self, log_density: Callable[[Sequence[Point]], Tensor], points: Sequence[Point], method: str, advice: str
    ) -> None:
        """Refuse a log density that differs from that of the trace by more than a constant at some points.

        Args:
            log_density: what a method uses, shape ``(n,)`` at n points.
            points: values of all latent sites.
            method: its name, for the message.
            advice: what to do, likewise.
        """
        self.check_repeats(points[0])
        differs, found, right = self._differences(log_density, points)
        if not bool(differs.any()):
            return
        worst = int(differs.int().argmax())
        moves = {name: [points[0], {**points[0], name: value}] for name, value in points[worst].items()}
        wrong = [name for name, pair in moves.items() if bool(self._differences(log_density, pair)[0].any())]
        raise ValueError(
            f"Expected the log density that {method} uses to be that of the model's own trace, but from one value of "
            f"{', '.join(map(repr, wrong or moves))} to another it changes by {float(found[worst]):.4g} nats, and the "
            f"trace's by {float(right[worst]):.4g}. {advice}"
        )

    def _differences(
        self, log_density: Callable[[Sequence[Point]], Tensor], points: Sequence[Point]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whether changes of both log densities from the first of some points differ, and these changes."""
        with seeded(0):
            own = torch.stack([torch.as_tensor(self.trace_at(x).log_prob_sum()) for x in points]).double()
        found = log_density(points).double()
        dtype = next(x.dtype for x in points[0].values() if x.is_floating_point())
        right = own.isfinite()
        first = int(right.int().argmax())
        changes = found - found[first], own - own[first]
        rounding = _ROUNDING * torch.finfo(dtype).eps * own[right].abs().mean()
        close = (changes[0] - changes[1]).abs() <= _CLOSE + rounding + _RELATIVE * changes[1].abs()
        return ~close & right | (found.isfinite() & ~right), *changes

    def dependents(self, name: str, point: Point, other: Tensor) -> list[str]:
        """The other latents whose prior densities at a point change with the value of one."""
        first, moved = self.at(point), self.at({**point, name: other})
        others = [key for key in self.latent if key != name]
        return [x for x in others if x not in moved or not torch.equal(log_prob(moved[x]), log_prob(first[x]))]

    def is_leaf(self, name: str) -> bool:
        """Whether no other latent's prior depends on a latent on the real line."""
        return not self.dependents(name, self.latent, self.latent[name] + 1)

    @torch.enable_grad()
    def is_added(self, name: str, beside: Sequence[str], gates: Sequence[str]) -> bool:
        r"""Whether a normal latent u, on which no other prior depends, is added to slabs, as in :math:`X \beta + u`.

        It is then like a slab without a gate. A product, such as that of factors and loadings, has no Gaussian. With a
        sum, the slopes of an observation's log probability along the slabs and along u are in one ratio everywhere.
        This is tried at three points on a line; where an observation has several numbers, the log likelihood may be
        quadratic instead.
        """
        site = self.sites[name]
        if not isinstance(innermost(site["fn"]), Normal) or is_scaled(site) or not self.is_leaf(name):
            return False
        latent = {key: x.detach() for key, x in self.latent.items()}
        latent |= {key: torch.ones_like(latent[key]) for key in gates}
        names = (*beside, name)
        with seeded(0):
            first, move, along = ({x: 0.5 * self.sites[x]["fn"].sample().detach() for x in names} for _ in range(3))
        slopes = []  # along the slabs and along u
        for step in range(3):
            at = {key: (first[key] + step * move[key]).requires_grad_() for key in names}
            run = self.at({**latent, **at}).values()
            each = [inside_events(x["fn"]).log_prob(x["value"]).reshape(-1) for x in run if is_likelihood(x)]
            log_probs = torch.cat(each)
            unit = torch.zeros_like(log_probs, requires_grad=True)  # for slopes along a line by two backward passes
            rows = torch.autograd.grad(log_probs, list(at.values()), unit, create_graph=True, materialize_grads=True)
            parts = [(row * along[key]).sum() for key, row in zip(names, rows, strict=True)]
            slopes += [
                torch.autograd.grad(part, unit, retain_graph=True, materialize_grads=True)[0]
                for part in (torch.stack(parts[:-1]).sum(), parts[-1])
            ]
        s, t, s1, t1, s2, t2 = slopes
        ratio = _is_small(s * t1 - s1 * t, (s * t1).abs() + (s1 * t).abs())
        lines = (s, s1, s2), (t, t1, t2)
        return ratio or all(_is_small(x.sum() - 2 * y.sum() + z.sum(), x.abs().sum()) for x, y, z in lines)

    @torch.no_grad()
    def conjugate_rate(self, name: str, gate_names: Sequence[str]) -> ConjugateRate | None:
        """A Beta variable given which gates have it as their rate, if it has a Beta density given all else; or None.

        Its log joint is then a log r + b log(1 - r) plus a constant, with a and b that do not depend on other latents
        but for these gates. An observed child may count in them, and a scale.
        """
        sites, latent = self.sites, self.latent
        if not isinstance(innermost(sites[name]["fn"]), Beta) or sites[name]["value"].numel() != 1:
            return None
        gates = {key: x for key, x in latent.items() if key in gate_names}
        with seeded(0):
            drawn = {key: sites[key]["fn"].sample() for key in latent if key not in gates}
            some = {key: torch.bernoulli(torch.full_like(x, 0.5)) for key, x in gates.items()}
        weights, found = dict[str, Tensor](), []
        for values in (latent, {**latent, **{key: 1 - x for key, x in gates.items()}}, {**drawn, **some}):
            runs = [self.at({**values, name: torch.full_like(latent[name], float(rate))}) for rate in _RATES]
            odds = {gate: [_odds(run[gate]) for run in runs] for gate in gate_names}
            weights = weights or {gate: x for gate, own in odds.items() if (x := _weights(own)) is not None}
            change = torch.stack([_change(runs[0], run) for run in runs])
            for gate, weight in weights.items():
                value = values[gate].reshape(-1).double()
                change = change - weight @ value * _LOGS[:, 0] - weight @ (1 - value) * _LOGS[:, 1]
            shape = torch.linalg.lstsq(_LOGS, change.unsqueeze(1)).solution
            found.append(shape[:2, 0] + 1)
            if not torch.allclose((_LOGS @ shape)[:, 0], change, 1e-4, 1e-3):
                return None
        first, second = torch.stack(found).mean(0)
        if not weights or min(first, second) <= 0 or not torch.allclose(torch.stack(found), found[0], 1e-2, 1e-2):
            return None
        return ConjugateRate(name, tuple(weights), first, second, torch.cat(list(weights.values())), latent[name].shape)


def _is_close(first: Site, again: Site | None) -> bool:
    if again is None:
        return False
    one, other = (torch.as_tensor(site["log_prob_sum"]) for site in (first, again))
    return torch.allclose(one, other, _RELATIVE, _CLOSE, equal_nan=True)


def _is_small(x: Tensor, beside: Tensor) -> bool:
    return bool((x.nan_to_num().abs() <= _SLIGHT * (beside + _SLIGHT * beside.nan_to_num().max())).all())


def _weights(odds: Sequence[Tensor | None]) -> Tensor | None:
    """How often gates count in the density of their rate, shape ``(n,)``, by their log odds at ``_RATES``; or None."""
    known = [x.reshape(-1).double() for x in odds if x is not None]
    found = known[0] / _ODDS[0] if known else _ODDS[:0]
    is_rate = known and torch.allclose(torch.stack(known), _ODDS[:, None] * found, atol=1e-4)
    return found if is_rate and bool(found.any()) else None


def _change(first: Mapping[str, Site], run: Mapping[str, Site]) -> Tensor:
    """By how much the log joint densities of two runs differ."""
    return torch.stack([(log_prob(run[x]) - log_prob(first[x])).double().sum() for x in first]).sum()


def _odds(site: Site) -> Tensor | None:
    gate = find_gate(site["fn"])
    return gate.logits.detach() if isinstance(gate, BernoulliGate) else None
