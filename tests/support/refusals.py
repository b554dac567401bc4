"""Errors and warnings that are expected."""

import jax
import pytest


def refused(said, error=ValueError):
    """Check that a block raises an error, whose text has this pattern."""
    return pytest.raises(error, match=said)


def check_refused(said, *calls, error=ValueError):
    """Check that each of the calls raises an error, whose text has this pattern."""
    for call in calls:
        with refused(said, error):
            call()


def warned(said):
    """Check that a block gives a warning, whose text has this pattern."""
    return pytest.warns(UserWarning, match=said)


def check_table(table, names, error=ValueError, given=None):
    """Check that the error of each typed line has every line of its text.

    Args:
      table: Texts by lines that are typed.
      names: What each name in a line means.
      error: Class of the errors. Default: ValueError.
      given: Shapes and dtypes by further names, for which each line is traced. Default: None, a
        line is not traced.
    """
    for typed, lines in table.items():
        said = "no error"
        try:
            if given is None:
                eval(typed, names)
            else:
                jax.eval_shape(lambda given, typed=typed: eval(typed, names, given), given)
        except error as raised:
            said = str(raised)
        for line in lines.strip().splitlines():
            assert line.strip() in said, (typed, said)
