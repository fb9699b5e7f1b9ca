"""Names of earlier versions warn, work, and say what replaces them."""

import pytest

from pyro_l0.retired import renamed_arguments, retired_names


@renamed_arguments(example_input="example")
def shape(example, times=1):
    """A function whose argument had another name."""
    return example, times


def test_an_old_argument_warns_and_works():
    with pytest.warns(FutureWarning, match=r"example_input of shape is deprecated. Use example\."):
        assert shape(example_input=3, times=2) == (3, 2)


def test_an_argument_under_both_names_is_refused():
    with pytest.raises(TypeError, match="Expected example once, but shape got example_input"):
        shape(example=3, example_input=3)


def test_an_old_name_warns_and_works():
    find = retired_names("somewhere", {"old": "math.pi"})
    with pytest.warns(FutureWarning, match=r"somewhere.old is deprecated. Use math.pi\."):
        assert find("old") == 3.141592653589793
    with pytest.raises(AttributeError, match="module 'somewhere' has no attribute 'other'"):
        find("other")
