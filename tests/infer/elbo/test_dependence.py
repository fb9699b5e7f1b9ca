"""Guides whose sites depend on one another, or follow from auxiliary draws: right, or refused by the sites' names."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoStructured,
)
from torch.distributions import biject_to, kl_divergence

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab

REAL, POSITIVE, BOUNDED = dist.Normal(0.0, 1.0), dist.LogNormal(0.5, 1.0), dist.Uniform(-1.0, 2.0)


def slab_elbo(**options):
    return L0_ELBO("spike_slab", slab={"w": "z"}, **options)


def model_of(prior, event):
    """Four gates and slabs, in a plate or in events, and a scale beside them."""

    def model():
        pyro.sample("first", dist.LogNormal(0.0, 1.0))
        with pyro.plate("units", 1 if event else 4):
            shape = [1, 4] if event else [4]
            pyro.sample("z", HardConcrete(torch.zeros(shape)).to_event(int(event)))
            pyro.sample("w", prior.expand(shape).to_event(int(event)))
        pyro.sample("last", dist.Dirichlet(torch.ones(3)))

    return model


def beside_gates(model, guide):
    guides = AutoGuideList(model)
    guides.append(AutoGate(poutine.block(model, expose=["z"]), init_active_prob=0.02, init_jitter=0.0))
    guides.append(guide(poutine.block(model, hide=["z"])))
    return guides


@pytest.mark.parametrize("prior", [REAL, POSITIVE, BOUNDED], ids=["real", "positive", "bounded"])
@pytest.mark.parametrize("event", [False, True])
@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_slabs_of_pyros_guides(guide, event, prior):
    """P(z != 0) times log q(u) - log |det T'(u)| - log p(T(u)), in closed form or at the draw; the rest in full."""
    pyro.set_rng_seed(0)
    model = model_of(prior, event)
    guides = beside_gates(model, guide)
    guides()
    pyro.set_rng_seed(1)
    found = slab_elbo().terms(model, guides)
    pyro.set_rng_seed(1)
    sites = poutine.trace(guides).get_trace().nodes
    transform, w = biject_to(prior.support), sites["w"]["value"]
    if guide is AutoNormal:
        loc, scale = guides[1].locs.w, guides[1].scales.w
    else:
        loc, scale = (x[1:5].reshape(w.shape) for x in (guides[1].loc, guides[1].scale))
    normal, real = dist.Normal(loc, scale), transform.inv(w)
    if prior is REAL:
        each = kl_divergence(normal, prior)
    elif prior is POSITIVE:
        each = kl_divergence(dist.LogNormal(loc, scale), prior)
    else:
        each = normal.log_prob(real) - transform.log_abs_det_jacobian(real, w) - prior.log_prob(w)
    # A bounded slab's draw is carried back to the real line, in float32.
    assert found["kl_slab"].item() == pytest.approx(0.02 * each.sum().item(), rel=1e-4)
    pyro.set_rng_seed(1)
    everything = L0_ELBO("free_energy").terms(model, guides)["kl_other"]
    if prior is BOUNDED and guide is AutoNormal:  # where all terms are taken at the draws
        assert (found["kl_other"] + each.sum()).item() == pytest.approx(everything.item(), rel=1e-4)


def test_scales_of_slabs_stay_finite():
    """Where log q was in full, the loss fell without a bound as the slabs grew wider."""
    pyro.set_rng_seed(2)
    model = model_of(REAL, event=False)
    guides = beside_gates(model, AutoNormal)
    guides()
    guides[1].scales.w_unconstrained.data.fill_(3.0)
    slab_elbo().differentiable_loss(model, guides).backward()
    assert (guides[1].scales.w_unconstrained.grad > 0).all()


def test_slabs_that_are_points():
    """A Delta that nothing random makes has no density to weigh."""
    model = model_of(REAL, event=False)
    guides = beside_gates(model, AutoDelta)
    w = guides()["w"]
    assert slab_elbo().terms(model, guides)["kl_slab"].item() == pytest.approx(-0.02 * REAL.log_prob(w).sum().item())
    model = model_of(REAL, event=True)
    with pytest.raises(ValueError, match=r"as Delta.* has no KL for each entry of \(4,\).*Take AutoNormal"):
        slab_elbo().loss(model, beside_gates(model, AutoDelta))


@pytest.mark.parametrize("event", [False, True])
@pytest.mark.parametrize(
    "guide",
    [
        AutoMultivariateNormal,
        AutoLowRankMultivariateNormal,
        AutoIAFNormal,
        AutoStructured,
        lambda model: AutoStructured(model, conditionals="normal", dependencies={}),
    ],
    ids=["joint", "low rank", "flow", "structured", "structured, no more than normal"],
)
def test_slabs_without_a_density_by_entry(guide, event):
    """A joint density, and what can't be seen, is refused with the way out."""
    pyro.set_rng_seed(3)
    model = poutine.block(model_of(REAL, event), hide=["last"])
    with pytest.raises(ValueError, match=r"slab site 'w'.* Take AutoNormal, AutoDiagonalNormal"):
        slab_elbo().differentiable_loss(model, beside_gates(model, guide))


# ------------------------------------------------------------ guides by hand

Z = torch.zeros(4)


def one(**sites):
    """A program that draws sites by functions of those before; some are auxiliary."""

    def program():
        drawn = {}
        for name, make in sites.items():
            infer = {"is_auxiliary": True} if name.startswith("aux") else {}
            drawn[name] = pyro.sample(name, make(**drawn), infer=infer)

    return program


def run(**sites):
    """The same in plates of 4."""
    return pyro.plate("units", 4)(one(**sites))


def normal(loc=0.0, scale=1.0):
    return dist.Normal(loc + Z, scale)


MODEL = run(v=lambda **_: normal(), z=lambda **_: BernoulliGate(logits=Z), w=lambda **_: normal())
OPEN = {"estimator": "leave_one_out", "num_particles": 2}
AUX = {"v": lambda **_: normal(), "z": lambda **_: BernoulliGate(logits=Z), "aux": lambda **_: normal(0.0, 0.1)}


def test_an_auxiliary_site_by_hand():
    """The author of a guide wrote u and Delta(u)."""
    guide = run(**AUX, w=lambda aux, **_: dist.Delta(aux))
    kl = kl_divergence(dist.Normal(0.0, 0.1), REAL).item()
    assert slab_elbo(**OPEN).terms(MODEL, guide)["kl_slab"].item() == pytest.approx(2 * kl)


B = torch.stack([Z, Z + 0.1])
GATE = {"z": lambda **_: BernoulliGate(logits=Z + 0.4)}
FIRST = {**GATE, "v": lambda **_: normal()}
ON_GATES = r"slab site 'w' not to depend on its gates 'z'.*slabs='structured'"
UNSEEN = r"slab site 'w' to have a density for each of its gates.*from 'aux', Normal"
ON_SLABS = r"no site of the guide to depend on slab site 'w'.*\['v'\]"
REFUSED = {
    # Such a slab's KL is not the one that P(z != 0) weighs, which binary gates' gradients do not show either.
    "issue": (run(**FIRST, w=lambda z, **_: normal(0.5 * z, 1 - 0.5 * z)), ON_GATES),
    "weight that is 0 for now": (run(**FIRST, w=lambda z, **_: normal(0.0 * z)), ON_GATES),
    "where": (run(**FIRST, w=lambda z, **_: normal(torch.where(z > 0, 0.5, 0.0))), ON_GATES),
    "index": (run(**FIRST, w=lambda z, **_: normal(B.gather(0, z.long()[None])[0])), ON_GATES),
    "through a latent": (run(**GATE, v=lambda z, **_: normal(z), w=lambda v, **_: normal(v)), ON_GATES),
    "detached": (run(**FIRST, w=lambda z, **_: normal(0.5 * z.detach())), ON_GATES),
    "through an auxiliary site": (
        run(**FIRST, aux=lambda z, **_: normal(z), w=lambda aux, **_: dist.Delta(aux)),
        ON_GATES,
    ),
    # Where w is not u by entry, its density is not seen.
    "twice an auxiliary site": (run(**AUX, w=lambda aux, **_: dist.Delta(2 * aux)), UNSEEN),
    "an auxiliary site in another order": (run(**AUX, w=lambda aux, **_: dist.Delta(aux.flip(0))), UNSEEN),
    "sums of an auxiliary site": (run(**AUX, w=lambda aux, **_: dist.Delta(aux.detach().cumsum(0))), UNSEEN),
    # Where the gate is closed the slab is its prior's, which the draw of the other site does not see.
    "below a slab": (run(**GATE, w=lambda **_: normal(), v=lambda w, **_: normal(w)), ON_SLABS),
    "below a slab from an auxiliary site": (
        run(**GATE, aux=lambda **_: normal(), w=lambda aux, **_: dist.Delta(aux), v=lambda w, **_: normal(w)),
        ON_SLABS,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dependences_that_are_refused(name):
    guide, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        slab_elbo(**OPEN).differentiable_loss(MODEL, guide)


def test_a_slab_that_depends_on_its_hard_concrete_gate():
    """At the draw its KL would have a biased gradient."""
    model = run(z=lambda **_: HardConcrete(Z), w=lambda **_: normal())
    guide = run(z=lambda **_: HardConcrete(Z + 0.3), w=lambda z, **_: normal(1 - 0.5 * z, 0.4 + 0.5 * z))
    with pytest.raises(ValueError, match="slab site 'w' not to depend on its gates 'z'"):
        slab_elbo().differentiable_loss(model, guide)


def test_a_dependence_that_training_makes():
    """Rows that start the same are no dependence yet; it is noticed at the next hundredth step."""
    rows, logits = torch.zeros(2, 4), torch.zeros(4, requires_grad=True)
    index = lambda z, **_: normal(rows.gather(0, z.long()[None])[0])  # noqa: E731
    guide, elbo = run(v=lambda **_: normal(), z=lambda **_: BernoulliGate(logits=logits), w=index), slab_elbo(**OPEN)
    elbo.differentiable_loss(MODEL, guide)
    rows[1] += 0.3
    elbo.differentiable_loss(MODEL, guide)
    elbo.step = 100
    with pytest.raises(ValueError, match="slab site 'w' not to depend on its gates 'z'"):
        elbo.differentiable_loss(MODEL, guide)


def test_what_slabs_may_depend_on():
    """Latents before them, other gates' draws, and what their gates depend on too."""
    guide = run(v=lambda **_: normal(), z=lambda v, **_: BernoulliGate(logits=v), w=lambda v, **_: normal(v))
    slab_elbo(**OPEN).differentiable_loss(MODEL, guide)


# ------------------------------------------------------------ the order of sites


def hard(logit):
    return HardConcrete(torch.as_tensor(logit))


def binary(logit):
    return BernoulliGate(logits=torch.as_tensor(logit))


ORDERS = {
    "issue": (
        one(w=lambda: dist.Normal(0.0, 1.0), z=lambda w: hard(3 * w)),
        one(z=lambda: hard(0.0), w=lambda z: dist.Normal(4 * (z - 0.5), 0.5)),
    ),
    "through a latent": (
        one(w=lambda: dist.Normal(0.0, 1.0), v=lambda w: dist.Normal(0.0, 1.0), z=lambda w, v: hard(3 * w)),
        one(z=lambda: hard(0.0), v=lambda z: dist.Normal(z, 1.0), w=lambda z, v: dist.Normal(v, 0.5)),
    ),
    "gates above gates": (
        one(a=lambda: hard(0.0), z=lambda a: hard(a)),
        one(z=lambda: hard(0.0), a=lambda z: hard(torch.where(z > 0, 1.0, 0.0))),
    ),
    "a weight that is 0 for now": (
        one(w=lambda: dist.Normal(0.0, 1.0), z=lambda w: hard(0.0 * w)),
        one(z=lambda: hard(0.0), w=lambda z: dist.Normal(0.0 * z, 0.5)),
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_prior_that_depends_on_what_the_guide_draws_after(name):
    """The KL of such a gate would have to be sampled."""
    model, guide = ORDERS[name]
    other = "a" if name == "gates above gates" else "w"
    with pytest.raises(ValueError, match=f"prior of gate site 'z' to depend on no site .* depends on '{other}'"):
        L0_ELBO().differentiable_loss(model, guide)


def test_the_kl_of_binary_gates_at_the_draws():
    """In mean that of both sites by quadrature, within five standard errors; with gradients and without."""
    pyro.set_rng_seed(5)
    model = one(w=lambda: dist.Normal(0.0, 1.0), z=lambda w: binary(3 * w))
    guide = one(z=lambda: binary(0.0), w=lambda z: dist.Normal(4 * (z - 0.5), 0.5))
    w, truth = torch.linspace(-6, 6, 4001, dtype=torch.float64), 0.0
    for z in torch.eye(2, dtype=torch.float64)[0]:
        q = dist.Normal(4 * (z - 0.5), 0.5).log_prob(w)
        p = dist.Normal(0.0, 1.0).log_prob(w) + dist.Bernoulli(logits=3 * w).log_prob(z)
        truth += 0.5 * torch.trapezoid(q.exp() * (q + math.log(0.5) - p), w).item()
    elbo = L0_ELBO(estimator="leave_one_out", num_particles=20)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            # A particle's standard deviation is 0.02: the posterior is nearly exact.
            assert abs(elbo.differentiable_loss(model, guide).item() - truth) < 5 * 0.02 / math.sqrt(20)
    with pytest.raises(ValueError, match="prior of gate site 'z'"):
        L0_ELBO(estimator="arm").differentiable_loss(model, guide)


def test_the_kl_of_latents_at_the_draws():
    """In mean that of two normals, within five standard errors."""
    pyro.set_rng_seed(6)
    model = one(w=lambda: dist.Normal(0.0, 1.0), z=lambda w: dist.Normal(w, 1.0))
    guide = one(z=lambda: dist.Normal(0.0, 1.0), w=lambda z: dist.Normal(z, 0.5))
    # E log q(z) q(w | z) - log p(w) p(z | w), with E w^2 = 1.25 and E (z - w)^2 = 0.25
    truth = -1 - math.log(0.5) + 0.5 * 1.25 + 0.5 * 0.25
    elbo = L0_ELBO(num_particles=50)
    assert abs(elbo.differentiable_loss(model, guide).item() - truth) < 5 * 0.19 / math.sqrt(50)
    assert elbo.at_draws == {"z"}


def test_a_rate_that_is_drawn_given_its_gates():
    """The loss without gradients is that with them, where AutoSpikeSlab draws gates, and then their rate."""

    def model():
        rate = pyro.sample("rate", dist.Beta(1.0, 3.0))
        with pyro.plate("units", 4):
            z, w = pyro.sample("z", BernoulliGate(rate + Z)), pyro.sample("w", normal())
            pyro.sample("y", dist.Normal(z * w, 1.0), obs=Z + 1)

    pyro.set_rng_seed(7)
    guide = AutoSpikeSlab(model, slab={"w": "z"}, gates="autoregressive", slabs="structured")
    elbo = slab_elbo(**OPEN)
    elbo.loss(model, guide)
    assert elbo.at_draws == {"z"}
    pyro.set_rng_seed(8)
    without = elbo.loss(model, guide)
    pyro.set_rng_seed(8)
    assert elbo.differentiable_loss(model, guide).item() == pytest.approx(without, rel=1e-5)


def test_other_orders_without_a_dependence():
    """Guides of different sites beside each other, in any order, keep their closed forms."""
    model = one(w=lambda: dist.Normal(0.0, 1.0), z=lambda w: hard(3 * w))
    guide = one(z=lambda: hard(0.0), w=lambda z: dist.Normal(0.3, 0.5))
    elbo = L0_ELBO()
    assert elbo.terms(model, guide)["kl_other"].item() == pytest.approx(
        kl_divergence(dist.Normal(0.3, 0.5), dist.Normal(0.0, 1.0)).item()
    )
    model = one(w=lambda: dist.Normal(0.0, 1.0), z=lambda w: hard(0.0))
    guide = one(z=lambda: hard(0.0), w=lambda z: dist.Normal(z, 0.5))
    assert elbo.terms(model, guide)["kl_gate"].item() == 0.0
