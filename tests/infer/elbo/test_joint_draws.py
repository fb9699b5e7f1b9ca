"""Sites that are drawn and priced together against the same sites one by one."""

import contextlib
import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_l0 import HardConcrete, RectifiedNormal
from pyro_l0.distributions.gate import concatenate
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.infer.record import Record, sample
from pyro_l0.maths import hard_concrete, quadrature

SHAPES = [(3,), (2, 2), ()]
START = [
    torch.tensor([0.3, -1.0, 60.0], dtype=torch.float64),
    torch.tensor([[2.0, 0.1], [-50.0, -0.4]], dtype=torch.float64),
    torch.tensor(0.7, dtype=torch.float64),
]
NOISE = torch.tensor([0.2, 0.9, -0.5, -1.0, 0.1, 0.4, 1.5, -0.3], dtype=torch.float64)
STRETCH = quadrature.make_stretch(-0.1, 1.1, torch.float64)


@pytest.fixture
def frozen_noise(monkeypatch):
    """The same logistic noise for every draw."""
    monkeypatch.setattr(
        hard_concrete, "logistic_noise", lambda shape, *_: NOISE[: shape.numel()].reshape(shape).clone()
    )


def leaves():
    return [x.clone().requires_grad_() for x in START]


@pytest.mark.parametrize(
    ("of_draws", "of_active"),
    [(torch.linspace(0.5, 2.0, 8), 1.0), (torch.linspace(0.5, 2.0, 8), 0.0), (0.0, 1.0), (torch.eye(8)[0], 0.0)],
    ids=["both", "draws", "active", "one site"],
)
def test_draws_are_those_of_the_plain_formula(of_draws, of_active, frozen_noise):
    """Values and gradients, of each output alone and of all together, against autograd of the formula."""
    ours, theirs = leaves(), leaves()
    draws, active = hard_concrete.draw_jointly(ours, 2 / 3, STRETCH)
    assert [z.shape for z in draws] == [torch.Size(shape) for shape in SHAPES]
    flat = torch.cat([x.reshape(-1) for x in theirs])
    z, p = hard_concrete.transform(NOISE, flat, 2 / 3, STRETCH), torch.sigmoid(flat - 2 / 3 * STRETCH.t0)
    side_by_side = torch.cat([z.reshape(-1) for z in draws])
    torch.testing.assert_close(side_by_side, z, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(active, p, rtol=1e-14, atol=0)
    (side_by_side * of_draws + of_active * active**2).sum().backward()
    (z * of_draws + of_active * p**2).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-18)


def test_an_atom_passes_no_gradient_on_not_even_an_infinite_one(frozen_noise):
    """As with clamp: the slope of sqrt(z) at z = 0 does not make a NaN of the gate's."""
    log_alphas = leaves()
    draws, _ = hard_concrete.draw_jointly(log_alphas, 2 / 3, STRETCH)
    assert any(bool((z == 0).any()) for z in draws)
    joint = torch.autograd.grad(sum(z.sqrt().sum() for z in draws), log_alphas)
    flat = torch.cat([x.reshape(-1) for x in log_alphas])
    single = torch.autograd.grad(hard_concrete.transform(NOISE, flat, 2 / 3, STRETCH).sqrt().sum(), log_alphas)
    assert all(bool(grad.isfinite().all()) for grad in joint)
    torch.testing.assert_close(joint, single)


def test_second_derivatives(frozen_noise):
    """The gradient is differentiable again, by torch's own check against differences."""
    inputs = [torch.tensor([0.3, -0.4], dtype=torch.float64), torch.tensor([[0.1], [-0.2]], dtype=torch.float64)]

    def draw(*xs):
        draws, active = hard_concrete.draw_jointly(xs, 2 / 3, STRETCH)
        return (*draws, active)

    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(draw, inputs)
    assert torch.autograd.gradgradcheck(draw, inputs)


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
    """With the loss's own handler alone and with one more around it, whether sites can be joined or not."""
    monkeypatch.setattr(hard_concrete, "logistic_noise", lambda shape, dtype, _: torch.full(shape, 0.3, dtype=dtype))
    model = gates(priors)
    guide = AutoGate(model, init_jitter=0.0)
    elbo = L0_ELBO(objective, **options)
    guide()
    results = []
    for outer in (poutine.block(), contextlib.nullcontext()):  # the first call sets the guide up
        pyro.set_rng_seed(3)
        with outer:
            loss = elbo.differentiable_loss(model, guide)
        results.append([loss, *torch.autograd.grad(loss, list(guide.parameters()), materialize_grads=True)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


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
    copied = copy.deepcopy(guide)
    copied.load_state_dict({name: x + 60.0 for name, x in state.items()})
    assert guide.posterior()["z2"].active_prob < 1e-9 < 0.9 < copied.posterior()["z2"].active_prob


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


def test_a_site_that_the_guide_observes_is_refused():
    with Record() as record:
        pyro.sample("z", HardConcrete(0.0), obs=torch.tensor(0.5))
    with pytest.raises(RuntimeError, match="'z' of the guide is observed"), Record(record.sites):
        sample("z", HardConcrete(0.0))
