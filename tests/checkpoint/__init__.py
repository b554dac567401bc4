import pytest

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")
