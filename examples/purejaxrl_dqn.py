"""DQN in the structure of purejaxrl: `make_train(config)`, and `vmap` over seeds.

    python examples/purejaxrl_dqn.py --seeds 3   # a minute on two CPU cores

Copy `update_step`: it adds k steps in an inner scan, and then takes one gradient step. Purejaxrl
takes one step and puts learning in a `lax.cond`, of which `vmap` computes both branches in every
step. To replace a flashbax buffer:

    - buffer = fbx.make_flat_buffer(max_length=N, min_length=B, sample_batch_size=B,
    -                               add_sequences=False, add_batch_size=E)
    + buffer = jr.uniform(capacity=N, num_envs=E, batch_size=B, autoreset=jr.autoreset.GYMNAX)

    - buffer.add(state, TimeStep(obs=obs, action=action, reward=reward, done=done))
    + buffer.add(state, jr.Step(obs, action, reward, terminated=terminated, truncated=truncated,
    +                           final_obs=info["final_observation"]))

    - experience.first.obs, .first.action, .first.reward, .second.obs, 1 - experience.first.done
    + experience.obs,       .action,       .reward,       .next_obs,   experience.discount

    - jax.lax.cond(buffer.can_sample(state) & ..., learn, lambda *args: args, ...)
    + jnp.mean(batch.weight * error ** 2)   # 0 until `min_size` transitions are stored

`next_obs` of a truncated episode is its true final observation, and `discount` is gamma there, not
0: a time limit no longer looks like a failure. n-step targets need one more argument, `n_step=3`.

References:
  Lu et al., "Discovered Policy Optimisation" (2022), https://github.com/luchris429/purejaxrl.
  Mnih et al., "Human-level control through deep reinforcement learning" (2015).
"""

import sys
import time

import _common as common
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxreplay as jr

CONFIG = {
    "ENV_NAME": "CartPole-v1",
    "NUM_ENVS": 10,
    "TOTAL_TIMESTEPS": 400_000,
    "BUFFER_SIZE": 50_000,
    "BUFFER_BATCH_SIZE": 128,
    "LEARNING_STARTS": 5_000,  # sampleable transitions
    "TRAINING_INTERVAL": 20,  # env steps for each gradient step
    "EPSILON_START": 1.0,
    "EPSILON_FINISH": 0.05,
    "EPSILON_ANNEAL_TIME": 100_000,  # env steps
    "LR": 1e-3,  # decays to 0
    "GAMMA": 0.99,
    "N_STEP": 3,
    "TAU": 0.02,  # of the target network, which moves in each gradient step
}


class QNetwork(nn.Module):
    action_dim: int

    @nn.compact
    def __call__(self, obs):
        x = nn.relu(nn.Dense(84)(nn.relu(nn.Dense(120)(obs))))
        return nn.Dense(self.action_dim)(x)


def make_train(config):
    num_envs = config["NUM_ENVS"]
    steps_per_update = config["TRAINING_INTERVAL"] // num_envs
    num_updates = config["TOTAL_TIMESTEPS"] // config["TRAINING_INTERVAL"]
    env, env_params = gymnax.make(config["ENV_NAME"])
    reset, env_step = jax.vmap(env.reset, (0, None)), jax.vmap(env.step, (0, 0, 0, None))
    network = QNetwork(env.num_actions)
    buffer = jr.uniform(
        capacity=config["BUFFER_SIZE"],
        num_envs=num_envs,
        batch_size=config["BUFFER_BATCH_SIZE"],
        n_step=config["N_STEP"],
        gamma=config["GAMMA"],
        min_size=config["LEARNING_STARTS"],
        autoreset=jr.autoreset.GYMNAX,
    )
    epsilon = optax.linear_schedule(
        config["EPSILON_START"], config["EPSILON_FINISH"], config["EPSILON_ANNEAL_TIME"]
    )

    def train(rng):
        rng, reset_rng, network_rng = jax.random.split(rng, 3)
        obs, env_state = reset(jax.random.split(reset_rng, num_envs), env_params)
        params = network.init(network_rng, obs)
        optimizer = optax.adam(optax.linear_schedule(config["LR"], 0, num_updates))
        train_state = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
        example = jr.Step(
            obs[0], 0, 0.0, terminated=False, truncated=False, final_obs=obs[0]
        )  # of one env
        buffer_state, episode_return = buffer.init(example), jnp.zeros(num_envs)

        def act(runner, rng):
            """One step of every env."""
            train_state, buffer_state, env_state, obs, episode_return, timestep = runner
            action_rng, env_rng = jax.random.split(rng)
            action = network.apply(train_state.params, obs).argmax(-1)
            action = common.epsilon_greedy(action_rng, action, epsilon(timestep), env.num_actions)
            next_obs, env_state, reward, terminated, truncated, info = env_step(
                jax.random.split(env_rng, num_envs), env_state, action, env_params
            )
            flags = {"terminated": terminated, "truncated": truncated}
            step = jr.Step(obs, action, reward, **flags, final_obs=info["final_observation"])
            buffer_state = buffer.add(buffer_state, step)
            done, episode_return = terminated | truncated, episode_return + reward
            log = {"ended": done, "returned_episode_returns": episode_return}
            episode_return = jnp.where(done, 0, episode_return)
            timestep += num_envs
            return (train_state, buffer_state, env_state, next_obs, episode_return, timestep), log

        def update_step(carry, rng):
            """k steps of every env, and one gradient step."""
            runner, target_params = carry
            act_rng, sample_rng = jax.random.split(rng)
            runner, log = jax.lax.scan(act, runner, jax.random.split(act_rng, steps_per_update))
            train_state, buffer_state, *rest = runner
            batch = buffer.sample(buffer_state, sample_rng)

            def loss(params):
                t = batch.experience
                target = t.reward + t.discount * network.apply(target_params, t.next_obs).max(-1)
                value = jnp.take_along_axis(network.apply(params, t.obs), t.action[:, None], 1)
                return jnp.mean(batch.weight * (value[:, 0] - target) ** 2)

            error, gradient = jax.value_and_grad(loss)(train_state.params)
            train_state = train_state.apply_gradients(grads=gradient)
            target_params = optax.incremental_update(
                train_state.params, target_params, config["TAU"]
            )
            return ((train_state, buffer_state, *rest), target_params), log | {"loss": error}

        runner = (train_state, buffer_state, env_state, obs, episode_return, 0)
        rngs = jax.random.split(rng, num_updates)
        (runner, _), metrics = jax.lax.scan(update_step, (runner, params), rngs)
        return {"runner_state": runner, "metrics": metrics}

    return train


def main(argv=None):
    steps = CONFIG["TOTAL_TIMESTEPS"]
    parser = common.parser(__doc__, out="out/purejaxrl_dqn.png", steps=steps, seeds=3)
    parser.add_argument("--target", type=float, default=450.0, help="of the mean return")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    rngs = jax.random.split(jax.random.key(args.seed), args.seeds)
    anneal_time = min(CONFIG["EPSILON_ANNEAL_TIME"], args.steps // 4)
    config = CONFIG | {"TOTAL_TIMESTEPS": args.steps, "EPSILON_ANNEAL_TIME": anneal_time}
    # Make the state inside `jit`: then nothing needs to be donated.
    metrics = jax.device_get(jax.jit(jax.vmap(make_train(config)))(rngs)["metrics"])

    def by_chunks(name, num_chunks=20):  # [S, U, ...] -> [C, S, ...]
        chunks = np.array_split(metrics[name].reshape(args.seeds, -1), num_chunks, axis=1)
        return np.stack([chunk.sum(axis=1) for chunk in chunks])

    metrics["sum"] = metrics["returned_episode_returns"] * metrics["ended"]
    returns = by_chunks("sum") / np.maximum(by_chunks("ended"), 1)
    steps = args.steps * np.arange(1, 21) // 20
    curves = {"DQN": (steps, returns)}
    common.plot(args.out, {"title": "Return of training episodes", "curves": curves})
    final = round(float(returns[-1].mean()), 1)
    return common.report(
        final >= args.target,
        env_steps=args.steps,
        training_return=final,
        seconds=round(time.perf_counter() - began, 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")
