"""scikit-learn's own checks of estimators."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_l0.selection import (
    SpikeSlabBinomialRegressor,
    SpikeSlabClassifier,
    SpikeSlabCox,
    SpikeSlabMultiTaskRegressor,
    SpikeSlabNegativeBinomial,
    SpikeSlabOrdinal,
    SpikeSlabPoissonRegressor,
    SpikeSlabRegressor,
    SpikeSlabRobust,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:No features were selected:UserWarning",
    "ignore:Of .* some member has an effect:UserWarning",
    "ignore:The coefficients separate the classes:UserWarning",  # as those of scikit-learn's blobs do
    "ignore:Expected trials:UserWarning",
    "ignore:Labels of text are ordered:UserWarning",
)
# A known slab scale has no grid: one mode for each subset of the ten features that some checks have.
QUICK = {"method": "enumerate", "slab_scale": 1.0}


def sampled(_):
    """Thirty features are too many to enumerate, and rounding sends chains another way; see ``test_weights``."""
    kinds = ("dense", "sparse")
    return {f"check_sample_weight_equivalence_on_{kind}_data": "its 30 features are sampled" for kind in kinds}


# All share one base: what the others do apart from it, the slow tests see.
@parametrize_with_checks([SpikeSlabRegressor()], expected_failed_checks=sampled)
def test_by_scikit_learn(estimator, check):
    """Each promise that scikit-learn asks of an estimator."""
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        SpikeSlabClassifier(**QUICK),
        SpikeSlabPoissonRegressor(**QUICK),
        SpikeSlabBinomialRegressor(**QUICK),
        SpikeSlabClassifier(),
        SpikeSlabCox(**QUICK),
    ],
    expected_failed_checks=sampled,
)
def test_others_by_scikit_learn(estimator, check):
    """The same of the others, and with a scale to learn."""
    check(estimator)


# Of weighted and repeated rows, chains take other ways.
@pytest.mark.slow
@parametrize_with_checks(
    [
        SpikeSlabMultiTaskRegressor(slab_scale=1.0),
        SpikeSlabNegativeBinomial(slab_scale=1.0),
        SpikeSlabOrdinal(slab_scale=1.0),
        SpikeSlabRobust(slab_scale=1.0),
    ],
    expected_failed_checks=sampled,
)
def test_sampled_ones_by_scikit_learn(estimator, check):
    """The same of those that are always sampled."""
    check(estimator)
