"""Whether gates find the edges of circuits: python tests/bench/edges/bench_edges.py [compiled|induction|memory]

``compiled``: two transformers compiled by hand, zero ablation, a budget of as many edges as the program has; a row for
each seed says how many of these were found. Their attention is hard: a closed edge changes the output, and none that
is a tenth open does. Slopes say nothing there, so gates are drawn as 0 or 1 and learn from differences of the loss,
by the score function with the other texts' mean as baseline (Kool et al., 2019, Buy 4 REINFORCE samples). Ends with 1
if an edge is missing. Five minutes on one core.

``induction``: a GPT-2 and a Llama of two layers learn to continue repeated random text; closed edges pass what is
written at other texts. A row for each network and number of edges has the KL from the network to the circuit on new
texts, in nats a token, of gates (all budgets in one run for each seed), of attribution patching of the answer's logit
("patching", Syed et al., 2023, arXiv:2310.10348) and of gradients of the KL at five inputs between the corrupted and
the clean one ("integrated", EAP-IG of Hanna et al., 2024, arXiv:2403.17806). A difference above one standard deviation
is a win or a loss of the gates. Several minutes a network and seed on one core.

``memory``: peak memory of a step with gradients, of a frozen GPT-2 of 12 layers with 12 heads by its inputs and of its
edges by their gates. Ends with 1 if the second is more than three times the first. A minute.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.data import repeated_texts
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import NetworkGates
from pyro_l0.nn.frozen import NetworkEdges, gate_edges
from tests.bench.edges.compiled import Compiled, Reversal, Share, texts

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 24, 64, 4
BATCH, GATED_BATCH, COMPILED_BATCH, TEST, POINTS = 64, 32, 256, 256, 5
METHODS = ("gates", "patching", "integrated")


def circuits(edges: NetworkEdges, numbers: list[int], steps: int, loss: Callable[[], Tensor]) -> dict[int, Tensor]:
    """The edges that gates keep at each budget of one run; ``loss`` draws a batch, and gates for each of its texts."""
    gates, found = NetworkGates(edges), list[Tensor]()
    shares = [n / len(edges.edges) for n in numbers]
    target = SparsityTarget(
        gates,
        shares if len(shares) > 1 else shares[0],
        lambda z: z["edges"].sum(),
        steps=steps,
        pretrained=True,
        on_budget=lambda share, z: found.append((z["edges"] != 0).float()),
    )
    optimiser = torch.optim.Adam(gates.locations(), **target.optimiser_options)
    for step in range(-steps // 10, steps):  # at first by the loss alone, which lifts the gates that it needs
        optimiser.zero_grad()
        loss().backward()
        if step >= 0:
            target.add_gradient()
        optimiser.step()
        if step >= 0:
            target.ascend()
    return dict(zip(numbers, found, strict=True))


def compiled(make: type[Compiled], seed: int, steps: int) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The edges that gates keep of a compiled transformer, and its own."""
    torch.manual_seed(seed)
    network = make().requires_grad_(False)
    edges = gate_edges(network, texts(2))

    @torch.no_grad()
    def errors(z: Tensor) -> Tensor:
        ids = texts(len(z))
        counts = make.counts(ids)
        return ((edges.at(z, ids) - network(ids)).square().sum(-1) * counts).sum(1) / counts.sum(1)

    def loss() -> Tensor:
        gates = edges.gate.distribution
        is_open = gates.sample(torch.Size([COMPILED_BATCH])) != 0
        error = errors(is_open.float())
        log_prob = torch.where(is_open, gates.log_active_prob, gates.log_prob_zero).sum(-1)
        return (error - error.mean()) @ log_prob / (COMPILED_BATCH - 1)  # its gradient is that of the mean error

    (kept,) = circuits(edges, [len(make.known)], steps, loss).values()
    return {edge for edge, z in zip(edges.edges, kept, strict=True) if z}, make.known


def run_compiled(seeds: list[int], steps: int) -> int:
    """A row for each seed."""
    missing = 0
    for make in (Reversal, Share):
        for seed in seeds:
            kept, known = compiled(make, seed, steps)
            missing += len(known - kept)
            print(
                f"{make.__name__:<10} seed {seed}: {len(kept & known)} of {len(known)} edges, {sorted(kept - known)}",
                flush=True,
            )
    return int(missing > 0)


def trained(kind: str, steps: int) -> nn.Module:
    """A network that continues repeated texts."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_layer=2, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH, **sizes, **dropouts)
        network = transformers.GPT2LMHeadModel(config)
    else:
        sizes |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "pad_token_id": 0}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "max_position_embeddings": LENGTH}
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    optimiser = torch.optim.AdamW(network.parameters(), 3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        text, answer, repeats = repeated_texts(BATCH, VOCABULARY, LENGTH)
        optimiser.zero_grad()
        loss = F.cross_entropy(network(input_ids=text, use_cache=False)[0][repeats], answer[repeats])
        loss.backward()
        optimiser.step()
        schedule.step()
    print(f"{kind}: cross entropy {loss.item():.3f} nats after {steps} steps", flush=True)
    return network.eval().requires_grad_(False)


class Task:
    """Texts of a network with corrupted ones beside them, and how far its circuits are off."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.embed = network, network.get_input_embeddings()
        text, _, _ = repeated_texts(2, VOCABULARY, LENGTH)
        self.edges = gate_edges(network, self._given(self.embed(text)))

    def _given(self, x: Tensor) -> dict[str, object]:
        return {"inputs_embeds": x, "use_cache": False}

    def loss(self) -> Tensor:
        """The KL with gates of their own for each of a few new texts."""
        return self.kl(self.edges.gate.distribution.rsample(torch.Size([GATED_BATCH])), GATED_BATCH)

    def kl(self, z: Tensor, number: int) -> Tensor:
        """KL from the network to the circuit on new texts in nats a token."""
        text, _, repeats = repeated_texts(number, VOCABULARY, LENGTH)
        self.edges.corrupt(**self._given(self.embed(torch.randint(VOCABULARY, text.shape))))
        return self._kl(self.edges.at(z, **self._given(self.embed(text))), text, repeats)

    def _kl(self, logits: Tensor, text: Tensor, repeats: Tensor) -> Tensor:
        whole = self.network(input_ids=text, use_cache=False)[0][repeats].log_softmax(-1)
        return F.kl_div(logits[repeats].log_softmax(-1), whole, reduction="batchmean", log_target=True)

    def scores(self) -> dict[str, Tensor]:
        """The rivals' scores of edges, on as many texts as circuits are compared on."""
        text, answer, repeats = repeated_texts(TEST, VOCABULARY, LENGTH)
        clean, corrupted = self.embed(text), self.embed(torch.randint(VOCABULARY, text.shape))
        self.edges.corrupt(**self._given(corrupted))
        z = torch.ones(len(self.edges.edges), requires_grad=True)
        logits = self.edges.at(z, **self._given(clean))[repeats]
        metric = logits.gather(1, answer[repeats].unsqueeze(1)).mean() - logits.mean()
        scores = {"patching": torch.autograd.grad(metric, z)[0], "integrated": torch.zeros(len(z))}
        with torch.no_grad():
            ones = torch.ones(len(z))
            sources, others = (self.edges._run(ones, (), self._given(x), None)[1] for x in (clean, corrupted))
        for k in range(1, POINTS + 1):
            between = corrupted + k / POINTS * (clean - corrupted)
            with torch.no_grad():
                here = self.edges._run(ones, (), self._given(between), None)[1]
            # What gates multiply is linear in the sources, so that it is the difference of clean and corrupted ones.
            self.edges._corrupted = [x - (a - b) for x, a, b in zip(here, sources, others, strict=True)]
            kl = self._kl(self.edges.at(z, **self._given(between)), text, repeats)
            scores["integrated"] += torch.autograd.grad(kl, z)[0] / POINTS
        return {method: score.abs() for method, score in scores.items()}


def run_induction(kinds: list[str], seeds: list[int], numbers: list[int], steps: int) -> int:
    """A row for each network and number of edges."""
    print("network   edges   " + "   ".join(f"{method:<15}" for method in METHODS) + "gates")
    for kind in kinds:
        found = {(method, n): list[float]() for method in METHODS for n in numbers}
        for seed in seeds:
            torch.manual_seed(seed)
            task = Task(trained(kind, steps))
            kept = {("gates", n): z for n, z in circuits(task.edges, numbers, steps, task.loss).items()}
            for method, score in task.scores().items():
                kept |= {(method, n): torch.zeros_like(score).index_fill(0, score.topk(n).indices, 1) for n in numbers}
            for key, z in kept.items():
                torch.manual_seed(1000 + seed)
                with torch.no_grad():
                    found[key].append(float(task.kl(z, TEST)))
        for n in numbers:
            means = {method: statistics.mean(found[method, n]) for method in METHODS}
            spreads = {m: statistics.stdev(found[m, n]) if len(seeds) > 1 else 0.0 for m in METHODS}
            rival = min(METHODS[1:], key=means.__getitem__)
            apart, spread = means[rival] - means["gates"], max(spreads[rival], spreads["gates"])
            verdict = "win" if apart > spread else "lose" if apart < -spread else "tie"
            row = "   ".join(f"{means[m]:.3f} ± {spreads[m]:.3f}  " for m in METHODS)
            print(f"{kind:<7}   {n:>3}/{len(task.edges.edges)}   {row}{verdict}", flush=True)
    return 0


def peak(what: str) -> float:
    """The peak of a step's memory in MiB above that before it, in this process."""
    import transformers

    torch.manual_seed(0)
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 192, "n_positions": 256, "vocab_size": 100}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    network.eval().requires_grad_(False)
    given = {"inputs_embeds": torch.randn(4, 256, 192), "use_cache": False}
    if what == "edges":
        edges = gate_edges(network, given)
        z = torch.full((len(edges.edges),), 0.9, requires_grad=True)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    if what == "edges":
        logits = edges.at(z, **given)
    else:
        logits = network(**given | {"inputs_embeds": given["inputs_embeds"].requires_grad_()})[0]
    logits.logsumexp(-1).mean().backward()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def run_memory() -> int:
    """Both peaks, each in a process whose allocator gives large blocks back at once."""
    found = {}
    for what in ("network", "edges"):
        command = [sys.executable, __file__, "memory", "--of", what]
        environment = {"MALLOC_MMAP_THRESHOLD_": "300000", "MALLOC_TRIM_THRESHOLD_": "300000"}
        printed = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
        found[what] = float(printed.stdout.split()[-1])
        print(f"{what:<8} {found[what]:.0f} MiB", flush=True)
    print(f"edges / network {found['edges'] / found['network']:.2f}")
    return int(found["edges"] > 3 * found["network"])


def main() -> int:
    """One of the three parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["compiled", "induction", "memory"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, help="of the gates, and of the networks that learn induction")
    parser.add_argument("--edges", type=int, nargs="+", default=[32, 16, 8])
    parser.add_argument("--networks", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--of", choices=["network", "edges"], help="measure one in this process")
    options = parser.parse_args()
    if options.part == "compiled":
        return run_compiled(options.seeds, options.steps or 300)
    if options.part == "induction":
        return run_induction(options.networks, options.seeds, options.edges, options.steps or 900)
    if options.of is not None:
        print(peak(options.of))
        return 0
    return run_memory()


if __name__ == "__main__":
    sys.exit(main())
