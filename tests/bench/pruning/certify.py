"""Certificates of trained networks: python tests/bench/pruning/certify.py RUN [RUN ...] --data-dir MNIST

RUN is the folder of a finished run of examples/mnist.py. The averaged network of its checkpoint, under its test gates,
is compacted in float32 and, from the same weights, in float64. Prints the largest difference between the two networks,
on 100 test images and on random inputs, of each run and over all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from common.data import Images, load_mnist
from common.mnist_run import Options, Run
from pyro_l0.compaction import compact


def certificates(folder: Path, images: Images) -> dict[torch.dtype, float]:
    """Largest difference in either precision."""
    options = json.loads((folder / "metrics.json").read_text())["options"]
    if options["data"] != "mnist" or options["objective"] != "l0" or options["family"] != "hard_concrete":
        raise ValueError(f"Expected a run of the l0 objective on mnist with hard concrete gates, but got {options}.")
    known = {name: value for name, value in options.items() if name in Options.__dataclass_fields__}
    run = Run(images, Options(**{**known, "lam": tuple(options["lam"])}))
    run.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["state"])
    net = run.averaged[0]
    before = () if run.shrinker is None else run.shrinker.plans
    found = {}
    for dtype in (torch.float32, torch.float64):
        gates = {site: gate.to(dtype) for site, gate in run.gates.test_gates().items()}
        found[dtype] = compact(net.to(dtype), gates, images.test_x[:100].to(dtype), before=before).certificate
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data-dir", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = load_mnist(options.data_dir)
    all_found = [certificates(folder, images) for folder in options.runs]
    for folder, found in zip(options.runs, all_found, strict=True):
        print(f"{folder.name:20s}" + ", ".join(f"{dtype}: {value:.1e}" for dtype, value in found.items()))
    for dtype in (torch.float32, torch.float64):
        print(f"{len(all_found)} runs, {dtype}: at most {max(found[dtype] for found in all_found):.1e}")


if __name__ == "__main__":
    main()
