"""The DQN of sharded_dqn.py over several processes: here two, of 2 fake devices each.

python examples/multihost_dqn.py

On a cluster, start `python multihost_dqn.py --address HOST:PORT --processes N --process I` on each
host; where JAX knows the cluster (TPU pods, Slurm), `jax.distributed.initialize()` needs no
arguments. Each process steps Gymnasium envs of its own, and the buffer takes the steps of all.
"""

import argparse
import os
import socket
import subprocess
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import jaxreplay as jr

E = 16  # envs of all processes


def q(params, obs):
    return jax.nn.relu(obs @ params["w1"] + params["b1"]) @ params["w2"]


def loss(params, target_params, batch):
    t = batch.experience
    target = t.reward + t.discount * q(target_params, t.next_obs).max(-1)
    td_error = target - jnp.take_along_axis(q(params, t.obs), t.action[:, None], 1)[:, 0]
    return jnp.mean(batch.weight * td_error**2), td_error


def train(iterations):
    """Run in every process. Return the mean episode length of the last quarter, of all."""
    num, which = jax.process_count(), jax.process_index()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    buffer = jr.sharded(
        jr.prioritized(
            capacity=65_536, num_envs=E, batch_size=128, n_step=3, autoreset="next_step"
        ),
        mesh,
    )
    optimizer = optax.adam(1e-3)
    k1, k2 = jax.random.split(jax.random.key(0))
    params = {"w1": jax.random.normal(k1, (4, 128)) / 2, "b1": jnp.zeros(128)}
    params["w2"] = jax.random.normal(k2, (128, 2)) / 20
    # equal on all processes
    learner = multihost_utils.host_local_array_to_global_array(
        jax.device_get((params, params, optimizer.init(params))), mesh, jax.sharding.PartitionSpec()
    )
    flag = jax.ShapeDtypeStruct((), bool)
    state = buffer.init(jr.Step(jnp.zeros(4), 0, 0.0, terminated=flag, truncated=flag))

    def learn(learner, state, step, key):
        params, target_params, opt_state = learner
        state = buffer.add(state, step)
        batch = buffer.sample(state, key)
        grads, td_error = jax.grad(loss, has_aux=True)(params, target_params, batch)
        state = buffer.update_priorities(state, batch.index, jnp.abs(td_error) + 1e-3)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        target_params = optax.incremental_update(params, target_params, 0.02)
        return (params, target_params, opt_state), state

    learn = jax.jit(learn, donate_argnums=(0, 1))
    act = jax.jit(lambda params, obs: q(params, obs).argmax(-1))
    envs = gymnasium.make_vec("CartPole-v1", num_envs=E // num, vectorization_mode="sync")
    obs, _ = envs.reset(seed=which)
    random = np.random.default_rng(which)
    num_ended = 0
    for iteration in range(iterations):
        own = jax.tree.map(lambda leaf: leaf.addressable_data(0), learner[0])
        action = np.where(
            random.random(E // num) < 0.1, random.integers(0, 2, E // num), act(own, obs)
        )
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        step = jr.Step(
            obs,
            action.astype(np.int32),
            reward.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
        )
        learner, state = learn(learner, state, buffer.from_local(step), jax.random.key(iteration))
        obs = next_obs
        num_ended += (terminated | truncated).sum() * (iteration >= iterations * 3 // 4)
    ended = multihost_utils.process_allgather(np.float32(num_ended)).sum()
    weights = jax.tree.map(lambda leaf: leaf.addressable_data(0), learner[0])
    multihost_utils.assert_equal(weights, "the replicas differ")
    return E * (iterations - iterations * 3 // 4) / max(ended, 1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train a DQN in several processes.")
    parser.add_argument("--address", help="HOST:PORT of the first process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--process", type=int)
    parser.add_argument("--iterations", type=int, default=4_000)
    options = parser.parse_args(arguments)
    if options.process is not None:
        if jax.config.jax_platforms == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options.address, options.processes, options.process)
        length = train(options.iterations)
        if options.process == 0:
            print(f"{jax.device_count()} devices of {jax.process_count()} processes: ", end="")
            print(f"mean episode length {length:.0f}, in the last quarter")
        return
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2"
    again = [sys.executable, __file__, "--address", address]
    again += ["--processes", str(options.processes), "--iterations", str(options.iterations)]
    processes = [
        subprocess.Popen(
            [*again, "--process", str(which)],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        for which in range(options.processes)
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit("a process failed; its error is above")


if __name__ == "__main__":
    main()
