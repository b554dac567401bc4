"""Each property of each adapter."""

import pytest
from replay import NotOffered


def test(make, has):
    try:
        has(make)
    except NotOffered as error:
        pytest.skip(f"not offered {error}")
