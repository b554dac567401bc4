"""Ends of episodes that no step tells: no pair crosses one, and nothing else is lost."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.support.sampling import assert_same
from tests.support.steps import begun, nth, stacked

E = 3
FORMS = ("next_step", "same_step", "same_step_no_final_obs")


class Envs:
    """Envs whose observations count up and leap between episodes, and the transitions that a buffer
    must have: (obs, next_obs or None after a termination)."""

    def __init__(self, form, seed):
        self.form, self.r = form, np.random.default_rng(seed)
        self.now, self.owes = 1e5 * np.arange(E), np.zeros(E, bool)
        self.known, self.waiting = set(), [None] * E  # waiting: for the next observation

    def reset(self, mask):
        """Reset envs by hand."""
        for env in np.flatnonzero(mask):
            self.owes[env], self.waiting[env] = False, None
            self.now[env] += 500

    def steps(self, time):
        return stacked([self.step() for _ in range(time)])

    def step(self):
        obs, done = self.now.copy(), (self.r.random(E) < 0.25) & ~self.owes
        terminated = done & (self.r.random(E) < 0.5)
        for env in range(E):
            if self.waiting[env] is not None:
                self.known.add((self.waiting[env], obs[env]))
            self.waiting[env] = None
            if self.owes[env]:
                continue
            if terminated[env]:
                self.known.add((obs[env], None))
            elif done[env] and self.form == "same_step":
                self.known.add((obs[env], obs[env] + 1))
            elif not (done[env] and self.form == "same_step_no_final_obs"):
                self.waiting[env] = obs[env]
        leaps = self.owes if self.form == "next_step" else done
        self.owes = done if self.form == "next_step" else self.owes
        self.now = obs + np.where(leaps, 100, 1)
        obs = obs.astype(np.float32)
        step = {"obs": obs, "action": obs, "reward": np.ones(E, np.float32)}
        step |= {"terminated": terminated, "truncated": done & ~terminated}
        return {**step, "final_obs": obs + 1} if self.form == "same_step" else step


THOROUGH = pytest.mark.thorough
TIME, LENGTH = 60, 40  # rings wrap: with final rows after 20 steps
BUFFERS = {
    "uniform": functools.partial(jr.uniform, gamma=1.0),
    "prioritized": functools.partial(jr.prioritized, gamma=1.0),
    "prioritized, 3 steps": functools.partial(jr.prioritized, gamma=1.0, n_step=3),
    "masked": functools.partial(jr.uniform, gamma=1.0, allow_mask=True),
    "recent": functools.partial(jr.transitions, gamma=1.0, sampler=jr.Recent(decay=0.9)),
    "table": functools.partial(jr.uniform, gamma=1.0, track_episodes=True),
    "table, masked": functools.partial(jr.uniform, gamma=1.0, track_episodes=True, allow_mask=True),
    "later goals": functools.partial(jr.future_pairs, gamma=0.9),
    "later goals, masked": functools.partial(jr.future_pairs, gamma=0.9, allow_mask=True),
}
COMMON = {
    *(("uniform", form) for form in FORMS),
    ("prioritized, 3 steps", "same_step"),
    ("table", "next_step"),
    ("recent", "same_step_no_final_obs"),
    ("later goals", "next_step"),
}
CASES = [
    pytest.param(*case, marks=() if case in COMMON else THOROUGH)
    for case in itertools.product(BUFFERS, FORMS)
]


def buffer_of(name, form):
    return BUFFERS[name](capacity=LENGTH * E, num_envs=E, batch_size=8, autoreset=form)


def history(form, seed=0):
    """Return steps, the envs that were reset after each, and the transitions known by then."""
    envs, steps, resets, known = Envs(form, seed), [], [], []
    for time in range(TIME):
        steps.append(envs.step())
        resets.append(np.array([True, False, time % 2 == 0]) & (time % 4 != 1))
        envs.reset(resets[-1])
        known.append(set(envs.known))
    return stacked(steps), np.stack(resets), known


def watch(buffer, steps, resets):
    """Return all items, look-ups and the size after each step and reset."""
    rows = jnp.arange(buffer.capacity)

    def turn(state, given):
        step, was_reset = given
        state = buffer.end_streams(buffer.add(state, step), was_reset)
        again = buffer.end_streams(state, was_reset)  # a second call changes nothing
        look = None
        if buffer.track_episodes:
            table = buffer.episode_table(again)
            look = table.steps_to_end(rows), table.steps_from_start(rows), again.rows.steps.obs
        return state, (buffer.get(again, rows, jax.random.key(0)), look, buffer.size(again))

    state = buffer.init(nth(steps, (0, 0)))
    return jax.lax.scan(turn, buffer.end_streams(state), (steps, resets))[1]


jitted_watch = jax.jit(watch, static_argnums=0)


def check_transitions(buffer, batch, known, time):
    """Check that all transitions of one step are known, and there until the ring is full."""
    valid, item = batch.is_valid, batch.experience
    columns = [x[valid].tolist() for x in (item.obs, item.next_obs, item.discount, item.num_steps)]
    for obs, after, discount, num_steps in zip(*columns, strict=True):
        assert not discount or after == obs + num_steps  # within one episode
    found = {(o, n if d else None) for o, n, d, k in zip(*columns, strict=True) if k == 1}
    assert found <= known
    if time < LENGTH // 2 and buffer.view.n_step == 1:
        assert found == known
    if isinstance(buffer.sampler, jr.Prioritized):
        assert (batch.probability[valid] > 0).all()
        assert not batch.probability[~valid].any()
        np.testing.assert_allclose(batch.probability.sum(), float(valid.any()), rtol=1e-5)


def check_table(buffer, valid, to_end, from_start, obs):
    """Check that look-ups stay in the episode, also where it had one step."""
    row = np.flatnonzero(valid)
    env, position = np.divmod(row, buffer.length)
    for offset in (to_end[row], -from_start[row]):
        other = env * buffer.length + (position + offset) % buffer.length
        np.testing.assert_array_equal(obs[other], obs[row] + offset)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_no_item_crosses_a_break(name, form):
    buffer, (steps, resets, known) = buffer_of(name, form), history(form)
    batches, looks, sizes = jax.device_get(jitted_watch(buffer, steps, resets))
    for time in range(TIME):
        batch, look = nth((batches, looks), time)
        assert batch.is_valid.sum() == sizes[time]
        if name.startswith("later goals"):
            gap = batch.experience.future_obs - batch.experience.obs
            np.testing.assert_array_equal(
                gap[batch.is_valid], batch.experience.num_steps[batch.is_valid]
            )
        else:
            check_transitions(buffer, batch, known[time], time)
        if look is not None:
            check_table(buffer, batch.is_valid, *look)
    assert min(sizes[LENGTH:]) > 0


def test_a_population_ends_its_streams():
    buffer = buffer_of("uniform", "next_step")
    histories = [history("next_step", seed)[:2] for seed in (0, 1)]
    together = jax.jit(jax.vmap(functools.partial(watch, buffer)))(*stacked(histories))
    for which, one in enumerate(histories):
        assert_same(nth(jax.device_get(together), which), jitted_watch(buffer, *one))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (jr.prioritized, {"n_step": 3}),
        (jr.uniform, {"track_episodes": True}),
        (
            functools.partial(jr.sequences, length=3, period=2),
            {"cross_episodes": True, "sampler": jr.Prioritized()},
        ),
        pytest.param(jr.uniform, {}, marks=THOROUGH),
        pytest.param(jr.prioritized, {"allow_mask": True}, marks=THOROUGH),
        pytest.param(
            functools.partial(jr.sequences, length=3, period=2), {"burn_in": 2}, marks=THOROUGH
        ),
    ],
)
def test_it_is_a_truncated_step(make, options):
    """Without final observations a truncated step gives its transition up: the same states."""
    form = "same_step_no_final_obs"
    buffer = make(capacity=16 * E, num_envs=E, batch_size=4, autoreset=form, **options)

    @jax.jit
    def run(blocks, are_ended, more):
        """Return two states after each of more steps. Of the first, all streams were ended."""

        def ended(block, is_ended):
            return buffer.end_streams(begun(buffer, block), jnp.full(E, is_ended))

        def add(states, step):
            return jax.vmap(buffer.add, (0, None))(states, step), states

        last, states = jax.lax.scan(add, jax.vmap(ended)(blocks, are_ended), more)
        return states, last

    for seed in range(6):
        block = Envs(form, seed).steps(17)
        for flag in ("terminated", "truncated"):
            block[flag][-1] = False
        flagged = {**block, "truncated": block["truncated"].copy()}
        flagged["truncated"][-1] = True
        more = Envs(form, seed + 100).steps(6)
        given = stacked([block, flagged]), np.array([True, False]), more
        states, last = jax.device_get(run(*given))
        assert_same(nth(last, 0), nth(last, 1))
        # Of an episode of one step, the table has an entry that is not read, until the next.
        since = int(buffer.track_episodes)
        assert_same(*(nth(states, (slice(since, None), which)) for which in (0, 1)))


def test_a_replay_ends_its_streams():
    form = "same_step_no_final_obs"
    envs, replay = Envs(form, 0), jr.Replay(buffer_of("uniform", form))
    replay.end_streams()
    for _ in range(6):
        replay.add(envs.step())
        replay.end_streams()
        envs.reset(np.ones(E, bool))
    assert len(replay) == len(envs.known)


@pytest.mark.parametrize("form", FORMS)
def test_a_chunk_keeps_the_last_action(form):
    """It needs no next observation, so that no row with an action is given up."""
    buffer = jr.chunks(
        capacity=LENGTH * E,
        num_envs=E,
        batch_size=8,
        action=4,
        autoreset=form,
        sampler=jr.Prioritized(),
    )
    steps, resets, _ = history(form)
    items, _, sizes = jax.device_get(jitted_watch(buffer, steps, resets))
    done, rows, owes = steps["terminated"] | steps["truncated"], [[] for _ in range(E)], [False] * E
    for time in range(TIME):
        for env, own in enumerate(rows):
            own.append(not owes[env])
            own += [False] * int(form == "same_step" and done[time, env])
            owes[env] = form == "next_step" and done[time, env] and not owes[env]
            owes[env] &= not resets[time, env]
        batch = nth(items, time)
        valid = batch.is_valid.reshape(E, LENGTH)
        assert sizes[time] == valid.sum() == (batch.probability > 0).sum()
        for env in np.flatnonzero(resets[time]):
            assert valid[env].sum() == sum(rows[env][-LENGTH:])
        chunk = nth(batch.experience, batch.is_valid)
        number = np.where(chunk.action_is_pad, -1, chunk.action - chunk.obs)
        assert set(map(tuple, number)) <= {(0, *rest) for rest in PARTS}


PARTS = [(1, 2, 3), (1, 2, -1), (1, -1, -1), (-1, -1, -1)]
