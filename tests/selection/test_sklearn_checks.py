"""scikit-learn's own checks of estimators."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabRegressor


@pytest.mark.filterwarnings("ignore:No features were selected:UserWarning")
@parametrize_with_checks([SpikeSlabRegressor(), SpikeSlabClassifier(), SpikeSlabPoissonRegressor()])
def test_by_scikit_learn(estimator, check):
    """Each promise that scikit-learn asks of an estimator."""
    check(estimator)
