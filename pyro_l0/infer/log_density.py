"""The log joint density of a model's own trace, with which the target of every method is compared before it is used.

It shares no code with the targets: Pyro runs the model at values of all its latent sites, and adds up every site under
its scale and mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from pyro import poutine
from pyro.poutine import Trace
from torch import Tensor

from pyro_l0.infer.record import draws_rows
from pyro_l0.infer.runs import forked_generators

__all__ = ["POINTS", "Point", "check_repeats", "check_target", "trace_at"]

POINTS = 8  # at which a target is compared
_CLOSE, _RELATIVE = 1e-3, 1e-4  # nats by which changes of a log density may differ, and their share of it
_ROUNDING = 100  # errors of rounding in its sum

Point = Mapping[str, Tensor]  # values of all latent sites, and of the rows of plates where these are drawn
Model = Callable[[], object]
Target = Callable[[Sequence[Point]], Tensor]


def trace_at(model: Model, point: Point) -> Trace:
    """A run of a model at values of its latent sites, with the log densities of all sites."""
    with poutine.block(), torch.no_grad():
        trace = poutine.trace(poutine.condition(model, data=dict(point))).get_trace()
        trace.compute_log_prob()
    return trace


def check_repeats(model: Model, point: Point) -> None:
    """Refuse a model whose log joint density is another one in a second run at the same values."""
    with forked_generators():
        first, again = trace_at(model, point), trace_at(model, point)
    moved = [name for name in first.nodes if not _is_close(first, again, name)]
    rows = [name for name, site in first.nodes.items() if draws_rows(site) and name not in point]
    if rows or moved:
        how = "Draw it by pyro.sample, hide no site by poutine.block, and sum out what is discrete."
        drawn = f"that of {', '.join(map(repr, moved))} is not: something is drawn that is no site. {how}"
        part = (
            "draws a part of the data anew. Leave subsample_size out, hand the part on by subsample=..., or fit a mean "
            "field, AutoSpikeSlab(model, slab), to it."
        )
        raise ValueError(
            "Expected a model whose log joint is the same in every run at the same values of its sites, but "
            f"{f'plate {rows[0]!r} {part}' if rows else drawn}"
        )


def _is_close(first: Trace, again: Trace, name: str) -> bool:
    if first.nodes[name]["type"] != "sample":
        return True
    if name not in again.nodes:
        return False
    one, other = (torch.as_tensor(trace.nodes[name]["log_prob_sum"]) for trace in (first, again))
    return torch.allclose(one, other, _RELATIVE, _CLOSE, equal_nan=True)


@torch.no_grad()
def check_target(model: Model, points: Sequence[Point], target: Target, method: str, advice: str) -> None:
    """Refuse a target of a method that differs from the model's log joint by more than a constant at some points.

    Args:
        model: the model, with its arguments.
        points: values of all its latent sites.
        target: the log density that a method uses at such points, shape ``(n,)``.
        method: its name, for the message.
        advice: what to do, likewise.
    """
    check_repeats(model, points[0])
    differs, found, right = _differences(model, points, target)
    if not bool(differs.any()):
        return
    worst = int(differs.int().argmax())
    moves = {name: [points[0], {**points[0], name: value}] for name, value in points[worst].items()}
    wrong = [name for name, pair in moves.items() if bool(_differences(model, pair, target)[0].any())]
    raise ValueError(
        f"Expected the log density that {method} uses to be that of the model's own trace, but from one value of "
        f"{', '.join(map(repr, wrong or moves))} to another it changes by {float(found[worst]):.4g} nats, and the "
        f"trace's by {float(right[worst]):.4g}. {advice}"
    )


def _differences(model: Model, points: Sequence[Point], target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Whether changes of both log densities from the first of some points differ, and these changes."""
    with forked_generators():
        own = torch.stack([torch.as_tensor(trace_at(model, x).log_prob_sum()) for x in points]).double()
    found = target(points).double()
    dtype = next(x.dtype for x in points[0].values() if x.is_floating_point())
    right = own.isfinite()
    first = int(right.int().argmax())
    changes = found - found[first], own - own[first]
    rounding = _ROUNDING * torch.finfo(dtype).eps * own[right].abs().mean()
    close = (changes[0] - changes[1]).abs() <= _CLOSE + rounding + _RELATIVE * changes[1].abs()
    return ~close & right | (found.isfinite() & ~right), *changes
