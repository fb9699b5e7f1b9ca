"""Record seeded draws, losses, gradients and short trainings, or compare: python tests/bench/record.py FILE

The first run writes FILE; with ``--against`` a run compares itself with one and ends with 1 where something is not
equal bit for bit. A change that should change no number is checked so: record on the commit before it, compare on the
one after. ``--plain`` takes the slow way everywhere (``pyro_l0.fast.disabled``); then the values must agree to
rounding: a step's to 1e-4, which is 100 times the usual distance, three epochs' to 1e-2. Gates whose random numbers
come in another order site by site (normal draws, mixtures) keep their joint draws. ``--data-dir`` is a folder with
MNIST, for LeNet-5.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.distributions import kl_divergence

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import mnist
from pyro_l0 import fast
from tests.bench.steps.bench_gpu import Work, settings, small_network
from tests.cases import ATOMIC, FAMILIES, stack

TRAININGS = {
    "MLP": "--objective l0 --lam 0.05",
    "MLP, free energy": "--objective free_energy --prior-active-prob 0.2",
    "MLP, spike and slab": "--objective spike_slab",
    "MLP, shrinking and weight decay": "--lam 1 --shrink --weight-decay 5e-4",
    "MLP, target": "--target 0.3 --shrink",
    "MLP, Bernoulli": "--family bernoulli",
}
ON_MNIST = {
    "LeNet-5": "--network lenet5",
    "LeNet-5, shrinking and weight decay": "--network lenet5 --lam 5 --shrink --weight-decay 5e-4",
    "LeNet-5, target": "--network lenet5 --target 0.3 --shrink",
}
# Draws that are others when they are made site by site; tests/fast compares these families at equal noise.
IN_ANOTHER_ORDER = ("RectifiedNormal", "ExponentialGate", "ExponentialUniformGate", "PowerLawGate", "spike and slab")
TOLERANCE, TOLERANCE_OF_TRAININGS = 1e-4, 1e-2
Entry = dict[str, Any]
Way = Callable[[str], AbstractContextManager[Any]]


def entry(tensors: list[Tensor]) -> Entry:
    """The bits of some tensors as a hash, and numbers that tell how far others are from them."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().numpy().tobytes())
    return {"sha256": digest.hexdigest(), "norms": [float(x.detach().double().norm()) for x in tensors]}


def distributions(way: Way) -> Iterator[tuple[str, Entry]]:
    """Draws and KLs of every family with their gradients."""
    for dtype in (torch.float32, torch.float64):
        for family in (*FAMILIES, *ATOMIC):
            torch.manual_seed(0)
            gate = stack(family, family.parameters, dtype)
            leaf = getattr(gate, next(iter(gate.learned))).detach().clone().requires_grad_()
            gate = gate.with_learned(**{**{k: getattr(gate, k) for k in gate.learned}, next(iter(gate.learned)): leaf})
            draws = gate.rsample((50,)) if gate.has_rsample else gate.sample((50,))
            prior = stack(family, family.parameters[::-1], dtype)
            with way("kl"):
                kl = kl_divergence(gate, prior)
            (draws.sum() + kl.sum() if draws.requires_grad else kl.sum()).backward()
            assert leaf.grad is not None
            shown = [gate.active_prob, gate.mean, gate.median, gate.test_gate, gate.log_prob(draws.detach())]
            yield f"{family.gate.__name__}, {dtype}", entry([draws, kl, leaf.grad, *shown])


def plain(name: str) -> AbstractContextManager[Any]:
    """The plain ways that leave an entry's random numbers as they are."""
    some = any(part in name for part in IN_ANOTHER_ORDER)
    return fast.disabled(*(("kl", "gated_weights") if some else ()))


def steps(way: Way) -> Iterator[tuple[str, Entry]]:
    """Losses and gradients of three steps of every objective, family and estimator on three networks."""
    for name, kind, options in settings():
        net, x = small_network(kind)
        torch.manual_seed(1)
        with way(name):
            work = Work(net, x, "cpu", **options)
            losses = [work.step() for _ in range(3)]
        grads = [p.grad for p in work.loss.parameters() if p.grad is not None]
        yield name, entry([*losses, *grads])


def trainings(data_dir: Path | None, way: Way) -> Iterator[tuple[str, Entry]]:
    """Three epochs of the main example in several forms."""
    runs = {name: f"{text} --epochs 3" for name, text in TRAININGS.items()}
    if data_dir is not None:
        few = f"--data mnist --data-dir {data_dir} --epochs 3 --hold-out 57000"  # which leaves 3,000 to train on
        runs |= {name: f"{text} {few}" for name, text in ON_MNIST.items()}
    for name, text in runs.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            options = tyro.cli(mnist.Options, args=[*text.split(), "--out", folder])
            with contextlib.redirect_stderr(io.StringIO()), way(name):
                metrics = mnist.main(options)
            state = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)["state"]
        numbers = [[e["loss"], e["test_error_percent"], e["expected_macs"]] for e in metrics["history"]]
        tensors = sorted(_tensors(state, ""), key=lambda pair: pair[0])
        yield name, entry([torch.tensor(numbers, dtype=torch.float64), *(x for _, x in tensors)])


def _tensors(state: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The floating tensors of a checkpoint by their place in it; networks, guides and optimiser states alone."""
    if isinstance(state, Tensor) and state.is_floating_point():
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors(value, f"{path}/{key}")
    elif isinstance(state, (list, tuple)):
        for i, value in enumerate(state):
            yield from _tensors(value, f"{path}/{i}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--data-dir", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    way: Way = plain if options.plain else lambda _: contextlib.nullcontext()
    found: dict[str, Entry] = {}
    for part in (distributions(way), steps(way), trainings(options.data_dir, way)):
        found.update(part)
    options.file.write_text(json.dumps(found, indent=1))
    if options.against is None:
        print(f"{len(found)} entries written to {options.file}")
        return
    before: dict[str, Entry] = json.loads(options.against.read_text())
    different = [name for name in before if name not in found or found[name]["sha256"] != before[name]["sha256"]]
    print(f"{len(before) - len(different)} of {len(before)} entries equal bit for bit")
    far = [name for name in different if not options.plain or not _is_near(name, before[name], found.get(name))]
    for name in different:
        distance = _distance(before[name], found.get(name))
        print(f"  {name}: {distance:.1e} from it, relative to its norm" + (", too far" if name in far else ""))
    if options.plain:
        print(f"{len(before) - len(far)} of {len(before)} entries equal to rounding")
    sys.exit(bool(far))


def _is_near(name: str, before: Entry, after: Entry | None) -> bool:
    """Whether an entry agrees to rounding, which the epochs of a training enlarge."""
    is_training = name in TRAININGS or name in ON_MNIST
    return _distance(before, after) <= (TOLERANCE_OF_TRAININGS if is_training else TOLERANCE)


def _distance(before: Entry, after: Entry | None) -> float:
    """The largest relative change of a tensor's norm."""
    if after is None or len(after["norms"]) != len(before["norms"]):
        return float("inf")
    return max(abs(x - y) / max(abs(x), 1e-30) for x, y in zip(before["norms"], after["norms"], strict=True))


if __name__ == "__main__":
    main()
