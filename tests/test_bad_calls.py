"""Arguments of a wrong type are refused by name, at each public name that would go wrong silently or far from there."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.compaction import Shrinker
from pyro_l0.diagnostics import diagnose, to_arviz
from pyro_l0.diagnostics.gradients import measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget, check_fit, fit, sample_posterior
from pyro_l0.infer.reparam import complete_samples
from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.pruning import Training, prune
from pyro_l0.selection.credible_sets import credible_sets
from pyro_l0.selection.methods.enumeration import exact_posterior


def network():
    """A network with a gate."""
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 1))


def model(x=None):
    """A model with two gates and slabs."""
    with pyro.plate("gates", 2):
        z, w = pyro.sample("z", BernoulliGate(logits=0.0)), pyro.sample("w", dist.Normal(0.0, 1.0))
    return pyro.sample("y", dist.Normal((z * w).sum(-1), 1.0), obs=torch.tensor(0.3))


def guide(family=AutoSpikeSlab, model=model):
    """A guide that has been called."""
    made = family(model, {"w": "z"}) if family is AutoSpikeSlab else family(model)
    made()
    return made


def of_network():
    """A guide over a network's gates that has been called, with the network."""
    net = network()

    def program(x):
        net(x)

    made = AutoGate(program)
    made(torch.ones(1, 2))
    return net, made


def target():
    """A target over a network."""
    net, made = of_network()
    return dict(guide=made, budget=0.5, cost=NetworkCost(net, torch.ones(1, 2)).weights, steps=20)


def shrinker():
    net, made = of_network()
    optimiser = torch.optim.SGD([*net.parameters(), *made.parameters()], lr=0.1)
    return dict(network=net, guide=made, example=torch.ones(1, 2), optimiser=optimiser)


ONE = torch.ones(1, 2)
DATA = dict(X=torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).numpy(), y=torch.arange(20.0).numpy())


def samples():
    return {"z": torch.ones(3, 2), "w": torch.ones(3, 2)}


def pruned():
    batches, plain = [(torch.ones(2, 2), torch.ones(2, 1))] * 2, nn.Sequential(*list(network())[:2], nn.Linear(3, 1))
    return dict(network=plain, loss_fn=nn.functional.mse_loss, loader=batches, budget=0.5, example=ONE, epochs=8)


def gates_of_draws():
    return dict(gates=torch.ones(5, 3).bool().numpy(), active_probs=torch.ones(3).numpy(), x=DATA["X"])


# What is called, and a function that makes good arguments.
CALLS = {
    "Shrinker": (Shrinker, shrinker),
    "diagnose": (diagnose, lambda: dict(guide=guide(AutoGate))),
    "measure_gradient": (
        measure_gradient,
        lambda: dict(elbo=L0_ELBO("l0"), model=model, guide=guide(AutoGate), draws=3),
    ),
    "to_arviz": (to_arviz, lambda: dict(posterior=guide(), model=model, draws=3)),
    "BernoulliGate": (BernoulliGate, lambda: dict(logits=torch.zeros(2))),
    "HardConcrete.from_active_prob": (HardConcrete.from_active_prob, lambda: dict(active_prob=0.5)),
    "AutoGate": (AutoGate, lambda: dict(model=model)),
    "AutoGate.keep": (lambda **x: of_network()[1].keep(**x), lambda: dict(units={"2": torch.tensor([0])})),
    "AutoSpikeSlab": (AutoSpikeSlab, lambda: dict(model=model, slab={"w": "z"})),
    "L0_ELBO": (L0_ELBO, dict),
    "SparsityTarget": (SparsityTarget, target),
    "check_fit": (check_fit, lambda: dict(model=model, guide=guide(), chains=2, flips=3, draws=5)),
    "complete_samples": (complete_samples, lambda: dict(model=model, samples=samples())),
    "fit": (fit, lambda: dict(model=model, guide=guide(), steps=2, num_particles=2)),
    "sample_posterior": (
        sample_posterior,
        lambda: dict(model=model, slab={"w": "z"}, num_samples=8, warmup_steps=8, num_chains=2),
    ),
    "FixedGate": (FixedGate, lambda: dict(value=torch.ones(3))),
    "Training": (Training, dict),
    "prune": (prune, pruned),
    "exact_posterior": (exact_posterior, lambda: dict(**DATA, draws=5)),
    "credible_sets": (credible_sets, gates_of_draws),
}
# The arguments that are checked.
CHECKED = {
    "Shrinker": "guide threshold patience",
    "diagnose": "target steps_left",
    "measure_gradient": "elbo draws exact",
    "to_arviz": "slab draws coords dims",
    "BernoulliGate": "validate_args",
    "HardConcrete.from_active_prob": "active_prob one_given_active",
    "AutoGate": "init_active_prob init_jitter family_options",
    "AutoGate.keep": "units",
    "AutoSpikeSlab": "slab init_scale init_loc hyper",
    "L0_ELBO": "slab square_norm vectorize_particles",
    "SparsityTarget": "budget pretrained",
    "check_fit": "guide chains flips draws",
    "complete_samples": "samples",
    "fit": "guide learning_rate progress",
    "sample_posterior": "slab num_samples warmup_steps num_chains",
    "FixedGate": "value dim",
    "Training": "resume progress finetune callbacks",
    "prune": "gates pretrained training",
    "exact_posterior": "rate expected_size slab_scale noise_scale standardize fit_intercept",
    "credible_sets": "gates active_probs x level min_correlation names gate_of weights",
}


@pytest.mark.parametrize(("name", "argument"), [(name, x) for name, some in CHECKED.items() for x in some.split()])
def test_types_of_arguments(name, argument):
    """By name, where it stands first in the message or within it."""
    call, good = CALLS[name]
    for bad in (object(), len):
        with pytest.raises(TypeError, match=rf"Expected .*\b({argument}|guide|probs)\b"):
            call(**{**good(), argument: bad})


@pytest.mark.parametrize("bad", [{"1": 3}, {1: torch.ones(3)}])
def test_gates_of_prune_are_gates(bad):
    with pytest.raises(TypeError, match=r"Expected gates\[.*\] to be an L0Gate, but got a value of type"):
        prune(**pruned(), gates=bad)


def test_numbers_out_of_range():
    """Counts of a check, names of credible sets."""
    for name in ("chains", "flips", "draws"):
        with pytest.raises(ValueError, match=f"Expected {name} of at least 1, but got -1"):
            check_fit(model, guide(), **{name: -1})
    with pytest.raises(ValueError, match=r"and names of all or none, but got .* and 2"):
        credible_sets(**gates_of_draws(), names=np.array(["a", "b"]))
