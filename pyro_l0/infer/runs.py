"""Recorded runs of a guide or a model: likelihood, particles, and errors that say what failed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import pyro
import torch
from pyro.distributions import ExpandedDistribution, Independent, MaskedDistribution, Normal, TorchDistribution, Unit
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import find_gate, innermost
from pyro_l0.expect import expect
from pyro_l0.infer.record import Record, Site, is_drawn, is_likelihood, sole_record
from pyro_l0.infer.slabs import JointSample

__all__ = ["forked_generators", "seeded"]


@contextmanager
def forked_generators() -> Iterator[None]:
    """Leave all global random number generators as they were before."""
    state = pyro.util.get_rng_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            pyro.util.set_rng_state(state)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from a seed, and leave the generators as they were; None draws from these."""
    if seed is None:
        yield
        return
    with forked_generators():
        torch.manual_seed(seed)
        yield


def factor(name: str, log_factor: Tensor) -> None:
    """Add a log probability to a model, such as a minibatch's log likelihood times the number of minibatches.

    Use it instead of ``pyro.factor``, whose check of the value waits for an accelerator in every step.

    Args:
        name: name of the site.
        log_factor: log probability in nats, of the shape of the plates around it; outside of plates it is summed.

    Raises:
        TypeError: ``log_factor`` is not a tensor.

    Example:
        >>> import torch
        >>> from pyro_l0.infer import L0_ELBO
        >>> L0_ELBO("l0").loss(lambda: factor("y", torch.tensor(-2.5)), lambda: None)
        2.5
    """
    expect(Tensor, "a tensor", log_factor=log_factor)
    fn = Unit(log_factor, validate_args=False)
    no_data = fn.sample()
    record = sole_record()
    if record is not None:
        record.observe(name, fn, no_data)
    else:
        pyro.sample(name, fn, obs=no_data)


EVERY = 100  # steps between two checks that wait for a device
_CLOSED = 0.01  # P(z != 0) above the family's minimum

Explain = Callable[[], str]


class Watch:
    """Losses that are still to be checked, and sites that have closed.

    In main memory every loss is checked at once. On an accelerator that would wait for it in every step: there
    the terms of the last steps are kept, and every hundredth step checks all of them at once.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[int, str, Tensor]] = []
        self._closed: set[str] = set()

    def loss(self, step: int, loss: Tensor, parts: Mapping[str, Tensor], explain: Explain) -> None:
        """Check the loss of a step, now or later; raises if it is not finite."""
        if loss.device.type == "cpu":
            self.value(step, loss.item(), explain)
        elif loss.device.type != "meta":
            self._unread += [(step, name, part.detach()) for name, part in parts.items()]
            if len(self._unread) >= EVERY * len(parts):
                self._check_unread(step, explain)

    def value(self, step: int, value: float, explain: Explain) -> None:
        """Check a loss whose value is known."""
        if not math.isfinite(value):
            self._check_unread(step, explain)
            raise ValueError(f"The loss is {value} at step {step}: {explain()}")

    def _check_unread(self, now: int, explain: Explain) -> None:
        unread, self._unread = self._unread, []
        values = torch.stack([part.float() for _, _, part in unread]).tolist() if unread else []
        for (step, name, _), value in zip(unread, values, strict=True):
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value} at step {step}; when checked at step {now}: {explain()}")

    def gates(self, step: int, guide: Mapping[str, Site]) -> None:
        """Warn once for a site whose test gates are all 0 and P(z != 0) near its minimum; every hundredth step."""
        if step % EVERY:
            return
        found = {name: find_gate(site["fn"]) for name, site in guide.items() if self._is_checked(name, site)}
        gates = {name: gate for name, gate in found.items() if gate is not None and gate.batch_shape.numel()}
        devices = [gate._like.device.type for gate in gates.values()]
        if not gates or devices[0] == "meta" or (step == 0 and devices[0] != "cpu"):
            return
        with torch.no_grad():
            excess = [(g.active_prob - g.least_active_prob + g.test_gate).max().float() for g in gates.values()]
            most_of_site = torch.stack(excess).tolist()
        for name, most in zip(gates, most_of_site, strict=True):
            if most < _CLOSED:
                self._closed.add(name)
                warnings.warn(
                    f"All gates of site {name!r} are closed at step {step}: P(z != 0) is at most {most:.2g}, where the "
                    "likelihood hardly sees them. Lower their price lam (or the prior's demands), slow their learning "
                    "rate or start them further open, unless the site is meant to go.",
                    stacklevel=4,
                )

    def _is_checked(self, name: str, site: Site) -> bool:
        if site["type"] != "sample" or name in self._closed:
            return False
        return all(frame.full_size in (None, frame.size) for frame in site["cond_indep_stack"])


Program = Callable[..., object]
_Result = TypeVar("_Result")
Args = tuple[object, ...]
Kwargs = Mapping[str, object]


def log_prob(site: Site) -> Tensor:
    """Log probability of a recorded site's value under its scale and mask, in the shape of its batch."""
    log_prob = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    scaled: Tensor = scale_and_mask(log_prob, site["scale"], site["mask"])
    return scaled


def own_scale(site: Site) -> float | Tensor:
    """What multiplies a site's log density beside the scale of subsampled plates; a mask counts as 0 and 1.

    It has the shape of what is innermost in a distribution, whose own masks count too, or broadcasts against it.
    """
    mask, fn = site["mask"], site["fn"]
    scale: float | Tensor = site["scale"] / _plate_scale(site)
    scale = scale if mask is None else scale * torch.as_tensor(mask).to(torch.get_default_dtype())
    while isinstance(fn, Independent | MaskedDistribution | ExpandedDistribution):
        if isinstance(fn, Independent) and isinstance(scale, Tensor):
            scale = scale.reshape(scale.shape + (1,) * fn.reinterpreted_batch_ndims)
        elif isinstance(fn, MaskedDistribution):
            scale = scale * torch.as_tensor(fn._mask).to(torch.get_default_dtype())
        fn = fn.base_dist
    return scale


def _plate_scale(site: Site) -> float:
    scale = 1.0
    for frame in reversed(site["cond_indep_stack"]):  # in the order in which Pyro's plates multiply
        scale = scale * (frame.full_size or frame.size) / frame.size
    return scale


def is_scaled(site: Site) -> bool:
    """Whether a site's log density is multiplied by anything beside the scale of subsampled plates."""
    scale = own_scale(site)
    return bool((scale != 1).any()) if isinstance(scale, Tensor) else scale != 1


def without_scales(sites: Mapping[str, Site], slabs: Collection[str]) -> dict[str, Site]:
    """A model's sites, with the priors that scales and masks make of those of latent gates and normal variables.

    A density to a power is another density times a number, which is a factor of its own here. Other latents keep their
    scales; refuses slabs and gates that would.
    """
    found = dict(sites)
    for name, site in sites.items():
        if not is_drawn(site) or site["is_observed"] or not is_scaled(site):
            continue
        prior, power = innermost(site["fn"]), torch.as_tensor(own_scale(site))
        if isinstance(prior, BernoulliGate):
            new: TorchDistribution = BernoulliGate(logits=power * prior.logits, validate_args=False)
            log_norm = torch.logaddexp(power * prior.log_prob_zero, power * prior.log_prob_one)
        elif isinstance(prior, Normal) and bool((power > 0).all()):
            new = Normal(prior.loc, prior.scale / power.sqrt(), validate_args=False)
            log_norm = 0.5 * ((1 - power) * (2 * math.pi * prior.scale.square()).log() - power.log())
        elif name in slabs or find_gate(prior) is not None:
            what, wanted = ("slab", "Normal") if name in slabs else ("gate", "BernoulliGate")
            raise ValueError(
                f"Expected {what} site {name!r} under a scale or a mask to have a {wanted} prior that is proper, but "
                f"got {site['fn']} times {power.tolist()}. State the prior that is meant in the model, without a scale "
                "or a mask around it; masks of observations may stay."
            )
        else:
            continue
        shape, plates = site["fn"].batch_shape + site["fn"].event_shape, {"scale": _plate_scale(site), "mask": None}
        found[name] = {**site, **plates, "fn": new.expand(shape).to_event(site["fn"].event_dim)}
        number = Unit(log_norm.expand(shape).sum(), validate_args=False)
        of_number = {"fn": number, "value": number.sample(), "is_observed": True, "cond_indep_stack": (), "infer": {}}
        found[f"{name}, normaliser"] = {**site, **plates, **of_number, "name": f"{name}, normaliser"}
    return found


def sample_sites(trace: Trace) -> dict[str, Site]:
    """The sample sites of a run, but for those of plates."""
    return {name: site for name, site in trace.nodes.items() if is_drawn(site)}


def record_run(
    program: Program, args: Args, kwargs: Kwargs, step: int, values: Mapping[str, Site] | None = None
) -> Record:
    """Record a guide, or a model with the guide's sites as values; the step of the training is for messages."""
    record = Record(values)
    try:
        with record:
            returned = program(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        seen = Trace()
        for name, site in record.sites.items():
            seen.add_node(name, **site)
        # A guide of Pyro's runs the model at its first call.
        first = isinstance(program, AutoGuide) and program.prototype_trace is None
        what = "guide" if values is None and not first else "likelihood (nll) of the model"
        error.add_note(f"The {what} failed at step {step}, after these sites.\n{seen.format_shapes()}")
        raise
    if values is not None and not any(map(is_likelihood, record.sites.values())):
        refuse_without_likelihood(program, record.sites, returned, args, kwargs, is_first=step == 0)
    return record


def refuse_without_likelihood(
    model: Program, sites: Mapping[str, Site], returned: object, args: Args, kwargs: Kwargs, is_first: bool
) -> None:
    """Refuse a model without a likelihood that seems meant to have one: its loss would be the price of its gates alone.

    A model that takes no data, calls no network and returns no more than its draws may be meant as a prior. Whether it
    calls one shows in a further run, in the first step alone.
    """
    found = None
    for x in _leaves(returned):
        if x is not None and not any(x is site["value"] for site in sites.values()):
            what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            found = f"returns {what}; what a model returns is no part of the loss"
    if found is None and any(isinstance(x, Tensor) for x in _leaves([args, kwargs])):
        found = "is given data"
    if found is None and is_first:
        with Record(sites), _Parameters() as taken:
            model(*args, **kwargs)
        if taken.found:
            found = "has parameters to train"
    if found is not None:
        raise ValueError(
            f"Expected a likelihood, but the model has no observed site and no factor, and {found}: training would "
            "only close gates. State a likelihood by pyro.sample('y', distribution, obs=y), or a loss in nats, summed "
            "over the data, by pyro_l0.infer.factor('y', -loss) or pyro.factor."
        )


class _Parameters(TorchFunctionMode):
    """Notes whether a parameter takes part in a computation."""

    found = False

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        leaves = [x for x in _leaves([args, kwargs]) if isinstance(x, nn.Parameter)]
        self.found = self.found or any(x.requires_grad for x in leaves)
        return func(*args, **(kwargs or {}))


def check_arguments(args: Args, kwargs: Kwargs) -> None:
    """Refuse a minibatch without examples: every tensor among the arguments is empty."""
    shapes = [tuple(x.shape) for x in _leaves([args, kwargs]) if isinstance(x, Tensor)]
    if shapes and all(0 in shape for shape in shapes):
        raise ValueError(
            f"Expected at least one example, but the model's arguments are empty tensors of shapes {shapes}."
        )


def _leaves(value: object) -> Iterator[object]:
    """What nested lists, tuples and dicts hold."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield value


_NEW = {torch.empty, torch.empty_like, Tensor.new_empty, Tensor.new}


def over_particles(
    evaluate: Callable[[Record], dict[str, Tensor]],
    run_guide: Callable[[], Record],
    guide: object,
    number: int,
    mapped: bool,
) -> dict[str, Tensor]:
    """Numbers of a run for each of several particles, shape ``(number,)`` each.

    ``evaluate`` gives numbers of shape ``()`` by name, from a run of the guide. If ``mapped``, ``torch.vmap`` maps
    guide and model, which are written for one particle and need not broadcast; raises if it can't. The guide may have
    ``draw_together(number)``, which returns joint samples by site, or None.
    """
    if not mapped:
        found = [evaluate(run_guide()) for _ in range(number)]
        return {name: torch.stack([values[name] for values in found]) for name in found[0]}
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        run_guide()  # its first call runs the model, which can't be mapped then
    draw_together: Callable[[int], dict[str, JointSample] | None] | None = getattr(guide, "draw_together", None)
    together = None if draw_together is None else draw_together(number)
    try:
        # Checks of values can't be mapped; a guide's first call runs the model with them.
        with pyro.validation_enabled(False):
            if together is None:

                def run(particle: Tensor) -> dict[str, Tensor]:
                    with _MappedNoise(particle < 0):
                        return evaluate(run_guide())

                return torch.vmap(run, randomness="different")(torch.arange(number))
            # A row of parameters for each draw.
            tensors = {
                name: (part.values, *(x.expand(number, *x.shape[1:]) for x in part.parameters))
                for name, part in together.items()
            }

            def one(drawn: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
                record = Record()
                for name, (values, *parameters) in drawn.items():
                    part = together[name]._replace(values=values, parameters=tuple(parameters))
                    record.sample(name, *part.at_site({}))
                return evaluate(record)

            return torch.vmap(one, randomness="different")(tensors)
    except RuntimeError as error:
        if _is_of_vmap(error):
            error.add_note("Set vectorize_particles=False, which runs the model once for each particle.")
        raise


class _MappedNoise(TorchFunctionMode):
    """Lets ``torch.vmap`` fill new tensors at random, as a normal does with its noise: only mapped ones may differ."""

    def __init__(self, no: Tensor) -> None:
        super().__init__()
        self._no = no  # False for each particle

    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tensor:
        out = func(*args, **(kwargs or {}))
        return out + self._no if func in _NEW else out


def _is_of_vmap(error: RuntimeError) -> bool:
    """Whether ``torch.vmap`` can't map a function."""
    return any(text in str(error) for text in ("vmap", "functorch", "data pointer"))  # the last by Tensor.tolist


def can_be_mapped(
    evaluate: Callable[[Record], dict[str, Tensor]], run_guide: Callable[[], Record], guide: object
) -> bool:
    """Whether ``torch.vmap`` maps guide and model, with a warning if not; arguments as of :func:`over_particles`."""
    evaluate(run_guide())  # any other error is raised here
    try:
        over_particles(evaluate, run_guide, guide, 2, mapped=True)
    except RuntimeError as error:
        if not _is_of_vmap(error):
            raise
        warnings.warn(f"Particles are evaluated one by one, which takes longer. {error}", stacklevel=4)
        return False
    return True


def of_rows(
    function: Callable[..., _Result], *inputs: object, mapped: bool = True, at_once: int | None = None
) -> _Result:
    """A function of each row of some inputs, stacked: by ``torch.vmap``, or row by row where that can't map it."""
    if mapped:
        # Checks of values branch on what is mapped. An error that is the function's own is raised again below.
        with suppress(RuntimeError), pyro.validation_enabled(False):
            result: _Result = torch.vmap(function, randomness="different", chunk_size=at_once)(*inputs)
            return result
    leaves, spec = tree_flatten(inputs)
    rows = [function(*tree_unflatten(row, spec)) for row in zip(*leaves, strict=True)]
    stacked: _Result = tree_map(lambda *x: torch.stack(x), *rows)
    return stacked
