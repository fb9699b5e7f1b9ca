"""A guide's parameters as SVI, optimisers and files see them, and what targets, shrinking and diagnostics ask of it."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyro
import torch
from pyro.poutine import runtime
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn
from torch.distributions import constraints
from torch.utils.weak import WeakTensorKeyDictionary

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.infer.record import Site

__all__ = ["GateGuide", "check_guide"]


class GateGuide(Protocol):
    """A guide over gates: :class:`~pyro_l0.infer.AutoGate`, or any of your own with the methods that are asked for.

    :class:`~pyro_l0.infer.SparsityTarget` asks for ``posterior``, ``test_gates`` and ``locations``,
    :class:`~pyro_l0.compaction.Shrinker` for ``posterior`` and ``keep``,
    :func:`~pyro_l0.diagnostics.gradients.measure_gradient` for a call, ``posterior`` and ``locations``.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Sample the gates' sites; takes the model's arguments."""

    def posterior(self) -> Mapping[str, GateDistribution]:
        """The posterior gates by site, differentiable for the guide's parameters."""

    def test_gates(self) -> Mapping[str, Tensor]:
        """The deterministic gates that prune, by site, without gradients."""

    def locations(self) -> Sequence[Tensor]:
        """The parameter that places the gates of each site of :meth:`posterior`, in its order and with its shape.

        It is the first learned parameter of their family, on the real line; a SparsityTarget moves it.
        """

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Keep the units at some positions of some sites; a site that keeps none is removed.

        Args:
            units: by site, the indices of the units that stay, shape ``(n,)``.

        Returns:
            For each parameter replaced, the new one (None if its site was removed) and the positions that it holds.
        """


def check_guide(guide: object, asked: str, *methods: str) -> None:
    """Refuse a guide without the methods that are needed."""
    missing = [name for name in methods if not hasattr(guide, name)]
    if missing:
        raise TypeError(
            f"Expected a guide over gates with {', '.join(methods)} for {asked}, but got a {type(guide).__name__} "
            f"without {', '.join(missing)}; give the AutoGate itself, not a list or a function that holds it, or write "
            "the methods of pyro_l0.infer.guides.parameters.GateGuide."
        )


_of_this_process = WeakTensorKeyDictionary()
_PATIENCE = 100  # gradients


def enter_store(names: Callable[[], Iterable[tuple[str, dict[str, nn.Parameter], str]]]) -> None:
    """Put a guide's parameters into Pyro's parameter store, where it is in use, under their full names.

    A value that was loaded or assigned is taken over, as by Pyro's own modules. A parameter that another guide of this
    process left is not: the new guide starts anew, and optimisers step what its loss depends on.
    """
    if pyro.settings.get("module_local_params"):
        return
    store = pyro.get_param_store()
    for name, parameters, key in names():
        parameter, entry = parameters[key], store._params.get(name)
        if entry is parameter:
            continue
        if entry is not None and entry not in _of_this_process:
            if entry.shape != parameter.shape:
                raise ValueError(
                    f"Expected {name!r} in the parameter store of shape {tuple(parameter.shape)}, but got "
                    f"{tuple(entry.shape)}; call pyro.clear_param_store() or load the parameters of this model."
                )
            with torch.no_grad():
                parameter.copy_(entry)
        _of_this_process[parameter] = True
        # Names of replaced parameters stay known: guides trained in turn save the states of optimisers by name.
        store._params[name] = parameter
        store._param_to_name[parameter] = name
        store._constraints[name] = constraints.real


def parameters_in(module: nn.Module) -> Iterator[tuple[str, dict[str, nn.Parameter], str]]:
    """A module's parameters: the name of each, the dict that holds it, and its name there."""
    for path, part in module.named_modules():
        held: dict[str, nn.Parameter] = vars(part)["_parameters"]
        yield from ((f"{path}.{key}" if path else key, held, key) for key in held)


@runtime.effectful(type="param")
def state_parameter(parameter: nn.Parameter, **_: object) -> Tensor:
    """``pyro.param`` for handlers such as SVI's, whether or not the store is in use."""
    parameter.unconstrained = weakref.ref(parameter)  # type: ignore[attr-defined]  # which SVI asks for
    return parameter


class Displaced(Messenger):
    """Notices parameters of a model's networks whose names the parameter store has for others, which SVI would step.

    ``pyro.module`` gives a new network's parameters the names of an earlier one's, whose entries stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, weakref.ref[Tensor]] = {}

    def _postprocess_message(self, msg: Site) -> None:
        own = msg["args"][1] if msg["type"] == "param" and len(msg["args"]) > 1 else None
        if isinstance(own, nn.Parameter) and msg["value"] is not own:
            self.found[msg["name"]] = weakref.ref(own)

    def warn_once(self) -> None:
        """Warn if such parameters have gradients within SVI, which is to be asked at every loss."""
        stored, parameters = pyro.get_param_store()._params, {name: own() for name, own in self.found.items()}
        own_grads = {name: own for name, own in parameters.items() if own is not None and own.grad is not None}
        used = [name for name, own in own_grads.items() if stored.get(name, own) is not own]
        if used and any(isinstance(x, TraceMessenger) and x.param_only for x in runtime._PYRO_STACK):
            self.found = {}
            warnings.warn(
                f"SVI does not train {used[0]!r} of the model, nor {len(used) - 1} other parameters: the parameter "
                "store has others of these names, of an earlier network or a file. Call pyro.clear_param_store() "
                "before training a new network, or pyro.module(..., update_module_params=True) to continue from the "
                "store.",
                stacklevel=2,
            )


def warn_if_unmoved(what: str, parameters: Iterable[nn.Parameter]) -> None:
    """Warn once if a parameter of a guide has had a hundred gradients and all are where they began.

    An optimiser that was made before the guide's first call holds none of them, and the loss falls nevertheless, since
    the network is trained. ``what`` names the guide.
    """
    start = {x: x.detach().clone() for x in parameters if x.requires_grad}
    gradients: Counter[Tensor] = Counter()

    def note(parameter: Tensor) -> None:
        gradients[parameter] += 1
        if gradients[parameter] <= _PATIENCE:
            return
        for hook in hooks:
            hook.remove()
        if all(x.shape == old.shape and torch.equal(x.detach().to(old), old) for x, old in start.items()):
            warnings.warn(
                f"The parameters of {what} have had gradients for {_PATIENCE} losses, but no optimiser has moved them. "
                "A guide makes its parameters at its first call; call it once with the model's arguments before making "
                "an optimiser of its parameters.",
                stacklevel=2,
            )

    hooks = [x.register_post_accumulate_grad_hook(note) for x in start]
