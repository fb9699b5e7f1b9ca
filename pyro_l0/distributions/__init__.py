"""Gates: distributions on [0, 1] with atoms, and their KL divergences."""

from pyro_l0.distributions import kl  # noqa: F401  registers KLs
from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.hard_concrete import HardConcrete
from pyro_l0.distributions.hard_kumaraswamy import HardKumaraswamy
from pyro_l0.distributions.mixtures import ExponentialGate, ExponentialUniformGate, PowerLawGate
from pyro_l0.distributions.rectified import Rectified, RectifiedNormal

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
