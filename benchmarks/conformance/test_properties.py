"""Each property of each adapter."""

import pytest
from replay import NotOffered


def test(make, has):
    """What fails has to fail twice."""
    try:
        has(make)
    except NotOffered as error:
        pytest.skip(f"not offered {error}")
    except Exception as first:
        try:
            has(make)
        except Exception:
            raise first from None
        raise AssertionError(f"once in two runs: {first}") from first
