"""scikit-learn's own checks of estimators."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabRegressor

pytestmark = pytest.mark.filterwarnings("ignore:No features were selected:UserWarning")
# A known slab scale has no grid: one mode for each subset of the ten features that some checks have.
QUICK = {"method": "enumerate", "slab_scale": 1.0}


@parametrize_with_checks([SpikeSlabRegressor(), SpikeSlabClassifier(**QUICK), SpikeSlabPoissonRegressor(**QUICK)])
def test_by_scikit_learn(estimator, check):
    """Each promise that scikit-learn asks of an estimator."""
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([SpikeSlabClassifier(), SpikeSlabPoissonRegressor()])
def test_by_scikit_learn_with_everything_learned(estimator, check):
    """The same of those whose fits take long with a scale to learn."""
    check(estimator)
