"""A guide's parameters as SVI, optimisers and files see them, and what targets, shrinking and diagnostics ask of it."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from pyro_l0.infer.record import Record, Site

__all__ = ["GateGuide", "check_guide"]


class GateGuide(Protocol):
    """A guide over gates: :class:`~pyro_l0.infer.AutoGate`, or any of your own with the methods that are asked for.

    :class:`~pyro_l0.infer.SparsityTarget` asks for ``posterior``, ``test_gates`` and ``locations``,
    :class:`~pyro_l0.compaction.Shrinker` for ``posterior`` and ``keep``,
    :func:`~pyro_l0.diagnostics.measure_gradient` for a call, ``posterior`` and ``locations``.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Sample the gates' sites; takes the model's arguments."""

    def posterior(self) -> Mapping[str, GateDistribution]:
        """The posterior gates by site, differentiable for the guide's parameters."""

    def test_gates(self) -> Mapping[str, Tensor]:
        """The deterministic gates that prune, by site, without gradients."""

    def locations(self) -> Sequence[Tensor]:
        """The location parameter of the gates of each site of :meth:`posterior`, in its order and with its shape.

        It is the first learned parameter of their family, on the real line; a SparsityTarget moves it.
        """

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Keep some units of some sites; arguments and result are as in :class:`~pyro_l0.infer.AutoGate`."""


def check_guide(guide: object, asked: str, *methods: str) -> None:
    """Refuse a guide without the methods that are needed."""
    missing = [name for name in methods if not hasattr(guide, name)]
    if missing:
        raise TypeError(
            f"Expected a guide over gates with {', '.join(methods)} for {asked}, but got a {type(guide).__name__} "
            f"without {', '.join(missing)}; give the AutoGate itself, not a list or a function that holds it, or write "
            "the methods of pyro_l0.infer.guides.parameters.GateGuide."
        )


Named = list[tuple[str, nn.Parameter]]  # parameters under their names in Pyro's parameter store

_entered_here = WeakTensorKeyDictionary()  # what guides of this process have put into the store


def share_with_pyro(parameters: Named) -> None:
    """Let Pyro know a guide's parameters: its store, where that is in use, and handlers such as SVI's."""
    if not pyro.settings.get("module_local_params"):
        _enter_store(parameters)
    if any(type(handler) is not Record for handler in runtime._PYRO_STACK):  # a Record does not need them
        for name, parameter in parameters:
            if parameter.requires_grad:
                _state(parameter, constraint=constraints.real, name=name)


def _enter_store(parameters: Named) -> None:
    """Put parameters into the store instead of those of the same names.

    The value of an entry that was loaded or assigned is taken over, as by Pyro's own modules. That of another guide of
    this process is not: the new guide starts anew, and optimisers step what its loss depends on.
    """
    store = pyro.get_param_store()
    for name, parameter in parameters:
        if name in store:
            entry = store[name]
            if entry is parameter:
                continue
            if entry not in _entered_here:
                _take_over(name, entry, parameter)
        is_trained = parameter.requires_grad
        # The store goes on to know the name of what it had: guides that are trained in turn need it, as Pyro's
        # optimisers save their states by name.
        store[name] = parameter
        _entered_here[store[name]] = True
        parameter.requires_grad_(is_trained)  # which the store has switched on


@torch.no_grad()
def _take_over(name: str, entry: Tensor, parameter: nn.Parameter) -> None:
    if entry.shape != parameter.shape:
        raise ValueError(
            f"Expected {name!r} in the parameter store of shape {tuple(parameter.shape)}, but got "
            f"{tuple(entry.shape)}; call pyro.clear_param_store() or load the parameters of this model."
        )
    parameter.copy_(entry)


@runtime.effectful(type="param")
def _state(parameter: nn.Parameter, **_: object) -> Tensor:
    """A ``pyro.param`` statement, whether or not the store is in use."""
    parameter.unconstrained = weakref.ref(parameter)  # type: ignore[attr-defined]  # which SVI asks for
    return parameter


class ReplacedByStore(Messenger):
    """Notices parameters of a model's networks for which the store has others of the same name, which SVI would step.

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
        """Warn within SVI, when asked at every loss, once such parameters have gradients."""
        if not any(isinstance(x, TraceMessenger) and x.param_only for x in runtime._PYRO_STACK):
            return
        stored = dict(pyro.get_param_store().named_parameters())
        parameters = {name: own() for name, own in self.found.items()}
        with_grads = {name: own for name, own in parameters.items() if own is not None and own.grad is not None}
        replaced = [name for name, own in with_grads.items() if stored.get(name, own) is not own]
        if replaced:
            self.found = {}
            warnings.warn(
                f"SVI does not train {replaced[0]!r} of the model, nor {len(replaced) - 1} other parameters: the "
                "parameter store has others of these names, of an earlier network or a file. Call "
                "pyro.clear_param_store() before training a new network, or pyro.module(..., "
                "update_module_params=True) to continue from the store.",
                stacklevel=2,
            )


_PATIENCE = 100  # gradients


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
