"""Training of a gated classifier of digits or MNIST: its options, what is refused, and the run itself."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common import command, networks
from common.averages import AVERAGE_POWER, Average, SelectedInputs
from common.data import Images
from common.gated_run import GatedRun
from common.networks import FAMILIES, KEEP_RATES, Classifier, FamilyName, NetworkName
from pyro_l0 import HardConcrete
from pyro_l0.compaction import Compacted, Replica, Shrinker, compact
from pyro_l0.diagnostics import Diagnosis, diagnose
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget
from pyro_l0.nn import NetworkCost, gate_names, name_gates, square_norms
from pyro_l0.training import average_gradients
from pyro_l0.training.processes import processes, rank

__all__ = ["Options", "Run", "check", "describe"]

KL_WARM_UP_EPOCHS = 50  # of spike_slab
SLAB_SCALE = 3.0  # prior standard deviation of spike_slab's weights, times the square root of a layer's inputs
THRESHOLD = 0.01  # P(z != 0) up to which a unit leaves
THRESHOLD_WITH_TARGET = 0.03  # a target holds closed gates at 0.012 (hard concrete) to 0.027 (Bernoulli) or below


@dataclass(frozen=True)
class Options:
    """Command line of ``mnist.py``, and what :class:`Run` takes.

    Attributes:
        data: embedded digits, or MNIST.
        data_dir: folder with MNIST's four files; downloaded with a hash check if not given.
        network: mlp (hidden layers of 300 and 100 units), or lenet5 (20-50-800-500, MNIST alone).
        objective: Eq. 22 (l0), Eq. 21 (free_energy) or Eq. 20 (spike_slab) of the L0 paper.
        family: family of the posterior gates.
        beta: the hard concrete's temperature or the mixtures' sharpness; the family's default if not given.
        lam: price of one open weight in nats; one for all gate sites or one per site. Without a target 0.1 on MNIST
            and 0.05 on the digits if not given; spike_slab takes none.
        prior_active_prob: P(z != 0) under the gates' prior, for free_energy and spike_slab.
        epochs: passes over the training images.
        seed: seed of everything random.
        device: where to train.
        out: folder for what this run writes.
        resume: continue from the checkpoint.
        batch_size: examples per step.
        learning_rate: Adam's step for the weights.
        gate_learning_rate: Adam's step for the gates. If not given it follows from the number of steps with a target,
            and is 0.001 on MNIST (the paper's) and 0.01 on the digits, whose epochs are short, without.
        weight_decay: coefficient w of the gated weights' expected squared norm, as w / 2 on the mean loss (Eq. 15, 17);
            with a target, of the squares of all weights and biases as they are.
        target: largest fraction of the full network that the deterministic one may have at the end. 0.1 on the digits
            for l0 and hard_concrete if neither it nor lam is given, and none otherwise; lam is then 0 if not given.
        target_of: what the target counts: multiply-adds, weights, or parameters, which are weights and biases.
        shrink: take units whose gates are closed for good out of the network after each epoch.
        retrain: passes over the training images in which the compacted network is trained further; a third of epochs
            with a target, and none without, if not given.
        retrain_noise: standard deviation of normal noise on the pixels in these passes.
        hold_out: set so many training images aside and report on them instead of the test images.
    """

    data: Literal["digits", "mnist"] = "digits"
    data_dir: Path | None = None
    network: NetworkName = "mlp"
    objective: Literal["l0", "free_energy", "spike_slab"] = "l0"
    family: FamilyName = "hard_concrete"
    beta: float | None = None
    lam: tuple[float, ...] = ()
    prior_active_prob: float = 0.1
    epochs: int = 200
    seed: int = 1
    device: str = "cpu"
    out: Path = field(default=Path("runs/mnist"))
    resume: bool = False
    batch_size: int = 100
    learning_rate: float = 1e-3
    gate_learning_rate: float | None = None
    hold_out: int = 0
    weight_decay: float = 0.0
    target: float | None = None
    target_of: Literal["macs", "weights", "parameters"] = "macs"
    shrink: bool = False
    retrain: int | None = None
    retrain_noise: float = 0.0

    @property
    def budget(self) -> float | None:
        """``target``, or its default."""
        is_plain = (self.data, self.objective, self.family, self.lam) == ("digits", "l0", "hard_concrete", ())
        return 0.1 if self.target is None and is_plain else self.target

    @property
    def prices(self) -> tuple[float, ...]:
        """``lam``, or its default."""
        free = self.objective == "spike_slab" or self.budget is not None
        return self.lam or ((0.0,) if free else (0.05,) if self.data == "digits" else (0.1,))

    @property
    def retraining(self) -> int:
        """``retrain``, or its default."""
        default = 0 if self.budget is None else max(1, round(self.epochs / 3))
        return default if self.retrain is None else self.retrain


class Run(GatedRun):
    """One training run: model, guide, objective, optimiser and averaged weights."""

    moments = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, images: Images, options: Options) -> None:
        super().__init__(images, options)
        self.batches = -(-len(self.train_x) // options.batch_size)  # per epoch
        pixels = images.train_x.shape[1]
        example = torch.zeros(1, pixels, device=self.device)
        prior = HardConcrete.from_active_prob(options.prior_active_prob)
        slab = SLAB_SCALE if options.objective == "spike_slab" else None
        self.net = networks.build(options.network, pixels, prior, slab).to(self.device)
        self.model = Classifier(self.net, len(self.train_x))
        sites = list(name_gates(self.model))
        plain = networks.build(options.network, pixels)
        name_gates(plain, prefix="net.")
        self.cost = cost = NetworkCost(plain, torch.zeros(1, pixels))
        # The L0 paper's groups: a feature map's filter, and the weights that read a dense layer's input.
        self.group_sizes = {
            site: (cost.filter_sizes if gate.dim == 1 else cost.group_sizes)[site]
            for site, gate in gate_names(plain).items()
        }
        self.guide = self._guide(sites)
        self.elbo = self._elbo(sites, example)
        self.loss = self.elbo(self.model, self.guide)
        self.loss(self.train_x[:2], self.train_y[:2])  # makes the guide's parameters
        self.target = self._target()
        self.optimiser = self._optimiser()
        if processes() > 1:
            torch.manual_seed(options.seed + rank())  # the start was the same, the gates' samples are not
        self.units = [gate.numel() for gate in self.guide.test_gates().values()]
        self.weights = nn.ModuleList([self.net, self.guide])
        self.averaged = copy.deepcopy(self.weights)
        self.selected = SelectedInputs(self.train_x)
        if options.shrink:
            pair: Any = self.averaged
            self.shrinker = Shrinker(
                self.net,
                self.guide,
                example,
                self.optimiser,
                self.elbo,
                [Replica(pair[0], pair[1])],
                threshold=THRESHOLD if self.target is None else THRESHOLD_WITH_TARGET,
            )

    def _guide(self, sites: list[str]) -> AutoGate:
        """The posterior, from the papers' start."""
        options = self.options
        rates = networks.init_active_prob(KEEP_RATES[options.network], options.family, options.beta)
        gates: dict[str, Any] = {
            "family": FAMILIES[options.family],
            "family_options": networks.family_options(options.family, options.beta),
            "init_active_prob": dict(zip(sites, rates, strict=True)),
        }
        if options.objective != "spike_slab":
            return AutoGate(self.model, **gates)
        slabs = networks.slab_sites(self.net)
        starts = {layer: self.net[int(layer.split(".")[1])].weight.detach() for layer in slabs}
        return AutoSpikeSlab(self.model, slabs, init_scale=0.02, init_loc=starts, **gates)

    def _elbo(self, sites: list[str], example: Tensor) -> L0_ELBO:
        """The objective."""
        options = self.options
        estimator: Any = "arm" if options.family == "bernoulli" else None
        if options.objective == "spike_slab":
            # Charged in full from the start, 50,000 weights would all fall back on their prior before they fit.
            warm_up, slabs = KL_WARM_UP_EPOCHS * self.batches, networks.slab_sites(self.net)
            scale = lambda step: min(1.0, (step + 1) / warm_up)  # noqa: E731
            return L0_ELBO("spike_slab", slab=slabs, kl_scale=scale, estimator=estimator)
        prices = options.prices * len(sites) if len(options.prices) == 1 else options.prices
        expected = 0.0 if options.budget is not None else options.weight_decay
        return L0_ELBO(
            options.objective,
            lam=dict(zip(sites, prices, strict=True)),
            group_size=self.group_sizes,
            estimator=estimator,
            weight_decay=expected * len(self.train_x),
            square_norm=square_norms(self.net, example) if expected else None,
        )

    def _target(self) -> SparsityTarget | None:
        """A budget, which falls and then holds over all steps of the run; its gates start open."""
        options = self.options
        if options.budget is None:
            return None
        count, steps = getattr(self.cost, options.target_of), options.epochs * self.batches
        return SparsityTarget(self.guide, options.budget, lambda gates: count(self.full(gates)), steps=steps)

    def _optimiser(self) -> torch.optim.Adam:
        """Adam for the weights and, with steps of their own, for the gates."""
        options = self.options
        gates = dict(self.target.optimiser_options) if self.target is not None else {}
        if options.gate_learning_rate is not None:
            gates["lr"] = options.gate_learning_rate
        elif self.target is None:
            gates["lr"] = 1e-2 if options.data == "digits" else 1e-3
        # Expected weight decay closes gates by itself, and against it a target would open them again.
        decay = options.weight_decay * len(self.train_x) if self.target is not None else 0.0
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": trained, "lr": options.learning_rate, "weight_decay": decay},
            {"params": list(self.guide.parameters()), **gates},
        ]
        return torch.optim.Adam(groups, fused=True)

    def train_epoch(self) -> float:
        """One pass over the training images in a new order; the mean loss per example, in nats."""
        total = torch.zeros((), device=self.device)
        average = Average(self.averaged, self.weights, self.steps)
        batches = self.shuffled()
        with self.selected.of(self.net) as train_x:
            for index in batches:
                self.optimiser.zero_grad()
                loss = self.loss(train_x[index], self.train_y[index])
                loss.backward()
                average_gradients(self.loss.parameters())
                if self.target is not None:
                    self.target.add_gradient()
                self.optimiser.step()
                if self.target is not None:
                    self.target.ascend()
                average.update()
                total += loss.detach()
        self.steps = average.steps
        return self.mean(total, len(batches)) / len(self.train_x)

    @property
    def gates(self) -> AutoGate:
        """The averaged guide or, with a target, which averages miss, the trained one."""
        averaged: Any = self.averaged
        return self.guide if self.target is not None else averaged[1]

    def plain(self) -> nn.Module:
        """The averaged network, without sites of weights."""
        net, guide = self.averaged
        return networks.with_mean_weights(net, guide) if isinstance(guide, AutoSpikeSlab) else net

    @torch.no_grad()
    def compacted(self) -> Compacted:
        """The averaged network under its test gates as a smaller plain network."""
        return compact(self.plain(), self.gates.test_gates(), self.test_x[:100], before=self.plans)

    @torch.no_grad()
    def gate_shares(self) -> dict[str, list[float]]:
        """By site the share of draws in each twentieth of [0, 1], over all its gates."""
        shares = {}
        edges = torch.linspace(0.05, 1.0, 20, device=self.device)[:, None]
        for (site, gate), units in zip(self.gates.posterior().items(), self.units, strict=True):
            left = gate.cdf(edges).sum(-1).cpu() / units  # units that left the network have gates of 0
            below = left + (1 - left[-1])
            shares[site] = below.diff(prepend=torch.zeros(1)).tolist()
        return shares

    def measure(self) -> dict[str, Any]:
        """Test error, what is left, and, after the four epochs that a picture shows, the gates' histograms."""
        epoch, epochs = len(self.history) + 1, self.options.epochs
        shown = epoch in (1, epochs // 4 + 1, epochs // 2 + 1, epochs)
        return {**super().measure(), **({"gate_shares": self.gate_shares()} if shown else {})}

    def dropout_macs(self) -> float:
        """Expected multiply-adds of the network with dropout instead of its gates (Figure 3 of the L0 paper)."""
        rates = zip(self.group_sizes, self.units, KEEP_RATES[self.options.network], strict=True)
        return float(self.cost.macs({site: torch.full((size,), rate) for site, size, rate in rates}))

    def diagnose(self) -> Diagnosis:
        """What is wrong with this training, if anything is; asked at its end."""
        few = torch.arange(min(len(self.train_x), 8 * self.options.batch_size), device=self.device)
        return diagnose(
            self.guide,
            self.optimiser,
            loss=self.loss,
            batches=[(self.train_x[index], self.train_y[index]) for index in few.split(self.options.batch_size)],
            network=self.net if self.options.objective != "spike_slab" else None,
            error=lambda network, x, y: (network(x).argmax(-1) != y).float().mean(),
            target=self.target,
            steps_left=0,
        )

    def parts(self) -> dict[str, Any]:
        """What has a ``state_dict``, by its name in a checkpoint."""
        return {
            "shrinker": self.shrinker,
            "target": self.target,
            "model": self.model,
            "guide": self.guide,
            "averaged": self.averaged,
            "optimiser": self.optimiser,
            "objective": self.elbo,
        }

    def waiting(self) -> list[nn.Parameter]:
        """Gates that a target has not moved yet."""
        return self.guide.locations() if self.target is not None and self.target.step <= self.target.start else []

    def fingerprint(self, images: Images) -> dict[str, Any]:
        """What a checkpoint and the run that resumes it must agree in."""
        options = self.options
        same = "data", "network", "objective", "seed", "hold_out", "weight_decay", "shrink", "prior_active_prob"
        return {
            **{name: value for name, value in asdict(options).items() if name in (*same, "batch_size")},
            "units": self.units,
            "family": [options.family, networks.family_options(options.family, options.beta), None],
            "target": self.target and [options.budget, options.target_of, f"{self.target.steps} steps"],
            "averages": AVERAGE_POWER,
            "lam": list(options.prices),
            "learning_rates": [group["lr"] for group in self.optimiser.param_groups],
            "device": self.device.type,
            "images": images.checksum(),
        }


def check(options: Options) -> None:
    """Refuse options that no run should start with: outside their range, or that don't go with another."""
    command.check(options)
    networks.family_options(options.family, options.beta)
    sites = len(KEEP_RATES[options.network])
    if len(options.lam) not in (0, 1, sites):
        found = f"{len(options.lam)}: {options.lam}"
        raise ValueError(f"Expected lam with 1 or {sites} entries, one per gate site, but got {found}.")
    slab = options.objective == "spike_slab"
    if slab and (any(options.lam) or options.weight_decay):
        given = f"{options.lam} and {options.weight_decay}"
        raise ValueError(f"Expected no lam and no weight_decay for objective='spike_slab', but got {given}.")
    if slab and (options.shrink or options.network == "lenet5"):
        raise ValueError("Expected network='mlp' and no shrink for objective='spike_slab'.")
    if options.data == "digits" and options.network == "lenet5":
        raise ValueError("Expected data='mnist' for network='lenet5', which takes images of 784 pixels.")
    if options.budget is None and options.target_of != Options.target_of:
        raise ValueError(f"Expected target_of with target only, but got {options.target_of!r} without.")
    if options.retrain_noise and not options.retraining:
        raise ValueError(f"Expected retrain_noise of 0 without retrain, but got {options.retrain_noise}.")


def describe(options: Options) -> dict[str, Any]:
    """The options that decide what a run finds, as plain JSON values."""
    elsewhere = ("data_dir", "device", "out", "resume")
    return json.loads(json.dumps({key: value for key, value in asdict(options).items() if key not in elsewhere}))
