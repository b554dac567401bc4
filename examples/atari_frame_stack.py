"""DQN from frames that are stored once and stacked when sampled, as for Atari.

    python examples/atari_frame_stack.py   # 2 minutes on two CPU cores

Copy `jr.frame_stack(BUFFER, 4)` and `push`. The buffer stores single frames, and samples return
stacks, uint8[B, 21, 21, 4]. Stacks that were stored, each with its next one, would take 8 times the
memory. For acting, `push` keeps the newest frames of each env, with zeros before the first frame,
as the buffer pads them.

The env is Atari-shaped, but small: frames are uint8[21, 21] instead of uint8[84, 84]. A ball rolls
over a torus, and turns at random. A push in its direction is worth 1. The direction is not visible
in one frame: the same agent with one frame gets a quarter of the reward. Writes
out/atari_frame_stack.png.

References:
  Mnih et al., "Human-level control through deep reinforcement learning" (2015), "Preprocessing".
"""

import functools
import sys
from typing import Any

import _common as common
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

NUM_ENVS, SIZE, LENGTH = 8, 21, 32  # envs, pixels of a frame's edge, steps of an episode
MOVES = jnp.array([[0, 2], [2, 0], [0, -2], [-2, 0]])  # pixels of a step
OPTIMIZER = optax.adam(1e-3)
FRAME = jnp.zeros((SIZE, SIZE), jnp.uint8)
EXAMPLE = jr.Step(FRAME, 0, 0.0, terminated=False, truncated=False, final_obs=FRAME)  # of one env
BUFFER = jr.uniform(
    capacity=65_536,
    num_envs=NUM_ENVS,
    batch_size=32,
    gamma=0.9,
    min_size=500,
    autoreset="same_step",
)


class Ball(flax.struct.PyTreeNode):
    place: jax.Array  # int32[E, 2]
    direction: jax.Array  # int32[E]: number of its move
    time: jax.Array  # int32[E]: steps of the episode so far


def ball_envs(num_envs):
    """Return envs of balls. Each episode is cut after `LENGTH` steps."""

    def reset(key):
        place_key, key = jax.random.split(key)
        place = jax.random.randint(place_key, (num_envs, 2), 0, SIZE)
        ball = Ball(place, any_direction(key), jnp.zeros(num_envs, jnp.int32))
        return render(ball), ball

    def step(key, ball, action):
        turn_key, direction_key, reset_key = jax.random.split(key, 3)
        turns = jax.random.bernoulli(turn_key, 1 / 16, (num_envs,))
        direction = jnp.where(turns, any_direction(direction_key), ball.direction)
        reward = (action == direction).astype(jnp.float32)
        ball = Ball((ball.place + MOVES[direction]) % SIZE, direction, ball.time + 1)
        truncated = ball.time == LENGTH
        final_frame, (_, new) = render(ball), reset(reset_key)
        ball = common.where(truncated, new, ball)
        return render(ball), ball, reward, jnp.zeros_like(truncated), truncated, final_frame

    def any_direction(key):
        return jax.random.randint(key, (num_envs,), 0, len(MOVES))

    return common.Envs(reset, step, num_envs)


def render(ball):
    """Return frames with a ball of 3 x 3 pixels, uint8[E, SIZE, SIZE]."""
    is_near = (jnp.arange(SIZE) - ball.place[..., None]) % SIZE < 3  # [E, 2, SIZE]
    return (255 * (is_near[:, 0, :, None] & is_near[:, 1, None, :])).astype(jnp.uint8)


def push(stack, frame):
    """Return the stack of the newest frames, oldest first, uint8[E, SIZE, SIZE, num_frames]."""
    return jnp.concatenate([stack[..., 1:], frame[..., None]], axis=-1)


class Network(nn.Module):
    """Stacks uint8[B, SIZE, SIZE, num_frames] -> action values float32[B, 4]."""

    @nn.compact
    def __call__(self, stack):
        x = nn.relu(nn.Conv(16, (5, 5), strides=3)(stack / 255.0))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x)).mean(axis=(1, 2))
        return nn.Dense(len(MOVES))(nn.relu(nn.Dense(64)(x)))


ENVS, TEST_ENVS, NETWORK = ball_envs(NUM_ENVS), ball_envs(100), Network()


class Carry(flax.struct.PyTreeNode):
    params: Any
    target_params: Any
    opt_state: Any
    buffer_state: jr.ReplayState
    ball: Ball
    stack: jax.Array  # uint8[E, SIZE, SIZE, num_frames]: the newest frame is last
    key: jax.Array
    step: jax.Array  # int32[]: iterations so far


def init(buffer, num_frames, key):
    key, reset_key, network_key = jax.random.split(key, 3)
    frame, ball = ENVS.reset(reset_key)
    stack = push(jnp.zeros((*frame.shape, num_frames), jnp.uint8), frame)
    params, buffer_state = NETWORK.init(network_key, stack), buffer.init(EXAMPLE)
    opt_state = OPTIMIZER.init(params)
    return Carry(params, params, opt_state, buffer_state, ball, stack, key, jnp.int32(0))


def iteration(buffer, carry, total):
    """One step of every env, and one gradient step."""
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    epsilon = jnp.maximum(1 - 5 * carry.step / total, 0.05)
    action = common.epsilon_greedy(act_key, greedy(carry.params, carry.stack), epsilon, len(MOVES))
    frame, ball, reward, terminated, truncated, final_frame = ENVS.step(env_key, carry.ball, action)
    flags = {"terminated": terminated, "truncated": truncated}
    taken = jr.Step(carry.stack[..., -1], action, reward, **flags, final_obs=final_frame)
    buffer_state = buffer.add(carry.buffer_state, taken)
    earlier = common.where(terminated | truncated, jnp.zeros_like(carry.stack), carry.stack)

    batch = buffer.sample(buffer_state, sample_key)
    error, gradient = jax.value_and_grad(loss)(carry.params, carry.target_params, batch)
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params, carry.target_params, 0.02)
    stack, step = push(earlier, frame), carry.step + 1
    carry = Carry(params, target_params, opt_state, buffer_state, ball, stack, key, step)
    return carry, {"loss": error}


def greedy(params, stack):
    return jnp.argmax(NETWORK.apply(params, stack), axis=-1)


def loss(params, target_params, batch):
    """Return the Huber loss of double Q-learning, float32[]. Observations are stacks."""
    t, pick = batch.experience, jax.vmap(lambda values, action: values[action])
    next_value = pick(NETWORK.apply(target_params, t.next_obs), greedy(params, t.next_obs))
    td_error = t.reward + t.discount * next_value - pick(NETWORK.apply(params, t.obs), t.action)
    return jnp.mean(batch.weight * optax.losses.huber_loss(td_error))


def evaluate(num_frames, carry, key):
    def policy(stack, frame):
        stack = push(stack, frame)
        return stack, greedy(carry.params, stack)

    stack = jnp.zeros((TEST_ENVS.num_envs, *FRAME.shape, num_frames), jnp.uint8)
    return common.evaluate(TEST_ENVS, policy, key, stack)


def main(argv=None):
    parser = common.parser(__doc__, out="out/atari_frame_stack.png", steps=9_600, seeds=1)
    args = parser.parse_args(argv)
    runs = {}
    for name, num_frames in {"1 frame": 1, "4 frames": 4}.items():
        buffer = jr.frame_stack(BUFFER, num_frames)
        runs[name] = common.train(
            args,
            functools.partial(init, buffer, num_frames),
            common.scanned(functools.partial(iteration, buffer)),
            functools.partial(evaluate, num_frames),
            steps_per_iteration=NUM_ENVS,
            name=name,
        )
    curves = {name: (run["steps"], run["returns"]) for name, run in runs.items()}
    losses = {name: (run["steps"], run["logs"]["loss"]) for name, run in runs.items()}
    title = f"Return of {LENGTH} steps, mean of 100 episodes"
    panels = {"title": title, "curves": curves}, {"title": "Loss", "curves": losses}
    common.plot(args.out, *panels)
    final = {name: round(float(run["returns"][-1].mean()), 1) for name, run in runs.items()}
    return common.report(
        final["4 frames"] >= 0.8 * LENGTH > 0.4 * LENGTH >= final["1 frame"],
        env_steps=int(runs["4 frames"]["steps"][-1]),
        **{f"return_with_{name}": value for name, value in final.items()},
        seconds=round(sum(run["seconds"] for run in runs.values()), 1),
        buffer_bytes=BUFFER.memory(EXAMPLE).total,
        bytes_of_stored_stacks=2 * 4 * SIZE * SIZE * BUFFER.capacity,
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: 4 frames >= 0.8 of the reward, 1 <= 0.4")
