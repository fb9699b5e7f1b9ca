"""Random networks that are hard to copy, against the user's own: ``python tests/bench/fuzz_copies.py --cases 500``.

Each network is a chain of blocks with closures, hooks, shared and re-used modules, modules that copy or pickle
themselves, objects that hold tensors of the last call, BatchNorms held in evaluation mode, or a head that only training
calls. What `fix_gates`, `compact`, `compact_zeros` and a short `prune` return is compared with the network itself, with
masks that hooks multiply by hand, on a batch that was never an example; a network is also refused by the name of a
module. Nothing of the user's may change, and nothing that is returned may use the user's. Prints the seed and a count
by what was asked for; a silent difference ends it with the number of its case.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import types
import warnings
import weakref
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0 import prune
from pyro_l0.compaction import compact, compact_zeros
from pyro_l0.compaction.compact import CompactionError
from pyro_l0.nn import L0Gate, fix_gates, insert_gates

FEATURES, OUTPUTS = 5, 3


class Block(nn.Module):
    """A dense layer and an activation, behind which there is a gate; kinds differ in how they reach these."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(inputs, outputs), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class Closure(Block):
    """A function made in ``__init__``, as in minGPT, which calls another one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        inner = lambda x: self.layer(x)  # noqa: E731
        self.run = lambda x: self.act(inner(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Default(Block):
    """A function with modules as its default arguments, in a dict."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)

        def run(x: Tensor, layers: tuple[nn.Module, ...] = (self.layer, self.act), *, scale: float = 2.0) -> Tensor:
            for layer in layers:
                x = layer(x)
            return x * scale

        self.functions = {"run": [run]}

    def forward(self, x: Tensor) -> Tensor:
        return self.functions["run"][0](x)


class Method(Block):
    """A bound method, and a forward that an instance replaces by a closure around it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        before = self.forward

        def forward(x: Tensor) -> Tensor:
            return before(x) + 0.1 * self.act(self.layer(x))

        self.forward = forward


class Weights(Block):
    """Code that reads parameters from a list, a closure and a cell of a wrapped function."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        bias = nn.Parameter(torch.randn(outputs))
        self.bias, self.weights = bias, [self.layer.weight]
        self.add = lambda x: x + bias

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.add(F.linear(x, self.weights[0], self.layer.bias)))


class Feature(Block):
    """A hook's closure fills a dict that the block reads: the first features, added to the output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.features = features = {}

        def keep(module: nn.Module, args: object, output: Tensor) -> None:
            features["h"] = output

        self.layer.register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x)) + 0.5 * self.features["h"].tanh()


class Pair(Block):
    """Two hooks share a dict that no module holds; one of them also calls a module of the block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        kept: dict[object, Tensor] = {}
        self.other = nn.Linear(inputs, outputs)
        self.layer.register_forward_pre_hook(lambda module, args: kept.update(x=self.other(args[0])))
        self.act.register_forward_hook(lambda module, args, output: output + kept["x"])


class CallableHook:
    """A hook that is an object with a module of its own and a count."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.calls += 1
        return output + self.module(args[0])


class WithObject(Block):
    """A hook that is an object, and hooks in front that count calls in a list and a cell."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.other, count, self.seen = nn.Linear(inputs, outputs), 0, []

        def counting(module: nn.Module, args: object) -> None:
            nonlocal count
            count += 1
            self.seen.append(count)

        self.layer.register_forward_pre_hook(counting)
        self.layer.register_forward_hook(CallableHook(self.other))


@dataclasses.dataclass
class Last:
    """What a call left."""

    features: Tensor | None = None
    more: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class Keeping(Block):
    """Objects on the block hold tensors of the last call, with their graph."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.last, self.names, self.normal = Last(), types.SimpleNamespace(), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.last.features, self.last.more["h"], self.names.h = h, h * 2, (h, [h])
        self.normal = torch.distributions.Normal(h, 1.0)
        return self.act(self.normal.mean)


class Mean(nn.Module):
    """A module that pickles itself without hooks, as those of einops do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.unflatten(-1, (-1, 1)).mean(-1))

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: object) -> None:
        super().__init__()


class Pickled(Block):
    """The activation pickles itself without its hooks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.act = Mean()


class Remade(nn.Linear):
    """A layer that makes a new one as its copy: with its weights, or with others."""

    loads = True

    def __deepcopy__(self, memo: dict[int, object]) -> Remade:
        new = type(self)(self.in_features, self.out_features)
        if self.loads:
            new.load_state_dict(self.state_dict())
        return new


class Redrawn(Remade):
    """With others."""

    loads = False


class Copies(Block):
    """Its layer makes a new one as its copy, with a gate behind that."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.layer = random.choice([Remade, Redrawn])(inputs, outputs)


class Whole(Block):
    """Copies itself as a whole, without a memo, its hooks or its mode."""

    def __deepcopy__(self, memo: dict[int, object]) -> Whole:
        new = type(self)(self.layer.in_features, self.layer.out_features)
        new.load_state_dict(self.state_dict(), strict=False)
        return new


class Graph(Block):
    """A graph module of torch.fx, which loses hooks and what its graph does not call when it is copied."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.layer, self.act = (
            torch.fx.symbolic_trace(nn.Sequential(self.layer, nn.Tanh())),
            torch.fx.symbolic_trace(self.act),
        )


class Normed(Block):
    """A layer whose weight is computed, by a hook of old or by a parametrisation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.layer = random.choice([nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])(self.layer)


class Held(Block):
    """A BatchNorm that the block's own ``train`` holds in evaluation mode."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def train(self, mode: bool = True) -> Held:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.layer(x)))


class Weak(Block):
    """A weak reference, which copies share."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.reference = weakref.ref(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.reference()(x))


GLOBAL: list[nn.Module] = []


class Global(Block):
    """Code that reaches its layer by a global name."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.number = len(GLOBAL)
        GLOBAL.append(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(GLOBAL[self.number](x))


class Dropping(Block):
    """Pickles itself without the scale that its code uses."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x)) * self.scale

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"scale": 1.0}


COPIED = (Block, Closure, Default, Method, Weights, Feature, Pair, WithObject, Keeping, Pickled, Copies, Whole, Graph)
COPIED = (*COPIED, Normed, Held)
REFUSED = (Weak, Dropping, Global)  # whose copies go on using the original, or lack something


class Network(nn.Module):
    """Blocks in a row, some twice, some with tied weights, and perhaps a head that only training calls."""

    def __init__(self, kinds: list[type[Block]]) -> None:
        super().__init__()
        width = random.randint(4, 8)
        widths = [FEATURES, *[width] * len(kinds)]
        self.blocks = nn.ModuleList(kind(a, b) for kind, a, b in zip(kinds, widths, widths[1:], strict=False))
        self.order = [*range(len(kinds))]
        for number in range(1, len(kinds)):
            ends = self.blocks[number].layer, self.blocks[-1].layer
            plain = all(type(layer) is nn.Linear and "weight" in layer._parameters for layer in ends)
            if plain and random.random() < 0.15 and number < len(kinds) - 1:
                self.blocks[number].layer.weight = self.blocks[-1].layer.weight
            if random.random() < 0.15:
                self.order.append(number)
        self.head = nn.Linear(width, OUTPUTS)
        self.other = nn.Linear(width, OUTPUTS) if random.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        if self.training and self.other is not None:
            return self.head(x) + 0.1 * self.other(x)
        return self.head(x)


def make(seed: int, kinds: tuple[type[Block], ...]) -> Network:
    random.seed(seed)
    torch.manual_seed(seed)
    network = Network([random.choice(kinds) for _ in range(random.randint(1, 4))])
    if random.random() < 0.7:
        network(torch.randn(3, FEATURES))  # which leaves tensors of a call
    return network.train(random.random() < 0.5)


@torch.no_grad()
def by_hand(network: nn.Module, gates: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network itself in evaluation mode, with masks."""
    modes = {module: module.training for module in network.modules()}
    handles = [
        network.get_submodule(path).register_forward_hook(lambda module, args, output, z=z: output * z)
        for path, z in gates.items()
    ]
    y = network.eval()(x).clone()
    for handle in handles:
        handle.remove()
    for module, mode in modes.items():
        module.training = mode
    return y


def state_of(network: nn.Module) -> list[object]:
    """What nobody may change: tensors, modes, hooks, and what those of the blocks counted."""
    found: list[object] = [(name, x.detach().clone(), id(x)) for name, x in network.state_dict(keep_vars=True).items()]
    for module in network.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        found += [module.training, sorted(vars(module)), list(map(id, hooks)), len(getattr(module, "seen", ()))]
        found += [hook.calls for hook in hooks if isinstance(hook, CallableHook)]
    return found


def same_state(one: list[object], other: list[object]) -> bool:
    def same(x: object, y: object) -> bool:
        if isinstance(x, tuple):
            return x[0] == y[0] and torch.equal(x[1], y[1]) and x[2] == y[2]
        return x == y

    return len(one) == len(other) and all(map(same, one, other))


def check_apart(network: nn.Module, small: nn.Module, x: Tensor) -> str | None:
    """Whether what was returned calls or reads anything of the user's network."""
    own, called = set(network.modules()), []
    handle = module_hooks.register_module_forward_pre_hook(lambda module, args: called.append(module in own))
    with torch.no_grad():
        before = small(x).clone()
    handle.remove()
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.fill_(0.1)
        network(x)
        after = small(x)
    return "calls the user's modules" if any(called) else None if torch.equal(before, after) else "reads the user's"


def check(seed: int) -> tuple[str, str | None]:
    """What was asked for and how it ended, and what is wrong; None if nothing is."""
    random.seed(seed)
    what = random.choice(["fix_gates", "compact", "compact_zeros", "compact", "prune"])
    refused = REFUSED if what in ("compact_zeros", "prune") else REFUSED[:-1]  # the others copy without an example
    kinds = (*COPIED, *refused) if random.random() < 0.3 else COPIED
    network = make(seed, kinds)
    may_refuse = any(isinstance(block, REFUSED) for block in network.blocks)
    example, other = torch.randn(4, FEATURES), torch.randn(7, FEATURES)
    width, gates = network.head.in_features, {}
    if what in ("fix_gates", "compact"):
        paths = [f"blocks.{i}.act" for i in range(len(network.blocks)) if random.random() < 0.7] or ["blocks.0.act"]
        gates = {path: (torch.rand(width) < 0.6).float() * torch.rand(width).round(decimals=2) for path in paths}
        gates = {path: z if z.any() else torch.ones(width) for path, z in gates.items()}
    if what == "compact_zeros":
        zero_units(network)
    before = state_of(network)
    ran = f"{what}: done"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small, expected = asked_for(what, network, gates, example, other)
    except (ValueError, CompactionError) as error:
        names = {name for name, _ in (*network.named_modules(), *network.named_parameters())}
        needed = may_refuse or re.search("computed by a hook|Expected a budget that one", str(error))
        if not needed:
            return f"{what}: refused", f"refused without need: {error}"
        return f"{what}: refused", None if names & {*re.findall(r"[\w.]+", str(error))} else f"names nothing: {error}"
    if not same_state(before, state_of(network)):
        return ran, "the user's network has changed"
    if expected is None:
        expected = by_hand(network, gates, other)
    if expected.numel():
        with torch.no_grad():
            apart = float((small(other) - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not apart < 1e-4:  # rounding of float32, in up to eight layers, is a tenth of that
            return ran, f"differs by {apart:.1e}"
    return ran, check_apart(network, small, other)


def asked_for(
    what: str, network: Network, gates: dict[str, Tensor], example: Tensor, other: Tensor
) -> tuple[nn.Module, Tensor | None]:
    """What is returned, in evaluation mode, and what it should compute; None for the network itself with its masks."""
    if what == "compact_zeros":
        return compact_zeros(network, example).network, None
    if what == "prune":
        data = torch.randn(32, FEATURES)
        loader = [(data[i : i + 8], data[i : i + 8, :OUTPUTS]) for i in range(0, 32, 8)]
        result = prune(network, F.mse_loss, loader, example, 0.6, epochs=5, pretrained=False)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            result.network(example[:1])
        counts = counter.get_total_flops() / 2, sum(p.numel() for p in result.network.parameters())
        reported = result.report.left["macs"][0], result.report.left["parameters"][0]
        return result.network, torch.zeros(0) if counts == reported else torch.tensor([*counts, *reported])
    gated = insert_gates(network, {path: L0Gate(len(z)) for path, z in gates.items()})
    values = {f"{path}.1": z for path, z in gates.items()}
    if what == "fix_gates":
        return fix_gates(gated, values).eval(), None
    return compact(gated, values, example).network, None


@torch.no_grad()
def zero_units(network: Network) -> None:
    """Set some rows of some layers to zero, as pruning by weights leaves them."""
    for block in network.blocks:
        if type(block.layer) in (nn.Linear, Remade, Redrawn):
            rows = torch.rand(block.layer.out_features) < 0.4
            block.layer.weight[rows] = 0.0
            block.layer.bias[rows] = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.cases} cases")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts, wrong = Counter[str](), 0
    for seed in range(options.seed, options.seed + options.cases):
        try:
            ended, fault = check(seed)
        except Exception as error:
            ended, fault = "error", f"{type(error).__name__}: {error}"
        counts[ended] += 1
        if fault is not None:
            wrong += 1
            print(f"case {seed}, {ended}: {fault[:400]}", flush=True)
    for ended, number in sorted(counts.items()):
        print(f"{ended:24}{number:6}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
