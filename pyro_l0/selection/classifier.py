"""Logistic regression, of two classes or more, with spike-and-slab coefficients."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from pyro_l0.selection.estimator import Array, SpikeSlabEstimator
from pyro_l0.selection.predictive import averages
from pyro_l0.selection.problem import Family

if TYPE_CHECKING:
    import pandas

__all__ = ["SpikeSlabClassifier"]

_WIDE = 15.0  # log odds at separated classes, up to which coefficients are within 3 % of their mean


class SpikeSlabClassifier(ClassifierMixin, SpikeSlabEstimator):  # type: ignore[misc]
    """Logistic regression whose coefficients are exactly zero with a probability that is learned.

    Two classes have one linear predictor, the log odds of the second class. More classes have one each, and a softmax
    gives their probabilities; a feature then has one gate, which opens or closes its coefficients for all classes.
    The priors are those of :class:`SpikeSlabRegressor`, except that an intercept is normal with mean 0 and standard
    deviation 10, and an unknown slab scale half-normal with scale 2.

    A feature that separates the classes, constant within each of them, is no problem: the slab keeps its coefficient
    finite. With a wide slab Laplace's approximation makes it too large, by some 15 % for a scale of 10; a warning says
    so.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, without a noise scale; these differ.

    Attributes:
        classes_: the labels, in increasing order.
        coef_: posterior means of the coefficients, shape ``(1, p)`` for two classes and ``(classes, p)`` for more.
        coef_sd_: posterior standard deviations of the coefficients, in the same shape.
        intercept_: posterior means of the intercepts, shape ``(1,)`` or ``(classes,)``.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(200, 4))
        >>> labels = np.where(3 * x[:, 1] + rng.logistic(size=200) > 0, "yes", "no")
        >>> model = SpikeSlabClassifier(random_state=0).fit(x, labels)
        >>> model.select(), model.predict_proba(x).shape
        (array([1]), (200, 2))
    """

    classes_: NDArray[np.generic]

    def predict_proba(self, X: ArrayLike) -> Array:  # noqa: N803
        """Probabilities of the classes, averaged over the posterior.

        Args:
            X: features, shape ``(m, p)``.

        Returns:
            Shape ``(m, classes)``, in the order of ``classes_``.
        """
        x = self._validated_features(X)
        if len(self.classes_) > 2:
            return averages(self.draws_, x, lambda predictor: softmax(predictor, axis=-1))
        second = averages(self.draws_, x, lambda predictor: expit(predictor[..., 0]))
        return np.stack([1 - second, second], axis=1)

    def predict(self, X: ArrayLike) -> NDArray[np.generic]:  # noqa: N803
        """Predict the most probable class of new observations.

        Args:
            X: features, shape ``(m, p)``.

        Returns:
            Labels, shape ``(m,)``.
        """
        likeliest = self.predict_proba(X).argmax(1)
        labels: NDArray[np.generic] = self.classes_[likeliest]
        return labels

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        found, labels = validate_data(self, x, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(column_or_1d(labels), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "This solver needs samples of at least 2 classes in the data, but the data contains only one class: "
                f"{self.classes_.tolist()[0]!r}"
            )
        return np.array(found), numbers.astype(np.float64)

    def _warn_of_separation(self) -> None:
        x, y, _ = self._data
        odds = x @ self.coef_.T + self.intercept_
        odds = odds if len(self.classes_) > 2 else np.hstack([np.zeros_like(odds), odds])
        is_own = y[:, None] == np.arange(len(self.classes_))
        margin = odds[is_own] - np.where(is_own, -np.inf, odds).max(1)
        if margin.min() > 0 and margin.max() > _WIDE:
            warnings.warn(
                f"The coefficients separate the classes, with log odds of up to {margin.max():.0f}: only the slab "
                "bounds them, and their means may be a fifth too large, though inclusion probabilities are right. Set "
                "a smaller slab_scale, such as 2.",
                stacklevel=3,
            )

    def _as_coef(self, values: Array) -> Array:
        return np.moveaxis(values.reshape(len(values), len(self._gate_of), -1), 1, 2)

    def _as_intercept(self, values: Array) -> Array:
        return values

    def _rows(self) -> pandas.Index:
        import pandas

        if len(self.classes_) == 2:
            return super()._rows()
        return pandas.MultiIndex.from_product([self._column_names(), self.classes_], names=["feature", "class"])

    def _family(self) -> Family:
        return "bernoulli" if len(self.classes_) == 2 else "categorical"
