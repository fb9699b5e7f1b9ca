"""The selector of a network's inputs: what its objective is, what it selects, scikit-learn's conventions."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_wine
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from pyro_l0 import HardConcrete
from pyro_l0.selection import NeuralFeatureSelector
from pyro_l0.selection.neural import (
    ClassResponse,
    CrossFit,
    Fold,
    NormalResponse,
    _gradients,
    _least_missed,
    eliminate,
    held_out_losses,
    train_for_subsets,
)
from tests.selection.fitted import nothing_else_changes

FAST = {"max_steps": 2, "cv": 2, "random_state": 0}


def product(seed=0, n=300, p=8):
    """An interaction of two features without any effect of one of them alone."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p))
    return x, x[:, 1] * x[:, 4] + 0.1 * rng.normal(size=n)


@pytest.fixture(scope="module")
def fitted():
    x, y = product()
    return NeuralFeatureSelector(n_features=2, max_steps=300, random_state=0).fit(x, y), x, y


def two_networks(p=3, n=40):
    """Linear networks that share gates, and observations of noise."""
    torch.manual_seed(0)
    x, y = torch.randn(n, p, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    rows = torch.arange(n)
    folds = [Fold(rows[rows % 4 != m], rows[rows % 4 == m]) for m in range(2)]
    networks = [nn.Linear(p, 1).double() for _ in range(2)]
    gates = HardConcrete(torch.linspace(-1, 2, p, dtype=torch.float64).requires_grad_())
    return CrossFit(networks, NormalResponse(np.arange(10.0)).double(), x, y, folds), gates


def gradients(fit, gates, price=0.0):
    """Of the weights together, and of gates and noise."""
    torch.manual_seed(1)
    weights = [q for network in fit.networks for q in network.parameters()]
    found = _gradients(fit, gates, weights, [gates.log_alpha, *fit.response.parameters()], price)
    return torch.cat([x.flatten() for x in found[: len(weights)]]), torch.cat(
        [x.view(-1) for x in found[len(weights) :]]
    )


# The objective


def test_price_is_that_of_one_gate_per_feature():
    """Drawing gates for each observation leaves the price at lambda sum P(z != 0), whatever the batch."""
    fit, gates = two_networks()
    (weights, judged), (priced_weights, priced) = gradients(fit, gates), gradients(fit, gates, 1.7)
    # P(z != 0) = sigmoid(log alpha - temperature log(-gamma / zeta)), eq. 12
    active = 1 / (1 + np.exp(-(np.linspace(-1, 2, 3) - 2 / 3 * np.log(0.1 / 1.1))))
    np.testing.assert_allclose((priced - judged)[:3].numpy(), 1.7 * active * (1 - active), rtol=1e-10)
    assert priced[3] == judged[3]
    assert torch.equal(weights, priced_weights)


def test_likelihood_is_of_the_whole_data_set():
    """With gates that are all open: the noise's gradient of n times the mean negative log density, held out."""
    fit, _ = two_networks()
    with torch.no_grad():
        fit.response.log_noise.fill_(np.log(0.5))
    gates = HardConcrete(torch.full((3,), 60.0, dtype=torch.float64).requires_grad_())
    slopes = []
    for net, (_, rows) in zip(fit.networks, fit.folds, strict=True):
        mean = fit.x[rows].numpy() @ net.weight.detach().numpy()[0] + net.bias.item()
        slopes += (1 - ((fit.y[rows].numpy() - mean) / 0.5) ** 2).tolist()
    assert float(gradients(fit, gates)[1][3]) == pytest.approx(40 * np.mean(slopes), rel=1e-10)


@pytest.mark.parametrize("changed", ["train", "held_out"])
def test_weights_and_gates_see_data_of_their_own(changed):
    """Observations of the training folds move the weights alone, held-out ones the gates and the noise alone."""
    fit, gates = two_networks()
    fit = fit._replace(networks=fit.networks[:1], folds=fit.folds[:1])
    weights, judged = gradients(fit, gates)
    fit.y[getattr(fit.folds[0], changed)] += 3.0 * torch.arange(len(getattr(fit.folds[0], changed)))
    other_weights, other_judged = gradients(fit, gates)
    assert torch.equal(judged, other_judged) == (changed == "train")
    assert torch.equal(weights, other_weights) == (changed == "held_out")


# Backward elimination


def linear(coefficients, n=60):
    """Two folds, each with the network that knows the truth; inputs that are orthogonal within both."""
    p = len(coefficients)
    half = torch.linalg.qr(torch.randn(n // 2, p, dtype=torch.float64)).Q * (n / 2) ** 0.5
    x = torch.cat([half, -half])
    y = x @ coefficients
    networks = [nn.Linear(p, 1, bias=False).double() for _ in range(2)]
    for network in networks:
        network.weight.data = coefficients.clone()[None]
    rows = torch.arange(n)
    folds = [Fold(rows[30:], rows[:30]), Fold(rows[:30], rows[30:])]
    return CrossFit(networks, NormalResponse(y.numpy()).double(), x, y, folds)


def test_held_out_loss_is_of_observations_not_seen():
    """Orthogonal inputs: half the sum of the squared coefficients of closed inputs, and the constant."""
    torch.manual_seed(0)
    coefficients = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    fit = linear(coefficients)
    loss = held_out_losses(fit, torch.tensor([True, False, False])).mean()
    assert loss == pytest.approx(0.5 * (1 + 4) + 0.5 * np.log(2 * np.pi), rel=1e-10)
    fit.networks[0].weight.data.zero_()  # the network that has not seen the first thirty
    loss = held_out_losses(fit, torch.tensor([True, False, False])).mean()
    assert loss == pytest.approx(0.5 * (5 + 14) / 2 + 0.5 * np.log(2 * np.pi), rel=1e-10)
    fit.y[:30] *= 2.0
    loss = held_out_losses(fit, torch.ones(3)).mean()
    assert loss == pytest.approx(0.5 * 4 * 14 / 2 + 0.5 * np.log(2 * np.pi), rel=1e-10)


def test_elimination_goes_by_what_an_input_explains():
    torch.manual_seed(0)
    coefficients = torch.tensor([0.3, -2.0, 0.1, 1.0, 0.5], dtype=torch.float64)
    fit = linear(coefficients)
    assert eliminate(fit, n_features=2, alone=coefficients.abs()).tolist() == [3, 1, 4, 1, 2]
    fit.x[:, 1] = 0.0  # constant, although the networks set store by it
    assert eliminate(fit, n_features=2, alone=coefficients.abs()).tolist() == [2, 4, 3, 1, 1]


def test_elimination_of_equals_goes_by_what_they_tell_alone():
    """Copies of an input that the networks read alike; and an input whose loss is far worse goes last all the same."""
    torch.manual_seed(0)
    fit = linear(torch.tensor([1.0, 1.0, 1.0, 10.0], dtype=torch.float64))
    x = fit.x
    x[:, 1] = x[:, 2] = x[:, 0]
    y = 3 * x[:, 0] + 10 * x[:, 3] + 0.1 * torch.randn(len(x), dtype=torch.float64)
    for alone, ranks in (([3.0, 2.0, 1.0, 0.0], [1, 2, 3, 1]), ([1.0, 3.0, 2.0, 0.0], [3, 1, 2, 1])):
        assert eliminate(fit._replace(y=y), n_features=2, alone=torch.tensor(alone)).tolist() == ranks


def test_rounding_alone_orders_no_candidates():
    """Losses that are above others at every observation, by rounding and by more."""
    losses = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    losses = torch.stack([losses, losses + 1e-15, losses + 1e-6])
    assert _least_missed(losses, torch.tensor([3.0, 2.0, 1.0])).tolist() == [1, 0, 2]


def test_networks_learn_to_do_without_an_input():
    """Two copies of an input have weights of .6 each in a linear network, a convex problem that has converged.

    One is open with probability 1/2 and both are with 1/3, so that w / 2 + w / 3 = 1 / 2. Gates of a probability that
    inputs do not share would give 2/3, and no gates any weights that sum to 1.
    """
    torch.manual_seed(0)
    fit = linear(torch.tensor([1.0, 0.2], dtype=torch.float64))
    fit.x[:, 1] = fit.x[:, 0]
    fit = fit._replace(y=fit.x[:, 0].clone())
    train_for_subsets(fit, steps=1500)
    for network in fit.networks:
        torch.testing.assert_close(network.weight, torch.full_like(network.weight, 0.6), rtol=0, atol=0.03)


# What it selects


def test_selects_an_interaction_without_marginal_effects(fitted):
    selector, x, _ = fitted
    assert selector.get_support(indices=True).tolist() == [1, 4]
    assert selector.transform(x).shape == (300, 2)
    fresh, truth = product(seed=1)
    assert selector.score(fresh, truth) > 0.4  # without them 0
    assert selector.ranking_[[1, 4]].tolist() == [1, 1]
    assert sorted(selector.ranking_) == [1, 1, 2, 3, 4, 5, 6, 7]
    assert not hasattr(selector, "pip_")


@pytest.mark.slow
def test_number_of_features_is_found():
    x, y = product(seed=2)
    x[:, 7] = 3.0  # constant: of no use, and no trouble
    selector = NeuralFeatureSelector(max_steps=400, random_state=0).fit(x, y)
    assert selector.get_support(indices=True).tolist() == [1, 4]
    assert selector.pip_[7] < 1e-3


def test_unselected_features_have_no_effect(fitted):
    selector, x, _ = fitted
    other = x.copy()
    other[:, ~selector.get_support()] = 1e6 * np.random.default_rng(0).normal(size=(300, 6))
    assert np.array_equal(selector.predict(x), selector.predict(other))
    other[:, 4] += 1.0
    assert not np.allclose(selector.predict(x), selector.predict(other))


@pytest.mark.slow
def test_three_classes_with_names():
    x, y = load_wine(return_X_y=True)
    labels = np.array(["barolo", "grignolino", "barbera"])[y]
    selector = NeuralFeatureSelector(n_features=4, max_steps=300, random_state=0).fit(x, labels)
    assert selector.classes_.tolist() == ["barbera", "barolo", "grignolino"]
    assert selector.get_support().sum() == 4
    probabilities = selector.predict_proba(x)
    assert probabilities.shape == (178, 3)
    assert np.allclose(probabilities.sum(1), 1)
    assert (selector.classes_[probabilities.argmax(1)] == selector.predict(x)).all()
    assert selector.score(x, labels) > 0.6  # the most frequent class alone has 0.4


# Networks of the user


@pytest.mark.parametrize("as_function", [False, True])
def test_network_of_the_user_is_not_changed(as_function):
    net = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0))
    before = copy.deepcopy(net.state_dict())
    x, y = product(n=60)
    given = (lambda p: copy.deepcopy(net)) if as_function else net
    selector = NeuralFeatureSelector(given, n_features=3, **FAST).fit(x, y)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert selector.predict(x).dtype == np.float64


def test_two_classes_take_one_logit_or_two():
    """One is that of the second class."""
    x, y = product(n=60)
    for outputs in (1, 2):
        selector = NeuralFeatureSelector(nn.Linear(8, outputs), n_features=3, **FAST).fit(x, y > 0)
        assert selector.predict_proba(x).shape == (60, 2)
    response = ClassResponse(np.array(["a", "b"]))
    raw = torch.tensor([[-2.0], [1.0]])
    losses = response.losses(response.output(raw), torch.tensor([1, 1]))
    assert torch.allclose(losses, -torch.nn.functional.logsigmoid(raw[:, 0]))


# Conventions


def test_a_seed_gives_the_same_fit_and_nothing_else_changes():
    x, y = product(n=40)
    with nothing_else_changes():
        first, second = (NeuralFeatureSelector(n_features=2, **FAST).fit(x, y) for _ in range(2))
        NeuralFeatureSelector(n_features=2, max_steps=3).fit(x, y)
    assert np.array_equal(first.ranking_, second.ranking_)
    assert np.array_equal(first.predict(x), second.predict(x))


def test_pickles_clones_and_pipes(fitted):
    selector, x, y = fitted
    again = pickle.loads(pickle.dumps(selector))
    assert np.array_equal(again.predict(x), selector.predict(x))
    assert clone(selector).get_params() == selector.get_params()
    frame = pd.DataFrame(x, columns=[f"gene {j}" for j in range(8)])
    pipe = make_pipeline(StandardScaler().set_output(transform="pandas"), NeuralFeatureSelector(n_features=2, **FAST))
    pipe.fit(frame, y)
    names = pipe[-1].feature_names_in_[pipe[-1].get_support()]
    assert pipe.get_feature_names_out().tolist() == names.tolist()
