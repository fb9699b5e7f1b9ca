"""Network and gates in, a smaller network that was certified to compute the same out."""

from __future__ import annotations

import linecache
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb

import torch
from torch import Tensor, nn

from pyro_l0.compaction.apply import apply_in_place, refuse_other_sizes, reset_running_means
from pyro_l0.compaction.calls import Arguments, NoDropout, another_size, run, tensors
from pyro_l0.compaction.certificate import Certificate, certify, difference, tolerance_of
from pyro_l0.compaction.layers import as_whole_norms
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
from pyro_l0.nn.engine import Example, Recording, analyse, calls_of, record
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.fixed import FixedGate, check_gates, fix_gates
from pyro_l0.nn.gate import GateLayer, gate_names

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def check_network(network: nn.Module, example: Example) -> None:
    """Refuse what can't be recorded, copied or compared; nothing is changed."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"Expected network to be a torch module, but got {type(network).__name__}.")
    if isinstance(network, GateLayer):
        raise ValueError("Expected a network with gates in it, but got a gate alone; put it into nn.Sequential.")
    calls = calls_of(example)
    inputs = [x for call in calls for x in tensors(call)]
    if not inputs:
        raise TypeError(f"Expected an example with tensors, but got {type(example).__name__} without any.")
    _check_ready(network)
    _check_inputs(network, inputs)
    copied = _copied(network)
    for call in calls:
        try:
            run(copied.eval(), call)
        except Exception as error:
            given = ", ".join(f"shape {tuple(x.shape)} and type {x.dtype}" for x in tensors(call))
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"Expected an example that the network accepts, but got one of {given}, at which "
                f"{where_raised(copied, error)} raises: {text}"
            ) from error


def _check_ready(network: nn.Module) -> None:
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"Expected a network that is ready, but {name!r} is lazy; call the network once.")
        if parameter.is_meta:
            raise ValueError("Expected a network with values, but its parameters are on the device meta.")
    if gate_names(network):
        return
    for path, module in network.named_modules():
        if isinstance(module, FixedGate):
            raise ValueError(
                f"Expected a network with gates, but {path!r} is a FixedGate: the gates of this network are fixed "
                "already; use the network as it was before fix_gates."
            )


def _check_inputs(network: nn.Module, inputs: list[Tensor]) -> None:
    device = next((p.device for p in network.parameters()), None)
    for x in inputs:
        if not x.numel():
            raise ValueError(f"Expected an example with entries, but got shape {tuple(x.shape)}.")
        if x.is_meta or (device is not None and x.device != device):
            raise ValueError(
                f"Expected an example on {device or 'a device with values'}, where the network is, but got one "
                f"on {x.device}; move it by .to({str(device)!r})."
            )


def _copied(network: nn.Module) -> nn.Module:
    """A copy that draws its gates without reporting it."""
    try:
        with torch.no_grad():
            new = copied(network)
    except Exception as error:
        raise ValueError(
            f"Expected a network that copy.deepcopy can copy, but it can't copy {type(network).__name__}: {error}"
        ) from error
    for name, gate in gate_names(new).items():
        gate.site_name, gate.is_reported = name, True
    return new


def check_seen(network: nn.Module, recording: Recording, kept: Iterable[str]) -> None:
    """Refuse a module of which one parameter would be cut and another was not used by any call of the example."""
    cut = {name.rpartition(".")[0] for name in kept}
    for name, parameter in network.named_parameters():
        path = name.rpartition(".")[0]
        if path in cut and name not in recording.named and parameter.dim():
            raise ValueError(
                f"Expected an example that uses all parameters of module {path!r}, of which units are removed, but "
                f"{name!r} was not used; give a list of calls that together use every parameter."
            )


def warn_unseen(network: nn.Module, recording: Recording, shrunk: Mapping[str, Mapping[int, int]]) -> None:
    """Warn of layers that no call used, and that have a size of units that are removed beside them."""
    for path, module in network.named_modules():
        own = dict(module.named_parameters(path, recurse=False))
        sizes = {size for parameter in own.values() if parameter.dim() > 1 for size in parameter.shape[:2]}
        if not own.keys() & recording.named.keys() and sizes & shrunk.get(path.rpartition(".")[0], {}).keys():
            warnings.warn(
                f"Expected an example that uses the whole network, but no call of it uses {path!r}, which stays as it "
                "is and may not fit the units that are left; give a list of calls that use it too.",
                stacklevel=6,
            )


def path_raised(network: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost module of a network, or of a copy, that raised an error; None if there is none."""
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [x for x in owners if isinstance(x, nn.Module)]
    root = next((x for x in modules if type(x) is type(network)), network)
    paths = {id(module): path for path, module in root.named_modules()}
    return next((paths[id(x)] for x in reversed(modules) if id(x) in paths), None)


def where_raised(network: nn.Module, error: BaseException) -> str:
    """The innermost module of a network in which an error was raised, and the line of code that led to it, in words."""
    path, line = path_raised(network, error), ""
    kind = type(network.get_submodule(path or "")).__name__
    module = "the network" if path is None else f"module {path!r} ({kind})" if path else f"the network ({kind})"
    for frame, number in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            text = linecache.getline(file, number).strip()
            line = f" (line {number} of {Path(file).name}: {text})" if text else ""
    return module + line


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
