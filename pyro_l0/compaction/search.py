"""Tries on a copy of a network what closed gates allow, until the copy is certified to compute the same."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pyro_l0.compaction.apply import apply_in_place, reset_running_means
from pyro_l0.compaction.calls import Arguments, NoDropout, another_size, run, tensors
from pyro_l0.compaction.certificate import Certificate, certify, difference, tolerance_of
from pyro_l0.compaction.checks import check_network, check_seen, path_raised, warn_unseen, where_raised
from pyro_l0.compaction.fold import NotConstantError, layer_constants
from pyro_l0.compaction.inputs import refuse_other_sizes
from pyro_l0.compaction.layers import as_whole_norms
from pyro_l0.compaction.plan import Plan, constant_units, make_plan
from pyro_l0.compaction.sizes import followed_sizes, set_attributes
from pyro_l0.compaction.storage import Compacted
from pyro_l0.nn.engine import Example, Recording, analyse, calls_of, record
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.fixed import check_gates, fix_gates
from pyro_l0.nn.gate_layer import gate_names

__all__ = ["CompactionError", "refusal", "search", "uncut"]


class CompactionError(RuntimeError):
    """Raised if no smaller network computes what the network with fixed gates computes."""


def search(
    network: nn.Module,
    gates: Mapping[str, Tensor],
    example: Example,
    keep_gates: bool = False,
    tolerance: float | None = None,
    is_trial: bool = False,
) -> Compacted:
    """Make a smaller network, as :func:`~pyro_l0.compaction.compact` does, which has the arguments and errors.

    With ``keep_gates`` the gates that are not 0 stay, to train on, and their values stand for any others. In a trial
    only outputs are compared. The message of a CompactionError is of the first network that was tried.
    """
    own = gate_names(network) if isinstance(network, nn.Module) else {}
    network, gates, tolerance = _checked(network, gates, example, tolerance)
    first: CompactionError | None = None
    for recording in _recordings(network, example):
        for site, gate in gate_names(network).items():
            own[site].dim = gate.dim  # as its calls give it
        attempt = _Attempt(network, gates, calls_of(example), recording, keep_gates, tolerance, is_trial)
        for closed in _closed(gates):
            for folds in (True, False):
                try:
                    return attempt.certified(closed, folds)
                except NotConstantError:
                    continue
                except CompactionError as error:
                    first = first or error
    assert first is not None
    raise first


def refusal(network: nn.Module, gates: Mapping[str, Tensor], example: Example) -> str | None:
    """Why a network can't be cut by some values of its gates; None if it can. Gradients are not compared."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            search(network, gates, example, is_trial=True)
    except Exception as error:  # of any kind, as the network's own code raises some
        return str(error) or type(error).__name__
    return None


def uncut(network: nn.Module, gates: Mapping[str, Tensor], example: Example) -> Compacted:
    """The whole network with fixed gates, and a plan that removes nothing."""
    network, gates, tolerance = _checked(network, gates, example, None)
    opened = {site: torch.zeros(gate.shape, dtype=torch.bool) for site, gate in gates.items()}
    recording = next(_recordings(network, example))
    return _Attempt(network, gates, calls_of(example), recording, False, tolerance).certified(opened, folds=False)


def _checked(
    network: nn.Module, gates: Mapping[str, Tensor], example: Example, tolerance: float | None
) -> tuple[nn.Module, dict[str, Tensor], float]:
    """A copy of the network without what its modules keep for evaluation, gates where it is, its type's tolerance."""
    for site, value in gates.items() if isinstance(gates, Mapping) else ():
        if getattr(value, "is_meta", False):
            raise ValueError(f"Expected gates[{site!r}] with values, but it is on the device meta.")
    check_network(network, example)
    check_gates(network, gates)
    like = next((p for p in network.parameters() if p.is_floating_point()), tensors(calls_of(example))[0])
    values = {site: gate.to(like.device) for site, gate in gates.items()}
    return copied(network).train(), values, tolerance_of(like.dtype) if tolerance is None else tolerance


def _recordings(network: nn.Module, example: Example) -> Iterator[Recording]:
    """The network as it evaluates; and, where that was not enough, also its code for training if that differs."""
    with _refusing(ValueError), as_whole_norms(network):
        evaluated = record(network, example)
    yield evaluated
    try:
        with as_whole_norms(network), NoDropout():
            both = record(network, example, with_training=True)
    except Exception:  # in training mode the network expects other arguments
        return
    names = [operation.name for operation in evaluated.operations]
    if [operation.name for operation in both.operations] != 2 * names:
        yield both


def _closed(gates: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Which gates are closed; and without the first of each site that has no open one, as not all code accepts none."""
    closed = {site: (gate == 0).cpu() for site, gate in gates.items()}
    yield closed
    if any(bool(mask.all()) for mask in closed.values()):
        first = {site: torch.arange(len(mask)) == 0 for site, mask in closed.items()}
        yield {site: mask & ~first[site] if bool(mask.all()) else mask for site, mask in closed.items()}


@dataclass(frozen=True)
class _Attempt:
    """Makes one smaller network; the arguments are those of :func:`search`, checked."""

    network: nn.Module
    gates: Mapping[str, Tensor]
    calls: Sequence[Arguments]
    recording: Recording
    keep_gates: bool
    tolerance: float
    is_trial: bool = False

    def certified(self, closed: Mapping[str, Tensor], folds: bool) -> Compacted:
        """A smaller network without units whose gates are closed; raises NotConstantError and CompactionError."""
        network = self.network
        with _refusing(NotConstantError):
            analysis = analyse(self.recording, closed, None if self.keep_gates else self.gates, folds)
            units = constant_units(network, analysis)
            if units is None:
                raise NotConstantError("Expected constants in front of layers.")
            reference = fix_gates(network, self.gates).eval()
            if self.keep_gates:
                reset_running_means(reference, {path: tuple(x.tolist()) for path, x in analysis.zero_channels.items()})
            constants = layer_constants(reference, units, self.calls)
            plan = make_plan(network, self.recording, analysis, self.gates, constants, units, self.keep_gates)
        check_seen(network, self.recording, plan.kept)
        small = copied(network).eval()
        with _refusing():
            apply_in_place(small, plan, constants)
        evaluated = self._fixed(small, plan) if self.keep_gates else small
        attributes = {path: dict(values) for path, values in plan.attributes.items()}
        for path, values in followed_sizes(network, analysis).items():
            attributes.setdefault(path, {}).update(values)
        for each in (small, evaluated):
            set_attributes(each, attributes)
        plan = replace(plan, attributes=attributes, input_sizes=self._input_sizes(reference, evaluated, plan))
        if plan.input_sizes is not None:
            refuse_other_sizes(small, plan.input_sizes)
        certificate = self._certify(reference, evaluated, plan)
        warn_unseen(network, self.recording, analysis.shrunk)
        return Compacted(small, plan, certificate, reasons=analysis.reasons, removed=analysis.removed)

    def _fixed(self, small: nn.Module, plan: Plan) -> nn.Module:
        """The smaller network with fixed gates, which it still has."""
        left = dict(self.gates)
        for change in plan.changes.values():
            left[change.site] = self.gates[change.site][list(change.units)]
            if change.random and not change.units:
                del left[change.site]
        return fix_gates(small, left).eval()

    def _remedy(self, small: nn.Module, failure: Exception) -> str:
        """What to do about an error in the smaller network, in words."""
        path = path_raised(small, failure)
        own = () if path is None else small.get_submodule(path).named_parameters(path, recurse=False)
        unseen = [name for name, _ in own if name not in self.recording.named]
        if unseen:
            return f"No call of the example uses {unseen[0]!r}; give a list of calls that together use all."
        return "Take sizes from the tensors (x.shape), or keep them as attributes of the module that uses them."

    def _input_sizes(self, reference: nn.Module, small: nn.Module, plan: Plan) -> tuple[tuple[int, ...], ...] | None:
        """The sizes of the example's inputs if the smaller network is right for no others."""
        own = tuple(tuple(x.shape[1:]) for x in tensors(self.calls[0]))
        if any(fold.shape is not None for fold in plan.folds):
            return own
        other = another_size(self.calls[0]) if plan.folds else None
        if other is None:
            return None
        try:
            expected = run(reference, other)
        except Exception:  # the network accepts no other size itself
            return None
        try:
            apart, scale = difference(expected, run(small, other))
        except Exception:
            return own
        return None if apart <= self.tolerance * scale else own

    def _certify(self, reference: nn.Module, small: nn.Module, plan: Plan) -> Certificate:
        kept = plan.kept_indices()
        factors: dict[str, Tensor] = {}
        for name, values in plan.factors.items():
            index = kept[name][1] if name in kept else None
            factors[name] = torch.tensor(values, dtype=torch.float64)[slice(None) if index is None else index]
        try:
            found = certify(reference, small, self.calls, kept, factors, self.is_trial)
        except Exception as error:
            raise CompactionError(
                f"Expected the network to run with fewer units as with all, but {where_raised(small, error)} raises "
                f"{type(error).__name__}: {error}. {self._remedy(small, error)}"
            ) from error
        if not self.keep_gates and plan.folds:
            found = self._of_folded(found)
        if math.isnan(found):
            raise CompactionError(
                "Expected a network whose outputs and gradients are finite, but there are NaN or infinite ones on the "
                f"example, {_not_finite(self.network, self.calls)}; then nothing can be compared."
            )
        if not found <= self.tolerance:
            raise CompactionError(
                f"The compacted network differs from the network with fixed gates by {found:.2e} of its "
                f"largest output or gradient, more than the tolerance of {self.tolerance:.0e}. If that is rounding, "
                "compact in float64 (network, gates and example) or raise tolerance; otherwise the network's "
                "code does what its operations on the example do not show."
            )
        return found

    def _of_folded(self, found: Certificate) -> Certificate:
        """Without what differs because constants are what evaluation mode and the present parameters make of them."""

        def is_small(value: float | None) -> bool:
            return value is not None and value <= self.tolerance

        training = found.training_outputs, found.training_gradients
        gradients = found.gradients if is_small(found.gradients) else None
        return Certificate(found.outputs, gradients, *(training if all(map(is_small, training)) else ()))


@contextmanager
def _refusing(*known: type[Exception]) -> Iterator[None]:
    """What the engine, or applying its plan, raises is a refusal, which callers expect; ``known`` errors are raised."""
    try:
        yield
    except known:
        raise
    except Exception as error:
        raise CompactionError(
            f"Expected operations whose units can be followed, but that raises {type(error).__name__}: {error}. "
            "Please report it with the network."
        ) from error


def _not_finite(network: nn.Module, calls: Sequence[Arguments]) -> str:
    """Where numbers that are not finite come from, in words."""
    tensors_of = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    names = [name for name, x in tensors_of.items() if x.is_floating_point() and not bool(x.isfinite().all())]
    if names:
        return f"and {names[0]!r} holds some itself"
    if any(x.is_floating_point() and not bool(x.isfinite().all()) for x in tensors(calls)):
        return "which holds some itself"
    return "though the parameters and the example are finite"
