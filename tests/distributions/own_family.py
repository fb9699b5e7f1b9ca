"""A family from outside of the package in the shared tests: pytest -p tests.distributions.own_family -k LogisticGate"""

from pathlib import Path

from tests import cases
from tests.reference import GateReference, mp

# That of docs/howto/own_family.md; import your own here.
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "own_family.md"
names = {"__name__": __name__}  # pickles look for the class here
exec(PAGE.read_text(encoding="utf-8").split("```")[1].partition("\n")[2], names)
LogisticGate = names["LogisticGate"]


class LogisticReference(GateReference):
    def __init__(self, loc, scale):
        self.loc, self.scale = mp.mpf(loc), mp.mpf(scale)

    def below(self, x):
        return 1 / (1 + mp.exp((self.loc - x) / self.scale))

    def above(self, x):
        return 1 / (1 + mp.exp((x - self.loc) / self.scale))

    def density(self, x):
        return self.below(x) * self.above(x) / self.scale

    def quantile(self, u):
        return self.loc + self.scale * mp.log(u / (1 - u))

    def breakpoints(self):
        return [x for k in range(-12, 13, 2) if 0 < (x := self.loc + k * self.scale) < 1]


usual = tuple({"loc": loc, "scale": scale} for loc, scale in ((0.3, 0.2), (-0.4, 0.2), (0.9, 0.3), (0.1, 1.0)))
extreme = tuple({"loc": loc, "scale": scale} for loc in (-9.0, 9.0) for scale in (0.1, 0.5))
family = cases.Family(
    LogisticGate, LogisticReference, usual, extreme, lambda u, v, _: {"loc": 2 * u - 0.5, "scale": 0.1 * 10**v}
)
cases.FAMILIES += (family,)
cases.GATES += tuple(cases.Case(family, x) for x in usual)
