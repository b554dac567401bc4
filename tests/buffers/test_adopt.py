"""A buffer adopts the rows of any other one, as if it had been fed with the same steps."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.views import SequenceView
from tests.conftest import ALL
from tests.support.buffers import bits, jitted, jitted_draw
from tests.support.steps import begun, nth, plain_step, stacked

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


# Of each form, in a ring: each adopts the rows of the one before. Numbers of the view and of the
# sampler, the length, and whether there are a mask and a table.
POOLS = {
    "next_step": ((0, 3, 29, 1, 1), (1, 5, 29, 1, 0), (5, 6, 16, 1, 1, "tpu")),
    "same_step": ((6, 2, 29, 0, 1), (0, 7, 29, 1, 1), (3, 1, 16, 1, 1)),
    "same_step_no_final_obs": ((0, 4, 29, 0, 0), (1, 1, 16, 1, 1), (7, 0, 29, 1, 1)),
}


def made(form, view, sampler, length, allow_mask, has_table, platform=None):
    return jr.ReplayBuffer(
        capacity=NUM_ENVS * length,
        num_envs=NUM_ENVS,
        batch_size=8,
        sampler=SAMPLERS[sampler],
        view=VIEWS[view],
        autoreset=form,
        allow_mask=bool(allow_mask),
        track_episodes=bool(has_table),
        platform=platform,
    )


def random_buffer(r, form):
    while True:
        length, flags = r.choice([11, 16, 29]), r.random(2) < 0.5
        try:
            platform = [None, "gpu", "tpu"][r.integers(3)]
            return made(form, r.integers(9), r.integers(8), int(length), *flags, platform)
        except ValueError:  # such a sampler or such ends do not work with the view
            continue


def history_of(r, autoreset, has_masks=False, num_envs=NUM_ENVS, clears=True):
    """Return operations [T], steps [T, E] and masks [T, E] or None."""
    shape = (TIME, num_envs)
    number = np.arange(TIME * num_envs, dtype=np.float32).reshape(shape)
    done, mask = r.random(shape), None
    ends = {"terminated": done < 0.08, "truncated": done > 0.92}
    final_obs = goal_of(number + 0.5) if autoreset == "same_step" else None
    steps = plain_step(number, obs=goal_of(number), final_obs=final_obs, **ends)
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

        return jax.lax.scan(
            go, buffer.init(nth(steps, (0, 0))), (operations, steps, mask, priority)
        )[0]

    return jax.jit(feed)


def fed(buffer, history, priority):
    operations, steps, mask = history
    return feeding(buffer)(
        operations,
        steps,
        mask if buffer.allow_mask else None,
        priority if buffer.sampler.has_priorities else None,
    )


adopting = functools.partial(jitted, method="adopt")


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


# In how many of the three pairs flags and items are compared, and draws.
COMPARED = {"next_step": (3, 2), "same_step": (2, 1), "same_step_no_final_obs": (2, 1)}


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


@pytest.mark.parametrize("form", FORMS)
def test_it_is_as_if_the_buffer_had_been_fed_with_the_same_steps(form):
    """A row of each kind is compared in enough pairs of buffers."""
    compared, pool = collections.Counter(), [made(form, *row) for row in POOLS[form]]
    pairs = [*zip(pool, [*pool[1:], pool[0]], strict=True)]
    if ALL:
        r = np.random.default_rng(FORMS.index(form))
        pairs += [(random_buffer(r, form), random_buffer(r, form)) for _ in range(66)]
    for seed, (old, new) in enumerate(pairs):
        r = np.random.default_rng(seed)
        history = history_of(r, form, old.allow_mask and new.allow_mask, clears=seed % 3 == 2)
        priority = r.choice([0.0, 0.5, 1.0, 3.0], (TIME, NUM_ENVS)).astype(np.float32)
        if not old.sampler.has_priorities:
            priority = None
        before, wanted = (fed(buffer, history, priority) for buffer in (old, new))
        got = adopting(new)(before)
        compared.update(check_alike(old, new, before, got, wanted))
        if seed == 2:
            assert (compared["flags"], compared["draws"]) == COMPARED[form], compared
            assert compared["items"] == compared["flags"]
            assert min(compared["mass"], compared["ends"]) > 0


def check_alike(old, new, before, got, wanted):
    """Check a state that was adopted against that of a buffer that was fed with the same steps.
    Return the names of what was compared."""
    kinds = set()
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
        kinds.add("flags")
        if mine["batch"].is_valid != its_own["batch"].is_valid:  # its look-back is not stored
            assert its_own["batch"].is_valid
            assert old.length < new.length or is_padded
            continue
        if not mine["batch"].is_valid:
            continue
        if is_there or not new.view.is_random:
            assert bits(mine["batch"].experience) == bits(its_own["batch"].experience), name
            kinds.add("items")
        if "ends" in mine and old.length >= new.length:
            assert bits((mine["ends"], mine["whole"])) == bits((its_own["ends"], its_own["whole"]))
            kinds.add("ends")
        if new.sampler.has_priorities:
            check_mass(old, new, its[name], mine, its_own, got)
            kinds.add("mass")
    if is_known and same_period and is_there and old.length >= new.length:
        kinds |= check_draws(new, got, wanted)
    return kinds


def check_mass(old, new, its, mine, expected, got):
    if old.sampler.has_priorities and np.isnan(its["mass"]):
        # the old buffer could not sample it, so it has no priority
        largest = float(got.sampler.max_priority) ** new.sampler.alpha
        np.testing.assert_allclose(mine["mass"], largest, rtol=1e-5)
    elif not (old.sampler.has_priorities and old.sampler.alpha == 0):
        np.testing.assert_allclose(mine["mass"], expected["mass"], rtol=1e-5)


def check_draws(new, got, wanted):
    """Check samples under fixed keys."""
    if new.sampler.has_priorities and bits(got.sampler.tree) != bits(wanted.sampler.tree):
        return set()
    for seed in range(3):
        batches = [jitted_draw(new)(state, jax.random.key(seed)) for state in (got, wanted)]
        batches = [batch.replace(index=batch.index.row) for batch in batches]
        assert bits(batches[0]) == bits(batches[1])
    return {"draws"}


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
    options = {"batch_size": 8, "autoreset": "next_step", "allow_mask": True, **options}
    return jr.uniform(**options, capacity=capacity, num_envs=num_envs)


def fed_plainly(buffer, seed=0):
    """Return the state after steps without a mask."""
    r = np.random.default_rng(seed)
    return fed(buffer, history_of(r, buffer.autoreset, False, buffer.num_envs, clears=False), None)


@pytest.mark.parametrize(("before", "after"), [(5, 2), (2, 5), *[(3, 1), (1, 3)] * ALL])
@pytest.mark.parametrize("allow_mask", [True, False])
def test_whole_streams_are_dealt_out(before, after, allow_mask):
    """Stream `e` goes to env `e mod num_envs`. Rows that are filled up are never sampled. Alone in
    its env, a stream whose start is overwritten begins no episode."""
    old, new = plain(before, before * 20), plain(after, after * 60, allow_mask=allow_mask)
    state, expected = fed_plainly(old), [[] for _ in range(after)]
    ended, adopted = jitted(old, "end_streams")(state), adopting(new)(state)
    for env, rows in enumerate(episodes_of(old, ended)):
        expected[env % after] += rows
    expected = [rows[-60:] for rows in expected]
    got = episodes_of(new, adopted)
    if before < after:
        its, found = rows_of(old, ended), rows_of(new, adopted)
        assert all(found[name]["flags"] == row["flags"] for name, row in its.items())
    if allow_mask:
        assert got == expected
    else:  # the oldest of a long stream make room
        assert [rows[-len(own) :] for own, rows in zip(got, expected, strict=True)] == got
        assert max(map(len, got)) == min(60, max(map(len, expected)))


@pytest.mark.parametrize("allow_mask", [True, False])
def test_merge_appends_the_rows_of_another_buffer(allow_mask):
    """Its streams go to the envs in turn, to the one with the fewest rows first."""
    own, other = plain(2, 80, allow_mask=allow_mask), plain(3, 45, n_step=3, track_episodes=True)
    time = np.arange(9, dtype=np.float32)[:, None] + np.array([1000.0, 2000.0], np.float32)
    block, extend = plain_step(time, obs=goal_of(time)), jitted(own, "extend")
    mask = [time < [1009, 2005]] if allow_mask else []
    mine, its = extend(own.init(nth(block, (0, 0))), block, *mask), fed_plainly(other)
    if allow_mask:  # shorter streams get rows without a step
        aligned = plain(2, 80, allow_mask=False)
        assert episodes_of(aligned, jr.jit(aligned).adopt(mine)) == episodes_of(own, mine)
    expected = episodes_of(own, jitted(own, "end_streams")(mine))
    for which, rows in enumerate(episodes_of(other, jitted(other, "end_streams")(its))):
        expected[(which + allow_mask) % 2] += [(obs, None) for obs, _ in rows]
    merged = jitted(own, "merge")(mine, its)
    for found, rows in zip(episodes_of(own, merged), expected, strict=True):
        assert [obs for obs, _ in found] == [obs for obs, _ in rows[-len(found) :]]
        assert any(is_valid for _, is_valid in found)
    # new steps go on
    state = extend(merged, block, *[np.ones((9, 2), bool) for _ in mask])
    assert episodes_of(own, state)[1][-1] == (-2008.0, False)


def test_priorities_are_merged_though_their_exponents_differ():
    """The priorities are 1 to 4 and 5 to 8; one row of the other has none."""
    make = lambda alpha, num_envs: jr.items(
        capacity=16, num_envs=num_envs, batch_size=4, sampler=jr.Prioritized(alpha=alpha)
    )
    own, other = make(1.0, 2), make(0.5, 1)
    first = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    second = np.arange(5, 9, dtype=np.float32).reshape(4, 1)

    @jax.jit
    def run():
        mine, its = (
            buffer.extend(buffer.init(np.float32(0)), priority, None, priority)
            for buffer, priority in ((own, first), (other, second))
        )
        merged = own.merge(mine, its)
        return own.get(merged, jnp.arange(16)), merged.sampler.max_priority

    batch, largest = jax.device_get(run())
    found = batch.experience[batch.is_valid]
    assert sorted(found.tolist()) == [*range(1, 9)]
    np.testing.assert_allclose(batch.probability[batch.is_valid] * 36, found, rtol=1e-5)
    assert largest == 8


def test_items_are_dealt_one_by_one():
    old = jr.items(capacity=12, num_envs=3, batch_size=4, allow_mask=True)
    new = jr.items(capacity=20, num_envs=2, batch_size=4)
    time = np.arange(6, dtype=np.int32)[:, None]
    mask = time < np.array([6, 2, 1])

    @jax.jit
    def run():
        steps = time + np.array([0, 100, 200], np.int32)
        got = new.adopt(old.extend(old.init(np.int32(0)), steps, mask))
        return new.size(got), new.get(got, jnp.arange(20))

    size, batch = jax.device_get(run())
    items = batch.experience[batch.is_valid].tolist()
    # rows 2 to 5, 100 and 101, 200: one of seven is left out
    assert size == len({*items}) == len(items) == 6
    assert {*items} < {2, 3, 4, 5, 100, 101, 200}


def test_a_pass_over_the_rows_begins_anew_where_other_rows_are_candidates():
    every, second = (
        jr.sequences(
            capacity=40,
            batch_size=5,
            autoreset="next_step",
            length=1,
            period=period,
            sampler=jr.WithoutReplacement(),
        )
        for period in (1, 2)
    )
    steps = plain_step(np.arange(21, dtype=np.float32)[:, None])

    @jax.jit
    def run():
        state = every.pop(begun(every, steps), jax.random.key(0))[0]
        keys = jax.random.split(jax.random.key(1), 2)
        state, batches = jax.lax.scan(second.pop, second.adopt(state), keys)
        return second.size(state), batches.experience.reward

    size, found = jax.device_get(run())
    assert sorted(found.ravel().tolist()) == [*range(0, 20, 2)]
    assert size == 10


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


def test_a_sampler_s_numbers_go_where_the_rows_go_and_to_its_class_whatever_their_names_are():
    make = lambda sampler, capacity=8: jr.items(
        capacity=capacity, num_envs=2, batch_size=2, sampler=sampler
    )
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
    old, rings = make(Ages(), 10), [make(Ages(), capacity) for capacity in (6, 20)]

    @jax.jit
    def run():
        plain, lookalike = (fed(make(sampler)) for sampler in (jr.Uniform(), Lookalike()))
        blended = make(jr.blend(a=(jr.Uniform(), 0.5), b=(Follower(), 0.5))).adopt(lookalike)
        time = jnp.arange(7)[:, None] + jnp.array([0, 100])
        add = lambda state, item: (old.add(state, item), None)
        aged = jax.lax.scan(add, old.init(np.int32(0)), time)[0]
        return (
            [[other.adopt(state).sampler for state in (plain, lookalike)] for other in others],
            [lookalike.sampler, blended.sampler["b"], make(Lookalike()).adopt(blended).sampler],
            [
                (state.sampler, ring.get(state, jnp.arange(ring.capacity)))
                for ring in rings
                for state in [ring.adopt(aged)]
            ],
        )

    foreign, own, aged = jax.device_get(run())
    for buffer, (wanted, got) in zip(others, foreign, strict=True):
        assert bits(got) == bits(wanted), buffer
    assert bits(own[0]) == bits(own[1]) == bits(own[2])
    for numbers, batch in aged:
        items, seen = batch.experience[batch.is_valid], numbers["seen"][batch.is_valid]
        assert (len(items) >= 6, numbers["count"]) == (True, 7)
        assert (seen == items % 100 + 1).all()


def test_a_run_goes_on_after_an_adopt_as_if_the_buffer_had_been_fed_from_the_start():
    """After each step of a run, the state is adopted, a step is added, and streams are ended: after
    it, and every other time before it, too. In the run, streams are ended after an episode's first
    step, a later one, and a terminated one."""
    shared = {"capacity": 40, "batch_size": 4, "autoreset": "next_step", "track_episodes": True}
    second, across = (
        jr.sequences(**shared, length=1, period=2, cross_episodes=crosses)
        for crosses in (False, True)
    )
    chunks = jr.ReplayBuffer(**shared, sampler=jr.Uniform(), view=jr.views.ChunkView(action=1))
    time = np.arange(14, dtype=np.float32)[:, None]
    steps = plain_step(time, terminated=np.isin(time, (3, 9)))

    def go_on(buffer, step, state):
        state = buffer.add(buffer.end_streams(state, step.reward % 2 == 0), step)
        state, row = buffer.end_streams(state), jnp.arange(buffer.capacity)
        table, batch = buffer.episode_table(state), buffer.get(state, row)
        found = batch.experience, table.steps_to_end(row), table.steps_from_start(row)
        return buffer.size(state), batch.is_valid, found

    @jax.jit
    def run():
        buffers = chunks, second, across

        def add(states, now):
            step, is_ended = now
            states = [
                buffer.end_streams(buffer.add(state, step), is_ended)
                for buffer, state in zip(buffers, states, strict=True)
            ]
            adopted, found = states[0], []
            for buffer, state in zip(buffers[1:], states[1:], strict=True):
                adopted = buffer.adopt(adopted)
                both = jax.tree.map(lambda *leaves: jnp.stack(leaves), adopted, state)
                found.append(jax.vmap(functools.partial(go_on, buffer, step))(both))
            return states, found

        states = [buffer.init(nth(steps, (0, 0))) for buffer in buffers]
        return jax.lax.scan(add, states, (steps, np.isin(time, (5, 6, 9, 11))))[1]

    for found in jax.device_get(run()):
        got, (size, is_valid, wanted) = (nth(found, (slice(None), which)) for which in (0, 1))
        assert size.max() > 2
        assert bits(got[:2]) == bits((size, is_valid))
        assert bits(nth(got[2], is_valid)) == bits(nth(wanted, is_valid))


@pytest.mark.parametrize(
    ("before", "after"), [("next_step", "same_step"), ("same_step", "next_step")]
)
def test_two_forms_of_autoreset_store_the_same_rows(before, after):
    """A step that is done, then its final row. One that is still to come does not come."""
    old, new = (plain(2, 60, autoreset=form, n_step=2) for form in (before, after))
    state = fed_plainly(old, 5)
    owes = row_flags.owes_final_row(state.counters.last_flags)
    wanted = state if before == "same_step" else jitted(old, "end_streams")(state, owes)
    assert episodes_of(new, adopting(new)(state)) == episodes_of(old, wanted)


def test_a_population_adopts_and_merges():
    old, new = plain(2, 40), plain(3, 90, n_step=2)
    states = [fed_plainly(old, seed) for seed in range(2)]
    both = lambda state: new.merge(new.adopt(state), state)
    got, alone = jax.jit(jax.vmap(both))(stacked(states)), jax.jit(both)
    for which, state in enumerate(states):
        assert episodes_of(new, nth(got, which)) == episodes_of(new, alone(state))


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
    state = old.init(plain_step(np.float32(0), action=np.zeros(77, np.float32)))
    text = jax.jit(new.adopt, donate_argnums=0).lower(state).compile().as_text()
    assert not [line for line in text.splitlines() if "77]" in line and "copy(" in line]
    pointer = state.rows.steps.action.unsafe_buffer_pointer()
    assert jr.jit(new).adopt(state).rows.steps.action.unsafe_buffer_pointer() == pointer


EVERY = [(form, view) for form in FORMS for view in (5, 6, 3)]  # a stack, a chunk, a burn-in


@pytest.mark.parametrize(("form", "view"), EVERY if ALL else EVERY[::4])
def test_no_window_reaches_from_one_state_into_rows_that_went_round(form, view):
    """The other's oldest rows are in the middle of an episode, whose start is overwritten."""
    make = lambda length: jr.ReplayBuffer(
        capacity=length, batch_size=4, sampler=jr.Uniform(), view=VIEWS[view], autoreset=form
    )

    def steps(start, num, ends):
        number = start + np.arange(num, dtype=np.float32)[:, None]
        final_obs = goal_of(number + 0.5) if form == "same_step" else None
        end = (number == number[-1]) & ends
        return plain_step(number, obs=goal_of(number), terminated=end, final_obs=final_obs)

    small, large = make(8), make(40)

    @jax.jit
    def run(own, others):
        return large.get(large.merge(begun(large, own), begun(small, others)), jnp.arange(40))

    for ends in (False, True):
        batch = jax.device_get(run(steps(0, 4, ends), steps(100, 12, False)))
        assert batch.is_valid.sum() >= 4
        for which in np.flatnonzero(batch.is_valid):
            goal = -nth(batch.experience.obs, which)["goal"].ravel()
            seen = goal[goal != 0]
            assert (seen < 50).all() or (seen >= 50).all()
