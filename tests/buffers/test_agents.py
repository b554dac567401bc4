"""Several agents in an env, whose episodes end one by one, beside lists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL
from tests.support.refusals import refused
from tests.support.steps import begun, nth, plain_step

A, E, TIME, LENGTH = 3, 2, 60, 17
FORMS = jr.autoreset.FORMS
ADD, SOME, CLEAR, END = range(4)


@dataclasses.dataclass
class Row:
    obs: float
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    alive: np.ndarray
    is_final: bool = False

    @property
    def is_over(self):
        """Whether the env's episode terminates: no agent that acted is truncated."""
        done = self.terminated | self.truncated
        return done.all() and (self.terminated | ~self.alive).all()

    @property
    def is_cut(self):
        return (self.truncated & ~self.terminated & self.alive).any()


class Envs:
    """Envs whose agents end one by one, and the rows that a buffer must have."""

    def __init__(self, form, seed):
        self.form, self.r, self.time = form, np.random.default_rng(seed), 0
        self.streams = [[] for _ in range(E)]
        # flags of the episode so far, of the envs themselves and as a buffer can know them
        self.ended = np.zeros((2, E, A), bool)
        self.known = [np.zeros(A, bool) for _ in range(E)]
        self.owes = np.zeros(E, bool)

    def step(self, mask):
        """Return a step of each env, of which those in the mask are taken."""
        r, self.time = self.r, self.time + 1
        ends = (r.random((E, A)) < 0.2) | (r.random((E, 1)) < 0.1)
        is_cut = r.random((E, A)) < 0.4
        flags = self.ended | (np.stack([ends & ~is_cut, ends & is_cut]) & ~self.ended.any(axis=0))
        flags[:, self.owes] = r.random((2, self.owes.sum(), A)) < 0.5  # read by nobody
        obs = np.float32(self.time + 1000 * np.arange(E))
        reward = np.float32(r.integers(-3, 4, (E, A)))
        for env in np.flatnonzero(mask):
            self._append(env, obs[env], reward[env], *flags[:, env])
        final_obs = obs + 0.5 if self.form == "same_step" else None
        return plain_step(
            obs,
            reward={"own": reward, "team": reward.sum(axis=1)},
            terminated=flags[0],
            truncated=flags[1],
            final_obs=final_obs,
        )

    def _append(self, env, obs, reward, terminated, truncated):
        rows = self.streams[env]
        none = np.zeros(A, bool)
        if self.owes[env]:
            rows.append(Row(obs, 0 * reward, none, none, none, is_final=True))
            self.owes[env], self.known[env] = False, none
            return
        done = terminated | truncated
        rows.append(Row(obs, reward, terminated, truncated, ~(self.known[env] & done)))
        self.known[env] = none if done.all() else done
        self.ended[:, env] = False if done.all() else (terminated, truncated)
        if done.all() and self.form == "next_step":
            self.owes[env] = True
        elif done.all() and self.form == "same_step":
            rows.append(Row(obs + 0.5, 0 * reward, none, none, none, is_final=True))
        elif done.all() and not rows[-1].is_over:
            rows[-1].is_final = True

    def clear(self):
        self.streams = [[] for _ in range(E)]
        self.known = [np.ones(A, bool) for _ in range(E)]

    def end(self):
        """Reset all envs by hand."""
        for env, rows in enumerate(self.streams):
            if rows and not self._is_closed(rows[-1]) and not rows[-1].is_over:
                rows[-1].is_final = True
            if rows:
                self.known[env] = np.zeros(A, bool)
            elif self.owes[env]:
                self.known[env] = np.ones(A, bool)
        self.ended[:], self.owes[:] = False, False

    def _is_closed(self, row):
        ends = row.is_over and self.form == "same_step_no_final_obs"
        return row.is_final or ends

    def transition(self, env, index, n, gamma):
        """Return the item of a row, or None if it is not sampleable."""
        rows = self.streams[env]
        first, acts = rows[index], rows[index].alive
        if first.is_final or index < len(rows) - LENGTH:
            return None
        ahead = rows[index : index + n + 1]
        ends = [row.is_final or (row.is_over and k < n) for k, row in enumerate(ahead)]
        if len(ahead) <= n and not any(ends):
            return None
        own, team, is_over = np.zeros(A), 0.0, np.zeros(A, bool)
        for k, row in enumerate(ahead[:n]):
            acts = acts & row.alive
            own, team = own + gamma**k * row.reward * acts, team + gamma**k * row.reward.sum()
            is_over |= acts & row.terminated
            acts = acts & ~(row.terminated | row.truncated)
            following = ahead[k + 1] if k + 1 < len(ahead) else None
            is_last = row.is_over or row.is_cut or (following and following.is_final)
            if is_last:
                break
        discount = np.where(is_over | ~first.alive, 0, gamma ** (k + 1))
        return first, own, team, discount, following and following.obs, k + 1


def history_of(form, seed, has_masks):
    """Return operations, steps and masks, and the envs after each."""
    envs, r = Envs(form, seed), np.random.default_rng(seed + 100)
    operations, steps, masks, found = [], [], [], []
    for time in range(TIME):
        operation = r.choice(4, p=[0.6, 0.34, 0.02, 0.04]) if has_masks else ADD
        operation = CLEAR if time == 37 and not has_masks else operation
        mask = np.ones(E, bool) if operation == ADD else (r.random(E) < 0.6) | envs.owes
        steps.append(envs.step(mask if operation in (ADD, SOME) else np.zeros(E, bool)))
        if operation == CLEAR:
            envs.clear()
        if operation == END:
            envs.end()
        operations.append(operation)
        masks.append(mask)
        found.append([list(map(dataclasses.replace, rows)) for rows in envs.streams])
    return np.array(operations), steps, np.stack(masks), found


def states_after(buffer, operations, steps, masks):
    """Return the items of all rows after each operation."""

    def go(state, now):
        operation, step, mask = now
        envs = jnp.where(mask, jnp.arange(E), E)[::-1]
        ways = [
            lambda: buffer.add(state, step),
            lambda: buffer.add(state, jax.tree.map(lambda x: x[::-1], step), envs=envs),
            lambda: buffer.clear(state),
            lambda: buffer.end_streams(state),
        ]
        if not buffer.allow_mask:
            ways[1:2] = ways[:1]
        state = jax.lax.switch(operation, ways)
        return state, buffer.get(state, jnp.arange(buffer.capacity))

    return jax.lax.scan(go, buffer.init(nth(steps, (0, 0))), (operations, steps, masks))[1]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_transitions_stop_where_their_agent_ends(form, n_step):
    has_masks = n_step == 1
    buffer = jr.prioritized(
        capacity=E * LENGTH,
        num_envs=E,
        batch_size=4,
        autoreset=form,
        n_step=n_step,
        gamma=0.5,
        num_agents=A,
        allow_mask=has_masks,
    )
    run, num_dead, num_own_ends = jax.jit(states_after, static_argnums=0), 0, 0
    for seed in range(20 if ALL else 5):
        operations, steps, masks, streams = history_of(form, seed, has_masks)
        all_items = jax.device_get(run(buffer, operations, jax.tree.map(_stack, *steps), masks))
        envs = Envs(form, 0)
        for time, envs.streams in enumerate(streams):
            items, expected = nth(all_items, time), {}
            for env, rows in enumerate(envs.streams):
                for index in range(len(rows)):
                    item = envs.transition(env, index, n_step, 0.5)
                    if item is not None:
                        expected[env, index] = item
            assert items.is_valid.sum() == len(expected)
            got = {row: nth(items.experience, row) for row in np.flatnonzero(items.is_valid)}
            by_obs = {float(item.obs): item for item in got.values()}
            for first, own, team, discount, next_obs, num_steps in expected.values():
                item = by_obs[first.obs]
                assert item.alive.tolist() == first.alive.tolist()
                assert item.reward["own"].tolist() == own.tolist()
                assert item.discount.tolist() == discount.tolist()
                assert (item.num_steps, item.reward["team"]) == (num_steps, team)
                assert not discount.any() or item.next_obs == next_obs
                num_dead += (~first.alive).sum()
                num_own_ends += (discount == 0).any() and discount.any()
    assert num_dead > 50
    assert num_own_ends > 50


def _stack(*leaves):
    return np.stack(leaves)


@pytest.mark.parametrize("form", FORMS)
def test_sequences_say_who_acted(form):
    buffer = jr.sequences(
        capacity=E * 64, num_envs=E, batch_size=4, autoreset=form, num_agents=A, length=4, burn_in=1
    )
    operations, steps, _, streams = history_of(form, 7, False)
    del operations
    steps = jax.tree.map(_stack, *steps[:30])
    rows = jnp.arange(buffer.capacity)
    items = jax.device_get(jax.jit(lambda steps: buffer.get(begun(buffer, steps), rows))(steps))
    by_obs = {row.obs: row for stream in streams[29] for row in stream}
    assert items.is_valid.sum() > 20
    for which in np.flatnonzero(items.is_valid):
        item = nth(items.experience, which)
        for t in range(5):
            row, is_step = by_obs.get(float(item.obs[t])), item.mask[t] or (t == 0 and item.obs[0])
            for name in ("terminated", "truncated", "alive"):
                expected = getattr(row, name) if is_step else np.zeros(A, bool)
                assert getattr(item, name)[t].tolist() == expected.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_rollout_learns_from_who_acted(form):
    """Its mask, and the advantages of each agent, across rollouts."""
    rollout = jr.rollout(length=12, num_envs=E, autoreset=form, num_agents=A)
    envs, r = Envs(form, 3), np.random.default_rng(3)
    envs.known = [np.zeros(A, bool) for _ in range(E)]
    example = nth(envs.step(np.zeros(E, bool)), 0)
    state = jax.jit(lambda: rollout.init(example.replace(reward=example.reward["own"])))()
    add, clear = jax.jit(rollout.add), jax.jit(rollout.clear)
    advantages = jax.jit(lambda state, *given: rollout.advantages(state, *given, gamma=0.5))
    for _ in range(4):
        before = [len(rows) for rows in envs.streams]
        steps, masks = [], []
        for _ in range(12):
            owed = envs.owes.copy()
            steps.append(envs.step(np.ones(E, bool)))
            newest = [
                rows[-2 if form == "same_step" and rows[-1].is_final else -1]
                for rows in envs.streams
            ]
            masks.append([row.alive & ~was for row, was in zip(newest, owed, strict=True)])
            state = add(state, steps[-1].replace(reward=steps[-1].reward["own"]))
        mask = np.array(masks)
        np.testing.assert_array_equal(state.mask, mask)
        assert int(rollout.num_steps(state)) == mask.sum()
        value = np.float32(r.random((12, E, A)))
        last, final = np.float32(r.random((E, A))), np.float32(r.random((12, E, A)))
        given = (value, last) if form == "next_step" else (value, last, final)
        got, got_mask = jax.device_get(advantages(state, *given))
        np.testing.assert_array_equal(got_mask, mask)
        steps = jax.tree.map(_stack, *steps)
        done = steps.terminated | steps.truncated
        for env, agent in np.ndindex(E, A):
            carry = 0.0
            for t in reversed(range(12)):
                if not mask[t, env, agent]:
                    carry = 0.0
                    assert got.advantage[t, env, agent] == 0
                    continue
                following = value[t + 1, env, agent] if t < 11 else last[env, agent]
                if form != "next_step" and done[t, env].all():
                    following = final[t, env, agent]
                if steps.terminated[t, env, agent]:
                    following = 0.0
                delta = steps.reward["own"][t, env, agent] + 0.5 * following
                carry = (
                    delta - value[t, env, agent] + 0.5 * 0.95 * carry * (not done[t, env, agent])
                )
                np.testing.assert_allclose(
                    got.advantage[t, env, agent], carry, rtol=1e-4, atol=1e-5
                )
        del before
        state = clear(state)


@pytest.mark.no_xla
def test_flags_of_another_number_of_agents_are_refused():
    sizes = {"capacity": 8, "batch_size": 2, "autoreset": "next_step"}
    step = nth(history_of("next_step", 0, False)[1][0], slice(0, 1))
    with refused(
        r"terminated: got bool\[3\], expected bool\[\](?s:.)*need a buffer with num_agents"
    ):
        jax.eval_shape(lambda: jr.uniform(**sizes).init(nth(step, 0)))
    with refused(r"terminated: got bool\[3\], expected bool\[2\]"):
        jax.eval_shape(lambda: jr.uniform(**sizes, num_agents=2).init(nth(step, 0)))
    with refused("num_agents must be an int of at least 1"):
        jr.uniform(**sizes, num_agents=0)
    buffer = jr.uniform(**sizes, num_agents=A, allow_write=True)
    state = jax.eval_shape(lambda: buffer.init(nth(step, 0)))
    one = step.replace(terminated=step.terminated[:, 0])
    with refused(r"terminated: got bool\[1\], expected bool\[1, 3\]"):
        jax.eval_shape(buffer.add, state, one)
    index = jr.types.Index(np.zeros(1, np.int32), np.zeros(1, np.uint32))
    with refused("no leaf of a row is named terminated"):
        values = {"terminated": np.zeros((1, A), np.uint8)}
        jax.eval_shape(lambda state: buffer.write(state, index, values), state)
    with refused("needs a rollout of one env.*no num_agents"):
        rollout = jr.rollout(length=4, num_envs=1, autoreset="next_step", num_agents=A)
        rollout.from_trajectories(None, [])


@pytest.mark.no_xla
def test_states_of_other_numbers_of_agents_are_refused():
    sizes = {"capacity": 8, "batch_size": 2, "autoreset": "next_step"}
    three, none = jr.uniform(**sizes, num_agents=A), jr.uniform(**sizes)
    step = nth(history_of("next_step", 0, False)[1][0], 0)
    state = jax.eval_shape(lambda: three.init(step))
    message = "its steps have num_agents=3, but the buffer has num_agents=None"
    for call in (none.adopt, none.size, lambda state: none.merge(state, state)):
        with refused(message):
            jax.eval_shape(call, state)
    plain = step.replace(terminated=step.terminated[0], truncated=step.truncated[0])
    with refused("its steps have num_agents=None, but the buffer has num_agents=3"):
        jax.eval_shape(lambda: three.adopt(none.init(plain)))
    with refused("leave out autoreset, track_episodes and num_agents"):
        jr.items(capacity=8, batch_size=2, num_agents=2)
    with refused(r"discount_key='d' has the shape \[3\], expected \[\]"):
        extras = {"d": step.reward["own"]}
        own = jr.uniform(**sizes, num_agents=A, discount_key="d")
        jax.eval_shape(lambda: own.init(step.replace(extras=extras)))


def test_chunks_and_tensordicts_say_who_acted():
    _, steps, _, streams = history_of("same_step_no_final_obs", 11, False)
    steps = jax.tree.map(_stack, *steps[:10])
    buffer = jr.chunks(
        capacity=E * 16,
        num_envs=E,
        batch_size=4,
        action=3,
        autoreset="same_step_no_final_obs",
        num_agents=A,
    )
    state = jax.jit(lambda steps: begun(buffer, steps))(steps)
    items = jax.device_get(jax.jit(buffer.get)(state, jnp.arange(buffer.capacity)))
    by_obs = {row.obs: row for stream in streams[9] for row in stream}
    assert items.is_valid.sum() > 10
    for which in np.flatnonzero(items.is_valid):
        item = nth(items.experience, which)
        acted = np.array([by_obs[float(action)].alive for action in item.action])
        assert item.alive.tolist() == (acted & ~item.action_is_pad[:, None]).tolist()
    pytest.importorskip("tensordict", reason="the tensordict extra is not installed")
    from jaxreplay.torch import to_tensordict

    uniform = jr.uniform(
        capacity=E * 16,
        num_envs=E,
        batch_size=4,
        autoreset="same_step_no_final_obs",
        num_agents=A,
    )
    sample = jax.jit(lambda steps: uniform.sample(begun(uniform, steps), jax.random.key(0)))
    found = to_tensordict(sample(steps))
    assert found["alive"].shape == found["next", "terminated"].shape == (4, A)
    assert found["next", "reward", "own"].shape == (4, A)
