"""`Replay`, which owns its state: all forms of input, all frameworks of output, and failures."""

import functools
import os
import sys

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay._util import checks
from jaxreplay.buffers import memory, tiered
from jaxreplay.buffers.jitted import options_here
from jaxreplay.host import arrays as host_arrays
from jaxreplay.stateful import owner
from tests.support.compilations import count_programs
from tests.support.hlo import check_in_place
from tests.support.refusals import check_refused, refused, warned
from tests.support.replays import (
    EXAMPLE,
    NUM_ENVS,
    PRIORITIZED,
    QUEUE,
    block,
    check_same,
    damaged,
    make,
    on_device,
    output_of,
    rows_of,
    step,
    unchanged,
)
from tests.support.sampling import assert_same, sample
from tests.support.steps import nth, plain_step, stacked

# Input.

WIDER = {"f": np.float64, "i": np.int64, "b": bool}


def mapped(function):
    return functools.partial(jax.tree.map, function)


def to_torch(given):
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    return jax.tree.map(torch.from_numpy, given)


FORMS = {
    "Step": lambda given: jr.Step(**given),
    "jax": on_device,
    "torch": to_torch,
    "64 bits": mapped(lambda leaf: leaf.astype(WIDER[leaf.dtype.kind])),
    "other byte order": mapped(lambda leaf: leaf.astype(leaf.dtype.newbyteorder())),
}


@functools.cache
def rows_of_core():
    """Return the rows after 30 steps, by the buffer's own `add`."""
    buffer = make().buffer

    @jax.jit
    def run(steps):
        add = lambda state, one: (buffer.add(state, one), None)
        return jax.lax.scan(add, buffer.init(EXAMPLE), steps)[0]

    return jax.device_get(jax.tree.leaves(run(block(0, 30))))


@pytest.mark.parametrize("form", ["keywords", *FORMS])
def test_a_step_of_any_kind_is_the_core_s(form):
    replay = make()
    for t in range(30):
        replay.add(**step(t)) if form == "keywords" else replay.add(FORMS[form](step(t)))
    assert_same(rows_of(replay), rows_of_core())


def test_blocks_single_envs_and_masks():
    whole, by_block, by_env, by_mask, by_envs = (make(**PRIORITIZED) for _ in range(5))
    for t in range(0, 12, 4):
        by_block.add(block(t, 4))
        for i in range(t, t + 4):
            whole.add(step(i))
            for env in range(NUM_ENVS):
                by_env.add(nth(step(i), env), env=env)
                by_mask.add(step(i), mask=np.arange(NUM_ENVS) == env)
            if i % 4 < 2:  # in another order, with padding
                by_envs.add(nth(step(i), [2, 0, 1, 1]), envs=np.array([2, 0, 1, -1]))
        by_envs.add(nth(block(t + 2, 2), (slice(None), [1, 0, 2])), envs=[1, 0, 2])
        for other in (by_block, by_env, by_mask, by_envs):
            check_same(whole, other)


def test_blocks_of_changing_lengths_share_programs():
    """The first four lengths that are no power of two have their own programs; all others use those
    of the powers of two. The stored rows are the same."""
    buffer, number = jr.items(capacity=50, batch_size=2, allow_mask=True), 0
    by_block, by_step = (jr.Replay(buffer, example=np.int32(0)) for _ in range(2))
    with count_programs("_extend") as extended:
        for length in (1, 3, 5, 6, 7, 2, 4, 8, 9, 11, 13, 15, 10):
            items = np.arange(number, number + length)[:, None]
            by_block.add(items if length % 2 else on_device(items))
            for item in items:
                by_step.add(item)
            check_same(by_block, by_step)
            number += length
        assert extended() == 4 + 4  # 1, 2, 4, 8; and 3, 5, 6, 7
        with (
            unchanged(by_block),
            refused(r"mask: got bool\[12, 1\], expected bool\[13, 1\]"),
        ):
            by_block.add(np.zeros((13, 1), int), mask=np.ones((12, 1), bool))


def test_one_env_needs_no_axis():
    with_axis, arrays, numbers = (make(num_envs=1) for _ in range(3))
    for t in range(30):
        with_axis.add(step(t, (1,)))
        arrays.add(step(t, ()))
        numbers.add(jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf.item(), step(t, ())))
    check_same(with_axis, arrays)
    check_same(with_axis, numbers)


def test_items_of_any_kind():
    buffer = jr.items(capacity=10, num_envs=2, batch_size=4)
    replay = jr.Replay(buffer, framework="numpy")
    for t in range(3):
        replay.add({"a": np.full((2, 3), t), "b": [np.full(2, t, bool)]})
    assert len(replay) == 6
    assert replay.sample().experience["a"].shape == (4, 3)
    one = jr.Replay(jr.items(capacity=4, batch_size=2), example={"a": np.zeros(3)})
    one.add({"a": np.ones(3)})
    one.add({"a": np.ones((5, 1, 3))})
    assert len(one) == 4
    check_refused("give a step, or its fields", replay.add, lambda: replay.add({"a": 1}, b=2))
    with refused(r"two leaves are named rows.steps.a\.b"):
        jr.Replay(buffer).add({"a.b": np.ones(2), "a": {"b": np.ones(2)}})


def test_what_cannot_be_drawn_any_more_is_not_drawn():
    """A buffer can stop being sampleable: by short episodes, or by priorities of 0."""
    few = make(num_envs=1, capacity=12, min_size=10, autoreset="same_step_no_final_obs")
    for t in range(24):
        few.add(step(t, (1,)) | {"truncated": np.full(1, t >= 12)})
        assert t != 11 or few.can_sample()
    zero = make(**PRIORITIZED, steps=4)
    batch = zero.sample(100)
    zero.update_priorities(batch.index, np.zeros(100))
    no_priority = "9 rows, but none of a positive priority, or of the fractions asked for"
    for replay, why in ((few, "0 rows of at least 10"), (zero, no_priority)):
        assert not replay.can_sample()
        with refused(
            f"after 0 s: no batch can be sampled yet, {why}: add steps first", TimeoutError
        ):
            replay.sample()
    zero.update_priorities(batch.index, np.ones(100))
    assert zero.can_sample()


def test_a_first_step_that_is_refused_is_no_example():
    bad = ({"reward": np.zeros(2)}, {"action": "text"}, {"terminated": np.zeros(NUM_ENVS)})
    for wrong in (*(step(0) | fields for fields in bad), step(0, ())):
        replay = make()
        for _ in range(2):  # as the first, and as the fifth
            with refused(r"add|init"):
                replay.add(wrong)
            for t in range(4):
                replay.add(step(t))
        assert len(replay) == 21


def test_rewards_that_begin_as_integers():
    replay, rewards = make(num_envs=1), [1, 0.5, 2]
    for reward in rewards:
        replay.add(EXAMPLE | {"reward": reward})
    assert np.asarray(replay._owner.state.rows.steps.reward)[:3].tolist() == rewards


OBS = step(9)["obs"]
WRONG = [
    ({"reward": np.zeros(4, np.float32)}, r"reward: got float32\[4\]"),
    ({"reward": np.full(3, 1e300)}, r"add: reward: 1e\+300 cannot be stored as float32"),
    ({"action": np.zeros(3)}, r"action: got float32\[3\], expected int32\[3\]"),
    (
        {"action": np.zeros(3, np.longdouble)},
        r"add: action: an array of (longdouble|float128) cannot be stored",
    ),
    ({"terminated": np.zeros(3)}, "terminated"),
    ({"obs": {"x": OBS["x"]}}, "obs"),
    ({"obs": OBS | {"x": np.zeros((3, 5))}}, r"obs.x: got float32\[3, 5\], expected f.*3, 2"),
    ({"obs": OBS | {"x": "text"}}, r"obs.*: a str cannot be stored"),
    (
        {"obs": OBS | {"n": np.full(3, 2**40)}},
        rf"add: obs.n: {2**40} cannot be stored as int32, which is what JAX has unless",
    ),
    ({"obs": OBS | {"n": np.full(3, 1e300)}}, r"add: obs.n: 1e\+300 cannot be stored as f"),
    ({"reward": None}, "missing reward"),
    (step(9, ()), "no env axis, but there are 3 envs: say which one took it by env="),
    ({"mask": np.ones(3, bool)}, "allow_mask"),
    ({"priority": np.ones(3)}, "no priorities"),
    ({"priority": "high"}, "add: priority: a str"),
    ({"env": 0}, r"without an env axis, a mask or envs; got the leading axes \[3\]"),
    ({"envs": [0, 1, 2]}, "add: envs= writes to some envs, .*make the buffer with allow_mask=True"),
    (step(9, ()) | {"env": 0}, "make the buffer with allow_mask=True"),
    *(
        (step(9, ()) | {"env": env}, f"env={env!r}, but this buffer has the envs 0 to 2")
        for env in (1.0, True, -1, 3, "1")
    ),
]


def test_what_does_not_fit_is_refused_at_once_and_nothing_that_waits_is_lost():
    replay = make(steps=4)
    for wrong, text in WRONG:
        given = step(9) | wrong
        with refused(text):
            replay.add(**{name: leaf for name, leaf in given.items() if leaf is not None})
    check_same(replay, make(steps=4))


def test_a_number_is_held_as_it_is_or_refused():
    """A float leaf holds every integer up to its precision, and only some beyond."""
    for name, dtype, held, too_fine in (
        ("reward", np.float16, (1000.0, np.inf), (1e6,)),
        ("action", np.int8, (100,), (300,)),
        (
            "reward",
            np.float32,
            (2**24, 2**24 + 2, -(2**24), 2**31 - 128),
            (2**24 + 1, -(2**24) - 1, 2**31 - 1, np.uint32(2**32 - 1)),
        ),
    ):
        replay = make(num_envs=1, example=EXAMPLE | {name: dtype(0)})
        for number in held:
            replay.add(EXAMPLE | {name: number})
        for number in too_fine:
            with refused(
                f"add: {name}: {number} cannot be stored as {np.dtype(dtype)}, as the first step"
            ):
                replay.add(EXAMPLE | {name: number})
    with refused("add: reward: 16777217 cannot be stored as float32"):
        # also as the first reward, from which the leaf gets its dtype float32
        make(num_envs=1).add(EXAMPLE | {"reward": 16777217})
    time = {"extras": {"time": np.float64(1.7e9 + 0.05)}}
    replay = make(num_envs=1, example=EXAMPLE | time)
    with warned("add: extras.time: float64 numbers beyond 2\\*\\*24 are rounded to float32"):
        replay.add(EXAMPLE | time)
    for number in (0.1, -12345.678, 2.0**30, np.nan, np.inf):
        replay.add(EXAMPLE | {"extras": {"time": np.float64(number)}})
    for dtype in (np.uint16, np.int64, np.uint64):
        top = np.array([np.iinfo(dtype).max], dtype)
        if top < 2**24:
            assert checks.cast("x", top, np.float32, "so") == top
        else:
            with refused(f"x: {top[0]} cannot be stored as float32, so"):
                checks.cast("x", top, np.float32, "so")


class Walk:
    """Envs that are reset by hand every 50 steps, and their steps with `final_obs`."""

    def __init__(self, num_envs):
        self.obs, self.reset = np.zeros((num_envs, 3), np.float32), 50

    def step(self, time, final_obs=None, is_told=False):
        obs, after = self.obs, self.obs + 1
        self.obs = 0 * after if time % self.reset == self.reset - 1 else after
        if final_obs == "next":  # as a wrapper gives it that looks at the obs alone
            after = self.obs
        told = np.full(len(obs), is_told and time % self.reset == self.reset - 1)
        fields = {"final_obs": 0 * after if final_obs == "zeros" else after, "truncated": told}
        return plain_step(obs[:, 0], obs=obs, **fields)


@pytest.mark.parametrize("form", ["steps", "blocks", "a sample each", "limited"])
def test_a_reset_by_hand_is_noticed_by_its_final_obs(form):
    options = {"samples_per_insert": 8 / 3, "timeout": 1.0} if form == "limited" else {}
    replay, walk = make(capacity=600, autoreset="same_step", **options), Walk(3)
    with warned("final_obs differs from the next observation at 3 of 1[0-9]* steps") as caught:
        for time in range(120):
            if form == "blocks":
                replay.add(stacked([walk.step(10 * time + k) for k in range(10)]))
                continue
            replay.add(walk.step(time))
            if time and (form != "steps" or time == 119):
                replay.sample()
    assert len(caught) == 1


def test_no_batch_after_a_drop_has_a_row_of_it():
    """Not the prefetched ones either; the steps that wait belong to the episode."""
    replay = make(steps=17, prefetch=2)  # of each env, steps 10 to 14 are an episode, 15 its final
    for t in range(17, 19):
        replay.add(step(t))
        replay.sample()
    replay.add(step(19, (3,)) | {"truncated": np.zeros(3, bool)})
    replay.drop(np.array([True, False, True]))
    seen = np.concatenate([replay.sample().experience.reward for _ in range(40)])
    newest = {env: max(seen[seen % 1 == env / 8]) for env in range(3)}
    assert newest == {0: 14, 1: 18.125, 2: 14.25}


@pytest.mark.parametrize("final_obs", [None, "zeros", "next", "end_streams", "clear"])
def test_no_reset_is_seen_where_there_is_none_or_it_was_told(final_obs):
    replay, walk = make(capacity=600, autoreset="same_step"), Walk(3)
    calls = {"end_streams": replay.end_streams, "clear": replay.clear}
    for time in range(150):
        replay.add(walk.step(time, final_obs, is_told=final_obs is None))
        if time % 50 == 49 and final_obs in calls:
            calls[final_obs]()
    len(replay)


# Output.


def test_frameworks_give_the_same_batch():
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    found = []
    for name, kind in (("jax", jax.Array), ("numpy", np.ndarray), ("torch", torch.Tensor)):
        replay = make(framework=name, seed=3, **PRIORITIZED)
        for t in range(4):
            replay.add(step(t), priority=np.arange(3.0))
        batch = replay.sample(beta=0.5)
        assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(batch))
        replay.update_priorities(batch.index, batch.weight + 1)
        drawn = jax.tree.leaves((batch, replay.sample(5)))
        on_host = [np.asarray(leaf.cpu() if name == "torch" else leaf) for leaf in drawn]
        found.append([*on_host, *rows_of(replay)])
        assert replay.metrics()["max_priority"] == 2
    for other in found[1:]:
        assert [leaf.dtype for leaf in other] == [leaf.dtype for leaf in found[0]]
        assert_same(other, found[0])


def test_draws_are_those_of_the_key():
    replay = make(seed=5, steps=4)
    key = jax.random.fold_in(jax.random.key(5), 1)
    expected = sample(replay.buffer, replay._owner.state, key, None)
    assert_same(replay.sample(), expected)


def test_rows_that_are_handed_out_once():
    replay = make(**QUEUE, framework="numpy", steps=4)
    assert len(replay) == 9
    seen = [replay.sample() for _ in range(3)]
    rows = np.concatenate([batch.index.row[batch.is_valid] for batch in seen])
    assert len(rows) == len(set(rows.tolist())) == 9
    assert seen[2].is_valid.sum() == 1
    assert not replay.can_sample()
    with refused("no batch can be sampled yet, 0 rows of at least 1", TimeoutError):
        replay.sample()


def test_an_empty_replay_says_what_is_missing(tmp_path):
    replay = make()
    with refused("there is no checkpoint under", FileNotFoundError):
        replay.load(tmp_path)
    with refused("save: nothing was added yet"):
        replay.save(tmp_path)
    for steps in (0, 4):
        for t in range(steps):
            replay.add(step(t))
        assert replay.can_sample() == (steps > 0)
        replay.clear()
        assert (len(replay), replay.can_sample()) == (0, False)
        with refused("after 0 s: no batch can be sampled yet, 0 rows", TimeoutError):
            replay.sample()
    with refused(r"no priorities; use jaxreplay.prioritized"):
        replay.update_priorities({"row": [0], "lap": np.zeros(1, np.uint32)}, np.ones(1))
    with refused(r"Replay: framework must be one of"):
        make(framework="tf")
    with refused(r"Replay: buffer must be an instance of a jaxreplay.buffers.ReplayBuffer"):
        jr.Replay(jr.rollout(length=3, num_envs=1, autoreset="next_step"))


def test_a_call_inside_of_jit_says_so_and_changes_nothing():
    plain = make(**PRIORITIZED, framework="numpy", steps=4)
    queue = make(**QUEUE, framework="numpy", steps=4)
    index = {"row": np.zeros(2, np.int32), "lap": np.zeros(2, np.uint32)}
    calls = [
        lambda x: plain.add(step(4)),
        lambda x: plain.add(step(4) | {"reward": x}),
        lambda x: plain.sample(),
        lambda x: len(plain),
        lambda x: plain.can_sample(),
        lambda x: plain.clear(),
        lambda x: plain.update_priorities(index, np.ones(2)),
        lambda x: queue.sample(),
    ]
    with unchanged(plain), unchanged(queue):
        for call in calls:
            plain._owner._can_sample = None  # unknown, as after an add
            with refused(r"cannot be called inside of jit, scan or vmap.*Use the buffer's methods"):
                jax.eval_shape(call, np.zeros(NUM_ENVS, np.float32))
    for replay in (plain, queue):
        assert replay.sample().is_valid.any()


# Failures.


@pytest.fixture
def saved(tmp_path):
    """Return a replay of four steps, and the folder where it is saved."""
    replay = make(steps=4)
    replay.save(tmp_path / "replay")
    return replay, tmp_path / "replay"


def test_a_failed_add_leaves_the_rows_or_says_that_they_are_lost(saved, monkeypatch):
    replay, path = saved

    def fails(buffer, state, *arguments):
        raise KeyboardInterrupt

    def loses(buffer, state, *arguments):
        jax.tree.map(lambda leaf: leaf.delete(), state)
        raise MemoryError("the device is full")

    def add_by(function, error):
        with monkeypatch.context() as patch:
            patch.setattr(owner, "method", lambda name: function)
            with pytest.raises(error):
                replay.add(on_device(step(4)))  # added at once; NumPy arrays wait

    with unchanged(replay):
        add_by(fails, KeyboardInterrupt)
        add_by(loses, MemoryError)
        check_refused(
            r"the rows were lost in a call that raised MemoryError.*replay.load",
            lambda: replay.add(step(5)),
            replay.sample,
            replay.clear,
            lambda: len(replay),
            lambda: replay.save(path),
            error=RuntimeError,
        )
        assert not replay.can_sample()
        replay.load(path)
    replay.add(step(4))
    assert len(replay) == 12


def test_a_program_that_is_refused_loses_no_rows_on_the_host(monkeypatch):
    replay = jr.Replay(jr.items(capacity=4, num_envs=2, batch_size=2, allow_mask=True), rows="host")
    for number in range(3):  # it wraps around
        replay.add(np.float32([number, -number]))
    before = np.sort(replay.state.rows.steps)

    def fails(*given):
        raise MemoryError("no room for a program")

    with monkeypatch.context() as patch:
        patch.setattr(tiered, "_extend", fails)
        for item, given in ((7, {"env": 1}), ([7, 8], {"mask": [True, False]})):
            with pytest.raises(MemoryError):
                replay.add(on_device(np.float32(item)), **given)
        replay.add(np.float32(9), env=0)
        with pytest.raises(MemoryError):
            len(replay)
    assert before.tolist() == [-2, -1, 1, 2]
    assert np.sort(replay.state.rows.steps).tolist() == [-2, -1, 2, 9]


def test_a_saved_replay_goes_on_as_if_never_stopped(tmp_path):
    replay, same, other = (
        make(**PRIORITIZED, timeout=0.0, example=EXAMPLE, samples_per_insert=ratio, seed=0)
        for ratio in (6.0, 6.0, 1.0)
    )

    def go_on(replay, start):
        seen = []
        for t in range(start, start + 10):
            replay.add(step(t))
            while replay.can_sample():
                seen.append(jax.device_get(replay.sample()))
                replay.update_priorities(seen[-1].index, seen[-1].experience.reward)
        return seen

    go_on(replay, 0)
    replay.save(tmp_path / "replay")
    for each in (same, other):
        each.load(tmp_path / "replay")
    assert same._limiter == replay._limiter
    assert not same.can_sample()
    assert (other._limiter.num_inserts, other._limiter.num_samples) == (0, 0)  # of its own ratio
    other.sample()
    expected = go_on(replay, 10)
    assert len(expected) > 10
    assert_same(go_on(same, 10), expected)
    check_same(replay, same)
    assert [path.name for path in tmp_path.iterdir()] == ["replay"]


def test_a_buffer_with_functions_is_loaded_where_they_are_made_anew(tmp_path):
    """As in another process: a function's `repr` contains its address, which differs there."""

    def made():
        def near(scale, achieved, goal, step):
            return scale * (achieved == goal)

        goals = functools.partial(near, 2.0)
        buffer = jr.hindsight(make().buffer, goals, achieved_key="x", desired_key="n")
        louder = lambda item, key: item.replace(reward=2 * item.reward)
        return jr.Replay(jr.transform(buffer, louder), example=example)

    example = EXAMPLE | {"obs": dict.fromkeys("xn", np.float32(0))}
    replay, other = made(), made()
    for _ in range(4):
        replay.add(jax.tree.map(lambda leaf: np.stack([leaf] * NUM_ENVS), example))
    replay.save(tmp_path / "replay")
    other.load(tmp_path / "replay")
    check_same(replay, other)


@pytest.mark.parametrize("rows", ["device", "host"])
def test_a_load_needs_no_example(saved, rows):
    replay, path = saved
    loaded = jr.Replay(replay.buffer, rows=rows)
    wrong = jr.Replay(jr.items(capacity=8, batch_size=2))
    with refused("autoreset"):
        wrong.load(path)
    wrong.add(np.float32(1))  # a load that fails fixes no format
    loaded.load(path)
    for each in (replay, loaded):
        each.add(step(4))
    assert_same(loaded.state.rows, replay.state.rows)
    assert len(loaded) == len(replay)


def test_a_checkpoint_that_is_not_this_replay_s_is_refused(saved):
    replay, path = saved
    other = make(capacity=30, steps=1)
    other.load(path)
    assert 0 < len(other) <= len(replay)
    other = make(example=EXAMPLE | {"action": np.int8(0)})
    with refused(r"steps.action: stored int32\[\], expected int8\[\]"):
        other.load(path)
    assert len(other) == 0
    with refused("there is no checkpoint under", FileNotFoundError):
        replay.load(path / "nothing")
    file = path.parent / "file"
    file.write_text("of 0.1")
    for call in (replay.load, replay.save):
        with refused("file is a file, not the folder of a Checkpointer", NotADirectoryError):
            call(file)
    assert len(replay) == 9


@pytest.mark.parametrize("has_room", [True, False])
def test_a_load_that_fails_leaves_the_rows(has_room, saved, monkeypatch):
    """If memory is too small for both, all files are verified before the rows are freed."""
    replay, path = saved
    replay.add(step(4))
    mend = damaged(path)
    if not has_room:
        free_bytes = lambda: 1 if replay._owner._state is not None else 2**40
        monkeypatch.setattr(memory, "free_bytes", free_bytes)
    with unchanged(replay):
        with refused("rows/.* is not as it was written"):
            replay.load(path)
        replay.add(step(5))
        mend()
        replay.load(path)
        assert len(replay) == 9
        replay.add(step(4))


def test_a_save_on_top_of_one_writes_what_is_new(tmp_path):
    path = tmp_path / "replay"
    replay, other = (make(capacity=1998, example=EXAMPLE) for _ in range(2))
    replay.add(block(0, 400))
    replay.save(path)
    before = set(path.glob("rows/*"))

    def save(each, t):
        each.add(step(t))
        each.save(path)

    save(replay, 400)
    other.load(path)
    save(other, 401)  # continues from the other's checkpoint
    assert before & set(path.glob("rows/*"))
    with refused("has a newer checkpoint, by this process", checkpoint.PathInUseError):
        save(replay, 1000)
    replay.load(path)
    check_same(replay, other)
    save(replay, 1000)


def test_places_that_are_named_alike_are_told_apart(monkeypatch):
    """Two servers may have buckets of one name; a save continues only from one to the same
    place."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    spec = {"driver": "s3", "bucket": "runs", "path": "x", "aws_region": "us-east-1"}
    one, other = (spec | {"endpoint": f"http://127.0.0.1:{port}"} for port in (9000, 9001))
    replay = make()
    at = lambda path: replay._owner.last_checkpointer.at(path, replay.buffer)
    first = at(one)
    assert at(dict(one)) is first
    assert (second := at(other)) is not first
    assert second.path == first.path
    assert at(one) is not second


def test_a_checkpointer_s_generation_can_be_loaded_and_a_replay_s_restored(saved):
    replay, path = saved
    state = checkpoint.restore(path, replay.buffer, EXAMPLE)
    assert_same(jax.tree.leaves(state), rows_of(replay))
    for metadata in (None, {"replay": "mine"}, {"replay": {"num_draws": "many", "limiter": 3}}):
        checkpoint.save(path.parent / "two", replay.buffer, state, metadata=metadata)
        other = make(example=EXAMPLE, samples_per_insert=1.0)
        other.load(path.parent / "two")
        assert (len(other), other._limiter.num_inserts) == (9, 0)


# Devices, and missing extras.


def test_rows_lie_where_they_are_told_and_a_program_may_end_without_closing(tmp_path):
    code = """
import numpy as np, jax, jaxreplay as jr
here, there = jax.devices("cpu")
replay = jr.Replay(jr.items(capacity=10, batch_size=4), device=there, prefetch=2)
for t in range(3):
    replay.add({"x": np.zeros((1, 3))})
replay.add({"x": jax.device_put(np.zeros((1, 3), np.float32), here)})
devices = lambda tree: {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
assert devices(replay._owner.state) == {there}
assert devices(replay.sample()) == {here}
replay.save("replay"); replay.load("replay")
assert devices(replay._owner.state) == {there}
replay.sample()
print(len(replay))
"""
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    assert output_of(code, env=os.environ | two, cwd=tmp_path) == "4"


def test_without_torch_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "jaxreplay.torch", raising=False)
    assert make(framework="numpy", steps=4).sample().is_valid.all()
    with refused(r"jaxreplay.torch needs PyTorch: pip install 'jaxreplay\[torch\]'", ImportError):
        make(framework="torch")


def test_an_add_to_one_env_is_in_place():
    num_envs, capacity = 4, 1 << 16
    replay = make(num_envs=num_envs, capacity=capacity, allow_mask=True, example=EXAMPLE)
    one = host_arrays.as_stored("add", replay.buffer, step(1, ()))
    check_in_place(
        lambda state, env: replay.buffer.add(state, nth(one, None), envs=env),
        (replay._owner.state, np.int32([2])),
        num_elements=capacity,
        donated=0,
        **options_here(),
    )
