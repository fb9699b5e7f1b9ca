"""Arguments of a wrong type are refused by name; tests/bench/bad_calls.py tries many more."""

import numpy as np
import pytest
import torch

from tests.bench.bad_calls import GOOD, METHODS, doors

KINDS = {
    "Shrinker": ["guide", "threshold", "patience"],
    "diagnose": ["target", "steps_left"],
    "measure_gradient": ["elbo", "draws", "exact"],
    "exact_gradient": ["elbo", "guide", "max_states"],
    "to_arviz": ["slab", "draws", "coords", "dims"],
    "plot_credible_sets": ["axes"],
    "BernoulliGate": ["validate_args"],
    "HardConcrete.from_active_prob": ["active_prob", "one_given_active"],
    "AutoGate": ["init_active_prob", "init_jitter", "family_options"],
    "AutoGate.close": ["places"],
    "AutoGate.keep": ["units"],
    "AutoSpikeSlab": ["slab", "init_scale", "init_loc", "hyper"],
    "L0_ELBO": ["slab", "square_norm", "vectorize_particles"],
    "SparsityTarget": ["budget", "pretrained"],
    "check_fit": ["guide", "chains", "flips", "draws"],
    "complete_samples": ["samples"],
    "fit": ["guide", "learning_rate", "progress"],
    "sample_posterior": ["slab", "num_samples", "warmup_steps", "num_chains"],
    "FixedGate": ["value", "dim"],
    "Training": ["resume", "progress", "finetune", "callbacks"],
    "prune": ["gates", "pretrained", "training"],
    "exact_posterior": ["rate", "expected_size", "slab_scale", "noise_scale", "draws"],
    "credible_sets": ["gates", "active_probs", "x", "level", "min_correlation", "names", "gate_of", "weights"],
}
FUNCTIONS = {name: function for name, function, _, _ in doors()}
ARGUMENTS = {**GOOD, **{name: good for name, (_, good) in METHODS.items()}, "L0_ELBO": dict}


@pytest.mark.parametrize(("name", "argument"), [(name, x) for name, some in KINDS.items() for x in some])
def test_types_of_arguments(name, argument):
    """By name, where it stands first in the message or within it."""
    for bad in (object(), len):
        with pytest.raises(TypeError, match=rf"Expected .*\b({argument}|guide|axes|probs)\b"):
            FUNCTIONS[name]()(**{**ARGUMENTS[name](), argument: bad})


@pytest.mark.parametrize("bad", [{"1": 3}, {1: torch.ones(3)}])
def test_gates_of_prune_are_gates(bad):
    with pytest.raises(TypeError, match=r"Expected gates\[.*\] to be a Gate, but got a value of type"):
        FUNCTIONS["prune"]()(**GOOD["prune"](), gates=bad)


def test_numbers_out_of_range():
    """Counts of a check, names of credible sets, places of gates."""
    for name in ("chains", "flips", "draws"):
        with pytest.raises(ValueError, match=f"Expected {name} of at least 1, but got -1"):
            FUNCTIONS["check_fit"]()(**{**GOOD["check_fit"](), name: -1})
    with pytest.raises(ValueError, match="Expected a name for each of 3 gates, but got 2"):
        FUNCTIONS["credible_sets"]()(**GOOD["credible_sets"](), names=np.array(["a", "b"]))
    with pytest.raises(TypeError, match=r"Expected places to be a tensor of indices, but got torch\.float32"):
        FUNCTIONS["AutoGate.close"]()("z", torch.zeros(1))
