"""Bad calls of every public name, and how many end in an internal error: python tests/bench/bad_calls.py [--show 40]

Every public function and class that computes something, and a few methods, is called with good arguments but for one,
which is replaced by each of some bad values. A call may be accepted, or refused by a message; AttributeError,
RuntimeError, IndexError, KeyError or AssertionError from inside is an internal error, unless the message is one of the
library's own, which begin with "Expected". Ends with 1 if there are 30 or more. Takes a minute on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import math
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab
from pyro_l0.nn import Gate, L0Gate, NetworkCost

# By module, what is called.
MODULES = {
    "compaction.apply": "apply_plan",
    "compaction.compact": "compact",
    "compaction.shrinker": "Shrinker",
    "compaction.storage": "load_compacted",
    "diagnostics.doctor": "diagnose",
    "diagnostics.gradients": "exact_gradient measure_gradient pathwise_noise",
    "diagnostics.inference_data": "to_arviz",
    "distributions": "BernoulliGate ExponentialGate ExponentialUniformGate HardConcrete HardKumaraswamy PowerLawGate "
    "RectifiedNormal",
    "distributions.kl": "kl_by_quadrature",
    "distributions.rectified": "Rectified",
    "fast.switch": "disabled is_open",
    "infer": "AutoGate AutoSpikeSlab L0_ELBO SparsityTarget check_fit factor fit sample_posterior",
    "infer.elbo.estimators": "Estimators",
    "infer.reparam": "complete_samples",
    "nn.cost": "NetworkCost",
    "nn.fixed": "FixedGate fix_gates",
    "nn.gate": "Gate gate_names name_gates",
    "nn.heads": "gate_heads",
    "nn.insert": "insert_gates",
    "nn.l0_gate": "NetworkGates penalty",
    "nn.square_norms": "square_norms",
    "nn.suggest": "suggest_gates",
    "nn.weights": "fix_weights gate_weights",
    "plots": "plot_credible_sets plot_inclusion",
    "pruning": "Training prune",
    "selection": "NeuralFeatureSelector SpikeSlabClassifier SpikeSlabPoissonRegressor SpikeSlabRegressor",
    "selection.credible_sets": "credible_sets",
    "selection.methods.enumeration": "exact_posterior",
}
INTERNAL = (AttributeError, RuntimeError, IndexError, KeyError, AssertionError)
MOST = 30
BAD = {
    "None": lambda: None,
    "abc": lambda: "abc",
    "-1": lambda: -1,
    "0": lambda: 0,
    "2.5": lambda: 2.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "True": lambda: True,
    "object": object,
    "list": lambda: [],
    "strings": lambda: ["a", "b"],
    "dict": dict,
    "wrong dict": lambda: {"abc": 3},
    "number dict": lambda: {1: torch.ones(3)},
    "tensor": lambda: torch.tensor([math.nan, 2.0, -1.0]),
    "empty tensor": lambda: torch.empty(0),
    "module": lambda: nn.Linear(2, 2),
    "function": lambda: lambda *args, **kwargs: "abc",
    "class": lambda: int,
}


def network():
    """A network with a gate."""
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1))


def plain():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def heads():
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)


def model(x=None):
    """A model with two gates and slabs."""
    with pyro.plate("gates", 2):
        z, w = pyro.sample("z", BernoulliGate(logits=0.0)), pyro.sample("w", dist.Normal(0.0, 1.0))
    return pyro.sample("y", dist.Normal((z * w).sum(-1), 1.0), obs=torch.tensor(0.3))


def only_gates():
    """A model with two gates alone."""
    with pyro.plate("gates", 2):
        z = pyro.sample("z", BernoulliGate(logits=0.0))
    return pyro.sample("y", dist.Normal(z.sum(-1), 1.0), obs=torch.tensor(0.3))


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


def saved():
    """A file of a small network."""
    path = Path(tempfile.mkdtemp()) / "small.pt"
    compact(network(), OPEN, torch.ones(1, 2)).save(path)
    return path


OPEN = {"2": torch.tensor([1.0, 0.0, 1.0])}
ONE = torch.ones(1, 2)
BATCHES = [(torch.ones(2, 2), torch.ones(2, 1))] * 2
DATA = dict(X=torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).numpy(), y=torch.arange(20.0).numpy())
# By name, a function that makes the good arguments.
GOOD = {
    "Shrinker": shrinker,
    "compact": lambda: dict(network=network(), gates=OPEN, example=ONE),
    "apply_plan": lambda: dict(network=network(), plan=compact(network(), OPEN, ONE).plan),
    "load_compacted": lambda: dict(network=network(), path=saved()),
    "diagnose": lambda: dict(guide=guide(AutoGate)),
    "exact_gradient": lambda: dict(elbo=L0_ELBO("l0"), model=only_gates, guide=guide(AutoGate, only_gates)),
    "measure_gradient": lambda: dict(elbo=L0_ELBO("l0"), model=model, guide=guide(AutoGate), draws=3),
    **dict.fromkeys(("ExponentialGate", "PowerLawGate"), lambda: dict(logits=torch.zeros(2), beta=2.0)),
    "HardConcrete": lambda: dict(log_alpha=torch.zeros(2)),
    "ExponentialUniformGate": lambda: dict(logits=torch.zeros(2), beta=2.0, epsilon=0.1),
    "plot_credible_sets": lambda: dict(sets=[[0, 1]], correlation=torch.eye(3)),
    "pathwise_noise": lambda: dict(gate=HardConcrete(torch.zeros(2))),
    "to_arviz": lambda: dict(posterior=guide(), model=model, draws=3),
    "plot_inclusion": lambda: dict(active_probs=torch.rand(3), lower=torch.zeros(3), upper=torch.ones(3)),
    "BernoulliGate": lambda: dict(logits=torch.zeros(2)),
    "HardKumaraswamy": lambda: dict(concentration1=torch.ones(2), concentration0=torch.ones(2)),
    "RectifiedNormal": lambda: dict(loc=torch.zeros(2), scale=1.0),
    "Rectified": lambda: dict(base=dist.Normal(0.0, 1.0)),
    "kl_by_quadrature": lambda: dict(q=HardConcrete(0.0), p=HardConcrete(1.0)),
    "is_open": lambda: dict(door="together"),
    "AutoGate": lambda: dict(model=model),
    "AutoSpikeSlab": lambda: dict(model=model, slab={"w": "z"}),
    "Estimators": lambda: dict(name="arm"),
    "SparsityTarget": target,
    "check_fit": lambda: dict(model=model, guide=guide(), chains=2, flips=3, draws=5),
    "complete_samples": lambda: dict(model=model, samples={"z": torch.ones(3, 2), "w": torch.ones(3, 2)}),
    "fit": lambda: dict(model=model, guide=guide(), steps=2, num_particles=2),
    "sample_posterior": lambda: dict(model=model, slab={"w": "z"}, num_samples=8, warmup_steps=8, num_chains=2),
    "FixedGate": lambda: dict(value=torch.ones(3)),
    "Gate": lambda: dict(size=3),
    "NetworkGates": lambda: dict(network=nn.Sequential(L0Gate(3))),
    "penalty": lambda: dict(network=nn.Sequential(L0Gate(3)), cost=0.1),
    "NetworkCost": lambda: dict(network=network(), example=ONE),
    "fix_gates": lambda: dict(network=network(), gates=OPEN),
    "fix_weights": lambda: dict(network=network(), gates=OPEN),
    "gate_heads": lambda: dict(network=heads(), heads={"self_attn.out_proj": 2}),
    "gate_names": lambda: dict(network=network()),
    "gate_weights": lambda: dict(network=plain()),
    "insert_gates": lambda: dict(network=plain(), gates={"1": Gate(3)}, example=ONE),
    "name_gates": lambda: dict(network=network()),
    "square_norms": lambda: dict(network=network(), example=ONE),
    "suggest_gates": lambda: dict(network=plain(), example=ONE),
    "prune": lambda: dict(
        network=plain(), loss_fn=nn.functional.mse_loss, loader=BATCHES, budget=0.5, example=ONE, epochs=8
    ),
    "Training": dict,
    "exact_posterior": lambda: dict(**DATA, draws=5),
    "credible_sets": lambda: dict(
        gates=torch.ones(5, 3).bool().numpy(), active_probs=torch.ones(3).numpy(), x=DATA["X"]
    ),
    "factor": lambda: dict(name="f", log_factor=torch.zeros(())),
}
METHODS = {
    "NetworkCost.weights": (lambda: NetworkCost(network(), ONE).weights, lambda: dict(active=OPEN)),
    "NetworkCost.macs": (lambda: NetworkCost(network(), ONE).macs, lambda: dict(active=OPEN)),
    "AutoGate.load_state_dict": (
        lambda: guide(AutoGate).load_state_dict,
        lambda: dict(state_dict=guide(AutoGate).state_dict()),
    ),
    "L0Gate": (lambda: partial(L0Gate, 3), lambda: dict(dim=-1, family="hard_concrete", family_options={"zeta": 1.1})),
    "L0Gate.from_logits": (lambda: L0Gate.from_logits, lambda: dict(logits=torch.zeros(2))),
    "AutoGate.close": (lambda: guide(AutoGate).close, lambda: dict(name="z", places=torch.tensor([0]))),
    "AutoGate.keep": (lambda: of_network()[1].keep, lambda: dict(units={"2": torch.tensor([0])})),
    "Gate.forward": (lambda: Gate(3), lambda: dict(x=torch.ones(2, 3))),
    "HardConcrete.from_active_prob": (lambda: HardConcrete.from_active_prob, lambda: dict(active_prob=0.5)),
    "L0_ELBO.loss": (lambda: L0_ELBO("l0").loss, lambda: dict(model=model, guide=guide(AutoGate))),
}


def doors():
    """By name, what makes the function, what makes its good arguments, and the names of its parameters."""
    found = {}
    for home, names in MODULES.items():
        for name in names.split():
            function = getattr(importlib.import_module(f"pyro_l0.{home}"), name)
            found[name] = (lambda function=function: function), GOOD.get(name, dict)
    found.update(METHODS)
    for name, (function, good) in found.items():
        parameters = inspect.signature(function()).parameters.values()
        names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        yield name, function, good, list(dict.fromkeys([*names, *(x for x in good() if x not in names)]))


def call(function, arguments):
    """What a call ends in."""
    torch.manual_seed(0)
    pyro.clear_param_store()
    quiet = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        try:
            function(**arguments)
        except INTERNAL as error:
            if "--trace" in sys.argv:
                traceback.print_exc(file=sys.__stderr__)
            if not str(error).startswith("Expected"):
                return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
            return "refused"
        except Exception:
            return "refused"
    return "accepted"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", type=int, default=40, help="how many internal errors to print")
    parser.add_argument("--only", default="", help="part of the name of what is called")
    options = parser.parse_args()
    os.chdir(tempfile.mkdtemp())  # for the files of runs
    ends, inner = Counter(), []
    for name, function, good, parameters in doors():
        if options.only not in name:
            continue
        end = call(function(), good())
        if end != "accepted":
            print(f"{name} with good arguments: {end}")
        for parameter in parameters:
            for label, bad in BAD.items():
                end = call(function(), {**good(), parameter: bad()})
                ends[end if end in ("accepted", "refused") else "internal"] += 1
                if end not in ("accepted", "refused"):
                    inner.append(f"{name}({parameter}={label}): {end}")
    print(f"{sum(ends.values())} calls: " + ", ".join(f"{n} {end}" for end, n in ends.items()))
    print("\n".join(inner[: options.show]))
    return len(inner) >= MOST


if __name__ == "__main__":
    sys.exit(main())
