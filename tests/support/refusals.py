"""Errors and warnings that are expected."""

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
