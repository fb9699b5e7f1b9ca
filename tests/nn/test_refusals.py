"""What gates, networks, examples, values and plans may not be: refused with what was expected and what arrived."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn
from torch.nn.utils import parametrize

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.compaction import compact
from pyro_l0.compaction.apply import apply_plan
from pyro_l0.compaction.compact import CompactionError
from pyro_l0.nn import (
    L0Gate,
    NetworkCost,
    NetworkGates,
    fix_gates,
    gate_heads,
    gate_weights,
    insert_gates,
    penalty,
    suggest_gates,
)
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names, name_gates
from pyro_l0.nn.heads import PlainAttention
from pyro_l0.nn.square_norms import square_norms
from pyro_l0.nn.weights import fix_weights
from tests.networks import Attention, Dense, Net

FUNCTIONS = {
    "insert_gates": lambda network: insert_gates(network, {"0": L0Gate(3)}),
    "fix_gates": lambda network: fix_gates(network, {}),
    "fix_weights": lambda network: fix_weights(network, {}),
    "gate_heads": lambda network: gate_heads(network, {"0": 2}),
    "gate_names": gate_names,
    "name_gates": name_gates,
    "gate_weights": lambda network: gate_weights(network, "0"),
    "NetworkCost": lambda network: NetworkCost(network, torch.ones(1, 2)),
    "square_norms": lambda network: square_norms(network, torch.ones(1, 2)),
    "suggest_gates": lambda network: suggest_gates(network, torch.ones(1, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("network", [None, "abc", {"0": 3}, nn.Linear], ids=["none", "string", "dict", "class"])
def test_no_network(name, network):
    with pytest.raises(TypeError, match=r"Expected network to be an nn\.Module, but got a value of type"):
        FUNCTIONS[name](network)


@pytest.mark.parametrize("entries", [None, 3, ["0"], {0: 3}], ids=["none", "number", "list", "integer keys"])
@pytest.mark.parametrize("function", [insert_gates, fix_gates, fix_weights, gate_heads])
def test_no_entries_by_name(function, entries):
    with pytest.raises(TypeError, match=r"Expected (gates|numbers of heads) by (module path|site name)"):
        function(nn.Sequential(nn.Linear(2, 3)), entries)


@pytest.mark.parametrize("bad", [None, "abc", [1.0], {"weight": 3}])
def test_what_holds_no_tensors(bad):
    """The values of a fixed gate, and a plan."""
    with pytest.raises(TypeError, match="Expected value to be a tensor"):
        FixedGate(bad)
    with pytest.raises(TypeError, match="Expected plan to be the plan of a compacted network"):
        apply_plan(nn.Linear(2, 2), bad)


def test_integers_of_numpy_are_sizes_and_dimensions():
    gate = L0Gate(np.int64(4), dim=np.int64(1))
    assert (type(gate.size), type(gate.dim)) == (int, int)
    assert gate(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("make", [lambda: L0Gate(5), lambda: FixedGate(torch.ones(5))], ids=["random", "fixed"])
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (nn.LSTM(3, 5)(torch.randn(2, 4, 3)), TypeError, "a tensor at gate .*but got a tuple; .*nn.LSTM"),
        (torch.ones(2, 5, dtype=torch.uint8), TypeError, r"floating type at gate .*but got torch.uint8.*\.float\(\)"),
        (torch.ones(2, 5).bool(), TypeError, "but got torch.bool"),
        (torch.ones(2, 1), ValueError, r"5 units in dimension -1 at gate .*, but got an input of shape \(2, 1\)"),
        (torch.ones(()), ValueError, r"5 units in dimension -1 at gate .*, but got an input of shape \(\)"),
    ],
    ids=["LSTM", "uint8", "bool", "shape", "scalar"],
)
def test_inputs_that_gates_cannot_multiply(make, x, error, message):
    """A tuple, integers, which would round gates to 0, and units that would be broadcast."""
    with pytest.raises(error, match=message), poutine.trace():
        make()(x)


ONES, NAN = torch.ones, float("nan")
GATES = {"0": ONES(4), "2": ONES(3)}
BELOW = {f"net.{name}": value for name, value in GATES.items()}
GATE = {"gate": torch.tensor([1.0, 0.0, 0.5, 0.9])}
ATTENTION, END = nn.MultiheadAttention(6, 2), nn.Linear(4, 2)
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def gated():
    return nn.Sequential(L0Gate(4), nn.Linear(4, 3), L0Gate(3), nn.Linear(3, 2))


def fixed():
    return fix_gates(gated(), GATES)


def cost(gates):
    return NetworkCost(gated(), ONES(1, 4)).weights(gates)


def analysed(closed):
    network = nn.Sequential(nn.Linear(6, 8), L0Gate(8), nn.Linear(8, 2))
    name_gates(network)
    return analyse(record(network, ONES(2, 6)), closed)


def insert(path, gate=None):
    recurrent = {"gru": nn.GRU(3, 3), "lstm": nn.LSTM(3, 4, proj_size=2), "attend": ATTENTION}
    network = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 4)), "decoder": nn.Linear(4, 3)} | recurrent)
    return insert_gates(network, {path: L0Gate(4) if gate is None else gate})


def insert_both(paths, example=None, network=None):
    """Gates in a network that calls one layer by two names, behind a module that returns two tensors."""
    same = nn.Linear(3, 3)
    pair = Net(lambda s, x: (x * 2, x))
    layers = {"pair": pair, "same": same, "again": same, "last": (3, 1)}
    network = network or Dense(lambda s, x: s.last(s.again(s.same(s.pair(x)[0]))), **layers)
    return insert_gates(network, {path: L0Gate(1 if path == "last" else 3) for path in paths}, example)


def insert_twice(path):
    """A gate in a network with one activation behind two layers, and modules that are never called."""
    layers = dict(first=(3, 4), second=(4, 4), act=nn.ReLU(), unused=nn.ReLU(), blocks=nn.ModuleList([nn.Tanh()]))
    network = Dense(lambda s, x: s.blocks[0](s.act(s.second(s.act(s.first(x))))), **layers)
    return insert_gates(network, {path: L0Gate(4)}, torch.randn(2, 3))


def heads(path, number, shared=False, **options):
    net = nn.ModuleDict({"a": Attention(6, 2), "conv": nn.Conv1d(6, 6, 1), "words": nn.Embedding(3, 4)})
    net["torch"] = nn.MultiheadAttention(6, 2, **options)
    if shared:
        net["out"], net["b"] = net["a"].out, net["torch"]
    return gate_heads(net, {path: number})


def unread_heads():
    network = Net(lambda s, x: x + 0 * s.attention(x, x, x)[0], attention=nn.MultiheadAttention(8, 2, batch_first=True))
    return gate_heads(network, {"attention.out_proj": 2}, torch.randn(2, 3, 8))


def tied():
    net = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.LayerNorm(4))
    net[1].weight = net[0].weight
    return net


def compacted(gates=None, x=X, function=lambda s, x: s.b(s.gate(s.a(x))), **layers):
    network = Dense(function, **{"a": (6, 4), "gate": 4, "b": (4, 2)} | layers)
    return compact(network, {"gate": ONES(4)} if gates is None else gates, x)


def added(s, x):
    return s.b(s.gate(s.a(x) + torch.ones(4)))


def literal(s, x):
    h = s.a(x).view(len(x), 2, 4)
    return s.b(s.gate(h).flatten(1))


def picky(s, x):
    """Asks for a number of units that operations do not tell."""
    h = s.gate(s.a(x))
    if len(h.mT) % 4:
        raise RuntimeError("a multiple of four")
    return s.c(s.last(torch.relu(s.b(h))))


def picked():
    gates = {"gate": (torch.arange(8) != 1).float(), "last": torch.tensor([1.0, 0, 0, 1, 1, 1])}
    return compact(Dense(picky, a=(6, 8), gate=8, b=(8, 6), last=6, c=(6, 1)), gates, X)


def infinite():
    network = nn.Sequential(nn.Linear(6, 4), L0Gate(4), nn.Linear(4, 2))
    nn.init.constant_(network[2].bias, NAN)
    return compact(network, {"1": ONES(4)}, X)


def apply_to(*layers):
    """The plan of one network to another."""
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 2))
    return apply_plan(nn.Sequential(*layers), compact(network, {"2": torch.tensor([1.0, 0, 0, 1])}, ONES(2, 3)).plan)


def looped():
    """Draws its gates before a loop."""

    def steps(s, x):
        z, h = s.gate(), x.new_zeros(len(x), 8)
        for t in range(x.shape[1]):
            h = z * s.cell(x[:, t], h)
        return h.sum(1)

    return Dense(steps, cell=nn.GRUCell(4, 8), gate=8)


def plain():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def with_gate_in_weights(gate):
    network = plain()
    parametrize.register_parametrization(network[2], "weight", gate)
    return network


def with_gate_apart():
    network = plain()
    network[0].gate = L0Gate(3)
    return network


def units(size):
    return nn.Sequential(L0Gate(size, dim=1))


def masked():
    layers = dict(gate=3, linear=(3, 2), mask=nn.Parameter(ONES(2, 3)))
    return Dense(lambda s, x: F.linear(s.gate(x), s.linear.weight * s.mask), **layers)


def two_of_one_name():
    block = nn.Sequential(L0Gate(3), nn.Linear(3, 2))
    name_gates(block)
    return fix_gates(nn.Sequential(L0Gate(2), nn.Linear(2, 3), block), {"0": ONES(3)})


LINE = r"line \d+ of test_refusals.py"
COMPUTES = r"gate '.*' \(module '2.parametrizations.weight.0(.gate)?'\) computes weights"
REFUSALS = [
    # Gates and what they are called on.
    (lambda: L0Gate(0), ValueError, "size of at least 1, but got 0"),
    (lambda: L0Gate(2.0), TypeError, "size to be a whole number"),
    (lambda: L0Gate(2, dim="1"), TypeError, "dim to be a whole number"),
    (lambda: L0Gate(2, dim=0), ValueError, "got 0, the batch"),
    (lambda: L0Gate(2, prior=dist.Normal(0.0, 1.0)), TypeError, "prior to be a gate distribution"),
    (lambda: L0Gate(2, prior=HardConcrete(torch.zeros(3))), RuntimeError, "must match the existing size"),
    (lambda: L0Gate(), ValueError, "a shape"),
    (lambda: L0Gate(3, family="bernoulli"), ValueError, "family to be one of .*, but got 'bernoulli'"),
    (lambda: L0Gate(3, family=BernoulliGate), ValueError, "pathwise draws"),
    (lambda: L0Gate(3)(ONES(2, 4)), ValueError, "Expected 3 units in dimension -1 at gate"),
    (lambda: L0Gate(4, 3)(ONES(1, 3)), ValueError, "without enlarging it, but got one of shape"),
    (lambda: L0Gate(7, family="rectified_normal").kl(BernoulliGate.from_active_prob(0.2)), TypeError, "it is infinite"),
    (lambda: NetworkGates(nn.Linear(2, 2)), ValueError, "a network with L0Gates, but it has none"),
    (lambda: FixedGate(ONES(2, 3)), ValueError, r"one value per unit, shape \(size,\)"),
    (lambda: FixedGate(torch.tensor(1.0)), ValueError, r"one value per unit, shape \(size,\)"),
    (lambda: FixedGate(ONES(3), 0), ValueError, r"one value per unit, shape \(size,\)"),
    # Names and values.
    (lambda: fix_gates(gated(), {"0": ONES(4)}), ValueError, "no value for '2'"),
    (lambda: fix_gates(gated(), {**GATES, "5": ONES(1)}), ValueError, "no layer for '5'"),
    (lambda: fix_gates(gated(), BELOW), ValueError, r"'0', '2' and no layer .* at different modules; name_gates"),
    (lambda: fix_gates(gated(), {**GATES, "2": ONES(2)}), ValueError, r"gates\['2'\] of shape \(3,\), but got \(2,\)"),
    (lambda: fix_gates(gated(), {**GATES, "2": ONES(3) * 1.5}), ValueError, r"gates\['2'\] in \[0, 1\]"),
    (lambda: fix_gates(gated(), {**GATES, "2": ONES(3) * NAN}), ValueError, r"gates\['2'\] in \[0, 1\]"),
    (lambda: fix_gates(gated(), {**GATES, "2": [1.0] * 3}), TypeError, r"gates\['2'\] to be a tensor, .* of type list"),
    (lambda: fix_gates(gated(), [ONES(5)]), TypeError, r"by site name, such as guide.test_gates\(\), but got a list"),
    (lambda: fix_gates(fixed(), GATES), ValueError, r"no layer for '0', '2' \(gates of this network have been fixed"),
    (two_of_one_name, ValueError, "two are called '0'"),
    (lambda: penalty(gated(), {"0": 1.0}), ValueError, r"price for each of the gates \['0', '2'\], but got {'0': 1.0}"),
    (lambda: cost({"0": ONES(4)}), ValueError, r"one entry per gate site \['0', '2'\], but got \['0'\]"),
    (lambda: cost({"0": ONES(4), "2": ONES(4)}), ValueError, r"gates\['2'\] of shape \(3,\), but got \(4,\)"),
    (lambda: cost([1.0]), ValueError, "one entry per gate site"),
    (lambda: cost({**GATES, "2": torch.tensor([1.0, 1.0, 2.0])}), ValueError, r"gates\['2'\] in \[0, 1\]"),
    (lambda: cost({**GATES, "2": torch.tensor([1.0, 1.0, -1.0])}), ValueError, r"gates\['2'\] in \[0, 1\]"),
    (lambda: cost({**GATES, "2": torch.tensor([1.0, 1.0, NAN])}), ValueError, r"gates\['2'\] in \[0, 1\]"),
    (lambda: analysed({"2": ONES(8).bool()}), ValueError, r"Expected gates of the network, \['1'\], but got '2'"),
    (lambda: analysed({"1": ONES(8)}), TypeError, "invert"),
    (lambda: analysed({"1": ONES(7).bool()}), ValueError, "broadcast"),
    # Places.
    (lambda: insert("encodr"), ValueError, "inside of the network, but got 'encodr'; there are 'encoder'"),
    (lambda: insert("x"), ValueError, "got 'x'; there are 'encoder', 'decoder'"),  # the outermost ones
    (lambda: insert("encoder", 4), TypeError, r"gates\['encoder'\] to be an L0Gate, but got a value of type int"),
    (lambda: insert("attend.out_proj"), ValueError, "nn.MultiheadAttention reads the weights of 'attend.out_proj'"),
    (lambda: insert("gru"), ValueError, r"L0Gate\(3\) for the hidden units of 'gru'.*got L0Gate\(4"),
    (lambda: insert("lstm"), ValueError, "without proj_size, but got proj_size=2"),
    (
        lambda: insert_twice("act"),
        ValueError,
        r"on the same units each .*'act' behind 'first' and at 'act' behind 'second'",
    ),
    (lambda: insert_twice("unused"), ValueError, r"'unused' to be called.*it is never called"),
    (lambda: insert_twice("blocks"), ValueError, r"'blocks' to be called.*it is never called"),
    (lambda: insert_both(["pair"], ONES(1, 3)), ValueError, "'pair' returns something else"),
    (lambda: insert_both(["pair"])(ONES(1, 3)), TypeError, r"a tensor at gate .*, but got a tuple"),
    (lambda: insert_both(["same", "again"]), ValueError, "'same' and 'again' are one module"),
    (lambda: insert_both(["last"], network=insert_both(["last"])), ValueError, "'last' has one already"),
    (
        lambda: suggest_gates(plain(), ONES(2, 4).byte()),
        ValueError,
        r"takes, .* of shape \(2, 4\) and dtype torch.uint8",
    ),
    # Gates on heads and on weights.
    (lambda: heads("a.o", 2), ValueError, r"dense layers inside of the network, but got 'a\.o'; there are 'a\.out'"),
    (lambda: heads("conv", 2), TypeError, "at 'conv', which reads the heads side by side, but got Conv1d"),
    (lambda: heads("words", 2), TypeError, "at 'words', .* got Embedding"),
    (lambda: heads("a.out", 4), ValueError, "divides its 6 inputs, but got 4"),
    (lambda: heads("a.out", 0), ValueError, r"heads\['a\.out'\] of at least 1"),
    (lambda: heads("a.out", 2.0), TypeError, r"heads\['a\.out'\] to be a whole number"),
    (lambda: gate_heads(heads("a.out", 2), {"a.out": 2}), ValueError, r"without head gates, but 'a\.out' has them"),
    (lambda: heads("a.out", 2, shared=True), ValueError, "it is at 'a.out' and at 'out'"),
    (lambda: heads("torch.out_proj", 3), ValueError, r"Expected 2 heads at 'torch\.out_proj', .* but got 3"),
    (lambda: heads("torch.out_proj", 2, add_bias_kv=True), ValueError, "without add_bias_kv and add_zero_attn"),
    (lambda: heads("torch.out_proj", 2, shared=True), ValueError, "it is at 'torch' and at 'b'"),
    (lambda: gate_heads(nn.MultiheadAttention(6, 2), {"out_proj": 2}), ValueError, "target name"),
    (unread_heads, ValueError, r"closing gate 'attention\.out_proj\.gate' changes no output"),
    (lambda: PlainAttention(ATTENTION)(*[X[None]] * 3, is_causal=True), ValueError, "attn_mask with is_causal=True"),
    (lambda: gate_weights(nn.Linear(2, 1), ""), ValueError, "inside of the network, but got ''"),
    (lambda: gate_weights(tied(), "1"), ValueError, r"'0\.weight' and '1\.weight'; untie them"),
    (lambda: gate_weights(tied(), "2"), TypeError, "'2' is a LayerNorm"),
    (lambda: gate_weights(tied(), "5"), ValueError, "got '5'; there are '0', '1'"),
    (lambda: gate_weights(gate_weights(plain(), "0"), "0"), ValueError, "has them already"),
    (lambda: gate_weights(nn.Sequential(ATTENTION), "0.out_proj"), ValueError, r"is part of an nn\.MultiheadAttention"),
    # Networks whose costs are not known.
    (lambda: NetworkCost(Dense(lambda s, x: x * s.gate(), gate=6), X), ValueError, r"takes its values by gate\(\)"),
    (
        lambda: suggest_gates(looped(), ONES(2, 3, 4)),
        ValueError,
        r"can't be followed. Write .* gate\(h\) at each step of",
    ),
    (lambda: NetworkCost(with_gate_apart(), ONES(2, 4)), ValueError, r"'0.gate' \(module '0.gate'\) is never called"),
    (
        lambda: square_norms(masked(), ONES(1, 3)),
        ValueError,
        "gate 'gate' that are read by parameters, .* 'the network'",
    ),
    (lambda: NetworkCost(units(2), torch.zeros(4, 3, 2)), ValueError, "Expected 2 units in dimension 1 at gate 0, but"),
    (
        lambda: square_norms(units(2), torch.zeros(4, 3, 2)),
        ValueError,
        "Expected 2 units in dimension 1 at gate 0, but",
    ),
    *(
        (lambda count=count, gate=gate: count(with_gate_in_weights(gate()), ONES(2, 4)), ValueError, COMPUTES)
        for count in (NetworkCost, square_norms)
        for gate in (lambda: L0Gate(3), lambda: Dense(lambda s, weight: s.gate(weight), gate=3))
    ),
    *(
        (lambda ask=ask, wrong=wrong: ask(plain(), wrong), ValueError, "Expected an example")
        for ask in (NetworkCost, suggest_gates)
        for wrong in (ONES(0, 4), [], (), (ONES(1, 4), 3), {"name": ONES(1, 4)})
    ),
    # Networks and examples that compaction can't take, the line of the code and what to do.
    (lambda: compacted(GATE, function=added), CompactionError, rf"{LINE} \(return .*ones\(4\).* must match the size"),
    (
        lambda: compacted(GATE, function=literal, a=(6, 8), b=(8, 2)),
        CompactionError,
        rf"{LINE} \(h = s.a\(x\).*shape '\[5, 2, 4\]' is invalid for input of size 30. Take sizes from the tensors",
    ),
    (picked, CompactionError, rf"{LINE}.*can be cut with all gates of 'gate' open"),
    (infinite, CompactionError, "NaN or infinite ones; see whether a parameter"),
    (lambda: compacted(x=[X * NAN, X]), CompactionError, "the example holds some"),
    (lambda: compact(lambda x: x, {}, X), TypeError, "network to be a torch module, but got a value of type function"),
    (lambda: compacted(x=3.0), TypeError, "example that is a tensor, a tuple"),
    (lambda: compacted(x=(3.0,)), ValueError, r"example of tensors with entries, but got ones of shapes \[\]"),
    (lambda: compacted(x=X[:0]), ValueError, r"with entries, but got ones of shapes \[\(0, 6\)\]"),
    (lambda: compacted(x=X.double()), RuntimeError, "must have the same dtype, but got Double and Float"),
    (lambda: compacted(a=nn.Linear(6, 4, device="meta")), ValueError, "meta device has none"),
    (lambda: compacted(a=nn.LazyLinear(4)), ValueError, "'a.weight' is lazy; call the"),
    (lambda: compacted(a=nn.LSTM(6, 4)), TypeError, r"tensor at gate gate, but got a tuple; .*nn\.LSTM"),
    (lambda: compacted({}), ValueError, "no value for 'gate'"),
    (lambda: compacted({"gate": ONES(4), "x": ONES(4)}), ValueError, r"has \['gate'\].*no layer for 'x'"),
    (lambda: compacted({"gate": ONES(3)}), ValueError, r"gates\['gate'\] of shape \(4,\), but got \(3,\)"),
    (lambda: compacted({"gate": ONES(4) * NAN}), ValueError, r"gates\['gate'\] in \[0, 1\]"),
    (lambda: compact(fixed(), {"0": ONES(4)}, ONES(2, 4)), ValueError, "no layer for '0' .gates of .* have been fixed"),
    (lambda: apply_to(nn.Linear(3, 3), nn.ReLU(), L0Gate(4), END), ValueError, "no '0.weight' of the plan's size"),
    (lambda: apply_to(nn.ReLU()), ValueError, "it has no '2' of the plan's size"),
    (lambda: apply_to(nn.Linear(3, 4), nn.Linear(4, 4), nn.ReLU(), END), ValueError, "it has no '2'"),
    # Calls that are recorded.
    (lambda: record(nn.Linear(4, 4), 3), TypeError, "Expected an example that is a tensor, a tuple"),
    (lambda: record(Net(lambda s, x: "text"), ONES(2, 4)), ValueError, r"returns a tensor.* but got a str"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_what_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
