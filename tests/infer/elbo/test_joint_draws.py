"""Sites that are drawn and priced together against the same sites one by one."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from pyro_l0 import HardConcrete, RectifiedNormal
from pyro_l0.distributions.gate import concatenate
from pyro_l0.fast.record import Record, sample
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab
from pyro_l0.maths import hard_concrete, quadrature

SHAPES = [(3,), (2, 2), ()]
START = [
    torch.tensor([0.3, -1.0, 60.0], dtype=torch.float64),
    torch.tensor([[2.0, 0.1], [-50.0, -0.4]], dtype=torch.float64),
    torch.tensor(0.7, dtype=torch.float64),
]
NOISE = torch.tensor([0.2, 0.9, -0.5, -1.0, 0.1, 0.4, 1.5, -0.3], dtype=torch.float64)
FREE = [0, 1, 3, 4, 6, 7]  # noise entries whose gates are not saturated
STRETCH = quadrature.make_stretch(-0.1, 1.1, torch.float64)


@pytest.fixture
def frozen_noise(monkeypatch):
    """The same logistic noise for every draw."""
    monkeypatch.setattr(
        hard_concrete, "logistic_noise", lambda shape, *_: NOISE[: shape.numel()].reshape(shape).clone()
    )


def leaves():
    return [x.clone().requires_grad_() for x in START]


# ------------------------------------------------------------ the function


def test_draws_are_those_of_the_plain_formula(frozen_noise):
    """Values and gradients, each output alone and all together, against autograd of the formula."""
    weights = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
    for use_draws, use_active in ((True, True), (True, False), (False, True)):
        ours, theirs = leaves(), leaves()
        draws, active = hard_concrete.draw_jointly(ours, 2 / 3, STRETCH)
        assert [z.shape for z in draws] == [torch.Size(shape) for shape in SHAPES]
        flat = torch.cat([x.reshape(-1) for x in theirs])
        z = hard_concrete.transform(NOISE, flat, 2 / 3, STRETCH)
        p = torch.sigmoid(flat - 2 / 3 * STRETCH.t0)
        torch.testing.assert_close(torch.cat([z.reshape(-1) for z in draws]), z, rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(active, p, rtol=1e-14, atol=0)
        ours_sum = theirs_sum = torch.zeros((), dtype=torch.float64)
        if use_draws:
            ours_sum = ours_sum + (torch.cat([z.reshape(-1) for z in draws]) * weights).sum()
            theirs_sum = theirs_sum + (z * weights).sum()
        if use_active:
            ours_sum, theirs_sum = ours_sum + (active**2).sum(), theirs_sum + (p**2).sum()
        ours_sum.backward()
        theirs_sum.backward()
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-18)


def test_a_draw_that_is_not_used_gets_no_gradient(frozen_noise):
    """A loss of one site leaves the others' gradients at zero."""
    xs = leaves()
    draws, _ = hard_concrete.draw_jointly(xs, 2 / 3, STRETCH)
    draws[0].sum().backward()
    assert xs[0].grad[0] != 0
    assert xs[1].grad.abs().sum() == 0
    assert xs[2].grad == 0


def test_an_atom_passes_no_gradient_on_not_even_an_infinite_one(frozen_noise):
    """As with clamp: the slope of sqrt(z) at z = 0 does not make a NaN of the gate's."""
    log_alphas = leaves()
    draws, _ = hard_concrete.draw_jointly(log_alphas, 2 / 3, STRETCH)
    assert any(bool((z == 0).any()) for z in draws)
    joint = torch.autograd.grad(sum(z.sqrt().sum() for z in draws), log_alphas)
    noise = NOISE.split([x.numel() for x in log_alphas])
    plain = [
        hard_concrete.transform(u.reshape(x.shape), x, 2 / 3, STRETCH) for u, x in zip(noise, log_alphas, strict=True)
    ]
    single = torch.autograd.grad(sum(z.sqrt().sum() for z in plain), log_alphas)
    for one, other in zip(joint, single, strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other)


def test_second_derivatives(frozen_noise):
    """The gradient is differentiable again, by torch's own check against differences."""
    inputs = [torch.tensor([0.3, -0.4], dtype=torch.float64), torch.tensor([[0.1], [-0.2]], dtype=torch.float64)]

    def draw(*xs):
        draws, active = hard_concrete.draw_jointly(xs, 2 / 3, STRETCH)
        return (*draws, active)

    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(draw, inputs)
    assert torch.autograd.gradgradcheck(draw, inputs)


# ------------------------------------------------------------ the loss


def gates(priors):
    """A model of three gate sites whose likelihood uses every gate."""

    def model():
        total = 0.0
        for i, (prior, shape) in enumerate(zip(priors, SHAPES, strict=True)):
            fn = prior.expand(shape)
            total = total + (i + 1.0) * pyro.sample(f"z{i}", fn.to_event(len(shape)) if shape else fn).sum()
        pyro.sample("y", dist.Normal(total, 1.0), obs=torch.tensor(2.0, dtype=torch.float64))

    return model


def parameter(value):
    return torch.tensor(value, dtype=torch.float64)


SAME = [HardConcrete(parameter(x)) for x in (-1.0, 0.5, 0.2)]
OTHER_TEMPERATURE = [HardConcrete(parameter(-1.0)), HardConcrete(parameter(0.5), 0.5), HardConcrete(parameter(0.2))]
TENSOR_STRETCH = [HardConcrete(parameter(0.1), gamma=torch.tensor([-0.2, -0.1, -0.3], dtype=torch.float64)), *SAME[1:]]
NORMALS = [RectifiedNormal(parameter(x), parameter(0.7)) for x in (0.2, 0.5, 0.8)]


def both_ways(model, guide, elbo):
    """Loss and gradients with the loss's own handler alone, and with one more around it."""
    results = []
    for outer in (poutine.block(), None):  # the first call sets the guide up
        guide.zero_grad()
        pyro.set_rng_seed(3)
        if outer is None:
            loss = elbo.differentiable_loss(model, guide)
        else:
            with outer:
                loss = elbo.differentiable_loss(model, guide)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in guide.parameters() if p.grad is not None)])
    return results


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("l0", {"lam": 0.3, "group_size": {"z0": 4.0, "z1": 2.0, "z2": 1.0}}),
        ("l0", {"lam": {"z1": 0.3}}),
        ("l0", {"lam": torch.tensor(0.3, dtype=torch.float64)}),
        ("l0", {"lam": 0.3, "weight_decay": {"z1": 0.1}, "square_norm": {"z1": lambda: torch.full((2, 2), 3.0)}}),
        ("free_energy", {"lam": 0.1}),
        ("free_energy", {"kl_scale": 0.5, "num_particles": 2}),
    ],
)
@pytest.mark.parametrize("priors", [SAME, OTHER_TEMPERATURE, TENSOR_STRETCH], ids=["same", "temperature", "stretch"])
def test_loss_is_that_of_single_sites(objective, options, priors, monkeypatch):
    """Loss and gradient agree to rounding, whether sites can be joined or not."""
    monkeypatch.setattr(hard_concrete, "logistic_noise", lambda shape, dtype, _: torch.full(shape, 0.3, dtype=dtype))
    model = gates(priors)
    guide = AutoGate(model, init_jitter=0.0)
    elbo = L0_ELBO(objective, **options)
    guide()
    for one, other in zip(*both_ways(model, guide, elbo), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_other_families_and_sites():
    """Rectified normals beside another guide's site; only terms without draws are compared."""

    def model():
        for i, prior in enumerate(NORMALS):
            pyro.sample(f"z{i}", prior.expand((i + 1,)).to_event(1))
        pyro.sample("b", dist.Normal(0.0, 1.0))

    guide = AutoGuideList(model)
    guide.append(AutoGate(poutine.block(model, hide=["b"]), family=RectifiedNormal))
    guide.append(AutoNormal(poutine.block(model, expose=["b"])))
    guide()
    for one, other in zip(*both_ways(model, guide, L0_ELBO("free_energy", lam=0.2)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # float32


def test_spike_and_slab():
    """Slabs are sampled after the gates; the KLs agree."""

    def model():
        with pyro.plate("w", 2):
            pyro.sample("plated", HardConcrete(0.0))
        pyro.sample("z", HardConcrete(torch.zeros(3)).to_event(1))
        pyro.sample("v", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    for hide in ([], ["plated"]):  # a plate turns joint draws off
        shown = poutine.block(model, hide=hide)
        guide = AutoSpikeSlab(shown, slab={"v": "z"})
        guide()
        elbo = L0_ELBO("spike_slab", slab={"v": "z"})
        for one, other in zip(*both_ways(shown, guide, elbo), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # float32


def test_the_guide_sees_parameters_that_were_replaced():
    """Posteriors are kept from step to step, but not beyond their parameters."""
    model = gates(SAME)
    guide = AutoGate(model)
    elbo = L0_ELBO("l0", lam=1.0)
    guide()
    elbo.loss(model, guide)
    state = {name: x - 30.0 for name, x in guide.state_dict().items()}
    guide.load_state_dict(state, assign=True)
    assert elbo.terms(model, guide)["l0"] < 1e-9
    assert copy.deepcopy(guide)._drawing._kept == {}


@pytest.mark.parametrize(
    "other",
    [
        HardConcrete(0.0, 0.5),
        HardConcrete(0.0, gamma=torch.tensor([-0.1, -0.2])),
        HardConcrete(torch.tensor(0.0, dtype=torch.float64)),
        RectifiedNormal(0.0, 1.0),
    ],
)
def test_gates_that_are_no_joint_gate(other):
    """Another temperature, a tensor stretch, another type or family; either way round."""
    assert concatenate([HardConcrete(0.0), other]) is None
    assert concatenate([other, HardConcrete(0.0)]) is None


def test_concatenated_gates_keep_their_order():
    """Parameters one after the other, fixed ones once."""
    joint = concatenate([RectifiedNormal(torch.tensor([1.0, 2.0]), 0.5), RectifiedNormal(3.0, 0.7)])
    assert joint.loc.tolist() == [1.0, 2.0, 3.0]
    assert joint.scale.tolist() == pytest.approx([0.5, 0.5, 0.7])


# ------------------------------------------------------------ the record


def test_the_short_way_is_taken_under_the_record_alone():
    """Any other handler sees an ordinary sample site."""
    fn = HardConcrete(torch.zeros(3)).to_event(1)
    with Record() as record:
        z = sample("z", fn)
        with poutine.mask(mask=False):
            sample("masked", fn)
    assert record.sites["z"]["value"] is z
    assert record.sites["z"]["mask"] is None
    assert record.sites["masked"]["mask"] is False
    with Record(record.sites) as again:
        assert sample("z", fn) is z
    assert again.sites["z"]["value"] is z
    assert sample("z", fn).shape == (3,)  # without a handler


def test_the_short_way_refuses_what_the_long_one_does():
    """A name that occurs twice, and a site that is observed in the guide."""
    fn = HardConcrete(0.0)
    with Record():
        sample("z", fn)
        with pytest.raises(RuntimeError, match="Multiple sample sites named 'z'"):
            sample("z", HardConcrete(0.0))
    with Record() as record:
        pyro.sample("z", fn, obs=torch.tensor(0.5))
    with pytest.raises(RuntimeError, match="'z' of the guide is observed"), Record(record.sites):
        sample("z", fn)
