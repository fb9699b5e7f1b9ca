"""Which edges between heads and MLPs does a transformer need? A gate for each edge, beside attribution patching.

A transformer learns to continue repeated random text, whose circuit is known: a head of its first layer attends to the
previous token, and by what it wrote an induction head of the second finds what followed this token before (Olsson et
al., 2022, arXiv:2209.11895). Both are found by what they attend to. Known edges: tokens → v, positions → q and k of the
first; the first → k of the second, tokens → its q and v; and its way to the logits, directly or by the last MLP, whose
edge costs more where it alone is closed. A closed edge passes the mean of its node's output over texts and positions.

The transformer is frozen. Gates on all 137 edges keep a number of them at the least KL from it to the circuit (as in
Edge Pruning, Bhaskar et al., 2024, arXiv:2406.16778). The rivals keep the largest gradients: "patching" of the answer's
logit (Syed et al., 2023, arXiv:2310.10348), "integrated" of the KL, summed on the way from all edges closed (after
Hanna et al., 2024, arXiv:2403.17806). A minute and a half on one core; seed 1: 8/8 known edges, KL 0.074 with 16 edges.
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import repeated_texts
from common.plots import plot_circuit
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import L0Gate, NetworkGates

__all__ = ["EDGES", "Options", "main"]

VOCABULARY, LENGTH, WIDTH, HEADS, SIZE, LAYERS = 32, 24, 64, 4, 16, 2
BATCH, GATED_BATCH, TEST, POINTS = 64, 32, 512, 8  # texts, and points on the way from all edges closed
LEARNING_RATE, DECAY = 3e-3, (3.0, 0.3)  # weight decay in the first two thirds, and then
METHODS = ("gates", "patching", "integrated")
LEVELS, EDGES = [["tokens", "positions"]], list[tuple[str, str]]()  # the edges in the order in which they are read
for k in range(LAYERS):
    heads = [f"{k}.{h}" for h in range(HEADS)]
    EDGES += [(node, f"{head}.{letter}") for letter in "qkv" for head in heads for node in itertools.chain(*LEVELS)]
    EDGES += [(node, f"mlp{k}") for node in itertools.chain(*LEVELS, heads)]
    LEVELS += [heads, [f"mlp{k}"]]
EDGES += [(node, "logits") for node in itertools.chain(*LEVELS)]


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        edges: how many edges are kept, each a run of the gates; the circuit of the first is drawn.
        steps: of the transformer's training; each run of the gates takes two thirds of them.
        seeds: each a transformer.
        out: folder for the picture.
    """

    edges: tuple[int, ...] = (16, 8)
    steps: int = 900
    seeds: tuple[int, ...] = (1,)
    out: Path = Path("runs/circuit")


class Transformer(nn.Module):
    """A causal transformer whose every input reads the outputs before it through edges of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Parameter(0.5 * torch.randn(n, WIDTH)) for n in (VOCABULARY, LENGTH))
        self.reads, self.writes, self.mlps = nn.ParameterList(), nn.ParameterList(), nn.ModuleList()
        for _ in range(LAYERS):
            self.reads.append(WIDTH**-0.5 * torch.randn(3 * HEADS, 1, WIDTH, SIZE))  # q of all heads, k, v
            self.writes.append(WIDTH**-0.5 / 2 * torch.randn(HEADS, 1, SIZE, WIDTH))
            dense = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
            self.mlps.append(nn.Sequential(nn.LayerNorm(WIDTH), *dense))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.means = torch.zeros(sum(map(len, LEVELS)), 1, 1, WIDTH)  # of the outputs, which closed edges pass

    def forward(self, text: Tensor, gates: Tensor | None = None) -> Tensor:
        """Logits at each position; gates of shape ``(edges,)`` or, for each text its own, ``(batch, edges)``."""
        self.outputs = [self.tokens[text], self.positions.expand(len(text), -1, -1)]  # of the nodes
        self.attention, start = list[Tensor](), 0

        def read(inputs: int) -> Tensor:  # shape (inputs, batch, LENGTH, WIDTH)
            nonlocal start
            sources, outputs = len(self.outputs), torch.stack(self.outputs)
            if gates is None:
                return outputs.sum(0).expand(inputs, -1, -1, -1)
            z = gates[..., start : start + inputs * sources].reshape(-1, inputs, sources)
            start += inputs * sources
            return torch.einsum("bis,sbtd->ibtd", z, outputs - self.means[:sources]) + self.means[:sources].sum(0)

        is_later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for norm, weights, write, mlp in zip(self.norms, self.reads, self.writes, self.mlps, strict=True):
            query, key, value = (norm(read(3 * HEADS)) @ weights).chunk(3)
            self.attention.append((query @ key.mT * SIZE**-0.5).masked_fill(is_later, -torch.inf).softmax(-1))
            self.outputs.extend(self.attention[-1] @ value @ write)
            self.outputs.append(mlp(read(1)[0]))
        return self.logits(self.norm(read(1)[0]))


def _train(steps: int) -> Transformer:
    transformer = Transformer()
    optimiser = torch.optim.AdamW(transformer.parameters(), LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        optimiser.param_groups[0]["weight_decay"] = DECAY[step >= 2 * steps // 3]
        text, answer, repeats = repeated_texts(BATCH, VOCABULARY, LENGTH)
        optimiser.zero_grad()
        F.cross_entropy(transformer(text)[repeats], answer[repeats]).backward()
        optimiser.step()
        schedule.step()
    transformer.requires_grad_(False)(repeated_texts(TEST, VOCABULARY, LENGTH)[0])
    transformer.means = torch.stack(transformer.outputs).mean((1, 2), keepdim=True)
    return transformer


def _kl(transformer: Transformer, gates: Tensor, texts: tuple[Tensor, ...]) -> Tensor:
    whole, circuit = (transformer(texts[0], z)[texts[2]].log_softmax(-1) for z in (None, gates))
    return F.kl_div(circuit, whole, reduction="batchmean", log_target=True)


def _known_edges(transformer: Transformer, texts: tuple[Tensor, ...]) -> list[int]:
    """The circuit, by the heads that attend most to the previous token and to what followed the same token before."""
    transformer(text := texts[0])
    previous = transformer.attention[0].diagonal(-1, 2, 3)[:, ~texts[2][:, 1:]].mean(1)
    followed = F.pad(text[:, :, None] == text[:, None, :-1], (1, 0)).tril()  # behind a token like the present one
    induction = (transformer.attention[1] * followed).sum(-1)[:, texts[2]].mean(1)
    p, i = f"0.{int(previous.argmax())}", f"1.{int(induction.argmax())}"
    without = [torch.tensor([float(edge != (i, to)) for edge in EDGES]) for to in ("logits", "mlp1")]
    direct, by_mlp = (float(_kl(transformer, z, texts)) for z in without)
    share = f"{p} ({float(previous.max()):.2f} of attention) and {i} ({float(induction.max()):.2f})"
    print(f"heads {share}; KL without {i} → logits {direct:.3f}, without {i} → mlp1 {by_mlp:.3f}")
    out = [(i, "logits")] if direct > by_mlp else [(i, "mlp1"), ("mlp1", "logits")]
    out += [("tokens", f"{p}.v"), ("positions", f"{p}.q"), ("positions", f"{p}.k"), (p, f"{i}.k")]
    return [EDGES.index(edge) for edge in (*out, ("tokens", f"{i}.q"), ("tokens", f"{i}.v"))]


def _gated(transformer: Transformer, number: int, steps: int) -> Tensor:
    gates = NetworkGates(nn.ModuleDict({"edges": (gate := L0Gate(len(EDGES)))}))
    target = SparsityTarget(gates, number / len(EDGES), lambda z: z["edges"].sum(), steps=steps, pretrained=True)
    optimiser = torch.optim.Adam(gates.locations(), **target.optimiser_options)
    for step in range(-steps // 10, steps):  # at first by the KL alone, which lifts the gates that it needs
        optimiser.zero_grad()
        # Each text draws gates of its own: only many draws show which edges need one another.
        z = gate.distribution.rsample(torch.Size([GATED_BATCH]))
        _kl(transformer, z, repeated_texts(GATED_BATCH, VOCABULARY, LENGTH)).backward()
        if step >= 0:
            target.add_gradient()
        optimiser.step()
        if step >= 0:
            target.ascend()
    return (gate.test_gate != 0).float()


def _rivals(transformer: Transformer, texts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The rivals' gradients by the gates of edges."""
    (text, answer, repeats), whole = texts, torch.ones(len(EDGES), requires_grad=True)
    logits = transformer(text, whole)[repeats]
    answer_logit = logits.gather(1, answer[repeats].unsqueeze(1)).mean() - logits.mean()
    scores = {"patching": torch.autograd.grad(answer_logit, whole)[0], "integrated": torch.zeros(len(EDGES))}
    for k in range(1, POINTS + 1):
        z = (whole.detach() * k / POINTS).requires_grad_()
        scores["integrated"] += torch.autograd.grad(_kl(transformer, z, texts), z)[0]
    return scores


def main(options: Options) -> dict[str, dict[int, list[tuple[float, str]]]]:
    """Print a table and draw the picture; returns KL in nats a token and known edges by method, edges and seed."""
    command.check(options)
    results = {method: {n: list[tuple[float, str]]() for n in options.edges} for method in METHODS}
    with command.folder(options.out):
        for seed in options.seeds:
            torch.manual_seed(seed)
            transformer = _train(options.steps)
            texts, new = repeated_texts(TEST, VOCABULARY, LENGTH), repeated_texts(TEST, VOCABULARY, LENGTH)
            known, scores = _known_edges(transformer, texts), _rivals(transformer, texts)
            for n in reversed(options.edges):
                circuits = {"gates": _gated(transformer, n, 2 * options.steps // 3)}
                for method, score in scores.items():
                    circuits[method] = torch.zeros(len(EDGES)).index_fill(0, score.abs().topk(n).indices, 1)
                for method, circuit in circuits.items():
                    kept = f"{int(circuit[known].sum())}/{len(known)}"
                    results[method][n].append((float(_kl(transformer, circuit, new)), kept))
        print("edges   by           KL in nats        known edges")
        for method, by_edges in results.items():
            for n, found in by_edges.items():
                kl, shares = zip(*found, strict=True)
                spread = f" ± {statistics.stdev(kl):.3f}" if len(kl) > 1 else ""
                print(f"{n:>5}   {method:<10}   {statistics.mean(kl):.3f}{spread:<10}   {', '.join(shares)}")
        drawn = [[EDGES[k] for k in edges] for edges in (circuits["gates"].nonzero().flatten(), known)]
        plot_circuit(*drawn, [*LEVELS, ["logits"]], results, options.out / "circuit_edges.png")
        return results


if __name__ == "__main__":
    command.run(main, Options, __doc__)
