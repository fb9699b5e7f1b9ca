"""Public architectures: gates where they are suggested, and two random cuts.

``python tests/bench/pruning/zoo.py --out zoo.jsonl`` needs the extra ``zoo`` and about two hours of one processor. It
takes the networks of ``tests/engine/zoo/libraries.py``, with random weights and in float64.

For each network it closes half of the units of each suggested site and calls ``compact``, once with one pattern for
every eight units, which closes as many in each head, and once at random. It compares the outputs with those of the
gated network on another batch.

``--tools zeros`` instead lets ``torch.nn.utils.prune.ln_structured`` set half of the outputs of each layer to zero, and
compares the pruned network with what ``compact_zeros`` makes of it; ``--tools zeros --table`` prints what came out.

Each network is a line of JSON in ``--out``, the last of its name; what is there already is not repeated, unless
``--only`` names the network. Each has a process of its own, with ``--seconds`` of processor time and ``--memory`` GB.
Networks of more than 30 million weights are left out unless ``--large`` is given. ``--table`` prints what is in the
file.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.compaction import compact, compact_zeros
from pyro_l0.nn import NetworkCost, fix_gates, insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names, name_gates
from tests.engine.zoo.entry import call
from tests.engine.zoo.libraries import LIBRARIES, Inputs, Model
from tests.engine.zoo.libraries import library as imported

LARGE = 30_000_000
EXACT = 1e-9  # relative to the largest output; rounding in float64 makes less
# Of float32, as networks have. Random inputs of three times the example's size, which a certificate has too, are more
# than EfficientNet-B5 takes with statistics of three images: there, its outputs change by 1e-6 if one digit does.
TOLERANCE = 1e-5
Line = dict[str, Any]


def calls(inputs: Inputs, dtype: torch.dtype) -> tuple[Any, Any]:
    """An example, and another batch, of other numbers and more rows."""
    torch.manual_seed(1)
    return tuple(
        tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs(n)) for n in (2, 3)
    )


@torch.no_grad()
def vary(network: nn.Module) -> None:
    """Draw what starts at one number, where a mistake would not show: biases, scales, running statistics."""
    for name, x in [*network.named_parameters(), *network.named_buffers()]:
        if x.is_floating_point() and x.numel() > 1 and bool((x == x.flatten()[0]).all()):
            if name.endswith(("bias", "running_mean")) or x.squeeze().dim() > 1:
                x.normal_(std=0.1)
            elif isinstance(x, nn.Parameter) or name.endswith("running_var"):
                x.uniform_(0.5, 1.5)


@torch.no_grad()
def settle(gated: nn.Module, gates: dict[str, Tensor], example: Any) -> None:
    """Take running statistics of the cut network, through which nothing of a deep one's input would come otherwise."""
    fixed = fix_gates(gated, gates).train()
    for module in fixed.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            module.momentum = None
            module.reset_running_stats()
    call(fixed, example)
    found = dict(fixed.named_buffers())
    for name, x in gated.named_buffers():
        if "running_" in name:
            x.copy_(found[name])


def weights(network: nn.Module) -> int:
    return sum(x.numel() for x in network.parameters())


def equal_cut(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Closes the same four of every eight units, so that heads of eight or more keep as many as another."""
    pattern = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.float64)
    return {site: pattern.repeat(-(-size // 8))[:size] if size > 1 else torch.ones(1) for site, size in sizes.items()}


def unequal_cut(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Closes half of each site at random, one more or one less by turns; open gates are in [0.9, 1]."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for k, (site, size) in enumerate(sizes.items()):
        closed = torch.randperm(size, generator=generator)[: min(max(1, size // 2 + k % 3 - 1), size - 1)]
        found[site] = 1 - 0.1 * torch.rand(size, generator=generator, dtype=torch.float64)
        found[site][closed] = 0
    return found


CUTS = {"equal": equal_cut, "unequal": unequal_cut}


def ours(network: nn.Module, inputs: Inputs) -> Iterator[Line]:
    """What is known after each step."""
    network.double()
    vary(network)
    example, other = calls(inputs, torch.float64)
    with torch.no_grad():
        is_finite = all(bool(x.isfinite().all()) for x in call(network, example))
    if not is_finite:
        raise FloatingPointError("the network's outputs are not finite")
    line: Line = {"at": "suggest"}
    yield line
    start = time.process_time()
    suggested = suggest_gates(network, example)
    line |= {"suggested": len(suggested), "suggest_seconds": round(time.process_time() - start, 1)}
    if suggested:
        gated = insert_gates(network, suggested)
        name_gates(gated)
        sizes = {site: gate.size for site, gate in gate_names(gated).items()}
        for name, cut in CUTS.items():
            yield line | {"at": name}
            line[name] = one_cut(gated, cut(sizes), example, other)
    yield line | {"at": "end"}


def one_cut(gated: nn.Module, gates: dict[str, Tensor], example: Any, other: Any) -> Line:
    """Compact once: the largest difference of outputs on another batch, or what was raised."""
    settle(gated, gates, other)
    start = time.process_time()
    try:
        small = compact(gated, gates, example, tolerance=TOLERANCE).network
    except Exception as error:
        return {"error": described(error), "seconds": round(time.process_time() - start, 1)}
    seconds = round(time.process_time() - start, 1)
    return compared(fix_gates(gated, gates).eval(), small, other) | {"weights": weights(small), "seconds": seconds}


@torch.no_grad()
def compared(whole: nn.Module, small: nn.Module, other: Any) -> Line:
    """The largest difference of outputs, and how much they differ between examples: 0 would show nothing."""
    pairs = list(zip(call(whole, other), call(small, other), strict=True))
    apart = max(float((x - y).abs().max() / x.abs().max().clamp(min=1e-300)) for x, y in pairs)
    return {
        "difference": apart,
        "spread": max(float(x.std(0).max() / x.abs().max().clamp(min=1e-300)) for x, _ in pairs),
    }


def zeros(network: nn.Module, inputs: Inputs) -> Iterator[Line]:
    """Let torch set half of the outputs of each layer to zero, those of smallest norm, and compact what is left."""
    network.double()
    vary(network)
    example, other = calls(inputs, torch.float64)
    pruned = 0
    ends = last_layers(network, example)
    for module in network.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module not in ends:
            prune.ln_structured(module, "weight", 0.5, n=2, dim=0)
            pruned += round(len(module.weight) / 2)
    settle(network, {}, other)
    yield {"at": "zeros", "zero": pruned}
    start = time.process_time()
    small = compact_zeros(network, example, tolerance=TOLERANCE).network
    seconds = round(time.process_time() - start, 1)
    sizes = [sum(len(x) for x in net.parameters() if x.dim() > 1) for net in (network, small)]
    macs = [NetworkCost(net, example).total_macs for net in (network, small)]
    yield {
        "at": "end",
        "zero": pruned,
        "removed": sizes[0] - sizes[1],
        "macs": macs[1] / macs[0],
        "seconds": seconds,
        **compared(network, small, other),
    }


@torch.no_grad()
def last_layers(network: nn.Module, example: Any) -> list[nn.Module]:
    """The layers whose outputs are the network's, or the last one that was called."""
    made: dict[nn.Module, torch.UntypedStorage] = {}  # held, so that no other tensor gets its address

    def note(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and next(module.parameters(recurse=False), None) is not None:
            made[module] = output.untyped_storage()

    hooks = [module.register_forward_hook(note) for module in network.modules()]
    returned = {x.untyped_storage().data_ptr() for x in call(network, example)}
    for hook in hooks:
        hook.remove()
    return [module for module, storage in made.items() if storage.data_ptr() in returned] or [*made][-1:]


TOOLS = {"ours": ours, "zeros": zeros}


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def child(model: Model, tool: str, options: argparse.Namespace, note: Connection) -> None:
    """Send what is known after each step; the last one counts."""
    resource.setrlimit(resource.RLIMIT_CPU, (options.seconds, options.seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (options.memory << 30, options.memory << 30))
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    line: Line = {"at": "build"}
    try:
        network, inputs = model()
        count = weights(network.eval())
        line = {"at": "large", "count": count}
        if count <= LARGE or options.large:
            for found in TOOLS[tool](network, inputs):
                line = {"count": count, **found}
                note.send(line)
    except Exception as error:
        line |= {"error": described(error)}
    note.send(line)


def run(model: Model, tool: str, options: argparse.Namespace) -> Line:
    """A tool on a network in a process of its own, which is forked, as the libraries take long to import."""
    ours, theirs = Pipe(duplex=False)
    process = get_context("fork").Process(target=child, args=(model, tool, options, theirs))
    process.start()
    theirs.close()
    line: Line = {"at": "build"}
    with suppress(EOFError):
        while True:
            line = ours.recv()
    process.join()
    return line if process.exitcode == 0 else line | {"error": f"ended by exit code {process.exitcode}"}


def verdict(line: Line) -> str:
    """In a word, what became of a network with our gates."""
    found = line.get("ours", {"at": "build"})
    cuts = [found[name] for name in CUTS if name in found]
    if found["at"] == "large":
        return "large"
    if found["at"] == "build":
        return "not built"
    if "error" in found:
        return "out of time" if "exit code" in found["error"] else "not analysed"
    if not found["suggested"]:
        return "nothing suggested"
    if any("error" in cut for cut in cuts):
        return "refused"
    return (
        "exact"
        if all(cut["difference"] < EXACT < cut["spread"] and cut["weights"] < found["count"] for cut in cuts)
        else "wrong"
    )


def seconds(line: Line) -> float:
    found = line["ours"]
    return found.get("suggest_seconds", 0.0) + sum(found.get(name, {}).get("seconds", 0.0) for name in CUTS)


def print_table(lines: Mapping[str, Line]) -> None:
    """A row per library, and the networks that are not exact."""
    words = ("exact", "refused", "wrong", "nothing suggested", "not analysed", "out of time")
    print(f"| library | networks | {' | '.join(words)} | most seconds |")
    print("|" + "---|" * (len(words) + 3))
    measured = [line for line in lines.values() if verdict(line) not in ("large", "not built")]
    for library in [*dict.fromkeys(line["library"] for line in measured), "all"]:
        rows = [line for line in measured if library in (line["library"], "all")]
        counts = [sum(verdict(line) == word for line in rows) for word in words]
        longest = max(seconds(line) for line in rows)
        print(f"| {library} | {len(rows)} | {' | '.join(map(str, counts))} | {longest:.0f} |")
    for name, line in lines.items():
        if verdict(line) not in ("exact", "large"):
            errors = [x["error"] for x in (line["ours"], *(line["ours"].get(cut, {}) for cut in CUTS)) if "error" in x]
            print(f"- {name}: {verdict(line)} {errors[0] if errors else ''}")
    print("large, left out:", ", ".join(name for name, line in lines.items() if verdict(line) == "large"))


def print_zeros(lines: Mapping[str, Line]) -> None:
    """A row per network that torch pruned."""
    print("| network | outputs: zero, removed | weights, millions | multiply-adds left | difference | seconds |")
    print("|" + "---|" * 6)
    for name, line in lines.items():
        found = line["zeros"]
        if "difference" not in found:
            print(f"| {name} | {found.get('error', found['at'])} |")
            continue
        counts = f"{found['zero']:,}, {found['removed']:,} | {found['count'] / 1e6:.2f} | {100 * found['macs']:.0f} %"
        print(f"| {name} | {counts} | {found['difference']:.1e} | {found['seconds']} |")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--library", nargs="+", default=[])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["ours"])
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--memory", type=int, default=10)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = options.out.read_text().splitlines() if options.out.exists() else []
    lines = {line["model"]: line for line in map(json.loads, texts)}
    if options.large:
        lines = {name: line for name, line in lines.items() if verdict(line) != "large"}
    if options.table:
        return print_zeros(lines) if options.tools == ["zeros"] else print_table(lines)
    for library, models in LIBRARIES.items():
        imported(library)
        for name, model in models().items():
            line = {"model": name, "library": library} | lines.get(name, {})
            left = [tool for tool in options.tools if name in options.only or tool not in line]
            asked = name in options.only or (not options.only and library in (options.library or LIBRARIES))
            if asked and left:
                line |= {tool: run(model, tool, options) for tool in left}
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(name, json.dumps({tool: line[tool] for tool in left}), flush=True)


if __name__ == "__main__":
    main()
