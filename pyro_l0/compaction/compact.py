"""Network and gates in, a smaller network that was certified to compute the same out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pyro_l0.compaction.plan import Plan
from pyro_l0.compaction.search import CompactionError, search, uncut
from pyro_l0.compaction.storage import Compacted
from pyro_l0.nn.engine import Example

__all__ = ["CompactionError", "compact", "compact_or_fix"]


def compact(
    network: nn.Module,
    gates: Mapping[str, Tensor],
    example: Example,
    tolerance: float | None = None,
    before: Sequence[Plan] = (),
) -> Compacted:
    """Turn a network with gates into a smaller one without gates that computes the same.

    The result is a copy of the network, of the same class, with its methods, hooks and code for training; only tensors,
    and integers that are their sizes, have changed. Gates are removed, or replaced by what is left of them.

    Args:
        network: any module with gates; not changed. The result is in evaluation mode.
        gates: values in [0, 1] by site, each of shape ``(size,)``, such as ``guide.test_gates()``.
        example: what the network is called with: a tensor, a tuple of positional arguments, a dict of keywords,
            or a list of such calls if the network runs different code for different inputs. A network whose folded
            constants meet padding accepts only inputs of this size.
        tolerance: largest accepted difference of outputs or gradients, relative to the largest output of the same batch
            (or of the others, if that is 0) and to the largest gradient; by default 1e-10 in float64, 1e-5 in float32,
            1e-2 in float16 and 5e-2 in bfloat16.
        before: the plans by which the network shrank while it trained (:attr:`Shrinker.plans`); with them a saved
            result can be loaded into the network as it was at the start.

    Returns:
        The smaller network with its plan and certificate.

    Raises:
        TypeError: the network is not a module, or the example is none of the kinds above.
        ValueError: a gate has no value or a wrong one, the network does not accept the example, or the example does
            not use all of a module of which units are removed.
        CompactionError: no smaller network was found that computes the same within the tolerance; the message says
            which gates to open.

    Warns:
        UserWarning: gates are closed, and nothing is smaller.

    Example:
        >>> import torch
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1))
        >>> small = compact(net, {"2": torch.tensor([1.0, 0.0, 0.5])}, torch.ones(1, 2))
        >>> small.network[0], small.plan.kept["0.weight"]
        (Linear(in_features=2, out_features=2, bias=True), ((0, 2), None))
    """
    try:
        found = search(network, gates, example, tolerance=tolerance)
    except CompactionError as error:
        raise CompactionError(f"{error}{_advice(network, gates, example, tolerance)}") from error
    stays = {site: next(iter(why.values())) for site, why in found.reasons.items() if why}
    if stays and not found.plan.kept:
        named = "; ".join(f"{site!r}: {why}" for site, why in stays.items())
        warnings.warn(
            f"Gates are closed, but nothing is smaller: units stay ({named}). Put gates where suggest_gates says.",
            stacklevel=2,
        )
    return replace(found, before=tuple(before))


def compact_or_fix(
    network: nn.Module, gates: Mapping[str, Tensor], example: Example
) -> tuple[Compacted, CompactionError | None]:
    """What :func:`compact` returns; if it can't, the whole network with fixed gates, and the error."""
    try:
        return compact(network, gates, example), None
    except CompactionError as error:
        return uncut(network, gates, example), error


def _advice(network: nn.Module, gates: Mapping[str, Tensor], example: Example, tolerance: float | None) -> str:
    """Which gates to open for a network to be cut, as a sentence; nothing if opening those of some sites is no help."""

    def passes(closed: set[str]) -> bool:
        some = {site: x if site in closed else torch.where(x == 0, 1.0, x) for site, x in gates.items()}
        try:
            search(network, some, example, tolerance=tolerance)
        except (CompactionError, ValueError):
            return False
        return True

    sites = {site for site, gate in gates.items() if bool((gate == 0).any())}
    in_the_way = {site for site in sites if not passes({site})}
    if not in_the_way or not passes(sites - in_the_way):
        return ""
    return f" It can be cut with all gates of {', '.join(map(repr, sorted(in_the_way)))} open."
