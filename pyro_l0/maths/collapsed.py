"""Gates of a quadratic log likelihood with the Gaussian slabs behind them integrated out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.maths.second_order import BATCH, DesignQuadratic, Normals, Quadratic, open_positions


class CollapsedQuadratic:
    """Log odds and evidence of gates in front of Gaussian slabs that are integrated out.

    The log likelihood is f (b'x - x'A x / 2) in x = z w, with slabs w ~ N(0, s^2) and f the ``factor``. In units of s,
    the open slabs have the precision M = I + U A U with U = sqrt(f) s (``unit``), and the linear term h = U sqrt(f) b.
    With M = L L' (``inverse`` is L^-1, ``whitened`` is L^-1 h) the log evidence is |L^-1 h|^2 / 2 - log det L: "Slabs
    given their gates" in docs/lab/derivations.md, for f = 1.

    The slabs' scale is a number or of shape ``(p,)``; ``(S, 1)`` or ``(S, p)`` where each of S chains has its own. With
    ``gate_of``, shape ``(p,)``, elements share gates; -1 is one that is always there. Of shape ``(p, k)``, it has the
    gates of which all must be open, as the gate of a group and that of a feature, padded with -1. ``factor``, shape
    ``(S,)``, multiplies A and b, such as the noise of each chain's own draw; ``linear``, shape ``(S, p)``, is b of each
    chain.
    """

    def __init__(
        self,
        quadratic: Quadratic,
        scale: float | Tensor,
        *,
        gate_of: Tensor | None = None,
        factor: Tensor | None = None,
        linear: Tensor | None = None,
    ) -> None:
        linear = quadratic.linear if linear is None else linear
        self.quadratic, self.gate_of = quadratic, gate_of
        self._scale = _by_chain(
            "scale", torch.as_tensor(scale, dtype=linear.dtype, device=linear.device), linear.shape[-1]
        )
        # A factor f is a change of unit: sqrt(f) beta has A itself, sqrt(f) b, and slabs that are sqrt(f) wider.
        root = _by_chain("factor", linear.new_ones(1) if factor is None else factor.to(linear)[:, None], 1).sqrt()
        self._linear, self._root = torch.atleast_2d(linear), root
        self._groups = None if gate_of is None else _Groups.of(gate_of, quadratic)

    @property
    def scale(self) -> Tensor:
        """Standard deviations of the slabs, shape ``(p,)``, or ``(S, p)`` where each chain has its own."""
        return self._scale.squeeze(0)

    @property
    def gates(self) -> int:
        """The number of gates G: of elements, p, or of the groups of ``gate_of``."""
        return self._scale.shape[1] if self._groups is None else len(self._groups.members)

    @property
    def chains(self) -> int | None:
        """The number of chains with scales or factors of their own; None where all gate vectors share one."""
        rows = max(len(self._scale), len(self._root), len(self._linear))
        return None if rows == 1 else rows

    def gibbs_logits(self, z: Tensor, prior_logits: Tensor) -> Tensor:
        """Log odds of every gate given the others, from those of the prior; z are zeros and ones, shape ``(S, G)``."""
        factors = self.log_bayes_factors(z)
        return factors.add_(prior_logits.to(factors))

    def log_bayes_factors(self, z: Tensor) -> Tensor:
        """Of every gate given the others, shape ``(S, G)``."""
        on = self.on(z)
        batches = self._batches(on, on.shape[1])
        parts = [self._log_bayes_factors(_picked(z, batch), _picked(on, batch), batch) for batch in batches]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def of_parts(self, z: Tensor, parts: Tensor) -> PartConditionals:
        """The same for some parts of the design's elements, shape ``(S, c)``, and for the gates that are open."""
        design, every = self.quadratic, _EVERY
        assert isinstance(design, DesignQuadratic)
        open_ = self._open(self.on(z), every)
        gates, valid = design.members[parts].flatten(1), design.valid[parts].flatten(1)
        elements = self._elements_at(gates, every)
        factors = _log_integral(*_closed(open_, elements, design.rows(open_.index, parts)))
        of_open = _log_integral(*open_.alone())
        same = (open_.index[:, :, None] == gates[:, None, :]) & open_.valid[:, :, None] & valid[:, None, :]
        is_open = same.any(1)
        factors = torch.where(is_open, (of_open[:, None, :] @ same.to(of_open)).squeeze(1), factors)
        elsewhere = open_.valid & ~same.any(2)
        return PartConditionals(
            torch.cat([gates, open_.index], 1),
            torch.cat([valid, elsewhere], 1),
            torch.cat([is_open, elsewhere], 1),
            torch.cat([factors, of_open], 1),
        )

    def slab_moments(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log Bayes factor of every gate, and mean and variance of the slab behind it if it opens; each ``(S, p)``."""
        if self._groups is not None:
            raise ValueError("Expected each element to have a gate of its own, but some share one; draw the slabs.")
        on = self.on(z)
        parts = [self._slab(self._open(on[batch], batch), batch) for batch in self._batches(on, on.shape[1])]
        precision, linear = map(torch.cat, zip(*parts, strict=True))
        return _log_integral(precision, linear), linear / precision * self._scale, self._scale.square() / precision

    def log_evidence(self, z: Tensor) -> Tensor:
        """Log of the integral over the slabs, shape ``(S,)``; 0 where no gate is open."""
        on = self.on(z)
        return torch.cat([self._open(on[batch], batch).log_evidence for batch in self._batches(on)])

    def mean(self, z: Tensor) -> Tensor:
        """Posterior mean of the coefficients z w given the gates, shape ``(S, p)``."""
        on = self.on(z)
        return self._slabs(on, torch.zeros_like(on, dtype=self._scale.dtype))

    def draw_slabs(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A draw of the slabs w given the gates, shape ``(S, p)``; behind closed gates they follow their prior."""
        on = self.on(z)
        return self._slabs(on, torch.randn(on.shape, generator=generator, dtype=self._scale.dtype, device=on.device))

    def on(self, z: Tensor) -> Tensor:
        """Whether each element is open, shape ``(S, p)``."""
        if z.dim() != 2 or z.shape[1] != self.gates or self.chains not in (None, len(z)):
            chains = "S" if self.chains is None else self.chains
            raise ValueError(f"Expected gates of shape ({chains}, {self.gates}), but got {tuple(z.shape)}.")
        return z.bool() if self.gate_of is None else opened(z.bool(), self.gate_of).bool()

    def _batches(self, on: Tensor, width: int | None = None) -> Iterator[slice]:
        """Batches of the gate vectors that fit in memory, with ``width`` numbers for each open element."""
        if on.numel() * (width or on.shape[1]) <= BATCH:
            return iter([_EVERY])
        most = max(int(on.sum(1).max()), 1) if len(on) else 1
        size = max(1, BATCH // (most * (width or most)))
        return (slice(start, start + size) for start in range(0, max(len(on), 1), size))

    @cached_property
    def _every_element(self) -> _Elements:
        return _Elements.of(self._linear, self._scale, self._root, self.quadratic.diagonal)

    def _elements(self, batch: slice) -> _Elements:
        return _Elements(*(_picked(x, batch) for x in self._every_element))

    def _elements_at(self, index: Tensor, batch: slice) -> _Elements:
        linear, scale = (_at(_picked(x, batch), index) for x in (self._linear, self._scale))
        return _Elements.of(linear, scale, _picked(self._root, batch), self.quadratic.diagonal[index])

    def _open(self, on: Tensor, batch: slice) -> _Open:
        index, valid = open_positions(on)
        linear, scale = (_at(_picked(x, batch), index) for x in (self._linear, self._scale))
        root = _picked(self._root, batch)
        unit = scale * root * valid
        precision = (self.quadratic.blocks(index) * unit[:, :, None]).mul_(unit[:, None, :])
        precision.diagonal(dim1=1, dim2=2).add_(1 + _rounding(precision))
        eye = torch.eye(index.shape[1], dtype=unit.dtype, device=unit.device)
        inverse = torch.linalg.solve_triangular(torch.linalg.cholesky(precision), eye, upper=False)
        return _Open(index, valid, unit, inverse, _product(inverse, linear * root * unit))

    def _log_bayes_factors(self, z: Tensor, on: Tensor, batch: slice) -> Tensor:
        # Two evidences differ by the integral over one slab x, exp(h x - (e - 1) x^2 / 2) against its prior, which is
        # (h^2 / e - log e) / 2 (_log_integral). Behind a closed gate j, e and h are the Schur complement of M: with
        # c = L^-1 U A_j (cross), e = 1 + u_j^2 (A_jj - |c|^2) and h = h_j - u_j c'(L^-1 h), the rest. Behind an open
        # one they come from its mean m and variance V given y, as e = 1 / V and h = m / V, where V = (M^-1)_jj.
        open_ = self._open(on, batch)
        if self._groups is None:
            factors = _log_integral(*_closed(open_, self._elements(batch), self.quadratic.rows(open_.index)))
            return open_.placed(_log_integral(*open_.alone()), out=factors)
        elements, cross, rest = self._rest(open_, batch)
        return self._groups.log_bayes_factors(z, on, open_, cross, rest, elements.unit)

    def _rest(self, open_: _Open, batch: slice) -> tuple[_Elements, Tensor, Tensor]:
        """The elements, L^-1 t A of shape ``(S, k, p)``, and the linear term that the open elements leave."""
        elements = self._elements(batch)
        return elements, *_left(open_, elements, self.quadratic.rows(open_.index))

    def _slab(self, open_: _Open, batch: slice) -> tuple[Tensor, Tensor]:
        """Precision and linear term of each slab alone, in units of its scale, if its gate is open."""
        elements = self._elements(batch)
        precision, linear = _closed(open_, elements, self.quadratic.rows(open_.index))
        of_open = open_.alone()
        return open_.placed(of_open[0], out=precision), open_.placed(of_open[1], out=linear)

    def _slabs(self, on: Tensor, noise: Tensor) -> Tensor:
        """Posterior mean of the slabs plus noise times deviation; the noise alone behind closed gates."""
        parts = []
        for batch in self._batches(on):
            open_ = self._open(on[batch], batch)
            parts.append(
                open_.placed(open_.coloured(open_.whitened + _at(noise[batch], open_.index)), out=noise[batch])
            )
        return torch.cat(parts) * self._scale


class Share(NamedTuple):
    """One of several quadratic log likelihoods that share gates."""

    quadratic: Quadratic
    gate_of: Tensor | None  # which of its own gates each element has, as in CollapsedQuadratic
    gates: Tensor  # which of all gates its own are


class JointQuadratic(NamedTuple):
    """Quadratic log likelihoods of coefficients of their own, each at a noise of its own, behind G shared gates."""

    shares: tuple[Share, ...]
    gates: int

    def collapsed(self, noise: Tensor, scale: Tensor) -> CollapsedSum:
        """At noise scales of each chain, shape ``(S, K)``, and a scale of the slabs, shape ``(S, 1)``."""
        return CollapsedSum(
            [
                (CollapsedQuadratic(share.quadratic, scale, gate_of=share.gate_of, factor=own**-2), share.gates)
                for share, own in zip(self.shares, noise.T, strict=True)
            ],
            self.gates,
        )


class CollapsedSum:
    """Collapsed quadratics, each with which of the gates its own are, whose log odds and evidence add up."""

    def __init__(self, parts: Sequence[tuple[CollapsedQuadratic, Tensor]], gates: int) -> None:
        self._parts, self.gates = parts, gates

    def gibbs_logits(self, z: Tensor, prior_logits: Tensor) -> Tensor:
        """Log odds of every gate given the others, shape ``(S, G)``; see :class:`CollapsedQuadratic`."""
        logits = prior_logits.to(z).expand(z.shape).clone()
        for part, gates in self._parts:
            logits.index_add_(1, gates, part.log_bayes_factors(z[:, gates]))
        return logits


class PartConditionals(NamedTuple):
    """Log Bayes factors of w gates for each of S gate vectors; the last of these are open and in none of the parts."""

    gates: Tensor  # shape (S, w)
    valid: Tensor  # where there is no padding and no repetition
    open: Tensor  # which are open
    factors: Tensor


class _Elements(NamedTuple):
    """What an element needs of its slab, in units of the slab's scale; each of shape ``(1 or S, p)``."""

    unit: Tensor
    linear: Tensor
    diagonal: Tensor

    @staticmethod
    def of(linear: Tensor, scale: Tensor, root: Tensor, diagonal: Tensor) -> _Elements:
        """From b, the slabs' scales, the root of the factor and the diagonal of A, which broadcast to ``(S, p)``."""
        unit = scale * root
        return _Elements(unit, linear * root * unit, diagonal * unit.square())


@dataclass(frozen=True)
class _Open:
    """The open elements of gate vectors, padded to the longest."""

    index: Tensor  # which elements, shape (S, k); 0 at a padding
    valid: Tensor  # where there is no padding
    unit: Tensor  # their scales; 0 at a padding, where the precision is that of the prior alone
    inverse: Tensor  # that of L, shape (S, k, k)
    whitened: Tensor  # L^-1 t b, shape (S, k)

    @property
    def log_evidence(self) -> Tensor:
        """Log of the integral of the likelihood over the slabs' prior, shape ``(S,)``."""
        return 0.5 * self.whitened.square().sum(1) + self.inverse.diagonal(dim1=1, dim2=2).log().sum(1)

    @property
    def mean(self) -> Tensor:
        """Posterior mean of the open slabs over their scales, shape ``(S, k)``; 0 at a padding."""
        return self.coloured(self.whitened)

    def alone(self) -> tuple[Tensor, Tensor]:
        """Precision and linear term of each slab given the other open gates, in units of its scale."""
        variance = self.inverse.square().sum(1)
        return 1 / variance, self.mean / variance

    def coloured(self, x: Tensor) -> Tensor:
        """L'^-1 x, which has the slabs' posterior covariance if x, shape ``(S, k)``, is white."""
        return _product(self.inverse.mT, x)

    def placed(self, values: Tensor, out: Tensor) -> Tensor:
        """Put values of the open elements into ``out``, of shape ``(S, p)``."""
        chain, slot = self.valid.nonzero(as_tuple=True)
        out[chain, self.index[chain, slot]] = values[chain, slot]
        return out


def _left(open_: _Open, elements: _Elements, rows: Tensor) -> tuple[Tensor, Tensor]:
    """L^-1 t A for the rows of A of the open elements, shape ``(S, k, w)``, and the linear term that they leave."""
    cross = torch.bmm(open_.inverse * open_.unit[:, None, :], rows)
    return cross, elements.linear - elements.unit * _product(cross.mT, open_.whitened)


def _closed(open_: _Open, elements: _Elements, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Precision and linear term of slabs behind closed gates if they open, in units of their scales."""
    cross, rest = _left(open_, elements, rows)
    explained = cross.square_().sum(1).mul_(elements.unit.square())
    # The Schur complement of a semidefinite A is not negative; rounding may leave it so for a copy of an open one.
    return (elements.diagonal - explained).clamp_(min=0).add_(1), rest


@dataclass(frozen=True)
class _Groups:
    """Gates that switch several elements each."""

    gate_of: Tensor  # the gates of each element, shape (p, k)
    members: Tensor  # the elements of each gate, shape (G, m); 0 at a padding
    valid: Tensor  # where there is no padding
    blocks: Tensor  # A among them, shape (G, m, m)

    @staticmethod
    def of(gate_of: Tensor, quadratic: Quadratic) -> _Groups:
        """The members of each gate, from the gates of each element; a ValueError refuses other shapes and types."""
        if gate_of.shape[:1] != quadratic.linear.shape or gate_of.dtype != torch.long or bool((gate_of < -1).any()):
            raise ValueError(
                f"Expected gate_of to be the index of a gate for each of {len(quadratic.linear)} elements, of dtype "
                f"torch.long and at least -1, but got shape {tuple(gate_of.shape)} and {gate_of.dtype}."
            )
        gates = torch.arange(int(gate_of.max()) + 1, device=gate_of.device)
        gate_of = gate_of.reshape(len(gate_of), -1)
        members, valid = open_positions((gate_of == gates[:, None, None]).any(-1))
        return _Groups(gate_of, members, valid, quadratic.blocks(members))

    def _switched(self, z: Tensor) -> Tensor:
        """The members that a gate switches while the others stay, shape ``(S, G, m)``: their other gates are open."""
        if self.gate_of.shape[1] == 1:
            return self.valid.expand(len(z), -1, -1)
        closed = ~torch.nn.functional.pad(z.bool(), (0, 1), value=True)
        return self.valid & (closed[:, self.gate_of].sum(-1)[:, self.members] == closed[:, :-1, None])

    def log_bayes_factors(
        self, z: Tensor, on: Tensor, open_: _Open, cross: Tensor, rest: Tensor, unit: Tensor
    ) -> Tensor:
        """Of every gate, from L^-1 t A, of shape ``(S, k, p)``, and the linear term that the open elements leave."""
        # As for single elements, with blocks in place of e and h: of a closed gate the Schur complement E = schur and
        # the rest h, which give h'E^-1 h / 2 - log det(E) / 2; of an open one the covariance V = inverse and the mean
        # m of its open members, which give m'V^-1 m / 2 + log det(V) / 2. A gate of no open member counts as closed.
        switched = self._switched(z)
        unit = unit[:, self.members]
        columns = (cross[:, :, self.members] * unit[:, None]).movedim(1, 2)
        blocks = self.blocks * unit[..., :, None] * unit[..., None, :]
        schur = blocks - columns.mT @ columns
        quadratic, log_root = _halves(schur, rest[:, self.members], switched, add=1 + _rounding(blocks))
        closed = quadratic - log_root

        is_open = on[:, self.members] & switched
        slot = torch.zeros_like(on, dtype=torch.long)
        slot = open_.placed(torch.arange(open_.index.shape[1]).to(slot).expand_as(open_.index), out=slot)
        slot_of = slot[:, self.members]
        columns = open_.inverse.mT[torch.arange(len(on), device=on.device)[:, None, None], slot_of].mT
        mean = open_.mean.gather(1, slot_of.flatten(1)).view_as(is_open)
        inverse = columns.mT @ columns
        quadratic, log_root = _halves(inverse, mean, is_open, add=_rounding(inverse))
        return torch.where(is_open.any(2), quadratic + log_root, closed)


def _rounding(matrix: Tensor) -> Tensor:
    """What to add to the diagonal, so that rounding leaves a matrix definite; shape ``(..., k)``."""
    return matrix.diagonal(dim1=-2, dim2=-1) * (2 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps)


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    """The product of each of S matrices with its vector, shape ``(S, k)``."""
    return torch.bmm(matrix, vector[:, :, None])[:, :, 0]


def _halves(matrix: Tensor, vector: Tensor, valid: Tensor, add: Tensor) -> tuple[Tensor, Tensor]:
    """Halves of v' M^-1 v and of log det M, with ``add`` on the diagonal of M and without invalid rows."""
    both = valid[..., :, None] & valid[..., None, :]
    eye = torch.eye(matrix.shape[-1]).to(matrix)
    matrix = torch.where(both, matrix + add[..., None] * eye, eye)
    root = torch.linalg.cholesky(matrix)
    solved = torch.linalg.solve_triangular(root, (vector * valid)[..., None], upper=False)
    return 0.5 * solved.square().sum((-2, -1)), root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _log_integral(precision: Tensor, linear: Tensor) -> Tensor:
    """Log of the integral of exp(h x - (e - 1) x^2 / 2) over a standard normal x."""
    return 0.5 * (linear.square() / precision - precision.log())


def opened(gates: Tensor, gate_of: Tensor) -> Tensor:
    """The gate of every element, or the product of its gates, shape ``(..., p)``; -1 is none, which counts as 1."""
    switches = torch.nn.functional.pad(gates, (0, 1), value=1)[..., gate_of]
    return switches if gate_of.dim() == 1 else switches.prod(-1)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Entries of the rows of x, which may have one row for all."""
    return x.expand(len(index), -1).gather(1, index)


_EVERY = slice(None)


def _picked(x: Tensor, chain: slice) -> Tensor:
    """Rows of some chains, where each has its own."""
    return x if len(x) == 1 or chain == _EVERY else x[chain]


def _by_chain(name: str, x: Tensor, width: int) -> Tensor:
    """Of shape ``(1, width)``, or ``(S, width)`` where chains differ; a ValueError refuses what is not positive."""
    least, most = x.aminmax() if x.numel() else (1.0, 1.0)
    if not 0 < float(least) <= float(most) < math.inf:
        raise ValueError(f"Expected {name} to be positive and finite, but got {x.flatten()[:5].tolist()}.")
    return x.expand(x.shape[0] if x.dim() == 2 else 1, width)


def slab_given_gates(
    curvature: Tensor, linear: Tensor, gates: Tensor, scale: Tensor, loc: Tensor | None = None
) -> Normals:
    """The slabs' Gaussians given gates z of each element, shape ``(n, p)``, and the prior's scales and means.

    The curvature A and the linear term b may have a batch dimension n.
    """
    if loc is not None:
        linear = linear - torch.einsum("...ij,...j->...i", curvature, gates * loc)
    gated = gates * scale
    precision = gated.unsqueeze(-1) * curvature * gated.unsqueeze(-2)
    precision = precision + torch.eye(gates.shape[-1], dtype=gates.dtype, device=gates.device)
    root = torch.linalg.cholesky(precision)
    offset = scale * torch.cholesky_solve((gated * linear).unsqueeze(-1), root).squeeze(-1)
    return Normals(offset if loc is None else loc + offset, root, scale)
