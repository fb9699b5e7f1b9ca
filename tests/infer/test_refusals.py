"""What is refused: calls, and the decisive words of the message."""

import math
import re
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_l0 import BernoulliGate, HardConcrete, RectifiedNormal
from pyro_l0.diagnostics.gradients import measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget, check_fit, factor, fit, sample_posterior
from pyro_l0.infer.control.sparsity_target import ActiveTarget
from pyro_l0.infer.elbo.estimators import Estimators, Evaluation
from pyro_l0.infer.elbo.terms import Term
from pyro_l0.infer.posterior.check_fit import log_ratios
from pyro_l0.infer.reparam import RectifyReparam
from pyro_l0.infer.slabs import Conditional
from pyro_l0.infer.target import InferenceTarget
from pyro_l0.nn import L0Gate
from tests.infer.regressions import SLAB, correlated_guide, features, observe

NORMAL = dist.Normal(0.0, 1.0)
X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] + torch.randn(20, generator=torch.Generator().manual_seed(1))


def model(prior=None, combine=torch.mul, noise=1.0, size=2, **plate):
    observe(combine(*features(size, prior=prior, **plate)) @ X.mT, Y, noise)


def with_noise():
    with poutine.scale(scale=1.0):
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    model(noise=sigma)


def gates(gate=None):
    factor("y", -pyro.sample("z", (gate or HardConcrete(0.0)).expand([3]).to_event(1)).sum())


def binary():
    gates(BernoulliGate(probs=0.5))


def two_sites():
    with pyro.plate("units", 4):
        pyro.sample("a.z", HardConcrete(0.0))
    pyro.sample("b", RectifiedNormal(0.3, 0.5).expand([2, 3]).to_event(2))


def in_events():
    z = pyro.sample("z", BernoulliGate(probs=torch.full((2,), 0.2)).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal((z * w) @ X.mT, 1.0).to_event(1), obs=Y)


def gates_below_a_gate():
    v = pyro.sample("v", BernoulliGate(probs=torch.tensor(0.3)))
    with pyro.plate("features", 2):
        z = pyro.sample("z", BernoulliGate(probs=0.1 + 0.5 * v))
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    observe(pyro.sample("u", dist.Normal(0.0, 1.0)) * v + (z * w) @ X.mT, Y)


def a_gate_that_is_seen():
    v = pyro.sample("v", BernoulliGate(probs=torch.tensor(0.3)))
    model()
    pyro.sample("t", dist.Normal(v, 1.0), obs=torch.tensor(2.0))


def impossible():
    pyro.factor("never", pyro.sample("w", dist.Normal(0.0, 1.0)) - math.inf)


def first_loss(program, guide=None, objective="l0", **options):
    L0_ELBO(objective, **options).differentiable_loss(program, guide or AutoGate(program))


def with_terms(*terms):
    first_loss(gates, extra_terms=terms)


def called(program=model, **options):
    """A correlated guide after its first call."""
    guide = correlated_guide(program, **options)
    guide()
    return guide


def unsuited(slabs, **options):
    """The second call of a guide that is not half set up by its first."""
    guide = correlated_guide(lambda: model(**options), slabs=slabs)
    with pytest.raises(ValueError, match=INSTEAD):
        guide()
    guide()


def of_slabs(prior, **options):
    """The first call of a guide with three slabs of a prior, or one vector of them."""

    def program():
        pyro.sample("z", HardConcrete(torch.zeros(3)).to_event(1))
        pyro.sample("w", prior if prior.event_shape else prior.expand([3]).to_event(1))

    AutoSpikeSlab(program, SLAB, **options)()


def reparameterised(fn, **options):
    poutine.reparam(lambda: pyro.sample("z", fn, **options), {"z": RectifyReparam()})()


def add_too_late():
    gate, target = L0Gate.from_logits(nn.Linear(3, 30)(torch.ones(5, 3))), ActiveTarget(20, steps=100)
    gate().sum().backward()
    target.add_gradient(gate.distribution)
    target.ascend()


def sparsity_target(*sites):
    guide = AutoGate(two_sites)
    guide()
    return SparsityTarget(guide, dict.fromkeys(sites, 0.5), steps=100)


def without_gradients():
    target = sparsity_target("b")
    target.step = target.start
    target.add_gradient()


def each(call, message, *values):
    """One row for each argument of a call."""
    return [(partial(call, value), message) for value in values]


MEAN_FIELD = {"gates": "mean_field", "slabs": "independent"}
INSTEAD = "use gates='mean_field' and slabs='independent', without hyper"
DRAWN = Conditional(dist.Normal(torch.zeros(2), 2.0), torch.tensor([0.3, -0.2]))
SILENT = Term("x", lambda *_: None)
PER_GATE = Term("x", lambda group, _: group.active_prob)
NO_GUIDE = [
    lambda guide: fit(with_noise, guide, steps=5),
    lambda guide: log_ratios(InferenceTarget(with_noise, slab=SLAB), guide),
    lambda guide: log_ratios(InferenceTarget(with_noise, slab=SLAB), guide, False)[0](5),
]
ASKED = [
    lambda guide: guide.parameter_groups(),
    lambda guide: guide.active_probs(),
    lambda guide: guide.summary(),
    lambda guide: guide.draws(2),
    lambda guide: check_fit(model, guide),
]

VALUES = [
    # objectives and their terms
    (lambda: L0_ELBO("elbo"), "objective 'l0', 'free_energy' or 'spike_slab', but got 'elbo'"),
    (lambda: L0_ELBO(lam=-1.0), "lam to be finite and not negative, but got -1.0"),
    (lambda: L0_ELBO(lam={"z": math.nan}), r"lam\['z'\] to be finite"),
    (lambda: L0_ELBO(group_size=math.inf), "group_size to be finite"),
    (lambda: L0_ELBO(kl_scale=-0.5), "kl_scale to be finite and not negative"),
    (lambda: L0_ELBO(num_particles=0), "num_particles of at least 1, but got 0"),
    (lambda: L0_ELBO("spike_slab"), "slab={'w': 'z', ...}"),
    (lambda: L0_ELBO("spike_slab", slab=SLAB, lam=0.1), "no lam for objective='spike_slab'"),
    (lambda: L0_ELBO("l0", slab=SLAB), "no other, but got {'w': 'z'} for 'l0'"),
    (lambda: L0_ELBO(estimator="reinforce"), "estimator to be one of .*'arm'.*, but got 'reinforce'"),
    (lambda: L0_ELBO(estimator="leave_one_out"), "num_particles of at least 2, but got 1"),
    (lambda: with_terms(Term("l0", lambda *_: None)), "names other than .*'l0'.*, but got 'l0'"),
    (lambda: with_terms(SILENT, SILENT), "but got 'x'"),
    (lambda: with_terms(SILENT._replace(kind="gate")), "kind of extra term 'x' in .*'gates'.*got 'gate'"),
    (lambda: with_terms(PER_GATE), r"'x' .* \(\) at site 'z', but got shape \(3,"),
    (lambda: first_loss(binary, AutoGate(binary, BernoulliGate)), "site 'z', a BernoulliGate, has no pathwise draws"),
    (lambda: first_loss(gates, estimator="arm"), "BernoulliGate in the guide for estimator='arm', but found none"),
    *each(
        lambda kind: first_loss(
            model, AutoSpikeSlab(model, SLAB, **kind), "spike_slab", slab=SLAB, estimator="reinmax"
        ),
        r"estimator='reinmax', .* but it draws \['z', 'w'\] together",
        {"gates": "autoregressive"},
        {"slabs": "structured"},
    ),
    (
        lambda: Estimators("arm")(
            lambda values: Evaluation({}, values["z"].sum(0)),
            {"z": BernoulliGate(logits=torch.zeros(3, 2, requires_grad=True))},
        ),
        r"first sizes of \(3, 2\), a site's gates, but got \(2,\)",
    ),
    *each(
        lambda temper: L0_ELBO("l0", temper=temper),
        r"temper to be a number in \(0, 1\] or a function of the step",
        *("abc", 0.0, -1.0, 2.0, math.nan, None),
    ),
    # targets
    (lambda: ActiveTarget(0, steps=100), "Expected a number of active gates above 0, but got 0"),
    (lambda: ActiveTarget(2, steps=9), "steps of at least 10, but got 9"),
    *each(
        lambda gate: ActiveTarget(20, steps=100).add_gradient(gate.distribution),
        "more than 20 gates that a network computes for each example, but got",
        L0Gate(30),
        L0Gate.from_logits(nn.Linear(3, 20)(torch.ones(5, 3))),
    ),
    (add_too_late, "call add_gradient before it"),
    (without_gradients, r"none has one; call add_gradient after loss.backward\(\)"),
    (
        lambda: sparsity_target("a.z", "b").load_state_dict(sparsity_target("b").state_dict()),
        "the state of 2 constraints, but got 1",
    ),
    # guides
    *each(
        lambda probs: AutoGate(two_sites, init_active_prob=probs),
        "init_active_prob strictly between 0 and 1",
        1.0,
        {"a.z": 0.0},
    ),
    *each(
        lambda jitter: AutoGate(two_sites, init_jitter=jitter),
        "init_jitter of at least 0, but got",
        *(-1.0, math.inf, math.nan),
    ),
    (lambda: AutoGate(two_sites, init_active_prob={"c": 0.5})(), r"one of \['a.z', 'b'\], but got 'c'"),
    (lambda: AutoGate(impossible)(), "no gate site in the model"),
    (lambda: AutoGate(two_sites).posterior(), "has not seen the model yet"),
    (lambda: called(slab={"v": "z"}), "Expected slab to name latent sites of the model, but 'v' is none"),
    (lambda: of_slabs(NORMAL, init_loc={"w": torch.zeros(2)}), r"numbers of shape \(3,\) .* Set init_loc\['w'\]"),
    *each(
        lambda start: of_slabs(start[0], init_loc={"w": torch.full((3,), start[1])}),
        r"slab site 'w' to start at finite numbers .* Set init_loc\['w'\]",
        *((dist.HalfNormal(1.0), -1.0), (NORMAL, math.nan)),
    ),
    *each(
        of_slabs,
        "site 'w' to have a prior of real, positive or bounded numbers",
        *(dist.Dirichlet(torch.ones(3)), dist.Poisson(3.0), dist.Bernoulli(0.5)),
    ),
    (lambda: AutoSpikeSlab(model, SLAB).refine(chains=0), "chains of at least 1, but got 0"),
    (lambda: AutoSpikeSlab(model, SLAB).refine(flips=0), "flips of at least 1, but got 0"),
    (lambda: AutoSpikeSlab(model, SLAB).refine(method="exact"), "'tempered' or 'mean_field', but got 'exact'"),
    (lambda: reparameterised(HardConcrete(0.0), obs=torch.tensor(0.0)), "latent gate at site 'z', but it is observed"),
    (lambda: DRAWN.log_prob(torch.tensor([1.3, 0.8])), "Expected the value that was drawn"),
    (lambda: DRAWN.sample((2,)), r"Expected one draw .* sample_shape \(2,\)"),
    # correlated guides
    *each(
        lambda slabs: unsuited(slabs, prior=dist.Laplace(0.0, 1.0)),
        f"Expected a Normal prior of slab site 'w'.*Laplace.*{INSTEAD}",
        *("structured", "independent"),
    ),
    *each(
        lambda slabs: unsuited(slabs, combine=torch.add),
        f"Expected slabs 'w' to enter .* as products .* closing gates of 'z' makes .*{INSTEAD}",
        *("structured", "independent"),
    ),
    (
        lambda: called(lambda: model(size=4, subsample_size=2)),
        r"plate 'features' draws a part of the data anew\. .*AutoSpikeSlab\(model",
    ),
    (
        lambda: correlated_guide(model, family=HardConcrete),
        "Expected family=BernoulliGate for gates='autoregressive', but got HardConcrete",
    ),
    (lambda: correlated_guide(model, gates="chain"), "gates to be one of .*'autoregressive'.* but got 'chain'"),
    (lambda: correlated_guide(model, slabs="full"), "slabs to be one of .*'structured'.* but got 'full'"),
    *[
        (partial(called, with_noise, hyper=(name,)), f"Expected hyper to name latent sites .* but got '{name}'")
        for name in ("sigm", "w", "z", "y")
    ],
    *[
        (lambda ask=ask, kind=kind: ask(correlated_guide(model, **kind)), "has not seen the model yet; call it once")
        for kind in ({}, MEAN_FIELD)
        for ask in ASKED
    ],
    *[
        (lambda ask=ask, kind=kind: ask(called(with_noise, hyper=(), **kind)), message)
        for kind in ({}, {**MEAN_FIELD, "family": BernoulliGate})
        for ask, message in [
            *[(ask, "Latent site 'sigma' of the model has no posterior in the guide") for ask in NO_GUIDE],
            (partial(check_fit, with_noise), "'sigma' are none of its sites; name them in hyper"),
        ]
    ],
    (
        lambda: check_fit(gates_below_a_gate, called(gates_below_a_gate, slab={**SLAB, "u": "v"})),
        "but from one value of 'z' to another it changes by",
    ),
    (lambda: called(a_gate_that_is_seen, **MEAN_FIELD).refine(), "the model as products .* closing gates of 'v'"),
    (lambda: called(with_noise, hyper=(), **MEAN_FIELD).refine(), "'sigma' are none of its sites; name them in hyper"),
    (lambda: called().slabs(), "they depend on their gates; use draws"),
    (lambda: called(in_events).keep({"z": torch.tensor([0])}), "outside of plates and of correlated guides, but got"),
    # fits and chains
    *each(
        lambda rate: fit(print, AutoSpikeSlab(print, SLAB), learning_rate=rate),
        "Expected a positive, finite learning_rate, but got",
        *(0, -0.1, math.nan, math.inf),
    ),
    (lambda: sample_posterior(impossible), r"(?s)finite log density somewhere.*\['w'\]"),
    (lambda: sample_posterior(impossible, num_chains=1), "num_chains of at least 2, but got 1"),
]
TYPES = [
    (lambda: L0_ELBO(lam="0.1"), "lam to be a number or a tensor, but got .* str"),
    (lambda: L0_ELBO(vectorize_particles=1), "vectorize_particles to be True or False"),
    (lambda: factor("y", 1.0), "Expected log_factor to be a tensor, but got .* float"),
    (lambda: with_terms("horseshoe"), "each of extra_terms to be a pyro_l0.infer.elbo.terms.Term, but got .* str"),
    (
        lambda: SparsityTarget(nn.Linear(1, 1), {"z": 0.5}, steps=100),
        "posterior, test_gates, locations for a SparsityTarget, but got a Linear without",
    ),
    (
        lambda: measure_gradient(L0_ELBO("l0"), gates, lambda: None),
        "posterior, locations for a gradient, but got a function without posterior",
    ),
    (lambda: AutoGate(two_sites, family=HardConcrete(torch.zeros(2))), "family to be a gate's class"),
    (lambda: reparameterised(NORMAL), "a gate at site 'z'"),
    (lambda: correlated_guide(with_noise, hyper="sigma"), "hyper to be a list of sites, but got a value of type str"),
]
ROWS = [(error, *row) for error, rows in ((ValueError, VALUES), (TypeError, TYPES)) for row in rows]


@pytest.mark.parametrize(("error", "call", "message"), ROWS, ids=[re.sub(r"[^\w=' ]", "", row[-1]) for row in ROWS])
def test_refused(error, call, message):
    """Before anything is trained, and without a warning of something else."""
    with pytest.raises(error, match=message):
        call()


def test_temperatures_of_rows_that_are_drawn():
    """The prior of one minibatch says nothing about the others; torch says so."""

    def program():
        with pyro.plate("rows", 10, subsample_size=4):
            pyro.sample("z", HardConcrete(torch.zeros(4), temperature=torch.full((4,), 0.5)))

    with pytest.raises(RuntimeError, match=r"expanded size of the tensor \(10\) must match the existing size \(4\)"):
        AutoGate(program)()


@pytest.mark.parametrize("option", ["lam", "group_size", "weight_decay"])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2,)])
def test_a_coefficient_of_a_wrong_shape(option, shape):
    options = {"lam": 1.0, option: torch.ones(shape), "square_norm": {"z": lambda: torch.ones(3)}}
    message = rf"Expected {option} to broadcast against gate site 'z' of shape \(3,\), but got shape"
    with pytest.raises(ValueError, match=message):
        first_loss(gates, **options)
