"""Training a gated classifier, one epoch at a time, and what is measured along the way."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed, nn

import checkpoint
from averages import Average
from data import Images
from gated_run import GatedRun, check_finite
from networks import (
    FAMILIES,
    KEEP_RATES,
    Classifier,
    build,
    estimator_options,
    group_sizes,
    init_active_prob,
    slab_sites,
    with_mean_weights,
)
from options import Options
from processes import parallel, shuffled
from pyro_l0 import HardConcrete
from pyro_l0.compaction import Shrinker, compact
from pyro_l0.compaction.inputs import SelectedInputs
from pyro_l0.compaction.shrinker import Replica
from pyro_l0.compaction.storage import Compacted
from pyro_l0.diagnostics import diagnose
from pyro_l0.diagnostics.findings import Diagnosis
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget
from pyro_l0.nn import NetworkCost, fix_gates, square_norms
from pyro_l0.nn.gate import name_gates

__all__ = ["Run"]

KL_WARM_UP_EPOCHS = 50  # of spike_slab
SLAB_SCALE = 3.0  # prior standard deviation of spike_slab's weights, times the square root of a layer's inputs
RETRAIN_LEARNING_RATE = 1e-3  # at the start, then falling to 0
THRESHOLD = 0.01  # P(z != 0) up to which a unit leaves
THRESHOLD_WITH_TARGET = 0.03  # a target holds closed gates at 0.012 (hard concrete) to 0.027 (Bernoulli) or below


class Run(GatedRun):
    """One training run: model, guide, objective, optimiser and averaged weights.

    In a process group every process takes its share of each batch and a gate sample of its own; gradients are averaged
    and all processes hold the same state after every step.

    Args:
        images: the data, moved to the device.
        options: of them, all that is trained by; :func:`options.check` says which go together.
    """

    def __init__(self, images: Images, options: Options) -> None:
        super().__init__(images, options.batch_size, options.seed, options.device)
        self.options = options
        self.batches = math.ceil(len(self.train_x) / options.batch_size)  # per epoch
        self.example = torch.zeros(1, images.train_x.shape[1], device=self.device)
        pixels = images.train_x.shape[1]
        prior = HardConcrete.from_active_prob(options.prior_active_prob)
        slab = options.objective == "spike_slab"
        self.net = build(options.network, pixels, prior, SLAB_SCALE if slab else None).to(self.device)
        self.model = Classifier(self.net, len(self.train_x))
        sites = list(name_gates(self.model))
        plain = build(options.network, pixels)
        name_gates(plain, prefix="net.")
        self.cost = NetworkCost(plain, torch.zeros(1, pixels))
        self.group_sizes = group_sizes(plain, self.cost)
        self.guide = self._guide(sites)
        self.elbo = self._elbo(sites)
        self.loss = self.elbo(self.model, self.guide)
        self.loss(self.train_x[:2], self.train_y[:2])  # makes the guide's parameters
        self.target = self._target() if options.budget is not None else None
        self.optimiser = self._optimiser()
        self.parallel = parallel(self.loss)
        if self.processes > 1:
            torch.manual_seed(options.seed + self.process)  # the start was the same, the gates' samples are not
        self.units = [gate.numel() for gate in self.guide.test_gates().values()]
        self.trained = nn.ModuleList([self.net, self.guide])
        self.averaged = copy.deepcopy(self.trained)
        self.steps = 0
        self.inputs = SelectedInputs(self.train_x)
        if options.shrink:
            pair: Any = self.averaged
            replica = Replica(pair[0], pair[1])
            self.shrinker = Shrinker(
                self.net,
                self.guide,
                self.example,
                self.optimiser,
                self.elbo,
                [replica],
                threshold=THRESHOLD if self.target is None else THRESHOLD_WITH_TARGET,
                on_shrink=self.after_shrinking,
            )

    def _guide(self, sites: list[str]) -> AutoGate:
        """The posterior, from the papers' start."""
        options = self.options
        rates = init_active_prob(KEEP_RATES[options.network], options.family, options.family_options)
        gates: dict[str, Any] = {
            "family": FAMILIES[options.family],
            "family_options": options.family_options,
            "init_active_prob": dict(zip(sites, rates, strict=True)),
        }
        if options.objective != "spike_slab":
            return AutoGate(self.model, **gates)
        slabs = slab_sites(self.net)
        starts = {layer: self.net[int(layer.split(".")[1])].weight.detach() for layer in slabs}
        return AutoSpikeSlab(self.model, slabs, init_scale=0.02, init_loc=starts, **gates)

    def _elbo(self, sites: list[str]) -> L0_ELBO:
        """The objective."""
        options = self.options
        gradient = estimator_options(options.family, options.estimator)
        if options.objective == "spike_slab":
            # Charged in full from the start, 50,000 weights would all fall back on their prior before they fit.
            warm_up = KL_WARM_UP_EPOCHS * self.batches
            return L0_ELBO(
                options.objective,
                slab=slab_sites(self.net),
                kl_scale=lambda step: min(1.0, (step + 1) / warm_up),
                **gradient,
            )
        prices = options.prices * len(sites) if len(options.prices) == 1 else options.prices
        expected = 0.0 if options.budget is not None else options.weight_decay
        return L0_ELBO(
            options.objective,
            lam=dict(zip(sites, prices, strict=True)),
            group_size=self.group_sizes,
            **gradient,
            weight_decay=expected * len(self.train_x),
            square_norm=square_norms(self.net, self.example) if expected else None,
        )

    def _target(self) -> SparsityTarget:
        """The budget, which falls and then holds over all steps of the run; its gates start open."""
        options = self.options
        assert options.budget is not None
        count = getattr(self.cost, options.target_of)
        steps = options.epochs * self.batches
        return SparsityTarget(self.guide, options.budget, lambda gates: count(self.full(gates)), steps=steps)

    def _optimiser(self) -> torch.optim.Adam:
        """Adam for the weights and, with steps of their own, for the gates."""
        options = self.options
        gates = dict(self.target.optimiser_options) if self.target is not None else {}
        if self.target is None or options.gate_learning_rate is not None:
            gates["lr"] = options.gate_step
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # Expected weight decay closes gates by itself, and against it a target would open them again.
        decay = options.weight_decay * len(self.train_x) if self.target is not None else 0.0
        groups: list[dict[str, Any]] = [
            {"params": trained, "lr": options.learning_rate, "weight_decay": decay},
            {"params": list(self.guide.parameters()), **gates},
        ]
        return torch.optim.Adam(groups, fused=True)

    def train_epoch(self) -> float:
        """One pass over the training images in a new order; the mean loss per example, in nats.

        Raises:
            FloatingPointError: the loss or a parameter is not finite any more.
        """
        total = torch.zeros((), device=self.device)
        batches = shuffled(len(self.train_x), self.device).split(self.options.batch_size)
        average = Average(self.averaged, self.trained, self.steps)
        with self.inputs.of(self.trained[0]) as train_x:
            for index in batches:
                mine = index[self.process :: self.processes]
                self.optimiser.zero_grad()
                loss = self.parallel(train_x[mine], self.train_y[mine])
                loss.backward()
                if self.target is not None:
                    self.target.add_gradient()
                self.optimiser.step()
                if self.target is not None:
                    self.target.ascend()
                average.update()
                total += loss.detach()
        self.steps = average.steps
        if self.processes > 1:
            distributed.all_reduce(total)
        mean = float(total) / self.processes / len(batches) / len(self.train_x)
        check_finite(mean, self.trained, self.averaged)
        self.shrink()
        return mean

    @property
    def gates(self) -> AutoGate:
        """The guide of the gates that count: the averaged ones, or with a target, which averages miss, the trained."""
        return self.guide if self.target is not None else self.averaged[1]

    def _plain(self) -> nn.Module:
        """The averaged network, without sites of weights."""
        net, guide = self.averaged
        return with_mean_weights(net, guide) if isinstance(guide, AutoSpikeSlab) else net

    @torch.no_grad()
    def _error(self, network: nn.Module) -> float:
        """Test error in percent."""
        predicted = torch.cat([network(x).argmax(-1) for x in self.test_x.split(1000)])
        return 100 * float((predicted != self.test_y).float().mean())

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Test error of the averaged weights under the test gates, and what is left of the network."""
        gates, active = self.gates.test_gates(), self.active_prob(self.gates)
        return {
            "test_error_percent": self._error(fix_gates(self._plain(), gates)),
            **self.left(gates, active),
            "expected_l0": sum(float(p.sum()) * self.group_sizes[name] for name, p in active.items()),
            "active_rate": {name: float(p.mean()) for name, p in active.items()},
        }

    @torch.no_grad()
    def compacted(self) -> Compacted:
        """The averaged network under its test gates as a smaller plain network."""
        return compact(self._plain(), self.gates.test_gates(), self.test_x[:100], before=self.plans)

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

    def retrain(self, network: nn.Module, epochs: int, noise: float = 0.0) -> float:
        """Train a compacted network a little further in place, and return its test error in percent.

        Plain training without gates, by Adam with a step that falls to 0, and averaged as before.

        Args:
            network: from :meth:`compacted`.
            epochs: passes over the training images.
            noise: standard deviation of normal noise on the pixels, whose values are in [0, 1].

        Raises:
            FloatingPointError: a parameter is not finite any more.
        """
        network.train()
        optimiser = torch.optim.Adam(network.parameters(), RETRAIN_LEARNING_RATE, fused=True)
        falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, epochs * self.batches)
        averaged = copy.deepcopy(network)
        average = Average(averaged, network)
        with SelectedInputs(self.train_x).of(network) as train_x:
            for _ in range(epochs):
                for index in torch.randperm(len(train_x)).to(self.device).split(self.options.batch_size):
                    x = train_x[index]
                    if noise:
                        x = x + noise * torch.randn_like(x)
                    optimiser.zero_grad()
                    F.cross_entropy(network(x), self.train_y[index]).backward()
                    optimiser.step()
                    falling.step()
                    average.update()
        check_finite(0.0, network, averaged)
        network.load_state_dict(averaged.state_dict())
        network.eval()
        return self._error(network)

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

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, random numbers included."""
        return {**super().state(), "steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned; raises as :class:`GatedRun` does."""
        super().load_state(state)
        self.steps = state["steps"]
        waiting = self.guide.locations() if self.target is not None and self.target.step <= self.target.start else []
        moments = ("step", "exp_avg", "exp_avg_sq") if self.steps else ()
        checkpoint.check_moments(self.optimiser, moments, without=waiting)
