"""What every gate promises: a distribution on [0, 1] with atoms, its parameters and its wrappers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from numbers import Real
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import torch
from pyro.distributions import ExpandedDistribution, Independent, MaskedDistribution, TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, SigmoidTransform, biject_to, constraints, transform_to
from torch.types import _size

from pyro_l0.expect import expect
from pyro_l0.maths import backend
from pyro_l0.maths.quadrature import Nodes, Stretch
from pyro_l0.maths.special import Number, cat_flat


class Bounded(constraints.Constraint):
    """Finite reals strictly between two limits; torch's own constraints admit infinities."""

    def __init__(self, lower: float = -math.inf, upper: float = math.inf) -> None:
        self.lower = lower
        self.upper = upper
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether each value is finite and strictly between the bounds, in its shape."""
        return torch.isfinite(value) & (value > self.lower) & (value < self.upper)

    def __repr__(self) -> str:
        if self.lower > -math.inf:
            return f"finite and greater than {self.lower:g}"
        if self.upper < math.inf:
            return f"finite and less than {self.upper:g}"
        return "finite"


def as_parameters(shared: Mapping[str, Number], **full: Number) -> tuple[list[Tensor], list[Number]]:
    """Bring a family's parameters to one floating type and one batch shape: the full ones, and those that are shared.

    Full ones become tensors of the batch's shape. Of shared ones numbers stay numbers, and so does a scalar tensor in
    main memory that needs no gradient; other tensors stay the objects they are. Half precision becomes float32, because
    atoms are found by exact comparison and bfloat16 rounds interior values to 1.
    """
    dtypes = [x.dtype for x in (*full.values(), *shared.values()) if isinstance(x, Tensor)] or [
        torch.get_default_dtype()
    ]
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    device = next((x.device for x in full.values() if isinstance(x, Tensor)), None)

    def convert(x: Number) -> Number:
        if not isinstance(x, Tensor):
            return float(x)
        if x.ndim == 0 and backend.constant(x):
            return float(x)
        return x.to(dtype)

    shared_values = [convert(x) for x in shared.values()]
    full_values = [torch.as_tensor(x, dtype=dtype, device=device) for x in full.values()]
    batch_shape = torch.broadcast_shapes(*(x.shape for x in (*full_values, *shared_values) if isinstance(x, Tensor)))
    return [x.expand(batch_shape) for x in full_values], shared_values


def check_rate(name: str, value: float | Tensor, family: str, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse a probability outside the open range that a family can reach, if its values are known."""
    expect(Real | Tensor, "a number or a tensor", **{name: value})
    rate = torch.as_tensor(value)
    if backend.opaque(rate):
        return
    if not bool(((rate > low) & (rate < high)).all()):
        raise ValueError(
            f"Expected {name} strictly between {low:g} and {high:g}, the range that {family} can reach, "
            f"but got {value}."
        )


class GateSupport(constraints.interval):
    """The unit interval with its ends, which carry mass: no smooth transform of the real line reaches them."""

    def __init__(self) -> None:
        super().__init__(0.0, 1.0)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return "Interval(lower_bound=0.0, upper_bound=1.0)"


class GateDistribution(TorchDistribution):
    r"""A random multiplier on :math:`[0, 1]` that is exactly 0 or exactly 1 with positive probability.

    Densities are with respect to :math:`\delta_0 + \mathrm{Lebesgue}(0, 1) + \delta_1`: ``log_prob`` is a log mass
    at 0 and at 1 and a log density in between, in nats. Parameters broadcast to ``batch_shape``, and those in half
    precision are computed in float32; ``rsample(sample_shape)`` gives ``sample_shape + batch_shape``.

    A family lists its parameters in ``arg_constraints``, names those that a mean-field guide learns in ``learned`` and
    the others in ``fixed``, and writes the abstract methods, also ``parameters_at_rate``, ``log_interior_density`` and
    ``interior_cdf``. KLs to every other family, ``log_prob``, ``expand`` and guides follow. ``mean``, ``variance``,
    ``entropy`` and ``icdf`` are
    torch's; override those that are needed.

    Everything works with ``torch.func``, second derivatives, ``torch.jit.trace`` and ``torch.compile(fullgraph=True)``,
    which up to torch 2.11 refuses some of it; third derivatives of a mixture's draws and quantiles, and of draws from a
    tail, are missing. Under ``torch.vmap`` and where torch traces no Python code can read a value, so parameters,
    values and rates are not validated there; ``torch.vmap`` needs ``randomness="different"`` or ``"same"`` for draws.

    Attributes:
        atoms: the points of positive mass. A KL needs the same atoms on both sides.
        learned: name and constraint of each parameter that a mean-field guide learns; the first is a location.
        defaults: the options of ``from_active_prob`` and their values, which are a paper's. Parameters in ``fixed``
            are among them, and each is kept in an attribute with an underscore.

    Raises:
        TypeError: ``validate_args`` is not True, False or None.
        ValueError: a parameter is outside its constraint.

    Example:
        >>> import pyro_l0
        >>> gate = pyro_l0.HardConcrete(torch.tensor([-4.0, 4.0]))  # one of the families
        >>> gate.log_prob_zero.exp(), gate.test_gate
        (tensor([0.9169, 0.0037]), tensor([0., 1.]))
    """

    support: constraints.Constraint = GateSupport()
    has_rsample = True
    atoms: ClassVar[tuple[float, ...]] = (0.0, 1.0)
    learned: ClassVar[Mapping[str, constraints.Constraint]]
    defaults: ClassVar[Mapping[str, float]] = {}
    fixed: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, batch_shape: _size = torch.Size(), event_shape: _size = torch.Size(), validate_args: bool | None = None
    ) -> None:
        expect(bool | None, "True, False or None", validate_args=validate_args)
        if any(isinstance(x, Tensor) and backend.opaque(x) for x in self._state().values()):
            validate_args = False
        super().__init__(torch.Size(batch_shape), torch.Size(event_shape), validate_args=validate_args)

    def __repr__(self) -> str:
        """The learned parameters, and the others that are not the defaults; of larger tensors the shape."""
        others = {k: x for k, x in self.fixed_options.items() if isinstance(x, Tensor) or x != self.defaults.get(k)}
        shown = {name: getattr(self, name) for name in self.learned} | others
        values = {name: x.shape if isinstance(x, Tensor) and x.numel() != 1 else x for name, x in shown.items()}
        return f"{type(self).__name__}({', '.join(f'{name}: {x}' for name, x in values.items())})"

    def _validate_sample(self, value: Tensor) -> None:
        if not (isinstance(value, Tensor) and backend.opaque(value)):
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
    def median(self) -> Tensor:
        """The smallest z with P(Z <= z) >= 1/2, shape ``batch_shape``."""

    @classmethod
    @abstractmethod
    def parameters_at_rate(cls, rate: Tensor, *args: Any, **options: Any) -> dict[str, Number]:
        """All parameters by name of the gate with P(z != 0) = rate, of its shape; options as in ``defaults``."""

    @abstractmethod
    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws, shape ``sample_shape + batch_shape``; a gate that has none refuses and has ``sample``."""

    @abstractmethod
    def log_interior_density(self, z: Tensor) -> Tensor:
        """Log density with respect to dz at 0 < z < 1, in nats; it is not asked for at the atoms."""

    @abstractmethod
    def interior_cdf(self, z: Tensor) -> Tensor:
        """P(Z <= z) at 0 <= z < 1, the atom at 0 included; shape of z and ``batch_shape``, broadcast."""

    # ------------------------------------------------------------ what follows

    @classmethod
    def from_active_prob(
        cls, active_prob: Number, *, validate_args: bool | None = None, **options: Number | None
    ) -> Self:
        """The gate of this family with P(z != 0) = ``active_prob``.

        Args:
            active_prob: wanted rate, of the shape that the gate gets: in (0, 1), and between the rates of the two
                components of a mixture.
            validate_args: whether the gate checks its arguments later on.
            **options: parameters that the rate does not determine, by name; the others are those of the class's
                ``defaults``.
                :class:`~pyro_l0.distributions.HardConcrete` also takes ``one_given_active``, the wanted
                P(z = 1 | z != 0), which determines the temperature.

        Raises:
            TypeError: the family has no such option.
            ValueError: a parameter is outside its constraint, or the family cannot reach the rate; the message states
                its range.

        Example:
            >>> from pyro_l0 import HardConcrete
            >>> HardConcrete.from_active_prob(0.1, one_given_active=0.8).log_prob_one.exp()
            tensor(0.0800)
        """
        expect(Real | Tensor, "a number or a tensor", active_prob=active_prob)
        given: dict[str, Number] = {**cls.defaults, **{name: x for name, x in options.items() if x is not None}}
        full = {name: x for name, x in given.items() if name in cls.learned}
        (rate, *values), _ = as_parameters({}, active_prob=active_prob, **full)
        parameters = cls.parameters_at_rate(rate, **{**given, **dict(zip(full, values, strict=True))})
        check_rate("active_prob", active_prob, cls.__name__)  # a family with a range of its own has checked it
        make: Callable[..., Self] = cls
        return make(**parameters, validate_args=validate_args)

    @classmethod
    def from_logits(cls, logits: Tensor, **options: Any) -> Self:
        """The gate of this family whose P(z != 0) has the given logits, shape ``batch_shape``.

        Logits beyond ±15 count as ±15, except for hard concretes.

        Args:
            logits: log odds of an open gate, such as the output of a network.
            **options: keywords of :meth:`from_active_prob`.
        """
        return cls.from_active_prob(torch.sigmoid(logits.clamp(-15, 15)), **options)

    @property
    def test_gate(self) -> Tensor:
        """The deterministic gate that prunes, shape ``batch_shape``; the median, if a family has no other."""
        return self.median

    @property
    def stretch(self) -> Stretch | None:
        """Limits of the stretched variable, None if it has none; quadrature uses their logit map."""
        return None

    def _state(self) -> dict[str, object]:
        """Attributes that hold the parameters.

        Those in ``learned`` are tensors of shape ``batch_shape``; others are numbers or tensors that broadcast.
        """
        return {name: getattr(self, name) for name in (*self.learned, *(f"_{name}" for name in self.fixed))}

    @property
    def active_prob(self) -> Tensor:
        """P(z != 0), shape ``batch_shape`` (eq. 12 of the L0 paper for the hard concrete)."""
        return torch.exp(self.log_active_prob)

    @property
    def active_slope(self) -> Tensor:
        """Derivative of P(z != 0) in the location, the first learned parameter; shape ``batch_shape``, no gradient."""
        name = next(iter(self.learned))
        with torch.enable_grad():
            location = getattr(self, name).detach().requires_grad_()
            probs = self.with_learned(**{key: getattr(self, key).detach() for key in self.learned} | {name: location})
            slope: Tensor = torch.autograd.grad(probs.active_prob.sum(), location)[0]
        return slope

    @property
    def least_active_prob(self) -> Tensor:
        """The smallest P(z != 0) that this gate's learned parameters can reach, shape ``batch_shape``."""
        return torch.zeros_like(self.log_active_prob)

    @classmethod
    def closed(cls, **options: Any) -> Self:
        """A gate of this family that is closed for good: P(z != 0) is 1e-6 or its minimum, and the test gate is 0.

        Args:
            **options: keywords of :meth:`from_active_prob`.
        """
        return cls.from_active_prob(torch.tensor(1e-6), **options)

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The parameters that a guide does not learn, as keywords of ``from_active_prob``."""
        return {name: getattr(self, f"_{name}") for name in self.fixed}

    def base_distribution(self) -> Distribution:
        """The continuous distribution on the real line that :meth:`rectify` turns into this gate.

        Raises:
            NotImplementedError: this family has none.
        """
        raise NotImplementedError(
            f"Expected {type(self).__name__} to have a base_distribution(), that of x where z = min(1, max(0, x)), but "
            "it has none; write it, or use a family that has."
        )

    def rectify(self, value: Tensor) -> Tensor:
        """The gate's value for a draw of :meth:`base_distribution`."""
        return value.clamp(0, 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log mass at 0 and at 1, log density in between; in nats.

        Args:
            value: gate values, broadcast against ``batch_shape``.

        Raises:
            ValueError: a value is outside [0, 1] (when arguments are validated).
        """
        if self._validate_args:
            self._validate_sample(value)
        interior = (value > 0) & (value < 1)
        # The unused branch of a where still sends a gradient; 1/2 keeps it finite.
        log_density = self.log_interior_density(torch.where(interior, value, 0.5))
        log_atom = torch.where(value <= 0, self.log_prob_zero, self.log_prob_one)
        return torch.where(interior, log_density, log_atom)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Z <= value) for any real ``value``: right-continuous, with jumps at 0 and at 1."""
        inside = self.interior_cdf(value.clamp(0, 1))
        return torch.where(value < 0, 0.0, torch.where(value >= 1, 1.0, inside))

    def expand(self, batch_shape: _size, _instance: Self | None = None) -> Self:
        """The same family over a larger batch; no memory is allocated."""
        batch_shape = torch.Size(batch_shape)
        new = type(self).__new__(type(self)) if _instance is None else _instance
        for name, value in self._state().items():
            if (isinstance(value, Tensor) and name in self.learned) or isinstance(value, Distribution):
                value = value.expand(batch_shape)
            setattr(new, name, value)
        if "has_rsample" in self.__dict__:
            new.has_rsample = self.has_rsample
        Distribution.__init__(new, batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """This gate with ``function`` applied to every parameter that is a tensor, for instance to move it."""
        new = type(self).__new__(type(self))
        for name, value in self._state().items():
            setattr(new, name, function(value) if isinstance(value, Tensor) else value)
        Distribution.__init__(new, new._like.shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def with_learned(self, **values: Tensor) -> Self:
        """This gate with other learned parameters, all of one shape.

        They are not checked: a guide calls this at every step, and a check would wait for the device.
        """
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__, **values)
        new._batch_shape = next(iter(values.values())).shape
        return new

    def on_real_line(self) -> dict[str, Tensor]:
        """The learned parameters by name, each mapped from its constraint to the real line."""
        return {key: transform_to(constraint).inv(getattr(self, key)) for key, constraint in self.learned.items()}

    def from_real_line(self, values: Mapping[str, Tensor]) -> Self:
        """This gate with learned parameters given on the real line, as :meth:`on_real_line` returns them."""
        learned = {
            key: values[key] if constraint is constraints.real else transform_to(constraint)(values[key])
            for key, constraint in self.learned.items()
        }
        return self.with_learned(**learned)

    @classmethod
    def draw_jointly(cls, gates: Sequence[Self]) -> JointDraw:
        """Draw once from each of several gates with equal other parameters, which are numbers; pathwise."""
        joint = concatenate(gates)
        assert joint is not None
        pieces = joint.rsample().split([gate.batch_shape.numel() for gate in gates])
        draws = [piece.view(gate.batch_shape) for piece, gate in zip(pieces, gates, strict=True)]
        return JointDraw(gates, draws, joint.active_prob)

    def with_node_dim(self) -> Self:
        """This gate with a last batch dimension of size one, for quadrature nodes to broadcast against."""
        return self.apply_to_tensors(lambda x: x.unsqueeze(-1))

    def _log_density_in_t(self, nodes: Nodes, stretch: Stretch) -> Tensor:
        """Log density with respect to dt at the nodes of a stretch's logit map, shape ``batch_shape + (n,)``."""
        return self.with_node_dim().log_interior_density(nodes.z) + torch.log(nodes.slope)

    @property
    def _like(self) -> Tensor:
        """A parameter, for the type and the device of what is computed."""
        like: Tensor = getattr(self, next(iter(self.learned)))
        return like

    def _filled(self, value: Number) -> Tensor:
        """A parameter in the batch's shape."""
        like = self._like
        return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(like.shape)

    def _node_temperature(self) -> float:
        """Sharpness on the logit axis: the largest temperature of a hard concrete as hard to integrate.

        Infinity where that is not known, as parameters on a device are not.
        """
        return math.inf

    def _breakpoints(self) -> tuple[float, ...] | None:
        """Numbers in [0, 1] where a quadrature rule starts anew, None where only panels are accurate."""
        return ()

    def panel_edges(self, dtype: torch.dtype) -> Tensor:
        """Points where panels end around this gate's mass and bends, for a result of a type.

        Values of z, those outside of [0, 1] being ignored; shape ``batch_shape + (k,)``, k for every parameter.
        """
        return torch.empty(0, dtype=torch.float64, device=self._like.device)


class JointDraw(NamedTuple):
    """Values of the gates of several sites that were drawn together."""

    gates: Sequence[GateDistribution]
    draws: Sequence[Tensor]  # one of each, in its shape
    active_prob: Tensor  # of all gates side by side, shape (n,)


def probability(value: Tensor) -> Tensor:
    """A probability as it is, and NaN outside of [0, 1], where no gate has a quantile."""
    return torch.where((value >= 0) & (value <= 1), value, math.nan)


def concatenate(gates: Sequence[GateDistribution]) -> GateDistribution | None:
    """Several gates side by side as one of shape ``(n,)``, or None if their family cannot express it.

    A layer has few gates, so that a formula takes as long as its operations take to be called and to be recorded
    for the gradient; one call for all layers saves most of it.
    """
    first = gates[0]
    kinds = [_kind(gate) for gate in gates]
    if kinds[0] is None or any(kind != kinds[0] for kind in kinds):
        return None
    return first.with_learned(**{name: cat_flat([getattr(gate, name) for gate in gates]) for name in first.learned})


def sum_open(active_prob: Tensor, prices: Sequence[Number], sizes: Sequence[int]) -> Tensor:
    """Sum of P(z != 0), or of a multiple of it, of gates side by side times the price of their site; shape ``()``."""
    # The compiler warns of a cache, and needs none.
    make = side_by_side.__wrapped__ if torch.compiler.is_compiling() else side_by_side
    each = make(tuple(map(float, prices)), tuple(sizes), active_prob.dtype, active_prob.device)
    return torch.dot(each, active_prob)


@lru_cache(maxsize=16)
def side_by_side(values: tuple[float, ...], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Each value as often as its size says, in one vector."""
    return torch.cat([torch.full((n,), x, dtype=dtype, device=device) for x, n in zip(values, sizes, strict=True)])


def _kind(gate: GateDistribution) -> tuple[object, ...] | None:
    """What gates have in common that can be one gate, None where it takes more than numbers."""
    options = tuple(gate.fixed_options.items())
    if not gate.learned or any(isinstance(option, Tensor) for _, option in options):
        return None
    like = gate._like
    return type(gate), options, like.dtype, like.device


def find_gate(fn: object) -> GateDistribution | None:
    """The gate inside ``to_event``, ``mask`` and ``expand`` wrappers, or None."""
    while type(fn) is Independent:  # the usual wrapper; abstract classes answer isinstance slowly
        fn = fn.base_dist
    while not isinstance(fn, GateDistribution):
        inner = getattr(fn, "base_dist", None)
        if inner is None or isinstance(fn, torch.distributions.TransformedDistribution):
            return None
        fn = inner
    return fn


def inside_events(fn: Any) -> Any:
    """The distribution inside of ``to_event``, at any depth, with its own batch shape."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return fn


def active_prob(fn: Any) -> Tensor:
    """P(z != 0) of every gate of a site, 0 where a masked distribution masks it."""
    if isinstance(fn, GateDistribution):
        return fn.active_prob
    active = active_prob(fn.base_dist)
    if isinstance(fn, MaskedDistribution):
        mask = fn._mask
        if isinstance(mask, Tensor):
            mask = mask.expand(fn.batch_shape).reshape(fn.batch_shape + (1,) * fn.event_dim)
        return active * mask
    return active


def innermost(fn: object) -> object:
    """What is inside of ``to_event``, ``mask`` and ``expand``."""
    while isinstance(fn, Independent | MaskedDistribution | ExpandedDistribution):
        fn = fn.base_dist
    return fn


def rewrap(fn: Any, new: Any) -> TorchDistribution:
    """A distribution in a gate's wrappers, instead of the gate."""
    if isinstance(fn, GateDistribution):
        inner: TorchDistribution = new
        return inner
    wrapped = rewrap(fn.base_dist, new)
    if isinstance(fn, MaskedDistribution):
        wrapped = wrapped.mask(fn._mask)
    elif isinstance(fn, torch.distributions.Independent):
        wrapped = wrapped.to_event(fn.reinterpreted_batch_ndims)
    else:
        wrapped = wrapped.expand(fn.batch_shape)
    return wrapped


def _refuse_to_transform(support: constraints.Constraint) -> NoReturn:
    """Answers samplers and guides of continuous variables, which ask a support for its transform.

    They pass the support alone, which knows no site.
    """
    raise ValueError(
        "Expected a continuous variable for NUTS, HMC and guides such as AutoNormal or AutoDelta, but got a gate, "
        "which is exactly 0 or 1 with positive probability. Sample it with pyro_l0.infer.sample_posterior; or "
        "reparameterise each gate but a BernoulliGate, as in pyro.poutine.reparam(model, {'z': "
        "pyro_l0.infer.reparam.RectifyReparam()}), or use pyro_l0.infer.AutoGate with L0_ELBO."
    )


class _Start(SigmoidTransform):
    """Gives a gate's first value: a sampler draws it before it sees the reparameterisation. Nothing learns by it."""

    def _call(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            _refuse_to_transform(GateDistribution.support)
        value: Tensor = super()._call(x)  # type: ignore[no-untyped-call]
        return value


biject_to.register(GateSupport, _refuse_to_transform)
transform_to.register(GateSupport, lambda support: _Start())
