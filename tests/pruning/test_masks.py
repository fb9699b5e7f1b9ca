"""Masks over the frozen weights of transformers, in a loop of one's own: heads, units and blocks."""

import pytest
import torch
import torch.nn.functional as F

from pyro_l0.compaction import compact
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import NetworkCost, NetworkGates, fix_gates
from tests.bench.steps import bench_masks

pytest.importorskip("transformers")
STEPS = 12


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT"])
def test_masks_of_heads_units_and_blocks(name):
    """To a budget; no weight moves; what is cut computes what its test gates do."""
    torch.manual_seed(0)
    network, inputs = bench_masks.models(layers=2, width=16, length=6)[name]
    network.eval().requires_grad_(False)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    masked = bench_masks.with_masks(name, network).eval()
    gates = NetworkGates(masked).train()
    cost = NetworkCost(masked, inputs)
    target = SparsityTarget(gates, 0.7, cost.macs, steps=STEPS, pretrained=True)
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
    assert target.report().of_budget <= 1
    kept = {key: value for key, value in masked.state_dict().items() if "l0_gates" not in key}
    assert kept.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in kept.items())
    cut = compact(masked, gates.test_gates(), inputs)
    assert cut.certificate < 1e-6
    fixed = fix_gates(masked, gates.test_gates()).eval()
    torch.testing.assert_close(cut.network(**inputs).logits, fixed(**inputs).logits, rtol=1e-4, atol=1e-5)
    # Of a closed block a head and a unit stay, which the cost leaves out.
    layers, projection, units, _ = bench_masks.PATHS[name]
    kept = {site: (gate != 0).float() for site, gate in gates.test_gates().items()}
    for i in range(2):
        path = f"{layers}.{i}"
        if not bool(kept[f"{path}.{projection}.1"]):
            kept[f"{path}.{projection}.1"].fill_(1.0)
            for site in (f"{path}.{projection}.gate", f"{path}.{units}.1"):
                kept[site] = (torch.arange(len(kept[site])) < 1).float()
    assert NetworkCost(cut.network, inputs).total_macs == float(cost.macs(kept))


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT"])
def test_a_closed_block_is_gone(name):
    """What is left of it adds nothing: the outputs are those of the network without its layer."""
    torch.manual_seed(0)
    network, inputs = bench_masks.models(layers=2, width=16, length=6)[name]
    masked = bench_masks.with_masks(name, network.eval().requires_grad_(False)).eval()
    layers, projection, *_ = bench_masks.PATHS[name]
    gates = {site: torch.ones(gate.size) for site, gate in NetworkGates(masked).sites.items()}
    gates[f"{layers}.0.{projection}.1"].zero_()
    cut = compact(masked, gates, inputs).network
    left = NetworkCost(cut, inputs).total_macs
    del network.get_submodule(layers)[0]
    torch.testing.assert_close(cut(**inputs).logits, network(**inputs).logits, rtol=1e-4, atol=1e-5)
    del cut.get_submodule(layers)[0]
    torch.testing.assert_close(cut(**inputs).logits, network(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert left < 1.1 * NetworkCost(network, inputs).total_macs
