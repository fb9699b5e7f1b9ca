"""Problems and designs of families by name."""

from pyro_l0.selection.design import make_design
from pyro_l0.selection.families import family_of
from pyro_l0.selection.problem import Problem


def named_problem(family, x, y, *rest, **options):
    return Problem(family_of(family, y), x, y, *rest, **options)


def design_of(x, y, family="gaussian", **options):
    return make_design(x, y, family_of(family, y), **options)
