"""The likely mistakes of a newcomer, as a table: what is typed, and what the error says.

An error names what is wrong, what was expected and, where there is one, the cure as code.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

SIZES = {"capacity": 64, "num_envs": 4, "batch_size": 8}

MISTAKES = {
    # Making a buffer.
    "jr.uniform(**sizes)": """
        autoreset=None, but it must say what your env does when an episode ends
        "next_step"
        "same_step"
        "same_step_no_final_obs"
        jr.autoreset.of(envs)""",
    "jr.uniform(**sizes, autoreset=True)": """
        autoreset=True, but it must say what your env does when an episode ends""",
    "jr.uniform(**{**sizes, 'capacity': 65}, autoreset='next_step')": """
        capacity=65 rows do not divide into num_envs=4 equal streams
        the nearest that do: 64 and 68""",
    "jr.uniform(**{**sizes, 'capacity': 4}, autoreset='next_step', n_step=3)": """
        one window needs 4
        the smallest capacity is 16""",
    "jr.uniform(max_length=64, batch_size=8, autoreset='next_step')": """
        takes no max_length; did you mean capacity?""",
    "jr.uniform(**sizes, autoreset='next_step', discount=0.99)": """
        takes no discount; did you mean gamma?""",
    "jr.uniform(**sizes, autoreset='next_step', gamma=99)": """
        gamma must be in [0, 1], got 99""",
    "jr.prioritized(**sizes, autoreset='next_step', alpha=jnp.float32(0.6))": """
        alpha is an array float32[]
        write alpha=float(x) or int(x)""",
    "jr.prioritized(**sizes, autoreset='next_step', alpha=-1.0)": """
        alpha must be a finite number of at least 0, got -1.0""",
    "jr.mix(offline=uniform, online=uniform)": """
        offline must be (buffer, number of items), such as (buffer, 128)""",
    "jr.frame_stack(jr.items(capacity=8, batch_size=2), 4)": """
        has no observations; give a view of steps""",
    "jr.hindsight(uniform, lambda achieved, goal: 0.0)": """
        reward_fn must accept the call reward_fn(achieved, goal, step)""",
    # Making a state.
    "buffer.init(step)": """
        terminated: got bool[4], expected bool[]
        without the env axis: write jax.tree.map(lambda x: x[0], step)""",
    "same_step.init(example)": """
        autoreset="same_step" needs the final_obs of every step
        gymnax >= 1.0: info["final_observation"]
        use autoreset="same_step_no_final_obs\"""",
    # Adding.
    "buffer.add(step, state)": """
        the state must be a ReplayState, as init and add return it, got a Step
        the state comes first""",
    "buffer.add(state, step.replace(truncated=jnp.zeros(4)))": """
        truncated: got float32[4], expected bool[4]
        x.astype(bool)""",
    "buffer.add(state, step.replace(obs=jnp.zeros((4, 2))))": """
        obs: got float32[4, 2], expected float32[4, 3]""",
    "buffer.add(state, example)": """
        obs: got float32[3], expected float32[4, 3]
        add takes one step of every env, leaves [num_envs, ...], here [4]""",
    "buffer.add(state, dict(fields, done=flags))": """
        missing terminated, truncated; unknown done
        done is two flags here""",
    "buffer.add(state, dict(fields, terminated=flags, truncated=flags, next_obs=0))": """
        unknown next_obs
        leave out the next observation: it is the obs of the next row""",
    "buffer.add(state, (1, 2, 3))": """
        must be a jaxreplay.Step, or a mapping, dataclass or NamedTuple with its fields""",
    "buffer.add(state, step, mask=flags)": """
        made without allow_mask=True""",
    "buffer.add(donated, step)": """
        this state was donated to an earlier call
        state = buffer.add(state, step)""",
    # Sampling, and what a batch has.
    "buffer.sample(8)": """
        needs a state and a key: buffer.sample(state, jax.random.key(0))
        jaxreplay.Replay(buffer) keeps both""",
    "uniform.sample(state, key)": """
        this state is not of this buffer
        alpha: the state's is 0.6, this buffer's None""",
    "queue.sample(queue.init({'x': 0.0}), key)": """
        Queue consumes rows: state, batch = buffer.pop(state, key)""",
    "batch.indices": "did you mean batch.index?",
    "batch.probabilities": "did you mean batch.probability?",
    "batch.obs": "did you mean batch.experience.obs?",
    # Priorities.
    "buffer.update_priorities(state, batch.index.row, jnp.ones(8))": """
        index must be the batch.index of a sample, got an array int32[8]""",
    "buffer.update_priorities(state, batch.index, jnp.ones((8, 1)))": """
        priority: got float32[8, 1], expected float32[8], one for each row""",
    "uniform.update_priorities(uniform_state, batch.index, jnp.ones(8))": """
        the sampler Uniform has no priorities; use jaxreplay.prioritized""",
    # Outside of jit.
    "jr.Replay(jr.jit(uniform))": """
        buffer must be an instance of a jaxreplay.buffers.ReplayBuffer
        got jaxreplay.jit(ReplayBuffer(capacity=64""",
    "jr.Replay(uniform).sample()": """
        no batch can be sampled yet, 0 rows of at least 1: add steps first""",
    "jr.inspect(buffer)": """
        expected a ReplayBuffer and its state""",
    "buffer.episode_table(state)": """
        make it with track_episodes=True""",
}


@pytest.fixture(scope="module")
def names():
    flags = np.zeros(4, bool)
    fields = {"obs": np.zeros((4, 3), np.float32), "action": np.zeros(4, np.int32)}
    fields["reward"] = np.zeros(4, np.float32)
    step = jr.Step(**fields, terminated=flags, truncated=flags)
    example = jax.tree.map(lambda leaf: leaf[0], step)
    lost = {"autoreset": "same_step_no_final_obs"}
    buffer, uniform = jr.prioritized(**SIZES, **lost), jr.uniform(**SIZES, **lost)
    compiled = jr.jit(buffer)
    donated = compiled.init(example)
    state = compiled.add(donated, step)
    return {
        "jr": jr,
        "jnp": jnp,
        "sizes": SIZES,
        "flags": flags,
        "fields": fields,
        "step": step,
        "example": example,
        "buffer": buffer,
        "uniform": uniform,
        "uniform_state": uniform.init(example),
        "same_step": jr.uniform(**SIZES, autoreset="same_step"),
        "queue": jr.items(capacity=8, batch_size=2, sampler=jr.Queue()),
        "donated": donated,
        "state": state,
        "key": jax.random.key(0),
        "batch": compiled.sample(state, jax.random.key(0)),
    }


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_answered(typed, names):
    with pytest.raises((ValueError, TypeError, AttributeError, TimeoutError)) as caught:
        eval(typed, names)
    said = str(caught.value)
    for line in MISTAKES[typed].strip().splitlines():
        assert line.strip() in said
