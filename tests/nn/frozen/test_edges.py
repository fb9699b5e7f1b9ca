"""Gates on edges: open ones change nothing, and a closed one is path patching by hand, in each architecture."""

import json
from itertools import product

import pytest
import torch

from pyro_l0.nn.frozen import gate_edges
from tests.nn.frozen.circuits import NETWORKS, PATHS, WORDS, patched, small

transformers = pytest.importorskip("transformers")
transformers.GPT2LMHeadModel  # noqa: B018  # whose import takes seconds, which are no test's


def texts(seed, *shape):
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NETWORKS)
def test_open_edges_are_the_network(name, attention):
    """At the example, and at texts of another size."""
    if (name, attention) == ("gemma2", "sdpa"):
        pytest.skip("transformers has no such attention for Gemma 2")
    network = small(transformers, name)
    network.set_attn_implementation(attention)
    edges = gate_edges(network, {"input_ids": texts(0, 2, 5)})
    for ids in (texts(1, 2, 5), texts(2, 3, 7)):
        logits = edges.at(torch.ones(len(edges.edges)), input_ids=ids)
        torch.testing.assert_close(logits, network(input_ids=ids)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PATHS)
def test_closed_edges_are_patched_paths(name):
    """Every fourth edge, and all to the output; 1e-10 is far below the change that each makes."""
    network, ids = small(transformers, name), texts(0, 2, 5)
    edges = gate_edges(network, {"input_ids": ids})
    whole = network(input_ids=ids)[0]
    chosen = [k for k, (_, reader) in enumerate(edges.edges) if k % 4 == 0 or reader == "output"]
    for corrupted in (None, texts(1, 2, 5)):
        if corrupted is not None:
            edges.corrupt(input_ids=corrupted)
        for k in chosen:
            z = torch.ones(len(edges.edges), dtype=torch.float64)
            z[k] = 0.0
            expected = patched(network, name, ids, edges.edges[k], corrupted)
            torch.testing.assert_close(
                edges.at(z, input_ids=ids), expected, rtol=1e-10, atol=1e-10, msg=str(edges.edges[k])
            )
            is_same = corrupted is not None and edges.edges[k][0] == "transformer.wpe"  # positions are the same
            assert is_same or float((expected - whole).abs().max()) > 1e-5, edges.edges[k]


def test_calls_with_padding():
    """Without a mask, with one of ones, for which transformers branches, and with padding."""
    network = small(transformers, "llama")
    ids, mask = texts(0, 2, 5), torch.ones(2, 5, dtype=torch.long)
    edges = gate_edges(network, {"input_ids": ids, "attention_mask": mask})
    padded = mask.clone()
    padded[1, :2] = 0
    for given in ({"attention_mask": mask}, {"attention_mask": padded}, {"attention_mask": mask}, {}):
        logits = edges.at(torch.ones(len(edges.edges)), input_ids=ids, **given)
        torch.testing.assert_close(logits, network(input_ids=ids, **given)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "number"), [("gpt2", 110), ("neox", 102), ("llama", 110)])
def test_benchmarks_reader_knows_all_edges(name, number, tmp_path):
    """What Graph.from_json of EAP-IG takes at commit 795f5607, by which a GPT-2 of 12 layers has 32,491 edges."""
    edges = gate_edges(small(transformers, name), {"input_ids": texts(0, 2, 5)})
    is_closed = torch.rand(len(edges.edges), generator=torch.Generator().manual_seed(0)) < 0.7
    with torch.no_grad():
        edges.gate.location[is_closed] = -20.0
    edges.save_scores(tmp_path / "scores.json")
    content = json.loads((tmp_path / "scores.json").read_text())
    assert set(content) == {"cfg", "nodes", "edges"}
    is_parallel = name == "neox"
    assert content["cfg"] == {"n_layers": 2, "n_heads": 4, "d_model": 16, "parallel_attn_mlp": is_parallel}
    blocks = {f"m{k}": 2 * k + (not is_parallel) for k in range(2)}  # by node, when it reads or writes
    written = {"input": -1} | {f"a{k}.h{h}": 2 * k for k, h in product(range(2), range(4))} | blocks
    read = {f"a{k}.h{h}<{x}>": 2 * k for k, h, x in product(range(2), range(4), "qkv")} | blocks | {"logits": 4}
    known = {f"{x}->{y}" for (x, early), (y, late) in product(written.items(), read.items()) if early < late}
    assert content["edges"].keys() == known
    assert len(known) == number
    assert all(edge.keys() == {"score", "in_graph"} and edge["score"] >= 0 for edge in content["edges"].values())
    assert content["nodes"].keys() == {*written, "logits"}
    pairs = [key.split("->") for key, edge in content["edges"].items() if edge["in_graph"]]
    assert 0 < len(pairs) < number / 2
    both = {x for x, _ in pairs} & {"input", *(y.split("<")[0] for _, y in pairs)}
    assert {x for x, node in content["nodes"].items() if node["in_graph"]} == both | {"logits"}
