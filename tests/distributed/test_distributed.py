"""Buffers over several devices. JAX gets its number of devices when it starts, so that these tests
run in processes of their own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from jaxreplay._util import xla

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.skipif(xla.shard_map is None, reason="this JAX has no jax.shard_map")


def environment(num_devices):
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={num_devices}"
    path = {"PYTHONPATH": str(HERE.parent.parent)}
    return os.environ | path | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("name", ["shards", "draws", "programs", "saved"])
def test_on_eight_devices(name):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"{name}.py")],
        env=environment(8),
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]


@pytest.mark.parametrize("num", [2, 4])
def test_several_processes_equal_one_to_the_bit(num, tmp_path):
    results = []
    for count in (1, num):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        files = [tmp_path / f"{count} {which}" for which in range(count)]
        processes = [
            subprocess.Popen(
                [sys.executable, HERE / "processes.py", *map(str, (count, which, port, file))],
                cwd=HERE.parent.parent,
                env=environment(4 // count),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for which, file in enumerate(files)
        ]
        for process in processes:
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error[-3000:]
        found = {}
        for file in files:
            for name, digest in json.loads(file.read_text()).items():
                assert found.setdefault(name, digest) == digest  # what all have is equal
        results.append(found)
    assert len(results[0]) > 100
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("name", "iterations", "text"),
    [
        ("sharded_dqn", 100, "8 devices, seed 0: mean episode length"),
        ("multihost_dqn", 40, "4 devices of 2 processes: mean episode length"),
    ],
)
def test_the_examples_run(name, iterations, text):
    pytest.importorskip("gymnax", reason="the examples extra is not installed")
    result = subprocess.run(
        [sys.executable, f"examples/{name}.py", "--iterations", str(iterations)],
        env=environment(8),
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert text in result.stdout
