"""Credible sets: small groups of correlated features of which one has an effect, with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse, sparray, spmatrix

from pyro_l0.expect import expect

__all__ = ["CredibleSet", "credible_sets", "open_gates"]

# A set grows from a feature that has at least this inclusion probability: less would make sets of the prior alone.
_SEED = 0.05
_SHOWN = 8  # members that a set's text names, the most probable ones


@dataclass(frozen=True)
class CredibleSet:
    """Correlated features, at least one of which has an effect; :func:`~pyro_l0.selection.credible_sets` finds them.

    Attributes:
        features: indices of the members, the most probable first.
        probability: P(at least one of their gates is open | y).
        purity: smallest absolute correlation of two members; 1 if there is only one member.
        names: names of the members, if the features have names.
    """

    features: tuple[int, ...]
    probability: float
    purity: float
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        members = self.names or tuple(map(str, self.features))
        shown = [*members[:_SHOWN], f"{len(members) - _SHOWN} more"] if len(members) > _SHOWN + 1 else members
        return f"{{{', '.join(shown)}}} (probability {self.probability:.3f}, purity {self.purity:.2f})"


def credible_sets(
    gates: NDArray[np.bool_],
    active_probs: NDArray[np.float64],
    x: NDArray[np.float64] | sparray | spmatrix,
    *,
    level: float = 0.95,
    min_correlation: float = 0.5,
    names: Sequence[str] = (),
    gate_of: NDArray[np.intp] | None = None,
    weights: NDArray[np.float64] | None = None,
) -> list[CredibleSet]:
    """Group the features of a posterior into disjoint credible sets.

    A set starts with the most probable feature that is in no set yet. One by one it adds, of the features that
    correlate with every member, the one that is open most often while no member is, until the probability that a member
    is open reaches the level. Members that turn out not to be needed are dropped. A feature whose set cannot reach the
    level starts none, but may join a later one.

    Because the draws are joint, a set contains a true effect as often as the posterior says, however correlated the
    features are; inclusion probabilities of single features cannot show this.

    If features share gates, the members are groups of features. Two groups correlate as much as their two most
    correlated features.

    Args:
        gates: joint draws, bool, shape ``(N, G)``.
        active_probs: P(z = 1 | y) of every gate, shape ``(G,)``.
        x: features of the observations, shape ``(n, p)``, dense or sparse.
        level: minimum probability that a member is open.
        min_correlation: minimum absolute correlation of any two members.
        names: names of the gates; empty if they have none.
        gate_of: which gate switches each feature, shape ``(p,)``; by default each has its own.
        weights: how many observations each row of x stands for, shape ``(n,)``; one by default.

    Returns:
        The sets, in the order in which they were found.

    Raises:
        TypeError: an argument is not an array, or has another wrong type.
        ValueError: the level or the correlation is not between 0 and 1, or the shapes do not fit.

    Example:
        >>> import numpy as np
        >>> x = np.array([[0.0, 0.1], [1.0, 0.9], [2.0, 2.1]])  # two nearly equal features
        >>> gates = np.array([[True, False], [False, True]])  # now one is open, now the other
        >>> [found.features for found in credible_sets(gates, gates.mean(0), x)]
        [(0, 1)]
    """
    expect(np.ndarray, "an array", gates=gates, active_probs=active_probs)
    expect(np.ndarray | sparray | spmatrix, "an array", x=x)
    expect(np.ndarray | None, "an array", gate_of=gate_of, weights=weights)
    expect(Sequence | np.ndarray, "a list of names", names=names)
    expect(Real, "a number", level=level, min_correlation=min_correlation)
    for name, value in (("level", level), ("min_correlation", min_correlation)):
        if not 0 <= value <= 1:
            raise ValueError(f"Expected {name} to be between 0 and 1, but got {value!r}.")
    gate_of = np.arange(x.shape[1]) if gate_of is None else gate_of
    fits = gates.shape[1:] == active_probs.shape == (gate_of.max() + 1,) and gate_of.shape == x.shape[1:]
    if not fits or len(names) not in (0, len(active_probs)):
        raise ValueError(
            f"Expected as many gates as inclusion probabilities and features, and names of all or none, but got "
            f"{gates.shape[1:]}, {active_probs.shape}, {x.shape[1:]} and {len(names)}."
        )
    grower = _Grower(gates, x, gate_of, weights, level, min_correlation)
    free = np.ones(len(active_probs), dtype=bool)
    found = []
    for seed in np.argsort(-active_probs, kind="stable"):
        if active_probs[seed] < _SEED:
            break
        members = grower.grow(seed, free) if free[seed] else None
        if members is not None:
            free[members] = False
            ordered = sorted(members, key=lambda j: (-active_probs[j], j))
            found.append(
                CredibleSet(
                    features=tuple(ordered),
                    probability=float(gates[:, ordered].any(1).mean()),
                    purity=grower.purity(ordered),
                    names=tuple(str(names[j]) for j in ordered) if len(names) else (),
                )
            )
    return found


def open_gates(coefficients: csr_array, gate_of: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which gates are open, shape ``(N, G)``, in draws of coefficients that are stored for open gates only.

    The draws have the shape ``(N, p K)``, with the K coefficients of a feature side by side.
    """
    outputs = coefficients.shape[1] // len(gate_of)
    found = np.zeros((coefficients.shape[0], gate_of.max() + 1), dtype=bool)
    rows = np.repeat(np.arange(len(found)), np.diff(coefficients.indptr))
    found[rows, gate_of[coefficients.indices // outputs]] = True
    return found


class _Grower:
    """Grows one set at a time from draws of the gates; takes arguments of :func:`credible_sets`."""

    def __init__(
        self,
        gates: NDArray[np.bool_],
        x: Any,
        gate_of: NDArray[np.intp],
        weights: NDArray[np.float64] | None,
        level: float,
        min_correlation: float,
    ) -> None:
        # Gates that are never open are in no set: a large design shrinks to few columns.
        self._seen = np.flatnonzero(gates.any(0))
        self._column_of = {int(j): i for i, j in enumerate(self._seen)}
        self._gates = gates[:, self._seen]
        columns = np.flatnonzero(np.isin(gate_of, self._seen))
        self._of = np.searchsorted(self._seen, gate_of[columns])
        x = x[:, columns].toarray() if issparse(x) else x[:, columns]
        centred = x - x.mean(0) if weights is None else np.sqrt(weights)[:, None] * (x - weights @ x / weights.sum())
        norm = np.sqrt((centred**2).sum(0))
        # A constant feature correlates with none.
        self._unit = centred / np.where(norm > 0, norm, np.inf)
        self._level, self._min_correlation = level, min_correlation

    def grow(self, seed: int, free: NDArray[np.bool_]) -> list[int] | None:
        """The members of a set that starts with a feature; None if it does not reach the level.

        A cover by greed: while too many draws have no open member (``missed``), the feature that is open in most of
        them joins, among those that correlate enough with all members. Members that the level does not need then leave.
        """
        if int(seed) not in self._column_of:
            return None
        members = [self._column_of[int(seed)]]
        allowed = free[self._seen].copy()
        missed = ~self._gates[:, members[0]]
        while missed.mean() > 1 - self._level:
            allowed &= self._correlations(members[-1]) >= self._min_correlation
            allowed[members] = False
            gain = np.where(allowed, self._gates[missed].sum(0), 0)
            best = int(gain.argmax())
            if gain[best] == 0:
                return None
            members.append(best)
            missed &= ~self._gates[:, best]
        return [int(self._seen[j]) for j in self._needed(members)]

    def purity(self, features: Sequence[int]) -> float:
        """Smallest absolute correlation of two features."""
        members = [self._column_of[j] for j in features]
        among = [self._correlations(a)[members[i + 1 :]] for i, a in enumerate(members[:-1])]
        return min(1.0, float(np.concatenate(among).min())) if among else 1.0

    def _correlations(self, member: int) -> NDArray[np.float64]:
        correlations = np.zeros(len(self._seen))
        np.maximum.at(correlations, self._of, np.abs(self._unit[:, self._of == member].T @ self._unit).max(0))
        return correlations

    def _needed(self, members: list[int]) -> list[int]:
        """The members without those that the level does not need, the least often open leaving first."""
        opened = self._gates[:, members].mean(0)
        needed = list(members)
        for i in np.argsort(opened, kind="stable"):
            rest = [j for j in needed if j != members[i]]
            if rest and self._gates[:, rest].any(1).mean() >= self._level:
                needed = rest
        return needed
