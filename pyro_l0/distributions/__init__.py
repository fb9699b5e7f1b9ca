"""Gates: distributions on [0, 1] with atoms, and their KL divergences."""

from pyro_l0.distributions import no_transform  # noqa: F401  registers a refusal
from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.binary_concrete import BinaryConcrete
from pyro_l0.distributions.exponential import ExponentialGate
from pyro_l0.distributions.exponential_uniform import ExponentialUniformGate
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.distributions.hard_concrete import HardConcrete
from pyro_l0.distributions.hard_kumaraswamy import HardKumaraswamy
from pyro_l0.distributions.kl import kl_by_quadrature
from pyro_l0.distributions.mixture import MixtureGate
from pyro_l0.distributions.power_law import PowerLawGate
from pyro_l0.distributions.rectified import Rectified
from pyro_l0.distributions.rectified_normal import RectifiedNormal

__all__ = [
    "BernoulliGate",
    "BinaryConcrete",
    "ExponentialGate",
    "ExponentialUniformGate",
    "GateDistribution",
    "HardConcrete",
    "HardKumaraswamy",
    "MixtureGate",
    "PowerLawGate",
    "Rectified",
    "RectifiedNormal",
    "kl_by_quadrature",
]
