"""Chains on the exact posterior: by augmentation where variables make the log density quadratic, else by jumps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn.functional import pad

from pyro_l0.maths.monte_carlo import MOST_ERROR, standard_error
from pyro_l0.maths.second_order import BATCH, STORED, open_positions
from pyro_l0.maths.tempered_gibbs import counted
from pyro_l0.selection.problem import Draws, Problem, SelectionPosterior

__all__ = ["AugmentedChains", "JumpingChains", "continued", "is_augmented"]

_FEWEST_CHAINS = 8
_CHAINS, _ENTRIES = 64, 2**15  # at most, with linear predictors of up to so many observations where there are many
_FEWEST, _ROUNDS = 4, 24  # rounds of sweeps
_ENOUGH, _PRECISE = 0.015, 0.03  # standard errors up to which chains run: of gates, and of means in deviations
_UNSURE, _SEEN = 0.1, 0.05  # error of a mean that is warned of, and how often its coefficient has to be open
_COMB, _FINE = 6, 2  # slab scales to choose from; their distance in logarithms is a uniform number to this power
_PARAMETERS = 2  # moves of the likelihood's parameters in a sweep
_PARAMETER_STEP = 4.8  # of them together, at most, in deviations and over the root of their number
_NARROW = 64  # features up to which sweeping matrices of all of them takes no longer than jumps
_SELDOM = 1e-4  # variance added to those of gates, by which jumps choose them


def _error_of_means(beta: Tensor, mean: Tensor) -> Tensor:
    """The largest standard error of the mean of a coefficient that is often open, in its deviations."""
    often = beta.count_nonzero((0, 1)) > _SEEN * beta.shape[0] * beta.shape[1]
    if not often.any():
        return beta.new_zeros(())
    return standard_error(mean[..., often] / beta[..., often].std((0, 1))).max()


class ExactChains(ABC):
    """Chains side by side, from gates of shape ``(chains, G)`` and log slab scales of shape ``(chains,)``.

    The coefficients ``beta`` have the shape ``(chains, p K)``, then K of an intercept; they are zero behind closed
    gates.
    """

    sweeps: int  # between two looks at the error
    warm_up: float  # share of all sweeps
    _eta: Tensor  # linear predictors, shape (chains, n, K)
    _value: Tensor  # their log likelihood
    _spread: Tensor  # of the likelihood's parameters, at the start

    def __init__(self, problem: Problem, z: Tensor, log_slab: Tensor, generator: torch.Generator) -> None:
        x = problem.x
        self._problem, self._generator, self._done = problem, generator, 0
        gated = problem.gated
        self._features, self._slabs = x.shape[1] * problem.outputs, gated.shape[1] * problem.outputs
        self._x = torch.cat([gated, problem.ungated], 1)
        switched = problem.switched(torch.eye(problem.gates, dtype=torch.bool))[:, : gated.shape[1]]
        self._members, self._valid = open_positions(switched)
        self._prior = problem.prior.gates()
        self._likelihood = problem.likelihood.at(problem.likelihood.theta.expand(len(z), -1))
        self._chains = torch.arange(len(z))
        self.z, self.log_slab = z, log_slab
        self.beta = x.new_zeros(len(z), self._x.shape[1] * problem.outputs)

    def posterior(
        self, log_evidence: float, draws: int, error: float = _ENOUGH, of_means: bool = False
    ) -> SelectionPosterior:
        """Sweep until no standard error, if asked for of means, too, is above what is enough, or ``_ROUNDS`` rounds."""
        record: list[tuple[Tensor, ...]] = []
        look = _FEWEST
        with counted(_FEWEST * self.sweeps, "sweeps of exact chains") as bar:
            for rounds in range(1, _ROUNDS + 1):
                for _ in range(self.sweeps):
                    record.append((*self._sweep(), self._likelihood.theta))
                    self._done += 1
                    bar.update()
                if rounds < min(look, _ROUNDS):
                    continue
                used = record[int(self.warm_up * len(record)) :]
                probs, *states = (torch.stack(part) for part in zip(*used, strict=True))
                error_of_gates = standard_error(probs) if probs.shape[2] else probs[0, 0]
                of_gates = error_of_gates.max() if len(error_of_gates) else error_of_gates.sum()
                apart = _error_of_means(*states[2:4]) if of_means else torch.zeros(())
                worst = torch.maximum(of_gates / error, apart / _PRECISE)
                is_enough = bool(worst <= 1)
                needed = rounds if is_enough else max(rounds + 1, rounds * float(worst) ** 2)
                bar.total = self.sweeps * math.ceil(min(_ROUNDS, needed))
                if is_enough:
                    break
                look = rounds + 1 + rounds // 8
        disagree = (
            f"The chains disagree: the mean of a coefficient has a standard error of {apart:.2f} of its standard "
            "deviation. Set a smaller slab_scale or always_in_scale."
        )
        z, log_slab, beta, mean, variance, theta = (part.flatten(0, 1) for part in states)
        which = torch.randint(len(z), (draws,), generator=self._generator)
        moments = mean.mean(0), (mean.square() + variance).mean(0)
        outputs, features = self._problem.outputs, self._features
        named = {name: part.numpy() for name, part in self._likelihood.at(theta[which]).named().items()}
        learned = dict(self._problem.family.reported(named))
        noise = learned.pop("noise_scale", np.full(draws, math.nan))
        return SelectionPosterior.of(
            probs.mean((0, 1)),
            (moments[0][:features].view(-1, outputs), moments[1][:features].view(-1, outputs)),
            log_evidence,
            Draws(
                csr_array(beta[which, :features].numpy()),
                pad(beta[which, features:], (0, outputs))[:, :outputs].numpy(),
                log_slab[which].exp().numpy(),
                noise,
                self._problem.prior.draw_rate(z[which], self._generator),
                learned,
            ),
            error_of_gates,
            (disagree,) if apart > _UNSURE and of_gates <= MOST_ERROR else (),
        )

    @abstractmethod
    def _sweep(self) -> tuple[Tensor, ...]:
        """Move everything once: active probabilities on the way; at the end gates, slab scale and coefficients.

        Means and variances of the coefficients, given all that was not integrated out, come last.
        """

    def _open(self, z: Tensor) -> Tensor:
        """Which features there are, the constant one of the intercept included."""
        return pad(self._problem.switched(z), (0, int(self._problem.intercept)), value=True)

    def _predictors(self, beta: Tensor) -> Tensor:
        eta: Tensor = self._x @ beta.view(len(beta), -1, self._problem.outputs)
        return eta

    def _move_parameters(self) -> None:
        """Of the likelihood, along the mean curvature of their density at the start."""
        theta = self._likelihood.theta
        length = _PARAMETER_STEP * self._uniform()[:, None] / math.sqrt(theta.shape[1])
        moved = self._likelihood.at(theta + length * self._normal(theta.shape[1]) @ self._spread)
        value = moved.value(self._eta)
        change = value - self._value + moved.log_prior() - self._likelihood.log_prior()
        taken = self._uniform().log() < change
        self._likelihood = moved.at(torch.where(taken[:, None], moved.theta, theta))
        self._value = torch.where(taken, value, self._value)

    def _comb(self, most: int = _COMB) -> Tensor:
        """Log slab scales at equal random distances, the last one in any place, of which one is chosen by density.

        Distance and place are drawn alike from each scale of the comb, so that choosing by density is a Gibbs step.
        """
        place = torch.randint(most, (len(self.z), 1), generator=self._generator)
        return self.log_slab[:, None] + self._uniform()[:, None] ** _FINE * (torch.arange(most) - place)

    def _chosen(self, density: Tensor, comb: Tensor) -> tuple[Tensor, Tensor]:
        which = torch.multinomial(density.softmax(1), 1, generator=self._generator)[:, 0]
        return which, comb[self._chains, which]

    def _uniform(self) -> Tensor:
        return torch.rand(len(self.z), generator=self._generator, dtype=torch.float64)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(len(self.z), *shape, generator=self._generator, dtype=torch.float64)


def is_augmented(problem: Problem) -> bool:
    """Whether augmented chains suit: few features, and rows of whole weights whose products of two fit in memory."""
    if not problem.family.is_augmented:
        return False
    rows = len(problem.y) if problem.weight is None else float(problem.weight.sum())
    is_whole = problem.weight is None or bool((problem.weight == problem.weight.floor()).all())
    p = problem.x.shape[1]
    return is_whole and p <= _NARROW and max(rows, _FEWEST_CHAINS) * (p + 1) ** 2 <= 2 * STORED


class AugmentedChains(ExactChains):
    """Gibbs sampling of regressions whose log likelihood is quadratic given variables that the family draws.

    For logits these are Polya-Gamma variables (Polson, Scott and Windle 2013, arXiv:1205.0310, section 3.1). The
    coefficients are integrated out for moves of the slab scale and of the gates. All log odds of the gates come from
    one matrix: that of the quadratic, with the open coefficients swept out (Goodnight 1979). A flip sweeps one more, or
    takes one back. Parameters of the family move before the variables are drawn anew.
    """

    sweeps, warm_up = 50, 0.35

    def __init__(self, problem: Problem, z: Tensor, log_slab: Tensor, generator: torch.Generator) -> None:
        if problem.weight is not None:
            rows = torch.arange(len(problem.y)).repeat_interleave(problem.weight.long())
            offset = None if problem.offset is None else problem.offset[rows]
            problem = replace(problem, x=problem.x[rows], y=problem.y[rows], offset=offset, weight=None)
        # As many chains as have room for their matrices.
        room = max(_FEWEST_CHAINS, STORED // (problem.x.shape[1] + 1) ** 2)
        super().__init__(problem, z[:room], log_slab[:room], generator)
        self._upper = torch.triu_indices(*[self._x.shape[1]] * 2)
        self._products = self._x[:, self._upper[0]] * self._x[:, self._upper[1]]
        self._eta = self._predictors(self.beta)
        self._likelihood = self._likelihood.fitted(self._eta)

    def _sweep(self) -> tuple[Tensor, ...]:
        if self._likelihood.theta.shape[1]:
            if self._done in (0, self.sweeps):
                self._spread = self._likelihood.spread(self._eta)
            self._value = self._likelihood.value(self._eta)
            for _ in range(_PARAMETERS):
                self._move_parameters()
        slope, weight = self._likelihood.augmented(self._eta, self._generator)
        self._linear = slope @ self._x
        products = weight @ self._products
        matrix = products.new_empty(len(products), *[self._x.shape[1]] * 2)
        matrix[:, self._upper[0], self._upper[1]] = matrix[:, self._upper[1], self._upper[0]] = products
        swept = self._swept_out(*self._moved_slab(matrix))
        logits = self._logits(swept, self.z)
        total = torch.zeros_like(logits)
        flips = 1 + self._problem.gates // 3
        for _ in range(flips):
            total += logits.sigmoid()
            swept, logits = self._flipped(swept, logits)
        on = self._open(self.z)
        mean = swept[:, :-1, -1] * on
        eye = torch.eye(len(on[0])).to(mean)
        covariance = torch.where(on[:, :, None] & on[:, None, :], -swept[:, :-1, :-1], eye)
        noise = torch.randn(mean.shape, generator=self._generator, dtype=mean.dtype)
        spread = torch.linalg.cholesky(covariance) @ noise[:, :, None]
        self.beta = mean + spread[:, :, 0] * on
        self._eta = self._predictors(self.beta)
        variance = covariance.diagonal(dim1=1, dim2=2) * on
        return total / flips, self.z, self.log_slab, self.beta, mean, variance

    def _moved_slab(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The precision of all coefficients, and the root of that of the open ones, at a slab scale that is drawn."""
        prior, on = self._problem.prior, self._open(self.z)[:, None]
        most = max(2, min(_COMB, STORED // matrix.numel()))
        log_slab = self.log_slab[:, None] if prior.slab_scale is not None else self._comb(most)
        slabs = (-2 * log_slab)[:, :, None].exp().expand(-1, -1, self._slabs)
        precisions = torch.cat([slabs, self._problem.ungated_precision.expand(*log_slab.shape, -1)], 2)
        precision = matrix[:, None] + torch.diag_embed(precisions)
        eye = torch.eye(on.shape[2]).to(matrix)
        root = torch.linalg.cholesky(torch.where(on[..., :, None] & on[..., None, :], precision, eye))
        if prior.slab_scale is not None:
            return precision[:, 0], root[:, 0]
        white = torch.linalg.solve_triangular(root, (self._linear[:, None] * on)[..., None], upper=False)
        log_det = root.diagonal(dim1=2, dim2=3).log().sum(2) + on[..., : self._slabs].sum(2) * log_slab
        density = 0.5 * white.square().sum((2, 3)) - log_det + prior.log_slab(log_slab)
        drawn, self.log_slab = self._chosen(density, log_slab)
        return precision[self._chains, drawn], root[self._chains, drawn]

    def _swept_out(self, precision: Tensor, root: Tensor) -> Tensor:
        """The precision with the linear term as a further row and column, swept by the open coefficients.

        With P the precision and h the linear term, O the open coefficients and C the others, [[P, h], [h', 0]] becomes,
        in the order O, C and the last one (Goodnight 1979),

            -P_OO^-1          P_OO^-1 P_OC                   P_OO^-1 h_O
            P_CO P_OO^-1      P_CC - P_CO P_OO^-1 P_OC       h_C - P_CO P_OO^-1 h_O
            h_O' P_OO^-1      h_C' - h_O' P_OO^-1 P_OC       -h_O' P_OO^-1 h_O

        so that covariance and mean of what is open stand in it, and e and h of what is closed, if it opens.
        """
        on = self._open(self.z)
        inverse = pad(torch.cholesky_inverse(root) * (on[:, :, None] & on[:, None, :]), (0, 1, 0, 1))
        whole = pad(precision, (0, 1, 0, 1))
        whole[:, :-1, -1] = whole[:, -1, :-1] = self._linear
        solved = inverse @ whole
        row, column = pad(on, (0, 1))[:, :, None], pad(on, (0, 1))[:, None, :]
        closed = torch.where(column, solved.mT, whole - whole @ solved)
        return torch.where(row, torch.where(column, -inverse, solved), closed)

    def _flipped(self, swept: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A flip of each chain by a locally balanced proposal (Zanella 2020, arXiv:1711.07424).

        Gate j is proposed in proportion to t / (1 + t), with t the odds of its other value given the others: the
        probability of that value. With the balancing function t / (1 + t) the flip is accepted by the ratio of these
        probabilities' sums before (the last of ``below``) and after it (``new_total``).
        """
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
        """Matrices with one more coefficient each swept out (sign 1), or one fewer (-1).

        With c the pivot's column and d its corner, the rest becomes S - c c' / d, the pivot's row and column the sign
        times c / d, and the corner -1 / d: as in ``_swept_out``, for one coefficient.
        """
        column = swept[self._chains, :, pivot]
        corner = column[self._chains, pivot]
        ratio = column / corner[:, None]
        new = torch.baddbmm(swept, column[:, :, None], ratio[:, None, :], alpha=-1)
        edge = sign[:, None] * ratio
        edge[self._chains, pivot] = -1 / corner
        new[self._chains, :, pivot] = new[self._chains, pivot] = edge
        return new

    def _logits(self, swept: Tensor, z: Tensor) -> Tensor:
        """Log odds of every gate given the others, the slab scale and the variables that were drawn.

        The log evidence changes by (h'E^-1 h - log det E) / 2 - m log s where m coefficients of slab scale s open, with
        E and h their precision and linear term. The swept matrix has these of a closed gate's members, and of an open
        one's -V and w, with V their covariance and w their mean: there E = V^-1 and h = V^-1 w.
        """
        sign = 1.0 - 2.0 * z.double()
        if self._problem.gate_of is None:
            corner, last = swept.diagonal(dim1=1, dim2=2)[:, : self._slabs], swept[:, : self._slabs, -1]
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


_TRIES = 16  # gates of a sweep, at most
_NEWTON = 2  # steps to the middle of proposals
_TAILS = 8  # degrees of freedom of proposals
_CANDIDATES = 2  # of a gate's coefficients
_LEAPS = 4  # of a Hamiltonian move


class _Open(NamedTuple):
    """Some coefficients of each chain, all K of a feature side by side."""

    which: Tensor  # among all coefficients, shape (chains, m K), padded
    valid: Tensor  # which are no padding
    columns: Tensor  # of all features that any chain has here, shape (u, n)
    place: Tensor  # of each feature among these, shape (chains, m)
    precision: Tensor  # of the priors, shape (chains, m K)
    curvature: Tensor  # of log likelihood and priors, on average, shape (chains, m K, m K); that of padding is 1

    def predictors(self, beta: Tensor) -> Tensor:
        """Of coefficients of shape ``(chains, m K, q)``, shape ``(chains, n K, q)``."""
        (s, m), q = self.place.shape, beta.shape[2]
        by_feature = beta.view(s, m, -1).mT
        place = self.place[:, None].expand_as(by_feature)
        whole = beta.new_zeros(*by_feature.shape[:2], len(self.columns)).scatter_add(2, place, by_feature)
        return (whole @ self.columns).mT.reshape(s, -1, q)

    def slopes(self, residual: Tensor) -> Tensor:
        """Of the log likelihood, shape ``(chains, m K)``, from those along linear predictors, ``(chains, n, K)``."""
        of_features = residual.mT @ self.columns.mT
        return of_features.gather(2, self.place[:, None].expand(-1, of_features.shape[1], -1)).mT.flatten(1)


class JumpingChains(ExactChains):
    """Jumps, Hamiltonian moves of all open coefficients, and moves of slab scale and parameters of the likelihood.

    A jump draws a gate with its coefficients. All others follow them along a line, as they would if the log likelihood
    were quadratic, with its mean curvature over chains at the start (again after the first round). The new ones are
    chosen among closed and candidates from a t on that line, one of which is where the chain is (iterated importance
    sampling: Andrieu, Lee and Vihola 2018, arXiv:1312.6432, section 1.1). Its scale is that of the mean curvature, with
    which Newton steps from a closed gate lead to its middle. So a jump has an inclusion probability, and line and t
    depend on nothing that it changes.
    """

    sweeps, warm_up = 10, 0.35

    def __init__(
        self, problem: Problem, z: Tensor, log_slab: Tensor, beta: Tensor, probs: Tensor, generator: torch.Generator
    ) -> None:
        """From coefficients and intercepts; gates are tried the more often the less sure ``probs`` are, ``(G,)``."""
        super().__init__(problem, z, log_slab, generator)
        self._often = (probs * (1 - probs) + _SELDOM).sqrt()
        self._outputs = torch.arange(problem.outputs)
        self._columns = self._x.T.contiguous()
        self.beta = beta
        self._eta = self._predictors(beta)
        self._likelihood = self._likelihood.fitted(self._eta)
        self._value = self._likelihood.value(self._eta)

    def _sweep(self) -> tuple[Tensor, ...]:
        if self._done in (0, self.sweeps):
            self._quadratic = self._likelihood.quadratic(self._x, self._eta)
            self._spread = self._likelihood.spread(self._eta)
        probs = self.z.double()
        tries = min(_TRIES, len(self._often))
        often = self._often.expand(len(self.z), -1)
        for gate in torch.multinomial(often, tries, generator=self._generator).T if tries else ():
            probs[self._chains, gate] = self._jump(gate)
        if self._x.shape[1]:
            self._move_coefficients()
        if self._problem.prior.slab_scale is None:
            self._move_slab()
        for _ in range(_PARAMETERS if len(self._spread) else 0):
            self._move_parameters()
        return probs, self.z, self.log_slab, self.beta, self.beta, torch.zeros_like(self.beta)

    def _coefficients(self, features: Tensor, valid: Tensor) -> _Open:
        index = (features[:, :, None] * len(self._outputs) + self._outputs).flatten(1)
        valid = valid.repeat_interleave(len(self._outputs), 1)
        slabs = (-2 * self.log_slab)[:, None].exp().expand(-1, self._slabs)
        of_ungated = self._problem.ungated_precision.repeat_interleave(len(self._outputs))
        precision = torch.cat([slabs, of_ungated.expand(len(slabs), -1)], 1).gather(1, index)
        matrix = self._quadratic.blocks(index) + torch.diag_embed(precision)
        both = valid[:, :, None] & valid[:, None, :]
        curvature = torch.where(both, matrix, torch.eye(index.shape[1]).to(matrix))
        used, place = features.unique(return_inverse=True)
        return _Open(index, valid, self._columns[used], place, precision, curvature)

    def _jump(self, gate: Tensor) -> Tensor:
        """Draw a gate of each chain with its coefficients; returns P(z = 1).

        With H the mean curvature of the gate's coefficients x (first) and of all other open ones (o), these follow x by
        -H_oo^-1 H_ox x (minus ``follow``): ``line`` has this for every entry of x, and ``along`` the linear predictors
        that go with it. ``beta`` and ``eta`` are where that line meets x = 0. Newton steps with the Schur complement
        H_xx - H_xo H_oo^-1 H_ox = F F' (``factor`` is F) lead from there to the proposals' ``mode``; candidates are
        mode + F'^-1 t, with t of ``_TAILS`` degrees of freedom. An open choice weighs its posterior density over the
        proposal's and over the number of candidates, and the closed one its posterior density. One of them is where the
        chain is, which leaves the posterior invariant (Andrieu, Lee and Vihola 2018).
        """
        was_open = self.z[self._chains, gate][:, None]
        others, valid = open_positions(self._open(self.z.scatter(1, gate[:, None], False)))
        features = torch.cat([self._members[gate], others], 1)
        coefficients = self._coefficients(features, torch.cat([self._valid[gate], valid], 1))
        size = self._members.shape[1] * len(self._outputs)
        is_entry = coefficients.valid[:, :size]
        root, cross = (
            torch.linalg.cholesky(coefficients.curvature[:, size:, size:]),
            coefficients.curvature[:, size:, :size],
        )
        follow = torch.cholesky_solve(cross, root)
        factor = torch.linalg.cholesky(coefficients.curvature[:, :size, :size] - cross.mT @ follow)
        line = torch.cat([torch.diag_embed(is_entry.double()), -follow * is_entry[:, None, :]], 1)
        along = coefficients.predictors(line)
        here = self.beta.gather(1, coefficients.which) * coefficients.valid
        now = here[:, :size]
        beta = here - (line @ now[:, :, None])[:, :, 0]
        eta = self._eta - (along @ now[:, :, None]).view_as(self._eta)
        mode = torch.zeros_like(now)
        for _ in range(_NEWTON):
            slope = self._likelihood.slope(eta + (along @ mode[:, :, None]).view_as(eta)).flatten(1)
            of_prior = coefficients.precision * (beta + (line @ mode[:, :, None])[:, :, 0])
            step = torch.cholesky_solve(along.mT @ slope[:, :, None] - line.mT @ of_prior[:, :, None], factor)
            length = self._likelihood.reach / (along @ step).abs().amax((1, 2), True)
            mode = mode + (step * length.clamp(max=1.0))[:, :, 0]

        noise = self._normal(_CANDIDATES, size) / self._normal(_CANDIDATES, _TAILS).square().mean(2, True).sqrt()
        noise[:, 0] = torch.where(was_open, (factor.mT @ (now - mode)[:, :, None])[:, :, 0], noise[:, 0])
        noise = noise * is_entry[:, None, :]
        drawn = mode[:, None] + torch.linalg.solve_triangular(factor.mT, noise.mT, upper=True).mT
        # Where the chain is comes first, then closed or the first candidate: which of the two it is not.
        alternative = torch.where(was_open[:, :, None], 0.0, drawn[:, :1])
        choices = torch.cat([alternative, drawn[:, 1:]], 1)
        is_open = torch.cat([was_open, ~was_open, torch.ones_like(was_open).expand(-1, _CANDIDATES - 1)], 1)
        betas = torch.cat([here[:, None], beta[:, None] + choices @ line.mT], 1)
        etas = eta[:, None] + (choices @ along.mT).unflatten(2, eta.shape[1:])
        value = torch.cat([self._value[:, None], self._likelihood.value(etas.movedim(1, 0)).T], 1)
        count = is_entry.sum(1, keepdim=True).double()
        slabs = count * (self.log_slab[:, None] + 0.5 * math.log(2 * math.pi))
        opened = self._prior.logits(self.z.double(), gate[:, None]) - slabs - math.log(_CANDIDATES)
        opened = opened - _log_proposal(noise, factor, count)[:, [0, *range(_CANDIDATES)]]
        log_density = value - 0.5 * (coefficients.precision[:, None] * betas.square()).sum(2)
        probs = (log_density + torch.where(is_open, opened, 0.0)).softmax(1)
        chosen = torch.multinomial(probs, 1, generator=self._generator)[:, 0]
        self.z = self.z.scatter(1, gate[:, None], is_open[self._chains, chosen, None])
        self.beta = torch.zeros_like(self.beta).scatter_add(1, coefficients.which, betas[self._chains, chosen])
        moved = etas[self._chains, (chosen - 1).clamp(min=0)]
        self._eta = torch.where((chosen > 0)[:, None, None], moved, self._eta)
        self._value = value[self._chains, chosen]
        return (probs * is_open).sum(1)

    def _move_coefficients(self) -> None:
        """By a Hamiltonian move whose masses are the mean curvature.

        With that curvature R R' (``root``), ``spread`` is R'^-1, and x = spread u has unit masses in u. Leapfrog steps
        (Neal 2011, arXiv:1206.1901) begin with half a push of the speed, by step times spread' (slope by x); then x
        moves by spread (step * speed), with a whole push between two moves and half of one at the end. The change of
        log density - |speed|^2 / 2 accepts. The size of the steps is random for each chain.
        """
        coefficients = self._coefficients(*open_positions(self._open(self.z)))
        root = torch.linalg.cholesky(coefficients.curvature)
        spread = torch.linalg.solve_triangular(root.mT, torch.eye(root.shape[1]).to(root).expand_as(root), upper=True)
        step = 0.2 + 0.6 * self._uniform()[:, None]
        beta = self.beta.gather(1, coefficients.which) * coefficients.valid
        speed = self._normal(beta.shape[1]) * coefficients.valid
        eta = self._eta

        def energy(value: Tensor) -> Tensor:
            return value - 0.5 * (coefficients.precision * beta.square() + speed.square()).sum(1)

        def push() -> Tensor:
            residual = self._likelihood.slope(eta)
            slope = coefficients.slopes(residual) - coefficients.precision * beta
            pushed: Tensor = step * (spread.mT @ (slope * coefficients.valid)[:, :, None])[:, :, 0]
            return pushed

        before = energy(self._value)
        speed = speed + 0.5 * push()
        for leap in range(_LEAPS):
            beta = beta + (spread @ (step * speed)[:, :, None])[:, :, 0] * coefficients.valid
            eta = coefficients.predictors(beta[:, :, None]).view_as(eta)
            speed = speed + (1.0 if leap < _LEAPS - 1 else 0.5) * push()
        whole = torch.zeros_like(self.beta).scatter_add(1, coefficients.which, beta)
        self._take(whole, eta, self.log_slab, lambda value: energy(value) - before)

    def _move_slab(self) -> None:
        """By itself, and with all coefficients, against a funnel.

        First given the coefficients x, whose m open ones have the density s^-m exp(-|x|^2 / 2 s^2). Then given x / s: x
        is stretched with s, and the slabs' density stays as it is, so that likelihood and prior of s alone change. The
        first moves well where y says much of x, the second where it says little (Yu and Meng 2011, interweaving).
        """
        prior, features = self._problem.prior, self._problem.switched(self.z).sum(1) - self._problem.always
        count = features * len(self._outputs)
        square = self.beta[:, : self._slabs].square().sum(1)
        comb = self._comb()
        density = prior.log_slab(comb) - count[:, None] * comb - 0.5 * square[:, None] * (-2 * comb).exp()
        _, self.log_slab = self._chosen(density, comb)
        comb = self._comb()
        stretch = (comb - self.log_slab[:, None]).exp()
        gated = pad(self.beta[:, : self._slabs], (0, self.beta.shape[1] - self._slabs))
        etas = self._eta[:, None] + (stretch - 1)[:, :, None, None] * self._predictors(gated)[:, None]
        value = self._likelihood.value(etas.movedim(1, 0)).T
        which, self.log_slab = self._chosen(value + prior.log_slab(comb), comb)
        self.beta = self.beta + (stretch[self._chains, which] - 1)[:, None] * gated
        self._eta, self._value = etas[self._chains, which], value[self._chains, which]

    def _take(self, beta: Tensor, eta: Tensor, log_slab: Tensor, log_ratio: Callable[[Tensor], Tensor]) -> None:
        """Go there, if the ratio, given the log likelihood there, is accepted."""
        value = self._likelihood.value(eta)
        taken = self._uniform().log() < log_ratio(value)
        self.beta = torch.where(taken[:, None], beta, self.beta)
        self._eta = torch.where(taken[:, None, None], eta, self._eta)
        self.log_slab, self._value = (
            torch.where(taken, new, old) for new, old in ((log_slab, self.log_slab), (value, self._value))
        )


def chains_of(problem: Problem) -> int:
    """The number of chains, from 8 to 64: fewer, the more observations and outputs there are to hold."""
    n = len(problem.x)
    return max(_FEWEST_CHAINS, min(_CHAINS, max(16, _ENTRIES // n), BATCH // (n * problem.outputs**2)))


def continued(
    problem: Problem,
    z: Tensor,
    draws: Draws,
    probs: Tensor,
    log_evidence: float,
    number: int,
    generator: torch.Generator,
) -> SelectionPosterior:
    """Some draws by jumping chains that start from others, of gates z, where Laplace's approximation is too far off."""
    start = np.arange(chains_of(problem)) % len(z)
    intercept = draws.intercept[start][:, : problem.outputs * problem.intercept]
    beta = torch.from_numpy(np.hstack([draws.coefficients[start].toarray(), intercept]))
    log_slab = torch.from_numpy(draws.slab_scale[start]).log()
    chains = JumpingChains(problem, z[start], log_slab, beta, probs, generator)
    return chains.posterior(log_evidence, number, of_means=True)


def _log_proposal(noise: Tensor, factor: Tensor, count: Tensor) -> Tensor:
    """Log density of candidates by their white noise t, shape ``(chains, _CANDIDATES)``.

    The multivariate t density of k = count entries and d = ``_TAILS`` degrees of freedom, with F the factor:
    Gamma((d + k) / 2) / Gamma(d / 2) (d pi)^(-k / 2) det F (1 + |t|^2 / d)^(-(d + k) / 2).
    """
    half = 0.5 * (_TAILS + count)
    constant = half.lgamma() - math.lgamma(0.5 * _TAILS) - 0.5 * count * math.log(_TAILS * math.pi)
    log_det = factor.diagonal(dim1=1, dim2=2).log().sum(1, keepdim=True)
    return constant + log_det - half * (noise.square().sum(2) / _TAILS).log1p()
