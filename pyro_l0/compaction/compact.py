"""Network and gates in, a smaller network that was certified to compute the same out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.compaction.apply import apply_in_place, refuse_other_sizes, reset_running_means
from pyro_l0.compaction.calls import Arguments, NoDropout, another_size, run, tensors
from pyro_l0.compaction.certificate import Certificate, certify, difference, refuse_another, tolerance_of
from pyro_l0.compaction.plan import (
    NotConstantError,
    Plan,
    constant_units,
    followed_sizes,
    layer_constants,
    make_plan,
    set_attributes,
)
from pyro_l0.compaction.storage import Compacted
from pyro_l0.expect import expect
from pyro_l0.nn.calls import refuse_computed
from pyro_l0.nn.engine import Example, Recording, analyse, calls_of, record
from pyro_l0.nn.engine.record import copied, example_of, held
from pyro_l0.nn.fixed import check_gates
from pyro_l0.nn.gate import gate_names

_MOST_ROUNDING = 1e3  # tolerances
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def check_network(network: nn.Module, example: Example) -> list[Arguments]:
    """Run a network on an example, whose calls are returned; refuse what would certify nothing."""
    expect(nn.Module, "a torch module", network=network)
    calls = calls_of(example_of(example, network))
    inputs = [x for call in calls for x in tensors(call)]
    if not inputs or not all(x.numel() for x in inputs):
        shapes = [tuple(x.shape) for x in inputs]
        raise ValueError(f"Expected an example of tensors with entries, but got ones of shapes {shapes}.")
    if any(x.is_meta for x in (*inputs, *network.parameters())):
        raise ValueError("Expected numbers to compare, but the meta device has none; suggest_gates does without.")
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):  # each copy would draw its own
            raise ValueError(f"Expected a network that is ready, but {name!r} is lazy; call the network once.")
    with held(network, {}) as own, torch.no_grad():
        for call in calls:
            run(own, call)
    return calls


def _check_used(network: nn.Module, recording: Recording, plan: Plan) -> None:
    """Refuse a module of which one parameter would be cut and another was not used by any call of the example."""
    cut = {name.rpartition(".")[0] for name in plan.remaining}
    for name, parameter in network.named_parameters():
        path = name.rpartition(".")[0]
        if path in cut and name not in recording.named and parameter.dim():
            raise ValueError(
                f"Expected an example that uses all parameters of module {path!r}, of which units are removed, but "
                f"{name!r} was not used; give a list of calls that together use every parameter."
            )


def _warn_unused(network: nn.Module, recording: Recording, shrunk: Mapping[str, Mapping[int, int]]) -> None:
    """Warn of layers that no call used, and that have a size of units that are removed beside them."""
    for path, module in network.named_modules():
        own = dict(module.named_parameters(path, recurse=False))
        sizes = {size for parameter in own.values() if parameter.dim() > 1 for size in parameter.shape[:2]}
        if not own.keys() & recording.named.keys() and sizes & shrunk.get(path.rpartition(".")[0], {}).keys():
            warnings.warn(
                f"Expected an example that uses the whole network, but no call of it uses {path!r}, which stays as it "
                "is and may not fit the units that are left; give a list of calls that use it too.",
                stacklevel=7,  # who calls compact
            )


class CompactionError(RuntimeError):
    """Raised if no smaller network computes what the network with fixed gates computes."""


class RoundingError(CompactionError):
    """A difference of a few tolerances, which no choice of gates avoids."""


def search(
    network: nn.Module,
    gates: Mapping[str, Tensor],
    example: Example,
    tolerance: float | None = None,
    zeros: Set[str] = frozenset(),
    **flags: bool,
) -> Compacted:
    """Make a smaller network, as :func:`~pyro_l0.compaction.compact` does, which has the arguments and errors.

    Attempts cut less and less, and the first that is certified is returned. With ``keep_gates`` the gates that are not
    0 stay, to train on, and their values stand for any others. In a trial (``is_trial``) only outputs are compared.
    Slices of zeros of the parameters named in ``zeros`` count as zeros for good.
    """
    return _Task.of(network, gates, example, tolerance, zeros, **flags).search()


def refusal(network: nn.Module, gates: Mapping[str, Tensor], example: Example, **options: Any) -> str | None:
    """Why a network can't be cut by some values of its gates; None if it can. By default outputs alone are compared."""
    return first_refusal(network, [gates], example, **options)


def first_refusal(
    network: nn.Module, choices: Iterable[Mapping[str, Tensor]], example: Example, **options: Any
) -> str | None:
    """What :func:`refusal` says of the first of several choices of gates that it refuses; one recording serves all."""
    task: _Task | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for gates in choices:
                if task is None:
                    task = _Task.of(network, gates, example, **{"is_trial": True, **options})
                else:
                    task = replace(task, gates=_checked(network, gates, task.calls))
                task.search()
    except Exception as error:  # of any kind, as the network's own code raises some
        return str(error) or type(error).__name__
    return None


def _checked(network: nn.Module, gates: Mapping[str, Tensor], calls: Sequence[Arguments]) -> dict[str, Tensor]:
    """The gates where the network is; others than its own are refused."""
    check_gates(network, gates)
    like = _like(network, calls)
    return {site: gate if like.is_meta else gate.to(like.device) for site, gate in gates.items()}


def _like(network: nn.Module, calls: Sequence[Arguments]) -> Tensor:
    """A tensor of the network's device and type: its first parameter of real numbers, or the first one of the calls."""
    return next((p for p in network.parameters() if p.is_floating_point()), tensors(calls)[0])


def _closed(gates: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Which gates are closed; and without the first of each site that has no open one, as not all code accepts none."""
    closed = {site: (gate == 0).cpu() for site, gate in gates.items()}
    yield closed
    if any(bool(mask.all()) for mask in closed.values()):
        yield {
            site: mask & (torch.arange(len(mask)) > 0) if bool(mask.all()) else mask for site, mask in closed.items()
        }


@dataclass(frozen=True)
class _Task:
    """What :func:`search` is asked for, on a copy of the network without what its modules keep for evaluation."""

    own: nn.Module  # as it was given
    network: nn.Module
    recording: Recording  # of the copy as it evaluates
    gates: Mapping[str, Tensor]
    calls: Sequence[Arguments]
    tolerance: float
    keep_gates: bool = False
    is_trial: bool = False
    in_float64: bool = True
    zeros: Set[str] = frozenset()

    @classmethod
    def of(
        cls,
        network: nn.Module,
        gates: Mapping[str, Tensor],
        example: Example,
        tolerance: float | None = None,
        zeros: Set[str] = frozenset(),
        **flags: bool,
    ) -> _Task:
        """The task of cutting a copy. Gates go to the network's device; the tolerance is that of its type if None."""
        calls = calls_of(example) if flags.get("is_trial") else check_network(network, example)
        gates = _checked(network, gates, calls)
        limit = tolerance_of(_like(network, calls).dtype) if tolerance is None else tolerance
        copy = copied(network).train()
        with _refusing(ValueError):
            recording = record(copy, example_of(example, network))
        for own, other in zip(gate_names(network).values(), gate_names(copy).values(), strict=True):
            own.dim = other.dim  # as calls give it
        return cls(network, copy, recording, gates, calls, limit, zeros=zeros, **flags)

    def search(self) -> Compacted:
        """The first certified attempt, with constants folded or not; if there is none, the first error is raised."""
        first: CompactionError | None = None
        closed = list(_closed(self.gates))
        for attempt in ((recording, *how) for recording in self.recordings() for how in product(closed, (True, False))):
            if self.zeros and first is not None and not attempt[-1]:
                continue  # constants are not in the way, but the zeros of some parameters
            try:
                return self.cut(*attempt)
            except NotConstantError:
                continue
            except CompactionError as error:
                first = first or error
        assert first is not None
        if not self.is_trial:  # perhaps copies differ from the network before anything is cut
            refuse_computed(self.own)
            refuse_another(self.own, self.network, self.calls, self.tolerance, self.in_float64)
        raise first

    def recordings(self) -> Iterator[Recording]:
        """The network as it evaluates; then, in case that is not enough, also as it trains if that differs."""
        yield self.recording
        try:
            with NoDropout():
                both = record(self.network, self.recording.example, with_training=True)
        except Exception:  # in training mode the network expects other arguments
            return
        names = [operation.name for operation in self.recording.operations]
        if [operation.name for operation in both.operations] != 2 * names:
            yield both

    def cut(self, recording: Recording, closed: Mapping[str, Tensor], folds: bool) -> Compacted:
        """A certified network without units whose gates are closed; raises NotConstantError and CompactionError."""
        with held(self.own, self.gates) as reference:
            return self._cut(reference, recording, closed, folds)

    def _cut(self, reference: nn.Module, recording: Recording, closed: Mapping[str, Tensor], folds: bool) -> Compacted:
        network, keep_gates = self.network, self.keep_gates
        with _refusing(NotConstantError):
            analysis = analyse(recording, closed, None if keep_gates else self.gates, folds, self.zeros)
            units = constant_units(network, analysis)
            if keep_gates:
                reset_running_means(reference, {path: tuple(x.tolist()) for path, x in analysis.zero_channels.items()})
            constants = layer_constants(reference, units, self.calls)
            plan = make_plan(network, recording, analysis, self.gates, constants, units, keep_gates)
            small = copied(network).eval()
            apply_in_place(small, plan, constants)
        attributes = {path: dict(values) for path, values in plan.attributes.items()}
        for path, values in followed_sizes(network, analysis).items():
            attributes.setdefault(path, {}).update(values)
        set_attributes(small, attributes)
        with held(small, self._left(plan)) as evaluated:
            sizes = None if self.is_trial else self._input_sizes(reference, evaluated, plan)
            plan = replace(plan, attributes=attributes, input_sizes=sizes)
            _check_used(network, recording, plan)
            certificate = self._certify(reference, evaluated, plan)
        if plan.input_sizes is not None:
            refuse_other_sizes(small, plan.input_sizes)
        _warn_unused(network, recording, analysis.shrunk)
        return Compacted(small, plan, certificate, reasons=analysis.reasons, removed=analysis.removed)

    def _left(self, plan: Plan) -> dict[str, Tensor]:
        """The values of the gates that the smaller network still has."""
        changes = [change for change in plan.changes.values() if change.random]
        return {**self.gates} | {change.site: self.gates[change.site][list(change.units)] for change in changes}

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
        remaining = plan.remaining_indices()
        factors: dict[str, Tensor] = {}
        for name, values in plan.factors.items():
            index = remaining[name][1] if name in remaining else None
            factors[name] = torch.tensor(values, dtype=torch.float64)[slice(None) if index is None else index]
        try:
            flags = self.tolerance, self.is_trial, self.in_float64
            found = certify(reference, small, self.calls, remaining, factors, *flags)
        except Exception as error:
            own = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
            at = f"line {own[-1].lineno} of {Path(own[-1].filename).name} ({own[-1].line})" if own else "it"
            raise CompactionError(
                f"Expected the network to run with fewer units as with all, but {at} raises {type(error).__name__}: "
                f"{error}. Take sizes from the tensors (x.shape) or keep them as attributes of the module that uses "
                "them, and give a list of calls that together use all parameters."
            ) from error
        if not self.keep_gates and (plan.folds or self.zeros):
            found = self._of_folded(found)
        if math.isnan(found):
            raise CompactionError(
                "Expected finite outputs and gradients, which can be compared, but there are NaN or infinite ones; see "
                "whether a parameter, a buffer or the example holds some."
            )
        if not found <= self.tolerance:
            may_round = found <= _MOST_ROUNDING * self.tolerance
            raise (RoundingError if may_round else CompactionError)(
                f"The compacted network differs from the network with fixed gates by {found:.2e} of its "
                f"largest output or gradient, more than the tolerance of {self.tolerance:.0e}. "
                + (
                    "That may be rounding: compact in float64 (network, gates and example) or raise tolerance."
                    if may_round
                    else "The network's code does what its operations on the example do not show."
                )
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


def compact(
    network: nn.Module,
    gates: Mapping[str, Tensor],
    example: Example,
    tolerance: float | None = None,
    before: Sequence[Plan] = (),
    in_float64: bool = True,
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
        in_float64: whether both networks are compared in float64. False compares them in their own type, in less time
            and memory; it needs a ``tolerance`` above rounding, which BatchNorm in float32 can take to 1e-3.

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
        >>> from pyro_l0.nn import L0Gate
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 1))
        >>> small = compact(net, {"2": torch.tensor([1.0, 0.0, 0.5])}, torch.ones(1, 2))
        >>> small.network[0], small.plan.remaining["0.weight"]
        (Linear(in_features=2, out_features=2, bias=True), ((0, 2), None))
    """
    return _compact(_Task.of(network, gates, example, tolerance, in_float64=in_float64), before)


def _compact(task: _Task, before: Sequence[Plan] = ()) -> Compacted:
    try:
        found = task.search()
    except RoundingError:
        raise
    except CompactionError as error:
        raise CompactionError(f"{error}{_advice(task)}") from error
    stays = {site: next(iter(why.values())) for site, why in found.reasons.items() if why}
    if stays and not found.plan.remaining:
        named = "; ".join(f"{site!r}: {why}" for site, why in stays.items())
        warnings.warn(
            f"Gates are closed, but nothing is smaller: units stay ({named}). Put gates where suggest_gates says.",
            stacklevel=3,
        )
    return replace(found, before=tuple(before))


def compact_or_fix(
    network: nn.Module, gates: Mapping[str, Tensor], example: Example
) -> tuple[Compacted, CompactionError | None]:
    """What :func:`compact` returns; if it can't, the whole network with fixed gates, and the error."""
    task = _Task.of(network, gates, example)
    try:
        return _compact(task), None
    except CompactionError as error:
        opened = {site: torch.zeros(gate.shape, dtype=torch.bool) for site, gate in gates.items()}
        return task.cut(task.recording, opened, False), error


def _advice(task: _Task) -> str:
    """Which gates to open for a network to be cut, as a sentence; nothing if opening those of some sites is no help."""

    def fails(closed: Sequence[str]) -> bool:
        some = {site: x if site in closed else torch.where(x == 0, 1.0, x) for site, x in task.gates.items()}
        return refusal(task.own, some, task.recording.example) is not None

    def in_the_way(closed: list[str]) -> list[str]:
        """Those of some sites that can't be cut alone, found by halves, since there are few."""
        if not fails(closed):
            return []
        half = len(closed) // 2
        return [*in_the_way(closed[:half]), *in_the_way(closed[half:])] if half else closed

    sites = [site for site, gate in task.gates.items() if bool((gate == 0).any())]
    found = in_the_way(sites)
    if not found or fails([site for site in sites if site not in found]):
        return ""
    return f" It can be cut with all gates of {', '.join(map(repr, sorted(found)))} open."
