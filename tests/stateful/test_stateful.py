"""`Replay`, which owns its state: all forms of input, all frameworks of output, and failures."""

import functools
import importlib.util
import os
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.buffers import memory, tiered
from jaxreplay.stateful import places
from tests.conftest import ALL, SOAK, thorough
from tests.support.compilations import count_programs
from tests.support.refusals import check_refused, check_table, refused, warned
from tests.support.replays import (
    EXAMPLE,
    NUM_ENVS,
    PRIORITIZED,
    block,
    check_same,
    damaged,
    have_few_lengths,
    make,
    on_device,
    output_of,
    rows_of,
    step,
    unchanged,
)
from tests.support.sampling import assert_same
from tests.support.steps import nth, plain_step, stacked

# All calls.

HAS_TORCH = importlib.util.find_spec("torch") is not None
WIDER = {"f": np.float64, "i": np.int64, "b": bool}


def mapped(function):
    return functools.partial(jax.tree.map, function)


def to_torch(given):
    import torch

    return jax.tree.map(torch.from_numpy, given)


FORMS = {
    "as it is": dict,
    "Step": lambda given: jr.Step(**given),
    "jax": on_device,
    "64 bits": mapped(lambda leaf: leaf.astype(WIDER[leaf.dtype.kind])),
    "other byte order": mapped(lambda leaf: leaf.astype(leaf.dtype.newbyteorder())),
}
FORMS |= {"torch": to_torch} if HAS_TORCH else {}
BLOCK, SEED = 4 if ALL else 2, 5
KINDS = (
    *["add"] * 8,
    *["env"] * 6,
    *["envs"] * 4,
    *["block"] * 4,
    *["sample", "update", "write"] * 2,
    *["look", "look", "clear", "drop", "end", "reload"],
)
BUFFERS = {
    "masked": PRIORITIZED,
    "two rows": {"autoreset": "same_step", "sampler": jr.Prioritized(), "allow_write": True},
    "masked episodes": {"track_episodes": True, "allow_mask": True},
    "masked queue": {"sampler": jr.Queue(), "batch_size": 4, "allow_mask": True},
    "queue": {"sampler": jr.Queue(), "batch_size": 4},
    "one env": {"num_envs": 1, "capacity": 20},
    "episodes": {"track_episodes": True, "autoreset": "same_step_no_final_obs", "min_size": 30},
    "prioritized": {"sampler": jr.Prioritized()},
    "without replacement": {"sampler": jr.WithoutReplacement(), "batch_size": 2},
}


class Both:
    """A `Replay`, and the functional buffer beside it, which adds all steps by one program."""

    def __init__(self, replay, r):
        self.replay, self.buffer, self.r = replay, replay.buffer, r
        self.jitted = jr.jit(replay.buffer)  # it shares programs with the replay
        self.has_priorities = isinstance(self.buffer.sampler, jr.Prioritized)
        self.has_own_positions = not self.buffer.layout().lockstep
        example = nth(self.steps(1), (0, 0))
        self.state, self.num_draws, self.batch = self.call("init", example), 0, None

    def call(self, name, *given, **options):
        state = () if name == "init" else (self.state,)
        return getattr(self.jitted, name)(*state, *given, **options)

    def steps(self, length):
        found = step(int(self.r.integers(1000)), (length, self.buffer.num_envs))
        if self.buffer.autoreset == "same_step":
            found["final_obs"] = jax.tree.map(lambda leaf: leaf + leaf, found["obs"])
        return found

    def add(self, kind):
        r, num_envs, form = self.r, self.buffer.num_envs, self.r.choice([*FORMS])
        # each form of a JAX array, or of steps of some envs, is a program
        has_options = form == "jax" or r.random() < 0.5 or (kind.startswith("env") and not ALL)
        length = BLOCK if kind == "block" else int(r.integers(1, 3)) if kind == "envs" else 1
        steps, axes = self.steps(length), (length, num_envs)
        mask, priority, options = np.ones(axes, bool), None, {}
        at = {"add": 0, "env": (0, int(r.integers(num_envs)))}.get(kind, slice(None))
        if kind == "env":
            options["env"], mask[:] = at[1], np.arange(num_envs) == at[1]
        elif kind == "envs":
            numbers = r.permutation(np.arange(-1, num_envs))[:-1]  # -1 is padding
            options["envs"] = numbers if r.random() < 0.5 else numbers.tolist()
            at = 0 if length == 1 else slice(None), numbers
            mask[:] = np.isin(np.arange(num_envs), numbers)
        if has_options and kind != "env" and (self.buffer.allow_mask or kind == "envs"):
            took = r.random(axes) < 0.7
            options["mask"], mask = took[at].copy(), mask & took
        if self.has_priorities and has_options:
            priority = np.asarray(r.random(axes), r.choice([np.float32, np.float64]))
            if r.random() < 0.1:  # the largest so far takes its place
                priority[:] = r.choice([np.nan, -1, np.inf])
            options["priority"] = priority[at].copy()
        given = FORMS[form](jax.tree.map(lambda leaf: np.copy(leaf[at]), steps))
        if form == "as it is" and r.random() < 0.5:
            self.replay.add(**given, **options)
        else:
            self.replay.add(given, **options)
        for leaf in jax.tree.leaves((given, options)):
            if isinstance(leaf, np.ndarray):
                leaf.fill(1)  # the caller uses its memory again
        if self.has_own_positions:
            pad = lambda leaf: np.concatenate(
                [leaf, np.zeros_like(leaf, shape=(BLOCK - length, *leaf.shape[1:]))]
            )
            steps, mask, priority = jax.tree.map(pad, (steps, mask, priority))
        envs = {"envs": np.arange(num_envs, dtype=np.int32)} if self.has_own_positions else {}
        mask = mask if self.has_own_positions else None
        priority = None if priority is None else np.float32(priority)
        self.state = self.call("extend", jr.Step(**steps), mask, priority, **envs)

    def check(self, found, expected, where=...):
        """Check arrays of the framework."""
        kind = {"numpy": np.ndarray, "jax": jax.Array}.get(self.replay.framework)
        leaves = jax.tree.leaves(found)
        assert all(
            hasattr(leaf, "cpu") if kind is None else isinstance(leaf, kind) for leaf in leaves
        )
        found, expected = (
            [np.asarray(leaf)[where] for leaf in jax.tree.leaves(tree)]
            for tree in (found, expected)
        )
        assert [leaf.dtype for leaf in found] == [leaf.dtype for leaf in expected]
        assert_same(found, expected)

    def sample(self):
        """Sample, if there is a batch, and return whether there was."""
        assert self.replay.can_sample() == self.call("can_sample")
        if not self.replay.can_sample():
            with refused("no batch can be sampled yet", TimeoutError):
                self.replay.sample()
            return False
        self.num_draws, self.batch = self.num_draws + 1, self.replay.sample()
        key = jax.random.fold_in(jax.random.key(SEED), self.num_draws)
        consumes = self.buffer.sampler.consumes
        found = self.call("pop" if consumes else "sample", key)
        if consumes:
            self.state, found = found
        self.check(self.batch, found)
        return True

    def change(self, kind):
        replay, mask = self.replay, self.r.random(self.buffer.num_envs) < 0.5
        if kind == "clear":
            replay.clear()
            self.state = self.call("clear")
        elif kind == "drop":
            replay.drop(mask)
            self.state = self.call("drop", mask)
        elif kind == "end":
            replay.end_streams(mask)
            self.state = self.call("end_streams", mask)
        elif kind == "look":
            assert len(replay) == self.call("size")
            figures = jax.device_get(self.call("metrics"))
            assert replay.metrics() == {name: leaf.item() for name, leaf in figures.items()}
            every = np.arange(self.buffer.capacity, dtype=np.int32)
            found = self.call("get", every)
            self.check(replay.get(every), found, np.asarray(found.is_valid))
            if self.batch is not None:
                index = jax.tree.map(np.asarray, self.batch.index)
                self.check(replay.age(self.batch.index), self.call("age", index))
        elif kind in ("sample", "update", "write") and self.sample():
            index, reward = self.batch.index, self.batch.experience.reward
            given = jax.tree.map(np.asarray, (index, reward))
            if kind == "update" and self.has_priorities:
                replay.update_priorities(index, reward)
                self.state = self.call("update_priorities", *given)
            if kind == "write" and self.buffer.allow_write:
                replay.write({"row": index.row, "lap": index.lap}, {"reward": reward + 1})
                self.state = self.call("write", given[0], {"reward": given[1] + 1})


@pytest.mark.parametrize(
    "name",
    ["masked", *(thorough(one) for one in [*BUFFERS][1:])],
)
@settings(max_examples=200 if SOAK else 20 if ALL else 5)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=40, max_size=60),
    framework=st.sampled_from(["numpy", "jax", *["torch"] * HAS_TORCH]),
    seed=st.integers(0, 2**32),
)
def test_random_calls_are_those_of_the_functional_buffer(
    name, kinds, framework, seed, tmp_path_factory, monkeypatch
):
    """Whatever waits on the host, in whichever arrays; with equal seeds, also after a load."""
    have_few_lengths(monkeypatch, 2)
    again = lambda: make(**BUFFERS[name], framework=framework, seed=SEED)
    both = Both(again(), np.random.default_rng(seed))
    for kind in ["add", *kinds, "look", "sample"]:
        if kind in ("add", "block") or (kind in ("env", "envs") and both.has_own_positions):
            both.add(kind)
        elif kind == "reload":
            path = tmp_path_factory.mktemp("saved")
            both.replay.save(path)
            both.replay = again()
            both.replay.load(path)
        else:
            both.change(kind)


# Input.


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


def test_one_env_needs_no_axis_and_rewards_may_begin_as_integers():
    with_axis, numbers, rewards = make(num_envs=1), make(num_envs=1), [1, 0.5, 2]
    for t, reward in enumerate(rewards):
        with_axis.add(step(t, (1,)) | {"reward": np.float32([reward])})
        as_number = jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf.item(), step(t, ()))
        numbers.add(as_number | {"reward": reward})
    check_same(with_axis, numbers)
    assert np.asarray(numbers.state.rows.steps.reward)[:3].tolist() == rewards


OBS = step(9)["obs"]
WRONG = {
    "add(reward=np.zeros(4, np.float32))": "reward: got float32[4]",
    "add(reward=np.full(3, 1e300))": "add: reward: 1e+300 cannot be stored as float32",
    "add(action=np.zeros(3))": "action: got float32[3], expected int32[3]",
    "add(action=np.zeros(3, np.longdouble))": "add: action: an array of\ncannot be stored",
    "add(terminated=np.zeros(3))": "terminated",
    "add(obs={'x': OBS['x']})": "obs",
    "add(obs=OBS | {'x': np.zeros((3, 5))})": "obs.x: got float32[3, 5], expected float32[3, 2]",
    "add(obs=OBS | {'x': 'text'})": "obs\na str cannot be stored",
    "add(obs=OBS | {'n': np.full(3, 2**40)})": """
        add: obs.n: 1099511627776 cannot be stored as int32, which is what JAX has unless""",
    "add(reward=None)": "missing reward",
    "add(**step(9, ()))": "no env axis, but there are 3 envs: say which one took it by env=",
    "add(mask=np.ones(3, bool))": "allow_mask",
    "add(priority=np.ones(3))": "no priorities",
    "add(priority='high')": "add: priority: a str",
    "add(env=0)": "without an env axis, a mask or envs; got the leading axes [3]",
    "add(envs=[0, 1, 2])": """
        add: envs= writes to some envs,
        make the buffer with allow_mask=True""",
    "add(**step(9, ()), env=0)": "make the buffer with allow_mask=True",
    **{
        f"add(**step(9, ()), env={env!r})": f"env={env!r}, but this buffer has the envs 0 to 2"
        for env in (1.0, True, -1, 3, "1")
    },
}


def test_what_does_not_fit_is_refused_at_once_and_nothing_that_waits_is_lost():
    replay = make(steps=4)

    def add(**wrong):
        given = step(9) | wrong
        replay.add(**{name: leaf for name, leaf in given.items() if leaf is not None})

    check_table(WRONG, {**globals(), "add": add})
    check_same(replay, make(steps=4))

    sizes = {"capacity": 8, "num_envs": 2, "batch_size": 2, "allow_mask": True}
    buffer = jr.items(**sizes, sampler=jr.Prioritized())
    replay = jr.Replay(buffer, example=np.float32(0))
    for shape in ((1,), (3,), (2, 1)):
        for name, array in (("mask", np.ones(shape, bool)), ("priority", np.ones(shape))):
            with refused(f"add:[\\s\\S]*{name}: got .*, expected "):
                replay.add(np.zeros(2, np.float32), **{name: array})
    assert len(replay) == 0


def test_a_number_is_held_as_it_is_or_refused():
    """A float leaf holds every integer up to its precision, and only some beyond."""
    for name, dtype, held, too_fine in (
        ("reward", np.float16, (1000.0, np.inf), (1e6,)),
        ("action", np.int8, (100,), (300,)),
        ("action", np.int32, (np.uint32(7),), (np.uint32(2**32 - 1),)),  # -1 by its bits
        ("action", np.uint8, (200, np.uint16(7)), (-1, 256)),
        (
            "reward",
            np.float32,
            (2**24, 2**24 + 2, -(2**24), 2**31 - 128, np.uint16(2**16 - 1)),
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
    for number in (np.int64(2**63 - 1), np.uint64(2**64 - 1)):
        with refused(f"add: reward: {number} cannot be stored as u?int32, which is what JAX has"):
            make(num_envs=1, example=EXAMPLE).add(EXAMPLE | {"reward": number})
    with refused("add: reward: 16777217 cannot be stored as float32"):
        # also as the first reward, from which the leaf gets its dtype float32
        make(num_envs=1).add(EXAMPLE | {"reward": 16777217})
    time = {"extras": {"time": np.float64(1.7e9 + 0.05)}}
    replay = make(num_envs=1, example=EXAMPLE | time)
    with warned("add: extras.time: float64 numbers beyond 2\\*\\*24 are rounded to float32"):
        replay.add(EXAMPLE | time)
    for number in (0.1, -12345.678, 2.0**30, np.nan, np.inf):
        replay.add(EXAMPLE | {"extras": {"time": np.float64(number)}})


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
        for time in range(0, 120, 10):
            steps = [walk.step(time + k) for k in range(10)]
            if form == "blocks":
                replay.add(stacked(steps))
                continue
            for k, one in enumerate(steps):
                replay.add(one)
                if form != "steps" and time + k:
                    replay.sample()
            len(replay)
    assert len(caught) == 1


@pytest.mark.parametrize("final_obs", [None, "zeros", "next", "end_streams", "clear"])
def test_no_reset_is_seen_where_there_is_none_or_it_was_told(final_obs):
    replay, walk = make(capacity=600, autoreset="same_step"), Walk(3)
    calls = {"end_streams": replay.end_streams, "clear": replay.clear}
    for time in range(150):
        replay.add(walk.step(time, final_obs, is_told=final_obs is None))
        if time % 10 == 9:
            len(replay)
        if time % 50 == 49 and final_obs in calls:
            calls[final_obs]()


def test_no_batch_after_a_drop_has_a_row_of_it():
    """Not the prefetched ones either; the steps that wait belong to the episode."""
    replay = make(prefetch=2)  # of each env, step 5 is the final row of steps 0 to 4
    for t in range(9):
        replay.add(step(t, (3,)))
        if t % 4 == 3:
            replay.sample()
    replay.drop(np.array([True, False, True]))
    seen = np.concatenate([replay.sample().experience.reward for _ in range(40)])
    newest = {env: max(seen[seen % 1 == env / 8]) for env in range(3)}
    assert newest == {0: 4, 1: 7.125, 2: 4.25}


# Output.


def test_an_empty_replay_says_what_is_missing(tmp_path):
    replay = make()
    with refused("there is no checkpoint under", FileNotFoundError):
        replay.load(tmp_path)
    for steps in (0, 4):
        for t in range(steps):
            replay.add(step(t))
        assert replay.can_sample() == (steps > 0)
        replay.clear()
        assert (len(replay), replay.can_sample()) == (0, False)
        assert repr(replay).startswith("Replay(0 sampleable rows, framework='jax', buffer=")
        with refused("sample: no batch can be sampled yet, 0 rows", TimeoutError):
            replay.sample()


def test_a_call_inside_of_jit_says_so_and_changes_nothing():
    plain = make(**PRIORITIZED, framework="numpy", steps=4)
    queue = jr.items(capacity=8, batch_size=2, sampler=jr.Queue())
    queue = jr.Replay(queue, example=np.float32(0), framework="numpy")
    queue.add(np.zeros((4, 1)))
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
            patch.setattr(places, "_extend", [function] * 2)
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


def test_a_load_continues_the_ratio_of_samples_per_insert(tmp_path):
    replay, same, other = (
        make(timeout=0.0, example=EXAMPLE, samples_per_insert=ratio) for ratio in (6.0, 6.0, 1.0)
    )
    for t in range(4):
        replay.add(step(t))
        while replay.can_sample():
            replay.sample()
    replay.save(tmp_path / "replay")
    for each in (same, other):
        each.load(tmp_path / "replay")
    assert not same.can_sample()
    same.add(step(4))
    assert same.can_sample()
    other.sample()  # of its own ratio
    assert [path.name for path in tmp_path.iterdir()] == ["replay"]


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
    """If memory is too small for both, all files are verified before the rows are freed. Steps
    that wait stay too; a load replaces them."""
    replay, path = saved
    replay.add(step(4))
    mend = damaged(path)
    if not has_room:
        free_bytes = lambda: 1 if replay._owner._state is not None else 2**40
        monkeypatch.setattr(memory, "free_bytes", free_bytes)
    with refused("rows/.* is not as it was written"):
        replay.load(path)
    with unchanged(replay):
        assert len(replay) == 12
        replay.add(step(5))
        mend()
        replay.load(path)
        assert len(replay) == 9
        replay.add(step(4))


def test_another_error_of_a_device_frees_no_rows(saved, monkeypatch):
    replay, path = saved

    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(checkpoint.Checkpointer, "restore", fails)
    with unchanged(replay), refused("the device is gone", jax.errors.JaxRuntimeError):
        replay.load(path)
    assert len(replay) == 9


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


def test_a_checkpointer_s_checkpoint_can_be_loaded_and_a_replay_s_restored(saved):
    replay, path = saved
    state = checkpoint.restore(path, replay.buffer, EXAMPLE)
    assert_same(jax.tree.leaves(state), rows_of(replay))
    for metadata in (None, {"replay": "mine"}, {"replay": {"num_draws": "many", "limiter": 3}}):
        checkpoint.save(path.parent / "two", replay.buffer, state, metadata=metadata)
        other = make(example=EXAMPLE, samples_per_insert=1.0)
        other.load(path.parent / "two")
        assert len(other) == 9


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
