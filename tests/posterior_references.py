"""The known posterior of every design: python tests/posterior_references.py [--design TEXT]

Gaussian designs are enumerated whenever they are asked for. The others take minutes, so their numbers are kept in
``posterior_references.json`` beside this file, which this command writes anew: inclusion probabilities and moments of
z * w by enumeration with importance-sampled evidences (2,000 draws for each gate vector, twice, averaged); of 500 draws
for Student-t noise and negative binomial counts, for which the numbers of 64 Metropolis chains of 6,000 steps are kept
too, by ``long_chain_posterior`` of commit 34987ee9.
``--design`` makes those whose names contain the text and leaves the others as they are. About 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import pyro
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pyro.distributions import Beta

from tests.reference_posteriors import GaussianPosterior, LogDensity, Posterior
from tests.sampled_posteriors import Problem, importance_sampled_posterior
from tests.spike_slab_designs import Design, generalised_linear_designs, heavy_tailed_designs

__all__ = ["exact_posterior", "reference"]

FILE = Path(__file__).with_name("posterior_references.json")
DRAWS, DRAWS_BESIDE_CHAINS = 2000, 500


def reference(design: Design) -> Posterior:
    """The posterior that a fit of a design is compared with.

    Raises:
        KeyError: the file has no such design.
        ValueError: the file's numbers belong to other data.
    """
    if design.family == "normal":
        return exact_posterior(design).summary()
    entry = json.loads(FILE.read_text())[design.name]
    if entry["data"] != fingerprint(design):
        raise ValueError(f"Expected the data of {design.name!r} in {FILE.name}, but got others; run {FILE.stem}.py.")
    chosen = entry["chain"] if "chain" in entry else entry["enumeration"]
    moments = (torch.tensor(chosen[name], dtype=torch.float64) for name in ("inclusion", "mean", "sd"))
    return Posterior(*moments, log_evidence=entry["enumeration"]["log_evidence"], hyper={})


def exact_posterior(design: Design) -> GaussianPosterior:
    """The enumeration of a Gaussian design."""
    return GaussianPosterior(design.x, design.y, *(_known_or_prior(design, name) for name in ("sigma", "tau", "rate")))


def _known_or_prior(design: Design, name: str) -> float | tuple[float, float] | LogDensity:
    value = getattr(design, name)
    if isinstance(value, float):
        return value
    return (float(value.concentration1), float(value.concentration0)) if isinstance(value, Beta) else value.log_prob


def problem(design: Design) -> Problem:
    sigma = design.x.new_tensor(design.sigma)
    return Problem(design.x, lambda eta: design.likelihood(eta, sigma).log_prob(design.y), design.tau, design.rate)


def fingerprint(design: Design) -> str:
    """Of data and model, to six digits: linear algebra's last bits differ between machines."""
    numbers = torch.cat([design.x.flatten(), design.y]).mul(1e6).round().long()
    known = f"{design.family} {design.sigma} {design.tau} {design.rate}"
    return hashlib.sha256(numbers.numpy().tobytes() + known.encode()).hexdigest()[:16]


def make(design: Design, kept: dict[str, object]) -> dict[str, object]:
    """The entry of one design, with the chain of the one that is kept, if that is of the same data."""
    start = time.perf_counter()
    draws = DRAWS_BESIDE_CHAINS if design.family in ("student_t", "negative_binomial") else DRAWS
    first, second = (importance_sampled_posterior(problem(design), draws, seed) for seed in (0, 1))
    enumeration = {
        name: ((getattr(first, name) + getattr(second, name)) / 2).tolist() for name in ("inclusion", "mean", "sd")
    }
    enumeration["log_evidence"] = (first.log_evidence + second.log_evidence) / 2
    apart = float((first.inclusion - second.inclusion).abs().max()), abs(first.log_evidence - second.log_evidence)
    enumeration |= {"effective_share": first.effective, "two_runs_differ": apart[0], "their_evidences": apart[1]}
    entry: dict[str, object] = {"data": fingerprint(design), "enumeration": enumeration}
    if "chain" in kept and kept["data"] == entry["data"]:
        entry["chain"] = kept["chain"]
    line = f"{design.name:38s} effective {first.effective:.3f}, two runs differ {apart[0]:.4f} and {apart[1]:.4f} nat"
    print(f"{line}; {time.perf_counter() - start:.0f} s", flush=True)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--design", default="", help="part of a name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    designs = generalised_linear_designs() + heavy_tailed_designs()
    for design in designs:
        if options.design in design.name:
            entries = json.loads(FILE.read_text()) if FILE.exists() else {}
            # Six digits after the point: far below the error of sampling, and a small file.
            made = json.dumps(make(design, entries.get(design.name, {})))
            made = json.loads(made, parse_float=lambda number: round(float(number), 6))
            entries[design.name] = made
            lines = [
                f"{json.dumps(name)}: {json.dumps(entries[name])}"
                for name in (d.name for d in designs)
                if name in entries
            ]
            FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
