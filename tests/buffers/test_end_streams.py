"""Ends of episodes that no step tells: no pair crosses one, and nothing else is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

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
        made = [self._step() for _ in range(time)]
        return {key: np.stack([one[key] for one in made]) for key in made[0]}

    def _step(self):
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


def transitions(buffer, state):
    """Return (obs, next_obs or None) of all transitions of one step."""
    batch = jr.jit(buffer).get(state, jnp.arange(buffer.capacity))
    valid, t = np.asarray(batch.is_valid), batch.experience
    assert valid.sum() == jr.jit(buffer).size(state)
    columns = [np.asarray(x)[valid].tolist() for x in (t.obs, t.next_obs, t.discount, t.num_steps)]
    for obs, after, discount, num_steps in zip(*columns, strict=True):
        assert not discount or after == obs + num_steps  # within one episode
    if isinstance(buffer.sampler, jr.Prioritized):
        probability = np.asarray(batch.probability)
        assert (probability[valid] > 0).all()
        assert not probability[~valid].any()
        np.testing.assert_allclose(probability.sum(), float(valid.any()), rtol=1e-5)
    return {(o, n if d else None) for o, n, d, k in zip(*columns, strict=True) if k == 1}


BUFFERS = {
    "uniform": (jr.uniform, {}),
    "prioritized": (jr.prioritized, {}),
    "prioritized, 3 steps": (jr.prioritized, {"n_step": 3}),
    "masked": (jr.uniform, {"allow_mask": True}),
    "rank based": (functools.partial(jr.transitions, sampler=jr.RankBased()), {}),
    "recent": (functools.partial(jr.transitions, sampler=jr.Recent(decay=0.9)), {}),
    "table": (jr.uniform, {"track_episodes": True, "allow_mask": True}),
}


CASES = [
    (name, form, [True, (nth + place) % 2 == 0, True])
    for nth, name in enumerate(BUFFERS)
    for place, form in enumerate(FORMS)
]


@pytest.mark.parametrize(("name", "form", "mask"), CASES)
def test_no_pair_crosses_a_break(name, form, mask):
    make, options = BUFFERS[name]
    for length, seed in ((200, 0), (24, 1)):  # the second ring wraps
        buffer = make(
            capacity=length * E, num_envs=E, batch_size=8, autoreset=form, gamma=1.0, **options
        )
        jitted, envs = jr.jit(buffer), Envs(form, seed)
        state = jitted.init(jax.tree.map(lambda leaf: leaf[0, 0], Envs(form, 0).steps(1)))
        state = jitted.end_streams(state)  # of an empty buffer
        for turn in range(10):
            state = jitted.extend(state, envs.steps(4 if turn % 3 else 1))
            state = jitted.end_streams(state, mask=None if all(mask) else np.array(mask))
            envs.reset(np.array(mask))
            found = transitions(buffer, state)
            assert found <= envs.known
            if length == 200 and "3" not in name:
                assert found == envs.known
            again = jitted.end_streams(jax.tree.map(jnp.copy, state), mask=jnp.array(mask))
            assert transitions(buffer, again) == found  # a second call changes nothing


SAME = {
    "uniform": (jr.uniform, {}),
    "prioritized": (jr.prioritized, {"n_step": 3}),
    "masked": (jr.prioritized, {"allow_mask": True}),
    "table": (jr.uniform, {"track_episodes": True}),
    "sequences": (jr.sequences, {"length": 3, "period": 2, "burn_in": 2}),
    "sequences across episodes": (
        jr.sequences,
        {"length": 3, "period": 2, "cross_episodes": True, "sampler": jr.Prioritized()},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_it_is_a_truncated_step(name):
    """Without final observations a truncated step gives its transition up: the same states."""
    (make, options), form = SAME[name], "same_step_no_final_obs"
    buffer = jr.jit(make(capacity=16 * E, num_envs=E, batch_size=4, autoreset=form, **options))
    for seed in range(6):
        block = Envs(form, seed).steps(17)
        for flag in ("terminated", "truncated"):
            block[flag][-1] = False
        flagged = {**block, "truncated": block["truncated"].copy()}
        flagged["truncated"][-1] = True
        states = [buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], block)) for _ in range(2)]
        ended = buffer.end_streams(buffer.extend(states[0], block))
        expected = buffer.extend(states[1], flagged)
        more = Envs(form, seed + 100).steps(6)
        for time in range(7):
            # of an episode of one step, the table has an entry that is not read, until the next
            if time or name != "table":
                for x, y in zip(jax.tree.leaves(ended), jax.tree.leaves(expected), strict=True):
                    np.testing.assert_array_equal(x, y)
            if time < 6:
                step = jax.tree.map(lambda leaf, t=time: leaf[t], more)
                ended, expected = (buffer.add(state, step) for state in (ended, expected))


@pytest.mark.parametrize("form", FORMS)
def test_later_goals_and_tables_stop_at_a_break(form):
    """Look-ups of episodes: goals, horizons and the table, also where an episode had one step."""
    masked = {
        "capacity": 60 * E,
        "num_envs": E,
        "batch_size": 512,
        "autoreset": form,
        "allow_mask": True,
    }
    future, table = jr.future_pairs(gamma=0.9, **masked), jr.uniform(track_episodes=True, **masked)
    envs, example = Envs(form, 3), jax.tree.map(lambda leaf: leaf[0, 0], Envs(form, 0).steps(1))
    states = [jr.jit(buffer).init(example) for buffer in (future, table)]
    for turn in range(20):
        block = envs.steps(1 if turn % 2 else 3)
        for place, buffer in enumerate((future, table)):
            states[place] = jr.jit(buffer).end_streams(jr.jit(buffer).extend(states[place], block))
        envs.reset(np.ones(E, bool))
        batch = future.sample(states[0], jax.random.key(turn))
        pairs, valid = batch.experience, np.asarray(batch.is_valid)
        gap = np.asarray(pairs.future_obs - pairs.obs)[valid]
        np.testing.assert_array_equal(gap, np.asarray(pairs.num_steps)[valid])
        rows = jnp.arange(table.capacity)
        got = table.get(states[1], rows)
        look = table.episode_table(states[1])
        valid = np.asarray(got.is_valid)
        until, since = (
            np.asarray(f(rows))[valid] for f in (look.steps_to_end, look.steps_from_start)
        )
        obs = np.asarray(states[1].streams.steps.obs)
        place = np.flatnonzero(valid)
        for row, to_end, from_start in zip(place, until, since, strict=True):
            env, position = divmod(row, table.length)
            for offset in (to_end, -from_start):
                other = env * table.length + (position + offset) % table.length
                assert obs[other] == obs[row] + offset


def test_in_a_scan_and_for_a_population():
    buffer = jr.prioritized(capacity=64 * E, num_envs=E, batch_size=16, autoreset="next_step")
    envs = Envs("next_step", 0)
    block = envs.steps(40)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], block))

    def iteration(state, step_and_flag):
        step, was_reset = step_and_flag
        state = buffer.add(state, step)
        return buffer.end_streams(state, jnp.broadcast_to(was_reset, (E,))), None

    flags = jnp.arange(40) % 7 == 6
    run = jax.jit(lambda state: jax.lax.scan(iteration, state, (block, flags))[0])
    one = run(state)
    transitions(buffer, one)
    stacked = jax.vmap(run)(jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_array_equal(a, b[1])


def test_a_replay_ends_its_streams():
    envs = Envs("same_step_no_final_obs", 0)
    buffer = jr.uniform(
        capacity=30 * E, num_envs=E, batch_size=4, autoreset="same_step_no_final_obs"
    )
    replay = jr.Replay(buffer)
    replay.end_streams()
    for _ in range(6):
        replay.add(jax.tree.map(lambda leaf: leaf[0], envs.steps(1)))
        replay.end_streams()
        envs.reset(np.ones(E, bool))
    assert len(replay) == len(envs.known)


def test_bad_calls_say_why():
    items = jr.items(capacity=4, batch_size=1)
    with pytest.raises(ValueError, match="end_streams: items have no episodes"):
        items.end_streams(items.init(jnp.int32(0)))
    block = Envs("next_step", 0).steps(1)
    example = jax.tree.map(lambda leaf: leaf[0, 0], block)
    buffer = jr.uniform(capacity=30, num_envs=E, batch_size=1, autoreset="next_step")
    for mask in (jnp.ones(2, bool), jnp.ones(E)):
        with pytest.raises(ValueError, match=r"(?s)end_streams:.*mask"):
            buffer.end_streams(buffer.init(example), mask)
    future = jr.future_pairs(capacity=30, num_envs=E, batch_size=1, autoreset="next_step")
    with pytest.raises(ValueError, match=r"looks episodes up, .* allow_mask=True"):
        future.end_streams(future.init(example))
