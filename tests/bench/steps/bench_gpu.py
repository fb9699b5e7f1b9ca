"""What the library does on a GPU: python tests/bench/steps/bench_gpu.py equality reads speed report

Three pieces, each of units that are written to ``--out`` as they finish. A run stops after ``--minutes`` and the next
one goes on where it stopped, so that a GPU that is available for minutes at a time is enough.
``report`` prints the tables of what is there.

equality: losses and gradients of every family, objective and estimator, and compacted networks, beside the CPU's. Both
    draw the same random numbers, made in main memory.
reads: training steps under CUDA's synchronisation debug mode, which raises where the host waits for the device.
speed: steps per second of MLP, LeNet-5 and WRN-28-10 with gates and without, in float32 and bfloat16 (autocast), as
    they are, under torch.compile and as CUDA graphs; the share of the peak is that of a product of large matrices in
    the same precision, timed in the same run. Without TF32.

``--device cpu --tiny`` tries the script out on small networks; reads and CUDA graphs are then left out.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.networks import Classifier, build
from common.residual import wide_resnet
from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget
from pyro_l0.infer.elbo.estimators import EstimatorName
from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.gate import gate_names, name_gates
from pyro_l0.nn.square_norms import square_norms
from tests.bench.timing import medians, options_of, seconds_in_turn
from tests.cases import ATOMIC, FAMILIES

NUM_DATA = 50_000
ESTIMATORS = get_args(EstimatorName)
Units = Iterator[tuple[str, Callable[[], Any]]]


class SameDraws(TorchFunctionMode):
    """Make every random number in main memory, so that two devices see the same ones."""

    RANDOM = frozenset(
        {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal, torch.bernoulli, torch.multinomial}
    )

    IN_PLACE = frozenset({Tensor.exponential_, Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in self.RANDOM | self.IN_PLACE:
            return func(*args, **kwargs)
        like = next((x for x in args if isinstance(x, Tensor)), None)
        device = kwargs.pop("device", None) or (torch.device("cpu") if like is None else like.device)
        drawn = func(*(x.cpu() if isinstance(x, Tensor) else x for x in args), **kwargs)
        return args[0].copy_(drawn) if func in self.IN_PLACE else drawn.to(device)


class Work:
    """A gated classifier, its objective and a batch, on one device."""

    def __init__(self, net: nn.Module, x: Tensor, device: str, **options: Any) -> None:
        family = options.pop("family", HardConcrete)
        decay, budget = options.pop("decay", False), options.pop("budget", False)
        self.x, self.y = x.to(device), (torch.arange(len(x)) % 10).to(device)
        self.net = net
        model = Classifier(net, NUM_DATA)
        name_gates(model)
        cost = NetworkCost(net, x[:1])
        self.cost = cost
        norms = {"weight_decay": 5e-4 * NUM_DATA, "square_norm": square_norms(net, x[:1])} if decay else {}
        elbo = L0_ELBO(lam=0.01, group_size=cost.group_sizes, **norms, **options)
        guide = AutoGate(model, family)
        self.loss = elbo(model, guide)
        self.loss(x[:2], torch.zeros(2, dtype=torch.long))
        self.loss.to(device)
        self.target = SparsityTarget(guide, 0.3, cost.macs, steps=10_000) if budget else None
        if self.target is not None:
            self.target.step = self.target.start  # gates move from now on
        self.optimiser = torch.optim.Adam(self.loss.parameters(), 1e-3, capturable=device != "cpu", foreach=True)

    def step(self) -> Tensor:
        """One training step; its loss."""
        self.optimiser.zero_grad(set_to_none=False)
        loss: Tensor = self.loss(self.x, self.y) / NUM_DATA
        loss.backward()
        if self.target is not None:
            self.target.add_gradient()
        self.optimiser.step()
        if self.target is not None:
            self.target.ascend()
        return loss.detach()


def small_network(kind: str) -> tuple[nn.Module, Tensor]:
    """A network with gates, and a batch."""
    torch.manual_seed(0)
    if kind == "wrn":
        return wide_resnet(10, 1), torch.randn(8, 3, 32, 32)
    return build("mlp" if kind == "mlp" else "lenet5", 784), torch.rand(8, 784)


def without_gates(net: nn.Module) -> nn.Module:
    """The network with nothing in the place of its gates."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, L0Gate):
                setattr(module, name, nn.Identity())
    return net


def settings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every combination to be looked at: a name, the network and the options of :class:`Work`."""
    for kind in ("mlp", "lenet5", "wrn"):
        for objective in ("l0", "free_energy"):
            for family in (*FAMILIES, *ATOMIC):
                options: dict[str, Any] = {"objective": objective, "family": family.gate}
                for estimator in ESTIMATORS if family.gate is BernoulliGate else (None,):
                    particles = {"estimator": estimator, "num_particles": 2} if estimator else {}
                    name = f"{kind}, {objective}, {family.gate.__name__}" + (f", {estimator}" if estimator else "")
                    yield name, kind, {**options, **particles}
        yield f"{kind}, l0 with weight decay", kind, {"objective": "l0", "decay": True}
        yield f"{kind}, l0 with a target", kind, {"objective": "l0", "budget": True}


def equality_units(device: str, tiny: bool) -> Units:
    """Relative differences between the device and the CPU, in either precision."""

    def step(kind: str, options: dict[str, Any], dtype: torch.dtype) -> float:
        found = []
        for where in ("cpu", device):
            net, x = small_network(kind)
            with SameDraws():
                torch.manual_seed(1)
                work = Work(net.to(dtype), x.to(dtype), where, **dict(options))
                torch.manual_seed(2)
                losses = [work.step().cpu().double().view(1) for _ in range(2)]
            grads = [p.grad.cpu().double().flatten() for p in work.loss.parameters() if p.grad is not None]
            found.append(torch.cat([*losses, *(grad / grad.norm().clamp(min=1e-30) for grad in grads)]))
        return float((found[0] - found[1]).norm() / found[0].norm())

    def certificate(kind: str, dtype: torch.dtype) -> float:
        net, x = small_network(kind)
        net, x = net.to(device, dtype).eval(), x.to(device, dtype)
        gates = {name: (torch.rand(gate.size) < 0.5).to(x) for name, gate in gate_names(net).items()}
        small = compact(net, gates, x)
        cpu = small.network.cpu()(x.cpu())
        here = small.network.to(device)(x).cpu()
        return max(small.certificate, float((cpu - here).norm() / cpu.norm()))

    torch.backends.cudnn.allow_tf32 = False
    for dtype in (torch.float64, torch.float32):
        for i, (name, kind, options) in enumerate(settings()):
            if not tiny or i % 12 == 0:
                yield f"{name}, {dtype}", lambda k=kind, o=options, d=dtype: step(k, o, d)
        for kind in ("mlp", "lenet5", "wrn"):
            yield f"{kind}, certificate, {dtype}", lambda k=kind, d=dtype: certificate(k, d)


def reads_units(device: str, tiny: bool) -> Units:
    """Steps that would raise if the host waited for the device; the answer is 0."""

    def count(kind: str, options: dict[str, Any]) -> int:
        net, x = small_network(kind)
        work = Work(net, x, device, **dict(options))
        for _ in range(3):
            work.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                work.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return 0

    if device == "cpu":
        print("reads: expected a CUDA device, but got cpu; left out")
        return
    for name, kind, options in settings():
        yield name, lambda k=kind, o=options: count(k, o)


def as_graph(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak(device: str, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a product of large matrices."""
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / medians(seconds_in_turn({"product": lambda: a @ b}, 3, 10, device=device))["product"]


def speed_units(device: str, tiny: bool) -> Units:
    """Steps per second with gates and without, and shares of the peak."""

    def networks() -> dict[str, tuple[Callable[[], nn.Module], Tensor]]:
        wrn = (lambda: wide_resnet(10, 1)) if tiny else (lambda: wide_resnet(28, 10))
        batch = 8 if tiny else 128
        return {
            "MLP": (lambda: build("mlp", 784), torch.rand(8 if tiny else 1000, 784)),
            "LeNet-5": (lambda: build("lenet5", 784), torch.rand(8 if tiny else 1000, 784)),
            "WRN-28-10": (wrn, torch.randn(batch, 3, 32, 32)),
        }

    def measure(name: str, amp: bool, mode: str) -> dict[str, float]:
        make, x = networks()[name]
        work = Work(make(), x, device, objective="l0")
        dense = without_gates(make()).to(device).train()
        optimiser = torch.optim.Adam(dense.parameters(), 1e-3, capturable=device != "cpu", foreach=True)
        context: Callable[[], AbstractContextManager[Any]] = (
            (lambda: torch.autocast(torch.device(device).type, torch.bfloat16)) if amp else nullcontext
        )
        forward = torch.compile(dense) if mode == "compile" else dense
        if mode == "compile":
            work.loss.model.net = torch.compile(work.net)

        def dense_step() -> None:
            optimiser.zero_grad(set_to_none=False)
            with context():
                loss = F.cross_entropy(forward(work.x), work.y)
            loss.backward()
            optimiser.step()

        def gated_step() -> None:
            work.optimiser.zero_grad(set_to_none=False)
            with context():
                loss = work.loss(work.x, work.y) / NUM_DATA
            loss.backward()
            work.optimiser.step()

        steps = {"dense": dense_step, "gated": gated_step}
        if mode == "graph":
            steps = {key: as_graph(step) for key, step in steps.items()}
        seconds = medians(seconds_in_turn(steps, 1 if tiny else 15, 10, device=device))
        flops = 3 * 2 * work.cost.total_macs * len(x)
        best = peak(device, torch.bfloat16 if amp else torch.float32, 256 if tiny else 8192)
        return {
            "dense": 1 / seconds["dense"],
            "gated": 1 / seconds["gated"],
            "ratio": seconds["gated"] / seconds["dense"],
            "dense share": flops / seconds["dense"] / best,
            "gated share": flops / seconds["gated"] / best,
        }

    torch.backends.cudnn.allow_tf32 = False
    for name in ("MLP", "LeNet-5", "WRN-28-10"):
        for amp in (False, True):
            for mode in ("eager", "compile", *(("graph",) if device != "cpu" else ())):
                precision = "bfloat16" if amp else "float32"
                yield f"{name}, {precision}, {mode}", lambda n=name, a=amp, m=mode: measure(n, a, m)


def report(found: dict[str, dict[str, Any]]) -> None:
    """Print the tables as Markdown."""
    for precision in ("float64", "float32"):
        values = {key: x for key, x in found.get("equality", {}).items() if key.endswith(precision)}
        if values:
            worst = max(values, key=lambda key: values[key])
            print(f"Equality in {precision}: {len(values)} settings, at most {values[worst]:.1e} ({worst}).")
    if found.get("reads"):
        print(f"Reads back: none in {len(found['reads'])} settings.")
    if found.get("speed"):
        print("\n| network, precision, mode | dense steps/s | gated steps/s | gated / dense time | share of peak |")
        print("|---|---|---|---|---|")
        for key, x in found["speed"].items():
            shares = f"{100 * x['dense share']:.1f} and {100 * x['gated share']:.1f} %"
            print(f"| {key} | {x['dense']:.1f} | {x['gated']:.1f} | {x['ratio']:.2f} | {shares} |")


def main() -> None:
    """Run the pieces for a while."""
    parser = options_of(__doc__)
    parser.add_argument("pieces", nargs="+", choices=["equality", "reads", "speed", "report"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available() and options.pieces != ["report"]:
        parser.error(f"Expected a CUDA device for --device {options.device}, but torch sees none; --device cpu --tiny.")
    if not 0 < options.minutes < math.inf:
        parser.error(f"Expected --minutes to be finite and positive, but got {options.minutes}.")
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "found.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    units: dict[str, Callable[[], Units]] = {
        "equality": lambda: equality_units(options.device, options.tiny),
        "reads": lambda: reads_units(options.device, options.tiny),
        "speed": lambda: speed_units(options.device, options.tiny),
    }
    for piece in options.pieces:
        for key, work in units[piece]() if piece in units else ():
            done = found.setdefault(piece, {})
            if key in done:
                continue
            if time.monotonic() > deadline:
                print(f"{piece} stopped before {key!r} after {options.minutes:g} minutes; run again to go on")
                return
            done[key] = work()
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(found, indent=1))
            fresh.replace(path)
            print(f"{piece}: {key}: {done[key]}", flush=True)
    if "report" in options.pieces:
        report(found)


if __name__ == "__main__":
    main()
