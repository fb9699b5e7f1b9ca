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

from pyro_l0 import _numerics
from pyro_l0.distributions import (
    ExponentialGate,
    ExponentialUniformGate,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    RectifiedNormal,
)
from tests.reference import (
    ExponentialReference,
    ExponentialUniformReference,
    HardConcreteReference,
    HardKumaraswamyReference,
    PowerLawReference,
    RectifiedNormalReference,
    kl,
)

FILES = [Path(__file__).parent.parent / "vectors" / "gates.json"]
if os.environ.get("PYRO_L0_VECTORS"):
    FILES.append(Path(os.environ["PYRO_L0_VECTORS"]))

# Names of the parameters in the files and in the library.
HARD_CONCRETE = {"log_alpha": "log_alpha", "beta": "temperature", "gamma": "gamma", "zeta": "zeta"}
MIXTURE = {"logit_q": "logits", "beta": "beta", "eps": "epsilon", "lo": "gamma", "hi": "zeta"}
NAMES = {
    "HardConcrete": HARD_CONCRETE,
    "RectifiedNormal": {"mu": "loc", "sigma": "scale"},
    "HardKumaraswamy": {"a": "concentration1", "b": "concentration0", "lo": "gamma", "hi": "zeta"},
    "MDRExp": MIXTURE,
    "MDRExpUni": MIXTURE,
    "MDRPowerLaw": MIXTURE,
}
GATES = {
    "HardConcrete": HardConcrete,
    "RectifiedNormal": RectifiedNormal,
    "HardKumaraswamy": HardKumaraswamy,
    "MDRExp": ExponentialGate,
    "MDRExpUni": ExponentialUniformGate,
    "MDRPowerLaw": PowerLawGate,
}
TWINS = {
    "HardConcrete": HardConcreteReference,
    "RectifiedNormal": RectifiedNormalReference,
    "HardKumaraswamy": HardKumaraswamyReference,
    "MDRExp": ExponentialReference,
    "MDRExpUni": ExponentialUniformReference,
    "MDRPowerLaw": PowerLawReference,
}
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
        actual = actual.item() if isinstance(actual, torch.Tensor) else float(actual)
        self.count += 1
        error = abs(actual - expected)
        if not error <= absolute + relative * abs(expected):  # so that NaN fails
            self.failures.append(f"{self.where} {what}: {actual!r}, not {expected!r} (error {error:.2e})")

    def each(self, entries):
        """The entries, one after the other, whose names the failures get; what an entry raises is one of them."""
        for self.where, entry in entries:
            yield entry

    def finish(self):
        """Fail with all failures in one message."""
        assert self.count, "Nothing was compared."
        assert not self.failures, f"{len(self.failures)} of {self.count} differ:\n" + "\n".join(self.failures)


@pytest.fixture
def check():
    """A comparison that fails after the test's last value."""
    comparison = Comparison()
    yield comparison
    comparison.finish()


def tensors(params, dtype):
    """The file's parameters as leaf tensors under the file's names; the stretch as numbers."""
    return {
        name: torch.tensor(value, dtype=dtype, requires_grad=True) if name in LEARNABLE else value
        for name, value in params.items()
    }


def gate(family, leaves):
    """The library's gate from parameters under the file's names."""
    return GATES[family](**{NAMES[family][name]: value for name, value in leaves.items()})


def check(what, actual, expected, relative, absolute=0.0):
    """Compare a tensor (or a twin's number) with a number and say what differs by how much."""
    actual = actual.item() if isinstance(actual, torch.Tensor) else float(actual)
    error = abs(actual - expected)
    allowed = absolute + relative * abs(expected)
    assert error <= allowed, f"{what}: {actual!r}, not {expected!r} (error {error:.2e})"


def check_log(what, actual, expected, dtype):
    """A log: relative in float64, against max(1, |value|) in float32."""
    if dtype == torch.float64:
        # 1e-15 is a few epsilons beside probabilities whose log is as small as -1e-13.
        check(what, actual, expected, 1e-10, 1e-15)
    else:
        check(what, actual, expected, 0.0, 5e-6 * max(1.0, abs(expected)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "entry"), entries())
def test_probabilities(family, entry, dtype):
    """Masses and their logs, log_prob at every z."""
    g = gate(family, tensors(entry["params"], dtype))
    check_log("log_p0", g.log_prob_zero, entry["log_p0"], dtype)
    check_log("log_p1", g.log_prob_one, entry["log_p1"], dtype)
    check_log("log_p_mid", g.log_interior_prob, entry["log_p_mid"], dtype)
    check_log("log_active_prob", g.log_active_prob, entry["log_active_prob"], dtype)
    # A probability from a log carries the log's error as a relative one.
    relative = 1e-10 if dtype == torch.float64 else 5e-6 * max(1, abs(entry["log_active_prob"]))
    check("active_prob", g.active_prob, entry["active_prob"], relative)
    for z, expected in entry["log_prob"]:
        check_log(f"log_prob({z})", g.log_prob(torch.tensor(z, dtype=dtype)), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "entry"), entries())
def test_cdf(family, entry, dtype):
    """The cdf at every z, below 0 and above 1 too."""
    g = gate(family, tensors(entry["params"], dtype))
    # A cdf is read on the scale of 1: float32 carries 6e-8 of it, and rounds the location first.
    relative, absolute = (1e-10, 1e-15) if dtype == torch.float64 else (0.0, 1e-6)
    for z, expected in entry["cdf"]:
        check(f"cdf({z})", g.cdf(torch.tensor(z, dtype=dtype)), expected, relative, absolute)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "entry"), entries())
def test_quantiles(family, entry, dtype):
    """icdf with its slope, the median, the test gate of eq. 13."""
    g = gate(family, tensors(entry["params"], dtype))
    relative, absolute = (1e-10, 1e-14) if dtype == torch.float64 else (0.0, 1e-6)
    for p, z, slope in entry["icdf"]:
        u = torch.tensor(p, dtype=dtype, requires_grad=True)
        value = g.icdf(u)
        # Rounding p moves z by the slope, so the slope enters the absolute error.
        check(f"icdf({p})", value, z, relative, absolute * (1 + slope))
        (actual,) = torch.autograd.grad(value, u)
        check(f"slope at {p}", actual, slope, 1e-10 if dtype == torch.float64 else 5e-5)
    check("median", g.median, entry["median"], relative, absolute)
    if "eq13_gate" in entry:
        check("test gate", g.test_gate, entry["eq13_gate"], relative, absolute)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "entry"), entries())
def test_moments(family, entry, dtype):
    """Mean, its derivatives, variance and entropy."""
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "entry"), entries())
def test_pathwise_derivatives(family, entry, dtype):
    """A draw at fixed noise and its derivatives for the parameters."""
    names = [
        name for name in entry["params"] if name in LEARNABLE and not (name == "beta" and "logit_q" in entry["params"])
    ]
    for u, z, *derivatives in entry["pathwise"]:
        leaves = tensors(entry["params"], dtype)
        if family == "HardConcrete":
            noise = torch.tensor(math.log(u) - math.log1p(-u), dtype=dtype)
            stretch = _numerics.make_stretch(leaves["gamma"], leaves["zeta"], dtype)
            value = _numerics.hard_concrete_transform(noise, leaves["log_alpha"], leaves["beta"], stretch)
        else:
            value = gate(family, leaves).icdf(torch.tensor(u, dtype=dtype))
        relative, absolute = (1e-10, 1e-14) if dtype == torch.float64 else (5e-5, 1e-6)
        check(f"z at {u}", value, z, relative, absolute)
        gradients = torch.autograd.grad(value, [leaves[name] for name in names])
        for name, gradient, expected in zip(names, gradients, derivatives, strict=True):
            check(f"dz/d{name} at {u}", gradient, expected, relative, absolute)


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
@pytest.mark.parametrize(("group", "entry"), pairs())
def test_kl(group, entry, dtype):
    """KL and its partial derivatives, all parameters being separate tensors."""
    value, gradients = kl_and_gradient(entry, dtype)
    relative = 1e-10 if dtype == torch.float64 else 1e-5
    value_slack, gradient_slack = near_equal_rounding(entry, dtype)
    check("kl", value, entry["kl"], relative, value_slack)
    relative = 1e-10 if dtype == torch.float64 else 5e-5
    for name, expected in entry["grad"].items():
        scale = max(abs(expected), entry["kl"])
        check(f"d kl / d {name}", gradients[name], expected, 0.0, relative * scale + gradient_slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "entry"), [pair for pair in pairs() if pair.values[0] == "hc_hc_same_temperature"])
def test_kl_with_a_shared_temperature(group, entry, dtype):
    """The closed form: no slack for nearly equal gates, and the sum of both derivatives for beta."""
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


def check_kl_of_batch(stored, group, dtype):
    """Entries of one pair of families as one batch."""
    sides = []
    for side in "qp":
        columns = {
            name: torch.tensor([entry[side]["params"][name] for entry in stored], dtype=dtype)
            for name in stored[0][side]["params"]
        }
        sides.append(gate(stored[0][side]["dist"], columns))
    values = kl_divergence(*sides)
    relative = 1e-10 if dtype == torch.float64 else 1e-5
    for index, (value, entry) in enumerate(zip(values, stored, strict=True)):
        slack, _ = near_equal_rounding(entry, dtype)
        check(f"{group} {index}", value, entry["kl"], relative, slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", KL_GROUPS)
def test_kl_of_batches(group, dtype):
    """All entries of a group as one batch, with the stretch as tensors and no gradients."""
    for path in FILES:
        kinds: dict[tuple[str, str], list] = {}
        for entry in json.loads(path.read_text())["kl"][group]:
            kinds.setdefault((entry["q"]["dist"], entry["p"]["dist"]), []).append(entry)
        for stored in kinds.values():
            check_kl_of_batch(stored, group, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", GATES)
def test_statistics_of_batches(family, dtype):
    """All entries of a family as one batch, with the stretch as tensors."""
    for path in FILES:
        stored = json.loads(path.read_text())["distributions"][family]
        columns = {
            name: torch.tensor([entry["params"][name] for entry in stored], dtype=dtype) for name in stored[0]["params"]
        }
        g = gate(family, columns)
        relative = 1e-10 if dtype == torch.float64 else 1e-5
        for index, entry in enumerate(stored):
            check_log(f"log_p0 {index}", g.log_prob_zero[index], entry["log_p0"], dtype)
            check_log(f"log_p1 {index}", g.log_prob_one[index], entry["log_p1"], dtype)
            check_log(f"log_p_mid {index}", g.log_interior_prob[index], entry["log_p_mid"], dtype)
            check(f"mean {index}", g.mean[index], entry["mean"], relative)
            check(f"variance {index}", g.variance[index], entry["variance"], relative)


# --- the slow twins are checked too ------------------------------------------------------------


@pytest.mark.parametrize(("family", "entry"), entries()[::12])
def test_the_slow_twins_agree_with_the_stored_values(family, entry):
    """reference.py, by plain definitions, meets the file to the last digit of a double."""
    params = {NAMES[family][name]: value for name, value in entry["params"].items()}
    twin = TWINS[family](**params)
    for name in ("p0", "p1", "p_mid", "active_prob", "mean", "variance", "entropy", "median"):
        check(name, getattr(twin, name), entry[name], 4e-16)
    for z, expected in entry["log_prob"]:
        check(f"log_prob({z})", twin.log_prob(z), expected, 4e-16)
    for p, z, _ in entry["icdf"]:
        check(f"icdf({p})", twin.icdf(p), z, 4e-16)


@pytest.mark.parametrize(("group", "entry"), pairs()[::15])
def test_the_slow_kl_agrees_with_the_stored_values(group, entry):
    """The same for the KL."""
    sides = []
    for side in "qp":
        names = NAMES[entry[side]["dist"]]
        params = {names[name]: value for name, value in entry[side]["params"].items()}
        sides.append(TWINS[entry[side]["dist"]](**params))
    check("kl", kl(*sides), entry["kl"], 4e-16)
