"""Second-order tools: Newton's method, quadratic log likelihoods, expansions and Laplace's approximation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from scipy.sparse import csc_array, diags_array
from torch import Tensor

# Numbers that one batch of work may hold, and rows of a design's A that are stored: 128 MB and 256 MB of float64.
BATCH = 2**24
STORED = 2**25
_DENSE = 2000  # columns of a design up to which A is formed at once: 32 MB
_PART, _MOST_PARTS = 512, 32  # columns of a part where there are few, and parts of very many


class Quadratic(Protocol):
    """b . beta - beta' A beta / 2."""

    linear: Tensor  # b, shape (p,)
    diagonal: Tensor  # that of A, shape (p,)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of A: indices of shape ``(S, k)`` give ``(S, k, p)``."""
        ...

    def blocks(self, index: Tensor) -> Tensor:
        """The square of A that belongs to each row of indices: shape ``(S, k)`` gives ``(S, k, k)``."""
        ...


class DenseQuadratic:
    """A quadratic log likelihood with a given A, symmetric and positive semidefinite, shape ``(p, p)``."""

    def __init__(self, matrix: Tensor, linear: Tensor) -> None:
        self.matrix, self.linear, self.diagonal = matrix, linear, matrix.diagonal()

    def rows(self, index: Tensor) -> Tensor:
        """Rows of A, shape ``(S, k, p)`` for indices of shape ``(S, k)``."""
        return self.matrix[index]

    def blocks(self, index: Tensor) -> Tensor:
        """Squares of A, shape ``(S, k, k)`` for indices of shape ``(S, k)``."""
        return self.matrix[index[:, :, None], index[:, None, :]]


class DesignQuadratic:
    """A quadratic log likelihood with A = X'X, which is never held as a whole.

    The elements are in T parts of equal size, as they come, and some of them, the anchors, are one part more. Rows of A
    are computed part by part when first needed and stored while there is room: a sampler opens few gates, mostly the
    same.

    Attributes:
        parts: T.
        members: the elements of each part, then the anchors, shape ``(T + 1, m)``.
        valid: which members are neither padding nor, in the first T parts, anchors.
        part_of: the part of each element, T for anchors, shape ``(p,)``.
    """

    members: Tensor
    valid: Tensor
    part_of: Tensor
    _anchors: Tensor | SparseColumns  # their columns of X, as rows
    _stored: Tensor  # rows of A by parts, shape (slots, T + 1, m)
    _filled: Tensor  # which of them have been computed
    _slot: Tensor  # of each element, -1 if it has none
    _element: Tensor  # of each slot in use

    def __init__(self, columns: Tensor | SparseColumns, linear: Tensor) -> None:
        self.linear = linear
        if isinstance(columns, Tensor):
            columns = columns.contiguous()
            self.diagonal = torch.cat([x.square().sum(1) for x in columns.split(_PART)])
        else:
            self.diagonal = columns.square
        self._columns = columns
        p = len(linear)
        self.parts = max(min(_MOST_PARTS, -(-p // _PART)), 1)
        self._width = -(-p // self.parts)
        self._capacity = max(STORED // max(p, 1), 1)
        self._clear()
        self.set_anchors(linear.square() / self.diagonal.clamp(min=torch.finfo(linear.dtype).tiny))

    def set_anchors(self, score: Tensor) -> None:
        """Make the elements of highest score, shape ``(p,)``, the anchors."""
        p = len(score)
        anchors = score.topk(self._width).indices
        self._anchors = self._columns[anchors]
        members = torch.arange(self.parts * self._width, device=score.device).view(self.parts, self._width)
        inside = members < p
        members = members.clamp(max=p - 1)
        self.part_of = torch.arange(p, device=score.device) // self._width
        self.part_of[anchors] = self.parts
        self.members = torch.cat([members, anchors[None]])
        self.valid = torch.cat([inside & (self.part_of[members] < self.parts), torch.ones_like(inside[:1])])
        self._filled[:, -1] = False

    def rows(self, index: Tensor, parts: Tensor | None = None) -> Tensor:
        """See :class:`Quadratic`; with parts, shape ``(S, c)``, of their members only, which gives ``(S, k, c m)``."""
        slots = self._slots(index)
        which = torch.arange(self.parts, device=index.device).expand(len(index), -1) if parts is None else parts
        for part in which.unique().tolist():
            needed = slots[(which == part).any(1)].unique()
            missing = needed[~self._filled[needed, part]]
            if len(missing):
                start = part * self._width
                columns = self._anchors if part == self.parts else self._columns[start : start + self._width]
                products = _products(self._columns[self._element[missing]], columns)
                self._stored[missing, part, : len(columns)] = products
                self._filled[missing, part] = True
        if parts is None:
            everything: Tensor = self._stored.flatten(1)[:, : len(self.linear)]
            return everything[slots]
        of_parts: Tensor = self._stored[slots[:, :, None], parts[:, None, :]]
        return of_parts.flatten(2)

    def blocks(self, index: Tensor) -> Tensor:
        """Squares of A, shape ``(S, k, k)`` for indices ``(S, k)``, computed anew from the columns of X."""
        if isinstance(self._columns, SparseColumns):
            every, where = index.unique(return_inverse=True)
            found: Tensor = _products(self._columns[every], self._columns[every])
            return found[where[:, :, None], where[:, None, :]]
        pieces = index.split(max(1, BATCH // max(1, index.shape[1] * self._columns.shape[1])))
        columns = (self._columns[piece] for piece in pieces)
        return torch.cat([x @ x.mT for x in columns])

    def _slots(self, index: Tensor) -> Tensor:
        """Where the rows of elements are stored; all are dropped where there is no room for new ones."""
        wanted = index.unique()
        missing = wanted[self._slot[wanted] < 0]
        if len(self._element) > 0 and len(self._element) + len(missing) > self._capacity:
            self._clear()
            missing = wanted
        start, end = len(self._element), len(self._element) + len(missing)
        if end > len(self._stored):
            more = max(min(max(2 * end, 64), self._capacity), end) - len(self._stored)
            self._stored = torch.cat([self._stored, self._stored.new_zeros(more, *self._stored.shape[1:])])
            self._filled = torch.cat([self._filled, self._filled.new_zeros(more, self.parts + 1)])
        self._element = torch.cat([self._element, missing])
        self._slot[missing] = torch.arange(start, end, device=index.device)
        slots_of_rows: Tensor = self._slot[index]
        return slots_of_rows

    def _clear(self) -> None:
        self._stored = self.linear.new_empty(0, self.parts + 1, self._width)
        self._filled = torch.zeros(0, self.parts + 1, dtype=torch.bool, device=self.linear.device)
        self._slot = torch.full_like(self.linear, -1, dtype=torch.long)
        self._element = self._slot[:0]


class SparseColumns:
    """Columns (x - centre) / divisor of a sparse matrix, times the roots of weights, of which few are ever dense.

    A product with anything is that of the sparse matrix less that of the centres. Columns x may be ``shrunk`` to
    x - Q t Q'x, by Q of shape ``(n, k)`` and t of shape ``(k,)``.
    """

    def __init__(
        self,
        matrix: Any,
        centre: Tensor,
        divisor: Tensor,
        root: Tensor,
        square: Tensor,
        along: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._matrix = matrix  # of columns times roots of weights
        self._centre, self.divisor, self._root, self._along = centre, divisor, root, along
        self.square = square  # of each column, sums

    @staticmethod
    def of(matrix: csc_array, centre: Any, weight: Any) -> SparseColumns:
        """From a sparse matrix, shape ``(n, p)``, and what is subtracted; sums of squares are those with weights."""
        column = np.repeat(np.arange(len(centre)), np.diff(matrix.indptr))
        stored = weight[matrix.indices]
        apart = np.bincount(column, stored * (matrix.data - centre[column]) ** 2, len(centre))
        square = apart + centre**2 * (weight.sum() - np.bincount(column, stored, len(centre)))
        subtracted, root = torch.from_numpy(centre), torch.ones(len(weight), dtype=torch.float64)
        return SparseColumns(matrix, subtracted, torch.ones_like(subtracted), root, torch.from_numpy(square))

    def weighed(self, root: Tensor) -> SparseColumns:
        """The columns times the roots of the weights, which their sums of squares have."""
        matrix = csc_array(diags_array(root.numpy()) @ self._matrix)
        return SparseColumns(matrix, self._centre, self.divisor, root, self.square, self._along)

    def divided(self, divisor: Any) -> SparseColumns:
        """The columns over the entries of a divisor, shape ``(p,)``, which their sums of squares follow."""
        by = torch.from_numpy(divisor)
        divisor, square = self.divisor * by, self.square / by.square()
        return SparseColumns(self._matrix, self._centre, divisor, self._root, square, self._along)

    def shrunk(self, left: Tensor, share: Tensor) -> SparseColumns:
        """The columns less Q t Q' times them, by orthogonal columns of Q, ``(n, k)``, and shares t, ``(k,)``."""
        # The columns q_i of Q (left) are orthogonal: |x - Q t Q'x|^2 = |x|^2 - sum_i (q_i'x)^2 t_i (2 - t_i |q_i|^2).
        norms = left.square().sum(0)
        square = (self.square - (self @ left).square() @ (share * (2 - share * norms))).clamp(min=0)
        return SparseColumns(self._matrix, self._centre, self.divisor, self._root, square, (left, share))

    def dense(self) -> Tensor:
        """The columns as a tensor of shape ``(n, p)``, centred and shrunk, before they are divided."""
        found: Tensor = torch.from_numpy(self._matrix.toarray()) - self._root[:, None] * self._centre
        return self._shrink(found)

    def _shrink(self, y: Tensor) -> Tensor:
        return y if self._along is None else shrunk(y, *self._along)

    def __len__(self) -> int:
        return len(self._centre)

    def __getitem__(self, index: Tensor | slice) -> SparseColumns:
        columns = index if isinstance(index, slice) else index.numpy()
        found, square = self._matrix[:, columns], self.square[index]
        return SparseColumns(found, self._centre[index], self.divisor[index], self._root, square, self._along)

    def __matmul__(self, y: Tensor) -> Tensor:
        """X'y of a vector y, shape ``(n,)``, or of the columns of a matrix, ``(n, m)``."""
        y = self._shrink(y)
        crossed = torch.from_numpy(self._matrix.T @ y.numpy())
        of_centre = self._centre.view(-1, *[1] * (y.dim() - 1)) * (self._root @ y)
        return (crossed - of_centre) / self.divisor.view(-1, *[1] * (y.dim() - 1))

    def products(self, other: SparseColumns) -> Tensor:
        """Of each column with each of the others, some of which are made dense at a time.

        These are centred before the product: both by algebra would lose twice the digits that a large mean takes.
        """
        step = max(1, BATCH // len(self._root))
        parts = []
        for start in range(0, max(len(self), 1), step):
            part = self[start : start + step]
            parts.append((other @ part.dense()).T / part.divisor[:, None])
        return torch.cat(parts)


def shrunk(columns: Tensor, left: Tensor, share: Tensor) -> Tensor:
    """Columns, or one, x - Q t Q'x, with orthogonal columns of Q, shape ``(n, k)``."""
    return columns - (left * share) @ (left.T @ columns)


def _products(one: Tensor | SparseColumns, other: Tensor | SparseColumns) -> Tensor:
    """The products of p columns with q others, shape ``(p, q)``; dense ones are the rows of a tensor."""
    if isinstance(one, SparseColumns):
        assert isinstance(other, SparseColumns)
        return one.products(other)
    assert isinstance(other, Tensor)
    return one @ other.T


def quadratic_of(columns: Tensor | SparseColumns, linear: Tensor) -> DenseQuadratic | DesignQuadratic:
    """A quadratic log likelihood with A = X'X from the rows of X', which is formed at once unless it is large."""
    if len(linear) > _DENSE:
        return DesignQuadratic(columns, linear)
    return DenseQuadratic(_products(columns, columns), linear)


_ITERATIONS, _HALVINGS = 100, 40
_SADDLE = 1e-3  # of the prior's curvature
_ARMIJO = 1e-4  # share of the promised gain that a step must bring

# S arguments, and whatever else is linear in them, such as linear predictors; each of shape (S, ...).
Point = tuple[Tensor, ...]


class Step(NamedTuple):
    """A Newton step from each of S points, with how much it promises."""

    moves: Point
    gain: Tensor  # slope . step, shape (S,)
    converged: Tensor  # which points need no further step, shape (S,); they take this one without a check
    curvature: Tensor  # what is needed of the second derivatives


# The values of S functions, shape ``(S,)``, and the Newton step from points of known values.
Value = Callable[[Point], Tensor]
NextStep = Callable[[Point, Tensor], Step]


def maximise(value_at: Value, step_from: NextStep, point: Point, advice: str = "") -> tuple[Point, Tensor, Step]:
    """Take Newton steps, each halved until it gains enough: the last point, its values, and the step to take next.

    The advice ends the warning of maxima that were not found.
    """
    value = value_at(point)
    step = step_from(point, value)
    for _ in range(_ITERATIONS):
        if bool(step.converged.all()):
            break
        point, value, moved = _ascended(value_at, point, value, step)
        if not moved:
            break
        step = step_from(point, value)
    else:
        if advice:
            warnings.warn(
                f"Newton's method has not found the mode of {int((~step.converged).sum())} of {len(value)} gate "
                f"vectors in {_ITERATIONS} steps; their evidence is too small. {advice}",
                UserWarning,
                stacklevel=5,
            )
    return point, value, step


def _ascended(value_at: Value, point: Point, value: Tensor, step: Step) -> tuple[Point, Tensor, bool]:
    """Points after the longest of the halved steps that gains enough, their values, and whether any has moved.

    Enough is a share c = ``_ARMIJO`` of what the slope promises: f(x + t d) - f(x) >= c t (slope . d), with length t,
    moves d and gain slope . d, the rule of Armijo (Nocedal and Wright, Numerical Optimization, section 3.1).
    """
    length = torch.ones_like(value)
    for _ in range(_HALVINGS):
        with torch.no_grad():
            there = _moved(point, step.moves, length)
            new = value_at(there)
        enough = step.converged | ((new - value >= _ARMIJO * length * step.gain) & (new < math.inf))
        if bool(enough.all()):
            return there, new, True
        length = torch.where(enough, length, 0.5 * length)
    there = _moved(point, step.moves, torch.where(enough, length, 0.0))
    return there, torch.where(enough, new, value), bool((enough & ~step.converged).any())


def _moved(point: Point, moves: Point, length: Tensor) -> Point:
    return tuple(x + length.to(x).view(-1, *[1] * (x.dim() - 1)) * move for x, move in zip(point, moves, strict=True))


def jacobian(values: Tensor, at: Tensor) -> Tensor:
    """Of a vector of values by a vector, shape ``(len(values), len(at))``; zero where nothing depends on it."""
    if not values.requires_grad:
        return at.new_zeros(len(values), len(at))
    unit = torch.eye(len(values), dtype=values.dtype, device=values.device)
    (rows,) = torch.autograd.grad(
        values, at, unit, is_grads_batched=True, allow_unused=True, materialize_grads=True, retain_graph=True
    )
    return rows.detach()


@torch.enable_grad()
def slope_and_curvature(function: Callable[[Tensor], Tensor], at: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """The gradient of a function, shape ``(p,)``, and its negative Hessian with eigenvalues of at least ``least``."""
    at = at.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(at), at, create_graph=True)
    hessian = -jacobian(slope, at)
    eye = torch.eye(len(at)).to(at)
    _, not_positive = torch.linalg.cholesky_ex(hessian - least * eye)
    curvature = 0.5 * (hessian + hessian.mT)
    if int(not_positive):
        values, vectors = torch.linalg.eigh(curvature.double())
        curvature = ((vectors * values.clamp(min=least)) @ vectors.mT).to(curvature)
    return slope.detach(), curvature


def quadratic_at(function: Callable[[Tensor], Tensor], at: Tensor) -> DenseQuadratic:
    """A function of coefficients to second order at some of them, shape ``(p,)``, made concave where it is not."""
    slope, matrix = slope_and_curvature(function, at, least=0.0)
    return DenseQuadratic(matrix, slope + matrix @ at)


class Normals(NamedTuple):
    """n normal distributions of m numbers each, by the Cholesky factors L of the precisions of numbers over units."""

    mean: Tensor  # shape (n, m), or (n, ...) with m entries behind n
    root: Tensor  # L, shape (n, m, m)
    unit: Tensor | float = 1.0  # broadcasts against the means

    def draw(self, noise: Tensor) -> Tensor:
        """One of each from white noise, shapes as those of the means."""
        white = noise.reshape(*self.root.shape[:2], 1)
        spread: Tensor = torch.linalg.solve_triangular(self.root.mT, white, upper=True)
        return self.mean + self.unit * spread.reshape(self.mean.shape)

    def conditionals(self, drawn: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each number given those behind it, at a draw and its noise; shapes ``(n, m)``.

        Row j of L' (x - mean) / unit = noise holds the numbers from j on: their densities multiply to the joint one.
        """
        deviation = self.unit / self.root.diagonal(dim1=-2, dim2=-1)
        return drawn - deviation * noise, deviation

    def variances(self) -> Tensor:
        """The variance of each number by itself, in the shape of the means."""
        over_units = torch.cholesky_inverse(self.root).diagonal(dim1=1, dim2=2)
        return self.unit**2 * over_units.reshape(self.mean.shape)

    def half_log_det(self) -> Tensor:
        """Half the log determinant of the precision, of variables over their units, shape ``(n,)``."""
        return self.root.diagonal(dim1=1, dim2=2).log().sum(1)


LogLikelihood = Callable[[Tensor], Tensor]

_AT_ONCE = 1024  # gate vectors whose graphs are held together


class Laplace(NamedTuple):
    """Laplace's approximation for each of S gate vectors."""

    log_evidence: Tensor  # log of the integral of likelihood times slabs, shape (S,)
    mode: Tensor  # the coefficients at its maximum, zero behind closed gates, shape (S, p)


def laplace(log_likelihood: LogLikelihood, z: Tensor, scale: float | Tensor, start: Tensor | None = None) -> Laplace:
    """Laplace's approximation of the evidence of each vector of gates, exact where the log likelihood is quadratic.

    Gates z have the shape ``(S, p)``; the slabs' scale and the coefficients to start from, zero by default, have that
    shape or ``(p,)``. The modes are found side by side by Newton's method with backtracking. Directions in which the
    log posterior is convex count by the size of their curvature, so that each step ascends.
    """
    like = z if start is None else start
    scale = torch.as_tensor(scale, dtype=like.dtype, device=like.device)
    unit = scale.expand(z.shape)
    begin = torch.zeros_like(unit) if start is None else start.expand(z.shape)
    batches = zip(*(x.split(_AT_ONCE) for x in (z, unit, begin)), strict=True)
    parts = [_laplace(log_likelihood, *batch) for batch in batches]
    return Laplace(*map(torch.cat, zip(*parts, strict=True)))


def _laplace(log_likelihood: LogLikelihood, z: Tensor, scale: Tensor, start: Tensor) -> Laplace:
    index, valid = open_positions(z.bool())
    unit = scale.gather(1, index) * valid  # of the open elements; 0 at a padding

    def coefficients(x: Tensor) -> Tensor:
        """From those of the open elements, in units of their scales."""
        return x.new_zeros(z.shape).scatter_add(1, index, x * unit)

    def value_at(point: Point) -> Tensor:
        beta = coefficients(point[0])
        value = log_likelihood(beta)
        if value.shape != beta.shape[:1]:
            raise ValueError(
                f"Expected a log likelihood of shape ({len(beta)},) for coefficients of shape {tuple(beta.shape)}, but "
                f"got {tuple(value.shape)}."
            )
        return value - 0.5 * point[0].square().sum(1)

    def step_from(point: Point, value: Tensor) -> Step:
        """By the sizes of the Hessian's eigenvalues, which are stored.

        With -H = V diag(values) V' the step is V diag(1 / |values|) V' slope, which ascends where the slope is not 0:
        the saddle-free step of Dauphin and others (2014), arXiv:1406.2572. At a maximum all values are positive, it is
        Newton's, and their logs add up to log det(-H), as Laplace's approximation takes it.
        """
        with torch.enable_grad():
            x = point[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(value_at((x,)).sum(), x, create_graph=True)
            columns = [torch.autograd.grad(s.sum(), x, retain_graph=True)[0] for s in slope.unbind(1)]
        slope, hessian = slope.detach(), torch.stack(columns, 2)
        values, vectors = torch.linalg.eigh(-0.5 * (hessian + hessian.mT))
        tiny = 10 * torch.finfo(x.dtype).eps
        sizes = values.abs().clamp(min=tiny)
        step = (vectors @ ((vectors.mT @ slope[:, :, None]) / sizes[:, :, None])).squeeze(2)
        gain = (slope * step).sum(1)
        converged = ~(gain > tiny * (1 + value.abs()))
        # Where the slope is 0 but the log posterior is convex, as between a mode and its mirror image, leave that way.
        saddle = converged & (values[:, 0] < -_SADDLE)
        step = torch.where(saddle[:, None], vectors[:, :, 0], step)
        gain, converged = torch.where(saddle, -values[:, 0], gain), converged & ~saddle
        return Step((step * ~converged[:, None],), gain, converged, values.clamp(min=tiny))

    x = torch.where(unit > 0, start.gather(1, index) / unit, 0.0)
    if not bool(torch.isfinite(value_at((x,))).all()):
        raise ValueError("Expected a log likelihood that is finite where the search for the mode starts; set start.")
    (x,), value, step = maximise(value_at, step_from, (x,), "Look for a likelihood that grows without bound.")
    return Laplace(value - 0.5 * step.curvature.log().sum(1), coefficients(x))


def open_positions(on: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the true entries of each row, padded with 0, and which are no padding; at least one column."""
    row, element = on.nonzero(as_tuple=True)
    count = row.bincount(minlength=len(on))
    slots = torch.arange(max(int(count.max()), 1) if len(on) else 1, device=on.device)
    valid = slots < count[:, None]
    return torch.zeros_like(valid, dtype=torch.long).masked_scatter_(valid, element), valid
