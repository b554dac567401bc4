"""Buffers over several devices. JAX gets its number of devices when it starts, so that these tests
run in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxreplay._util import xla

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("name", ["shards", "draws", "programs"])
def test_on_eight_devices(name):
    if xla.shard_map is None:
        pytest.skip("this JAX has no jax.shard_map")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"{name}.py")],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
