"""Tests of checkpoints, skipped where `jaxreplay[checkpoint]` is not installed."""

import pytest

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")
