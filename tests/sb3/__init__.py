"""Tests of the buffers for Stable-Baselines3, skipped where `jaxreplay[sb3]` is not installed."""

import pytest

pytest.importorskip("stable_baselines3", reason="the sb3 extra is not installed")
