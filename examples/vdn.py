"""VDN: agents that share a reward, and whose episodes end one by one, from 3-step joint samples.

    python examples/vdn.py             # 30 seconds on two CPU cores; writes out/vdn.png
    python examples/vdn.py --flashbax  # the same agent by flashbax's interface to a flat buffer

Copy `act` and `loss`. Each agent of an env walks on a grid to a target of its own, where its
episode ends; the others go on. The flags are bool[E, A]. The buffer notes who acted, and stops each
agent's discount at its own end. flashbax's form, in `act_flashbax` and `loss_flashbax`, has to
carry who is alive, has one-step targets, and takes the end of time for a termination.

References:
  Sunehag et al., "Value-Decomposition Networks For Cooperative Multi-Agent Learning" (2018),
  https://arxiv.org/abs/1706.05296.
"""

import functools
import sys
from typing import Any

import _common as common
import flax.struct
import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr
from jaxreplay.compat import flashbax

E, A, SIZE, TIME = 32, 3, 6, 20  # envs, agents, cells of a side, steps of an episode
MOVES = jnp.array([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]])
OPTIMIZER = optax.adam(1e-3)
BUFFER = jr.uniform(
    capacity=64_000, num_envs=E, batch_size=64, n_step=3, autoreset="same_step", num_agents=A
)
FLAT = flashbax.make_flat_buffer(
    max_length=64_000, min_length=1_000, sample_batch_size=64, add_batch_size=E
)
OBS, FLAGS = jnp.zeros((A, 4)), jnp.zeros(A, bool)
EXAMPLE = jr.Step(  # of one env; the reward is the team's
    OBS, jnp.zeros(A, jnp.int32), 0.0, terminated=FLAGS, truncated=FLAGS, final_obs=OBS
)


class Envs(flax.struct.PyTreeNode):
    """Envs of agents on a grid. An agent that is at its target has ended, and sees zeros."""

    place: jax.Array  # int32[E, A, 2]
    target: jax.Array  # int32[E, A, 2]
    has_ended: jax.Array  # bool[E, A]
    time: jax.Array  # int32[E]

    @classmethod
    def reset(cls, key, num_envs):
        place, target = jax.random.randint(key, (2, num_envs, A, 2), 0, SIZE)
        target = jnp.where((place == target).all(-1, keepdims=True), SIZE - 1 - target, target)
        return cls(place, target, jnp.zeros((num_envs, A), bool), jnp.zeros(num_envs, jnp.int32))

    def obs(self):
        seen = jnp.concatenate([self.place, self.target - self.place], axis=-1) / SIZE
        return jnp.where(self.has_ended[..., None], 0, seen)

    def step(self, key, action):
        """Return the next envs, the team's reward, both flags, and the final observations."""
        place = jnp.clip(self.place + MOVES[action], 0, SIZE - 1)
        place = jnp.where(self.has_ended[..., None], self.place, place)
        terminated, time = (place == self.target).all(-1), self.time + 1
        truncated = (time == TIME)[:, None] & ~terminated
        reward = (terminated & ~self.has_ended).sum(-1) - 0.05 * (~self.has_ended).sum(-1)
        after = Envs(place, self.target, terminated, time)
        over = (terminated | truncated).all(-1)
        fresh = Envs.reset(key, len(over))
        pick = lambda new, old: jnp.where(over.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        return jax.tree.map(pick, fresh, after), reward, terminated, truncated, after.obs()


class Carry(flax.struct.PyTreeNode):
    params: Any
    target_params: Any
    opt_state: Any
    buffer_state: Any
    envs: Envs
    key: jax.Array


def q(params, obs):
    """Return the action values of each agent: float32[..., A, 5]."""
    for w, b in params[:-1]:
        obs = jax.nn.relu(obs @ w + b)
    return obs @ params[-1][0] + params[-1][1]


def init(with_flashbax, key):
    key, env_key, *keys = jax.random.split(key, 5)
    sizes = 4, 64, 64, 5
    params = [
        (jax.random.normal(k, (m, n)) / jnp.sqrt(m), jnp.zeros(n))
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]
    state = BUFFER.init(EXAMPLE)
    if with_flashbax:
        example = {"obs": OBS, "action": FLAGS * 0, "reward": 0.0, "done": FLAGS, "alive": FLAGS}
        state = FLAT.init(jax.tree.map(jnp.asarray, example))
    return Carry(params, params, OPTIMIZER.init(params), state, Envs.reset(env_key, E), key)


def act(buffer_state, obs, action, envs, reward, terminated, truncated, final_obs):
    """Return the buffer's state with a step of all envs."""
    del envs
    ends = {"terminated": terminated, "truncated": truncated, "final_obs": final_obs}
    return BUFFER.add(buffer_state, jr.Step(obs, action, reward, **ends))


def loss(params, target_params, batch):
    t = batch.experience  # t.discount is [B, A]: 0 for an agent that terminated, or had ended
    value = jnp.take_along_axis(q(params, t.obs), t.action[..., None], -1)[..., 0]
    next_value = q(target_params, t.next_obs).max(-1)
    target = t.reward + (t.discount * next_value).sum(-1)
    return jnp.mean((target - jnp.where(t.alive, value, 0).sum(-1)) ** 2)


def act_flashbax(buffer_state, obs, action, envs, reward, terminated, truncated, final_obs):
    del final_obs
    done, alive = terminated | truncated, ~envs.has_ended
    step = {"obs": obs, "action": action, "reward": reward, "done": done, "alive": alive}
    return FLAT.add(buffer_state, step)


def loss_flashbax(params, target_params, batch):
    t, after = batch.experience.first, batch.experience.second
    value = jnp.take_along_axis(q(params, t["obs"]), t["action"][..., None], -1)[..., 0]
    next_value = jnp.where(t["done"], 0, 0.99 * q(target_params, after["obs"]).max(-1))
    target = t["reward"] + next_value.sum(-1)
    return jnp.mean((target - jnp.where(t["alive"], value, 0).sum(-1)) ** 2)


def iteration(with_flashbax, carry, total):
    """One step of every env, and one gradient step."""
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    obs = carry.envs.obs()
    action = q(carry.params, obs).argmax(-1)
    action = common.epsilon_greedy(act_key, action, 0.1, 5)
    envs, *found = carry.envs.step(env_key, action)
    put, error, buffer = (
        (act_flashbax, loss_flashbax, FLAT) if with_flashbax else (act, loss, BUFFER)
    )
    buffer_state = put(carry.buffer_state, obs, action, carry.envs, *found)
    batch = buffer.sample(buffer_state, sample_key)
    value, grads = jax.value_and_grad(error)(carry.params, carry.target_params, batch)
    updates, opt_state = OPTIMIZER.update(grads, carry.opt_state)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params, carry.target_params, 0.01)
    return Carry(params, target_params, opt_state, buffer_state, envs, key), {"loss": value}


def evaluate(carry, key):
    """Return the fraction of agents that reach their targets, float32[]."""

    def step(envs, key):
        after, _, terminated, truncated, _ = envs.step(key, q(carry.params, envs.obs()).argmax(-1))
        return after, (terminated.mean(-1), (terminated | truncated).all(-1))

    envs = Envs.reset(key, 1_000)
    _, (reached, is_over) = jax.lax.scan(step, envs, jax.random.split(key, TIME))
    return reached[jnp.argmax(is_over, axis=0), jnp.arange(1_000)].mean()


def main(argv=None):
    parser = common.parser(__doc__, out="out/vdn.png", steps=256_000, seeds=3)
    parser.add_argument("--flashbax", action="store_true", help="use flashbax's interface")
    args = parser.parse_args(argv)
    run = common.train(
        args,
        functools.partial(init, args.flashbax),
        common.scanned(functools.partial(iteration, args.flashbax)),
        evaluate,
        steps_per_iteration=E,
        name="vdn",
    )
    reached = {"vdn": (run["steps"], run["returns"])}
    common.plot(args.out, {"title": "Agents at their targets", "ylabel": "part", "curves": reached})
    found = float(run["returns"][-1].mean())
    return common.report(
        found >= 0.95,
        env_steps=int(run["steps"][-1]),
        steps_per_second=run["steps_per_second"],
        agents_at_their_targets=round(found, 3),
        seconds=round(run["seconds"], 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: too few agents are at their targets")
