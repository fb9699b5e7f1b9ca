"""Gates: distributions on [0, 1] with atoms, and their KL divergences."""

from pyro_l0.distributions import kl  # noqa: F401  registers KLs
from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import Bounded as Bounded
from pyro_l0.distributions.gate import GateDistribution as GateDistribution
from pyro_l0.distributions.gate import as_parameters as as_parameters
from pyro_l0.distributions.hard_concrete import HardConcrete
from pyro_l0.distributions.hard_kumaraswamy import HardKumaraswamy
from pyro_l0.distributions.kl import kl_by_quadrature as kl_by_quadrature
from pyro_l0.distributions.mixtures import ExponentialGate, ExponentialUniformGate, PowerLawGate
from pyro_l0.distributions.mixtures import MixtureGate as MixtureGate
from pyro_l0.distributions.rectified import Rectified, RectifiedNormal
from pyro_l0.distributions.stretched import QuadratureGate as QuadratureGate
from pyro_l0.maths.quadrature import edges_around as edges_around

# What a star brings; what is imported "as" itself is public, too.
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
