"""Shared by the tests of several folders: errors and warnings that are expected, and parts of
trees."""

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


def nth(tree, place):
    """Return `leaf[place]` of each leaf."""
    return jax.tree.map(lambda leaf: leaf[place], tree)
