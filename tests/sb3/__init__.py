import pytest

pytest.importorskip("stable_baselines3", reason="the sb3 extra is not installed")
