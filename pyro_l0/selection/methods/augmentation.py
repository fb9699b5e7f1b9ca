"""Chains on the exact posterior of a logistic regression, by Polya-Gamma augmentation."""

from __future__ import annotations

import math

import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn.functional import pad

from pyro_l0.maths.second_order import STORED, open_positions
from pyro_l0.maths.tempered_gibbs import counted
from pyro_l0.selection.problem import Draws, Problem, SelectionPosterior

__all__ = ["AugmentedChains", "draw_polya_gamma", "is_augmented", "standard_error"]

_ROUND, _ROUNDS = 50, 24  # sweeps between two looks at the error, and the most rounds
_WARM_UP = 0.25  # of all sweeps
_STEP = 0.5  # of the slab scale's logarithm


def standard_error(record: Tensor) -> Tensor:
    """Of the mean of gates or of their probabilities, shape ``(rounds, chains, G)``: by how much chains differ.

    It is larger where all of them drift: where halves differ more, over all gates, than chains explain.
    """
    of_chains = record.mean(0).var(0) / record.shape[1]
    of_halves = torch.stack([half.mean((0, 1)) for half in record.chunk(2)]).var(0) / 2
    drift = of_halves.sum() / of_chains.sum().clamp(min=torch.finfo(record.dtype).tiny)
    return (of_chains * drift.clamp(min=1.0)).sqrt()


def is_augmented(problem: Problem) -> bool:
    """Whether a problem is a logistic regression with whole weights whose products of two features fit in memory."""
    if problem.family != "bernoulli":
        return False
    rows = len(problem.y) if problem.weight is None else float(problem.weight.sum())
    is_whole = problem.weight is None or bool((problem.weight == problem.weight.floor()).all())
    return is_whole and rows * (problem.x.shape[1] + 1) ** 2 <= 2 * STORED


class AugmentedChains:
    """Gibbs sampling of logistic regressions (Polson, Scott and Windle 2013, arXiv:1205.0310, section 3.1).

    Given a Polya-Gamma variable for each observation, the log likelihood is quadratic, so that the coefficients are
    integrated out for moves of the slab scale and of the gates. All log odds of the gates come from one matrix: that of
    the quadratic, with the open coefficients swept out (Goodnight 1979). A flip sweeps one more, or takes one back.
    """

    def __init__(self, problem: Problem, z: Tensor, log_slab: Tensor, generator: torch.Generator) -> None:
        x, y = problem.x, problem.y
        if problem.weight is not None:
            x, y = (part.repeat_interleave(problem.weight.long(), 0) for part in (x, y))
        self._p, self._problem, self._generator = x.shape[1], problem, generator
        self._x = torch.cat([x, x.new_ones(len(x), int(problem.intercept))], 1)
        self._linear = self._x.T @ (y - 0.5)
        self._upper = torch.triu_indices(*[self._x.shape[1]] * 2)
        self._products = self._x[:, self._upper[0]] * self._x[:, self._upper[1]]
        self._members, self._valid = open_positions(problem.switched(torch.eye(problem.gates, dtype=torch.bool)))
        self._prior = problem.prior.gates()
        self._chains = torch.arange(len(z))
        self.z, self.log_slab = z, log_slab
        self.beta = x.new_zeros(len(z), self._x.shape[1])  # zero behind closed gates, the intercept last

    def posterior(self, log_evidence: float, draws: int, error: float) -> SelectionPosterior:
        """Sweep until no standard error is larger than ``error``, or ``_ROUNDS`` times a round."""
        record: list[tuple[Tensor, ...]] = []
        for rounds in range(1, _ROUNDS + 1):
            record += [self._sweep() for _ in counted(_ROUND, "sweeps of augmented chains")]
            used = record[int(_WARM_UP * len(record)) :]
            probs, *others = (torch.stack(part) for part in zip(*used, strict=True))
            found = standard_error(probs)
            if rounds > 3 and found.max() <= error:
                break
        z, log_slab, beta, mean, variance = (part.flatten(0, 1) for part in others)
        which = torch.randint(len(z), (draws,), generator=self._generator)
        return SelectionPosterior.of(
            probs.mean((0, 1)),
            (mean.mean(0)[: self._p, None], (mean.square() + variance).mean(0)[: self._p, None]),
            log_evidence,
            Draws(
                csr_array(beta[which, : self._p].numpy()),
                pad(beta[which, self._p :], (0, 1))[:, :1].numpy(),
                log_slab[which].exp().numpy(),
                torch.full((draws,), math.nan).numpy(),
                self._problem.prior.draw_rate(z[which], self._generator),
            ),
            found,
        )

    def _sweep(self) -> tuple[Tensor, ...]:
        """Move everything once: active probabilities on the way; at the end gates, slab scale and coefficients.

        Means and variances of the coefficients, given the gates and the Polya-Gamma variables, come last.
        """
        products = draw_polya_gamma(self.beta @ self._x.T, self._generator) @ self._products
        matrix = products.new_empty(len(products), *[self._x.shape[1]] * 2)
        matrix[:, self._upper[0], self._upper[1]] = matrix[:, self._upper[1], self._upper[0]] = products
        precision, root = self._moved_slab(matrix)
        swept = self._swept_out(precision, root)
        logits = self._logits(swept, self.z)
        total = torch.zeros_like(logits)
        flips = 1 + self._problem.gates // 3
        for _ in range(flips):
            total += logits.sigmoid()
            swept, logits = self._flipped(swept, logits)
        on = self._open()
        mean = swept[:, :-1, -1] * on
        eye = torch.eye(len(on[0])).to(mean)
        covariance = torch.where(on[:, :, None] & on[:, None, :], -swept[:, :-1, :-1], eye)
        noise = torch.randn(mean.shape, generator=self._generator, dtype=mean.dtype)
        spread = torch.linalg.cholesky(covariance) @ noise[:, :, None]
        self.beta = mean + spread[:, :, 0] * on
        variance = covariance.diagonal(dim1=1, dim2=2) * on
        return total / flips, self.z, self.log_slab, self.beta, mean, variance

    def _open(self) -> Tensor:
        """Which coefficients there are, those of the intercept included."""
        on = self._problem.switched(self.z)
        return pad(on, (0, len(self.beta[0]) - self._p), value=True)

    def _uniform(self) -> Tensor:
        return torch.rand(len(self.z), generator=self._generator, dtype=torch.float64)

    def _moved_slab(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The precision of all coefficients, and the root of that of the open ones, after a step of the slab scale."""
        prior, on = self._problem.prior, self._open()
        eye = torch.eye(len(on[0])).to(matrix)

        def at(log_slab: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            own = matrix.new_full(on.shape, prior.intercept_scale**-2)
            own[:, : self._p] = (-2 * log_slab).exp()[:, None]
            precision = matrix + torch.diag_embed(own)
            root = torch.linalg.cholesky(torch.where(on[:, :, None] & on[:, None, :], precision, eye))
            white = torch.linalg.solve_triangular(root, (self._linear * on)[:, :, None], upper=False)
            log_det = root.diagonal(dim1=1, dim2=2).log().sum(1) + on[:, : self._p].sum(1) * log_slab
            return precision, root, 0.5 * white.square().sum((1, 2)) - log_det + prior.log_slab(log_slab)

        precision, root, density = at(self.log_slab)
        if prior.slab_scale is not None:
            return precision, root
        step = _STEP * torch.randn(len(self.z), generator=self._generator, dtype=torch.float64)
        new_precision, new_root, new_density = at(self.log_slab + step)
        taken = self._uniform().log() < new_density - density
        self.log_slab = torch.where(taken, self.log_slab + step, self.log_slab)
        both = ((precision, new_precision), (root, new_root))
        precision, root = (torch.where(taken[:, None, None], new, old) for old, new in both)
        return precision, root

    def _swept_out(self, precision: Tensor, root: Tensor) -> Tensor:
        """The precision with the linear term as a further row and column, swept by the open coefficients."""
        on = self._open()
        inverse = pad(torch.cholesky_inverse(root) * (on[:, :, None] & on[:, None, :]), (0, 1, 0, 1))
        whole = pad(precision, (0, 1, 0, 1))
        whole[:, :-1, -1] = whole[:, -1, :-1] = self._linear
        solved = inverse @ whole
        row, column = pad(on, (0, 1))[:, :, None], pad(on, (0, 1))[:, None, :]
        closed = torch.where(column, solved.mT, whole - whole @ solved)
        return torch.where(row, torch.where(column, -inverse, solved), closed)

    def _flipped(self, swept: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A flip of each chain by a locally balanced proposal (Zanella 2020, arXiv:1711.07424)."""
        below = torch.where(self.z, -logits, logits).sigmoid().cumsum(1)
        point = self._uniform()[:, None] * below[:, -1:]
        gate = torch.searchsorted(below, point).clamp(max=below.shape[1] - 1)
        sign = 1.0 - 2.0 * self.z.gather(1, gate)[:, 0].double()
        new_z = self.z.scatter(1, gate, ~self.z.gather(1, gate))
        new = swept
        for members, valid in zip(self._members[gate[:, 0]].T, self._valid[gate[:, 0]].T, strict=True):
            step = self._swept(new, members, sign)
            new = step if bool(valid.all()) else torch.where(valid[:, None, None], step, new)
        new_logits = self._logits(new, new_z)
        new_total = torch.where(new_z, -new_logits, new_logits).sigmoid().sum(1)
        taken = (self._uniform() * new_total < below[:, -1])[:, None]
        self.z = torch.where(taken, new_z, self.z)
        return torch.where(taken[:, :, None], new, swept), torch.where(taken, new_logits, logits)

    def _swept(self, swept: Tensor, pivot: Tensor, sign: Tensor) -> Tensor:
        """Matrices with one more coefficient each swept out (sign 1), or one fewer (-1)."""
        column = swept[self._chains, :, pivot]
        corner = column[self._chains, pivot]
        ratio = column / corner[:, None]
        found = torch.baddbmm(swept, column[:, :, None], ratio[:, None, :], alpha=-1)
        edge = sign[:, None] * ratio
        edge[self._chains, pivot] = -1 / corner
        found[self._chains, :, pivot] = found[self._chains, pivot] = edge
        return found

    def _logits(self, swept: Tensor, z: Tensor) -> Tensor:
        """Log odds of every gate given the others, the slab scale and the Polya-Gamma variables."""
        sign = 1.0 - 2.0 * z.double()
        if self._problem.gate_of is None:
            corner, last = swept.diagonal(dim1=1, dim2=2)[:, : self._p], swept[:, : self._p, -1]
            quadratic, log_det = last.square() / corner, corner.abs().log()
        else:
            both = self._valid[:, :, None] & self._valid[:, None, :]
            squares = swept[:, self._members[:, :, None], self._members[:, None, :]]
            # Minus definite where the gate is open.
            squares = torch.where(both, sign[:, :, None, None] * squares, torch.eye(both.shape[1]).to(squares))
            last = swept[:, self._members, -1] * self._valid
            root = torch.linalg.cholesky(squares)
            white = torch.linalg.solve_triangular(root, last[..., None], upper=False)
            quadratic = sign * white.square().sum((2, 3))
            log_det = 2 * root.diagonal(dim1=2, dim2=3).log().sum(2)
        slabs = self._valid.sum(1) * self.log_slab[:, None]
        return 0.5 * sign * (quadratic - log_det) - slabs + self._prior.logits(z.double())


_CUT = 0.64  # where the two parts of the proposal meet
_LEVY = 0.5 * math.erfc(1 / math.sqrt(2 * _CUT))  # half of the probability that a Levy variable is below the cut
_SMALL = -math.log(2 * _LEVY)  # half tilts up to which Levy variables are the tighter proposal


def draw_polya_gamma(tilt: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Exact draws of PG(1, tilt), in the shape of the tilts.

    Devroye's rejection sampler as in Polson, Scott and Windle (2013), arXiv:1205.0310, section 4, with one difference:
    what is proposed below the cut is not truncated beforehand, but rejected with the rest.
    """
    half = 0.5 * tilt.abs().flatten()
    found = torch.empty_like(half)
    everyone = torch.arange(len(half), device=half.device)
    is_small = half < _SMALL
    for part, is_levy in ((everyone[is_small], True), (everyone[~is_small], False)):
        left = part
        while len(left):
            x, accepted = _proposed(half[left], is_levy, generator)
            found[left[accepted]] = 0.25 * x[accepted]
            left = left[~accepted]
    return found.view_as(tilt)


def _proposed(half: Tensor, is_levy: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Proposals for J*(1, half), and which of them are accepted; below the cut, Levy or inverse Gaussian ones."""
    part, place, level = torch.rand(3, len(half), generator=generator, dtype=half.dtype, device=half.device)
    rate = 0.125 * math.pi**2 + 0.5 * half.square()
    above = 0.5 * math.pi / rate * (-_CUT * rate).exp()
    below = half.new_full((1,), 4 * _LEVY) if is_levy else 2 * (-half).exp()
    is_above = part * (above + below) < above
    exponential = _CUT - place.log() / rate
    if is_levy:
        x = torch.where(is_above, exponential, torch.special.ndtri(_LEVY * place).square().reciprocal())
    else:
        normal = torch.randn(len(half), generator=generator, dtype=half.dtype, device=half.device)
        mean = 1 / half
        spread = 0.5 * mean * normal.square()
        smaller = mean / (1 + spread + (spread * (2 + spread)).sqrt())
        x = torch.where(place * (mean + smaller) > mean, mean.square() / smaller, smaller)
        x = torch.where(is_above, exponential, x)
    # An alternating series; the next term is below 1e-15 of the first.
    exponent = torch.where(x > _CUT, 0.5 * math.pi**2 * x, 2 / x)
    share = 1 - 3 * (-2 * exponent).exp() + 5 * (-6 * exponent).exp()
    if is_levy:
        share = torch.where(is_above, share, share * (-0.5 * half.square() * x).exp())
    return x, (level < share) & (is_above | (x <= _CUT))
