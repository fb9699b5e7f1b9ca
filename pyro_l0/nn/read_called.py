"""Records a network whose gates are all called on units, and refuses by name what can't be counted."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyro_l0.nn.engine.record import Example, calls_of, record
from pyro_l0.nn.engine.tape import Recording
from pyro_l0.nn.gate import check_given, gate_names

__all__ = ["record_called", "record_example"]


def record_called(network: nn.Module, example: Example) -> Recording:
    """:func:`~pyro_l0.nn.engine.record`, where every gate is called on the units of a tensor.

    Raises:
        ValueError: a gate is never called or computes weights, or the network does not take the example.
        TypeError: ``network`` is no module, or the example is of no kind that is known.
    """
    gates = gate_names(network)
    paths = {module: path for path, module in network.named_modules()}
    for site, gate in gates.items():
        if "parametrizations" in paths[gate].split("."):
            raise _misplaced(site, paths[gate], "computes weights, which are not counted")
    recording = record_example(network, example)
    called = {str(x.arguments["site"]) for x in recording.operations if x.name == "gate"}
    for site, gate in gates.items():
        if site not in called:
            raise _misplaced(site, paths[gate], "is never called")
    return recording


def record_example(network: nn.Module, example: Example) -> Recording:
    """:func:`~pyro_l0.nn.engine.record`, which names the example where the network does not take it."""
    check_given(network)
    calls = calls_of(example)
    tensors = [x for call in calls for x in tree_leaves(call) if isinstance(x, Tensor)]
    given = " and ".join(f"one of shape {tuple(x.shape)} and dtype {x.dtype}" for x in tensors) or "no tensor"
    if not calls or any(x.dim() and not len(x) for x in tensors):
        raise ValueError(f"Expected an example of at least one call with entries, but got {given}.")
    own = next((x.dtype for x in network.parameters() if x.is_floating_point()), None)
    try:
        return record(network, example)
    except (RuntimeError, IndexError, TypeError) as error:
        of, remedy = "", ""
        if own is not None and any(x.dtype != own for x in tensors):
            of, remedy = f" of dtype {own}, as the network's parameters,", f"; convert it by .to({own})"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"Expected an example that the network takes,{of} but got {given}, at which it fails: {reason}{remedy}"
        ) from error


def _misplaced(site: str, path: str, why: str) -> ValueError:
    """The refusal of a gate, with its module's path, that acts on no units but does what ``why`` says."""
    return ValueError(
        f"Expected gates that are called on the units of a tensor, but gate {site!r} (module {path!r}) {why}; "
        "put it behind the layer whose units it gates, or take it out."
    )
