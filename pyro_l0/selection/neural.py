"""Selects the inputs of networks, each trained on its own part of the observations and judged by the others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin, f_classif, f_regression
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags, Tags
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn
from torch.distributions import Normal
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_l0.distributions import HardConcrete
from pyro_l0.nn.engine.record import copied
from pyro_l0.selection.design.encode import check_labels, labels_of
from pyro_l0.selection.estimator import seed_of

__all__ = ["NeuralFeatureSelector"]

Array = NDArray[np.float64]
Net = nn.Module | Callable[[int], nn.Module] | None

_HIDDEN = 64
_LEAST_NOISE = 1e-3  # standard deviations of the observations
_BATCH = 128  # observations per network that a step trains the weights by
_RATE, _DECAY, _BETAS = 3e-3, 1e-2, (0.9, 0.99)
_CHECK = 25  # steps between checks of the held-out loss
_JUDGES = 512  # observations per network that a step moves the gates by
_GATE_PATH, _GATE_RATE = 36.0, 0.1  # how far log alpha moves over all steps, and in one step at most
_NOISE_RATE = 0.01
_START = 0.9  # P(z != 0): nearly open, so that interactions are learned before anything is closed
_MOST = 4.0  # log alpha; a gate beyond would take long to close again
_WARM_UP = 0.2  # of the steps, while the price rises
_TAIL = 0.15  # of the steps, at the end
_SHARE = 0.05  # of the inputs that have to go, closed at once
_ROUNDING = 100  # epsilons of the mean loss: what a network's order of additions may change


def _may_classify(selector: NeuralFeatureSelector) -> bool:
    """Whether there are, or may be, classes; scikit-learn asks before it shows ``predict_proba``."""
    if hasattr(selector, "response_"):
        return isinstance(selector.response_, ClassResponse)
    return selector.task != "regression"


@dataclass(eq=False, repr=False)
class NeuralFeatureSelector(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    r"""Selects the features that a neural network needs, and predicts from them alone.

    A gate multiplies every feature before it enters the network, so that interactions and non-linear effects count,
    which no marginal test would find. There is one network per fold: its weights are trained on the other folds, and
    the fold that it has not seen judges the features, all networks together. So a feature that only helps a network to
    memorise does harm.

    With ``n_features=None`` the gates are hard concrete, and the loss is that of Eq. 22 of the L0 paper: the expected
    held-out negative log likelihood and a price for each open gate, :math:`\log p + \frac12 \log n` nats. Features
    whose gates are open with a probability above one half are selected.

    With a number, gates are opened at random while the weights are trained, so that the networks learn to predict from
    any subset of the features. Then gates are closed one by one, each time the one without which the held-out loss is
    least. All subsets share the networks, so the choice between nearly equal features depends far less on the seed than
    if gates competed.

    Finally every network is trained further on the selected features until its held-out loss is least, and predictions
    are averages over the networks.

    Args:
        net: a ``torch.nn.Module`` that takes standardised features, shape ``(n, p)``, and returns a number per row for
            regression, or a logit per class (with two classes, one is enough); or a function from the number of
            features to such a module, called under ``random_state``. A module is copied with the weights that it has.
            None: two hidden layers of 64 units.
        n_features: number of features to select; None: as many as earn their price.
        task: ``"regression"``, ``"classification"``, or ``"auto"`` to infer it from y as scikit-learn's
            ``type_of_target`` does: real numbers that are not all whole are a regression.
        cv: number of folds, and of networks.
        max_steps: steps of the optimiser, of 128 observations per network, for the selection, and as many to train
            the networks on the selected features.
        random_state: seed of folds, starts, batches and gates. Global random states are not changed.

    Attributes:
        pip_: P(z != 0) of each feature's gate, the mean over the last 15 % of the selection's steps, shape
            ``(p,)``; with ``n_features=None``.
        error_: NaN, in the shape of ``pip_``: gates are trained, and nothing tells their error. Compare other seeds.
        ok_: False, as the error is unknown.
        ranking_: 1 for selected features, and the larger the earlier a feature was closed, shape ``(p,)``; with a
            number of features.
        classes_: labels in order, of a classification.
        n_features_in_: number of features, p.
        feature_names_in_: names of the features, if X had names.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(300, 8))
        >>> y = X[:, 1] * X[:, 4]  # neither has an effect of its own
        >>> selector = NeuralFeatureSelector(n_features=2, max_steps=600, random_state=0)
        >>> selector.fit(X, y).get_support(indices=True)
        array([1, 4])

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 22. Yamada, Lindenbaum, Negahban, Kluger (2020),
        Feature Selection using Stochastic Gates, arXiv:1810.04247, who price Gaussian gates on the training loss.
    """

    _parameter_constraints: ClassVar[dict[str, list[object]]] = {
        "net": [callable, None],
        "n_features": [Interval(Integral, 1, None, closed="left"), None],
        "task": [StrOptions({"auto", "regression", "classification"})],
        "cv": [Interval(Integral, 2, None, closed="left")],
        "max_steps": [Interval(Integral, 1, None, closed="left")],
        "random_state": ["random_state"],
    }

    net: Net = None
    n_features: int | None = None
    _: KW_ONLY
    task: Literal["auto", "regression", "classification"] = "auto"
    cv: int = 3
    max_steps: int = 1200
    random_state: int | np.random.RandomState | None = None

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Select features, and train the networks on them.

        Args:
            X: features, shape ``(n, p)``, at least two observations.
            y: numbers or class labels, shape ``(n,)``.

        Returns:
            The estimator.

        Raises:
            ValueError: a parameter or the data are out of range.
        """
        self._validate_params()
        self._labels = labels_of(X)
        x, target = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        if self.n_features is not None and self.n_features > self.n_features_in_:
            raise ValueError(
                f"Expected n_features of at most {self.n_features_in_}, the features of X, but got {self.n_features}."
            )
        response = self._response(column_or_1d(target, warn=True))
        self.mean_, scale = x.mean(0), x.std(0)
        self.scale_ = np.where(x.max(0) > x.min(0), scale, 1.0)
        with torch.random.fork_rng(range(torch.cuda.device_count())):  # torch's global state stays as it is
            torch.manual_seed(seed_of(self.random_state))
            self._fit(x, response, target)
        self.response_ = response
        return self

    def transform(self, X: ArrayLike) -> Any:
        """Reduce X, shape ``(m, p)``, to the selected features."""
        check_is_fitted(self)
        check_labels(X, self._labels)
        return super().transform(X)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Predict the mean of y, or the most probable class.

        Args:
            X: features, shape ``(m, p)``; only the selected ones are used.

        Returns:
            Numbers or labels, shape ``(m,)``.
        """
        outputs = self._outputs(X)
        if isinstance(self.response_, NormalResponse):
            return self.response_.decode(outputs.mean(0))
        return cast(NDArray[Any], self.classes_[softmax(outputs, -1).mean(0).argmax(1)])

    @available_if(_may_classify)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities of the classes, averaged over the networks.

        Args:
            X: features, shape ``(m, p)``; only the selected ones are used.

        Returns:
            Shape ``(m, classes)``, in the order of ``classes_``.
        """
        return cast(Array, softmax(self._outputs(X), -1).mean(0))

    def score(self, X: ArrayLike, y: ArrayLike) -> float:
        """R² of a regression's predictions, or accuracy (a fraction) of a classification's.

        Args:
            X: features, shape ``(m, p)``.
            y: observations, shape ``(m,)``.
        """
        predicted = self.predict(X)
        metric = r2_score if isinstance(self.response_, NormalResponse) else accuracy_score
        return float(metric(y, predicted))

    def _fit(self, x: Array, response: Response, y: NDArray[Any]) -> None:
        """Train gates and networks; torch's random numbers are this estimator's own."""
        networks = [make_network(self.net, response, x.shape[1]) for _ in range(min(self.cv, len(x)))]
        like = next(networks[0].parameters())
        inputs = self._standardised(x).to(like)
        response.to(like)
        observations = response.encode(y).to(like.device)
        folds = _folds(observations, len(networks), isinstance(response, ClassResponse))
        fit = CrossFit(networks, response, inputs, observations, folds)
        for name in ("pip_", "error_", "ok_", "ranking_"):  # of an earlier fit
            self.__dict__.pop(name, None)
        if self.n_features is None:
            self.pip_: Array = train_gates(fit, steps=self.max_steps).double().cpu().numpy()
            self.error_, self.ok_ = np.full_like(self.pip_, np.nan), False
            self._support: NDArray[np.bool_] = self.pip_ > 0.5
        else:
            train_for_subsets(fit, steps=self.max_steps)
            alone = _explained_alone(x, y, isinstance(response, ClassResponse))
            ranks = eliminate(fit, n_features=self.n_features, alone=alone)
            self.ranking_: NDArray[np.int64] = ranks.cpu().numpy()
            self._support = self.ranking_ == 1
        selected = torch.as_tensor(self._support).to(inputs.device)
        self.networks_ = [refit(fit, m, selected, steps=self.max_steps) for m in range(len(networks))]

    def _response(self, y: NDArray[Any]) -> Response:
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        if self.task == "regression" or (self.task == "auto" and kind == "continuous"):
            return NormalResponse(y.astype(np.float64))
        check_classification_targets(y)
        self.classes_: NDArray[Any] = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(
                "Expected at least two classes in y, but got one class, "
                f"{self.classes_[0]!r}; task='regression' takes numbers that are all the same."
            )
        return ClassResponse(self.classes_)

    def _standardised(self, x: Array) -> Tensor:
        return torch.as_tensor((x - self.mean_) / self.scale_)

    @torch.no_grad()
    def _outputs(self, x: ArrayLike) -> Array:
        """What the networks return, shape ``(M, m)`` or ``(M, m, classes)``."""
        check_is_fitted(self)
        check_labels(x, self._labels)
        found = validate_data(self, x, dtype=np.float64, reset=False)
        inputs = self._standardised(np.where(self._support, found, self.mean_)).to(next(self.networks_[0].parameters()))
        outputs = torch.stack([self.response_.output(network(inputs)) for network in self.networks_])
        return cast(Array, outputs.double().cpu().numpy())

    def _get_support_mask(self) -> NDArray[np.bool_]:
        check_is_fitted(self)
        return self._support

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        if self.task == "classification":
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        elif self.task == "regression":
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
        return tags


def _explained_alone(x: Array, y: NDArray[Any], of_classes: bool) -> Tensor:
    """How much each feature explains alone: the F statistic of its linear relation with y; 0 for a constant."""
    explained = np.zeros(x.shape[1])
    varies = np.ptp(x, axis=0) > 0
    if varies.any():
        explained[varies] = (f_classif if of_classes else f_regression)(x[:, varies], y)[0]
    return torch.from_numpy(np.nan_to_num(explained))


def _folds(y: Tensor, count: int, stratified: bool) -> list[Fold]:
    """Folds of random observations; of classes, about as many of each in every fold."""
    order = torch.randperm(len(y))
    if stratified:
        order = order[torch.argsort(y.cpu()[order], stable=True)]
    part = torch.empty(len(y), dtype=torch.long)
    part[order] = torch.arange(len(y)) % count
    return [Fold((part != m).nonzero().flatten(), (part == m).nonzero().flatten()) for m in range(count)]


# ------------------------------------------------------------ how networks are trained


class NormalResponse(nn.Module):
    """Observations that are normal around the network's output, in units of their standard deviation."""

    outputs = 1  # numbers that a network returns for an observation

    def __init__(self, y: NDArray[np.float64]) -> None:
        super().__init__()
        self.mean, self.unit = float(y.mean()), float(y.std()) or 1.0
        self.log_noise = nn.Parameter(torch.zeros(()))

    def encode(self, y: NDArray[np.generic]) -> Tensor:
        """Standardised observations, shape ``(n,)``."""
        return torch.as_tensor((y.astype(np.float64) - self.mean) / self.unit).to(self.log_noise)

    def output(self, raw: Tensor) -> Tensor:
        """The means, shape ``(n,)``, from what a network returns."""
        return raw.view(-1)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Negative log likelihoods in nats, shape ``(n,)``, with the noise that the held-out observations have."""
        noise = self.log_noise.clamp(min=math.log(_LEAST_NOISE)).exp()
        log_prob: Tensor = Normal(output, noise, validate_args=False).log_prob(y)
        return -log_prob

    def decode(self, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        """Means in the units of y, from those of a response of mean 0 and deviation 1."""
        return self.mean + self.unit * mean


class ClassResponse(nn.Module):
    """Observations that are classes, given in their order, of which the network returns the logits."""

    def __init__(self, classes: NDArray[np.generic]) -> None:
        super().__init__()
        self.classes, self.outputs = classes, len(classes)

    def encode(self, y: NDArray[np.generic]) -> Tensor:
        """The number of each observation's class, shape ``(n,)``."""
        return torch.as_tensor(np.searchsorted(self.classes, y))

    def output(self, raw: Tensor) -> Tensor:
        """Logits, shape ``(n, C)``; a single logit per row is that of the second of two classes."""
        if self.outputs == 2 and raw.dim() in (1, 2) and raw.numel() == len(raw):
            logit = raw.view(-1)
            return torch.stack([torch.zeros_like(logit), logit], -1)
        if raw.dim() != 2 or raw.shape[1] != self.outputs:
            raise ValueError(
                f"Expected a net that returns {self.outputs} logits for each row, one for each class"
                f"{', or the logit of the second' if self.outputs == 2 else ''}, but got {tuple(raw.shape)}."
            )
        return raw

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Negative log likelihoods in nats, shape ``(n,)``."""
        return F.cross_entropy(output, y, reduction="none")


Response = NormalResponse | ClassResponse


class Fold(NamedTuple):
    """Indices of the observations that one network is trained on, and of those that it never sees."""

    train: Tensor
    held_out: Tensor


class CrossFit(NamedTuple):
    """Networks with the observations that they are trained on and judged by."""

    networks: Sequence[nn.Module]  # one per fold, of inputs (B, p); trained in place
    response: Response  # what their outputs mean
    x: Tensor  # standardised inputs, shape (n, p)
    y: Tensor  # encoded observations, shape (n,)
    folds: Sequence[Fold]  # the observations of each network

    def losses(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Negative log likelihoods, shape ``(M B,)``, of ``rows`` (M, B) behind ``gates`` (M, B, p), by network."""
        inputs = zip(self.networks, self.x[rows] * gates, strict=True)
        outputs = torch.cat([self.response.output(net(part)) for net, part in inputs])
        return self.response.losses(outputs, self.y[rows].flatten())


def make_network(net: Net, response: Response, features: int) -> nn.Module:
    """A network to be trained; the default has two hidden layers of 64 units, in float64."""
    if isinstance(net, nn.Module):
        return copied(net)
    if net is not None:
        return net(features)
    first, second = nn.Linear(features, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN)
    last = nn.Linear(_HIDDEN, response.outputs)
    return nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), last).double()


def train_gates(fit: CrossFit, *, steps: int) -> Tensor:
    r"""Train one network per fold and the gates that all share; gives P(z != 0) over the last 15 % of the steps.

    The objective is Eq. 22 of the L0 paper, with the weights of each network following the observations of its fold and
    the gates, like the noise scale, those that it has not seen. So an input by which a network only memorises closes,
    and the likelihood is honest about the noise. The price of an open gate is :math:`\log p + \frac12 \log n` nats:
    what it takes to say which of p inputs, and the BIC's half logarithm.
    """
    n, p = fit.x.shape
    start = HardConcrete.from_active_prob(torch.full((p,), _START).to(fit.x))
    log_alpha = nn.Parameter(start.log_alpha.clone())
    with torch.no_grad():
        log_alpha[(fit.x == fit.x[0]).all(0)] = HardConcrete.closed(**start.fixed_options).log_alpha.to(log_alpha)
    weights = [q for network in fit.networks for q in network.train().parameters()]
    noise = list(fit.response.parameters())
    groups = [
        {"params": weights, "lr": _RATE, "weight_decay": _DECAY},
        {"params": log_alpha, "lr": min(_GATE_RATE, _GATE_PATH / steps)},
        {"params": noise, "lr": _NOISE_RATE},
    ]
    optimiser = AdamW(groups, betas=_BETAS, weight_decay=0.0, fused=True)
    warm_up, tail = round(_WARM_UP * steps), math.ceil(_TAIL * steps)
    active = torch.zeros_like(log_alpha, requires_grad=False)
    for step in range(steps):
        gates = start.with_learned(log_alpha=log_alpha)
        price = (math.log(p) + 0.5 * math.log(n)) * min(1.0, step / max(1, warm_up))
        gradients = _gradients(fit, gates, weights, [log_alpha, *noise], price)
        for parameter, gradient in zip([*weights, log_alpha, *noise], gradients, strict=True):
            parameter.grad = gradient
        if 2 * step < warm_up:  # an untrained network is wrong as often as right: the gates wait until it has learned
            log_alpha.grad = None
        optimiser.step()
        with torch.no_grad():
            log_alpha.clamp_(max=_MOST)
        if step >= steps - tail:
            active += start.with_learned(log_alpha=log_alpha.detach()).active_prob / tail
    _check_finite(active)
    return active


def _check_finite(found: Tensor) -> None:
    """Refuse what a loss that became NaN has left."""
    if bool(found.isnan().any()):
        raise ValueError("Expected a net whose outputs stay finite in training, but its loss became nan.")


def _gradients(
    fit: CrossFit, gates: HardConcrete, weights: list[nn.Parameter], judged: list[nn.Parameter], price: float
) -> tuple[Tensor, ...]:
    """Of the weights by the observations of their folds, and of gates and noise by the others.

    Every observation draws gates of its own, which varies far less than gates that a batch shares. The price of the
    gates, in nats, does not affect the weights.
    """
    rows = _random_rows([fold.train for fold in fit.folds], _BATCH)
    of_weights = torch.autograd.grad(fit.losses(rows, gates.rsample(rows.shape).detach()).mean(), weights)
    rows = _random_rows([fold.held_out for fold in fit.folds], _JUDGES)
    nll = len(fit.y) * fit.losses(rows, gates.rsample(rows.shape)).mean()
    return of_weights + torch.autograd.grad(nll + price * gates.active_prob.sum(), judged)


def train_for_subsets(fit: CrossFit, *, steps: int) -> None:
    """Train networks behind random gates, so that they know the best prediction from every subset of the inputs.

    Each observation draws the probability of an open gate from U(0, 1), so that any number of open gates is as likely
    as any other, and then its gates. A closed input is 0, the mean of a standardised one.
    """
    optimiser = _weights_optimiser(q for network in fit.networks for q in network.train().parameters())
    schedule = CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        rows = _random_rows([fold.train for fold in fit.folds], _BATCH)
        gates = torch.rand(*rows.shape, fit.x.shape[1]).to(fit.x) < torch.rand(*rows.shape, 1).to(fit.x)
        optimiser.zero_grad()
        fit.losses(rows, gates).mean().backward()
        optimiser.step()
        schedule.step()


@torch.no_grad()
def held_out_losses(fit: CrossFit, is_open: Tensor) -> Tensor:
    """Negative log likelihoods of all observations, shape ``(n,)``, by the networks that have never seen them.

    The networks, in evaluation mode, see the inputs that are open, shape ``(p,)``.
    """
    losses = torch.zeros(len(fit.y)).to(fit.x)
    for network, (_, rows) in zip(fit.networks, fit.folds, strict=True):
        losses[rows] = fit.response.losses(fit.response.output(network(fit.x[rows] * is_open)), fit.y[rows])
    return losses


def eliminate(fit: CrossFit, *, n_features: int, alone: Tensor) -> Tensor:
    """Close the inputs whose loss harms the held-out likelihood least, until ``n_features`` are left.

    Gives ranks, shape ``(p,)``: 1 for kept inputs, larger the earlier an input was closed. Losses of near duplicates
    differ by less than their noise, and the least one would depend on the seed. Of all inputs whose closing is within
    one standard error of the best (Breiman et al. 1984), those that explain least ``alone``, on any scale, are closed.

    In each round a twentieth of those that have to go is closed, at least one: two near duplicates that were closed at
    once would both be missed. That takes about 20 p evaluations of the loss where few inputs are left, and at most
    p²/2. Constant inputs go first.
    """
    for network in fit.networks:
        network.eval()
    varies = (fit.x != fit.x[0]).any(0)
    alone = torch.where(varies, alone.to(fit.x), -torch.inf)
    is_open, ranks = torch.ones_like(varies), torch.ones_like(varies, dtype=torch.long)
    while (surplus := int(is_open.sum()) - n_features) > 0:
        candidates = is_open.nonzero().flatten()
        rests = is_open.repeat(len(candidates), 1).scatter(1, candidates[:, None], False)
        order = _least_missed(torch.stack([held_out_losses(fit, rest) for rest in rests]), alone[candidates])
        is_open[candidates[order[: max(1, int(_SHARE * surplus))]]] = False
        ranks[~is_open] += 1
    return ranks


def _least_missed(losses: Tensor, alone: Tensor) -> Tensor:
    """Candidates in the order in which they may go, from the losses of each observation without each candidate."""
    means = losses.mean(1)
    _check_finite(means)
    best = losses[means.argmin()]
    above = losses - best
    # Losses of exact copies differ by rounding alone, which may exceed its own standard error.
    rounding = _ROUNDING * torch.finfo(losses.dtype).eps * best.abs().mean()
    is_tied = above.mean(1) <= above.std(1) / math.sqrt(losses.shape[1]) + rounding
    is_tied |= alone.isinf()
    by_loss = means.argsort(stable=True)
    by_alone = alone.argsort(stable=True)
    return torch.cat([by_alone[is_tied[by_alone]], by_loss[~is_tied[by_loss]]])


def refit(fit: CrossFit, number: int, selected: Tensor, *, steps: int) -> nn.Module:
    """A copy of a network, trained on with the selected inputs alone; the best on its held-out observations."""
    x, fold = fit.x * selected, fit.folds[number]
    net = copied(fit.networks[number])
    optimiser = _weights_optimiser(net.parameters())
    schedule = CosineAnnealingLR(optimiser, steps)
    best, state = math.inf, copy.deepcopy(net.state_dict())

    def loss(rows: Tensor) -> Tensor:
        return fit.response.losses(fit.response.output(net(x[rows])), fit.y[rows]).mean()

    for step in range(1, steps + 1):
        net.train()
        optimiser.zero_grad()
        loss(_random_rows([fold.train], _BATCH)[0]).backward()
        optimiser.step()
        schedule.step()
        if step % _CHECK == 0 or step == steps:
            net.eval()
            with torch.no_grad():
                now = float(loss(fold.held_out))
            if now < best:
                best, state = now, copy.deepcopy(net.state_dict())
    net.load_state_dict(state)
    return net.eval()


def _weights_optimiser(weights: Iterable[nn.Parameter]) -> AdamW:
    return AdamW(weights, lr=_RATE, betas=_BETAS, weight_decay=_DECAY, fused=True)


def _random_rows(parts: Sequence[Tensor], size: int) -> Tensor:
    """Indices of random observations, as many of each part, shape ``(M, B)``; whole parts where they are small."""
    size = min(size, min(len(part) for part in parts))
    return torch.stack([part[torch.randperm(len(part))[:size]] for part in parts])
