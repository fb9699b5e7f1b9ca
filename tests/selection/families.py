"""Problems and designs of families by name."""

from pyro_l0.selection.design import joint
from pyro_l0.selection.design.draft import Draft
from pyro_l0.selection.families import family_of
from pyro_l0.selection.problem import Problem


def named_problem(family, x, y, *rest, **options):
    return Problem(family_of(family, y), x, y, *rest, **options)


def design_of(x, y, family="gaussian", **options):
    return joint.design_of(Draft(family=family_of(family, y), x=x, y=y, **options))
