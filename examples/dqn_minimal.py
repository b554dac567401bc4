"""DQN on CartPole with 3-step prioritized replay, in one compiled program.

python examples/dqn_minimal.py
"""

import gymnax
import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

E, N = 16, 10_000  # parallel envs, updates
env, env_params = gymnax.make("CartPole-v1")
reset, env_step = jax.vmap(env.reset, (0, None)), jax.vmap(env.step, (0, 0, 0, None))
optimizer = optax.adam(1e-3)
buffer = jr.prioritized(
    capacity=65_536, num_envs=E, batch_size=128, n_step=3, autoreset=jr.autoreset.GYMNAX
)
ZEROS = jnp.zeros(4)
EXAMPLE = jr.Step(ZEROS, 0, 0.0, terminated=False, truncated=False, final_obs=ZEROS)


def q(params, obs):
    return jax.nn.relu(obs @ params["w1"] + params["b1"]) @ params["w2"]


def loss(params, target_params, batch):
    t = batch.experience  # t.discount is gamma ** 3, or 0 after a termination
    target = t.reward + t.discount * q(target_params, t.next_obs).max(-1)
    td_error = target - jnp.take_along_axis(q(params, t.obs), t.action[:, None], 1)[:, 0]
    return jnp.mean(batch.weight * td_error**2), td_error


def step(carry, given):  # one step of every env, then one gradient step
    (params, target_params, opt_state, state, obs, env_state), (key, epsilon) = carry, given
    k1, k2, k3, k4 = jax.random.split(key, 4)
    random, explores = jax.random.randint(k1, (E,), 0, 2), jax.random.bernoulli(k2, epsilon, (E,))
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
def train(key):  # the state is made inside, so that nothing needs to be donated
    k1, k2, k3, k4 = jax.random.split(key, 4)
    params = {"w1": jax.random.normal(k1, (4, 128)) / 2, "b1": jnp.zeros(128)}
    params["w2"] = jax.random.normal(k2, (128, 2)) / 20
    start = reset(jax.random.split(k3, E), env_params)
    carry = (params, params, optimizer.init(params), buffer.init(EXAMPLE), *start)
    return jax.lax.scan(step, carry, (jax.random.split(k4, N), jnp.linspace(1, 0, N)))[1]


if __name__ == "__main__":
    ended = train(jax.random.key(0)).reshape(10, -1).mean(1)
    print("mean episode length, by tenths of the run:", (1 / ended).round())
