"""What every gate promises: a distribution on [0, 1] with atoms."""

from __future__ import annotations

import math
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from pyro.distributions import Independent
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints, transform_to
from torch.types import _size

from pyro_l0.maths import host
from pyro_l0.maths.quadrature import Nodes, Stretch
from pyro_l0.maths.special import cat_flat

__all__ = [
    "GateDistribution",
    "JointDraw",
    "Number",
    "as_parameters",
    "bounded",
    "check_rate",
    "concatenate",
    "find_gate",
    "inside_unit_interval",
    "open_uniform",
]

Number = float | Tensor


class _Bounded(constraints.Constraint):
    """Finite and strictly between two limits."""

    def __init__(self, lower: float, upper: float) -> None:
        self.lower = lower
        self.upper = upper
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return torch.isfinite(value) & (value > self.lower) & (value < self.upper)

    def __repr__(self) -> str:
        if self.lower > -math.inf:
            return f"finite and greater than {self.lower:g}"
        if self.upper < math.inf:
            return f"finite and less than {self.upper:g}"
        return "finite"


class _GateSupport(constraints.interval):
    """The unit interval with its ends, which carry mass: no smooth transform of the real line reaches them."""

    def __init__(self) -> None:
        super().__init__(0.0, 1.0)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return "Interval(lower_bound=0.0, upper_bound=1.0)"


def _refuse_to_transform(support: constraints.Constraint) -> Any:
    """What samplers and guides of continuous variables ask of a support.

    They hand over the support alone, so the site's name and gate are looked up where they went through the sites.
    """
    where, frame = "a gate site", sys._getframe(1)
    while frame is not None:
        here = frame.f_locals
        site: Any = here.get("site", here.get("node", {"name": here.get("name"), "fn": here.get("prior")}))
        gate = find_gate(site.get("fn")) if isinstance(site, dict) else None
        if gate is not None:
            where = f"gate site {site['name']!r}, a {type(gate).__name__}"
            break
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError(
        f"Expected a continuous variable for NUTS, HMC and guides such as AutoNormal or AutoDelta, but got {where}, "
        "which is exactly 0 or 1 with positive probability. Reparameterise each gate, as in pyro.poutine.reparam("
        "model, {'z': pyro_l0.infer.RectifyReparam()}), or use pyro_l0.infer.AutoGate with L0_ELBO."
    )


def _transform_to_start(support: constraints.Constraint) -> Any:
    """A first value of a site may come from a transform: a sampler draws it before it sees the reparameterisation."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "pyro.infer.autoguide.initialization":
            return transform_to(constraints.unit_interval)
        frame = frame.f_back  # type: ignore[assignment]
    return _refuse_to_transform(support)


biject_to.register(_GateSupport, _refuse_to_transform)
transform_to.register(_GateSupport, _transform_to_start)


def bounded(lower: float = -math.inf, upper: float = math.inf) -> constraints.Constraint:
    """The constraint of finite reals above ``lower`` and below ``upper``; torch's own admit infinities."""
    return _Bounded(lower, upper)


class GateDistribution(TorchDistribution):
    r"""A random multiplier on :math:`[0, 1]` that is exactly 0 or exactly 1 with positive probability.

    Densities are with respect to :math:`\delta_0 + \mathrm{Lebesgue}(0, 1) + \delta_1`: ``log_prob`` is a log mass
    at 0 and at 1 and a log density in between.

    A family lists its parameters in ``arg_constraints``, names those that a mean-field guide learns in ``learned``
    and writes the abstract methods. KLs to every other family, ``log_prob``, ``expand`` and the guides follow.

    Transforms of ``torch.func``, second derivatives and ``torch.compile(fullgraph=True)`` go through all of it (third
    derivatives of a mixture's draws and quantiles, and of draws of a tail, are not theirs). Under
    ``torch.vmap`` and ``torch.compile`` no Python code can tell whether a value is good, so that parameters, values and
    rates are not validated there; and ``torch.vmap`` refuses draws unless it is told ``randomness="different"`` or
    ``"same"``.

    Class attributes:
        atoms: the points of positive mass. A KL needs the same atoms on both sides.
        learned: name and constraint of each parameter that a mean-field guide learns; the first is a location.
    """

    support: constraints.Constraint = _GateSupport()
    has_rsample = True
    atoms: ClassVar[tuple[float, ...]] = (0.0, 1.0)
    learned: ClassVar[Mapping[str, constraints.Constraint]]

    def __init__(
        self, batch_shape: _size = torch.Size(), event_shape: _size = torch.Size(), validate_args: bool | None = None
    ) -> None:
        if any(isinstance(x, Tensor) and host.opaque(x) for x in self._state().values()):
            validate_args = False
        super().__init__(torch.Size(batch_shape), torch.Size(event_shape), validate_args=validate_args)

    def _validate_sample(self, value: Tensor) -> None:
        if not (isinstance(value, Tensor) and host.opaque(value)):
            super()._validate_sample(value)

    # ------------------------------------------------------------ what a family writes

    @property
    @abstractmethod
    def log_prob_zero(self) -> Tensor:
        """log P(z = 0), shape ``batch_shape``."""

    @property
    @abstractmethod
    def log_prob_one(self) -> Tensor:
        """log P(z = 1), shape ``batch_shape``."""

    @property
    @abstractmethod
    def log_interior_prob(self) -> Tensor:
        """log P(0 < z < 1), shape ``batch_shape``."""

    @property
    @abstractmethod
    def log_active_prob(self) -> Tensor:
        """log P(z != 0), shape ``batch_shape``."""

    @property
    @abstractmethod
    def test_gate(self) -> Tensor:
        """The deterministic gate that prunes, shape ``batch_shape``."""

    @property
    @abstractmethod
    def median(self) -> Tensor:
        """The smallest z with P(Z <= z) >= 1/2, shape ``batch_shape``."""

    @property
    @abstractmethod
    def stretch(self) -> Stretch | None:
        """Limits of the stretched variable, if it has any; quadrature uses their logit map."""

    @classmethod
    @abstractmethod
    def from_active_prob(cls, active_prob: Number, *args: Any, **options: Any) -> Self:
        """The gate of this family with P(z != 0) = ``active_prob``."""

    @abstractmethod
    def rsample_interior(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws of z given 0 < z < 1, shape ``sample_shape + batch_shape``."""

    @abstractmethod
    def base_distribution(self) -> TorchDistribution:
        """The continuous distribution on the real line that :meth:`rectify` turns into this gate."""

    @abstractmethod
    def rectify(self, value: Tensor) -> Tensor:
        """The gate's value for a draw of :meth:`base_distribution`."""

    @abstractmethod
    def _log_density(self, z: Tensor) -> Tensor:
        """Log density at 0 < z < 1."""

    @abstractmethod
    def _cdf(self, z: Tensor) -> Tensor:
        """P(Z <= z) at 0 <= z < 1."""

    @abstractmethod
    def _node_temperature(self) -> float:
        """Sharpness on the logit axis: the largest temperature of a hard concrete as hard to integrate.

        Infinity where that is not known, as parameters on a device are not.
        """

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Attributes that hold the parameters.

        Those in ``learned`` are tensors of shape ``batch_shape``; others are numbers or tensors that broadcast.
        """

    # ------------------------------------------------------------ what follows

    @property
    def active_prob(self) -> Tensor:
        """P(z != 0), shape ``batch_shape`` (eq. 12 of the L0 paper for the hard concrete)."""
        return torch.exp(self.log_active_prob)

    @property
    def least_active_prob(self) -> Tensor:
        """The smallest P(z != 0) to which learned parameters can bring this gate, shape ``batch_shape``."""
        return torch.zeros_like(self.log_active_prob)

    @classmethod
    def closed(cls, **options: Any) -> Self:
        """A gate of this family that is closed for good: P(z != 0) of 1e-6 or the least there is, and a test gate of 0.

        Args:
            **options: keywords of :meth:`from_active_prob`.
        """
        return cls.from_active_prob(torch.tensor(1e-6), **options)

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The parameters that a guide does not learn, as keywords of ``from_active_prob``."""
        return {}

    def log_prob(self, value: Tensor) -> Tensor:
        """Log mass at 0 and at 1, log density in between.

        Args:
            value: gate values, broadcast against ``batch_shape``.

        Raises:
            ValueError: a value is outside [0, 1] (when arguments are validated).
        """
        if self._validate_args:
            self._validate_sample(value)
        if value.requires_grad and self.has_rsample and not host.transformed():
            _warn_if_kl_is_sampled()
        interior = (value > 0) & (value < 1)
        # The unused branch of a where still sends a gradient; 1/2 keeps it finite.
        log_density = self._log_density(torch.where(interior, value, 0.5))
        log_atom = torch.where(value <= 0, self.log_prob_zero, self.log_prob_one)
        return torch.where(interior, log_density, log_atom)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Z <= value) on the whole line: right-continuous, with jumps at 0 and at 1."""
        inside = self._cdf(value.clamp(0, 1))
        return torch.where(value < 0, 0.0, torch.where(value >= 1, 1.0, inside))

    def expand(self, batch_shape: _size, _instance: Self | None = None) -> Self:
        """The same family over a larger batch; no memory is allocated."""
        batch_shape = torch.Size(batch_shape)
        new = type(self).__new__(type(self)) if _instance is None else _instance
        for name, value in self._state().items():
            setattr(new, name, value.expand(batch_shape) if name in self.learned else value)
        if "has_rsample" in self.__dict__:
            new.has_rsample = self.has_rsample
        Distribution.__init__(new, batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """This gate with every parameter that is a tensor changed, such as moved to another device."""
        new = type(self).__new__(type(self))
        for name, value in self._state().items():
            setattr(new, name, function(value) if isinstance(value, Tensor) else value)
        shape = getattr(new, next(iter(self.learned))).shape
        Distribution.__init__(new, shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def with_learned(self, **values: Tensor) -> Self:
        """This gate with other values of the learned parameters, unchecked; they share one shape.

        A guide calls this at every step, where checking would read the device back.
        """
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__, **values)
        new._batch_shape = next(iter(values.values())).shape
        return new

    @classmethod
    def draw_jointly(cls, gates: Sequence[Self]) -> JointDraw:
        """One pathwise draw of each of several gates that :func:`concatenate` accepts."""
        joint = concatenate(gates)
        assert joint is not None
        pieces = joint.rsample().split([gate.batch_shape.numel() for gate in gates])
        draws = [piece.view(gate.batch_shape) for piece, gate in zip(pieces, gates, strict=True)]
        return JointDraw(gates, draws, joint.active_prob)

    def _with_node_dim(self) -> Self:
        """This gate with a last batch dimension of size one, for quadrature nodes to broadcast against."""
        return self.apply_to_tensors(lambda x: x.unsqueeze(-1))

    def _log_density_in_t(self, nodes: Nodes, stretch: Stretch) -> Tensor:
        """Log density with respect to dt at the nodes of a stretch's logit map, shape ``batch_shape + (n,)``."""
        return self._with_node_dim()._log_density(nodes.z) + torch.log(nodes.slope)

    @property
    def _like(self) -> Tensor:
        """A parameter, for the type and the device of what is computed."""
        like: Tensor = getattr(self, next(iter(self.learned)))
        return like

    def _breakpoints(self) -> tuple[float, ...] | None:
        """Numbers in [0, 1] where a quadrature rule starts anew, None where only panels will do."""
        return ()

    def _panel_edges(self, dtype: torch.dtype) -> Tensor:
        """Places where panels end around this gate's mass and bends, for a result of a type.

        Values of z, those outside of [0, 1] being ignored; shape ``batch_shape + (k,)``, k for every parameter.
        """
        return torch.empty(0, dtype=torch.float64, device=self._like.device)


class JointDraw(NamedTuple):
    """Gates of several sites that were drawn together.

    Attributes:
        gates: the sites' gates.
        draws: a draw of each, in its shape.
        active_prob: P(z != 0) of all gates side by side, shape ``(n,)``.
    """

    gates: Sequence[GateDistribution]
    draws: Sequence[Tensor]
    active_prob: Tensor


def find_gate(fn: Any) -> GateDistribution | None:
    """The gate inside ``to_event``, ``mask`` and ``expand`` wrappers, or None."""
    while type(fn) is Independent:  # the usual wrapper; abstract classes answer isinstance slowly
        fn = fn.base_dist
    while not isinstance(fn, GateDistribution):
        inner = getattr(fn, "base_dist", None)
        if inner is None or isinstance(fn, torch.distributions.TransformedDistribution):
            return None
        fn = inner
    return fn


def concatenate(gates: Sequence[GateDistribution]) -> GateDistribution | None:
    """Several gates side by side as one of shape ``(n,)``, or None if no gate of their family is that.

    A layer has few gates, so that a formula takes as long as its operations take to be called and to be recorded
    for the gradient; one call for all layers saves most of it.
    """
    first = gates[0]
    kinds = [_kind(gate) for gate in gates]
    if kinds[0] is None or any(kind != kinds[0] for kind in kinds):
        return None
    return first.with_learned(**{name: cat_flat([getattr(gate, name) for gate in gates]) for name in first.learned})


def _kind(gate: GateDistribution) -> Any:
    """What gates have in common that can be one gate, None where it takes more than numbers."""
    options = tuple(gate.fixed_options.items())
    if any(isinstance(option, Tensor) for _, option in options):
        return None
    learned: Tensor = getattr(gate, next(iter(gate.learned)))
    return type(gate), options, learned.dtype, learned.device


def as_parameters(shared: Mapping[str, Number], **full: Number) -> tuple[list[Tensor], list[Number]]:
    """Bring a family's parameters to one floating type and one batch shape.

    Args:
        shared: parameters that need not have the batch's shape, by name. Numbers stay numbers, and so does a
            scalar tensor in main memory that needs no gradient; other tensors stay the objects they are.
        full: parameters that are expanded to the batch's shape, by name.

    Returns:
        The full parameters as tensors, and the shared ones. Half precision becomes float32, because atoms are
        found by exact comparison and bfloat16 rounds interior values to 1.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    named = {**full, **shared}
    tensors = [x for x in named.values() if isinstance(x, Tensor)]
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    if tensors:
        dtype = torch.float32
        for x in tensors:
            dtype = torch.promote_types(dtype, x.dtype)
    device = next((x.device for x in full.values() if isinstance(x, Tensor)), None)

    def convert(x: Number) -> Number:
        if not isinstance(x, Tensor):
            return float(x)
        if x.ndim == 0 and host.constant(x):
            return float(x)
        return x.to(dtype)

    shared_values = [convert(x) for x in shared.values()]
    full_values = [torch.as_tensor(x, dtype=dtype, device=device) for x in full.values()]
    try:
        batch_shape = torch.broadcast_shapes(
            *(x.shape for x in (*full_values, *shared_values) if isinstance(x, Tensor))
        )
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(torch.as_tensor(x).shape)}" for name, x in named.items())
        raise ValueError(f"Expected parameters whose shapes broadcast, but got {shapes}.") from error
    return [x.expand(batch_shape) for x in full_values], shared_values


def check_rate(name: str, value: float | Tensor, family: str, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse a probability outside the open range that a family can reach, if its values can be told.

    Raises:
        ValueError: a value is not strictly between ``low`` and ``high``.
    """
    rate = torch.as_tensor(value)
    if host.opaque(rate):
        return
    if not bool(((rate > low) & (rate < high)).all()):
        raise ValueError(
            f"Expected {name} strictly between {low:g} and {high:g}, the range that {family} can reach, "
            f"but got {value}."
        )


def open_uniform(shape: torch.Size, like: Tensor) -> Tensor:
    """Uniform draws that are never 0 or 1, of ``like``'s type and device."""
    return torch.rand(shape, dtype=like.dtype, device=like.device).clamp(min=torch.finfo(like.dtype).tiny)


def inside_unit_interval(z: Tensor) -> Tensor:
    """Keep interior draws off the atoms, which rounding may reach."""
    info = torch.finfo(z.dtype)
    return z.clamp(info.tiny, 1 - info.eps / 2)


_warned = False
# Estimators whose gradient has no bias on a gate: an analytic KL, and one that differentiates no sample.
_EXACT = ("TraceMeanField_ELBO", "ReweightedWakeSleep")


def _warn_if_kl_is_sampled() -> None:
    """Warn once when a Trace-style ELBO is about to differentiate a sampled gate KL.

    ELBOs give a distribution no sign of who asks for a log probability, so the callers are looked up: the guide's
    terms are computed by ``Trace.compute_score_parts``, a few frames below the ELBO.
    """
    global _warned
    if _warned:
        return
    frame = sys._getframe(2)
    for _ in range(4):  # Independent and masked wrappers, score_parts itself
        if frame is None or frame.f_code.co_name == "compute_score_parts":
            break
        frame = frame.f_back  # type: ignore[assignment]
    else:
        return
    while frame is not None:
        owner = frame.f_locals.get("self")
        kinds = [kind.__name__ for kind in type(owner).__mro__] if owner is not None else []
        if "ELBO" in kinds or "ReweightedWakeSleep" in kinds:
            if not any(kind in _EXACT for kind in kinds):
                _warned = True
                warnings.warn(
                    f"{kinds[0]} samples the KL of a gate, and the gradient of a sampled KL misses the mass that "
                    "crosses the atoms: it is biased, however many particles are drawn. Use pyro_l0.infer.L0_ELBO "
                    "or pyro.infer.TraceMeanField_ELBO, whose gate KL is exact.",
                    stacklevel=3,
                )
            return
        frame = frame.f_back  # type: ignore[assignment]
