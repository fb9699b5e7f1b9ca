"""Features in groups, and categorical columns: one gate for all coefficients of a group."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.feature_selection import SelectFromModel
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabRegressor
from tests.selection.fitted import ESTIMATORS


def grouped(groups=6, n=80, seed=0, strength=0.6):
    """Groups of one to three correlated features, of which groups 0 and 3 have effects, in mixed order."""
    rng = np.random.default_rng(seed)
    of = rng.permutation(np.repeat(np.arange(groups), [1 + g % 3 for g in range(groups)]))
    x = rng.normal(size=(n, len(of))) + 0.7 * rng.normal(size=(n, groups))[:, of]
    beta = strength * np.isin(of, (0, 3)) * rng.choice([-1, 1], len(of))
    return of, x, x @ beta, rng


def observed(kind, eta, rng):
    if kind is SpikeSlabRegressor:
        return eta + rng.normal(size=len(eta))
    if kind is SpikeSlabClassifier:
        return (eta + rng.logistic(size=len(eta)) > 0).astype(int)
    return rng.poisson(np.exp(0.5 * eta))


def shops(n=200, seed=1):
    """A frame whose city has four levels that differ in y; its weekday, of no effect, has three."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "size": rng.normal(size=n),
            "city": pd.Categorical(rng.choice(list("abcd"), n), categories=list("abcdz")),
            "age": rng.normal(size=n),
            "day": pd.Categorical(rng.choice([10, 20, 30], n)),
        }
    )
    effect = frame["city"].astype(str).map({"a": 1.0, "b": -1.0, "c": 0.5, "d": 0.0}).to_numpy()
    return frame, frame["size"].to_numpy() + effect + rng.normal(size=n)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_what_is_said_of_groups(kind):
    """Selection, support, draws, summary, credible sets, arviz, copies, pickles and pipelines."""
    of, x, eta, rng = grouped(strength=1.5)
    y = observed(kind, eta, rng)
    model = kind(groups=of, slab_scale=1.0, method="enumerate", random_state=0).fit(x, y)
    assert model.pip_.shape == (6,)
    assert model.select().tolist() == [0, 3]
    np.testing.assert_array_equal(model.get_support(), np.isin(of, (0, 3)))
    assert model.transform(x).shape[1] == np.isin(of, (0, 3)).sum()
    draws = model.sample(50)
    np.testing.assert_array_equal(draws["coef"].reshape(50, -1) != 0, draws["gates"][:, of])
    table = model.summary()
    np.testing.assert_array_equal(table["group"], of)
    np.testing.assert_array_equal(table["PIP"], model.pip_[of])
    assert {s.names for s in model.credible_sets_} == {("group 0",), ("group 3",)}
    found = model.to_arviz()
    assert found["posterior"]["z"].dims == ("chain", "draw", "group")
    assert found["posterior"]["coef"].shape[2:] == (len(of),) if kind is not SpikeSlabClassifier else (1, len(of))
    assert found["constant_data"]["P(z != 0)"].shape == (6,)
    np.testing.assert_array_equal(clone(model).groups, of)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(x), model.predict(x))
    piped = make_pipeline(StandardScaler(), kind(groups=of, slab_scale=1.0, method="enumerate", random_state=0))
    assert cross_val_score(piped, x, y, cv=2, error_score="raise").shape == (2,)


def test_three_classes():
    """A group's gate opens the coefficients of all its features for all classes."""
    of, x, eta, rng = grouped(4, 150, strength=1.5)
    y = np.digitize(eta + rng.normal(size=150), [-1, 1])
    model = SpikeSlabClassifier(groups=of, slab_scale=1.0, random_state=0).fit(x, y)
    draws = model.sample(20)
    np.testing.assert_array_equal((draws["coef"] != 0).all(1), draws["gates"][:, of])
    assert len(model.summary()) == 3 * len(of)


# Categorical columns


def test_a_factor_has_one_gate():
    """And a coefficient for each level that occurs; features are the columns of the frame."""
    frame, y = shops()
    model = SpikeSlabRegressor(random_state=0).fit(frame, y)
    assert model.n_features_in_ == 4
    assert model.pip_.shape == (4,)
    assert model.select().tolist() == [0, 1]
    names = ["size", "city[a]", "city[b]", "city[c]", "city[d]", "age", "day[10]", "day[20]", "day[30]"]
    assert model.summary().index.tolist() == names
    coefficients = dict(zip(names, model.coef_, strict=True))
    assert coefficients["city[a]"] - coefficients["city[b]"] == pytest.approx(2.0, abs=0.6)
    assert [s.names for s in model.credible_sets_] == [("size",), ("city",)]
    assert np.corrcoef(model.predict(frame), y)[0, 1] > 0.7
    found = model.to_arviz()
    assert found["posterior"]["coef"].coords["feature"].values.tolist() == names
    assert found["posterior"]["z"].coords["group"].values.tolist() == ["size", "city", "age", "day"]
    assert cross_val_score(SpikeSlabRegressor(random_state=0), frame, y, cv=3, error_score="raise").mean() > 0.4


@pytest.mark.parametrize("groups", [None, [0, 1, 2, 0]])
def test_a_selected_factor_is_transformed_to_its_dummies(groups):
    """Numbers stay as they are; a level that new rows lack keeps its column, and rows without a factor have zeros."""
    frame, y = shops()
    model = SpikeSlabRegressor(groups=groups, random_state=0).fit(frame, y)
    names = ["size", "city[a]", "city[b]", "city[c]", "city[d]", "day[10]", "day[20]", "day[30]"][: 8 if groups else 5]
    assert model.get_feature_names_out().tolist() == names
    if groups:  # which may hold factors and numbers
        assert model.pip_.shape == (3,)
        assert model.summary()["group"].tolist() == [0, 1, 1, 1, 1, 2, 0, 0, 0]
    with pytest.raises(ValueError, match="input_features is not equal to feature_names_in_"):
        model.get_feature_names_out(["a", "b", "c", "d"])
    some = frame[frame["city"] != "a"].iloc[:9]
    found = model.transform(some)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found[:, 0], some["size"])
    for j, name in enumerate(names[1:], 1):
        column, level = name[:-1].split("[")
        np.testing.assert_array_equal(found[:, j], some[column].astype(str) == level)
    table = model.set_output(transform="pandas").transform(some)
    assert (table.columns.tolist(), table.index.tolist()) == (names, some.index.tolist())
    np.testing.assert_array_equal(table, found)


def test_a_regression_behind_takes_a_factor():
    """In a pipeline, in a search over it, and where no feature is selected."""
    frame, y = shops()
    pipe = make_pipeline(SpikeSlabRegressor(random_state=0), LinearRegression())
    assert pipe.fit(frame, y)[-1].n_features_in_ == 5
    assert pipe.score(frame, y) > 0.5
    search = GridSearchCV(pipe, {"spikeslabregressor__expected_size": [1, 2]}, cv=2, error_score="raise").fit(frame, y)
    assert search.best_score_ > 0.4
    model = SpikeSlabRegressor(random_state=0).fit(frame, np.random.default_rng(0).normal(size=len(y)))
    with pytest.warns(UserWarning, match="No features were selected"):
        assert model.set_output(transform="pandas").transform(frame).shape == (len(y), 0)


def test_by_inclusion_probability_in_select_from_model():
    """It takes columns as they are, so the frame has numbers alone."""
    frame, y = shops()
    numbers = frame[["size", "age"]]
    chosen = SelectFromModel(SpikeSlabRegressor(random_state=0), importance_getter="pip_", threshold=0.5)
    assert chosen.fit(numbers, y).get_feature_names_out().tolist() == ["size"]
    assert make_pipeline(chosen, LinearRegression()).fit(numbers, y)[-1].n_features_in_ == 1


def test_order_and_names_of_levels_do_not_matter():
    """No level is left out, so that none is the reference."""
    frame, y = shops()
    other = frame.assign(city=frame["city"].cat.rename_categories(list("dcbae")))
    first, second = (SpikeSlabRegressor(random_state=0).fit(data, y) for data in (frame, other))
    np.testing.assert_allclose(first.pip_, second.pip_, atol=1e-8)


@pytest.mark.parametrize("intercept", [True, False])
def test_two_levels_are_a_column_of_zeros_and_ones(intercept):
    """The same inclusion probabilities and the same evidence, as slabs are wide for a factor as a whole."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"a": rng.normal(size=90), "b": (rng.random(90) < 0.2).astype(float)})
    y = frame["a"].to_numpy() + 0.7 * frame["b"].to_numpy() + rng.normal(size=90)
    factor = frame.assign(b=pd.Categorical(frame["b"]))
    first, second = (SpikeSlabRegressor(slab_scale=0.5, random_state=0).fit(data, y) for data in (frame, factor))
    np.testing.assert_allclose(first.pip_, second.pip_, atol=1e-8)
    assert first.log_evidence_ == pytest.approx(second.log_evidence_, abs=1e-7)
    np.testing.assert_allclose(first.predict(frame), second.predict(factor), atol=1e-7)
    assert np.isfinite(SpikeSlabRegressor(fit_intercept=intercept, random_state=0).fit(factor, y).pip_).all()


def test_other_levels_and_other_containers_are_refused():
    """An unseen level, a missing one, and an array where the fit had a frame."""
    frame, y = shops()
    model = SpikeSlabRegressor(random_state=0).fit(frame, y)
    new = frame.iloc[:3].copy()
    np.testing.assert_array_equal(model.predict(new.assign(city=list("abc"))).shape, (3,))
    with pytest.raises(ValueError, match=r"Expected the levels \['a', 'b', 'c', 'd'\] in 'city', but got 'z'"):
        model.predict(new.assign(city=["a", "z", "b"]))
    with pytest.raises(TypeError, match="Expected a DataFrame, as some features are categorical, but got ndarray"):
        model.predict(new.to_numpy())
    with pytest.raises(ValueError, match="there are NaN in 'city'"):
        SpikeSlabRegressor().fit(frame.assign(city=frame["city"].where(frame["city"] != "a")), y)


@pytest.mark.parametrize("kind", [object, "string"])
def test_text_is_refused(kind):
    """Until it is made categorical, as the message says; also where some of it is missing."""
    frame, y = shops()
    text = frame.assign(city=frame["city"].astype(kind).where(frame["city"] != "a", None))
    with pytest.raises(ValueError, match=r"\['city'\] hold text; pass X.astype\({'city': 'category'}\)"):
        SpikeSlabRegressor().fit(text, y)
    SpikeSlabRegressor(random_state=0).fit(frame.astype({"city": kind}).astype({"city": "category"}), y)


def test_sparse_columns_of_a_frame():
    """As dense ones, without scikit-learn's warning, in fits and predictions."""
    frame, y = shops()
    sparse = frame.assign(age=pd.arrays.SparseArray(frame["age"].where(frame["age"] > 0, 0.0), fill_value=0.0))
    dense = sparse.assign(age=sparse["age"].sparse.to_dense())
    first, second = (SpikeSlabRegressor(random_state=0).fit(data, y) for data in (dense, sparse))
    np.testing.assert_array_equal(first.pip_, second.pip_)
    np.testing.assert_array_equal(first.predict(dense), second.predict(sparse))
    assert isinstance(sparse.dtypes["age"], pd.SparseDtype)


def test_frames_of_polars():
    """Categorical columns as those of pandas, and text is refused in the same words."""
    pl = pytest.importorskip("polars")
    frame, y = shops()
    text = pl.DataFrame({name: column.to_numpy() for name, column in frame.astype({"city": object}).items()})
    other = text.with_columns(pl.col("city").cast(pl.Enum(list("dbcaz"))), pl.col("day").cast(pl.String))
    other = other.with_columns(pl.col("day").cast(pl.Categorical))
    first, second = (SpikeSlabRegressor(random_state=0).fit(data, y) for data in (frame, other))
    np.testing.assert_allclose(first.pip_, second.pip_, atol=1e-12)
    np.testing.assert_allclose(first.predict(frame), second.predict(other), atol=1e-12)
    assert second.summary().index.tolist() == first.summary().index.tolist()
    table = second.set_output(transform="polars").transform(other)
    assert isinstance(table, pl.DataFrame)
    np.testing.assert_array_equal(table.to_numpy(), first.transform(frame))
    assert table.columns == first.get_feature_names_out().tolist()
    with pytest.raises(ValueError, match=r"\['city'\] hold text; .* cast them to pl.Categorical in polars"):
        SpikeSlabRegressor().fit(text, y)
