"""Slow twins of the gate families in 50-digit arithmetic, written from the textbook definitions.

They share no code with the library and no algebra beyond the definitions: a gate is
``z = min(1, max(0, s))`` for a continuous ``s``, so a twin needs only the density, the cdf, the
survival function and the quantile function of ``s``. Everything else is a sum over the two atoms
and one integral over (0, 1). To add a family, write those four methods and ``breakpoints``.
"""

import mpmath

__all__ = ["HardConcreteReference", "RectifiedNormalReference", "kl"]

# A context of its own, so that no test changes the precision of another. 60 digits leave 20 for
# an interior mass of 1e-39 (log alpha = 90) computed as a difference of two cdf values.
mp = mpmath.MPContext()
mp.dps = 60


class GateReference:
    """A variable on [0, 1] with atoms at 0 and 1, given by its unclipped variable."""

    def density(self, z):
        """Density of the unclipped variable at z."""
        raise NotImplementedError

    def below(self, z):
        """P(unclipped variable <= z)."""
        raise NotImplementedError

    def above(self, z):
        """P(unclipped variable > z)."""
        raise NotImplementedError

    def quantile(self, u):
        """Point that the unclipped variable stays below with probability u."""
        raise NotImplementedError

    def breakpoints(self):
        """Points inside (0, 1) between which the density is smooth at the panel's own scale."""
        raise NotImplementedError

    @property
    def p0(self):
        """P(z = 0)."""
        return self.below(mp.mpf(0))

    @property
    def p1(self):
        """P(z = 1)."""
        return self.above(mp.mpf(1))

    @property
    def p_mid(self):
        """P(0 < z < 1)."""
        return self.below(mp.mpf(1)) - self.below(mp.mpf(0))

    @property
    def active_prob(self):
        """P(z != 0)."""
        return self.above(mp.mpf(0))

    def log_prob(self, z):
        """Log mass at 0 and 1, log density between."""
        z = mp.mpf(z)
        if z == 0:
            return mp.log(self.p0)
        if z == 1:
            return mp.log(self.p1)
        return mp.log(self.density(z))

    def cdf(self, z):
        """P(gate <= z), right-continuous."""
        z = mp.mpf(z)
        if z < 0:
            return mp.mpf(0)
        return mp.mpf(1) if z >= 1 else self.below(z)

    def icdf(self, u):
        """Smallest z with cdf(z) >= u."""
        return min(mp.mpf(1), max(mp.mpf(0), self.quantile(mp.mpf(u))))

    @property
    def median(self):
        """Middle of the distribution."""
        return self.icdf(mp.mpf(1) / 2)

    @property
    def mean(self):
        """E[z]."""
        return self.p1 + integrate(lambda z: z * self.density(z), self)

    @property
    def variance(self):
        """E[(z - E[z])^2]."""
        m = self.mean
        inside = integrate(lambda z: (z - m) ** 2 * self.density(z), self)
        return self.p0 * m**2 + self.p1 * (1 - m) ** 2 + inside

    @property
    def entropy(self):
        """Entropy with respect to the two atoms plus Lebesgue measure."""
        inside = integrate(lambda z: self.density(z) * mp.log(self.density(z)), self)
        return -self.p0 * mp.log(self.p0) - self.p1 * mp.log(self.p1) - inside


class HardConcreteReference(GateReference):
    """Binary concrete variable, stretched to (gamma, zeta) and clipped (Louizos eq. 10, 23, 24)."""

    def __init__(self, log_alpha, temperature, gamma=-0.1, zeta=1.1):
        self.log_alpha = mp.mpf(log_alpha)
        self.temperature = mp.mpf(temperature)
        self.gamma = mp.mpf(gamma)
        self.zeta = mp.mpf(zeta)

    def density(self, z):
        """Binary concrete density (eq. 23) at the unstretched point, over the width."""
        alpha, beta = mp.exp(self.log_alpha), self.temperature
        s = (z - self.gamma) / (self.zeta - self.gamma)
        top = beta * alpha * s ** (-beta - 1) * (1 - s) ** (-beta - 1)
        return top / (alpha * s**-beta + (1 - s) ** -beta) ** 2 / (self.zeta - self.gamma)

    def _log_odds(self, z):
        """Log odds of the cdf (eq. 24)."""
        odds = (z - self.gamma) / (self.zeta - z)
        return self.temperature * mp.log(odds) - self.log_alpha

    def below(self, z):
        """Sigmoid of the log odds."""
        return 1 / (1 + mp.exp(-self._log_odds(z)))

    def above(self, z):
        """Sigmoid of minus the log odds."""
        return 1 / (1 + mp.exp(self._log_odds(z)))

    def quantile(self, u):
        """Stretched sigmoid of (log alpha + logit u) / temperature (eq. 10)."""
        odds = mp.exp((mp.log(u) - mp.log(1 - u) + self.log_alpha) / self.temperature)
        return self.gamma + (self.zeta - self.gamma) * odds / (1 + odds)

    def breakpoints(self):
        """Even steps on the logit scale, where the density is a smooth bump."""
        start = mp.log(-self.gamma / self.zeta)
        stop = mp.log((1 - self.gamma) / (self.zeta - 1))
        count = int(mp.ceil((stop - start) * max(self.temperature, 1) / 2))
        logits = [start + (stop - start) * k / count for k in range(1, count)]
        return [self.gamma + (self.zeta - self.gamma) / (1 + mp.exp(-t)) for t in logits]


class RectifiedNormalReference(GateReference):
    """Normal variable, clipped to [0, 1]."""

    def __init__(self, loc, scale):
        self.loc = mp.mpf(loc)
        self.scale = mp.mpf(scale)

    def density(self, z):
        """Normal density."""
        return mp.npdf(z, self.loc, self.scale)

    def below(self, z):
        """Normal cdf."""
        return mp.ncdf((z - self.loc) / self.scale)

    def above(self, z):
        """Normal cdf of the mirrored point."""
        return mp.ncdf((self.loc - z) / self.scale)

    def quantile(self, u):
        """Normal quantile."""
        return self.loc + self.scale * mp.sqrt(2) * mp.erfinv(2 * u - 1)

    def breakpoints(self):
        """Points at which the density has fallen by another factor e^10 from its top in [0, 1]."""
        top = min(mp.mpf(1), max(mp.mpf(0), self.loc))
        distance = (top - self.loc) / self.scale
        steps = [self.scale * mp.sqrt(distance**2 + 20 * k) for k in range(9)]
        return [p for s in steps for p in (self.loc - s, self.loc + s) if 0 < p < 1]


def integrate(function, *gates):
    """Integral over (0, 1), split at the breakpoints of every gate involved."""
    inside = sorted({point for gate in gates for point in gate.breakpoints()})
    return mp.quad(function, [mp.mpf(0), *inside, mp.mpf(1)], method="gauss-legendre")


def kl(q, p):
    """KL(q || p): both atoms and one integral."""

    def term(z):
        return q.density(z) * mp.log(q.density(z) / p.density(z))

    atoms = q.p0 * mp.log(q.p0 / p.p0) + q.p1 * mp.log(q.p1 / p.p1)
    return atoms + integrate(term, q, p)
