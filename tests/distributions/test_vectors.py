"""Every entry of the stored reference values, in float64 and in float32.

``tests/vectors/gates.json`` holds values computed with 50 to 70 digits and stored as doubles. All
its parameters and arguments are exact in float32, so the same numbers test both precisions. Set
``PYRO_L0_VECTORS`` to test another file of the same structure as well.
"""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch.distributions import kl_divergence

from pyro_l0.maths import hard_concrete, quadrature
from tests.cases import FAMILIES
from tests.reference import kl

FILES = [Path(__file__).parent.parent / "vectors" / "gates.json"]
if os.environ.get("PYRO_L0_VECTORS"):
    FILES.append(Path(os.environ["PYRO_L0_VECTORS"]))

# Names of the parameters in the files and in the library.
MIXTURE = {"logit_q": "logits", "beta": "beta", "eps": "epsilon", "lo": "gamma", "hi": "zeta"}
NAMES = {
    "HardConcrete": {"log_alpha": "log_alpha", "beta": "temperature", "gamma": "gamma", "zeta": "zeta"},
    "RectifiedNormal": {"mu": "loc", "sigma": "scale"},
    "HardKumaraswamy": {"a": "concentration1", "b": "concentration0", "lo": "gamma", "hi": "zeta"},
    **dict.fromkeys(("MDRExp", "MDRExpUni", "MDRPowerLaw"), MIXTURE),
}
# The families of cases.py in the same order.
GATES = {name: family.gate for name, family in zip(NAMES, FAMILIES, strict=True)}
TWINS = {name: family.reference for name, family in zip(NAMES, FAMILIES, strict=True)}
KL_GROUPS = (
    "hc_hc_same_temperature",
    "hc_hc_different_temperature",
    "hc_hc_different_stretch",
    "hc_rn",
    "rn_hc",
    "rn_rn",
    "hk_hk",
    "hk_hc",
    "mdr_exp",
    "mdr_expuni",
    "mdr_powerlaw",
    "mdr_cross",
)
# Derivatives are stored for these, but for the beta of a mixture; the stretch stays fixed.
LEARNABLE = ("log_alpha", "beta", "mu", "sigma", "a", "b", "logit_q")
DTYPES = (torch.float64, torch.float32)


DOCUMENTS = {path.stem: json.loads(path.read_text()) for path in FILES}


def stored(kind, name):
    """The entries of a family or of a group of KLs, each with a name for messages."""
    for stem, document in DOCUMENTS.items():
        for index, entry in enumerate(document[kind][name]):
            yield f"{stem}-{name}-{index}", entry


class Comparison:
    """Collects what differs, so that one message shows every value that is wrong."""

    def __init__(self):
        self.failures = []
        self.count = 0
        self.where = ""

    def __call__(self, what, actual, expected, relative, absolute=0.0):
        """Compare a tensor (or a twin's number) with a number and note what differs by how much."""
        self.count += 1
        actual = actual.item() if isinstance(actual, torch.Tensor) else float(actual)
        error = abs(actual - expected)
        if not error <= absolute + relative * abs(expected):
            self.failures.append(f"{self.where} {what}: {actual!r}, not {expected!r} (error {error:.2e})")

    def log(self, what, actual, expected, dtype):
        """A log: relative in float64, against max(1, |value|) in float32."""
        if dtype == torch.float64:
            # 1e-15 is a few epsilons beside probabilities whose log is as small as -1e-13.
            self(what, actual, expected, 1e-10, 1e-15)
        else:
            self(what, actual, expected, 0.0, 5e-6 * max(1.0, abs(expected)))


def compare_each(entries, compare):
    """Call ``compare(check, entry)`` on named entries and fail once, with every difference and whatever was raised."""
    check = Comparison()
    for check.where, entry in entries:
        try:
            compare(check, entry)
        except Exception as error:
            check.failures.append(f"{check.where}: {error!r}")
    assert check.count, "Nothing was compared."
    assert not check.failures, f"{len(check.failures)} of {check.count} differ:\n" + "\n".join(check.failures)


def tensors(params, dtype):
    """The file's parameters as leaf tensors under the file's names; the stretch as numbers."""
    return {
        name: torch.tensor(value, dtype=dtype, requires_grad=True) if name in LEARNABLE else value
        for name, value in params.items()
    }


def gate(family, leaves):
    """The library's gate from parameters under the file's names."""
    return GATES[family](**{NAMES[family][name]: value for name, value in leaves.items()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", GATES)
def test_probabilities(family, dtype):
    """Masses and their logs, log_prob and the cdf at every z, below 0 and above 1 too."""

    def compare(check, entry):
        g = gate(family, tensors(entry["params"], dtype))
        check.log("log_p0", g.log_prob_zero, entry["log_p0"], dtype)
        check.log("log_p1", g.log_prob_one, entry["log_p1"], dtype)
        check.log("log_p_mid", g.log_interior_prob, entry["log_p_mid"], dtype)
        check.log("log_active_prob", g.log_active_prob, entry["log_active_prob"], dtype)
        # A probability from a log carries the log's error as a relative one.
        relative = 1e-10 if dtype == torch.float64 else 5e-6 * max(1, abs(entry["log_active_prob"]))
        check("active_prob", g.active_prob, entry["active_prob"], relative)
        for z, expected in entry["log_prob"]:
            check.log(f"log_prob({z})", g.log_prob(torch.tensor(z, dtype=dtype)), expected, dtype)
        # A cdf is read on the scale of 1: float32 carries 6e-8 of it, and rounds the location first.
        relative, absolute = (1e-10, 1e-15) if dtype == torch.float64 else (0.0, 1e-6)
        for z, expected in entry["cdf"]:
            check(f"cdf({z})", g.cdf(torch.tensor(z, dtype=dtype)), expected, relative, absolute)

    compare_each(stored("distributions", family), compare)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", GATES)
def test_quantiles(family, dtype):
    """icdf with its slope, the median, the test gate of eq. 13."""

    def compare(check, entry):
        g = gate(family, tensors(entry["params"], dtype))
        relative, absolute = (1e-10, 1e-14) if dtype == torch.float64 else (0.0, 1e-6)
        u = torch.tensor([p for p, *_ in entry["icdf"]], dtype=dtype, requires_grad=True)
        values = g.icdf(u)
        (slopes,) = torch.autograd.grad(values.sum(), u)
        for (p, z, slope), value, actual in zip(entry["icdf"], values, slopes, strict=True):
            # Rounding p moves z by the slope, so the slope enters the absolute error.
            check(f"icdf({p})", value, z, relative, absolute * (1 + slope))
            check(f"slope at {p}", actual, slope, 1e-10 if dtype == torch.float64 else 5e-5)
        check("median", g.median, entry["median"], relative, absolute)
        if "eq13_gate" in entry:
            check("test gate", g.test_gate, entry["eq13_gate"], relative, absolute)

    compare_each(stored("distributions", family), compare)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", GATES)
def test_moments(family, dtype):
    def compare(check, entry):
        leaves = tensors(entry["params"], dtype)
        g = gate(family, leaves)
        relative = 1e-10 if dtype == torch.float64 else 1e-5
        check("mean", g.mean, entry["mean"], relative)
        check("variance", g.variance, entry["variance"], relative)
        names = list(entry["d_mean"])
        gradients = torch.autograd.grad(g.mean, [leaves[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            expected = entry["d_mean"][name]
            # The derivative for the temperature changes sign, so it is read beside the mean's size.
            scale = max(abs(expected), min(entry["mean"], 1 - entry["mean"]))
            loose = 1e-10 if dtype == torch.float64 else 5e-5
            check(f"d mean / d {name}", gradient, expected, 0.0, loose * scale)
        if dtype == torch.float64:
            check("entropy", g.entropy(), entry["entropy"], 0.0, 1e-9)
        else:
            # Relative, but for entropies that pass through zero: 0.01 is the floor.
            check("entropy", g.entropy(), entry["entropy"], 0.0, 5e-5 * max(0.01, abs(entry["entropy"])))

    compare_each(stored("distributions", family), compare)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", GATES)
def test_pathwise_derivatives(family, dtype):
    """A draw at fixed noise and its derivatives for the parameters."""

    def compare(check, entry):
        names = [
            name
            for name in entry["params"]
            if name in LEARNABLE and not (name == "beta" and "logit_q" in entry["params"])
        ]
        count = len(entry["pathwise"])
        # One copy of the parameters for each draw gives one derivative for each draw.
        leaves = {
            name: torch.full((count,), value, dtype=dtype, requires_grad=True) if name in LEARNABLE else value
            for name, value in entry["params"].items()
        }
        places = [u for u, *_ in entry["pathwise"]]
        if family == "HardConcrete":
            noise = torch.tensor([math.log(u) - math.log1p(-u) for u in places], dtype=dtype)
            stretch = quadrature.make_stretch(leaves["gamma"], leaves["zeta"], dtype)
            values = hard_concrete.transform(noise, leaves["log_alpha"], leaves["beta"], stretch)
        else:
            values = gate(family, leaves).icdf(torch.tensor(places, dtype=dtype))
        gradients = torch.autograd.grad(values.sum(), [leaves[name] for name in names])
        relative, absolute = (1e-10, 1e-14) if dtype == torch.float64 else (5e-5, 1e-6)
        for index, (u, z, *derivatives) in enumerate(entry["pathwise"]):
            check(f"z at {u}", values[index], z, relative, absolute)
            for name, gradient, expected in zip(names, gradients, derivatives, strict=True):
                check(f"dz/d{name} at {u}", gradient[index], expected, relative, absolute)

    compare_each(stored("distributions", family), compare)


def kl_and_gradient(entry, dtype, shared=False):
    """KL of an entry and its gradient under the file's names, temperatures shared or not."""
    leaves = {side: tensors(entry[side]["params"], dtype) for side in "qp"}
    if shared:
        leaves["p"]["beta"] = leaves["q"]["beta"]
    q, p = (gate(entry[side]["dist"], leaves[side]) for side in "qp")
    value = kl_divergence(q, p)
    inputs = {
        f"{side}.{name}": leaf
        for side in "qp"
        for name, leaf in leaves[side].items()
        if name in LEARNABLE and not (shared and f"{side}.{name}" == "p.beta")
    }
    gradients = torch.autograd.grad(value, list(inputs.values()))
    return value, dict(zip(inputs, gradients, strict=True))


def near_equal_rounding(entry, dtype):
    """Absolute error that quadrature must be allowed where q and p nearly coincide.

    Each node compares two log densities of size up to |log f| that are rounded to eps |log f|. The
    KL is quadratic in their difference and its gradient linear, so the rounding is relative to
    sqrt(KL) in the first and absolute in the second. 4 covers |log f| of these entries.
    """
    rounding = 4 * torch.finfo(dtype).eps
    return rounding * math.sqrt(entry["kl"]), 4 * rounding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", KL_GROUPS)
def test_kl(group, dtype):
    """KL and its partial derivatives, all parameters being separate tensors."""

    def compare(check, entry):
        value, gradients = kl_and_gradient(entry, dtype)
        relative = 1e-10 if dtype == torch.float64 else 1e-5
        value_slack, gradient_slack = near_equal_rounding(entry, dtype)
        check("kl", value, entry["kl"], relative, value_slack)
        relative = 1e-10 if dtype == torch.float64 else 5e-5
        for name, expected in entry["grad"].items():
            scale = max(abs(expected), entry["kl"])
            check(f"d kl / d {name}", gradients[name], expected, 0.0, relative * scale + gradient_slack)

    compare_each(stored("kl", group), compare)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kl_with_a_shared_temperature(dtype):
    """The closed form: no slack for nearly equal gates, and the sum of both derivatives for beta."""

    def compare(check, entry):
        value, gradients = kl_and_gradient(entry, dtype, shared=True)
        check("kl", value, entry["kl"], 1e-10 if dtype == torch.float64 else 1e-5)
        grad = entry["grad"]
        expected = {
            "q.log_alpha": grad["q.log_alpha"],
            "p.log_alpha": grad["p.log_alpha"],
            "q.beta": grad["q.beta"] + grad["p.beta"],
        }
        relative = 1e-10 if dtype == torch.float64 else 5e-5
        for name, derivative in expected.items():
            scale = max(abs(derivative), entry["kl"])
            check(f"d kl / d {name}", gradients[name], derivative, 0.0, relative * scale)

    compare_each(stored("kl", "hc_hc_same_temperature"), compare)


# --- the slow twins are checked too ------------------------------------------------------------


@pytest.mark.slow
def test_the_slow_twins_agree_with_the_stored_values():
    """reference.py, by plain definitions, meets the file to the last digit of a double."""

    def compare(check, named):
        family, entry = named
        params = {NAMES[family][name]: value for name, value in entry["params"].items()}
        twin = TWINS[family](**params)
        for name in ("p0", "p1", "p_mid", "active_prob", "mean", "variance", "entropy", "median"):
            check(name, getattr(twin, name), entry[name], 4e-16)
        for z, expected in entry["log_prob"]:
            check(f"log_prob({z})", twin.log_prob(z), expected, 4e-16)
        for p, z, _ in entry["icdf"]:
            check(f"icdf({p})", twin.icdf(p), z, 4e-16)

    everything = [(name, (family, entry)) for family in GATES for name, entry in stored("distributions", family)]
    compare_each(everything[::12], compare)


@pytest.mark.slow
def test_the_slow_kl_agrees_with_the_stored_values():
    def compare(check, entry):
        sides = []
        for side in "qp":
            names = NAMES[entry[side]["dist"]]
            params = {names[name]: value for name, value in entry[side]["params"].items()}
            sides.append(TWINS[entry[side]["dist"]](**params))
        check("kl", kl(*sides), entry["kl"], 4e-16)

    everything = [named for group in KL_GROUPS for named in stored("kl", group)]
    compare_each(everything[::15], compare)
