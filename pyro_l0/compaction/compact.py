"""Network and gates in, a smaller network that was certified to compute the same out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pyro_l0.compaction.apply import carry_out, names_before
from pyro_l0.compaction.calls import tensors
from pyro_l0.compaction.certificate import tolerance_of
from pyro_l0.compaction.checks import check_network
from pyro_l0.compaction.plan import Plan
from pyro_l0.compaction.search import CompactionError, Fitted, constants_of, fit, uncut
from pyro_l0.compaction.storage import Compacted
from pyro_l0.expect import expect
from pyro_l0.nn.engine import Example, calls_of
from pyro_l0.nn.fixed import check_gates
from pyro_l0.nn.gate import check_given

__all__ = ["CompactionError", "compact", "compact_or_fix", "plan", "rewrite"]


def compact(
    network: nn.Module,
    gates: Mapping[str, Tensor],
    example_input: Example,
    tolerance: float | None = None,
    before: Sequence[Plan] = (),
) -> Compacted:
    """Turn a network with gates into a smaller one without, that computes the same.

    The result is a copy of the network, of its own class, with its methods, hooks and code for training; only tensors,
    and integers that are their sizes, have changed. Where a gate stood there is nothing, or what is left of it.

    Args:
        network: any module with gates; not changed. The result is in evaluation mode.
        gates: values in [0, 1] by site, each of shape ``(size,)``, such as ``guide.test_gates()``.
        example_input: what the network is called with: a tensor, a tuple of positional arguments, a dict of keywords,
            or a list of such calls, where the network takes different ways for different inputs. A network whose
            constants meet padding takes inputs of this size only, and refuses others.
        tolerance: largest difference of outputs, or of gradients, that is accepted, relative to the largest output of
            the same batch (or of the others, where that is 0) and to the largest gradient; if not given, 1e-10 in
            float64, 1e-5 in float32, 1e-2 in float16 and 5e-2 in bfloat16.
        before: the plans by which the network has shrunk while it trained (:attr:`Shrinker.plans`), so that what is
            saved can be loaded into the network as it was at the start.

    Raises:
        TypeError: the network is no module, or the example none of the kinds above.
        ValueError: a gate has no value or a wrong one, the network does not take the example, or the example does not
            use all of a module of which units leave.
        CompactionError: no smaller network was found that computes the same within the tolerance; the message says
            which gates to open for one to be found.

    Example:
        >>> import torch
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1))
        >>> compact(net, {"2": torch.tensor([1.0, 0.0, 0.5])}, torch.ones(1, 2)).network[0]
        Linear(in_features=2, out_features=2, bias=True)
    """
    try:
        found = _fit(network, gates, example_input, False, tolerance)
    except CompactionError as error:
        raise CompactionError(f"{error}{_advice(network, gates, example_input, tolerance)}") from error
    return _compacted(found, before)


def compact_or_fix(
    network: nn.Module, gates: Mapping[str, Tensor], example_input: Example
) -> tuple[Compacted, CompactionError | None]:
    """What :func:`compact` returns; if it can't, the whole network with fixed gates, and the error."""
    try:
        return compact(network, gates, example_input), None
    except CompactionError as error:
        return _compacted(_fit(network, gates, example_input, False, None, cut=False), ()), error


def plan(network: nn.Module, gates: Mapping[str, Tensor], example_input: Example, keep_gates: bool = False) -> Plan:
    """Find what of a network stays, as :func:`compact` does; see there.

    Args:
        network: a network with gates; it is not changed.
        gates: values in [0, 1] by site.
        example_input: what the network is called with.
        keep_gates: whether the gates that are not 0 stay in the network, as while training.

    Raises:
        TypeError: as :func:`compact`.
        ValueError: as :func:`compact`.
        CompactionError: as :func:`compact`.

    Example:
        >>> import torch
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1))
        >>> plan(net, {"2": torch.tensor([1.0, 0.0, 0.5])}, torch.ones(1, 2)).kept["0.weight"]
        ((0, 2), None)
    """
    expect(bool, "True or False", keep_gates=keep_gates)
    return _fit(network, gates, example_input, keep_gates, None).plan


@torch.no_grad()
def rewrite(network: nn.Module, plan: Plan, example_input: Example | None = None) -> nn.Module:
    """The network that a plan describes, on a copy.

    Args:
        network: the network that the plan was made for, with any weights.
        plan: from :func:`plan`.
        example_input: what the network is called with; only a plan that folds constants asks for it.

    Raises:
        ValueError: the plan is of another network, or asks for an example.
    """
    check_given(network)
    if not isinstance(plan, Plan):
        raise TypeError(f"Expected what plan() returns, but got {plan!r}.")
    plan = plan.renamed(names_before([plan], network))
    gates = {site: torch.tensor(values) for site, values in plan.gates.items()}
    if plan.folds and example_input is None:
        raise ValueError("Expected an example_input, since constants of units that leave are computed from it.")
    constants = constants_of(network, gates, plan, [] if example_input is None else calls_of(example_input))
    small = copy.deepcopy(network)
    carry_out(small, plan, constants)
    return small if plan.keeps_gates else small.eval()


def _compacted(found: Fitted, before: Sequence[Plan]) -> Compacted:
    largest = found.certificate.largest
    return Compacted(found.network, found.plan, largest, tuple(before), found.certificate, found.reasons)


def _advice(network: nn.Module, gates: Mapping[str, Tensor], example: Example, tolerance: float | None) -> str:
    """Which gates to open for a network to be cut, as a sentence; nothing if opening those of some sites is no help."""

    def passes(closed: set[str]) -> bool:
        some = {site: x if site in closed else torch.where(x == 0, 1.0, x) for site, x in gates.items()}
        try:
            _fit(network, some, example, False, tolerance)
        except (CompactionError, ValueError):
            return False
        return True

    sites = {site for site, gate in gates.items() if bool((gate == 0).any())}
    in_the_way = {site for site in sites if not passes({site})}
    if not in_the_way or not passes(sites - in_the_way):
        return ""
    return f" It can be cut with all gates of {', '.join(map(repr, sorted(in_the_way)))} open."


def _fit(
    network: nn.Module,
    gates: Mapping[str, Tensor],
    example: Example,
    keep_gates: bool,
    tolerance: float | None,
    cut: bool = True,
) -> Fitted:
    for site, value in gates.items() if isinstance(gates, Mapping) else ():
        if getattr(value, "is_meta", False):
            raise ValueError(f"Expected gates[{site!r}] with values, but it is on the device meta.")
    check_network(network, example)
    check_gates(network, gates)
    like = next((p for p in network.parameters() if p.is_floating_point()), tensors(calls_of(example))[0])
    values = {site: gate.to(like.device) for site, gate in gates.items()}
    tolerance = tolerance_of(like.dtype) if tolerance is None else tolerance
    return fit(network, values, example, keep_gates, tolerance) if cut else uncut(network, values, example, tolerance)
