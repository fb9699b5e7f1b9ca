"""Training a gated classifier, one epoch at a time, and what is measured along the way."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from data import Images
from networks import (
    FAMILIES,
    KEEP_RATES,
    Classifier,
    FamilyName,
    NetworkName,
    build,
    estimator_options,
    group_sizes,
    init_active_prob,
    slab_sites,
    with_mean_weights,
)
from processes import check_shares, process_group, random_states, set_random_state
from pyro_l0 import HardConcrete
from pyro_l0.compaction import Compacted, Replica, SelectedInputs, Shrinker, compact
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget
from pyro_l0.infer.elbo import Objective
from pyro_l0.infer.estimators import EstimatorName
from pyro_l0.nn import NetworkCost, fix_gates, name_gates, square_norms

__all__ = [
    "MEASURES",
    "Average",
    "Run",
    "check_finite",
    "check_shares",
    "process_group",
    "random_states",
    "set_random_state",
]

AVERAGE_POWER = 9
TARGET_WEIGHT = 1e-3  # of a step in the averages; with a target the network changes until its end
KL_WARM_UP_EPOCHS = 50  # of spike_slab
RETRAIN_LEARNING_RATE = 1e-3  # at the start, then falling to 0
# What both measure methods return.
MEASURES = ("test_error_percent", "architecture", "weights_left", "macs_left", "expected_weights", "expected_macs")


class Run:
    """One training run: model, guide, objective, optimiser and averaged weights.

    In a process group every process takes its share of each batch and a gate sample of its own; gradients are averaged
    and all processes hold the same state after every step.

    Args:
        images: the data, moved to ``device``.
        network: which network.
        objective: Eq. 22 (``"l0"``), 21 (``"free_energy"``) or 20 (``"spike_slab"``).
        lam: price of one open weight in nats; one for all gate sites or one per site.
        prior_active_prob: P(z != 0) under the gates' prior.
        family: the posterior gates' family.
        family_options: keywords of its ``from_active_prob``, such as ``beta``.
        estimator: how the gradient of Bernoulli gates is estimated; ``"arm"`` if not given.
        slab_scale: prior standard deviation of the weights, for ``"spike_slab"``, times the square root of a layer's
            inputs.
        learning_rate: Adam's step for weights.
        gate_learning_rate: Adam's step for gates.
        batch_size: examples per step.
        weight_decay: coefficient w of the gated weights' expected squared norm (Eq. 15, 17), as w / 2 on the mean loss.
        target: largest fraction of the multiply-adds or the weights, in the place of ``lam``.
        target_of: what the target counts.
        target_epochs: epochs over which the budget falls to the target.
        shrink: take units whose gates are closed for good out of the network after each epoch.
        seed: seed of everything random.
        device: where to train.

    Raises:
        ValueError: ``batch_size`` or ``learning_rate`` is not positive, or ``lam`` has neither one entry nor one per
            gate site.
    """

    def __init__(
        self,
        images: Images,
        network: NetworkName = "mlp",
        *,
        objective: Objective = "l0",
        lam: tuple[float, ...] = (0.1,),
        prior_active_prob: float = 0.1,
        family: FamilyName = "hard_concrete",
        family_options: Mapping[str, float] | None = None,
        estimator: EstimatorName | None = None,
        slab_scale: float = 3.0,
        learning_rate: float = 1e-3,
        gate_learning_rate: float = 1e-3,
        batch_size: int = 100,
        weight_decay: float = 0.0,
        target: float | None = None,
        target_of: Literal["macs", "weights"] = "macs",
        target_epochs: int = 50,
        shrink: bool = False,
        seed: int = 1,
        device: str = "cpu",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"Expected batch_size of at least 1, but got {batch_size}.")
        if not 0 < learning_rate < math.inf:
            raise ValueError(f"Expected learning_rate to be finite and positive, but got {learning_rate}.")
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.train_x, self.train_y, self.test_x, self.test_y = (
            x.to(self.device) for x in (images.train_x, images.train_y, images.test_x, images.test_y)
        )
        self.batch_size = batch_size
        slab = objective == "spike_slab"
        prior = HardConcrete.from_active_prob(prior_active_prob)
        pixels = images.train_x.shape[1]
        self.net = build(network, pixels, prior, slab_scale if slab else None).to(self.device)
        self.model = Classifier(self.net, len(self.train_x))
        sites = list(name_gates(self.model))
        plain = build(network, pixels)
        name_gates(plain, prefix="net.")
        self.cost = NetworkCost(plain, torch.zeros(1, pixels))
        self.group_sizes = group_sizes(plain, self.cost)
        if len(lam) not in (1, len(sites)):
            raise ValueError(f"Expected lam with 1 or {len(sites)} entries, one per gate site, but got {len(lam)}.")
        prices = dict(zip(sites, lam * len(sites) if len(lam) == 1 else lam, strict=True))
        options = dict(family_options or {})
        rates = dict(zip(sites, init_active_prob(KEEP_RATES[network], family, options), strict=True))
        gates: dict[str, Any] = {"family": FAMILIES[family], "family_options": options, "init_active_prob": rates}
        gradient = estimator_options(family, estimator)
        if slab:
            starts = {layer: self.net[int(layer.split(".")[1])].weight.detach() for layer in slab_sites(self.net)}
            self.guide: AutoGate = AutoSpikeSlab(
                self.model, slab_sites(self.net), init_scale=0.02, init_loc=starts, **gates
            )
            # Charged in full from the start, 50,000 weights would all fall back on their prior before they fit.
            warm_up = KL_WARM_UP_EPOCHS * math.ceil(len(self.train_x) / batch_size)
            elbo = L0_ELBO(
                objective,
                slab=slab_sites(self.net),
                kl_scale=lambda step: min(1.0, (step + 1) / warm_up),
                **gradient,
            )
        else:
            self.guide = AutoGate(self.model, **gates)
            elbo = L0_ELBO(
                objective,
                lam=prices,
                group_size=self.group_sizes,
                **gradient,
                weight_decay=weight_decay * len(self.train_x),
                square_norm=square_norms(self.net, torch.zeros(1, pixels, device=self.device))
                if weight_decay
                else None,
            )
        self.loss = elbo(self.model, self.guide)
        self.loss(self.train_x[:2], self.train_y[:2])  # makes the guide's parameters
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.Adam(
            [
                {"params": trained, "lr": learning_rate},
                {"params": list(self.guide.parameters()), "lr": gate_learning_rate},
            ],
            fused=True,
        )
        self.processes, self.process = 1, 0
        if distributed.is_initialized():
            self.processes, self.process = distributed.get_world_size(), distributed.get_rank()
        check_shares(len(self.train_x), batch_size, self.processes)
        self.parallel = self._parallel()
        if self.processes > 1:
            torch.manual_seed(seed + self.process)  # the start was the same, the gates' samples are not
        self.units = [gate.numel() for gate in self.guide.test_gates().values()]
        self.trained = nn.ModuleList([self.net, self.guide])
        self.averaged = copy.deepcopy(self.trained)
        self.steps = 0
        self.inputs = SelectedInputs(self.train_x)
        self.shrinker: Shrinker | None = None
        self.target: SparsityTarget | None = None
        self.target_of = target_of
        if target is not None:
            steps = math.ceil(len(self.train_x) / batch_size)
            self.target = self._target(self.guide, target, target_of, target_epochs * steps)
        if shrink:
            if slab:
                raise ValueError("Expected shrink for objective='l0' or 'free_energy', but got 'spike_slab'.")
            pair: Any = self.averaged
            example = torch.zeros(1, pixels, device=self.device)
            self.shrinker = Shrinker(
                self.trained, "0", self.guide, example, self.optimiser, elbo, [Replica(pair, "0", pair[1])]
            )

    def _full(self, gates: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gates in the sizes of the network at the start."""
        return gates if self.shrinker is None else self.shrinker.full(gates)

    def _target(self, guide: AutoGate, budget: float, of: str, warm_up: int) -> SparsityTarget:
        count = self.cost.macs if of == "macs" else self.cost.weights
        rate = 0.3 * self.batch_size  # per epoch, 0.3 nats per example and unit of violation
        total = count({name: torch.ones(size) for name, size in zip(self.group_sizes, self.units, strict=True)})
        return SparsityTarget(
            guide,
            budget,
            lambda gates: count(self._full(gates)),
            total=total.reshape(1).to(self.device),
            dual_rate=rate,
            warm_up=warm_up,
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Let the averaged network meet the target to the last unit."""
        if self.target is not None:
            budget = float(self.target.budget)
            target = self._target(self.averaged[1], budget, self.target_of, 0)
            target.step = self.target.step
            target.project()

    def _parallel(self) -> nn.Module:
        """The loss as every process calls it; made again after the network has shrunk."""
        return DistributedDataParallel(self.loss) if self.processes > 1 else self.loss

    def train_epoch(self) -> float:
        """One pass over the training images in a new order; the mean loss per example, in nats.

        Raises:
            FloatingPointError: the loss or a parameter is not finite any more.
        """
        total = torch.zeros((), device=self.device)
        order = torch.randperm(len(self.train_x)).to(self.device)
        if self.processes > 1:
            distributed.broadcast(order, 0)
        batches = order.split(self.batch_size)
        average = Average(self.averaged, self.trained, self.steps, 0.0 if self.target is None else TARGET_WEIGHT)
        with self.inputs.of(self.trained[0]) as train_x:
            for index in batches:
                mine = index[self.process :: self.processes]
                self.optimiser.zero_grad()
                loss = self.parallel(train_x[mine], self.train_y[mine])
                if self.target is not None:
                    loss = loss + self.target.penalty()
                loss.backward()
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
        if self.target is not None:
            self.target.check()
        if self.shrinker is not None and self.shrinker.step():
            self.model.net = self.trained[0]
            self.parallel = self._parallel()
        return mean

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Test error of the averaged weights under the test gates, and what is left of the network."""
        net, guide = self.averaged
        gates = guide.test_gates()
        plain = with_mean_weights(net, guide) if isinstance(guide, AutoSpikeSlab) else net
        fixed = fix_gates(plain, gates)
        predicted = torch.cat([fixed(x).argmax(-1) for x in self.test_x.split(1000)])
        wrong = predicted != self.test_y
        active = {name: gate.active_prob for name, gate in guide.posterior().items()}
        gates, active = self._full(gates), self._full(active)
        open_gates = {name: (gate != 0).float() for name, gate in gates.items()}
        return {
            "test_error_percent": 100 * float(wrong.float().mean()),
            "architecture": [int(gate.sum()) for gate in open_gates.values()],
            "weights_left": int(self.cost.weights(open_gates)),
            "macs_left": int(self.cost.macs(open_gates)),
            "expected_weights": float(self.cost.weights(active)),
            "expected_macs": float(self.cost.macs(active)),
            "expected_l0": sum(float(p.sum()) * self.group_sizes[name] for name, p in active.items()),
            "active_rate": {name: float(p.mean()) for name, p in active.items()},
        }

    @torch.no_grad()
    def compacted(self) -> Compacted:
        """The averaged network under its test gates as a smaller plain network."""
        net, guide = self.averaged
        plain = with_mean_weights(net, guide) if isinstance(guide, AutoSpikeSlab) else net
        before = () if self.shrinker is None else self.shrinker.plans
        return compact(plain, guide.test_gates(), self.test_x[:100], before=before)

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
        batches = math.ceil(len(self.train_x) / self.batch_size)
        optimiser = torch.optim.Adam(network.parameters(), RETRAIN_LEARNING_RATE, fused=True)
        falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, epochs * batches)
        averaged = copy.deepcopy(network)
        average = Average(averaged, network)
        with SelectedInputs(self.train_x).of(network) as train_x:
            for _ in range(epochs):
                for index in torch.randperm(len(train_x)).to(self.device).split(self.batch_size):
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
        with torch.no_grad():
            predicted = torch.cat([network(x).argmax(-1) for x in self.test_x.split(1000)])
        return 100 * float((predicted != self.test_y).float().mean())

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, random numbers included."""
        return {
            "model": self.model.state_dict(),
            "guide": self.guide.state_dict(),
            "averaged": self.averaged.state_dict(),
            "steps": self.steps,
            "optimiser": self.optimiser.state_dict(),
            "random": random_states(self.device),
            "objective": self.loss.elbo.state_dict(),
            "target": None if self.target is None else self.target.state_dict(),
            "shrinker": None if self.shrinker is None else self.shrinker.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned.

        Raises:
            Exception: an entry is missing, of another kind or of another shape.
        """
        if self.shrinker is not None:
            self.shrinker.load_state_dict(state["shrinker"])
            self.model.net = self.trained[0]
            self.parallel = self._parallel()
        if self.target is not None:
            self.target.load_state_dict(state["target"])
        self.model.load_state_dict(state["model"])
        self.guide.load_state_dict(state["guide"])
        self.averaged.load_state_dict(state["averaged"])
        self.steps = state["steps"]
        self.optimiser.load_state_dict(state["optimiser"])
        checkpoint.check_moments(self.optimiser, ("step", "exp_avg", "exp_avg_sq") if self.steps else ())
        set_random_state(state["random"], self.device)
        self.loss.elbo.load_state_dict(state["objective"])


def check_finite(loss: float, *modules: nn.Module) -> None:
    """Stop a training that has diverged, before its state replaces a good checkpoint.

    Args:
        loss: mean loss of an epoch.
        modules: what was trained.

    Raises:
        FloatingPointError: the loss or a parameter is not finite.
    """
    parameters = [(name, p) for module in modules for name, p in module.named_parameters()]
    broken = [name for name, p in parameters if not bool(p.isfinite().all())]
    if broken or not math.isfinite(loss):
        raise FloatingPointError(
            f"Expected the training to stay finite, but got a mean loss of {loss} and values that are not finite in "
            f"{', '.join(broken) or 'no parameter'}; take smaller learning rates, prices or noise. The checkpoint "
            "of the epoch before stays."
        )


class Average:
    """Averaged parameters of one module in another of the same shape, listed once and not per step.

    Polynomial-decay averaging with power k = 9: step t enters with a weight of (k + 1) / (t + k), so that the average
    reaches back over about a tenth of the steps taken, however many they are, or over fewer if a weight has a floor.

    Args:
        averaged: holds the averages.
        module: the module.
        steps: steps that the averages hold already.
        floor: least weight of a step.

    References:
        Shamir, Zhang (2013), arXiv:1212.1824.
    """

    def __init__(self, averaged: nn.Module, module: nn.Module, steps: int = 0, floor: float = 0.0) -> None:
        self.pair = list(averaged.parameters()), list(module.parameters())
        self.steps = steps
        self.floor = floor

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters."""
        self.steps += 1
        weight = max((AVERAGE_POWER + 1) / (self.steps + AVERAGE_POWER), self.floor)
        torch._foreach_lerp_(*self.pair, weight)
