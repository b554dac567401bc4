"""Shared by the tests of samplers: buffers of plain steps, their methods jitted once, and random
histories, each run by one program and judged by a model of lists."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.samplers import ConsumingSampler
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.views.item import Item
from jaxreplay.views.transition import TransitionView
from tests.conftest import ALL, SOAK
from tests.support import oracle_views
from tests.support.oracle import Oracle
from tests.support.steps import nth, plain_step, stacked

# A buffer is a pytree without leaves: its methods are jitted once for all equal buffers.
init, add, size = (jax.jit(getattr(ReplayBuffer, name)) for name in ("init", "add", "size"))
pop, sample = (jax.jit(getattr(ReplayBuffer, name), static_argnums=3) for name in ("pop", "sample"))


def step_of(values):
    """Return a step of `len(values)` envs, in an episode without end."""
    return plain_step(np.float32(values))


def make_buffer(sampler, *, num_envs=1, length=8, allow_mask=False, batch_size=4, min_size=1):
    buffer = ReplayBuffer(
        capacity=num_envs * length,
        num_envs=num_envs,
        batch_size=batch_size,
        sampler=sampler,
        view=TransitionView(gamma=0.5),
        autoreset="same_step_no_final_obs",
        allow_mask=allow_mask,
        min_size=min_size,
    )
    return buffer, init(buffer, step_of(0))


def fed(buffer, state, times):
    """Return a state after steps whose rewards are 10 * time + env."""
    for time in times:
        state = add(buffer, state, step_of(10.0 * time + np.arange(buffer.num_envs)))
    return state


def rewards(batch):
    return np.asarray(batch.experience.reward)[np.asarray(batch.is_valid)].tolist()


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


NUM_OPERATIONS, BATCH_SIZE, ROOMS = 60, 4, (1, 4, 10)
ADD, TAKE, CLEAR, DROP = range(4)
NUM_HISTORIES = 100 if SOAK else 16 if ALL else 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A buffer of short streams, with its oracle. Items have no `autoreset`."""

    sampler: Any
    view: Any
    spare: int  # rows of a stream beyond one window and the row after it
    autoreset: str | None = None
    allow_mask: bool = False
    num_envs: int = 2

    @functools.cached_property
    def window(self):
        window = self.sampler.window(self.view.window)
        others = ("needs_final_obs", "needs_next_obs")
        names = ("before", "after", "crosses_episodes", "period", *others)
        return {name: getattr(window, name) for name in names}

    @property
    def length(self):
        return self.sampler.window(self.view.window).length + 1 + self.spare

    @functools.cached_property
    def buffer(self):
        return ReplayBuffer(
            capacity=self.num_envs * self.length,
            num_envs=self.num_envs,
            batch_size=BATCH_SIZE,
            sampler=self.sampler,
            view=self.view,
            autoreset=self.autoreset,
            allow_mask=self.allow_mask,
        )

    def oracle(self):
        autoreset = self.autoreset or "same_step_no_final_obs"
        return Oracle(
            num_envs=self.num_envs, length=self.length, autoreset=autoreset, n_step=1, gamma=1
        )

    def steps(self, columns):
        """Return the steps as the buffer takes them, from arrays [N, E] as the oracle takes
        them."""
        goals = lambda obs: {"achieved_goal": obs[..., None] % 3, "desired_goal": -obs[..., None]}
        if isinstance(self.view, Item):
            return columns["obs"]
        final = goals(columns["final_obs"]) if self.autoreset == "same_step" else None
        return jr.Step(**{**columns, "obs": goals(columns["obs"]), "final_obs": final})


_CONFIGS = (
    {
        "view": TransitionView(n_step=3, gamma=0.5),
        "autoreset": "next_step",
        "allow_mask": True,
        "num_envs": 3,
        "spare": 4,
    },
    {
        "view": jr.views.SequenceView(length=2, burn_in=1, period=2, cross_episodes=True),
        "autoreset": "same_step_no_final_obs",
        "allow_mask": True,
        "num_envs": 1,
        "spare": 5,
    },
    # Items have no candidate numbers; laps and positions replace them.
    {"view": Item(), "allow_mask": True, "spare": 2},
    {"view": Item(), "num_envs": 1, "spare": -1},  # one row
    {
        "view": jr.views.FrameStack(num_frames=3, inner=TransitionView(gamma=0.5)),
        "autoreset": "same_step",
        "spare": 4,
    },
    {"view": jr.views.FutureView(), "autoreset": "same_step_no_final_obs", "spare": 6},
    {
        "view": jr.views.Hindsight(
            inner=TransitionView(gamma=0.5),
            reward_fn=lambda achieved, goal, step: step.reward,
            strategy="episode",
        ),
        "autoreset": "same_step",
        "allow_mask": True,
        "spare": 5,
    },
)


def configs_of(*samplers):
    """Return buffers of all kinds, with these samplers in turn."""
    return [
        Config(sampler=sampler, **fields)
        for sampler, fields in zip(itertools.cycle(samplers), _CONFIGS, strict=False)
    ]


def history_of(config, seed):
    """Return a list of (operation, step of the oracle, mask)."""
    r, oracle, history = np.random.default_rng(seed), config.oracle(), []
    share = r.choice([0.3, 0.5, 0.8, 0.93])  # of adds
    shape = (NUM_OPERATIONS, config.num_envs)
    # Mostly plain steps, so that streams fill up with episodes of several rows. Code 1: no step; 2
    # and 4: the episode ends.
    codes = r.choice((0, 0, 0, 0, 0, 1, 2, 4), shape)
    codes *= (codes == 1) | (config.autoreset is not None)
    obs = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    columns = {
        "obs": obs,
        "action": obs,
        "reward": obs,
        "terminated": codes == 2,
        "truncated": codes == 4,
        "final_obs": obs + 0.5,
    }
    for time in range(NUM_OPERATIONS):
        step = {name: column[time] for name, column in columns.items()}
        mask = codes[time] != 1 if config.allow_mask else None
        # the row after a done is never masked
        if mask is not None and config.autoreset == "next_step":
            mask |= [oracle.owes_final_row(env) for env in range(config.num_envs)]
        can_drop = 0.04 * (config.autoreset is not None)
        operation = r.choice(4, p=[share, 0.98 - can_drop - share, 0.02, can_drop])
        history.append((operation, step, mask, r.random(config.num_envs) < 0.5))
        Model.advance(oracle, *history[-1])
    return history


def _run(buffer, start, operations, steps, masks, dropped):
    """Run a history from a state whose counters stand at `start`. Return what each method says of
    the state before each operation, and what taking a batch returns then."""
    consumes = isinstance(buffer.sampler, ConsumingSampler)

    def go(state, now):
        time, operation, step, mask, dropped = now
        draw = buffer.pop if consumes else lambda *given: (state, buffer.sample(*given))
        taken, batch = draw(state, jax.random.key(time))
        rows = jnp.arange(buffer.capacity)
        seen = {
            "size": buffer.size(state),
            "can_sample": buffer.can_sample(state),
            "probability": buffer.sampler.probability(state.sampler, Sampleable.of(state), rows),
            "has_room": [buffer.can_add(state, rows) for rows in ROOMS] if consumes else None,
            "batch": batch.replace(experience=None),
            "sampler": taken.sampler,
        }
        ways = [lambda: buffer.add(state, step, mask), lambda: taken, lambda: buffer.clear(state)]
        ways += [lambda: buffer.drop(state, dropped)] * (buffer.autoreset is not None)
        return jax.lax.switch(operation, ways), seen

    state = buffer.init(nth(steps, (0, 0)))
    state = state.replace(counters=state.counters.set(num_candidates=start, lap=start))
    if hasattr(state.sampler, "next"):  # a queue
        first = Sampleable.of(state).first_candidate_number()
        first = jnp.broadcast_to(first, state.sampler.next.shape)
        state = state.replace(sampler=state.sampler.replace(next=first, lost=start))
    times = jnp.arange(NUM_OPERATIONS)
    return jax.lax.scan(go, state, (times, operations, steps, masks, dropped))[1]


run = jax.jit(_run)
run_population = jax.jit(jax.vmap(_run, in_axes=(None, 0, 0, 0, 0, 0)))


class Model:
    """The rows that a buffer must have, as lists."""

    def __init__(self, config, start):
        self.config, self.start, self.oracle = config, start, config.oracle()

    @staticmethod
    def advance(oracle, operation, step, mask, dropped):
        if operation == ADD:
            oracle.add(**step, mask=mask)
        if operation == CLEAR:
            oracle.clear()
        if operation == DROP:
            oracle.drop(dropped)

    def before_a_drop(self):
        """Note what a drop makes certain."""

    def candidates(self, **window):
        """Return (env, index) of all candidates, sorted. `window` replaces fields of the
        buffer's."""
        window = self.config.window | window
        found = oracle_views.anchors(self.oracle, **window)
        return sorted((env, index) for env, _, index in found)

    def row(self, env, index):
        return self.oracle.streams[env][index]

    def number(self, env, index):
        return env * self.config.length + index % self.config.length

    def check(self, seen):
        """Check what the buffer says of its state."""
        expected = self.probabilities()
        count = sum(probability > 0 for probability in expected.values())
        assert (seen["size"], seen["can_sample"]) == (count, count > 0)
        np.testing.assert_allclose(
            seen["probability"][list(expected)], list(expected.values()), rtol=1e-5
        )

    def check_batch(self, batch, taken):
        """Check that a batch has these rows, and then only invalid items."""
        rows = [self.number(*one) for one in taken]
        assert batch.is_valid.tolist() == [k < len(rows) for k in range(BATCH_SIZE)]
        assert batch.index.row[: len(rows)].tolist() == rows
        assert len(set(rows)) == len(rows)


def check_histories(config, make_model, *, together=False):
    """Run random histories, from counters at 0 or short of their wrap-around, each by itself or all
    under vmap. Return the models."""
    starts = np.array([0, 2**32 - 5] * (NUM_HISTORIES // 2), np.uint32)
    histories = [history_of(config, seed) for seed in range(len(starts))]

    def arrays_of(history):
        operations, columns, masks, dropped = stacked(history)
        return np.int32(operations), config.steps(columns), masks, dropped

    arguments = [(start, *arrays_of(one)) for start, one in zip(starts, histories, strict=True)]
    if together:
        all_seen = jax.device_get(run_population(config.buffer, *stacked(arguments)))
        found = [nth(all_seen, which) for which in range(len(starts))]
    else:
        found = [jax.device_get(run(config.buffer, *given)) for given in arguments]
    models = [make_model(config, int(start)) for start in starts]
    for model, history, seen in zip(models, histories, found, strict=True):
        for time, now in enumerate(history):
            model.check(nth(seen, time))
            if now[0] == TAKE:
                model.take(nth(seen, time))
            if now[0] == DROP:
                model.before_a_drop()
            Model.advance(model.oracle, *now)
            model.after(now[0])
    return models
