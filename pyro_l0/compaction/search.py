"""Tries on a copy of a network what closed gates allow, until the copy is certified to compute the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pyro_l0.compaction.apply import carry_out, reset_running_means
from pyro_l0.compaction.calls import Arguments, NoDropout, another_size, run, tensors
from pyro_l0.compaction.certificate import Certificate, certify, difference
from pyro_l0.compaction.fold import Constant, NotConstantError, layer_constants
from pyro_l0.compaction.inputs import refuse_other_sizes
from pyro_l0.compaction.layers import as_whole_norms
from pyro_l0.compaction.plan import Plan, check_seen, constant_units, make_plan, warn_unseen
from pyro_l0.compaction.sizes import Attributes, candidates, choices, path_raised, set_attributes, where_raised
from pyro_l0.nn.engine import Analysis, Example, Recording, analyse, calls_of, record
from pyro_l0.nn.engine.shared_sizes import find_integers
from pyro_l0.nn.fixed import fix_gates

__all__ = ["CompactionError", "Fitted", "constants_of", "fit", "fixed", "uncut"]

_CLOSE = 100  # times the tolerance: whether attributes are the right ones; the certificate asks for more


class CompactionError(RuntimeError):
    """A compacted network that does not compute what the network with fixed gates computes."""


@dataclass(frozen=True)
class Fitted:
    """A smaller network that was certified.

    Attributes:
        network: a copy with fewer units.
        plan: by which it was made.
        certificate: how far it is from the network that it was made from.
        reasons: by site, the closed units that stay, and why.
    """

    network: nn.Module
    plan: Plan
    certificate: Certificate
    reasons: Mapping[str, Mapping[int, str]]


def fit(
    network: nn.Module, gates: Mapping[str, Tensor], example: Example, keep_gates: bool, tolerance: float
) -> Fitted:
    """Make a smaller network from one whose gates have given values.

    Args:
        network: its gates were checked; it is not changed.
        gates: values by site. With ``keep_gates`` those that are not 0 stand for whatever they may be.
        example: what the network is called with.
        keep_gates: whether the gates that are not 0 stay, to train on.
        tolerance: largest difference that is accepted.

    Raises:
        CompactionError: no smaller network was found that computes the same; the message is of the first that was
            tried.
    """
    first: CompactionError | None = None
    for recording in _recordings(network, example):
        attempt = _Attempt(network, gates, calls_of(example), recording, keep_gates, tolerance)
        for closed in _closed(gates):
            for folds in (True, False):
                try:
                    return attempt.carry_out(closed, folds)
                except NotConstantError:
                    continue
                except CompactionError as error:
                    first = first or error
    assert first is not None
    raise first


def uncut(network: nn.Module, gates: Mapping[str, Tensor], example: Example, tolerance: float) -> Fitted:
    """The whole network with fixed gates, as a plan of which nothing leaves.

    Raises:
        CompactionError: the network does not compute the same twice.
    """
    with as_whole_norms(network):
        recording = record(network, example)
    opened = {site: torch.zeros(gate.shape, dtype=torch.bool) for site, gate in gates.items()}
    return _Attempt(network, gates, calls_of(example), recording, False, tolerance).carry_out(opened, folds=False)


def _recordings(network: nn.Module, example: Example) -> Iterator[Recording]:
    """The network as it evaluates; and, where that was not enough, also its code for training if that differs."""
    with as_whole_norms(network):
        evaluated = record(network, example)
    yield evaluated
    try:
        with as_whole_norms(network), NoDropout():
            both = record(network, example, with_training=True)
    except Exception:  # in training mode the network takes other arguments
        return
    names = [operation.name for operation in evaluated.operations]
    if [operation.name for operation in both.operations] != 2 * names:
        yield both


def _closed(gates: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Which gates are closed; and without the first of each site that has no open one, as not all code takes none."""
    closed = {site: (gate == 0).cpu() for site, gate in gates.items()}
    yield closed
    if any(bool(mask.all()) for mask in closed.values()):
        first = {site: torch.arange(len(mask)) == 0 for site, mask in closed.items()}
        yield {site: mask & ~first[site] if bool(mask.all()) else mask for site, mask in closed.items()}


def fixed(network: nn.Module, gates: Mapping[str, Tensor], plan: Plan) -> nn.Module:
    """A smaller network with gates, with values in the sizes that they had before."""
    left = dict(gates)
    for change in plan.changes.values():
        left[change.site] = gates[change.site][list(change.units)]
        if change.random and not change.units:
            del left[change.site]
    return fix_gates(network, left).eval()


def constants_of(
    network: nn.Module, gates: Mapping[str, Tensor], plan: Plan, calls: Sequence[Arguments]
) -> dict[str, Constant]:
    """The inputs of layers that leave by a plan, as a network computes them.

    Args:
        network: one that the plan fits.
        gates: by site, 0 for the gates that are closed.
        plan: says which inputs.
        calls: all examples.

    Raises:
        NotConstantError: they are not the same for every example.
    """
    if not plan.folds:
        return {}
    reference = fix_gates(network, gates).eval()
    reset_running_means(reference, plan.zero_channels)
    return layer_constants(reference, {fold.layer: fold.units for fold in plan.folds}, calls)


class _Attempt:
    """Makes one smaller network."""

    def __init__(
        self,
        network: nn.Module,
        gates: Mapping[str, Tensor],
        calls: Sequence[Arguments],
        recording: Recording,
        keep_gates: bool,
        tolerance: float,
    ) -> None:
        self.network, self.gates, self.calls = network, gates, calls
        self.recording, self.keep_gates, self.tolerance = recording, keep_gates, tolerance

    def carry_out(self, closed: Mapping[str, Tensor], folds: bool) -> Fitted:
        """A certified network.

        Raises:
            NotConstantError: what is to be folded is no constant after all.
            CompactionError: the network does not run, or computes something else.
        """
        analysis = analyse(self.recording, closed, None if self.keep_gates else self.gates, folds)
        units = constant_units(self.network, analysis)
        if units is None:
            raise NotConstantError("Expected constants in front of layers.")
        reference = fix_gates(self.network, self.gates).eval()
        if self.keep_gates:
            reset_running_means(reference, {path: tuple(x.tolist()) for path, x in analysis.zero_channels.items()})
        constants = layer_constants(reference, units, self.calls)
        plan = make_plan(self.network, self.recording, analysis, self.gates, constants, units, self.keep_gates)
        check_seen(self.network, self.recording, plan)
        small = copy.deepcopy(self.network).eval()
        carry_out(small, plan, constants)
        evaluated = fixed(small, self.gates, plan) if self.keep_gates else small
        new = self._users_attributes(reference, evaluated, analysis)
        new = {
            path: changed
            for path, values in new.items()
            if (changed := {k: x for k, x in values.items() if x != getattr(self.network.get_submodule(path), k)})
        }
        merged = {path: {**plan.attributes.get(path, {}), **values} for path, values in new.items()}
        plan = replace(plan, attributes={**plan.attributes, **merged})
        sizes = self._input_sizes(reference, evaluated, plan)
        if sizes is not None:
            plan = replace(plan, input_sizes=sizes)
            refuse_other_sizes(small, sizes)
        set_attributes(small, new)
        certificate = self._certify(reference, evaluated, plan)
        warn_unseen(self.network, self.recording, analysis.shrunk)
        return Fitted(small, plan, certificate, analysis.reasons)

    def _users_attributes(self, reference: nn.Module, small: nn.Module, analysis: Analysis) -> Attributes:
        """The attributes of users' modules with which a smaller network runs, set in it."""
        expected = [run(reference, call) for call in self.calls]
        failure: Exception | None = None
        known = _known(self.network, analysis)
        others = candidates(self.network, analysis.shrunk, analysis.partly_shrunk, known)
        for attributes in choices(others, known):
            before: Attributes = {
                path: {name: getattr(small.get_submodule(path), name) for name in values}
                for path, values in attributes.items()
            }
            set_attributes(small, attributes)
            try:
                pairs = zip(expected, [run(small, call) for call in self.calls], strict=True)
                if all(
                    apart <= _CLOSE * self.tolerance * scale for apart, scale in (difference(x, y) for x, y in pairs)
                ):
                    return attributes
            except Exception as error:
                failure = failure or error
            set_attributes(small, before)
        if failure is None:
            return {}  # the certificate says how far it is
        raise CompactionError(
            f"Expected the network to run with fewer units, but {where_raised(small, failure)} raises: "
            f"{str(failure).splitlines()[0] if str(failure) else type(failure).__name__}. "
            f"{self._remedy(small, failure)}"
        ) from failure

    def _remedy(self, small: nn.Module, failure: Exception) -> str:
        """What to do about an error in the smaller network, in words."""
        path = path_raised(small, failure)
        own = () if path is None else small.get_submodule(path).named_parameters(path, recurse=False)
        unseen = [name for name, _ in own if name not in self.recording.named]
        if unseen:
            return f"No call of example_input uses {unseen[0]!r}; give a list of calls that together use all."
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
        except Exception:  # the network takes no other size itself
            return None
        try:
            apart, scale = difference(expected, run(small, other))
        except Exception:
            return own
        return None if apart <= self.tolerance * scale else own

    def _certify(self, reference: nn.Module, small: nn.Module, plan: Plan) -> Certificate:
        factors = {name: torch.tensor(factor, dtype=torch.float64) for name, factor in plan.factors.items()}
        places = plan.places()
        factors = {name: _left(factor, places.get(name)) for name, factor in factors.items()}
        try:
            found = certify(reference, small, self.calls, places, factors)
        except Exception as error:
            raise CompactionError(
                f"Expected the network to run with fewer units as with all, but {where_raised(small, error)} raises "
                f"{type(error).__name__}: {error}. {self._remedy(small, error)}"
            ) from error
        if not self.keep_gates and plan.folds:
            found = self._of_folded(found)
        if math.isnan(found.largest):
            raise CompactionError(
                "Expected a network whose outputs and gradients are finite, but there are NaN or infinite ones on the "
                f"example, {_not_finite(self.network, self.calls)}; then nothing can be compared."
            )
        if not found.largest <= self.tolerance:
            raise CompactionError(
                f"The compacted network differs from the network with fixed gates by {found.largest:.2e} of its "
                f"largest output or gradient, more than the tolerance of {self.tolerance:.0e}. If that is rounding, "
                "compact in float64 (network, gates and example_input) or raise tolerance; otherwise the network's "
                "code does what its operations on the example do not show."
            )
        return found

    def _of_folded(self, found: Certificate) -> Certificate:
        """Without what differs because constants are what evaluation mode and the present parameters make of them."""
        training = [_if_small(x, self.tolerance) for x in (found.training_outputs, found.training_gradients)]
        outputs, gradients = [None, None] if None in training else training
        return Certificate(found.outputs, _if_small(found.gradients, self.tolerance), outputs, gradients)


def _known(network: nn.Module, analysis: Analysis) -> Attributes:
    """The integers of users' modules that gave sizes, with the values that the smaller network asks for."""
    maps = analysis.maps
    uses = [use for use in maps.recording.sizes if use.value in maps.axes]
    found = find_integers(uses, lambda use: analysis.solution.size(maps.axes[use.value][use.dim]))
    known: Attributes = {}
    for holder, value in found.items():
        of_module = known.setdefault(holder.path, {})
        before = of_module.get(holder.name, getattr(network.get_submodule(holder.path), holder.name))
        if isinstance(before, int):
            of_module[holder.name] = value
        else:
            of_module[holder.name] = tuple(value if i == holder.place else x for i, x in enumerate(before))
    return known


def _not_finite(network: nn.Module, calls: Sequence[Arguments]) -> str:
    """Where numbers that are not finite come from, in words."""
    tensors_of = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    names = [name for name, x in tensors_of.items() if x.is_floating_point() and not bool(x.isfinite().all())]
    if names:
        return f"and {names[0]!r} holds some itself"
    if any(x.is_floating_point() and not bool(x.isfinite().all()) for x in tensors(calls)):
        return "which holds some itself"
    return "though the parameters and the example are finite"


def _left(factor: Tensor, places: Sequence[Tensor | None] | None) -> Tensor:
    index = None if places is None else places[1]
    return factor if index is None else factor[index]


def _if_small(value: float | None, tolerance: float) -> float | None:
    return value if value is not None and value <= tolerance else None
