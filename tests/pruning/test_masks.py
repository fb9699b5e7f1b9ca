"""Masks over the frozen weights of transformers, in a loop of one's own: heads, units and blocks."""

import pytest
import torch
import torch.nn.functional as F

from pyro_l0.compaction import compact
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import NetworkCost, NetworkGates, fix_gates

pytest.importorskip("transformers")
bench_masks = pytest.importorskip("tests.bench.steps.bench_masks")

STEPS = 20


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT"])
def test_masks_of_heads_units_and_blocks(name):
    """Half of the multiply-adds leave; no weight moves; what is cut computes what its gates did."""
    torch.manual_seed(0)
    network, inputs = bench_masks.models(layers=2, width=16, length=6)[name]
    network.eval().requires_grad_(False)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    masked = bench_masks.with_masks(name, network).eval()
    gates = NetworkGates(masked).train()
    target = SparsityTarget(gates, 0.5, NetworkCost(masked, inputs).macs, steps=STEPS, pretrained=True)
    optimiser = torch.optim.Adam([{"params": gates.locations(), **target.optimiser_options}])
    wanted = network(**inputs).logits.log_softmax(-1)
    for _ in range(STEPS):
        optimiser.zero_grad()
        logits = masked(**inputs).logits.log_softmax(-1)
        F.kl_div(logits, wanted, reduction="batchmean", log_target=True).backward()
        target.add_gradient()
        optimiser.step()
        target.ascend()
    masked.eval()
    assert 0.9 < target.report().of_budget <= 1
    kept = {key: value for key, value in masked.state_dict().items() if "l0_gates" not in key}
    assert kept.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in kept.items())
    cut = compact(masked, gates.test_gates(), inputs)
    assert cut.certificate < 1e-6
    fixed = fix_gates(masked, gates.test_gates()).eval()
    torch.testing.assert_close(cut.network(**inputs).logits, fixed(**inputs).logits, rtol=1e-4, atol=1e-5)
    full, left = (NetworkCost(each, inputs).total_macs for each in (network, cut.network))
    assert left <= 0.5 * full


def test_a_closed_block_is_gone():
    """Both branches of a block, which share a gate, leave no weight."""
    torch.manual_seed(0)
    network, inputs = bench_masks.models(layers=2, width=16, length=6)["Llama"]
    masked = bench_masks.with_masks("Llama", network.eval().requires_grad_(False)).eval()
    gates = {site: torch.ones(gate.size) for site, gate in NetworkGates(masked).sites.items()}
    gates["model.layers.0.self_attn.o_proj.1"].zero_()
    cut = compact(masked, gates, inputs)
    block = cut.network.model.layers[0]
    print(block, [(n, tuple(p.shape)) for n, p in block.named_parameters()])
    torch.testing.assert_close(cut.network(**inputs).logits, network_without(network, inputs), rtol=1e-4, atol=1e-5)


def network_without(network, inputs):
    del network.model.layers[0]
    return network(**inputs).logits
