"""Buffers over several devices. JAX gets its number of devices when it starts, so that these tests
run in processes of their own."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxreplay._util import xla
from tests.conftest import ALL, SOAK

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.skipif(xla.shard_map is None, reason="this JAX has no jax.shard_map")


def environment(num_devices):
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={num_devices}"
    return os.environ | {
        "PYTHONPATH": str(HERE.parent.parent),
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
    }


def run(*command):
    """Run Python with 8 devices, and return what it prints."""
    result = subprocess.run(
        [sys.executable, *command],
        env=environment(8),
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return result.stdout


def test_on_eight_devices():
    files = [str(HERE / f"{name}.py") for name in ("shards", "draws", "programs", "saved")]
    run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files)


def started(script, num, num_devices, *arguments, output=subprocess.DEVNULL):
    """Start a script in several processes, which get their number, which they are, a port, and
    arguments of each. They are killed after some minutes, should they wait for each other."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / script, *map(str, (num, which, port, *own))],
            cwd=HERE.parent.parent,
            env=environment(num_devices // num),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        for which, own in enumerate(zip(*arguments, strict=True))
    ]
    timer = threading.Timer(480, lambda: [process.kill() for process in processes])
    timer.daemon = True
    timer.start()
    return processes


def finished(processes):
    for process in processes:
        _, error = process.communicate()
        assert process.returncode == 0, error[-3000:]


@pytest.mark.parametrize("num", [2, *[4] * ALL])
def test_several_processes_equal_one_to_the_bit(num, tmp_path):
    results = []
    for count in (1, num):
        files = [tmp_path / f"{count} {which}" for which in range(count)]
        finished(started("processes.py", count, 4, files))
        found = {}
        for file in files:
            for name, digest in json.loads(file.read_text()).items():
                assert found.setdefault(name, digest) == digest  # what all have is equal
        results.append(found)
    assert len(results[0]) > 60
    assert results[0] == results[1]


@pytest.mark.skipif(not ALL, reason="in `make test-all`")
def test_actors_of_several_processes_fill_one_buffer():
    finished(started("fed.py", 2, 4, [3, 3]))


def test_an_error_in_one_process_is_raised_in_all(tmp_path):
    pytest.importorskip("jaxreplay.checkpoint", reason="an extra is not installed")
    finished(started("errors.py", 2, 4, [tmp_path] * 2, [3 * ALL] * 2))


def test_a_kill_of_any_process_leaves_the_checkpoint_before(tmp_path):
    """Each run goes on from what is left, with another number of devices and processes."""
    checkpoint = pytest.importorskip("jaxreplay.checkpoint", reason="an extra is not installed")
    run = pytest.importorskip("tests.support.checkpointed_run")
    replay = run.items(capacity=512, num_envs=8)
    r = np.random.default_rng(0)
    for number in range(50 if SOAK else 2):
        num, num_devices = [(2, 4), (1, 2), (2, 8), (4, 4)][number % 4]
        given = [tmp_path / "run"] * num
        processes = started("killed.py", num, num_devices, given, output=subprocess.PIPE)
        lines, left = [], int(r.integers(1, 4))
        while left and (line := processes[0].stdout.readline()):
            lines.append(line)
            left -= line.startswith("saved")
        time.sleep(r.random() * 0.2)
        for process in r.permutation(processes):
            process.kill()
            time.sleep(r.choice([0, 0.2]))
        for process in processes:
            output, error = process.communicate()
            lines += output.splitlines()
            assert not left, error[-3000:]
        saved = [int(line.split()[1]) for line in lines if line.startswith("saved")]
        reader = checkpoint.Checkpointer(tmp_path / "run", replay)
        state = reader.restore(run.EXAMPLE)
        assert reader.step >= max(saved)
        assert run.numbers(replay, state) == run.expected(replay, reader.step)
        assert not any(one.problems for one in reader.verify())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "iterations", "text"),
    [
        ("sharded_dqn", 100, "8 devices, seed 0: mean episode length"),
        ("multihost_dqn", 40, "4 devices of 2 processes: mean episode length"),
    ],
)
def test_the_examples_run(name, iterations, text):
    pytest.importorskip("gymnax", reason="the examples extra is not installed")
    assert text in run(f"examples/{name}.py", "--iterations", str(iterations))
