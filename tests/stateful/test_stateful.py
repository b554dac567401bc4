"""`Replay`, which owns its state: all forms of input, all frameworks of output, and failures."""

import contextlib
import functools
import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay._util import checks
from jaxreplay.buffers import memory
from jaxreplay.buffers.jitted import method, options_here
from jaxreplay.stateful import host_arrays, owner
from tests.conftest import SOAK
from tests.support.compilations import count_programs
from tests.support.hlo import check_in_place
from tests.support.replays import NUM_ENVS, check_same, make, rows_of, step

# Input.


def to_torch(tree):
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    return jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf)), tree)


@pytest.mark.parametrize(
    "form", ["keywords", "mapping", "Step", "jax", "torch", "float64 and int64"]
)
def test_a_step_of_any_kind_is_the_core_s(form):
    replay = make()
    state = replay.buffer.init(jax.tree.map(lambda x: x[0], step(0)))
    for t in range(30):
        s = step(t)
        state = replay.buffer.add(state, s)
        if form == "keywords":
            replay.add(**s)
        elif form == "float64 and int64":
            replay.add(
                jax.tree.map(
                    lambda x: x.astype({"f": np.float64, "i": np.int64}.get(x.dtype.kind, x.dtype)),
                    s,
                )
            )
        else:
            convert = {
                "mapping": dict,
                "Step": lambda s: jr.Step(**s),
                "jax": lambda s: jax.tree.map(jnp.asarray, s),
                "torch": to_torch,
            }
            replay.add(convert[form](s))
    for x, y in zip(rows_of(replay), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(x, y)
    assert len(replay) == int(replay.buffer.size(state))


def test_blocks_single_envs_and_masks():
    whole, by_block, by_env, by_mask = (make(allow_mask=True) for _ in range(4))
    for t in range(0, 20, 4):
        block = jax.tree.map(lambda *x: np.stack(x), *(step(t + i) for i in range(4)))
        by_block.add(block)
        for i in range(4):
            whole.add(step(t + i))
            for env in range(NUM_ENVS):
                by_env.add(jax.tree.map(lambda x, env=env: x[env], step(t + i)), env=env)
                by_mask.add(step(t + i), mask=np.arange(NUM_ENVS) == env)
    for other in (by_block, by_env, by_mask):
        check_same(whole, other)


def test_blocks_of_changing_lengths_share_programs():
    """The first four lengths that are no power of two have their own programs; all others use those
    of the powers of two. The stored rows are the same."""
    by_block, by_step = (make(num_envs=1, capacity=100, sampler=jr.Prioritized()) for _ in range(2))
    with count_programs("_extend") as extended:
        for length in (1, 2, 4, 8, 5, 6, 7, 9, *range(1, 60, 1 if SOAK else 7)):
            block = step(length, (length, 1))
            by_block.add(jax.tree.map(jnp.asarray, block) if length % 2 else block)
            for t in range(length):
                by_step.add(jax.tree.map(lambda leaf, t=t: leaf[t], block))
            check_same(by_block, by_step)
            if length == 9:
                assert extended() == 4 + 4  # 1, 2, 4, 8; and 5, 6, 7, 9
    assert extended() <= 4 + 6


def test_a_block_whose_leaves_have_different_lengths_is_refused_whole():
    replay = make(allow_mask=True)
    for length in (4, 5, 6, 7, 9, 11):
        replay.add(step(length, (length, NUM_ENVS)))
    before = rows_of(replay)
    with pytest.raises(ValueError, match=r"mask: got bool\[12, 3\], expected bool\[13, 3\]"):
        replay.add(step(0, (13, NUM_ENVS)), mask=np.ones((12, NUM_ENVS), bool))
    for x, y in zip(before, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("plain", [True, False], ids=["numbers", "arrays"])
def test_one_env_needs_no_axis(plain):
    with_axis, without = make(num_envs=1), make(num_envs=1)
    for t in range(30):
        s = step(t, (1,))
        with_axis.add(s)
        one = jax.tree.map(lambda x: x[0], s)
        without.add(jax.tree.map(lambda x: x.item() if x.ndim == 0 else x, one) if plain else one)
    check_same(with_axis, without)


def test_items_of_any_kind():
    replay = jr.Replay(jr.items(capacity=10, num_envs=2, batch_size=4), framework="numpy")
    for t in range(3):
        replay.add({"a": np.full((2, 3), t), "b": [np.full(2, t, bool)]})
    assert len(replay) == 6
    assert replay.sample().experience["a"].shape == (4, 3)
    one = jr.Replay(jr.items(capacity=4, batch_size=2), example={"a": np.zeros(3)})
    one.add({"a": np.ones(3)})
    one.add({"a": np.ones((5, 1, 3))})
    assert len(one) == 4
    with pytest.raises(ValueError, match="give a step, or its fields"):
        replay.add()
    with pytest.raises(ValueError, match="give a step, or its fields"):
        replay.add({"a": 1}, b=2)


def test_what_cannot_be_drawn_any_more_is_not_drawn():
    """A buffer can stop being sampleable: by short episodes, priorities of 0, or an episode without
    end."""
    few = make(num_envs=1, capacity=12, batch_size=4, min_size=10, autoreset="same_step")
    for t in range(24):
        one = step(t, (1,))
        few.add(
            **{
                **one,
                "terminated": np.full(1, t >= 12),
                "truncated": np.zeros(1, bool),
                "final_obs": one["obs"],
            }
        )
        if t == 11:
            assert few.can_sample()
    zero = make(sampler=jr.Prioritized())
    for t in range(4):
        zero.add(step(t))
    batch = zero.sample(100)
    zero.update_priorities(batch.index, np.zeros(100))
    endless = jr.Replay(
        jr.future_pairs(capacity=20, num_envs=1, batch_size=4, autoreset="next_step")
    )
    for t in range(40):
        endless.add({**step(t, (1,)), "truncated": np.full(1, t == 2)})
        assert t != 5 or endless.can_sample()
    for replay in (few, zero, endless):
        assert not replay.can_sample()
        with pytest.raises(TimeoutError, match="no batch can be sampled yet"):
            replay.sample()
    zero.update_priorities(batch.index, np.ones(100))
    assert zero.can_sample()


@pytest.mark.parametrize(
    "bad", [{"reward": np.zeros(2)}, {"action": "text"}, {"terminated": np.zeros(NUM_ENVS)}]
)
def test_a_first_step_that_is_refused_is_no_example(bad):
    replay = make()
    for wrong in ({**step(0), **bad}, jax.tree.map(lambda x: x[0], step(0))):
        with pytest.raises(ValueError, match=r"add|init"):
            replay.add(wrong)
    for t in range(3):
        replay.add(step(t))
    assert len(replay) == 6
    with pytest.raises(ValueError, match="add"):
        replay.add({**step(0), **bad})
    assert len(replay) == 6


def test_rewards_that_begin_as_integers():
    replay = make(num_envs=1)
    one = {"obs": 0.5, "action": 1, "terminated": False, "truncated": False}
    replay.add(**one, reward=1)
    replay.add(**one, reward=0.5)
    replay.add(**one, reward=2)
    assert set(replay.sample(64).experience.reward.tolist()) == {1.0, 0.5}


def test_what_does_not_fit_is_refused_and_nothing_is_lost():
    replay = make(allow_mask=True)
    replay.add(step(0))
    before = rows_of(replay)
    big = step(1)
    big["obs"]["n"] = np.full(NUM_ENVS, 2**40)
    with pytest.raises(
        ValueError,
        match=rf"add: obs.n: {2**40} cannot be stored as int32, which is what JAX has unless",
    ):
        replay.add(big)
    with pytest.raises(ValueError, match=r"add: obs.n: 1e\+300 cannot be stored as float32"):
        replay.add({**step(1), "obs": {"x": step(1)["obs"]["x"], "n": np.full(NUM_ENVS, 1e300)}})
    with pytest.raises(
        ValueError, match=r"add: action: an array of (longdouble|float128) cannot be stored"
    ):
        replay.add({**step(1), "action": np.zeros(NUM_ENVS, np.longdouble)})
    with pytest.raises(ValueError, match=r"add: priority: a str"):
        replay.add(step(1), priority="high")
    for env in (1.0, True, -1, "1"):
        with pytest.raises(ValueError, match=f"env={env!r}, but this buffer has the envs 0 to 2"):
            replay.add(step(1, ()), env=env)
    with pytest.raises(ValueError, match=r"obs.x: got float32\[3, 5\], expected float32\[3, 2\]"):
        replay.add({**step(1), "obs": {"x": np.zeros((3, 5)), "n": np.zeros(3, int)}})
    with pytest.raises(ValueError, match=r"action: got float32\[3\], expected int32\[3\]"):
        replay.add({**step(1), "action": np.zeros(3)})
    with pytest.raises(ValueError, match=r"obs.*: a str cannot be stored"):
        replay.add({**step(1), "obs": {"x": "text", "n": np.zeros(3, int)}})
    with pytest.raises(ValueError, match="missing reward"):
        replay.add(obs=1, action=1, terminated=False, truncated=False)
    with pytest.raises(
        ValueError, match="no env axis, but there are 3 envs: say which one took it by env="
    ):
        replay.add(step(1, ()))
    with pytest.raises(ValueError, match="env=3, but this buffer has the envs 0 to 2"):
        replay.add(step(1, ()), env=3)
    with pytest.raises(
        ValueError, match=r"without an env axis or a mask; got the leading axes \[3\]"
    ):
        replay.add(step(1), env=0)
    for x, y in zip(before, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)
    replay.add(step(1))
    assert len(replay) == 3
    with pytest.raises(ValueError, match="make the buffer with allow_mask=True"):
        make().add(step(0, ()), env=0)


def test_bytes_in_another_order_are_put_into_this_one():
    replay, other = make(), make()
    for t in range(4):
        replay.add(step(t))
        other.add(jax.tree.map(lambda x: x.astype(x.dtype.newbyteorder(">")), step(t)))
    check_same(replay, other)


def test_keys_whose_names_meet_are_refused():
    replay = jr.Replay(jr.items(capacity=4, batch_size=2))
    with pytest.raises(ValueError, match=r"two leaves are named streams.steps.a\.b"):
        replay.add({"a.b": np.ones(1), "a": {"b": np.ones(1)}})


def test_narrow_numbers_are_not_cut():
    replay = make(num_envs=1, example={**step(0, ()), "reward": np.float16(0)})
    replay.add({**step(0, ()), "reward": 1000.0})
    replay.add({**step(0, ()), "reward": np.inf})
    with pytest.raises(
        ValueError,
        match=r"add: reward: 1000000.0 cannot be stored as float16, as the first step or example= "
        r"has it",
    ):
        replay.add({**step(0, ()), "reward": 1e6})
    replay = make(num_envs=1, example={**step(0, ()), "action": np.int8(0)})
    replay.add({**step(0, ()), "action": 100})
    with pytest.raises(ValueError, match=r"action: 300 cannot be stored as int8"):
        replay.add({**step(0, ()), "action": 300})


def test_an_integer_keeps_its_last_bit_or_is_refused():
    """A float leaf holds every integer up to its precision, and only some beyond."""
    replay = make(num_envs=1, example=step(0, ()))
    for number in (2**24, 2**24 + 2, -(2**24), 2**31 - 128):
        replay.add({**step(0, ()), "reward": number})
    for number in (2**24 + 1, -(2**24) - 1, 2**31 - 1, np.uint32(2**32 - 1)):
        with pytest.raises(
            ValueError, match=f"add: reward: {int(number)} cannot be stored as float32"
        ):
            replay.add({**step(0, ()), "reward": number})
    fresh = make(num_envs=1)
    with pytest.raises(ValueError, match="add: reward: 16777217 cannot be stored as float32"):
        # also as the first reward, from which the leaf gets its dtype float32
        fresh.add({**step(0, ()), "reward": 16777217})
    for dtype in (np.int8, np.uint16, np.int64, np.uint64):
        top = np.iinfo(dtype).max
        with (
            contextlib.nullcontext()
            if top < 2**24
            else pytest.raises(ValueError, match=f"x: {top} cannot be stored as float32, so")
        ):
            assert checks.cast("x", np.array([top], dtype), np.float32, "so").tolist() == [top]


@pytest.mark.parametrize("num_bytes", [1024, 96 * 1024, 100 * 1024, 10 * 2**20])
def test_an_env_may_reuse_its_array(num_bytes):
    memory = np.empty(num_bytes + 64, np.uint8)
    for beyond in (0, 1):  # bytes past a multiple of 64
        replay = make(num_envs=1, capacity=12)
        obs = memory[(beyond - memory.ctypes.data) % 64 :][:num_bytes].reshape(1, -1)
        for t in range(8):
            obs[:] = t
            replay.add(
                obs=obs,
                action=np.zeros(1),
                reward=np.full(1, t),
                terminated=np.zeros(1, bool),
                truncated=np.zeros(1, bool),
            )
            obs[:] = 255
        items = replay.sample(16).experience
        np.testing.assert_array_equal(
            items.obs, np.broadcast_to(np.asarray(items.reward)[:, None], (16, num_bytes))
        )


# Output.


def test_frameworks_give_the_same_batch():
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    replays = {
        name: make(framework=name, seed=3, sampler=jr.Prioritized())
        for name in ("jax", "numpy", "torch")
    }
    kinds = {"jax": jax.Array, "numpy": np.ndarray, "torch": torch.Tensor}
    for name, replay in replays.items():
        for t in range(10):
            replay.add(step(t), priority=np.arange(3.0))
        batch = replay.sample(beta=0.5)
        assert all(isinstance(leaf, kinds[name]) for leaf in jax.tree.leaves(batch))
        replay.update_priorities(batch.index, batch.weight + 1)
        drawn = jax.tree.leaves((batch, replay.sample(5)))
        if name == "torch":
            drawn = [leaf.cpu() for leaf in drawn]
        replays[name] = [np.asarray(leaf) for leaf in drawn] + rows_of(replay)
        assert replay.metrics()["max_priority"] == 2
    for name in ("numpy", "torch"):
        for x, y in zip(replays["jax"], replays[name], strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            np.testing.assert_array_equal(x, y)


def test_draws_are_those_of_the_key():
    replay = make(seed=5)
    for t in range(9):
        replay.add(step(t))
    expected = replay.buffer.sample(replay._owner.state, jax.random.fold_in(jax.random.key(5), 1))
    for x, y in zip(jax.tree.leaves(replay.sample()), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_that_are_handed_out_once():
    replay = make(sampler=jr.Queue(), batch_size=4, framework="numpy")
    for t in range(4):
        replay.add(step(t))
    assert len(replay) == 9
    seen = [replay.sample() for _ in range(3)]
    rows = np.concatenate([batch.index.row[batch.is_valid] for batch in seen])
    assert len(rows) == len(set(rows.tolist())) == 9
    assert seen[2].is_valid.sum() == 1
    assert not replay.can_sample()
    with pytest.raises(TimeoutError, match="no batch can be sampled yet, 0 rows of at least 1"):
        replay.sample()


def test_an_empty_replay_says_what_is_missing():
    replay = make(min_size=5)
    assert len(replay) == 0
    assert not replay.can_sample()
    with pytest.raises(
        TimeoutError,
        match="after 0 s: no batch can be sampled yet, 0 rows of at least 5: add steps first",
    ):
        replay.sample()
    for t in range(3):
        replay.add(step(t))
    assert replay.can_sample()
    replay.clear()
    assert (len(replay), replay.can_sample()) == (0, False)
    with pytest.raises(ValueError, match=r"Replay: framework must be one of"):
        make(framework="tf")
    with pytest.raises(
        ValueError, match=r"Replay: buffer must be an instance of a jaxreplay.buffers.ReplayBuffer"
    ):
        jr.Replay(jr.rollout(length=3, num_envs=1, autoreset="next_step"))
    with pytest.raises(ValueError, match=r"no priorities; use jaxreplay.prioritized"):
        replay.update_priorities(
            jr.types.Index(jnp.zeros(1, int), jnp.zeros(1, jnp.uint32)), np.ones(1)
        )


@pytest.mark.parametrize(
    "what",
    ["add", "add traced", "sample", "len", "can_sample", "clear", "update_priorities", "pop"],
)
def test_a_call_inside_of_jit_says_so_and_changes_nothing(what):
    replay = make(sampler=jr.Queue() if what == "pop" else jr.Prioritized())
    for t in range(4):
        replay.add(step(t))
    before = rows_of(replay)
    replay._owner._can_sample = None  # unknown, as after an add
    index = {"row": np.zeros(2, np.int32), "lap": np.zeros(2, np.uint32)}
    calls = {
        "add": lambda x: replay.add(step(4)),
        "add traced": lambda x: replay.add({**step(4), "reward": x}),
        "sample": lambda x: replay.sample(),
        "len": lambda x: len(replay),
        "can_sample": lambda x: replay.can_sample(),
        "clear": lambda x: replay.clear(),
        "update_priorities": lambda x: replay.update_priorities(index, np.ones(2)),
        "pop": lambda x: replay.sample(),
    }
    with pytest.raises(
        ValueError,
        match=r"cannot be called inside of jit, scan or vmap.*Use the buffer's methods there",
    ):
        jax.jit(calls[what])(jnp.zeros(NUM_ENVS))
    for x, y in zip(before, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)
    replay.add(step(4))
    assert replay.sample().is_valid.any()


# Failures.


def test_a_failed_add_leaves_the_rows_or_says_that_they_are_lost(tmp_path, monkeypatch):
    replay = make()
    for t in range(4):
        replay.add(step(t))
    replay.save(tmp_path / "replay")
    expected = rows_of(replay)

    def fails(buffer, state, *arguments):
        raise KeyboardInterrupt

    on_device = jax.tree.map(jnp.asarray, step(4))  # is added at once; NumPy arrays wait
    with monkeypatch.context() as patch:
        patch.setattr(owner, "method", lambda name: fails)
        with pytest.raises(KeyboardInterrupt):
            replay.add(on_device)
    for x, y in zip(expected, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)

    def loses(buffer, state, *arguments):
        jax.tree.map(lambda leaf: leaf.delete(), state)
        raise MemoryError("the device is full")

    with monkeypatch.context() as patch:
        patch.setattr(owner, "method", lambda name: loses)
        with pytest.raises(MemoryError):
            replay.add(on_device)
    for call in (
        lambda: replay.add(step(5)),
        replay.sample,
        replay.clear,
        lambda: len(replay),
        lambda: replay.save(tmp_path / "x"),
    ):
        with pytest.raises(
            RuntimeError, match=r"the rows were lost in a call that raised MemoryError.*replay.load"
        ):
            call()
    assert not replay.can_sample()
    replay.load(tmp_path / "replay")
    for x, y in zip(expected, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)
    replay.add(step(4))


def test_a_saved_replay_goes_on_as_if_never_stopped(tmp_path):
    options = {
        "sampler": jr.Prioritized(),
        "samples_per_insert": 100.0,
        "timeout": 0.0,
        "example": jax.tree.map(lambda x: x[0], step(0)),
    }
    replay, other = make(**options), make(**options, seed=0)

    def go_on(replay, start):
        seen = []
        for t in range(start, start + 10):
            replay.add(step(t)) if replay._may_insert() else None
            if replay.can_sample():
                batch = replay.sample()
                replay.update_priorities(batch.index, batch.experience.reward)
                seen += jax.tree.leaves(batch)
        return [np.asarray(x) for x in seen]

    go_on(replay, 0)
    replay.save(tmp_path / "replay")
    expected = go_on(replay, 10)
    other.load(tmp_path / "replay")
    for x, y in zip(expected, go_on(other, 10), strict=True):
        np.testing.assert_array_equal(x, y)
    check_same(replay, other)
    assert [path.name for path in tmp_path.iterdir()] == ["replay"]


def test_a_buffer_with_functions_is_loaded_by_another_process(tmp_path):
    """A function's `repr` contains its address, which differs in each process."""
    code = """
import functools, sys, numpy as np, jaxreplay as jr


def near(scale, achieved, goal, step):
    return scale * (achieved == goal)


def louder(item, key):
    return item.replace(reward=2 * item.reward)


goals = jr.uniform(capacity=20, num_envs=1, batch_size=4, autoreset="next_step")
goals = jr.hindsight(goals, functools.partial(near, 2.0), achieved_key="a", desired_key="d")
example = {
    "obs": {"a": 0.0, "d": 0.0},
    "action": 0,
    "reward": 0.0,
    "terminated": False,
    "truncated": False,
}
replay = jr.Replay(jr.transform(goals, louder), example=example)
if sys.argv[1] == "save":
    for t in range(5):
        replay.add(obs={"a": t, "d": 9}, action=0, reward=t, terminated=False, truncated=t == 3)
    replay.save("replay")
else:
    replay.load("replay")
    print(len(replay))
"""
    for what, printed in (("save", ""), ("load", "4")):
        done = subprocess.run(
            [sys.executable, "-c", code, what], capture_output=True, text=True, cwd=tmp_path
        )
        assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr


def test_a_ratio_of_its_own_is_counted_anew(tmp_path):
    options = {"num_envs": 1, "timeout": 0.0, "example": step(0, ())}
    replay, same, other = (make(**options, samples_per_insert=ratio) for ratio in (8.0, 8.0, 1.0))
    for t in range(20):
        replay.add(step(t, (1,)))
        while replay.can_sample():
            replay.sample()
    replay.save(tmp_path / "replay")
    same.load(tmp_path / "replay")
    assert same._limiter == replay._limiter
    assert not same.can_sample()
    other.load(tmp_path / "replay")
    assert (other._limiter.num_inserts, other._limiter.num_samples) == (0, 0)
    other.sample()


def test_a_file_that_is_not_this_replay_s_is_refused(tmp_path):
    replay, path = make(), tmp_path / "replay"
    with pytest.raises(ValueError, match="save: nothing was added yet"):
        replay.save(path)
    with pytest.raises(ValueError, match="load: the shapes of a step are not known yet"):
        replay.load(path)
    for t in range(4):
        replay.add(step(t))
    replay.save(path)
    other = make(capacity=30)
    other.add(step(0))
    with pytest.raises(ValueError, match=r"of another buffer:\n.*capacity=60"):
        other.load(path)
    other = make(example={**jax.tree.map(lambda x: x[0], step(0)), "action": np.zeros((), np.int8)})
    with pytest.raises(ValueError, match=r"steps.action: stored int32\[\], expected int8\[\]"):
        other.load(path)
    assert len(other) == 0
    with pytest.raises(FileNotFoundError, match="there is no checkpoint under"):
        replay.load(tmp_path / "nothing")
    (tmp_path / "file").write_text("of 0.1")
    for call in (replay.load, replay.save):
        with pytest.raises(
            NotADirectoryError, match="file is a file, not the folder of a Checkpointer"
        ):
            call(tmp_path / "file")
    assert len(replay) == 9


def damaged(path):
    """Damage a saved file, and return a function that repairs it."""
    file = next(path.rglob("steps.reward/c.0"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return lambda: file.write_bytes(whole)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_load_that_fails_leaves_the_rows(has_room, tmp_path, monkeypatch):
    """If memory is too small for both, all files are verified before the rows are freed."""
    replay, path = make(), tmp_path / "replay"
    for t in range(4):
        replay.add(step(t))
    replay.save(path)
    replay.add(step(4))
    expected = rows_of(replay)
    mend = damaged(path)
    if not has_room:
        monkeypatch.setattr(
            memory, "free_bytes", lambda: 1 if replay._owner._state is not None else 2**40
        )
    with pytest.raises(ValueError, match=r"steps.reward/c.0 is not as it was written"):
        replay.load(path)
    for x, y in zip(expected, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)
    replay.add(step(5))
    mend()
    replay.load(path)
    assert len(replay) == 9
    replay.add(step(4))
    for x, y in zip(expected, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_that_are_lost_while_others_are_loaded_are_said_to_be(tmp_path, monkeypatch):
    """Memory is too small for both, and a file breaks after it was verified."""
    replay, path = make(), tmp_path / "replay"
    for t in range(4):
        replay.add(step(t))
    replay.save(path)
    mends = []

    def free_bytes():
        if replay._owner._state is not None:
            return 1
        mends.append(damaged(path))
        return 2**40

    with monkeypatch.context() as patch:
        patch.setattr(memory, "free_bytes", free_bytes)
        with pytest.raises(ValueError, match="is not as it was written"):
            replay.load(path)
    with pytest.raises(RuntimeError, match="the rows were lost while saved ones were loaded"):
        replay.sample()
    mends[0]()
    replay.load(path)
    assert len(replay) == 9


def test_a_save_on_top_of_one_writes_what_is_new(tmp_path):
    replay, other, path = (
        make(capacity=1998),
        make(capacity=1998, example=jax.tree.map(lambda x: x[0], step(0))),
        tmp_path / "replay",
    )
    for t in range(400):
        replay.add(step(t))
    replay.save(path)
    before = set(path.rglob("c.0"))
    replay.add(step(400))
    replay.save(path)
    assert any(file in before for file in path.rglob("steps.reward/c.0"))
    other.load(path)
    other.add(step(401))
    other.save(path)  # continues from the other's checkpoint
    assert any(file in before for file in path.rglob("steps.reward/c.0"))
    replay.add(step(1000))
    replay.save(path)  # its own checkpoint is gone
    other.load(path)
    check_same(replay, other)


def test_places_that_are_named_alike_are_told_apart(monkeypatch):
    """Two servers may have buckets of one name; a save continues only from one to the same
    place."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    spec = {"driver": "s3", "bucket": "runs", "path": "x", "aws_region": "us-east-1"}
    one, other = ({**spec, "endpoint": f"http://127.0.0.1:{port}"} for port in (9000, 9001))
    saves = make()._owner
    first = saves._checkpointer_at(one)
    assert saves._checkpointer_at(dict(one)) is first
    assert (second := saves._checkpointer_at(other)) is not first
    assert second.path == first.path
    assert saves._checkpointer_at(one) is not second


def test_a_checkpointer_s_generation_can_be_loaded_and_a_replay_s_restored(tmp_path):
    replay, example = make(), jax.tree.map(lambda x: x[0], step(0))
    for t in range(4):
        replay.add(step(t))
    replay.save(tmp_path / "one")
    state = checkpoint.restore(tmp_path / "one", replay.buffer, example)
    for x, y in zip(rows_of(replay), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(x, y)
    for metadata in (None, {"replay": "mine"}, {"replay": {"num_draws": "many", "limiter": 3}}):
        checkpoint.save(tmp_path / "two", replay.buffer, state, metadata=metadata)
        other = make(example=example, samples_per_insert=1.0)
        other.load(tmp_path / "two")
        assert (len(other), other._limiter.num_inserts) == (9, 0)


@pytest.mark.parametrize("leaf", ["steps.reward", "flags"])
def test_a_forged_leaf_is_not_loaded(leaf, tmp_path):
    """A leaf's files are replaced by those of another shape, with valid checksums."""
    replay, path = make(), tmp_path / "replay"
    for t in range(4):
        replay.add(step(t))
    replay.save(path)
    source, target = next(path.rglob("candidate_number")), next(path.rglob(leaf))
    for file in source.iterdir():
        if file.name == "zarr.json" or target.joinpath(file.name).exists():
            target.joinpath(file.name).write_bytes(file.read_bytes())
    expected = rows_of(replay)
    with pytest.raises(ValueError, match=rf"{leaf}/c.0 is intact, but is not the file"):
        replay.load(path)
    for x, y in zip(expected, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)


# Devices, and missing extras.


def test_rows_lie_where_they_are_told():
    code = """
import numpy as np, jax, jaxreplay as jr
here, there = jax.devices("cpu")
replay = jr.Replay(jr.items(capacity=10, batch_size=4), device=there)
for t in range(3):
    replay.add({"x": np.zeros((1, 3))})
replay.add({"x": jax.device_put(np.zeros((1, 3), np.float32), here)})
devices = lambda tree: {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
assert devices(replay._owner.state) == {there}
assert devices(replay.sample()) == {here}
replay.save("replay"); replay.load("replay")
assert devices(replay._owner.state) == {there}
print(len(replay))
"""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
        )
    assert done.stdout.strip() == "4", done.stderr


def test_without_torch_the_error_names_the_extra():
    code = """
import sys; sys.modules["torch"] = None
import jaxreplay as jr, numpy as np
replay = jr.Replay(jr.items(capacity=10, batch_size=4), framework="numpy")
replay.add({"x": np.zeros((1, 3))}); replay.sample()
jr.Replay(replay.buffer, framework="torch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "jaxreplay.torch needs PyTorch: pip install 'jaxreplay[torch]'" in done.stderr


def test_an_add_is_in_place():
    num_envs, capacity = 4, 1 << 16
    replay = make(
        num_envs=num_envs,
        capacity=capacity,
        allow_mask=True,
        example=jax.tree.map(lambda x: x[0], step(0)),
    )
    one, all_ = (
        jax.tree.map(jnp.asarray, host_arrays.as_stored("add", replay.buffer, s))
        for s in (step(1, ()), step(1, (num_envs,)))
    )
    options = {"num_elements": capacity, "donated": 0, **options_here()}
    to_one = functools.partial(owner._add_to_one.__wrapped__, replay.buffer)
    check_in_place(
        lambda state, env: to_one(state, env, one, None),
        (replay._owner.state, jnp.int32(2)),
        **options,
    )
    to_all = functools.partial(method("add").__wrapped__, replay.buffer)
    check_in_place(
        lambda state, mask: to_all(state, all_, mask, None),
        (replay._owner.state, jnp.ones(num_envs, bool)),
        **options,
    )
