"""Which edges between heads and MLPs does a transformer need? A gate for each edge, beside attribution patching.

A transformer learns to continue repeated random text, whose circuit is known: a head of its first layer attends to the
previous token, and by what it wrote an induction head of the second finds what followed this token before (Olsson et
al., 2022, arXiv:2209.11895). Both are found by what they attend to. Known edges: tokens → v, positions → q and k of the
first; the first → k of the second, tokens → its q and v; and its way to the logits, directly or by the last MLP, whose
edge costs more where it alone is closed. A closed edge passes the mean of its node's output over texts and positions.

The transformer is frozen. Gates on all 137 edges keep a number of them at the least KL from it to the circuit (as in
Edge Pruning, Bhaskar et al., 2024, arXiv:2406.16778). The rivals keep the largest gradients: "patching" of the answer's
logit (Syed et al., 2023, arXiv:2310.10348), "integrated" of the KL, summed on the way from all edges closed (after
Hanna et al., 2024, arXiv:2403.17806). ``python examples/circuit_edges.py`` takes a minute
on one core; seed 1: 8/8 known edges, KL 0.084 with 16 edges. ``--steps 900 --edges 16 8 --seeds 1 2 3`` takes about
five.
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import repeated_texts
from common.figures import figure_axes, plot_curves, save_figure
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import NetworkGates
from pyro_l0.nn.frozen import NetworkEdges, gate_edges
from pyro_l0.plots import plot_circuit

__all__ = ["Options", "main"]

VOCABULARY, LENGTH, WIDTH, HEADS, SIZE = 32, 24, 64, 4, 16
BATCH, GATED_BATCH, TEST, POINTS = 64, 24, 128, 8  # texts, and points on the way from all edges closed
LEARNING_RATE, DECAY = 3e-3, (3.0, 0.3)  # weight decay in the first two thirds, and then
METHODS = ("gates", "patching", "integrated")


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        edges: how many edges are kept, all in one run of the gates; the circuit of the first is drawn.
        steps: of the transformer's training; the gates take half of them.
        seeds: each a transformer.
        out: folder for the picture.
    """

    edges: tuple[int, ...] = (16,)
    steps: int = 450
    seeds: tuple[int, ...] = (1,)
    out: Path = Path("runs/circuit")


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.softmax = nn.LayerNorm(WIDTH), nn.Softmax(-1)
        self.read, self.write = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(self.read.weight, std=WIDTH**-0.5)
        nn.init.normal_(self.write.weight, std=WIDTH**-0.5 / 2)
        dense = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), *dense)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.read(self.norm(x)).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        is_later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        attention = self.softmax((query @ key.mT * SIZE**-0.5).masked_fill(is_later, -torch.inf))
        x = x + self.write((attention @ value).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """A causal transformer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.5 * torch.randn(LENGTH, WIDTH))
        nn.init.normal_(self.tokens.weight, std=0.5)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.logits(self.norm(self.blocks(self.tokens(text) + self.positions)))


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
        command.advance()
    return transformer.requires_grad_(False)


def _kl(edges: NetworkEdges, z: Tensor, texts: tuple[Tensor, ...]) -> Tensor:
    text, _, repeats = texts
    whole, circuit = (x[repeats].log_softmax(-1) for x in (edges.network(text), edges.at(z, text)))
    return F.kl_div(circuit, whole, reduction="batchmean", log_target=True)


def _known_edges(edges: NetworkEdges, texts: tuple[Tensor, ...]) -> list[int]:
    """The circuit, by the heads that attend most to the previous token and to what followed the same token before."""
    text, _, repeats = texts
    attention = list[Tensor]()
    softmaxes = [x for x in edges.network.modules() if isinstance(x, nn.Softmax)]
    hooks = [x.register_forward_hook(lambda m, x, y: attention.append(y.transpose(0, 1))) for x in softmaxes]
    edges.network(text)
    for hook in hooks:
        hook.remove()
    previous = attention[0].diagonal(-1, 2, 3)[:, ~repeats[:, 1:]].mean(1)
    followed = F.pad(text[:, :, None] == text[:, None, :-1], (1, 0)).tril()  # behind a token like the present one
    induction = (attention[1] * followed).sum(-1)[:, repeats].mean(1)
    p, i = f"a0.h{int(previous.argmax())}", f"a1.h{int(induction.argmax())}"
    without = [torch.tensor([float(edge != (i, to)) for edge in edges.edges]) for to in ("output", "m1")]
    direct, by_mlp = (float(_kl(edges, z, texts)) for z in without)
    share = f"{p} ({float(previous.max()):.2f} of attention) and {i} ({float(induction.max()):.2f})"
    print(f"heads {share}; KL without {i} → output {direct:.3f}, without {i} → m1 {by_mlp:.3f}")
    out = [(i, "output")] if direct > by_mlp else [(i, "m1"), ("m1", "output")]
    out += [("tokens", f"{p}<v>"), ("positions", f"{p}<q>"), ("positions", f"{p}<k>"), (p, f"{i}<k>")]
    return [edges.edges.index(edge) for edge in (*out, ("tokens", f"{i}<q>"), ("tokens", f"{i}<v>"))]


def _gated(edges: NetworkEdges, numbers: Sequence[int], steps: int) -> dict[int, Tensor]:
    """The circuits of one run, by their number of edges."""
    gates, found = NetworkGates(edges), list[Tensor]()
    target = SparsityTarget(
        gates,
        [n / len(edges.edges) for n in sorted(numbers, reverse=True)],
        lambda z: z["edges"].sum(),
        steps=steps,
        pretrained=True,
        on_budget=lambda share, z: found.append((z["edges"] != 0).float()),
    )
    optimiser = torch.optim.Adam(gates.locations(), **target.optimiser_options)
    for step in range(-steps // 10, steps):  # at first by the KL alone, which lifts the gates that it needs
        optimiser.zero_grad()
        # Each text draws gates of its own: only many draws show which edges need one another.
        z = edges.gate.distribution.rsample(torch.Size([GATED_BATCH]))
        _kl(edges, z, repeated_texts(GATED_BATCH, VOCABULARY, LENGTH)).backward()
        if step >= 0:
            target.add_gradient()
        optimiser.step()
        command.advance()
        if step >= 0:
            target.ascend()
    return dict(zip(sorted(numbers, reverse=True), found, strict=True))


def _rivals(edges: NetworkEdges, texts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The rivals' gradients by the gates of edges."""
    (text, answer, repeats), whole = texts, torch.ones(len(edges.edges), requires_grad=True)
    logits = edges.at(whole, text)[repeats]
    answer_logit = logits.gather(1, answer[repeats].unsqueeze(1)).mean() - logits.mean()
    scores = {"patching": torch.autograd.grad(answer_logit, whole)[0], "integrated": torch.zeros(len(whole))}
    for k in range(1, POINTS + 1):
        z = (whole.detach() * k / POINTS).requires_grad_()
        scores["integrated"] += torch.autograd.grad(_kl(edges, z, texts), z)[0]
    return scores


def main(options: Options) -> dict[str, dict[int, list[tuple[float, str]]]]:
    """Print a table and draw the picture; returns KL in nats a token and known edges by method, edges and seed."""
    command.check(options)
    results = {method: {n: list[tuple[float, str]]() for n in options.edges} for method in METHODS}
    gated = options.steps // 2
    with command.folder(options.out):
        command.plan(len(options.seeds) * (options.steps + gated + -(-gated // 10)))
        for seed in options.seeds:
            torch.manual_seed(seed)
            transformer = _train(options.steps)
            texts, new = repeated_texts(TEST, VOCABULARY, LENGTH), repeated_texts(TEST, VOCABULARY, LENGTH)
            edges = gate_edges(transformer, texts[0])
            edges.corrupt_to_mean(texts[0])
            known, scores = _known_edges(edges, texts), _rivals(edges, texts)
            circuits = {"gates": _gated(edges, options.edges, gated)}
            for method, score in scores.items():
                top = {n: score.abs().topk(n).indices for n in options.edges}
                circuits[method] = {n: torch.zeros(len(score)).index_fill(0, chosen, 1) for n, chosen in top.items()}
            for method, by_number in circuits.items():
                for n, circuit in by_number.items():
                    kept = f"{int(circuit[known].sum())}/{len(known)}"
                    with torch.no_grad():
                        results[method][n].append((float(_kl(edges, circuit, new)), kept))
        print("edges   by           KL in nats        known edges")
        for method, by_edges in results.items():
            for n, found in by_edges.items():
                kl, shares = zip(*found, strict=True)
                spread = f" ± {statistics.stdev(kl):.3f}" if len(kl) > 1 else ""
                print(f"{n:>5}   {method:<10}   {statistics.mean(kl):.3f}{spread:<10}   {', '.join(shares)}")
        graph, plot = figure_axes(1, 2, figsize=(13, 5), width_ratios=(3, 2))
        drawn = edges.to_frame().assign(gate=circuits["gates"][options.edges[0]].tolist())
        plot_circuit(drawn, known=[edges.edges[k] for k in known], axes=graph)
        numbers = sorted(options.edges)
        kls = {method: [[kl for kl, _ in found[n]] for n in numbers] for method, found in results.items()}
        curves = {method: [numbers, [statistics.mean(x) for x in each]] for method, each in kls.items()}
        spreads = {method: [statistics.stdev(x) if len(x) > 1 else 0.0 for x in each] for method, each in kls.items()}
        labels = {"xlabel": "edges kept", "ylabel": "KL to the transformer, nats a token"}
        plot_curves(curves, spreads=spreads, xscale="log", yscale="log", axes=plot, **labels)
        save_figure((graph, plot), options.out / "circuit_edges.png")
        return results


if __name__ == "__main__":
    command.run(main, Options, __doc__)
