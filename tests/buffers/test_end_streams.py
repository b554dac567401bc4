"""Ends of episodes that no step tells, by hand. `storage/test_oracle_streams.py` has them in random
histories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.support.sampling import assert_same
from tests.support.steps import begun, nth, plain_step, stacked

E, FORM = 3, "same_step_no_final_obs"


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (jr.prioritized, {"n_step": 3, "track_episodes": True}),
        (
            jr.sequences,
            {"length": 3, "period": 2, "cross_episodes": True, "sampler": jr.Prioritized()},
        ),
    ],
)
def test_it_is_a_truncated_step(make, options):
    """Without final observations a truncated step gives its transition up: the same states. A
    second call changes nothing."""
    buffer = make(capacity=16 * E, num_envs=E, batch_size=4, autoreset=FORM, **options)

    @jax.jit
    def run(blocks, calls, more):
        """Return two states after each of more steps; all streams of the first were ended."""

        def ended(block, num_calls):
            once = lambda _, state: buffer.end_streams(state, jnp.full(E, True))
            return jax.lax.fori_loop(0, num_calls, once, begun(buffer, block))

        def add(states, step):
            return jax.vmap(buffer.add, (0, None))(states, step), states

        last, states = jax.lax.scan(add, jax.vmap(ended)(blocks, calls), more)
        return states, last

    for seed in range(6):
        time, r = (
            np.float32(np.arange(23)[:, None] + 100 * np.arange(E)),
            np.random.default_rng(seed),
        )
        ends, is_over = r.random((2, 23, E)) < [[[0.25]], [[0.5]]]
        ends[16] = False
        steps = plain_step(time, terminated=ends & is_over, truncated=ends & ~is_over)
        plain = nth(steps, slice(17))
        truncated = plain.truncated.copy()
        truncated[-1] = True
        blocks = stacked([plain, plain.replace(truncated=truncated)])
        calls = np.int32([1 + seed % 2, 0])
        states, last = jax.device_get(run(blocks, calls, nth(steps, slice(17, None))))
        assert_same(nth(last, 0), nth(last, 1))
        # Of an episode of one step, the table has an entry that is not read, until the next.
        since = int(buffer.track_episodes)
        assert_same(*(nth(states, (slice(since, None), which)) for which in (0, 1)))


def test_a_truncated_step_of_chunks_that_ended_stays_a_step_in_another_buffer():
    """Its window is known without the row after it, so it need not become a final row, which would
    belong to no episode."""
    make = lambda length: jr.chunks(
        capacity=length, action=2, batch_size=4, autoreset="next_step", track_episodes=True
    )
    buffer, longer = make(4), make(8)

    @jax.jit
    def run(steps):
        state = longer.adopt(buffer.end_streams(begun(buffer, steps)))
        return longer.episode_table(state).is_complete(jnp.arange(2))

    time = np.float32([[0]])
    assert run(plain_step(time, truncated=time == 0)).tolist() == [True, False]
