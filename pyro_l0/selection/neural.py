"""Selects the inputs of a network, by the conventions of scikit-learn."""

from __future__ import annotations

from numbers import Integral
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
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
from torch import Tensor

from pyro_l0.selection.estimator import seed_of
from pyro_l0.selection.network_training import (
    ClassResponse,
    CrossFit,
    Fold,
    Net,
    NormalResponse,
    Response,
    eliminate,
    make_networks,
    refit,
    train_for_subsets,
    train_gates,
)

__all__ = ["NeuralFeatureSelector"]

Array = NDArray[np.float64]


def _may_classify(selector: NeuralFeatureSelector) -> bool:
    """Whether there are, or may be, classes; scikit-learn asks before it shows ``predict_proba``."""
    if hasattr(selector, "response_"):
        return isinstance(selector.response_, ClassResponse)
    return selector.task != "regression"


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
        ranking_: 1 for selected features, and the larger the earlier a feature was closed, shape ``(p,)``; with a
            number of features.
        classes_: labels in order, of a classification.
        n_features_in_: number of features, p.
        feature_names_in_: names of the features, if X had names.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(300, 8))
        >>> y = X[:, 1] * X[:, 4]  # neither has an effect of its own
        >>> selector = NeuralFeatureSelector(n_features=2, max_steps=600, random_state=0).fit(X, y)
        >>> selector.get_support(indices=True)
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

    def __init__(
        self,
        net: Net = None,
        n_features: int | None = None,
        *,
        task: Literal["auto", "regression", "classification"] = "auto",
        cv: int = 3,
        max_steps: int = 1200,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.net = net
        self.n_features = n_features
        self.task = task
        self.cv = cv
        self.max_steps = max_steps
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
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

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
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
    def predict_proba(self, X: ArrayLike) -> Array:  # noqa: N803
        """Probabilities of the classes, averaged over the networks.

        Args:
            X: features, shape ``(m, p)``; only the selected ones are used.

        Returns:
            Shape ``(m, classes)``, in the order of ``classes_``.
        """
        return cast(Array, softmax(self._outputs(X), -1).mean(0))

    def score(self, X: ArrayLike, y: ArrayLike) -> float:  # noqa: N803
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
        networks = make_networks(self.net, response, x.shape[1], min(self.cv, len(x)))
        like = next(networks[0].parameters())
        inputs = self._standardised(x).to(like)
        response.to(like)
        observations = response.encode(y).to(like.device)
        folds = _folds(observations, len(networks), isinstance(response, ClassResponse))
        fit = CrossFit(networks, response, inputs, observations, folds)
        for name in ("pip_", "ranking_"):  # of an earlier fit
            self.__dict__.pop(name, None)
        if self.n_features is None:
            self.pip_: Array = train_gates(fit, steps=self.max_steps).double().cpu().numpy()
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
        """The response of the task that y and ``task`` ask for."""
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
