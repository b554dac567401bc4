"""`Replay` objects, and steps for them that count up."""

import contextlib
import os
import subprocess
import sys

import jax
import numpy as np

import jaxreplay as jr
from jaxreplay.host import staging
from tests.conftest import ALL
from tests.support.sampling import assert_same
from tests.support.steps import stacked

NUM_ENVS = 3
# Options of `make`, shared by the tests so that they share programs.
PRIORITIZED = {"sampler": jr.Prioritized(), "allow_mask": True, "allow_write": True}
_OF_REPLAY = ["example", "seed", "framework", "device", "prefetch", "samples_per_insert", "timeout"]


def make(num_envs=NUM_ENVS, capacity=60, batch_size=8, *, steps=0, **options):
    """Return a replay, with the steps 0, 1, ... added."""
    own = {name: options.pop(name) for name in _OF_REPLAY if name in options}
    options = {"autoreset": "next_step", "sampler": jr.Uniform(), **options}
    sizes = {"capacity": capacity, "num_envs": num_envs, "batch_size": batch_size}
    replay = jr.Replay(jr.transitions(**sizes, **options), **own)
    for t in range(steps):
        replay.add(step(t, (num_envs,)))
    return replay


def step(t, axes=(NUM_ENVS,)):
    """Return a step of every env, or of one env if there are no axes."""
    env = np.indices(axes)[-1] if axes else 0
    reward = np.asarray(t + env / 8, np.float32)
    return {
        "obs": {"x": np.stack([reward, -reward], axis=-1), "n": np.full(axes, t, np.int32)},
        "action": np.full(axes, t % 3, np.int32),
        "reward": reward,
        "terminated": np.zeros(axes, bool),
        "truncated": np.full(axes, t % 5 == 4),
    }


EXAMPLE = step(0, ())


def have_few_lengths(monkeypatch, most=3):
    """Have few steps wait, and blocks of 1 and 2 added: each length has programs of its own, which
    `make test-all` compiles."""
    if not ALL:
        monkeypatch.setattr(staging, "_MOST_STEPS", most)
        monkeypatch.setattr(staging, "_OWN_LENGTHS", 0)


def have_one_length(monkeypatch):
    """Have one step wait."""
    have_few_lengths(monkeypatch, 1)


def block(start, length):
    return stacked(map(step, range(start, start + length)))


def on_device(given):
    """Return a step on the device, which is added at once."""
    return jax.device_put(jax.tree.map(np.copy, given))


def rows_of(replay):
    """Return all stored leaves."""
    return jax.device_get(jax.tree.leaves(replay.state))


def check_same(a, b):
    assert_same(rows_of(a), rows_of(b))


def output_of(code, *arguments, **options):
    """Return what a program prints in a process of its own."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def entered_by(call):
    """Return the code of each function of the package that a call enters."""
    entered, before = set(), sys.getprofile()

    def enters(frame, event, _):
        code = frame.f_code
        is_ours = code.co_filename.startswith(os.path.dirname(jr.__file__))
        if event == "call" and is_ours and code.co_name[0] != "<":
            entered.add(code)

    sys.setprofile(enters)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


@contextlib.contextmanager
def unchanged(replay):
    """Check that a block leaves the rows as they are."""
    before = rows_of(replay)
    yield
    assert_same(rows_of(replay), before)


def damaged(path):
    """Damage a saved file, and return a function that repairs it."""
    file = min((path / "rows").iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return lambda: file.write_bytes(whole)
