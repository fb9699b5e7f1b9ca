"""torch.func, second derivatives and whole-graph compilation, through everything that a gate computes."""

import pyro
import pytest
import torch
from pyro.infer import SVI, JitTraceMeanField_ELBO
from torch.autograd.functional import hessian
from torch.distributions import kl_divergence

from pyro_l0.distributions import (
    BernoulliGate,
    ExponentialGate,
    ExponentialUniformGate,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    RectifiedNormal,
)
from pyro_l0.infer import AutoGate
from tests.cases import new_compiler
from tests.processes import python

# torch's forward mode loads decompositions by its own deprecated torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

FAMILIES = {
    HardConcrete: dict(log_alpha=0.4, temperature=0.7, gamma=-0.2, zeta=1.3),
    RectifiedNormal: dict(loc=0.3, scale=0.5),
    HardKumaraswamy: dict(concentration1=0.6, concentration0=0.8),
    ExponentialGate: dict(logits=0.3, beta=6.0),
    ExponentialUniformGate: dict(logits=0.3, beta=8.0, epsilon=0.2),
    PowerLawGate: dict(logits=0.3, beta=5.0),
}
OTHERS = {BernoulliGate: dict(logits=0.3)}
STATISTICS = ("active_prob", "log_prob_zero", "log_prob_one", "log_interior_prob", "mean", "variance", "median")
ATOMS_AND_INSIDE = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
ids = {"ids": lambda family: family.__name__}


def double(values):
    return torch.tensor(list(values), dtype=torch.float64)


def make(family, x):
    """A gate from the vector of its parameters."""
    return family(**dict(zip((FAMILIES | OTHERS)[family], x.unbind(), strict=True)))


def kls(q):
    """KLs to and from other gates: one of its own kind, one that takes panels, one that takes a rule."""
    total = 0.0
    for family in {type(q), RectifiedNormal, HardConcrete}:
        p = make(family, double(FAMILIES[family].values()) + 0.02)
        total = total + kl_divergence(q, p) + kl_divergence(p, q)
    return total


def quantities(family):
    """Everything with derivatives that a gate has, as functions of the vector of its parameters."""
    found = {name: (lambda gate, name=name: getattr(gate, name)) for name in (*STATISTICS, "test_gate")}
    found["entropy"] = lambda gate: gate.entropy()
    found["log_prob"] = lambda gate: gate.log_prob(ATOMS_AND_INSIDE).sum()
    found["icdf"] = lambda gate: gate.icdf(double([0.35, 0.5, 0.6])).sum()
    found["kl"] = kls
    if family is BernoulliGate:
        del found["log_interior_prob"]  # minus infinity
        found["log_prob"] = lambda gate: gate.log_prob(double([0.0, 1.0])).sum()
        found["kl"] = lambda gate: kl_divergence(gate, HardConcrete(double([0.1])[0]))
    return {name: lambda x, of=of: of(make(family, x)) for name, of in found.items()}


def slope(function, x):
    """The plain gradient, zeros where there is none."""
    x = x.clone().requires_grad_()
    value = function(x)
    if not value.requires_grad:
        return torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(value, x, allow_unused=True)
    return torch.zeros_like(x) if gradient is None else gradient


def differences(function, x, step):
    """Central differences of a function of a vector, one row per entry."""
    rows = [(function(x + step * e) - function(x - step * e)) / (2 * step) for e in torch.eye(len(x)).double()]
    return torch.stack(rows)


def agree(name, actual, expected, tolerance):
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance * size, msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.parametrize("family", FAMILIES | OTHERS, **ids)
def test_transforms_give_what_autograd_gives(family):
    """Gradients, forward derivatives and maps of every quantity, beside differences of its value."""
    x = double((FAMILIES | OTHERS)[family].values())
    many = torch.stack([x, x + 0.01])
    for name, function in quantities(family).items():
        expected = slope(function, x)
        agree(f"{name} by differences", expected, differences(function, x, 1e-5), 1e-6)
        agree(f"grad of {name}", torch.func.grad(function)(x), expected, 1e-8)
        agree(f"jacrev of {name}", torch.func.jacrev(function)(x), expected, 1e-8)
        agree(f"jacfwd of {name}", torch.func.jacfwd(function)(x), expected, 1e-7)
        agree(f"vmap of {name}", torch.vmap(function)(many), torch.stack([function(y) for y in many]), 1e-8)
        each = torch.vmap(torch.func.grad(function))(many)
        agree(f"vmap of grad of {name}", each, torch.stack([slope(function, y) for y in many]), 1e-7)


@pytest.mark.parametrize("family", FAMILIES | OTHERS, **ids)
def test_second_derivatives(family):
    """Of every quantity, by differences of its gradient, through autograd and through torch.func."""
    x = double((FAMILIES | OTHERS)[family].values())
    for name, function in quantities(family).items():
        expected = differences(lambda x, function=function: slope(function, x), x, 1e-6)
        agree(f"autograd's {name}", hessian(function, x), expected, 1e-6)
        agree(f"torch.func's {name}", torch.func.hessian(function)(x), expected, 1e-6)


@pytest.mark.parametrize("family", FAMILIES, **ids)
def test_second_derivatives_of_draws(family):
    """A draw is the quantile of its own probability, whose second derivatives it has however it was made.

    Also in the location alone, with the other parameters as numbers, the way that a guide draws.
    """
    x = double(FAMILIES[family].values())
    location, *names = FAMILIES[family]
    numbers = {name: FAMILIES[family][name] for name in names}

    def drawn(x):
        torch.manual_seed(95)
        return (make(family, x).rsample((30,)) ** 2).sum()

    def drawn_by_a_guide(first):
        torch.manual_seed(95)
        return (family(**{location: first}, **numbers).rsample((30,)) ** 2).sum()

    with torch.no_grad():
        torch.manual_seed(95)
        gate = make(family, x)
        z = gate.rsample((30,))
        inside = z[(z > 0) & (z < 1)]
        assert len(inside) > 5
        share = gate.cdf(inside)

    def quantiles(x):
        return (make(family, x).icdf(share) ** 2).sum()

    agree("grad", torch.func.grad(drawn)(x), slope(quantiles, x), 1e-8)
    agree("plain grad", slope(drawn, x), slope(quantiles, x), 1e-8)
    expected = differences(lambda x: slope(quantiles, x), x, 1e-6)
    second = hessian(drawn, x)
    agree("autograd", second, expected, 2e-6)
    torch.testing.assert_close(hessian(drawn_by_a_guide, x[0]), second[0, 0], rtol=1e-7, atol=1e-9)
    agree("torch.func", torch.func.jacrev(torch.func.grad(drawn))(x), expected, 2e-6)


@pytest.mark.parametrize("family", FAMILIES, **ids)
def test_draws_under_vmap(family):
    """They are as many as are asked for, and torch refuses to guess whether they differ."""
    x = double(FAMILIES[family].values()).repeat(3, 1)

    def drawn(x):
        return make(family, x).rsample((50,)).clone()

    same, different = (torch.vmap(drawn, randomness=kind)(x) for kind in ("same", "different"))
    assert same.shape == different.shape == (3, 50)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    slopes = torch.vmap(torch.func.grad(lambda x: drawn(x).sum()), randomness="different")(x)
    assert slopes.isfinite().all()
    with pytest.raises(RuntimeError, match="use the 'same' or 'different' randomness flags"):
        torch.vmap(drawn)(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("family", FAMILIES | OTHERS, **ids)
def test_traces_are_of_any_parameters(family):
    """``torch.jit.trace``, by which Pyro's Jit ELBOs run: values and gradients at other parameters, draws included."""
    x = double((FAMILIES | OTHERS)[family].values())
    found = {"mean": lambda gate: gate.mean, "kl": lambda gate: kl_divergence(gate, HardConcrete(*double([0.1, 0.5])))}
    if family is BernoulliGate:
        found["kl to itself"] = lambda gate: kl_divergence(gate, family(0.3))
    if family in FAMILIES:
        found["kl from another"] = lambda gate: kl_divergence(RectifiedNormal(*double([0.3, 0.5])), gate)
        found["draw"] = lambda gate: (gate.rsample((30,)) ** 2).sum()
    for name, quantity in found.items():

        def function(x, quantity=quantity):
            return quantity(make(family, x)) + 0 * x.sum()

        def seeded(x, function=function):
            torch.manual_seed(98)
            return function(x)

        traced = torch.jit.trace(function, (x.clone().requires_grad_(),), check_trace=False)
        agree(f"trace of {name}", seeded(0.8 * x, traced), seeded(0.8 * x), 1e-8)
        gradient = slope(lambda x, traced=traced, seeded=seeded: seeded(x, traced), 0.8 * x)
        agree(f"gradient of the trace of {name}", gradient, slope(seeded, 0.8 * x), 1e-7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", [HardConcrete, ExponentialGate, PowerLawGate], **ids)
def test_pyros_jit_elbo(family):
    """Without data it is minus the KL, which is exact, and goes on being so as the guide is trained."""

    def model():
        pyro.sample("z", RectifiedNormal(torch.tensor(0.3), 0.5))

    guide = AutoGate(model, family)
    guide()
    steps = SVI(model, guide, pyro.optim.Adam({"lr": 0.5}), JitTraceMeanField_ELBO(ignore_jit_warnings=True))
    for _ in range(3):
        kl = kl_divergence(guide.posterior()["z"], RectifiedNormal(0.3, 0.5))
        assert steps.step() == pytest.approx(kl.item(), rel=1e-5)


def test_what_vmap_cannot_validate():
    """Nothing can be branched on, so that parameters, values and rates pass; outside they are refused."""
    scales, rates = double([0.5, -1.0]), double([0.2, 2.0])
    values = torch.vmap(lambda s: RectifiedNormal(0.5, s, validate_args=True).log_prob_zero)(scales)
    torch.testing.assert_close(values[0], RectifiedNormal(0.5, scales[0]).log_prob_zero)
    with pytest.raises(ValueError, match="scale"):
        torch.func.grad(lambda s: RectifiedNormal(0.5, s, validate_args=True).log_prob_zero)(scales[1])
    gate = HardConcrete(double([0.1])[0], validate_args=True)
    assert torch.vmap(gate.log_prob)(double([0.5, 1.0])).isfinite().all()
    assert torch.vmap(lambda rate: HardConcrete.from_active_prob(rate).active_prob)(rates)[0] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="active_prob strictly between 0 and 1"):
        HardConcrete.from_active_prob(rates)


def test_a_scalar_temperature_keeps_its_forward_derivative():
    """A scalar constant becomes a number, but one with a tangent must not, which would be lost without a word."""
    at = torch.tensor(0.7, dtype=torch.float64)
    of = torch.tensor(0.4, dtype=torch.float64)
    _, tangent = torch.func.jvp(lambda t: HardConcrete(of, t).median, (at,), (torch.ones_like(at),))
    leaf = at.clone().requires_grad_()
    torch.testing.assert_close(tangent, torch.autograd.grad(HardConcrete(of, leaf).median, leaf)[0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(at, torch.ones_like(at))
        found = torch.autograd.forward_ad.unpack_dual(HardConcrete(of, dual).median).tangent
    torch.testing.assert_close(found, tangent)


def test_draws_of_several_sites_under_a_transform():
    """The joint draw of a guide's gates is that of the plain program at the same seed."""

    def cost(x):
        torch.manual_seed(97)
        joint = HardConcrete.draw_jointly([HardConcrete(x), HardConcrete(2 * x[:2])])
        return sum((draw**2).sum() for draw in joint.draws) + joint.active_prob.sum()

    x = torch.tensor([0.3, -0.4, 1.0])
    torch.testing.assert_close(torch.func.grad(cost)(x), slope(cost, x))


# --- torch.compile --------------------------------------------------------------------------------


COMPILED = {
    "kl": lambda x: kl_divergence(HardConcrete(x), HardConcrete(torch.tensor(-1.0))),
    "kl with numbers": lambda x: kl_divergence(HardConcrete(x, 0.5), HardConcrete(-1.0, 0.5)),
    "kl by a rule": lambda x: kl_divergence(HardConcrete(x, 0.5), HardConcrete(-1.0, 0.7)),
    "kl by panels": lambda x: kl_divergence(HardConcrete(x, 300.0), RectifiedNormal(0.5, 0.1)),
    "kl of events": lambda x: kl_divergence(
        HardConcrete(x).to_event(1), HardConcrete(torch.tensor(-1.0)).expand([5]).to_event(1)
    ),
    "mean": lambda x: HardConcrete(x).mean,
    "mean of a learned temperature": lambda x: HardConcrete(0.5, x.exp()).mean,
    "draw": lambda x: HardConcrete(x).rsample((3,)),
    "log_prob": lambda x: HardConcrete(x).log_prob(torch.tensor(0.3)),
    "icdf": lambda x: HardConcrete(x, 0.7).icdf(torch.tensor(0.5)),
    "variance and entropy": lambda x: HardConcrete(x).variance + HardConcrete(x).entropy(),
    "moments of rectified normals": lambda x: RectifiedNormal(x, 0.5).mean + RectifiedNormal(x, 0.5).variance,
    "entropy of rectified normals": lambda x: RectifiedNormal(x, 0.5).entropy(),
    "kl of rectified normals": lambda x: kl_divergence(RectifiedNormal(x, 0.5), RectifiedNormal(0.2, 0.6)),
    "rate": lambda x: HardConcrete.from_active_prob(x.sigmoid()).active_prob,
    "kl of hard Kumaraswamys": lambda x: kl_divergence(HardKumaraswamy(x.exp(), 1.0), HardKumaraswamy(0.5, 0.3)),
    "kl of exponential mixtures": lambda x: kl_divergence(ExponentialGate(x, 20.0), ExponentialGate(0.5, 20.0)),
}


def check_compiled(name, backend):
    """One graph without breaks that gives the plain program's value and gradient."""
    torch.compiler.reset()
    function = COMPILED[name]
    x = torch.linspace(-1, 1, 5, requires_grad=True)

    def run(function):
        torch.manual_seed(98)
        value = function(x)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(compiled), run(function), rtol=2e-5, atol=2e-6)


@new_compiler
@pytest.mark.parametrize("name", COMPILED)
def test_gates_are_one_graph(name):
    """With the backend that is quick: nothing but torch's own operations is left."""
    check_compiled(name, "eager")


FRESH = """
import torch
from torch.distributions import kl_divergence, register_kl
from pyro_l0.distributions import HardConcrete

def value(x):
    return kl_divergence(HardConcrete(x), HardConcrete(-1.0)).sum()

x = torch.zeros(3)
compiled = torch.compile(value, fullgraph=True, backend="eager")
print(round(compiled(x).item(), 4))
register_kl(type("Other", (torch.distributions.Normal,), {}), torch.distributions.Normal)(None)
torch.compiler.reset()
try:
    torch.compile(value, fullgraph=True, backend="eager")(x)
except torch._dynamo.exc.Unsupported as error:
    print(str(error).splitlines()[0])
value(x)
print(round(torch.compile(value, fullgraph=True, backend="eager")(x).item(), 4))
"""


@pytest.mark.slow
def test_a_fresh_process_compiles_at_once():
    """Before any KL was looked up; after a further registration torch says what it cannot trace until one has been."""
    value = round(kl_divergence(HardConcrete(torch.zeros(3)), HardConcrete(-1.0)).sum().item(), 4)
    first, message, last = python(FRESH).splitlines()
    assert float(first) == float(last) == value
    assert "Failed to trace builtin operator" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kl", "kl by a rule", "mean"])
def test_gates_compile(name):
    check_compiled(name, "inductor")
