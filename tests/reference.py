"""Slow twins of the gate families in 50-digit arithmetic, written from the textbook definitions.

They share no code with the library and no algebra beyond the definitions: a gate is
``z = min(1, max(0, s))`` for a continuous ``s``, so a twin needs only the density, the cdf, the
survival function and the quantile function of ``s``. Everything else is a sum over the two atoms
and one integral over (0, 1). To add a family, write those four methods and ``breakpoints``.
"""

import mpmath

__all__ = [
    *("BernoulliReference", "ExponentialReference", "ExponentialUniformReference", "HardConcreteReference"),
    *("HardKumaraswamyReference", "PowerLawReference", "RectifiedNormalReference", "kl"),
]

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
        raise NotImplementedError

    def above(self, z):
        raise NotImplementedError

    def quantile(self, u):
        """Point that the unclipped variable stays below with probability u."""
        raise NotImplementedError

    def breakpoints(self):
        """Points inside (0, 1) between which the density is smooth at the panel's own scale."""
        raise NotImplementedError

    @property
    def p0(self):
        return self.below(mp.mpf(0))

    @property
    def p1(self):
        return self.above(mp.mpf(1))

    @property
    def active_prob(self):
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
        z = mp.mpf(z)
        if z < 0:
            return mp.mpf(0)
        return mp.mpf(1) if z >= 1 else self.below(z)

    def icdf(self, u):
        """Smallest z with cdf(z) >= u."""
        return min(mp.mpf(1), max(mp.mpf(0), self.quantile(mp.mpf(u))))

    @property
    def median(self):
        return self.icdf(mp.mpf(1) / 2)

    @property
    def mean(self):
        return self.p1 + integrate(lambda z: z * self.density(z), self)

    @property
    def variance(self):
        m = self.mean
        inside = integrate(lambda z: (z - m) ** 2 * self.density(z), self)
        return self.p0 * m**2 + self.p1 * (1 - m) ** 2 + inside

    @property
    def entropy(self):
        """Entropy with respect to the two atoms plus Lebesgue measure."""
        inside = integrate(lambda z: self.density(z) * mp.log(self.density(z)), self)
        return -self.p0 * mp.log(self.p0) - self.p1 * mp.log(self.p1) - inside


class RectifiedNormalReference(GateReference):
    """Normal variable, clipped to [0, 1]."""

    def __init__(self, loc, scale):
        self.loc = mp.mpf(loc)
        self.scale = mp.mpf(scale)

    def density(self, z):
        return mp.npdf(z, self.loc, self.scale)

    def below(self, z):
        return mp.ncdf((z - self.loc) / self.scale)

    def above(self, z):
        """Normal cdf of the mirrored point."""
        return mp.ncdf((self.loc - z) / self.scale)

    def quantile(self, u):
        return self.loc + self.scale * mp.sqrt(2) * mp.erfinv(2 * u - 1)

    def breakpoints(self):
        """Points at which the density has fallen by another factor e^10 from its top in [0, 1]."""
        top = min(mp.mpf(1), max(mp.mpf(0), self.loc))
        distance = (top - self.loc) / self.scale
        steps = [self.scale * mp.sqrt(distance**2 + 20 * k) for k in range(9)]
        return [p for s in steps for p in (self.loc - s, self.loc + s) if 0 < p < 1]


class BernoulliReference(GateReference):
    """Both atoms and nothing between."""

    def __init__(self, logits):
        self.weight = 1 / (1 + mp.exp(-mp.mpf(logits)))

    def density(self, _):
        return mp.mpf(0)

    def below(self, _):
        return 1 - self.weight

    def above(self, _):
        return self.weight

    def quantile(self, u):
        return mp.mpf(u > 1 - self.weight)

    def breakpoints(self):
        return []

    @property
    def entropy(self):
        return -self.p0 * mp.log(self.p0) - self.p1 * mp.log(self.p1)


class StretchedReference(GateReference):
    """A variable s on (0, 1), stretched to (gamma, zeta) and clipped."""

    def __init__(self, gamma, zeta):
        self.gamma = mp.mpf(gamma)
        self.zeta = mp.mpf(zeta)
        self.width = self.zeta - self.gamma

    def _unstretched(self, z):
        return (z - self.gamma) / self.width

    def breakpoints(self):
        """Even steps, and finer ones towards the ends, where a power may be steep beyond a narrow stretch."""
        steps = [mp.mpf(k) / 16 for k in range(1, 16)]
        fine = [mp.mpf(2) ** -k for k in range(5, 12)]
        return [*fine, *steps, *(1 - x for x in fine)]


class HardConcreteReference(StretchedReference):
    """Binary concrete variable, stretched to (gamma, zeta) and clipped (Louizos eq. 10, 23, 24)."""

    def __init__(self, log_alpha, temperature, gamma=-0.1, zeta=1.1):
        super().__init__(gamma, zeta)
        self.log_alpha, self.temperature = mp.mpf(log_alpha), mp.mpf(temperature)

    def density(self, z):
        """Binary concrete density (eq. 23) at the unstretched point, over the width."""
        alpha, beta = mp.exp(self.log_alpha), self.temperature
        s = self._unstretched(z)
        top = beta * alpha * s ** (-beta - 1) * (1 - s) ** (-beta - 1)
        return top / (alpha * s**-beta + (1 - s) ** -beta) ** 2 / self.width

    def _log_odds(self, z):
        """Log odds of the cdf (eq. 24)."""
        odds = (z - self.gamma) / (self.zeta - z)
        return self.temperature * mp.log(odds) - self.log_alpha

    def below(self, z):
        return 1 / (1 + mp.exp(-self._log_odds(z)))

    def above(self, z):
        """Sigmoid of minus the log odds."""
        return 1 / (1 + mp.exp(self._log_odds(z)))

    def quantile(self, u):
        """Stretched sigmoid of (log alpha + logit u) / temperature (eq. 10)."""
        odds = mp.exp((mp.log(u) - mp.log(1 - u) + self.log_alpha) / self.temperature)
        return self.gamma + self.width * odds / (1 + odds)

    def breakpoints(self):
        """Even steps on the logit scale, where the density is a smooth bump."""
        start = mp.log(-self.gamma / self.zeta)
        stop = mp.log((1 - self.gamma) / (self.zeta - 1))
        count = int(mp.ceil((stop - start) * max(self.temperature, 1) / 2))
        logits = [start + (stop - start) * k / count for k in range(1, count)]
        return [self.gamma + self.width / (1 + mp.exp(-t)) for t in logits]


class HardKumaraswamyReference(StretchedReference):
    """Kumaraswamy variable: P(s > x) = (1 - x^a)^b (Bastings et al.)."""

    def __init__(self, concentration1, concentration0, gamma=-0.1, zeta=1.1):
        super().__init__(gamma, zeta)
        self.a, self.b = mp.mpf(concentration1), mp.mpf(concentration0)

    def density(self, z):
        """a b s^(a - 1) (1 - s^a)^(b - 1) over the width."""
        s = self._unstretched(z)
        return self.a * self.b * s ** (self.a - 1) * (1 - s**self.a) ** (self.b - 1) / self.width

    def below(self, z):
        return 1 - self.above(z)

    def above(self, z):
        return (1 - self._unstretched(z) ** self.a) ** self.b

    def quantile(self, u):
        """The survival function solved for s."""
        return self.gamma + self.width * (1 - (1 - u) ** (1 / self.b)) ** (1 / self.a)


class MixtureReference(StretchedReference):
    """Mixture of a component near 0 and its mirror image (the mixture paper's eq. 4-8); a family gives r0 and R0."""

    def __init__(self, logits, beta, gamma=-0.1, zeta=1.1):
        super().__init__(gamma, zeta)
        self.weight, self.beta = 1 / (1 + mp.exp(-mp.mpf(logits))), mp.mpf(beta)

    def r0(self, s):
        """Density of the component near 0."""
        raise NotImplementedError

    def R0(self, s):  # noqa: N802
        raise NotImplementedError

    def density(self, z):
        s = self._unstretched(z)
        return ((1 - self.weight) * self.r0(s) + self.weight * self.r0(1 - s)) / self.width

    def below(self, z):
        """Both cdfs; the mirrored one is that of 1 - s from above."""
        s = self._unstretched(z)
        return (1 - self.weight) * self.R0(s) + self.weight * (1 - self.R0(1 - s))

    def above(self, z):
        s = self._unstretched(z)
        return (1 - self.weight) * (1 - self.R0(s)) + self.weight * self.R0(1 - s)

    def logit_slope(self, s):
        """Change of s with the logits at a fixed value of the cdf (eq. 12)."""
        gap = self.R0(s) - 1 + self.R0(1 - s)
        density = (1 - self.weight) * self.r0(s) + self.weight * self.r0(1 - s)
        return self.weight * (1 - self.weight) * gap / density

    def quantile(self, u):
        """Bisection; the clipped values need no search."""
        low, high = mp.mpf(0), mp.mpf(1)
        if self.below(low) >= u:
            return low
        if self.below(high) <= u:
            return high
        for _ in range(150):
            middle = (low + high) / 2
            low, high = (middle, high) if self.below(middle) < u else (low, middle)
        return middle


class ExponentialReference(MixtureReference):
    """Truncated exponentials."""

    def r0(self, s):
        return self.beta * mp.exp(-self.beta * s) / (1 - mp.exp(-self.beta))

    def R0(self, s):  # noqa: N802
        return (1 - mp.exp(-self.beta * s)) / (1 - mp.exp(-self.beta))


class ExponentialUniformReference(ExponentialReference):
    """Truncated exponentials with a uniform share."""

    def __init__(self, logits, beta, epsilon, gamma=-0.1, zeta=1.1):
        super().__init__(logits, beta, gamma, zeta)
        self.epsilon = mp.mpf(epsilon)

    def r0(self, s):
        return (1 - self.epsilon) * super().r0(s) + self.epsilon

    def R0(self, s):  # noqa: N802
        return (1 - self.epsilon) * super().R0(s) + self.epsilon * s


class PowerLawReference(MixtureReference):
    """Power laws."""

    def r0(self, s):
        return s ** (1 / self.beta - 1) / self.beta

    def R0(self, s):  # noqa: N802
        return s ** (1 / self.beta)


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
