"""Rows on the host beside a buffer on the device: the same batches for the same keys."""

import dataclasses
import functools
import gc
import itertools
import signal
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.storage.host_rows import HostRows
from tests.conftest import ALL, SOAK
from tests.support.buffers import CATALOG, bits, each
from tests.support.refusals import check_refused, refused
from tests.support.steps import nth

# Masks and final rows; sequences, and writes.
FEW = ("prioritized final_obs, masked", "sequences prioritized, every second start")
# Random goals; rows that are consumed.
READ = ("hindsight prioritized, of episodes that go on", "transitions queue")


def check_equal(found, expected):
    """Check that batches are equal: computed floats within one unit in the last place."""

    def leaf(one, other):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype.kind == "f":
            np.testing.assert_array_max_ulp(one, other)
        else:
            np.testing.assert_array_equal(one, other)

    jax.tree.map(leaf, found, expected)


def scaled(step, next_obs, by):
    """Return the reward times a number."""
    return {"reward": step.reward * by}


def check_all_equal(batches):
    for batch in batches[1:]:
        check_equal(batch, batches[0])


def samples_of(tier, buffer):
    """Return two functions of a state and a key that return the next state, and a plan of a tier's
    batch, or a buffer's batch."""
    if buffer.sampler.consumes:
        return jax.jit(tier.pop), buffer.pop
    draw = jax.jit(tier.draw)
    with_state = lambda function: lambda state, key: (state, function(state, key))
    return with_state(draw), with_state(buffer.sample)


@each([case for case in CATALOG if case.name in READ])
def test_adopted_rows_are_read_as_on_the_device(case):
    whole = case.replay()
    buffer, tier, theirs = jr.jit(whole), jr.tiered(whole), case.filled(whole)
    mine = tier.adopt(jax.tree.map(jnp.copy, theirs))
    (draw, sample), read, get = samples_of(tier, buffer), jax.jit(tier.read), jax.jit(tier.get)
    for key in jax.random.split(jax.random.key(0), 3):
        (mine, plan), (theirs, batch) = draw(mine, key), sample(theirs, key)
        check_equal(read(plan, tier.take(plan)), batch)
        plan = get(mine, batch.index, key)
        check_equal(read(plan, tier.take(plan)), buffer.get(theirs, batch.index, key))


@each([case for case in CATALOG if ALL or case.name in FEW])
def test_batches_are_those_of_a_buffer_on_the_device(case, tmp_path):
    """Also after the rows went to a buffer on the device and came back. Those in files are there
    right after a drop, too."""
    whole = case.replay()
    host, files = jr.tiered(whole), jr.tiered(whole, rows=tmp_path, continue_streams=True)
    buffer, tiers = jr.jit(whole), (host, files)
    states = [buffer.init(case.example()) for _ in range(3)]
    states[:2] = [tier.adopt(state) for tier, state in zip(tiers, states[:2], strict=True)]
    draw, sample = samples_of(host, buffer)
    read, get, update = map(jax.jit, (host.read, host.get, host.update_priorities))
    numbers, indices = jax.jit(lambda state: state.index(jnp.arange(whole.capacity))), []
    rng = np.random.default_rng(0)

    def change(name, *given, **options):
        for which, one in enumerate((*tiers, buffer)):
            states[which] = getattr(one, name)(states[which], *given, **options)

    def check(plans, batch):
        for tier, plan in zip(tiers, plans, strict=True):
            check_equal(read(plan, tier.take(plan)), batch)

    for turn in range(12):
        key = jax.random.key(turn)
        change("extend", case.step(turn, time=5), *case.mask(whole, turn, 5))
        if not whole.layout().lockstep and turn in (2, 7):  # with padding
            some = nth(case.step(turn), [2, 3, 0, 1])
            change("add", some, envs=np.int32([2, -1, 0, 4]))
        (states[0], one), (states[1], other) = (draw(state, key) for state in states[:2])
        states[2], batch = sample(states[2], key)
        check((one, other), batch)
        indices.append(numbers(states[2]))
        for index in indices[-2:]:  # some rows of the earlier turn are overwritten
            plans = [get(state, index, key) for state in states[:2]]
            check(plans, buffer.get(states[2], index, key))
        if whole.sampler.has_priorities:
            priority = rng.random(8).astype(np.float32)
            states[:2] = [update(state, batch.index, priority) for state in states[:2]]
            states[2] = buffer.update_priorities(states[2], batch.index, priority)
        if whole.allow_write:
            index = getattr(batch.experience, "index", None) or batch.index
            reward = rng.random(index.row.shape).astype(np.float32)
            change("write", index, {"reward": reward, "extras": {"flag": reward < 0.5}})
        if whole.allow_write and turn in (5, 8):
            change("map_rows", scaled, np.float32(turn), block=10)
        if whole.autoreset and turn % 4 == 3:
            ended = rng.random(4) < 0.5
            change("end_streams", ended)
        if whole.autoreset and turn == 9:
            change("drop", ended)
        if turn == 10:
            change("clear")
        if turn in (2, 3, 7, 9, 10, 11):  # as after the end of the process
            files.close()
            check_rows(whole, files.init(case.example()), get, read, files, states[2])
            states[1] = files.adopt(jax.tree.map(jnp.copy, states[2]))
        if turn % 6 == 5:
            states[0] = host.adopt(jax.tree.map(jnp.copy, states[2]))
    leaves = lambda state: jax.device_get(jax.tree.leaves(state.replace(rows=None)))
    for tier, state in zip(tiers, states[:2], strict=True):
        check_equal(leaves(state), leaves(states[2]))
        found = buffer.get(jax.device_get(tier.whole(state)), indices[-1], key)
        check_equal(found, buffer.get(states[2], indices[-1], key))


@functools.cache
def told(buffer):
    """Return a program that tells which rows are there, and the size, of a state."""

    def tell(state):
        counted = [getattr(state.counters, name) for name in ("position", "lap", "filled")]
        rows = np.arange(buffer.capacity, dtype=np.int32)
        # with a period, other transitions may be candidates, and rows may be consumed again
        is_same = state.layout.window.period == 1 and not buffer.sampler.consumes
        size = buffer.size(state) if is_same else 0
        return counted, state.is_written(rows), size, state.index(rows)

    return jax.jit(tell)


def check_rows(buffer, found, get, read, tier, state):
    """Check that a folder that was opened again has the rows of a buffer's state."""
    *numbers, index = jax.device_get(told(buffer)(state))
    check_equal(told(tier.index)(found)[:3], tuple(numbers))
    if state.layout.window.period == 1:
        index, key = (
            nth(index, np.resize(np.flatnonzero(numbers[1]), buffer.capacity)),
            jax.random.key(0),
        )
        plan = get(found, index, key)
        batch, wanted = read(plan, tier.take(plan)), jr.jit(buffer).get(state, index, key)
        for name in ("index", "is_valid", "experience"):
            check_equal(getattr(batch, name), getattr(wanted, name))


@pytest.mark.parametrize("place", ["host", "files"])
def test_an_add_waits_for_gathers_of_rows_that_it_would_overwrite(place, monkeypatch, tmp_path):
    take = HostRows.take
    monkeypatch.setattr(HostRows, "take", lambda *given: time.sleep(0.001) or take(*given))
    length, num_rows = 40, 7
    rows = "host" if place == "host" else tmp_path
    tier = jr.tiered(jr.items(capacity=length, batch_size=8), rows=rows)
    state, draw, flights = tier.init(np.int32(0)), jax.jit(tier.draw), []
    for step in range(10_000 if SOAK else 200):
        number = np.arange(step * num_rows, (step + 1) * num_rows, dtype=np.int32)
        state = tier.extend(state, number[:, None])
        plan = draw(state, jax.random.key(step))
        flights.append((plan, tier.take_later(plan)))
        if len(flights) > 3:
            plan, future = flights.pop(0)
            (found,), index = future.result(), jax.device_get(plan.batch.index)
            assert (found == index.lap.astype(np.int32) * length + index.row).all()


def test_a_write_waits_for_all_gathers(monkeypatch):
    tier = jr.tiered(jr.items(capacity=8, batch_size=4, allow_write=True))
    state = tier.extend(tier.init({"x": np.float32(0)}), {"x": np.ones((5, 1), np.float32)})
    plan, written = jax.jit(tier.draw)(state, jax.random.key(0)), threading.Event()
    take, put = HostRows.take, HostRows.write
    write = lambda state: tier.write(state, plan.batch.index, {"x": np.zeros(4, np.float32)})
    mapped = lambda state: tier.map_rows(state, lambda item: {"x": item["x"] + 7}, block=8)
    state = mapped(write(state))  # compiled
    for change in (write, mapped):
        before = tier.take(plan)[0].tolist()
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(HostRows, "write", lambda *given: put(*given) or written.set())
            patch.setattr(HostRows, "take", lambda *given: (written.wait(0.5), take(*given))[1])
            future = tier.take_later(plan)
            state = change(state)
        assert future.result()[0].tolist() == before
    assert tier.take(plan)[0].tolist() == [7] * 4


def test_a_plan_in_a_scan_is_taken_at_once_and_a_late_one_is_refused():
    tier = jr.tiered(jr.items(capacity=8, batch_size=4))
    state = tier.extend(tier.init({"x": np.zeros(3, np.float32)}), {"x": block(0)})
    draws = lambda state, keys: jax.lax.scan(lambda _, key: (0, tier.draw(state, key)), 0, keys)
    keys = jax.random.split(jax.random.key(0), 5)
    plans = jax.jit(draws)(state, keys)[1]
    together = jax.jit(jax.vmap(tier.read))(plans, tier.take(plans))
    for which, key in enumerate(keys):
        check_equal(nth(jax.device_get(together), which), tier.sample(state, key))
    state = tier.extend(state, {"x": block(1)})
    check_refused(
        "take: rows of this plan were overwritten since it was drawn",
        lambda: tier.take(plans),
        lambda: tier.take_later(plans).result(),
    )


def block(seed):
    return np.random.default_rng(seed).normal(size=(6, 1, 3)).astype(np.float32)


class Listed(jr.buffers.RowStore):
    """Rows in lists: a store of one's own."""

    def __init__(self, capacity, specs):
        super().__init__(capacity, specs)
        self.rows = {
            name: [np.zeros(spec.shape, spec.dtype)] * capacity for name, spec in specs.items()
        }

    def write(self, name, rows, values):
        for row, value in zip(rows.tolist(), values, strict=True):
            self.rows[name][row] = value.copy()

    def take(self, name, rows):
        found = [self.rows[name][row] for row in rows.reshape(-1).tolist()]
        spec = self.specs[name]
        return np.array(found, spec.dtype).reshape(*rows.shape, *spec.shape)

    def close(self):
        self.rows = None


@pytest.mark.parametrize("platform", [None, *["gpu", "tpu"] * ALL])
def test_a_replay_has_the_same_batches_wherever_its_rows_lie(tmp_path, platform):
    """Also of a leaf that is stored as bits."""
    buffer = jr.prioritized(
        capacity=60, num_envs=3, batch_size=16, autoreset="next_step", n_step=3, gamma=0.9
    )
    buffer = dataclasses.replace(buffer, platform=platform)

    def step(seed):
        r = np.random.default_rng(seed)
        x = np.asarray(r.normal(size=(3, 2)), jnp.bfloat16)
        return {
            "obs": {"image": r.integers(0, 255, (3, 4, 4), np.uint8), "x": x},
            "action": r.integers(0, 4, 3),
            "reward": r.normal(size=3),
            "terminated": r.random(3) < 0.1,
            "truncated": r.random(3) < 0.1,
        }

    def made(rows, prefetch=2):
        example = nth(step(0), 0)
        return jr.Replay(buffer, example=example, framework="numpy", rows=rows, prefetch=prefetch)

    folders = itertools.count()
    folder = lambda: tmp_path / f"rows{next(folders)}"
    replays = made("device"), made("host"), made(folder()), made(Listed)
    for turn in range(12):
        for replay, at in itertools.product(replays, range(3)):
            replay.add(**step(3 * turn + at))
        if not turn:
            assert len({len(replay) for replay in replays}) == 1
            continue
        batches = [replay.sample() for replay in replays]
        check_all_equal(batches)
        for replay, batch in zip(replays, batches, strict=True):
            replay.update_priorities(batch.index, np.linspace(0, 1, 16))
            if turn == 8:
                replay.end_streams()
    check_all_equal([replay.get(np.arange(20)) for replay in replays])
    assert all(replay.metrics() == replays[0].metrics() for replay in replays)
    assert repr(replays[3]._owner.place.tier).endswith("rows='Listed')")
    # a checkpoint of the one is restored as the other
    others = made("host", 0), made(folder(), 0), made(Listed, 0), made("device", 0)
    for name, replay, other in zip("abcd", replays, others, strict=True):
        replay.save(tmp_path / name, copy=True)
        other.load(tmp_path / name)
    check_all_equal([other.sample() for other in others])
    wide = dataclasses.replace(buffer, capacity=40, num_envs=2)
    wide_replay = jr.Replay(
        wide, example=others[0]._owner.example, framework="numpy", rows=folder()
    )
    wide_replay.load(tmp_path / "a")  # with a mapping as the example, and other envs
    assert len(wide_replay) > 10
    for replay in replays:
        replay.merge(others[0])
    check_all_equal([replay.sample() for replay in replays])
    state = replays[1].state
    for rows in ("host", folder()):
        again = jr.Replay(buffer, framework="numpy", rows=rows, state=state)
        assert len(again) == len(replays[0])
        check_equal(again.get(np.arange(60)), replays[0].get(np.arange(60)))
        found, wanted = again.inspect(), replays[0].inspect()
        assert repr(found).partition(" source=")[2] == repr(wanted).partition(" source=")[2]
    with refused("the folder of its rows has some already"):
        again.close()
        del again
        jr.Replay(buffer, framework="numpy", rows=rows, state=state)


def items_tier(capacity=8, num_rows=5):
    tier = jr.tiered(jr.items(capacity=capacity, batch_size=4))
    state = tier.init(np.int32(0))
    return tier, tier.extend(state, np.arange(num_rows, dtype=np.int32)[:, None])


def rows_of(tier, state, num_rows):
    plan = jax.jit(tier.get)(state, np.arange(num_rows))
    return tier.take(plan)[0].tolist()


def test_an_add_that_fails_moves_nothing_or_says_that_rows_are_lost(monkeypatch):
    tier, old = items_tier(num_rows=3)
    more = np.int32([[3], [4]])
    state = tier.extend(old, more)
    with refused("extend: this state was donated to an earlier call"):
        tier.extend(old, more + 100)
    for wrong in ({"envs": [0, 0]}, {"mask": np.ones((2, 1), bool)}, {"priority": more[:, 0]}):
        with refused("extend: "):
            tier.extend(state, more + 100, **wrong)
    with refused(r"add:\n.*expected int32\[1\]"):
        tier.add(state, np.int32([1, 2]))
    assert rows_of(tier, state, 5) == [0, 1, 2, 3, 4]
    state = tier.add(state, np.int32([5]))
    assert rows_of(tier, state, 6) == [0, 1, 2, 3, 4, 5]

    def failing(*_):
        raise OSError("no memory")

    # before anything is stored, the rows stay
    with pytest.MonkeyPatch.context() as patch, refused("no memory", OSError):
        patch.setattr("jaxreplay.buffers.tiered._extend", failing)
        tier.add(state, np.int32([6]))
    assert rows_of(tier, state, 6) == [0, 1, 2, 3, 4, 5]
    plan = jax.jit(tier.get)(state, np.arange(6))
    monkeypatch.setattr(HostRows, "write", failing)
    with refused("no memory", OSError):
        tier.add(state, np.int32([6]))
    with refused(r"take: rows were lost in a call that raised OSError", RuntimeError):
        tier.take(plan)
    monkeypatch.undo()
    assert rows_of(tier, tier.add(tier.init(np.int32(0)), np.int32([7])), 1) == [7]


def test_an_interrupt_leaves_the_state_of_the_call_in_reach(monkeypatch):
    tier, state = items_tier(num_rows=3)
    write = HostRows.write

    def interrupted(*given):
        write(*given)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(HostRows, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tier.add(state, np.int32([3]))
    monkeypatch.undo()
    with refused("add: this state was donated to a call that was interrupted .* tier.newest"):
        tier.add(state, np.int32([4]))
    assert rows_of(tier, tier.newest, 4) == [0, 1, 2, 3]
    state = tier.add(tier.newest, np.int32([4]))
    assert tier.newest is None
    assert rows_of(tier, state, 5) == [0, 1, 2, 3, 4]
    monkeypatch.setattr(HostRows, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):  # in the first part of a block longer than the ring
        tier.extend(state, np.arange(20, 40, dtype=np.int32)[:, None])
    monkeypatch.undo()
    assert sorted(rows_of(tier, tier.newest, 8)) == [*range(32, 40)]


@pytest.mark.parametrize("place", ["host", "files"])
def test_a_replay_that_is_closed_leaves_no_thread(place, tmp_path):
    rows, before = ("host" if place == "host" else tmp_path), {*threading.enumerate()}
    with jr.Replay(jr.items(capacity=8, batch_size=4), rows=rows, prefetch=1) as replay:
        replay.add(np.int32([1]))
        replay.sample()
        assert {*threading.enumerate()} > before
    assert {*threading.enumerate()} <= before
    assert repr(replay._owner.place.tier).endswith(f"rows={str(rows)!r})")


def test_gathers_that_are_finished_are_dropped():
    tier, state = items_tier(num_rows=8)
    draw = jax.jit(tier.draw)
    futures = [tier.take_later(draw(state, key)) for key in jax.random.split(jax.random.key(1), 50)]
    futures[-1].result()
    tier.extend(state, np.full((8, 1), 100, np.int32))
    assert not tier._flights


def test_a_draw_is_traced_anew_in_each_program():
    factor = {}

    class Scaled(jr.views.Item):
        def read(self, reader):
            return reader.item() * factor["now"]

    tier = jr.tiered(jr.ReplayBuffer(capacity=8, batch_size=4, sampler=jr.Uniform(), view=Scaled()))
    factor["now"] = 1
    state = tier.extend(tier.init(np.float32(0)), np.ones((5, 1), np.float32))
    for value in (1, 2):
        factor["now"] = value

        @jax.jit
        def drawn(state, given):
            factor["now"] = given
            return tier.draw(state, jax.random.key(0))

        for given in (np.float32(value), np.float32(10 * value)):
            plan = drawn(state, given)
            found = jax.jit(tier.read)(plan, tier.take(plan)).experience
            assert found.tolist() == [given] * 4


def test_a_state_of_another_example_is_checked_anew():
    tier, _ = items_tier()
    state = tier.init(np.zeros(3, np.int32))
    with refused(r"expected int32\[5, 1, 3\]"):
        tier.extend(state, np.zeros((5, 1), np.int32))


def test_rows_of_a_replay_that_is_dropped_are_freed():
    replay = jr.Replay(jr.items(capacity=8, batch_size=4), rows="host", prefetch=1)
    replay.add(np.int32([1]))
    replay.sample()
    store = weakref.ref(replay._owner.place.tier._store)
    del replay
    for _ in range(100):  # the thread may still hold its last gather
        gc.collect()
        if store() is None:
            break
        time.sleep(0.05)
    assert store() is None


class Looping(jr.views.View):
    """Read rows in a loop."""

    def read(self, reader):
        return jax.lax.map(lambda k: reader.action(0) + k, jnp.arange(2))


class Doubled(jr.ReplayBuffer):
    """A buffer with a method of its own."""

    def sample(self, state, key=None, batch_size=None, **options):
        batch = super().sample(state, key, batch_size, **options)
        return batch.replace(experience=2 * batch.experience)


def test_a_subclass_of_a_buffer_keeps_its_methods():
    sizes = {"capacity": 8, "batch_size": 4, "sampler": jr.Uniform(), "view": jr.views.Item()}
    own, key = Doubled(**sizes), jax.random.key(0)
    rows = np.arange(5, dtype=np.float32)[:, None]
    tier, same = jr.tiered(own), jr.tiered(Doubled(**sizes))
    assert tier.index == same.index != jr.tiered(jr.ReplayBuffer(**sizes)).index
    state = tier.extend(tier.init(np.float32(0)), rows)
    other = jr.jit(own).extend(own.init(np.float32(0)), rows)
    got, wanted = (one.sample(its, key) for one, its in ((tier, state), (jr.jit(own), other)))
    assert bits(got) == bits(wanted)


def test_rows_that_do_not_fit_are_refused():
    tier = jr.tiered(jr.items(capacity=2**20, batch_size=2))
    with refused("init: the rows take 4,398,046,511,104 bytes on the host, which", MemoryError):
        tier.init(jax.ShapeDtypeStruct((2**20,), np.float32))


def test_what_cannot_be_read_from_the_host_is_refused():
    tier = jr.tiered(jr.items(capacity=8, batch_size=2))
    state = tier.init({"x": np.float32(0)})
    with refused("the rows of x lie on the host, which no program reads: use draw, take and read"):
        jax.jit(tier.index.sample)(state, jax.random.key(0))
    shared = {"capacity": 32, "batch_size": 2, "autoreset": "next_step"}
    x, flag = np.float32(0), np.bool_(False)
    goals = {"achieved_goal": x, "desired_goal": x}
    example = jr.Step(obs=goals, action=x, reward=x, terminated=flag, truncated=flag)
    depends = jr.hindsight(
        jr.uniform(**shared, n_step=2),
        lambda achieved, goal, step: achieved - goal,
        terminated_fn=lambda achieved, goal, step: achieved == goal,
    )
    loops = jr.ReplayBuffer(**shared, sampler=jr.Uniform(), view=Looping())
    for buffer, message in (
        (depends, "the numbers of the rows of .* depend on other rows"),
        (loops, "reads rows inside of scan"),
    ):
        tier = jr.tiered(buffer)
        with refused(message):
            jax.eval_shape(tier.draw, tier.init(example), jax.random.key(0))
