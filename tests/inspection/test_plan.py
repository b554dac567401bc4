"""The plan: its total is what `init` allocates, and its command line reports bad input in one
line."""

import dataclasses
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.__main__ import main
from tests.support.buffers import CATALOG

ROBOT = (
    "--obs image:84x84x3:uint8 --obs vector:31:float32 --action 8:float32 --capacity 400000 "
    "--num-envs 16 --n-step 3 --prioritized"
)


@pytest.mark.parametrize("case", CATALOG, ids=lambda case: case.name)
def test_the_total_is_what_init_allocates(case):
    buffer = case.replay()
    made = jr.plan(buffer, case.example())
    state = buffer.init(case.example())
    assert made.memory.total == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    obs = (
        0
        if case.is_items
        else sum(leaf.nbytes for leaf in jax.tree.leaves(state.streams.steps.obs))
    )
    assert made.naive == made.memory.total + obs
    assert made.fits


@pytest.mark.parametrize("min_size", [1, 30])
def test_the_largest_capacity_is_the_largest(monkeypatch, min_size):
    buffer = jr.prioritized(
        capacity=64, num_envs=4, batch_size=8, autoreset="next_step", min_size=min_size
    )
    example = {
        "obs": np.zeros(100),
        "action": 0,
        "reward": 0.0,
        "terminated": False,
        "truncated": False,
    }
    for free in (0, 1000, 10_000, 1_000_003):
        monkeypatch.setattr("jaxreplay.buffers.memory.free_bytes", lambda free=free: free)
        made = jr.plan(buffer, example)
        takes = lambda capacity: (
            dataclasses.replace(buffer, capacity=capacity).memory(example).total
        )
        least = max(8, -(-min_size // 4) * 4)
        assert takes(max(made.largest_capacity + 4, least)) > free
        assert not made.largest_capacity or takes(made.largest_capacity) <= free
        assert made.fits == (made.memory.total <= free)
    monkeypatch.setattr("jaxreplay.buffers.memory.free_bytes", lambda: None)
    made = jr.plan(buffer, example)
    assert (made.fits, made.largest_capacity) == (None, None)
    assert "Whether it fits is not known." in str(made)


def test_the_command_says_what_python_says(capsys):
    main(["plan", *ROBOT.split()])
    text = capsys.readouterr().out
    main(["plan", *ROBOT.split(), "--json"])
    found = json.loads(capsys.readouterr().out)
    buffer = jr.prioritized(
        capacity=400_000, num_envs=16, batch_size=1, n_step=3, autoreset="next_step"
    )
    obs = {"image": np.zeros((84, 84, 3), np.uint8), "vector": np.zeros(31, np.float32)}
    example = {
        "obs": obs,
        "action": np.zeros(8, np.float32),
        "reward": 0.0,
        "terminated": False,
        "truncated": False,
    }
    assert found["total"] == buffer.memory(example).total
    assert found["memory"]["leaves"] == buffer.memory(example).leaves
    assert found["naive"] == found["total"] + 400_000 * (84 * 84 * 3 + 31 * 4)
    assert f"{found['total']:,}" in text
    assert "streams.steps.obs.image" in text
    main(["plan", "--env", "CartPole-v1", "--capacity", "1000", "--json"])
    assert json.loads(capsys.readouterr().out)["memory"]["leaves"]["streams.steps.obs"] == 16_000
    main(["plan", "--obs", "uint8", "--action", "int32", "--capacity", "1000", "--json"])
    assert json.loads(capsys.readouterr().out)["memory"]["leaves"]["streams.steps.action"] == 4_000


def test_each_device_of_a_sharded_buffer_holds_a_part(capsys, monkeypatch):
    sizes = {"capacity": 4096, "num_envs": 16, "batch_size": 32}
    buffer, example = jr.items(**sizes), np.zeros(3, np.float32)
    monkeypatch.setattr("jaxreplay.buffers.memory.free_bytes", lambda: 100_000)
    made, one = jr.plan(buffer, example, devices=8), jr.plan(buffer, example)
    part = jr.items(capacity=512, num_envs=2, batch_size=4)
    assert made.memory == part.memory(example)
    assert "each of 8 devices holds" in str(made)
    assert "each of" not in str(one)
    assert made.largest_capacity == 8 * jr.plan(part, example).largest_capacity
    sharded = jr.plan(jr.sharded(buffer, jax.make_mesh((1,), ("data",))), example)
    assert (sharded.memory, sharded.num_devices) == (one.memory, 1)
    with pytest.raises(ValueError, match="plan: num_envs=16 cannot be divided among 3 devices"):
        jr.plan(buffer, example, devices=3)
    with pytest.raises(ValueError, match="devices must be an int of at least 1, got 0"):
        jr.plan(buffer, example, devices=0)
    main(["plan", *ROBOT.split(), "--devices", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["num_devices"] == 4
    main(["plan", *ROBOT.split(), "--json"])
    assert 3.9 < json.loads(capsys.readouterr().out)["total"] / found["total"] < 4.1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "the following arguments are required: command"),
        ("plan --obs uint8", "the following arguments are required: --capacity"),
        ("plan --capacity 100", "pass --obs for each leaf of the observation, or --env"),
        ("plan --capacity many --obs uint8", "argument --capacity: invalid int value: 'many'"),
        (
            "plan --capacity 100 --obs image:84y84:uint8",
            r"--obs: 'image:84y84:uint8' is not \[NAME:\]\[SHAPE:\]DTYPE",
        ),
        (
            "plan --capacity 100 --obs 3:number",
            r"--obs: '3:number' is not \[NAME:\]\[SHAPE:\]DTYPE",
        ),
        ("plan --capacity 100 --obs 4:str", "--obs: '4:str' is not "),
        ("plan --capacity 100 --obs=-4:float32", "--obs: '-4:float32' is not "),
        ("plan --capacity 100 --obs a:b:float32", "--obs: 'a:b:float32' is not "),
        (
            "plan --capacity 100 --obs uint8 --action a:2:float32",
            "--action: pass one leaf without a name, got 'a:2:float32'",
        ),
        (
            "plan --capacity 100 --obs uint8 --env CartPole-v1",
            "--env: the env's spaces are used; leave out --obs and --action",
        ),
        (
            "plan --capacity 100 --obs uint8 --obs float32",
            "several leaves need different names",
        ),
        (
            "plan --capacity 100 --obs uint8 --num-envs 3",
            "capacity=100 rows do not divide into num_envs=3 .* 99 and 102",
        ),
        (
            "plan --capacity 100 --obs uint8 --n-step 0",
            "n_step must be an int of at least 1, got 0",
        ),
        ("plan --capacity 100 --env Nowhere-v0", "--env: .*Nowhere"),
    ],
)
def test_bad_input_is_answered_in_one_line(arguments, text, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert re.search(text, error), error


@pytest.mark.parametrize("shape", ["1000000x1000000x1000000x1000000", "99999999999999999999"])
def test_sizes_beyond_64_bits_are_counted_exactly(shape, capsys):
    main(["plan", "--obs", f"{shape}:uint8", "--capacity", "100", "--json"])
    found = json.loads(capsys.readouterr().out)
    size = 1
    for one in shape.split("x"):
        size *= int(one)
    assert found["memory"]["leaves"]["streams.steps.obs"] == 100 * size
    assert found["fits"] is False
    assert found["largest_capacity"] == 0


def test_a_rollout_is_refused():
    with pytest.raises(ValueError, match="plan: expected a ReplayBuffer, got Rollout"):
        jr.plan(jr.rollout(length=2, num_envs=1, autoreset="next_step"), 0.0)


def test_it_runs_as_a_module():
    command = [
        sys.executable,
        "-m",
        "jaxreplay",
        "plan",
        "--obs",
        "4:float32",
        "--action",
        "int32",
        "--capacity",
        "1000",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "It fits." in done.stdout
