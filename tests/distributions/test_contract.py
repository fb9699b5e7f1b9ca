"""What every gate family promises: shapes, support, copies and precision; the law is in test_law.py."""

import copy
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributions import constraints, kl_divergence

from pyro_l0.distributions.gate import GateDistribution
from tests.cases import STATISTICS, build, columns, stack

interior = pytest.mark.interior  # a promise about densities and pathwise draws


def pathwise(gate):
    """The ways to draw with a derivative, if there are any."""
    return (gate.rsample,) if gate.has_rsample else ()


# --- shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_shape", [(), (4,), (3, 2)])
@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 1), (0,)])
def test_shapes(family, sample_shape, batch_shape):
    """Draws and their log_prob have sample_shape + batch_shape, every statistic has batch_shape."""
    gate = build(family, family.parameters[0], batch_shape=batch_shape)
    assert gate.batch_shape == batch_shape
    assert gate.event_shape == ()
    assert gate.shape(sample_shape) == sample_shape + batch_shape
    for draw in (gate.sample, *pathwise(gate)):
        value = draw(torch.Size(sample_shape))
        assert value.dtype == torch.float64
        for found in (value, gate.log_prob(value), gate.cdf(value), gate.icdf(value)):
            assert found.shape == sample_shape + batch_shape
    for found in (*(getattr(gate, name) for name in STATISTICS), gate.entropy()):
        assert found.shape == batch_shape


def test_every_parameter_is_constrained_and_brings_its_shape(family):
    """arg_constraints names every parameter, and infer_shapes tells from their shapes what the constructor will do."""
    names = list(family.parameters[0])
    assert set(family.gate.arg_constraints) == set(names)
    assert all(isinstance(x, constraints.Constraint) for x in family.gate.arg_constraints.values())
    shapes = dict(zip(names, [(3, 1), (2,), (), (1,)], strict=False))
    gate = family.gate(**{k: torch.full(s, family.parameters[0][k]) for k, s in shapes.items()})
    assert family.gate.infer_shapes(**shapes) == (gate.batch_shape, gate.event_shape)


def test_from_active_prob_has_that_probability(family):
    rate = torch.tensor([0.25, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(family.gate.from_active_prob(rate).active_prob, rate)


def test_shapes_that_are_refused(family):
    """Data that do not broadcast, events that are not there, and a batch of 3 as one of 2."""
    gate = build(family, family.parameters[0], batch_shape=(3,))
    with pytest.raises(ValueError, match=r"[Bb]roadcast"):
        gate.log_prob(torch.zeros(2))
    with pytest.raises(ValueError, match="reinterpreted_batch_ndims"):
        gate.to_event(2)
    with pytest.raises(ValueError, match="event_shape"):
        gate.to_event(1).log_prob(torch.zeros(3, 2))
    with pytest.raises((RuntimeError, ValueError), match="expand"):
        gate.expand((2,))


def test_parameters_broadcast_fully(family):
    """Each parameter and each statistic has the common shape, whichever parameter brought it."""
    for wide in family.parameters[0]:
        tensors = {
            name: torch.full((3, 1) if name == wide else (2,), value, dtype=torch.float64)
            for name, value in family.parameters[0].items()
        }
        gate = family.gate(**tensors)
        shape = torch.broadcast_shapes(*(x.shape for x in tensors.values()))
        assert gate.batch_shape == shape
        for name in STATISTICS:
            assert getattr(gate, name).shape == shape, (wide, name)
        assert gate.entropy().shape == shape
        assert gate.log_prob(torch.zeros(())).shape == shape
        assert gate.sample().shape == shape
        assert kl_divergence(gate, gate).shape == shape


def test_a_batch_is_its_members(family):
    """A batch of different parameters gives what each member gives alone."""
    batch = stack(family, family.parameters)
    members = [build(family, p) for p in family.parameters]
    for name in STATISTICS:
        alone = torch.stack([getattr(member, name) for member in members])
        # The batch shares one quadrature rule, that of its hardest member; 1e-9 is the accuracy
        # that the rule of docs/lab/derivations.md gives to the variance.
        torch.testing.assert_close(getattr(batch, name), alone, rtol=1e-9, atol=1e-12)
    value = torch.tensor([[0.0], [0.3], [1.0]], dtype=torch.float64)
    alone = torch.cat([member.log_prob(value) for member in members], -1)
    torch.testing.assert_close(batch.log_prob(value), alone, rtol=1e-12, atol=0)


def test_python_numbers_make_a_gate(family):
    """Plain floats are parameters too, in torch's default dtype."""
    gate = family.gate(**family.parameters[0])
    assert gate.batch_shape == ()
    assert gate.sample().dtype == torch.get_default_dtype()


# --- support and validation -------------------------------------------------------------------


def test_validation_can_be_switched_off(family):
    bad = {name: torch.tensor(math.nan) for name in family.parameters[0]}
    family.gate(**bad, validate_args=False)
    with pytest.raises(ValueError, match="invalid values"):
        family.gate(**bad, validate_args=True)
    gate = family.gate(**family.parameters[0], validate_args=False)
    gate.log_prob(torch.tensor(1.5))
    gate.expand((2,)).log_prob(torch.tensor(1.5))


def test_gates_say_what_they_are(case):
    """A gate has its atoms at the ends, is reparametrised or else enumerable, and prints what is no default."""
    gate = case.gate()
    assert isinstance(gate, GateDistribution)
    assert tuple(gate.atoms) == (0.0, 1.0)
    assert gate.has_rsample == case.family.interior
    assert gate.has_enumerate_support != case.family.interior
    usual = type(gate).from_active_prob(0.5).fixed_options
    shown = [f"{name}: {value}" for name, value in case.parameters.items() if value != usual.get(name)]
    assert repr(gate) == f"{type(gate).__name__}({', '.join(shown)})"


def test_fixed_parameters_have_defaults(family):
    """Those of the rate's gate, which are a paper's, for all three ways to make one; larger tensors print a shape."""
    learned = {name: torch.tensor([0.2, 0.6]) for name in family.gate.learned}
    gate = family.gate(**learned)
    assert gate.fixed_options == family.gate.from_active_prob(0.5).fixed_options
    assert gate.fixed_options == family.gate.closed().fixed_options
    expected = ", ".join(f"{name}: torch.Size([2])" for name in learned)
    assert repr(gate) == f"{family.gate.__name__}({expected})"


# --- expand, mask, to_event, copies -----------------------------------------------------------


def expansions(gate):
    """Every way to expand a gate of batch shape (2, 1)."""
    return {
        "by": gate.expand_by((4,)),
        "new dimension": gate.expand((4, 2, 1)),
        "existing dimension": gate.expand((2, 3)),
        "both": gate.expand(torch.Size((4, 2, 3))),
        "twice": gate.expand((2, 3)).expand((4, 2, 3)),
        "same": gate.expand((2, 1)),
        "list": gate.expand([4, 2, 3]),
    }


def test_expand_keeps_family_and_values(family):
    """An expanded gate is of the same class and gives the same numbers, in every form."""
    parameters = {k: torch.full((2, 1), v, dtype=torch.float64) for k, v in family.parameters[1].items()}
    gate = family.gate(**parameters)
    value = torch.tensor([[0.0], [0.3]], dtype=torch.float64)
    for form, expanded in expansions(gate).items():
        assert type(expanded) is family.gate, form
        shape = expanded.batch_shape
        for name in (*STATISTICS, *parameters):
            torch.testing.assert_close(getattr(expanded, name), getattr(gate, name).expand(shape), rtol=1e-14, atol=0)
        torch.testing.assert_close(expanded.entropy(), gate.entropy().expand(shape))
        torch.testing.assert_close(expanded.log_prob(value), gate.log_prob(value).expand(shape))
        for draw in (expanded.sample, *pathwise(expanded)):
            assert draw((5,)).shape == (5, *shape), form
        torch.testing.assert_close(kl_divergence(expanded, expanded), torch.zeros(shape).double())
        assert expanded._validate_args == gate._validate_args, form


def test_expand_shares_the_parameters(family):
    """Gradients flow from an expanded gate to the parameters of the original."""
    parameters = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in family.parameters[1].items()}
    family.gate(**parameters).expand((4,)).mean.sum().backward()
    for name, tensor in parameters.items():
        assert tensor.grad is not None, name
        assert tensor.grad != 0, name


def test_expand_keeps_what_a_user_changed(family):
    """A subclass stays what it is, and has_rsample_ set on one gate leaves the class alone."""
    sub = type("Sub", (family.gate,), {})
    assert type(sub(**family.parameters[0]).expand((3,))) is sub
    if family.interior:
        gate = family.gate(**family.parameters[0]).has_rsample_(False)
        assert gate.expand((2,)).has_rsample is gate.expand((2,)).expand((3, 2)).has_rsample is False
        assert family.gate.has_rsample is True


def test_pickle_and_deepcopy(gate):
    """Copies give the same numbers, those of a gate that has been used too."""
    value = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    for _ in range(2):
        for twin in (pickle.loads(pickle.dumps(gate)), copy.deepcopy(gate), copy.copy(gate)):
            assert type(twin) is type(gate)
            assert torch.equal(twin.log_prob(value), gate.log_prob(value))
            for name in STATISTICS:
                assert torch.equal(getattr(twin, name), getattr(gate, name)), name


# --- precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_are_computed_in_float32(family, dtype):
    """Half precision parameters give float32 results: those of the rounded parameters."""
    for parameters in family.parameters:
        if parameters.get("zeta", 2) - 1 < 0.05:
            continue  # 1.02 is no other number than 1 in bfloat16
        rounded = {k: torch.tensor(v, dtype=dtype).float() for k, v in parameters.items()}
        half = family.gate(**{k: v.to(dtype) for k, v in rounded.items()})
        full = family.gate(**rounded)
        for name in STATISTICS:
            value = getattr(half, name)
            assert value.dtype == torch.float32, name
            torch.testing.assert_close(value, getattr(full, name), rtol=1e-6, atol=1e-7)
        value = torch.tensor([0.0, 0.5, 1.0])
        assert half.entropy().dtype == torch.float32
        torch.testing.assert_close(half.log_prob(value), full.log_prob(value))
        for draw in (half.sample, *pathwise(half)):
            assert draw((3,)).dtype == torch.float32
        assert half.cdf(value).dtype == torch.float32
        assert half.icdf(value).dtype == torch.float32
        assert kl_divergence(half, full).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_receive_gradients(family, dtype):
    """Gradients come back in the parameter's own dtype."""
    parameters = {k: torch.tensor(v, dtype=dtype, requires_grad=True) for k, v in family.parameters[0].items()}
    gate = family.gate(**parameters)
    (gate.mean + gate.entropy() + sum(draw() for draw in pathwise(gate))).backward()
    for name, tensor in parameters.items():
        assert tensor.grad.dtype == dtype, name
        assert tensor.grad.isfinite(), name


def test_float32_extremes_are_finite(family):
    """Extreme parameters in float32: no NaN and no infinity in any value or gradient."""
    points = torch.tensor([0.0, 1e-7, 0.5, 1 - 6e-8, 1.0] if family.interior else [0.0, 1.0])
    quantities = {
        name: (lambda gate, name=name: getattr(gate, name)) for name in STATISTICS
    } | {
        "entropy": lambda gate: gate.entropy(),
        "log_prob": lambda gate: gate.log_prob(points.unsqueeze(-1)),
        "cdf": lambda gate: gate.cdf(points.unsqueeze(-1)),
        "icdf": lambda gate: gate.icdf(torch.tensor([1e-30, 1e-7, 0.5, 1 - 6e-8]).unsqueeze(-1)),
        "rsample": lambda gate: gate.rsample((1000,)),
    }  # fmt: skip
    if not family.interior:  # infinite, as they should be, and not there
        for name in ("log_interior_prob", "rsample"):
            del quantities[name]
    torch.manual_seed(22)
    for name, quantity in quantities.items():
        leaves = columns(family.extremes, torch.float32, requires_grad=True)
        value = quantity(family.gate(**leaves))
        assert value.isfinite().all(), (name, value)
        if not family.interior and not value.requires_grad:
            continue  # a step function of the parameters
        gradients = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert gradient is None or gradient.isfinite().all(), (name, leaf, gradient)


@interior
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log_prob_gradient_reaches_the_value(case, dtype):
    """The density is differentiable in z inside; at the atoms the derivative is 0, not NaN."""
    value = torch.tensor([0.0, 0.3, 1.0], dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(case.gate(dtype).log_prob(value).sum(), value)
    assert gradient.isfinite().all()
    assert gradient[0] == 0
    assert gradient[2] == 0


@pytest.mark.slow
def test_a_family_from_outside():
    """The class of docs/howto/own_family.md, in all shared tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "LogisticGate"]
    plugin = ["-p", "tests.distributions.own_family", str(Path(__file__).parent)]
    done = subprocess.run([*command, *plugin], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 200
