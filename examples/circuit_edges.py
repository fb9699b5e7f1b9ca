"""Which edges between heads and blocks does a transformer need? A gate for each edge, beside attribution patching.

A transformer learns to continue repeated random text, whose circuit is known: a head of its first layer attends to the
previous token, and by what it wrote an induction head of the second finds what followed this token before (Olsson et
al., 2022, arXiv:2209.11895). Both are found by what they attend to. Known edges: tokens → v, positions → q and k of the
first; the first → k of the second, tokens → its q and v; and its way to the output, directly or by the last block,
whose edge costs more where it alone is closed. A closed edge passes its writer's contribution at a random text.

The transformer is frozen. ``gate_edges`` finds its 137 edges, and gates keep numbers of them, all in one run, at the
least KL from it to the circuit (as in Edge Pruning, Bhaskar et al., 2024, arXiv:2406.16778). Rivals keep the largest
gradients: "patching" of the answer's logit (Syed et al., 2023, arXiv:2310.10348), "integrated" of the KL, summed on the
way from all edges closed. Three minutes on one core.
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import repeated_texts
from common.plots import plot_curves, save_figure
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import NetworkGates
from pyro_l0.nn.frozen import NetworkEdges, gate_edges
from pyro_l0.plots import plot_circuit

__all__ = ["Options", "main"]

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 24, 64, 4, 2
BATCH, GATED_BATCH, TEST, POINTS = 64, 32, 512, 8  # texts, and points on the way from all edges closed
LEARNING_RATE, DECAY = 3e-3, (3.0, 0.3)  # weight decay in the first two thirds, and then
METHODS = ("gates", "patching", "integrated")


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        edges: how many edges are kept, falling, in one run of the gates; the circuit of the first is drawn.
        steps: of the transformer's training, and of the gates.
        seeds: each a transformer.
        out: folder for the pictures.
    """

    edges: tuple[int, ...] = (16, 8)
    steps: int = 900
    seeds: tuple[int, ...] = (1,)
    out: Path = Path("runs/circuit")


class Layer(nn.Module):
    """Attention of some heads, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The stream behind the layer; shape ``(batch, LENGTH, WIDTH)``."""
        normed = self.norm(x)
        q, k, v = (layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        is_later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(is_later, -torch.inf).softmax(-1)
        self.attention = weights.detach()
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        return x + self.block(self.norm2(x))


class Transformer(nn.Module):
    """Predicts the next token of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits at each position."""
        x = self.tokens(text) + self.positions(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))


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
    return transformer.eval().requires_grad_(False)


def _kl(edges: NetworkEdges, z: Tensor, number: int) -> Tensor:
    """KL from the transformer to the circuit on new texts, in nats a token."""
    text, _, repeats = repeated_texts(number, VOCABULARY, LENGTH)
    edges.corrupt(torch.randint(VOCABULARY, text.shape))
    whole, circuit = (logits[repeats].log_softmax(-1) for logits in (edges.network(text), edges.at(z, text)))
    return F.kl_div(circuit, whole, reduction="batchmean", log_target=True)


def _known_edges(edges: NetworkEdges) -> list[tuple[str, str]]:
    """The circuit, by the heads that attend most to the previous token and to what followed the same token before."""
    text, _, repeats = repeated_texts(TEST, VOCABULARY, LENGTH)
    edges.network(text)
    first, second = (layer.attention for layer in edges.network.layers)
    previous = first.transpose(0, 1).diagonal(-1, 2, 3)[:, ~repeats[:, 1:]].mean(1)
    followed = F.pad(text[:, :, None] == text[:, None, :-1], (1, 0)).tril()  # behind a token like the present one
    induction = (second * followed[:, None]).sum(-1).transpose(0, 1)[:, repeats].mean(1)
    p, i = f"a0.h{int(previous.argmax())}", f"a1.h{int(induction.argmax())}"
    out = {}
    for reader in ("output", "m1"):
        out[reader] = float(_kl(edges, torch.tensor([float(edge != (i, reader)) for edge in edges.edges]), TEST))
    print(f"heads {p} ({previous.max():.2f} of attention) and {i} ({induction.max():.2f}); KL without it {out}")
    way = [(i, "output")] if out["output"] > out["m1"] else [(i, "m1"), ("m1", "output")]
    keys = [("tokens", f"{p}<v>"), ("positions", f"{p}<q>"), ("positions", f"{p}<k>"), (p, f"{i}<k>")]
    return [*way, *keys, ("tokens", f"{i}<q>"), ("tokens", f"{i}<v>")]


def _gated(edges: NetworkEdges, numbers: tuple[int, ...], steps: int) -> dict[int, Tensor]:
    gates, found = NetworkGates(edges), list[Tensor]()
    target = SparsityTarget(
        gates,
        [n / len(edges.edges) for n in numbers],
        lambda z: z["edges"].sum(),
        steps=steps,
        pretrained=True,
        on_budget=lambda _, z: found.append((z["edges"] != 0).float()),
    )
    optimiser = torch.optim.Adam(gates.locations(), **target.optimiser_options)
    for step in range(-steps // 10, steps):  # at first by the KL alone, which lifts the gates that it needs
        optimiser.zero_grad()
        # Each text draws gates of its own: only many draws show which edges need one another.
        _kl(edges, edges.gate.distribution.rsample(torch.Size([GATED_BATCH])), GATED_BATCH).backward()
        if step >= 0:
            target.add_gradient()
        optimiser.step()
        if step >= 0:
            target.ascend()
    return dict(zip(numbers, found, strict=True))


def _rivals(edges: NetworkEdges) -> dict[str, Tensor]:
    """The rivals' gradients by the gates of edges."""
    (text, answer, repeats), whole = repeated_texts(TEST, VOCABULARY, LENGTH), torch.ones(len(edges.edges))
    edges.corrupt(torch.randint(VOCABULARY, text.shape))
    logits = edges.at(whole.requires_grad_(), text)[repeats]
    answer_logit = logits.gather(1, answer[repeats].unsqueeze(1)).mean() - logits.mean()
    scores = {"patching": torch.autograd.grad(answer_logit, whole)[0], "integrated": torch.zeros(len(whole))}
    for k in range(1, POINTS + 1):
        z = (whole.detach() * k / POINTS).requires_grad_()
        scores["integrated"] += torch.autograd.grad(_kl(edges, z, TEST), z)[0]
    return scores


def main(options: Options) -> dict[str, dict[int, list[tuple[float, str]]]]:
    """Print a table and draw pictures; returns KL in nats a token and known edges by method, edges and seed."""
    command.check(options)
    results = {method: {n: list[tuple[float, str]]() for n in options.edges} for method in METHODS}
    with command.folder(options.out):
        for seed in options.seeds:
            torch.manual_seed(seed)
            edges = gate_edges(_train(options.steps), repeated_texts(2, VOCABULARY, LENGTH)[0])
            known, scores = _known_edges(edges), _rivals(edges)
            gated = _gated(edges, options.edges, options.steps)
            for n in options.edges:
                circuits = {"gates": gated[n]}
                for method, score in scores.items():
                    circuits[method] = torch.zeros(len(score)).index_fill(0, score.abs().topk(n).indices, 1)
                for method, z in circuits.items():
                    kept = sum(edge in known for edge, is_open in zip(edges.edges, z, strict=True) if is_open)
                    with torch.no_grad():
                        results[method][n].append((float(_kl(edges, z, TEST)), f"{kept}/{len(known)}"))
        print("edges   by           KL in nats        known edges")
        for method, by_edges in results.items():
            for n, found in by_edges.items():
                kl, shares = zip(*found, strict=True)
                spread = f" ± {statistics.stdev(kl):.3f}" if len(kl) > 1 else ""
                print(f"{n:>5}   {method:<10}   {statistics.mean(kl):.3f}{spread:<10}   {', '.join(shares)}")
        frame = edges.to_frame().assign(gate=gated[options.edges[0]].numpy())
        save_figure(plot_circuit(frame, known=known), options.out / "circuit_edges.png")
        means = {
            method: [[*found], [statistics.mean(kl for kl, _ in x) for x in found.values()]]
            for method, found in results.items()
        }
        labels = {"xlabel": "edges kept", "ylabel": "KL to the transformer, nats a token"}
        save_figure(plot_curves(means, yscale="log", **labels), options.out / "faithfulness.png")
        return results


if __name__ == "__main__":
    command.run(main, Options, __doc__)
