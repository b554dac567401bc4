"""A buffer adopts the rows of any other one, as if it had been fed with the same steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.samplers import PrioritySampler
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.layout import Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.views import SequenceView
from tests.conftest import ALL
from tests.support.buffers import bits, everything, jitted, jitted_draw
from tests.support.steps import nth, plain_step

NUM_ENVS, TIME = 3, 70
ADD, END, CLEAR = range(3)
FORMS = ("next_step", "same_step", "same_step_no_final_obs")


def goal_of(obs):
    return {"at": obs[..., None] % 3, "goal": -obs[..., None]}


def near(achieved, goal, step):
    return jnp.sum(achieved - goal) + 0 * step.reward


VIEWS = (
    jr.views.TransitionView(n_step=1, gamma=0.9),
    jr.views.TransitionView(n_step=3, gamma=0.5),
    SequenceView(length=3),
    SequenceView(length=2, burn_in=2, period=2),
    SequenceView(length=2, period=3, cross_episodes=True),
    jr.views.FrameStack(num_frames=3, inner=jr.views.TransitionView(n_step=2)),
    jr.views.ChunkView(obs=(-2, 0), action=3),
    jr.views.FutureView(),
    jr.views.Hindsight(
        inner=jr.views.TransitionView(), reward_fn=near, achieved_key="at", desired_key="goal"
    ),
)
SAMPLERS = (
    jr.Uniform(),
    jr.Prioritized(alpha=0.6),
    jr.Prioritized(alpha=1.5, stratified=False),
    jr.Prioritized(alpha=0.0),
    jr.Recent(decay=0.8),
    jr.Queue(),
    jr.WithoutReplacement(),
    jr.UniformEpisodes(),
)


def buffer_of(r, autoreset, num_envs=NUM_ENVS):
    """Return a random buffer."""
    views = VIEWS[: -1 if autoreset == "same_step_no_final_obs" else None]  # no final goals
    while True:
        try:
            return jr.ReplayBuffer(
                capacity=num_envs * int(r.choice([11, 16, 29])),
                num_envs=num_envs,
                batch_size=8,
                sampler=SAMPLERS[r.integers(len(SAMPLERS))],
                view=views[r.integers(len(views))],
                autoreset=autoreset,
                allow_mask=bool(r.random() < 0.5),
                track_episodes=bool(r.random() < 0.5),
            )
        except ValueError:  # a sampler that does not work with the view
            continue


def history_of(r, autoreset, has_masks, num_envs=NUM_ENVS, clears=True):
    """Return operations [T], steps [T, E] and masks [T, E] or None."""
    shape = (TIME, num_envs)
    number = np.arange(TIME * num_envs, dtype=np.float32).reshape(shape)
    done = r.random(shape)
    obs = goal_of(number)
    steps = jr.Step(
        obs=obs,
        action=number,
        reward=number,
        terminated=done < 0.08,
        truncated=done > 0.92,
        final_obs=goal_of(number + 0.5) if autoreset == "same_step" else None,
    )
    mask = None
    if has_masks:
        mask = r.random(shape) < 0.8
        if autoreset == "next_step":  # the step after a done is never masked
            mask[1:] |= (done < 0.08)[:-1] | (done > 0.92)[:-1] | ~mask[:-1]
    operations = r.choice(3, TIME, p=[0.94, 0.04, 0.02] if clears else [1, 0, 0])
    return operations, steps, mask


@functools.cache
def feeding(buffer):
    """Return a program that feeds an empty buffer with a history."""

    def feed(operations, steps, mask, priority):
        def go(state, now):
            operation, step, mask, priority = now
            ways = (
                lambda state: buffer.add(state, step, mask, priority),
                lambda state: buffer.end_streams(state),
                lambda state: buffer.clear(state),
            )
            return jax.lax.switch(operation, ways, state), None

        example = jax.tree.map(lambda leaf: leaf[0, 0], steps)
        return jax.lax.scan(go, buffer.init(example), (operations, steps, mask, priority))[0]

    return jax.jit(feed)


def fed(buffer, history, priority):
    operations, steps, mask = history
    return feeding(buffer)(
        operations,
        steps,
        mask if buffer.allow_mask else None,
        priority if isinstance(buffer.sampler, PrioritySampler) else None,
    )


@functools.cache
def adopting(buffer):
    return jax.jit(buffer.adopt)


@functools.cache
def reading(buffer):
    """Return a program that reads all that is known of each row."""

    def read(state):
        row, key = jnp.arange(buffer.capacity), jax.random.key(1)
        found = {
            "obs": stored_arrays.values(state.rows.steps.obs["goal"])[:, 0],
            "flags": state.rows.flags,
            "age": state.age(row),
            "is_written": state.is_written(row),
            "batch": buffer.get(state, row, key),
            "numbers": buffer.sampler.numbers(state.sampler, Sampleable.of(state)),
        }
        if buffer.has_table:
            table = buffer.episode_table(state)
            found["ends"] = table.steps_to_end(row), table.steps_from_start(row)
            found["whole"] = table.is_complete(row)
        return found

    return jax.jit(read)


def rows_of(buffer, state):
    """Return what is known of each stored row, by the stream and the age of the row."""
    found = jax.device_get(reading(buffer)(state))
    numbers = found.pop("numbers")
    mass = numbers.get("mass", np.full(buffer.capacity, np.nan))
    rows = {}
    for row in np.flatnonzero(found["is_written"]):
        own = jax.tree.map(lambda leaf, row=row: leaf[row], found)
        rows[int(row) // buffer.length, int(own.pop("age"))] = own | {"mass": mass[row]}
    return rows


def gives_up(window):
    """Return which rows before the end of a stream are given up."""
    every = window.after is None or (window.after > 0 and window.crosses_episodes)
    return window.after != 0, every or window.needs_final_obs


def known(rows):
    """Return the rows of episodes whose first row is stored."""
    starts = {}
    for (env, age), row in rows.items():
        if row["flags"] & row_flags.FIRST:
            starts[env] = max(starts.get(env, -1), age)
    return {name for name in rows if name[1] <= starts.get(name[0], -1)}


NUM_PAIRS = 200 if ALL else 12


@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_it_is_as_if_the_buffer_had_been_fed_with_the_same_steps(seed):
    r = np.random.default_rng(seed)
    autoreset = FORMS[seed % 3]
    old, new = (buffer_of(r, autoreset) for _ in range(2))
    history = history_of(r, autoreset, old.allow_mask and new.allow_mask)
    priority = r.choice([0.0, 0.5, 1.0, 3.0], (TIME, NUM_ENVS)).astype(np.float32)
    if not isinstance(old.sampler, PrioritySampler):
        priority = None
    before, wanted = (fed(buffer, history, priority) for buffer in (old, new))
    got = adopting(new)(before)
    check_alike(old, new, before, got, wanted)
    check_back(old, new, before, got)


def check_alike(old, new, before, got, wanted):
    """Check a state that was adopted against that of a buffer that was fed with the same steps."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    its, found, expected = rows_of(old, before), rows_of(new, got), rows_of(new, wanted)
    is_padded = new.layout().lockstep and not old.layout().lockstep
    if is_padded:  # rows without a step, to which all streams are filled up
        padding = [name for name in found if name not in its]
        assert not any(found.pop(name)["batch"].is_valid for name in padding)
    assert set(found) <= set(its)
    assert set(found) == {name for name in its if name[1] < new.length}
    # A period counts from an episode's first row, or across episodes from the first step.
    is_known = old.window.period == new.window.period or not new.window.crosses_episodes
    is_known &= old.window.crosses_episodes == new.window.crosses_episodes or new.window.period == 1
    is_known &= gives_up(old.window) <= gives_up(new.window)
    same_period = old.window.period == new.window.period
    # A clear begins a ring anew, at a number that depends on its length.
    is_there = bits(got.counters.position) == bits(wanted.counters.position)
    compared = set(found) if same_period else known(found)
    for name in compared & set(expected):
        mine, its_own = found[name], expected[name]
        assert mine["obs"] == its_own["obs"]
        if not is_known:
            continue
        assert mine["flags"] == its_own["flags"], name
        if mine["batch"].is_valid != its_own["batch"].is_valid:  # its look-back is not stored
            assert its_own["batch"].is_valid
            assert old.length < new.length or is_padded
            continue
        if not mine["batch"].is_valid:
            continue
        items = mine["batch"].experience, its_own["batch"].experience
        assert (new.view.is_random and not is_there) or bits(items[0]) == bits(items[1]), name
        if "ends" in mine and old.length >= new.length:
            assert bits((mine["ends"], mine["whole"])) == bits((its_own["ends"], its_own["whole"]))
        if isinstance(new.sampler, PrioritySampler):
            check_mass(old, new, its[name], mine, its_own, got)
    if is_known and same_period and is_there and old.length >= new.length:
        check_draws(old, new, got, wanted)


def check_mass(old, new, its, mine, expected, got):
    if isinstance(old.sampler, PrioritySampler) and np.isnan(its["mass"]):
        # the old buffer could not sample it, so it has no priority
        largest = float(got.sampler.max_priority) ** new.sampler.alpha
        np.testing.assert_allclose(mine["mass"], largest, rtol=1e-5)
    elif not (isinstance(old.sampler, PrioritySampler) and old.sampler.alpha == 0):
        np.testing.assert_allclose(mine["mass"], expected["mass"], rtol=1e-5)


def check_draws(old, new, got, wanted):
    """Check samples under fixed keys."""
    is_prioritized = isinstance(new.sampler, PrioritySampler)
    if is_prioritized and bits(got.sampler.tree) != bits(wanted.sampler.tree):
        return
    for seed in range(3):
        batches = [jitted_draw(new)(state, jax.random.key(seed)) for state in (got, wanted)]
        batches = [batch.replace(index=batch.index.row) for batch in batches]
        assert bits(batches[0]) == bits(batches[1])


def check_back(old, new, before, got):
    """Check that a buffer gets its own rows back."""
    again = adopting(old)(got)
    assert jax.tree.structure(again) == jax.tree.structure(before)
    its, found = rows_of(old, before), rows_of(old, again)
    found = {name: row for name, row in found.items() if name in its}
    assert set(found) == {name for name in its if name[1] < min(old.length, new.length)}
    stays = gives_up(new.window) <= gives_up(old.window)
    for name, row in found.items():
        assert row["obs"] == its[name]["obs"]
        if old.view.is_random or not stays:
            continue
        if row["batch"].is_valid and its[name]["batch"].is_valid:
            assert bits(row["batch"].experience) == bits(its[name]["batch"].experience)


# Other numbers of envs: streams are dealt out, and cut.


def episodes_of(buffer, state):
    """Return the observations of each env's rows, oldest first, and which are sampleable."""
    found = rows_of(buffer, state)
    per_env = []
    for env in range(buffer.num_envs):
        own = [found[name] for name in sorted(found, key=lambda name: -name[1]) if name[0] == env]
        own = [row for row in own if row["flags"] != row_flags.FIRST | row_flags.FINAL]
        per_env.append([(float(row["obs"]), bool(row["batch"].is_valid)) for row in own])
    return per_env


def plain(num_envs, capacity, **options):
    return jr.uniform(
        **{"batch_size": 8, "autoreset": "next_step", "allow_mask": True, **options},
        capacity=capacity,
        num_envs=num_envs,
    )


def ended(buffer, state):
    return jax.jit(buffer.end_streams)(state)


@pytest.mark.parametrize(("before", "after"), [(5, 2), (2, 5), *[(3, 1), (1, 3)] * ALL])
@pytest.mark.parametrize("allow_mask", [True, False])
def test_whole_streams_are_dealt_out(before, after, allow_mask):
    """Stream `e` goes to env `e mod num_envs`. Rows that are filled up are never sampled."""
    r = np.random.default_rng(before)
    history = history_of(r, "next_step", False, before, clears=False)
    old, new = plain(before, before * 20), plain(after, after * 60, allow_mask=allow_mask)
    state = fed(old, history, None)
    expected = [[] for _ in range(after)]
    for env, rows in enumerate(episodes_of(old, ended(old, state))):
        expected[env % after] += rows
    expected = [rows[-60:] for rows in expected]
    got = episodes_of(new, adopting(new)(state))
    if allow_mask:
        assert got == expected
    else:  # the oldest of a long stream make room
        assert [rows[-len(own) :] for own, rows in zip(got, expected, strict=True)] == got
        assert max(map(len, got)) == min(60, max(map(len, expected)))


@pytest.mark.parametrize("allow_mask", [True, False])
def test_merge_appends_the_rows_of_another_buffer(allow_mask):
    r = np.random.default_rng(7)
    own, other = plain(2, 80, allow_mask=allow_mask), plain(3, 45, n_step=3, track_episodes=True)
    mine, its = (
        fed(buffer, history_of(r, "next_step", False, buffer.num_envs, clears=False), None)
        for buffer in (own, other)
    )
    mine = jitted(own, "clear")(mine)
    time = np.arange(9, dtype=np.float32)[:, None] + np.array([1000.0, 2000.0], np.float32)
    no = np.zeros(time.shape, bool)
    block = jr.Step(goal_of(time), time, time, terminated=no, truncated=no)
    mine = jax.jit(own.extend)(mine, block)
    expected = episodes_of(own, ended(own, mine))
    for env, rows in enumerate(episodes_of(other, ended(other, its))):
        wanted = [obs for obs, _ in rows]
        expected[env % 2] = expected[env % 2] + [(obs, None) for obs in wanted]
    got = episodes_of(own, jax.jit(own.merge)(mine, its))
    for found, rows in zip(got, expected, strict=True):
        kept = rows[-len(found) :]
        assert [obs for obs, _ in found] == [obs for obs, _ in kept]
        assert any(is_valid for _, is_valid in found)
    # new steps go on
    state = jax.jit(own.extend)(jax.jit(own.merge)(mine, its), block)
    assert episodes_of(own, state)[1][-1] == (-2008.0, False)


def test_priorities_are_merged_though_their_exponents_differ():
    """The priorities are 1 to 4 and 5 to 8; one row of the other has none."""
    make = lambda alpha, num_envs: jr.items(
        capacity=16, num_envs=num_envs, batch_size=4, sampler=jr.Prioritized(alpha=alpha)
    )
    own, other = make(1.0, 2), make(0.5, 1)
    first, second = (
        np.arange(1, 5, dtype=np.float32).reshape(2, 2),
        np.arange(5, 9, dtype=np.float32).reshape(4, 1),
    )
    mine, its = (
        jr.jit(buffer).extend(buffer.init(np.float32(0)), priority, None, priority)
        for buffer, priority in ((own, first), (other, second))
    )
    merged = jax.jit(own.merge)(mine, its)
    batch = jitted(own, "get")(merged, np.arange(16, dtype=np.int32))
    found = np.asarray(batch.experience)[np.asarray(batch.is_valid)]
    assert sorted(found.tolist()) == [*range(1, 9)]
    np.testing.assert_allclose(np.asarray(batch.probability)[batch.is_valid] * 36, found, rtol=1e-5)
    assert float(merged.sampler.max_priority) == 8


def test_items_are_dealt_one_by_one():
    old = jr.items(capacity=12, num_envs=3, batch_size=4, allow_mask=True)
    state = old.init(np.int32(0))
    time = np.arange(6, dtype=np.int32)[:, None]
    mask = time < np.array([6, 2, 1])
    state = jr.jit(old).extend(state, time + np.array([0, 100, 200], np.int32), mask)
    new = jr.items(capacity=20, num_envs=2, batch_size=4)
    got = jax.jit(new.adopt)(state)
    # rows 2 to 5, 100 and 101, 200: one of seven is left out
    assert int(jitted(new, "size")(got)) == 6
    items = np.asarray(got.rows.steps)[np.asarray(everything(new)(got, 0).is_valid)]
    assert len(set(items.tolist())) == 6
    assert set(items.tolist()) < {2, 3, 4, 5, 100, 101, 200}


def test_popped_rows_stay_popped():
    make = lambda num_envs, capacity: jr.transitions(
        capacity=capacity,
        num_envs=num_envs,
        batch_size=6,
        autoreset="next_step",
        allow_mask=True,
        sampler=jr.Queue(),
    )
    old = make(2, 40)
    history = history_of(np.random.default_rng(3), "next_step", False, 2, clears=False)
    state = fed(old, history, None)
    popping = jax.jit(old.pop)
    state, batch = popping(state, jax.random.key(0))
    popped = set(np.asarray(batch.experience.reward).tolist())
    size = int(jitted(old, "size")(state))
    for num_envs, capacity in ((2, 60), (2, 30), (4, 80)):
        new = make(num_envs, capacity)
        got = adopting(new)(state)
        assert int(jitted(new, "size")(got)) <= size + 2 + capacity // 40
        _, batch = jax.jit(new.pop)(got, jax.random.key(0))
        assert batch.is_valid.all()
        assert not popped & set(np.asarray(batch.experience.reward).tolist())


class Ages(jr.Uniform):
    """A sampler with a number of each row, in the order of the rows."""

    def init(self, layout):
        return {"seen": jnp.zeros(layout.capacity, jnp.int32), "count": jnp.int32(0)}

    def observe(self, state, effect, priority):
        row = effect.row.reshape(-1)
        is_new = effect.became_sampleable.reshape(-1)
        row = jnp.where(is_new, row, len(state["seen"]))
        seen = state["seen"].at[row].set(state["count"] + 1, mode="drop")
        return {"seen": seen, "count": state["count"] + 1}


def test_numbers_of_a_sampler_go_where_the_rows_go():
    make = lambda capacity: jr.items(capacity=capacity, num_envs=2, batch_size=2, sampler=Ages())
    old = make(10)
    state = old.init(np.int32(0))
    add = jax.jit(old.add)
    for time in range(7):
        state = add(state, np.array([time, 100 + time], np.int32))
    for capacity in (6, 20):
        got = jax.jit(make(capacity).adopt)(state)
        is_row = np.asarray(everything(make(capacity))(got, 0).is_valid)
        items = np.asarray(got.rows.steps)[is_row]
        seen = np.asarray(got.sampler["seen"])[is_row]
        assert (seen == items - np.where(items >= 100, 100, 0) + 1).all()
        assert int(got.sampler["count"]) == 7


class Lookalike(jr.Uniform):
    """A sampler whose leaves have the names and the shapes of those of others."""

    def init(self, layout):
        num = layout.capacity
        return {
            "mass": jnp.full(num, 0.5),
            "is_consumed": jnp.ones(num, bool),
            "seen": jnp.full(num, 3, jnp.int32),
            "count": jnp.int32(7),
        }


class Follower(Lookalike):
    def size(self, state, sampleable):
        return sampleable.count().sum() - 1


def test_a_sampler_s_numbers_are_those_of_its_class_whatever_their_names_are():
    shared = {"capacity": 8, "num_envs": 2, "batch_size": 2}
    make = lambda sampler: jr.items(**shared, sampler=sampler)
    fed = lambda buffer: buffer.extend(buffer.init(jnp.float32(0)), jnp.ones((3, 2)))
    others = [
        make(sampler)
        for sampler in (
            jr.Prioritized(),
            jr.Queue(),
            jr.OnlineQueue(),
            jr.blend(mass=(jr.Prioritized(), 0.5), seen=(Ages(), 0.5)),
            Ages(),
        )
    ]

    @jax.jit
    def run():
        plain, lookalike = (fed(make(sampler)) for sampler in (jr.Uniform(), Lookalike()))
        blended = make(jr.blend(a=(jr.Uniform(), 0.5), b=(Follower(), 0.5))).adopt(lookalike)
        return (
            [[other.adopt(state).sampler for state in (plain, lookalike)] for other in others],
            [lookalike.sampler, blended.sampler["b"], make(Lookalike()).adopt(blended).sampler],
        )

    foreign, own = run()
    for buffer, (wanted, got) in zip(others, foreign, strict=True):
        assert bits(got) == bits(wanted), buffer
    assert bits(own[0]) == bits(own[1]) == bits(own[2])


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_newest_row_that_is_no_candidate_after_an_adopt_is_not_given_up_as_one(num_steps):
    shared = {"capacity": 40, "batch_size": 4, "autoreset": "next_step", "length": 1}
    every, second = (jr.jit(jr.sequences(**shared, period=period)) for period in (1, 2))
    step = plain_step(np.zeros(1, np.float32))
    states = [buffer.init(nth(step, 0)) for buffer in (every, second)]
    for _ in range(num_steps):
        states = [
            buffer.add(state, step) for buffer, state in zip((every, second), states, strict=True)
        ]
    adopted = second.end_streams(second.adopt(states[0]))
    assert second.size(adopted) == second.size(second.end_streams(states[1])) == num_steps // 2


@pytest.mark.parametrize(
    ("before", "after"), [("next_step", "same_step"), ("same_step", "next_step")]
)
def test_two_forms_of_autoreset_store_the_same_rows(before, after):
    """A step that is done, then its final row. One that is still to come does not come."""
    old, new = (plain(2, 60, autoreset=form, n_step=2) for form in (before, after))
    history = history_of(np.random.default_rng(5), before, False, 2, clears=False)
    state = fed(old, history, None)
    owes = row_flags.owes_final_row(state.counters.last_flags)
    wanted = state if before == "same_step" else jax.jit(old.end_streams)(state, owes)
    assert episodes_of(new, adopting(new)(state)) == episodes_of(old, wanted)


def test_a_state_of_another_platform_is_adopted():
    history = history_of(np.random.default_rng(6), "next_step", False, 2, clears=False)
    make = lambda platform: jr.prioritized(
        capacity=40, num_envs=2, batch_size=8, autoreset="next_step", platform=platform
    )
    states = {
        platform: fed(make(platform), history, None) for platform in ("cpu", *["gpu"] * ALL, "tpu")
    }
    for name, state in states.items():
        for other, wanted in states.items():
            got = adopting(make(other))(state)
            assert jax.tree.structure(got) == jax.tree.structure(wanted), (name, other)
            mine, its = (rows_of(make(other), one) for one in (got, wanted))
            assert jax.tree.map(lambda a, b: bits(a) == bits(b), mine, its)


def test_a_population_adopts_and_merges():
    old, new = plain(2, 40), plain(3, 90, n_step=2)
    histories = [
        history_of(np.random.default_rng(seed), "next_step", False, 2, clears=False)
        for seed in range(2)
    ]
    states = [fed(old, history, None) for history in histories]
    population = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    got = jax.jit(jax.vmap(lambda state: new.merge(new.adopt(state), state)))(population)
    for which, state in enumerate(states):
        wanted = jax.jit(lambda state: new.merge(new.adopt(state), state))(state)
        own = nth(got, which)
        assert episodes_of(new, own) == episodes_of(new, wanted)


@pytest.mark.parametrize(("length", "other"), [(29, 11), (11, 29), (2**30 - 35, 2**30 - 1)])
def test_a_row_keeps_its_number_on_another_ring(length, other):
    """Numbers exceed 32 bits, and laps wrap around."""
    r = np.random.default_rng(0)
    lap = np.append(r.integers(0, 2**32, 40, np.uint32), np.uint32([0, 1, 2**32 - 1]))
    position = r.integers(0, length, len(lap), np.int32)
    moved = jax.jit(ring.moved, static_argnums=(2, 3))(lap, position, length, other)
    numbers = [int(a) * length + int(b) for a, b in zip(lap, position, strict=True)]
    assert moved[0].tolist() == [number // other % 2**32 for number in numbers]
    assert moved[1].tolist() == [number % other for number in numbers]


def test_steps_that_stay_are_not_copied():
    """Rows, capacity and envs are unchanged: neither a program nor a call copies a leaf."""
    options = {"capacity": 2**15, "num_envs": 2, "batch_size": 8, "autoreset": "next_step"}
    old, new = jr.uniform(**options), jr.prioritized(**options, n_step=3)
    zero, no = np.float32(0), np.bool_(False)
    action = np.zeros(77, np.float32)
    example = jr.Step(goal_of(zero), action, zero, terminated=no, truncated=no)
    state = old.init(example)
    text = jax.jit(new.adopt, donate_argnums=0).lower(state).compile().as_text()
    assert not [line for line in text.splitlines() if "77]" in line and "copy(" in line]
    pointer = state.rows.steps.action.unsafe_buffer_pointer()
    assert jr.jit(new).adopt(state).rows.steps.action.unsafe_buffer_pointer() == pointer


class Pairs(jr.views.View):
    """Two items of a stream."""

    @property
    def window(self):
        return Window(after=1)

    @property
    def needs_steps(self):
        return False

    def read(self, reader):
        return reader.item(jnp.arange(2))


@pytest.mark.no_xla
def test_what_cannot_be_adopted_is_refused():
    old, new = plain(2, 40, autoreset="same_step_no_final_obs"), plain(2, 40)
    step = history_of(np.random.default_rng(0), "next_step", False)[1]
    state = jax.eval_shape(old.init, jax.tree.map(lambda leaf: leaf[0, 0], step))
    items = jr.items(capacity=40, batch_size=4)
    pairs = jr.ReplayBuffer(
        capacity=40, num_envs=2, batch_size=4, sampler=jr.Uniform(), view=Pairs()
    )
    of_items = jax.eval_shape(items.init, np.float32(0))
    stacked = jr.frame_stack(plain(2, 40, autoreset="same_step_no_final_obs"), 3, key="none")
    for buffer, given, message in (
        (new, state, "adopt: autoreset: the state's is 'same_step_no_final_obs', this buffer's"),
        (items, state, "adopt: autoreset: the state's is 'same_step_no_final_obs', this buffer's"),
        (items, 7, "adopt: takes the state of a ReplayBuffer, got"),
        (pairs, of_items, "adopt: num_envs: the state's is 1, this buffer's 2, but items have no"),
        (stacked, state, "adopt: .*none"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(buffer.adopt, given)
    other = jax.eval_shape(items.init, {"x": np.float32(0)})
    with pytest.raises(ValueError, match=r"merge:\s+steps: missing(.|\n)*steps.x: unexpected"):
        jax.eval_shape(items.merge, of_items, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("view", [5, 6, 3], ids=["stack", "chunk", "burn-in"])
def test_no_window_reaches_from_one_state_into_rows_that_went_round(form, view):
    """The other's oldest rows are in the middle of an episode, whose start is overwritten."""
    make = lambda length: jr.ReplayBuffer(
        capacity=length, batch_size=4, sampler=jr.Uniform(), view=VIEWS[view], autoreset=form
    )

    def steps(start, num, ends):
        number = start + np.arange(num, dtype=np.float32)[:, None]
        obs = goal_of(number)
        final_obs = goal_of(number + 0.5) if form == "same_step" else None
        end = (number == number[-1]) & ends
        return plain_step(number, obs=obs, terminated=end, final_obs=final_obs)

    small, large = make(8), make(40)

    @jax.jit
    def run(own, others):
        example = nth(own, (0, 0))
        state = large.extend(large.init(example), own)
        merged = large.merge(state, small.extend(small.init(example), others))
        return large.get(merged, jnp.arange(40))

    for ends in (False, True):
        batch = jax.device_get(run(steps(0, 4, ends), steps(100, 12, False)))
        assert batch.is_valid.sum() >= 4
        for which in np.flatnonzero(batch.is_valid):
            goal = -nth(batch.experience.obs, which)["goal"].ravel()
            seen = goal[goal != 0]
            assert (seen < 50).all() or (seen >= 50).all()
