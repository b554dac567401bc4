"""Online DQN with half of each batch from offline data, on MountainCar.

    python examples/offline_to_online.py --seeds 3   # 2 minutes on two CPU cores

Copy `load` and `iteration`. `load` reads a Minari dataset into a buffer's state. `jr.mix` samples a
fixed number of items from each buffer, and `iteration` adds online steps to its own buffer alone.
The dataset is made here, by a policy that reaches the goal late or never; give `load` your own.

The reward is -1 until the car is on the hill, which random actions do not reach within the time
limit. The same agent without offline data needs more online steps to reach the target, or never
does. Writes out/offline_to_online.png.

References:
  Ball et al., "Efficient Online Reinforcement Learning with Offline Data" (2023), section 4.1.
"""

import functools
import os
import sys
import tempfile
import warnings
from typing import Any

import _common as common
import datasets as recipes
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import minari
import numpy as np
import optax

import jaxreplay as jr
from jaxreplay import datasets

NUM_ENVS, BATCH_SIZE = 8, 128
SHARED = {"batch_size": BATCH_SIZE, "n_step": 3, "gamma": 0.99}
ENVS = common.gymnax_envs("MountainCar-v0", NUM_ENVS)
TEST_ENVS = common.gymnax_envs("MountainCar-v0", 100)
NETWORK = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(3)])
OPTIMIZER = optax.adam(1e-3)
OBS = jnp.zeros(2)  # position and velocity
EXAMPLE = jr.Step(OBS, 0, 0.0, terminated=False, truncated=False, final_obs=OBS)  # of one env
ONLINE = jr.uniform(
    capacity=65_536, num_envs=NUM_ENVS, min_size=1_000, autoreset=jr.autoreset.GYMNAX, **SHARED
)


class Carry(flax.struct.PyTreeNode):
    params: Any
    target_params: Any
    opt_state: Any
    states: dict[str, jr.ReplayState]  # of the buffers, by name
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 2]
    key: jax.Array


def load(dataset):
    """Return a buffer and its state with all transitions of a Minari dataset."""
    capacity = datasets.required_capacity(dataset)
    buffer = jr.uniform(capacity=capacity, autoreset="next_step", **SHARED)
    return buffer, datasets.from_episodes(dataset, buffer, EXAMPLE.replace(final_obs=None))


def init(offline, key):
    key, reset_key, network_key = jax.random.split(key, 3)
    obs, env_state = ENVS.reset(reset_key)
    params = NETWORK.init(network_key, obs)
    states = {"online": ONLINE.init(EXAMPLE), **offline}
    return Carry(params, params, OPTIMIZER.init(params), states, env_state, obs, key)


def iteration(buffer, carry, total):
    """One online step of every env, and one gradient step from a mixed batch."""
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    action = common.epsilon_greedy(act_key, greedy(carry.params, carry.obs), 0.05, 3)
    obs, env_state, reward, terminated, truncated, final_obs = ENVS.step(
        env_key, carry.env_state, action
    )
    flags = {"terminated": terminated, "truncated": truncated}
    taken = jr.Step(carry.obs, action, reward, **flags, final_obs=final_obs)
    states = carry.states | {"online": ONLINE.add(carry.states["online"], taken)}

    batch = buffer.sample(states, sample_key)
    error, gradient = jax.value_and_grad(loss)(carry.params, carry.target_params, batch)
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params, carry.target_params, 0.02)
    return Carry(params, target_params, opt_state, states, env_state, obs, key), {"loss": error}


def values(params, obs):
    return NETWORK.apply(params, obs * jnp.array([1.0, 15.0]))


def greedy(params, obs):
    return jnp.argmax(values(params, obs), axis=-1)


def loss(params, target_params, batch):
    """Return the Huber loss of double Q-learning, float32[]."""
    t, pick = batch.experience, jax.vmap(lambda values, action: values[action])
    next_value = pick(values(target_params, t.next_obs), greedy(params, t.next_obs))
    td_error = t.reward + t.discount * next_value - pick(values(params, t.obs), t.action)
    return jnp.mean(batch.weight * optax.losses.huber_loss(td_error))


def evaluate(carry, key):
    return common.evaluate(TEST_ENVS, lambda _, obs: (None, greedy(carry.params, obs)), key)


def make_dataset(key, num_steps=1_600):
    """Return a new Minari dataset of a policy that gains height, with 3 of 10 actions random."""
    buffer = jr.uniform(
        capacity=2 * num_steps * NUM_ENVS, num_envs=NUM_ENVS, autoreset="same_step", **SHARED
    )

    def act(carry, key):
        state, obs, env_state = carry
        act_key, env_key = jax.random.split(key)
        uphill = jnp.where(obs[:, 1] < 0, 0, 2)
        action = common.epsilon_greedy(act_key, uphill, 0.3, 3)
        next_obs, env_state, reward, terminated, truncated, final_obs = ENVS.step(
            env_key, env_state, action
        )
        flags = {"terminated": terminated, "truncated": truncated}
        step = jr.Step(obs, action, reward, **flags, final_obs=final_obs)
        return (buffer.add(state, step), next_obs, env_state), None

    reset_key, key = jax.random.split(key)
    carry = buffer.init(EXAMPLE), *ENVS.reset(reset_key)
    keys = jax.random.split(key, num_steps)
    state = jax.jit(lambda carry: jax.lax.scan(act, carry, keys)[0][0])(carry)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Minari asks for an author, among others
        name = "example/mountain-car-v0"
        return recipes.to_minari(buffer, state, name, env="MountainCar-v0")


def mean_steps(first):
    return round(float(first.mean())) if np.isfinite(first).all() else "not-all-seeds"


def main(argv=None):
    parser = common.parser(__doc__, out="out/offline_to_online.png", steps=40_000, seeds=3)
    parser.add_argument("--target", type=float, default=-150.0, help="return to reach")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        make_dataset(jax.random.key(args.seed))
        dataset = minari.load_dataset("example/mountain-car-v0")
        offline, state = load(dataset)
        dataset_return = -dataset.total_steps / dataset.total_episodes
    mixed = jr.mix(offline=(offline, BATCH_SIZE // 2), online=(ONLINE, BATCH_SIZE // 2))
    agents = {
        "with offline data": (mixed, {"offline": state}),
        "without": (jr.mix(online=(ONLINE, BATCH_SIZE)), {}),
    }
    runs = {}
    for name, (buffer, states) in agents.items():
        runs[name] = common.train(
            args,
            functools.partial(init, states),
            common.scanned(functools.partial(iteration, buffer)),
            evaluate,
            steps_per_iteration=NUM_ENVS,
            name=name,
        )
    curves = {name: (run["steps"], run["returns"]) for name, run in runs.items()}
    common.plot(args.out, {"title": "Return, mean of 100 episodes", "curves": curves})
    # [S] of each: the first evaluation at the target, or infinity
    first = {
        name: np.where(run["returns"] >= args.target, run["steps"][:, None], np.inf).min(axis=0)
        for name, run in runs.items()
    }
    return common.report(
        bool((first["with offline data"] < first["without"]).all()),
        env_steps=int(runs["without"]["steps"][-1]),
        return_of_the_dataset=round(dataset_return, 1),
        **{
            f"return_{name}": round(float(run["returns"][-1].mean()), 1)
            for name, run in runs.items()
        },
        **{f"steps_{name}": mean_steps(first[name]) for name in runs},
        seconds=round(sum(run["seconds"] for run in runs.values()), 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: offline data did not save online steps")
