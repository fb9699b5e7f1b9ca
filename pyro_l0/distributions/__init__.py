"""Gates: distributions on [0, 1] with atoms, and their KL divergences."""

from pyro_l0.distributions import kl, no_transform  # noqa: F401  registers KLs and a refusal
from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.hard_concrete import HardConcrete
from pyro_l0.distributions.hard_kumaraswamy import HardKumaraswamy
from pyro_l0.distributions.mixture_families import ExponentialGate, ExponentialUniformGate, PowerLawGate
from pyro_l0.distributions.rectified import Rectified
from pyro_l0.distributions.rectified_normal import RectifiedNormal
from pyro_l0.retired import retired_names

__all__ = [
    "BernoulliGate",
    "ExponentialGate",
    "ExponentialUniformGate",
    "HardConcrete",
    "HardKumaraswamy",
    "PowerLawGate",
    "Rectified",
    "RectifiedNormal",
]

__getattr__ = retired_names(
    __name__,
    {
        "GateDistribution": "pyro_l0.distributions.gate.GateDistribution",
        "BinaryConcrete": "pyro_l0.distributions.binary_concrete.BinaryConcrete",
        "kl_by_quadrature": "pyro_l0.distributions.kl.kl_by_quadrature",
        "MixtureGate": "pyro_l0.distributions.mixture.MixtureGate",
    },
)
