"""Damage and contend for checkpoints, and interrupt shrinking: python tests/bench/attack_checkpoints.py [--flips 200]

A checkpoint of ``prune`` with a flipped bit, or cut short, is resumed from: it must be refused by name, or end in the
numbers of a run that was never stopped. Two processes start on one checkpoint at the same moment: the file must be
readable, and the second is refused. ``Shrinker.step`` is interrupted at any moment: the network must train on, whole or
shrunk. Prints a table, and ends with 1 if anything fell. Takes some six minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.compaction.test_in_place import about_to_shrink
from tests.pruning.networks import same
from tests.pruning.test_whole_files import StoppedError, loaded, pair, run


def resume(path, content, expected):
    """What a run that goes on from some content ends in."""
    path.write_bytes(content)
    try:
        found = run(path, resume=True).network
    except ValueError as error:
        return "refused by name" if str(path) in str(error) else f"refused without its name: {error}"
    except Exception as error:
        return f"internal error: {type(error).__name__}"
    return "the same numbers" if same(found, expected) else "OTHER NUMBERS"


def attack_files(flips, cuts, generator):
    """Flip bits of a checkpoint, and cut it."""
    path = Path(tempfile.mkdtemp()) / "run.pt"
    expected = run(None).network
    try:
        run(path, stop=6)
    except StoppedError:
        content = path.read_bytes()
    for _ in range(flips):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        yield "bit flipped", resume(path, damaged, expected)
    for _ in range(cuts):
        yield "cut short", resume(path, content[: generator.randrange(len(content))], expected)


def attack_pairs(pairs):
    """Start two processes on one checkpoint."""
    for _ in range(pairs):
        path = Path(tempfile.mkdtemp()) / "run.pt"
        said = " and ".join(pair(path))
        yield "two processes", said if loaded(path) is not None else f"UNREADABLE FILE after {said}"


def interrupted(delay):
    """What a network is after a step that is interrupted after some seconds."""
    network, guide, optimiser, shrinker, x = about_to_shrink()

    came = []

    def stop(*_):
        came.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        shrinker.step()
    except (KeyboardInterrupt, RuntimeError):  # torch's stack of modes may raise one of its own in its place
        if not came:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not came:
        return None
    units = len(next(guide.parameters()))
    sizes = {network[0].out_features, network[1].num_features, network[3].in_features, units}
    try:
        for _ in range(2):
            optimiser.zero_grad()
            guide(x)
            network(x).sum().backward()
            optimiser.step()
        shrinker.step()
        network(x)
    except Exception as error:
        return f"UNUSABLE: {type(error).__name__}"
    return {8: "whole, trains on", 4: "shrunk, trains on"}[units] if len(sizes) == 1 else "HALF CUT"


def attack_steps(interrupts, generator):
    """Interrupt as many steps, at any time of theirs, and half of them towards the end, where tensors are changed."""
    times = []
    for _ in range(5):
        *_, shrinker, _ = about_to_shrink()
        start = time.perf_counter()
        shrinker.step()
        times.append(time.perf_counter() - start)
    longest = sorted(times)[2]
    while interrupts:
        first = 0.8 if interrupts % 2 else 0.0
        end = interrupted(max(1e-6, generator.uniform(first, 1.2) * longest))
        if end is not None:  # the step was faster than the interrupt
            interrupts -= 1
            yield "step interrupted", end


def main():
    """Attack, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--interrupts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    generator = random.Random(options.seed)
    found: Counter[tuple[str, str]] = Counter()
    print(f"{'attack':18}{'ended in':28}{'number':>6}")
    for ends in (
        attack_files(options.flips, options.cuts, generator),
        attack_pairs(options.pairs),
        attack_steps(options.interrupts, generator),
    ):
        some = Counter(ends)
        for (attack, end), number in sorted(some.items()):
            print(f"{attack:18}{end:28}{number:6}", flush=True)
        found.update(some)
    good = {"refused by name", "the same numbers", "done and refused", "whole, trains on", "shrunk, trains on"}
    return any(end not in good for _, end in found)


if __name__ == "__main__":
    sys.exit(main())
