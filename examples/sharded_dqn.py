"""DQN on CartPole with one prioritized replay buffer over all devices: 8 fake ones on a CPU.

python examples/sharded_dqn.py [--devices N] [--seeds N]

On real devices nothing changes: JAX finds them. Each has a part of the envs, of the rows and of the
batch; the parameters are the same on all. For several hosts see multihost_dqn.py.
"""

import argparse
import os

# before JAX starts; without effect on GPUs and TPUs
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import gymnax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxreplay as jr

E = 16  # envs of all devices
env, env_params = gymnax.make("CartPole-v1")
reset, env_step = jax.vmap(env.reset, (0, None)), jax.vmap(env.step, (0, 0, 0, None))
optimizer = optax.adam(1e-3)
WHOLE = jr.prioritized(
    capacity=65_536, num_envs=E, batch_size=128, n_step=3, autoreset=jr.autoreset.GYMNAX
)
ZEROS = jnp.zeros(4)
EXAMPLE = jr.Step(ZEROS, 0, 0.0, terminated=False, truncated=False, final_obs=ZEROS)


def q(params, obs):
    return jax.nn.relu(obs @ params["w1"] + params["b1"]) @ params["w2"]


def loss(params, target_params, batch):
    t = batch.experience
    target = t.reward + t.discount * q(target_params, t.next_obs).max(-1)
    td_error = target - jnp.take_along_axis(q(params, t.obs), t.action[:, None], 1)[:, 0]
    return jnp.mean(batch.weight * td_error**2), td_error  # the mean over all devices


def trainer(mesh, iterations):
    """Return a compiled function of a key, which returns the parameters, and the part of the envs
    whose episode ended, of each iteration."""
    buffer = jr.sharded(WHOLE, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step(carry, key):  # one step of every env, then one gradient step
        params, target_params, opt_state, state, obs, env_state = carry
        k1, k2, k3, k4 = jax.random.split(key, 4)
        random, explores = jax.random.randint(k1, (E,), 0, 2), jax.random.bernoulli(k2, 0.1, (E,))
        action = jnp.where(explores, random, q(params, obs).argmax(-1))
        next_obs, env_state, reward, terminated, truncated, info = env_step(
            jax.random.split(k3, E), env_state, action, env_params
        )
        ends = {"terminated": terminated, "truncated": truncated}
        ends["final_obs"] = info["final_observation"]
        state = buffer.add(state, jr.Step(obs, action, reward, **ends))
        batch = buffer.sample(state, k4)
        grads, td_error = jax.grad(loss, has_aux=True)(params, target_params, batch)
        state = buffer.update_priorities(state, batch.index, jnp.abs(td_error) + 1e-3)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        target_params = optax.incremental_update(params, target_params, 0.02)
        carry = (params, target_params, opt_state, state, next_obs, env_state)
        return carry, (terminated | truncated).mean()

    @jax.jit
    def train(key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        params = {"w1": jax.random.normal(k1, (4, 128)) / 2, "b1": jnp.zeros(128)}
        params["w2"] = jax.random.normal(k2, (128, 2)) / 20
        params = jax.lax.with_sharding_constraint(params, everywhere)
        start = reset(jax.random.split(k3, E), env_params)
        carry = (params, params, optimizer.init(params), buffer.init(EXAMPLE), *start)
        carry, ended = jax.lax.scan(step, carry, jax.random.split(k4, iterations))
        return jax.lax.with_sharding_constraint((carry[0], ended), everywhere)

    return train


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train a DQN with a buffer over all devices.")
    parser.add_argument("--devices", type=int, default=jax.device_count())
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=10_000)
    options = parser.parse_args(arguments)
    devices = jax.devices()[: options.devices]
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    train = trainer(mesh, options.iterations)
    for seed in range(options.seeds):
        params, ended = train(jax.random.key(seed))
        for leaf in jax.tree.leaves(params):
            replicas = [shard.data.tobytes() for shard in leaf.addressable_shards]
            assert len(set(replicas)) == 1, "the replicas differ"
        lengths = (1 / ended.reshape(10, -1).mean(1)).round()
        print(f"{len(devices)} devices, seed {seed}: mean episode length", lengths)


if __name__ == "__main__":
    main()
