"""Samples of a posterior with gates, by NUTS or HMC, and whether they can be trusted."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import torch
from pyro.infer import HMC, MCMC, NUTS
from torch import Tensor

from pyro_l0.expect import expect_count
from pyro_l0.infer.guides.summaries import JointDraws, Summary, entry, import_arviz
from pyro_l0.infer.posterior.log_joint import LogJoint, recorded_with_slope
from pyro_l0.infer.runs import Program, own_scale, seeded
from pyro_l0.infer.slabs import Alignment, GateSite, alignment_of, gate_site, product_name, slab_to_gate
from pyro_l0.infer.target import InferenceTarget
from pyro_l0.maths.monte_carlo import MOST_ERROR, Trust, doubts, standard_error

__all__ = ["GatedSlab", "PosteriorSamples", "error_of_probs", "moved_by_swaps", "sample_posterior", "slabs_of"]


_MOST_DRAWS = 1000
_MOST_PAIRS = 200  # those in which one gate is open where the other is closed most often


class GatedSlab(NamedTuple):
    """A slab site, its gate site, and where its gates lie."""

    name: str
    gate: str
    alignment: Alignment


class _Swap(NamedTuple):
    """An exchange of two gates and their coefficients: what a vector and a code are read at, and the vector's signs."""

    vector: Tensor
    code: Tensor
    signs: Tensor


def slabs_of(log_joint: LogJoint, slab: Mapping[str, GateSite]) -> list[GatedSlab]:
    """The slabs with their gates; refuses gates that do not fit."""
    for name in slab:
        if name in log_joint.sites and bool((torch.as_tensor(own_scale(log_joint.sites[name])) == 0).any()):
            raise ValueError(
                f"Expected slab site {name!r} to have a proper prior, but a mask makes it flat, and nothing bounds the "
                "slab of a closed gate. Mask the observations alone."
            )
    return [GatedSlab(name, gate_site(x), alignment_of(name, x, log_joint.sites)) for name, x in slab.items()]


@torch.no_grad()
def moved_by_swaps(
    log_joint: LogJoint, vectors: Tensor, codes: Tensor, slabs: Sequence[GatedSlab]
) -> dict[str, Tensor]:
    """By how much P(z != 0) moves, by gate site, when gates of a site are exchanged with their coefficients.

    The n draws are ``vectors``, shape ``(n, size)``, and their binary gates ``codes``. Gates without a slab stay.
    """
    keep = torch.linspace(0, len(vectors) - 1, min(len(vectors), _MOST_DRAWS)).long()
    vectors, codes = vectors[keep], codes[keep]
    density, values = log_joint.many(vectors, codes)
    latent = {slab.gate for slab in slabs if slab.gate in log_joint.gates}
    before = {gate: _active(values[gate]) for gate in sorted(latent)}
    for swap in _swaps(log_joint, slabs, before):
        new_vectors, new_codes = vectors[:, swap.vector] * swap.signs, codes[:, swap.code]
        new_density = log_joint.many(new_vectors, new_codes)[0]
        accepted = torch.rand_like(density).log() < new_density - density
        density = torch.where(accepted, new_density, density)
        vectors = torch.where(accepted.unsqueeze(-1), new_vectors, vectors)
        codes = torch.where(accepted.unsqueeze(-1), new_codes, codes)
    values = log_joint.many(vectors, codes)[1]
    return {gate: _active(values[gate]) - active for gate, active in before.items()}


def _active(gates: Tensor) -> Tensor:
    return (gates != 0).double().mean(0)


def _swaps(log_joint: LogJoint, slabs: Sequence[GatedSlab], active: Mapping[str, Tensor]) -> list[_Swap]:
    """Exchanges of gates in the order of how often they would change anything, with and without a change of sign."""
    # Entries of a slab that are not independent on the real line stay where they are.
    stay = {
        slab.gate for slab in slabs if log_joint.latent.real_shapes[slab.name] != log_joint.latent.shapes[slab.name]
    }
    ranked: list[tuple[float, str, int, int]] = []
    for gate, probability in active.items():
        if gate not in stay:
            pairs = combinations(enumerate(probability.flatten().tolist()), 2)
            ranked += [(p * (1 - q) + q * (1 - p), gate, i, j) for (i, p), (j, q) in pairs]
    swaps = []
    for _, gate, i, j in heapq.nlargest(_MOST_PAIRS, ranked):
        own = [slab for slab in slabs if slab.gate == gate]
        swaps += [_swap(log_joint, gate, own, i, j, sign) for sign in (1.0, -1.0)]
    return [swap for swap in swaps if swap is not None]


def _swap(log_joint: LogJoint, gate: str, slabs: Sequence[GatedSlab], i: int, j: int, sign: float) -> _Swap | None:
    """Exchange gates i and j of a site, and the entries of its slabs; None if they have not as many."""
    latent, binary = log_joint.latent.positions(), log_joint.binary.positions()
    vector, code = torch.arange(log_joint.latent.size), torch.arange(log_joint.binary.size)
    signs = torch.ones_like(log_joint.start)
    row, gates = (code, binary[gate]) if gate in binary else (vector, latent[f"{gate}_base"])
    row[gates[[i]]], row[gates[[j]]] = gates[[j]], gates[[i]]
    numbered = torch.arange(len(gates)).reshape(log_joint.sites[gate]["value"].shape)
    for slab in slabs:
        gate_of_entry = slab.alignment.of(numbered).expand(log_joint.latent.shapes[slab.name]).flatten()
        first, second = (latent[slab.name][gate_of_entry == k] for k in (i, j))
        if len(first) != len(second):
            return None
        vector[first], vector[second] = second, first
        signs[torch.cat((first, second))] = sign
    return _Swap(vector, code, signs)


Kernel = Literal["nuts", "hmc"] | Callable[..., HMC]

# Trajectories of more than 63 steps take minutes; r-hat tells where they would be needed.
_KERNELS: dict[str, Callable[..., HMC]] = {"nuts": partial(NUTS, max_tree_depth=6), "hmc": HMC}
_STARTS = 100
# Right runs of tests/bench/posteriors/bench_samplers.py have an r-hat of at most 1.014, the wrong one has 5.5.
_AGREE = 1.05
# Of equal features an exchange moves P(z != 0) by twice its error; right runs move by .02, the wrong one by .5.
_MOVED = 3 * MOST_ERROR
_DIVERGENT = 0.01  # of the transitions


@dataclass(frozen=True)
class PosteriorSamples(Trust, JointDraws):
    """Draws by chain, as :func:`~pyro_l0.infer.sample_posterior` returns them, and how well the chains agree.

    Attributes:
        samples: by site, shape ``(chains, draws, *shape)``: latent variables, gates, deterministic sites, and the
            product of every slab with its gates under a name such as ``"z * w"``. A gate that has a density between its
            atoms comes with the variable before rectification, ``"z_base"``.
        r_hat: rank-normalised split r-hat of each entry, by site, shape ``(*shape,)``.
        ess: bulk effective sample size of each entry, likewise.
        divergences: number of divergent transitions in each chain.
        error: largest standard error of P(z != 0), by its effective sample size or by how much chains differ.
        problems: what is wrong with the sample, in sentences; empty if nothing was found.
        slab: the gate site of each slab site.
    """

    samples: dict[str, Tensor]
    _probs: dict[str, Tensor]
    r_hat: dict[str, Tensor]
    ess: dict[str, Tensor]
    divergences: tuple[int, ...]
    error: float
    problems: tuple[str, ...]
    slab: dict[str, GateSite] = field(default_factory=dict)

    def active_probs(self) -> dict[str, Tensor]:
        """P(z != 0) of every gate, by site and in its shape; of those summed out, given the other latents of draws."""
        return dict(self._probs)

    def draws(self, n: int | None = None) -> dict[str, Tensor]:
        """Joint draws of all chains, one after the other, by site, shape ``(n, *shape)``.

        Args:
            n: how many, evenly spaced; all of them if not given, or if there are fewer.
        """
        flat = {name: x.flatten(0, 1) for name, x in self.samples.items()}
        if n is None:
            return flat
        return {name: x[torch.linspace(0, len(x) - 1, min(n, len(x))).long()] for name, x in flat.items()}

    def products(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The coefficients z * w of joint draws, by slab site and in the slab's shape."""
        return {name: draws[product_name(gate_site(gate), name)] for name, gate in self.slab.items()}

    def summary(self, draws: int | None = None) -> Summary:
        """Summary of every sample, with r-hat, effective sample sizes and problems.

        Args:
            draws: number of draws for means, standard deviations and quantiles, evenly spaced; all by default.
        """
        found = {
            name: site._replace(r_hat=self.r_hat[name], ess=self.ess[name])
            for name, site in super().summary(draws).items()
        }
        return Summary(found, [f"divergent transitions by chain: {list(self.divergences)}", *self.problems])

    def _summarised(self, n: int | None) -> dict[str, Tensor]:
        return {name: x.double() for name, x in self.draws(n).items()}

    def _is_gate(self, name: str) -> bool:
        return name in self._probs

    def _active(self, name: str, values: Tensor, probs: Mapping[str, Tensor]) -> Tensor:
        return probs[name] if name in probs else (values != 0).double().mean(0)


def sample_posterior(
    model: Program,
    *args: object,
    slab: Mapping[str, GateSite] | None = None,
    kernel: Kernel = "nuts",
    num_samples: int = 500,
    warmup_steps: int = 300,
    num_chains: int = 4,
    seed: int | None = None,
    **kwargs: object,
) -> PosteriorSamples:
    """Sample the posterior of a model with gates by NUTS or HMC.

    Bernoulli gates are summed out exactly, all their values in one run of the model under ``torch.vmap``: the sampler
    sees a smooth density of the other latents, and the gates are drawn given those. (Pyro's own enumeration gives all
    gates of a plate one value if the likelihood lies outside of the plate.) Gates with a density between their atoms
    are reparameterised by :class:`~pyro_l0.infer.RectifyReparam`. Chains run one after the other, from starts
    far apart.

    Args:
        model: a Pyro model whose latent variables are continuous or gates.
        *args: its arguments.
        slab: the gate site of each slab site, as for :class:`AutoSpikeSlab`; adds their products to the samples, and
            tests the draws by exchanging coefficients of features that can replace one another.
        kernel: ``"nuts"``, ``"hmc"``, or a function such as ``functools.partial(NUTS, target_accept_prob=0.95)``.
        num_samples: draws of each chain.
        warmup_steps: steps of each chain before the draws, to adapt step size and mass matrix.
        num_chains: number of chains, at least two: a single one cannot reveal several modes.
        seed: seed of the random numbers; the global random state is then left as it was.
        **kwargs: the model's keyword arguments.

    Returns:
        The draws, and what is wrong with them.

    Raises:
        TypeError: a number is not whole.
        NotImplementedError: a latent variable is discrete but not a gate.
        KeyError: ``slab`` names other sites, or ``kernel`` is unknown.
        ValueError: there are fewer than 8 samples or 2 chains, more than 12 Bernoulli gates, the model branches on
            them, or no start with a finite density was found.

    Warns:
        UserWarning: do not trust the draws: chains disagree, probabilities move when coefficients are exchanged, or
            many transitions diverge.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro_l0 import BernoulliGate
        >>> def regression(x, y):
        ...     with pyro.plate("features", 2):
        ...         z = pyro.sample("z", BernoulliGate(probs=0.2))
        ...         w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(x @ (z * w), 1.0), obs=y)
        >>> x = torch.stack((torch.linspace(-1, 1, 50), torch.linspace(1, -1, 50) ** 2), 1)
        >>> y = 2 * x[:, 0]
        >>> short = {"num_samples": 200, "warmup_steps": 100, "num_chains": 2}  # to be quick
        >>> posterior = sample_posterior(regression, x, y, slab={"w": "z"}, seed=1, **short)
        >>> [round(p, 1) for p in posterior.active_probs()["z"].tolist()]
        [1.0, 0.1]
        >>> sorted(posterior.samples)
        ['w', 'z', 'z * w']
    """
    expect_count(8, num_samples=num_samples)
    expect_count(0, warmup_steps=warmup_steps)
    expect_count(2, num_chains=num_chains)
    gate_of_slab = slab_to_gate(slab)
    with seeded(seed):
        posterior = LogJoint(InferenceTarget(model, args, kwargs))
        slabs = slabs_of(posterior, gate_of_slab)
        vectors, divergences = _run_chains(posterior, kernel, num_samples, warmup_steps, num_chains)
        result = _complete(posterior, vectors, slabs, gate_of_slab, divergences)
    if result.problems:
        warnings.warn(" ".join((*result.problems, _ADVICE)), stacklevel=2)
    return result


def _run_chains(
    posterior: LogJoint, kernel: Kernel, num_samples: int, warmup_steps: int, num_chains: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Vectors of the draws, shape ``(num_chains, num_samples, size)``, and divergent transitions of each chain."""
    if not posterior.latent.size:
        return posterior.start.new_zeros(num_chains, num_samples, 0), (0,) * num_chains
    starts = [_start(posterior) for _ in range(num_chains)]
    potential = recorded_with_slope(posterior.potential, starts[0], starts[1])
    make_kernel = _KERNELS[kernel] if isinstance(kernel, str) else kernel
    vectors, divergences = [], []
    for start in starts:
        mcmc = MCMC(
            make_kernel(potential_fn=lambda point: potential(point["vector"])),
            num_samples=num_samples,
            warmup_steps=warmup_steps,
            initial_params={"vector": start},
            disable_progbar=True,
        )
        mcmc.run()
        vectors.append(mcmc.get_samples()["vector"])
        divergences.append(len(mcmc.diagnostics()["divergences"]["chain 0"]))
    return torch.stack(vectors), tuple(divergences)


def _start(posterior: LogJoint) -> Tensor:
    """Where a chain may start: each entry between -2 and 2, as in Stan and Pyro."""
    for _ in range(_STARTS):
        start = (4 * torch.rand_like(posterior.start) - 2).requires_grad_()
        potential = posterior.potential(start)
        (slope,) = torch.autograd.grad(potential, start)
        if bool(torch.isfinite(potential) & torch.isfinite(slope).all()):
            return start.detach()
    raise ValueError(
        f"Expected a model with a finite log density somewhere, but found none at {_STARTS} points between -2 and 2 on "
        f"the real line of {sorted(posterior.latent.shapes)}. Check or rescale its data and its constraints."
    )


def _complete(
    posterior: LogJoint,
    vectors: Tensor,
    slabs: Sequence[GatedSlab],
    gate_of_slab: dict[str, GateSite],
    divergences: tuple[int, ...],
) -> PosteriorSamples:
    """Draw the gates that were summed out, compute values and products, and check the draws."""
    flat, by_chain = vectors.flatten(0, 1), vectors.shape[:2]
    weights = posterior.tables(flat).double().softmax(-1)
    codes = posterior.codes[weights.multinomial(1).squeeze(-1)]
    values = posterior.many(flat, codes)[1]
    conditional = weights @ posterior.codes.double()
    for name, gate, alignment in slabs:
        values[product_name(gate, name)] = alignment.of(values[gate], 1) * values[name]
    gates = dict.fromkeys((*posterior.gates, *(slab.gate for slab in slabs)))
    probabilities = {name: (values[name] != 0).double() for name in gates}
    probabilities |= posterior.binary.apart(conditional)
    samples = {name: x.unflatten(0, by_chain) for name, x in values.items()}
    agreement, ess, _ = chain_statistics(samples)
    probabilities = {name: x.unflatten(0, by_chain) for name, x in probabilities.items()}
    error = error_of_probs(probabilities)
    problems = _problems(agreement, moved_by_swaps(posterior, flat, codes, slabs), sum(divergences) / len(flat), error)
    probs = {name: x.mean((0, 1)) for name, x in probabilities.items()}
    return PosteriorSamples(samples, probs, agreement, ess, divergences, error, problems, gate_of_slab)


def error_of_probs(probs: Mapping[str, Tensor]) -> float:
    """Largest standard error of the mean of P(z != 0), shape ``(chains, draws, *shape)`` by site.

    Effective sample sizes are rough in short chains: all errors grow where chains differ more, over all gates, than
    they explain.
    """
    if not probs:
        return 0.0
    by_size = torch.cat([x.flatten() for x in chain_statistics(probs)[2].values()])
    by_chains = standard_error(torch.cat([x.reshape(*x.shape[:2], -1) for x in probs.values()], 2).transpose(0, 1))
    more = by_chains.square().sum() / by_size.square().sum().clamp(min=torch.finfo(by_size.dtype).tiny)
    return float(by_size.max() * more.clamp(min=1.0).sqrt())


def chain_statistics(samples: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """Rank-normalised split r-hat, bulk effective sample size and standard error of the mean of each entry, by site.

    ArviZ computes them, from samples of shape ``(chains, draws, *shape)`` with at least four draws. It has no value for
    draws that are all the same, as those of a closed gate: their r-hat is 1 here, all count, and the error is 0.
    """
    arviz = import_arviz()
    data = arviz.convert_to_dataset({name: x.detach().double().cpu().numpy() for name, x in samples.items()})
    with np.errstate(divide="ignore", invalid="ignore"):
        found = arviz.rhat(data, method="rank"), arviz.ess(data, method="bulk"), arviz.mcse(data, method="mean")
    statistics = tuple({name: torch.as_tensor(one[name].values) for name in samples} for one in found)
    for name, x in samples.items():
        is_constant = x.cpu().flatten(0, 1).amin(0) == x.cpu().flatten(0, 1).amax(0)
        for one, value in zip(statistics, (1.0, x.shape[0] * x.shape[1], 0.0), strict=True):
            one[name] = one[name].masked_fill(is_constant, value)
    return statistics


def _problems(
    agreement: Mapping[str, Tensor], moved: Mapping[str, Tensor], divergent: float, error: float
) -> tuple[str, ...]:
    problems = []
    if worst := _largest(agreement, _AGREE):
        problems.append(f"Chains disagree: rank-normalised split r-hat is {worst}, where at most {_AGREE} is accepted.")
    if worst := _largest({name: x.abs() for name, x in moved.items()}, _MOVED):
        problems.append(
            f"P(z != 0) moves by {worst} when gates and their coefficients are exchanged: the chains have all stayed "
            "in some of several modes."
        )
    if divergent > _DIVERGENT:
        problems.append(
            f"{divergent:.1%} of the transitions diverged: regions where the density bends sharply are missing. Raise "
            "the kernel's target_accept_prob."
        )
    return (*problems, *doubts(error, "use more num_samples."))


_ADVICE = (
    "These draws are not the posterior. Use more warmup_steps and num_samples, up to 12 BernoulliGate gates, which are "
    "summed out, or AutoSpikeSlab with gates='autoregressive' and check_fit."
)


def _largest(values: Mapping[str, Tensor], limit: float) -> str:
    """The largest entries of some sites, above a limit, in words."""
    above = [
        (value, entry(name, x.shape, i))
        for name, x in values.items()
        for i, value in enumerate(x.flatten().tolist())
        if value > limit
    ]
    above.sort(reverse=True)
    more = f" and over {limit} at {len(above) - 3} more" if len(above) > 3 else ""
    return ", ".join(f"{value:.2f} at {label}" for value, label in above[:3]) + more
