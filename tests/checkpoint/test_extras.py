"""Tests of one checkpoint of several things: a buffer and its agent, the members of a mixture, and
what a `Replay` saves."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer
from tests.checkpoint.runs import BUFFER, EXAMPLE, check, files_of, replay_of, state_of
from tests.support.buffers import bits
from tests.support.checkpointed_run import added, begun, items, step
from tests.support.refusals import refused

Adam = collections.namedtuple("Adam", ("count", "mu"))


def agent(seed=0):
    """Return what an agent may have: arrays, keys and numbers in several kinds of containers."""
    key = jax.random.key(seed)
    kernel = jax.random.normal(key, (300, 7)).astype(jnp.bfloat16)
    return {
        "params": {"kernel": kernel, "a/b.c": jnp.zeros((0, 3)), "": jnp.int32(seed)},
        "optimizer": (Adam(np.uint8(seed), [np.arange(seed, seed + 5.0)]), None),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "env_steps": seed + 3,
        "epsilon": 0.5 + seed,
        "is_warm": seed % 2 > 0,
        "complex": jnp.complex64(1 + 2j),
        "pickle": bytes(range(seed, 2 * seed)),
    }


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(one) is type(other) or isinstance(other, np.generic)
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            assert one.dtype == other.dtype
            one, other = map(jax.random.key_data, (one, other))
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("chunk_bytes", [800, 2**20])  # the kernel is in several files, or in one
def test_the_agent_is_saved_with_its_replay(chunk_bytes, tmp_path):
    checkpointer = Checkpointer(tmp_path, BUFFER, chunk_bytes=chunk_bytes)
    for number in range(3):
        checkpointer.save(state_of(5 + number), number, extras=agent(number))
    shapes = jax.eval_shape(lambda: agent(0)["params"])
    for number in (2, 0):
        state, found = checkpointer.restore(EXAMPLE, number, extras=agent(7))
        check(state, 5 + number)
        same(found, agent(number))
        check(checkpointer.restore(EXAMPLE, number), 5 + number)  # the extras are not read
        like = agent(7) | {"params": shapes, "keys": jax.eval_shape(lambda: agent(0)["keys"])}
        same(checkpointer.restore(EXAMPLE, number, extras=like)[1], agent(number))
    assert checkpointer.verify()[0].problems == []


def test_extras_that_differ_are_named(tmp_path):
    checkpointer = Checkpointer(tmp_path, BUFFER)
    checkpointer.save(state_of(5), extras={"a": jnp.zeros(3), "b": 1})
    for like, said in (
        ({"a": jnp.zeros(4), "b": 1}, r"extras.a: stored float32\[3\], expected float32\[4\]"),
        ({"a": b"", "b": 1}, r"extras.a: stored float32\[3\], expected uint8\[any number\]"),
        ({"a": jnp.zeros(3)}, r"extras.b: stored int64\[\], expected nothing"),
        ({"a": jnp.zeros(3), "b": 1, "c": 2.0}, r"extras.c: stored nothing, expected float64"),
        (jnp.zeros(3), r"extras: stored nothing, expected float32"),
    ):
        with refused(f"has other extras:(.|\n)*{said}(.|\n)*bytes of torch.save") as error:
            checkpointer.restore(EXAMPLE, extras=like)
        assert "this buffer is" not in str(error.value)
    for extras, said in (({"f": print}, "extras.f: expected an array"), ("x", "extras: expected")):
        with refused(f"save: {said}"):
            checkpointer.save(state_of(6), extras=extras)
    with refused("two leaves are named extras.a.b"):
        checkpointer.save(state_of(6), extras={"a": {"b": 1}, "a.b": 2})
    assert checkpointer.all_steps() == [0]


def test_extras_go_where_those_of_the_example_are(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    checkpoint.save(tmp_path, BUFFER, state_of(5), extras=jnp.arange(4))
    shape = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=where)
    for like in (shape, jax.device_put(jnp.zeros(4, jnp.int32), where)):
        found = checkpoint.restore(tmp_path, BUFFER, EXAMPLE, extras=like)[1]
        assert found.sharding == where
        assert found.tolist() == [0, 1, 2, 3]


# Mixtures.

SMALL = items(capacity=8, num_envs=1, sampler=jr.Prioritized())
MIXTURE = jr.mix(demos=(SMALL, 2), online=(BUFFER, 3))


def test_a_mixture_is_one_checkpoint(tmp_path):
    states = {"demos": begun(SMALL, 20), "online": state_of(5)}
    checkpointer = Checkpointer(tmp_path, MIXTURE, max_to_keep=2, chunk_bytes=2000)
    checkpointer.save(states, 1, extras={"x": 3})
    before = {*files_of(tmp_path / "rows")}
    states["online"] = added(BUFFER, states["online"], 5, 3)
    checkpointer.save(states, 2, extras={"x": 4})
    assert before & {*files_of(tmp_path / "rows")}  # the demonstrations are not written again
    for example in (EXAMPLE, {"demos": EXAMPLE, "online": EXAMPLE}):
        found, extras = Checkpointer(tmp_path, MIXTURE).restore(example, extras={"x": 0})
        assert bits(found) == bits(states)
        assert extras == {"x": 4}
    with refused("states must be a dict with the members' names, demos, online; got demos"):
        checkpointer.save({"demos": states["demos"]})
    other = jr.mix(demos=(SMALL, 2), more=(BUFFER, 3))
    for buffer, said in ((other, "has the members 'demos', 'online'"), (BUFFER, "has the members")):
        with refused(f"restore: step 2 {said}"):
            Checkpointer(tmp_path, buffer).restore(EXAMPLE)
    named = jr.mix(extras=(SMALL, 2), online=(BUFFER, 3))  # not taken for extras
    renamed = {"extras": states["demos"], "online": states["online"]}
    checkpoint.save(tmp_path / "named", named, renamed, extras={"counters": 3})
    found = checkpoint.restore(tmp_path / "named", named, EXAMPLE, extras={"counters": 0})
    assert bits(found[0]) == bits(renamed)
    assert found[1] == {"counters": 3}
    for name, buffer in (("demos", SMALL), ("online", BUFFER)):
        found = checkpoint.inspect(tmp_path, member=name)
        expected = jr.inspect(buffer, states[name])
        own = {"buffer": "", "source": "", "draws": found.draws}
        assert dataclasses.replace(found, **own) == dataclasses.replace(expected, **own)
        assert found.buffer.startswith(f"{name} of Mixture(")
        # known for samplers by priority
        assert found.draws == (expected.draws if name == "demos" else None)
    with refused("is a checkpoint of a Mixture: pass member= one of demos, online"):
        checkpoint.inspect(tmp_path)
    wider = jr.mix(
        demos=(items(capacity=16, num_envs=2, sampler=jr.Prioritized()), 2), online=(BUFFER, 3)
    )
    found = checkpoint.restore(tmp_path, wider, EXAMPLE)
    assert bits(found["online"]) == bits(states["online"])
    assert int(wider.members[0][1].size(found["demos"])) == 8


# What a `Replay` saves.


def test_a_replay_saves_steps_and_extras(tmp_path):
    replay, other = replay_of(0), replay_of(0)
    for t in range(6):
        replay.add(step(t, 4))
        replay.save(tmp_path, step=10 * t, extras={"w": np.full(3, t)}, max_to_keep=3)
    assert Checkpointer(tmp_path, BUFFER).all_steps() == [30, 40, 50]
    for number in (40, None, 30):
        extras = other.load(tmp_path, step=number, extras={"w": np.zeros(3, int)})
        t = 5 if number is None else number // 10
        assert extras["w"].tolist() == [t] * 3
        check(other.state, t + 1)
    assert other.load(tmp_path) is None
    other.save(tmp_path)  # one checkpoint alone is kept
    assert Checkpointer(tmp_path, BUFFER).all_steps() == [51]
    with refused("save: max_to_keep must be an int of at least 1"):
        other.save(tmp_path, max_to_keep=0)


def test_a_replay_never_overwrites_what_others_saved_since_its_load(tmp_path):
    """It overwrites what an earlier run left, if it has loaded nothing."""
    one, other = replay_of(0), replay_of(0)
    for replay in (one, other):
        replay.add(step(0, 4))
        replay.save(tmp_path)
    third = replay_of(0)
    third.load(tmp_path)
    other.save(tmp_path)
    for replay in (one, third):
        with refused("has a newer checkpoint, by this process", checkpoint.PathInUseError):
            replay.save(tmp_path)


def test_tensors_are_extras(tmp_path):
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    model, other = (torch.nn.Linear(3, 2) for _ in range(2))
    replay = replay_of(0)
    replay.add(step(0, 4))
    replay.save(tmp_path, extras=model.state_dict())
    other.load_state_dict(replay.load(tmp_path, extras=other.state_dict()))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
