"""Network and gates in, a smaller network that was certified to compute the same out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from pyro_l0.compaction.comparison import certify, check_values, hooks, tolerance_of
from pyro_l0.compaction.plan import Plan, plan_graph
from pyro_l0.compaction.rewrite import rewrite_graph
from pyro_l0.compaction.storage import Compacted
from pyro_l0.nn.fixed import check_gates, fix_gates
from pyro_l0.nn.graph import GateGraph
from pyro_l0.nn.reading import read_network

__all__ = ["CompactionError", "compact"]


class CompactionError(RuntimeError):
    """A compacted network that does not compute what the network with fixed gates computes."""


def compact(
    network: nn.Module,
    gates: Mapping[str, Tensor],
    example_input: Tensor,
    tolerance: float | None = None,
    before: Sequence[Plan] = (),
) -> Compacted:
    """Turn a network with gates into a smaller one without, that computes the same.

    Args:
        network: dense layers, convolutions, gates and what is between; not changed. The result is in evaluation mode.
        gates: values in [0, 1] by site, each of shape ``(size,)``, such as ``guide.test_gates()``.
        example_input: one batch of inputs. A network whose constants meet padding takes inputs of this size only, and
            refuses others.
        tolerance: largest difference that is accepted, relative to the largest absolute output of the same batch, or
            of the others (the example and two random ones) where that is 0; if not given, 1e-10 in float64, 1e-5 in
            float32, 1e-2 in float16 and 5e-2 in bfloat16.
        before: the plans by which the network has shrunk while it trained (:attr:`Shrinker.plans`), so that what is
            saved can be loaded into the network as it was at the start.

    Raises:
        ValueError: a gate has no value or a wrong one, or the network holds an operation that can't be followed.
        CompactionError: the two networks differ by more than the tolerance.

    Warns:
        UserWarning: code of the network that runs in training mode alone is left out.

    Example:
        >>> import torch
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1))
        >>> compact(net, {"2": torch.tensor([1.0, 0.0, 0.5])}, torch.ones(1, 2)).network.get_submodule("0")
        Linear(in_features=2, out_features=2, bias=True)
    """
    graph = read_network(network, example_input)
    if isinstance(gates, Mapping):
        check_values(network, gates, example_input)
    check_gates(network, gates)
    like = next(network.parameters(), example_input)
    gates = {site: gate.to(like.device) for site, gate in gates.items()}
    found = plan_graph(graph, gates, example_input.shape, keep_gates=False)
    small = rewrite_graph(graph, found, like, keep_gates=False)
    certificate = certify(fix_gates(network, gates).eval(), small, example_input)
    _judge(network, graph, certificate, tolerance_of(like.dtype) if tolerance is None else tolerance)
    return Compacted(small, found, certificate, tuple(before))


def _judge(network: nn.Module, graph: GateGraph, certificate: float, tolerance: float) -> None:
    """Refuse a difference above the tolerance, and warn of what the compacted network lacks."""
    if not certificate <= tolerance:
        lost = hooks(network)
        raise CompactionError(
            f"The compacted network differs from the network with fixed gates by {certificate:.2e} of its largest "
            f"output, more than the tolerance of {tolerance:.0e}. "
            + (
                f"It lacks the {', '.join(lost)}; take them off, or write what they do as modules of the network."
                if lost
                else "If that is rounding, compact in float64 (network, gates and example_input) or raise tolerance; "
                "otherwise the network's code does what its operations do not show."
            )
        )
    if graph.left_out:
        warnings.warn(
            f"The compacted network is the network in evaluation mode, without {', '.join(graph.left_out)}; it can't "
            "be trained further as the network was.",
            stacklevel=3,
        )
