"""Make a `jr.Step` from the output of each env library, with both flags and the final observation.

    python examples/steps.py   # runs the libraries that are installed, and inspects the rows
    make recipes               # installs all of them first

Copy `step = jr.Step(...)` of your library. Each recipe makes envs, and adds the steps of a random
policy to a buffer.

References:
  Pardo et al., "Time Limits in Reinforcement Learning" (2018), for the two flags.
"""

import argparse
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr

NUM_ENVS = 4


def buffer_of(autoreset, **options):
    sizes = {"capacity": 16_384, "num_envs": NUM_ENVS, "batch_size": 32}
    return jr.uniform(**sizes, autoreset=autoreset, **options)


def gymnasium_next_step(num_steps):
    """Gymnasium's vector envs: a done returns the final observation, and the next step resets."""
    import gymnasium

    envs = gymnasium.make_vec("CartPole-v1", num_envs=NUM_ENVS, max_episode_steps=20)
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    replay = jr.Replay(buffer_of(jr.autoreset.of(envs)))
    for _ in range(num_steps):
        action = envs.action_space.sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        step = jr.Step(obs, action, reward, terminated=terminated, truncated=truncated)
        replay.add(step)
        obs = next_obs
    return replay.inspect()


def gymnasium_same_step(num_steps):
    """Gymnasium's vector envs with `SAME_STEP`: the info has the final observations of the envs
    that are done."""
    import gymnasium

    envs = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=NUM_ENVS,
        max_episode_steps=20,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
    )
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    replay = jr.Replay(buffer_of(jr.autoreset.of(envs)))
    for _ in range(num_steps):
        action = envs.action_space.sample()
        next_obs, reward, terminated, truncated, info = envs.step(action)
        final_obs = next_obs.copy()  # read only where an episode ended
        for env in np.flatnonzero(terminated | truncated):
            final_obs[env] = info["final_obs"][env]
        step = jr.Step(
            obs, action, reward, terminated=terminated, truncated=truncated, final_obs=final_obs
        )
        replay.add(step)
        obs = next_obs
    return replay.inspect()


def envpool(num_steps):
    """EnvPool: the same as Gymnasium's vector envs."""
    import envpool

    envs = envpool.make_gymnasium("CartPole-v1", num_envs=NUM_ENVS, seed=0, max_episode_steps=20)
    random = np.random.default_rng(0)
    obs, _ = envs.reset()
    replay = jr.Replay(buffer_of(jr.autoreset.ENVPOOL))
    for _ in range(num_steps):
        action = random.integers(0, 2, NUM_ENVS)
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        step = jr.Step(obs, action, reward, terminated=terminated, truncated=truncated)
        replay.add(step)
        obs = next_obs
    return replay.inspect()


def gymnax(num_steps):
    """gymnax 1.0: both flags, and the final observation in the info."""
    import gymnax

    env, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=20)
    reset, env_step = jax.vmap(env.reset, (0, None)), jax.vmap(env.step, (0, 0, 0, None))
    buffer = buffer_of(jr.autoreset.GYMNAX)

    def act(carry, key):
        state, obs, env_state = carry
        action_key, env_key = jax.random.split(key)
        action = jax.random.randint(action_key, (NUM_ENVS,), 0, env.num_actions)
        next_obs, env_state, reward, terminated, truncated, info = env_step(
            jax.random.split(env_key, NUM_ENVS), env_state, action, params
        )
        step = jr.Step(
            obs,
            action,
            reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=info["final_observation"],
        )
        return (buffer.add(state, step), next_obs, env_state), None

    obs, env_state = reset(jax.random.split(jax.random.key(0), NUM_ENVS), params)
    return inspected(buffer, act, obs, env_state, jnp.int32(0), num_steps)


def brax(num_steps):
    """Brax: `done` is 1 for truncations too, and the final observation is lost."""
    from brax import envs

    env = envs.create("fast", episode_length=20, auto_reset=True, batch_size=NUM_ENVS)
    return stepped(env, env.reset(jax.random.key(0)), num_steps)


def playground(num_steps):
    """MuJoCo Playground with its wrappers, which are as Brax's, and take raw keys."""
    from mujoco_playground import registry, wrapper

    env = wrapper.wrap_for_brax_training(registry.load("CartpoleBalance"), episode_length=20)
    return stepped(env, env.reset(jax.random.split(jax.random.PRNGKey(0), NUM_ENVS)), num_steps)


def stepped(env, env_state, num_steps):
    """Add the steps of Brax's interface."""
    buffer = buffer_of(jr.autoreset.BRAX)

    def act(carry, key):
        state, obs, env_state = carry
        action = jax.random.uniform(key, (NUM_ENVS, env.action_size), minval=-1, maxval=1)
        env_state = env.step(env_state, action)
        truncated = env_state.info["truncation"] > 0
        step = jr.Step(
            obs,
            action,
            env_state.reward,
            terminated=(env_state.done > 0) & ~truncated,
            truncated=truncated,
        )
        return (buffer.add(state, step), env_state.obs, env_state), None

    action = jnp.zeros(env.action_size)
    return inspected(buffer, act, env_state.obs, env_state, action, num_steps)


def jumanji(num_steps):
    """Jumanji: the last step of an episode is a termination if its discount is 0, else a
    truncation; the wrapper keeps the final observation."""
    import jumanji
    from jumanji.wrappers import VmapAutoResetWrapper

    env = VmapAutoResetWrapper(jumanji.make("Snake-v1", time_limit=20), next_obs_in_extras=True)
    buffer = buffer_of(jr.autoreset.JUMANJI)

    def act(carry, key):
        state, obs, env_state = carry
        action = jax.random.randint(key, (NUM_ENVS,), 0, env.action_spec.num_values)
        env_state, timestep = env.step(env_state, action)
        is_last = timestep.last()
        step = jr.Step(
            obs,
            action,
            timestep.reward,
            terminated=is_last & (timestep.discount == 0),
            truncated=is_last & (timestep.discount != 0),
            final_obs=timestep.extras["next_obs"],
        )
        return (buffer.add(state, step), timestep.observation, env_state), None

    env_state, timestep = env.reset(jax.random.split(jax.random.key(0), NUM_ENVS))
    return inspected(buffer, act, timestep.observation, env_state, jnp.int32(0), num_steps)


def craftax(num_steps):
    """Craftax, and gymnax before 1.0: `done` is the only flag, and the final observation is lost.
    The clock of the state before the step shows the time limit."""
    from craftax.craftax_env import make_craftax_env_from_name

    env = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=True)
    params = env.default_params.replace(max_timesteps=20)
    reset, env_step = jax.vmap(env.reset, (0, None)), jax.vmap(env.step, (0, 0, 0, None))
    buffer = buffer_of(jr.autoreset.CRAFTAX)

    def act(carry, key):
        state, obs, env_state = carry
        action_key, env_key = jax.random.split(key)
        action = jax.random.randint(action_key, (NUM_ENVS,), 0, env.num_actions)
        is_out_of_time = env_state.timestep + 1 >= params.max_timesteps
        next_obs, env_state, reward, done, _ = env_step(
            jax.random.split(env_key, NUM_ENVS), env_state, action, params
        )
        step = jr.Step(
            obs,
            action,
            reward,
            terminated=done & ~is_out_of_time,
            truncated=done & is_out_of_time,
        )
        return (buffer.add(state, step), next_obs, env_state), None

    obs, env_state = reset(jax.random.split(jax.random.key(0), NUM_ENVS), params)
    return inspected(buffer, act, obs, env_state, jnp.int32(0), num_steps)


def jaxmarl(num_steps):
    """JaxMARL: dicts by agent, whose flags stay True once it has ended. Where `__all__` ends the
    episode, the others have ended, too; the clock of the state before shows the time limit."""
    import jaxmarl
    from jaxmarl.environments.smax import map_name_to_scenario

    env = jaxmarl.make("HeuristicEnemySMAX", scenario=map_name_to_scenario("3m"), max_steps=19)
    reset, env_step = jax.vmap(env.reset), jax.vmap(env.step)
    buffer = buffer_of(jr.autoreset.JAXMARL, num_agents=len(env.agents))
    by_agent = lambda tree: jnp.stack([tree[agent] for agent in env.agents], axis=1)  # [E, A, ...]

    def act(carry, key):
        state, obs, env_state = carry
        action_key, env_key = jax.random.split(key)
        num_actions = env.action_space(env.agents[0]).n
        action = jax.random.randint(action_key, (NUM_ENVS, len(env.agents)), 0, num_actions)
        is_out_of_time = (env_state.state.step >= env.max_steps)[:, None]
        actions = {agent: action[:, which] for which, agent in enumerate(env.agents)}
        next_obs, env_state, reward, done, _ = env_step(
            jax.random.split(env_key, NUM_ENVS), env_state, actions
        )
        is_over, has_died = done["__all__"][:, None], by_agent(done)
        step = jr.Step(
            by_agent(obs),
            action,
            by_agent(reward),
            terminated=has_died | (is_over & ~is_out_of_time),
            truncated=is_over & is_out_of_time & ~has_died,
        )
        return (buffer.add(state, step), next_obs, env_state), None

    obs, env_state = reset(jax.random.split(jax.random.key(0), NUM_ENVS))
    example = jr.Step(
        by_agent(obs)[0],
        jnp.zeros(len(env.agents), jnp.int32),
        jnp.zeros(len(env.agents)),
        terminated=jnp.zeros(len(env.agents), bool),
        truncated=jnp.zeros(len(env.agents), bool),
    )
    return scanned(buffer, act, obs, env_state, example, num_steps)


def pettingzoo(num_steps):
    """PettingZoo's parallel envs: agents that ended are missing in the dicts, so that their flags
    stay True here, and their observations are 0. You reset the env when no agent is left."""
    from pettingzoo.butterfly import knights_archers_zombies_v11 as game

    envs = [game.parallel_env(max_cycles=20) for _ in range(NUM_ENVS)]
    agents = envs[0].possible_agents
    zeros = np.zeros(envs[0].observation_space(agents[0]).shape, np.float32)
    filled = lambda tree, other, dtype: np.array([tree.get(a, other) for a in agents], dtype)
    all_obs = [filled(env.reset(seed=nth)[0], zeros, np.float32) for nth, env in enumerate(envs)]
    replay = jr.Replay(
        buffer_of(jr.autoreset.PETTINGZOO, num_agents=len(agents)),
        example=jr.Step(
            all_obs[0],
            np.zeros(len(agents), np.int32),
            np.zeros(len(agents), np.float32),
            terminated=np.zeros(len(agents), bool),
            truncated=np.zeros(len(agents), bool),
            final_obs=all_obs[0],
        ),
    )
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        steps = []
        for nth, env in enumerate(envs):
            action = random.integers(0, env.action_space(agents[0]).n, len(agents))
            given = {a: action[place] for place, a in enumerate(agents) if a in env.agents}
            obs, reward, terminated, truncated, _ = env.step(given)
            final_obs = filled(obs, zeros, np.float32)
            steps.append(
                jr.Step(
                    all_obs[nth],
                    action.astype(np.int32),
                    filled(reward, 0, np.float32),
                    terminated=filled(terminated, True, bool),
                    truncated=filled(truncated, False, bool),
                    final_obs=final_obs,
                )
            )
            all_obs[nth] = final_obs
            if not env.agents:
                all_obs[nth] = filled(env.reset()[0], zeros, np.float32)
        replay.add(jax.tree.map(lambda *leaves: np.stack(leaves), *steps))
    return replay.inspect()


def inspected(buffer, act, obs, env_state, action, num_steps):
    """Run `act`, and inspect the rows. `action` is one env's."""
    one = lambda tree: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree
    )
    example = jr.Step(
        one(obs),
        action,
        jnp.float32(0),
        terminated=jnp.bool_(False),
        truncated=jnp.bool_(False),
        final_obs=one(obs) if buffer.autoreset == "same_step" else None,
    )
    return scanned(buffer, act, obs, env_state, example, num_steps)


def scanned(buffer, act, obs, env_state, example, num_steps):
    """Run `act`, and inspect the rows."""
    keys = jax.random.split(jax.random.key(1), num_steps)
    run = jax.jit(lambda carry, keys: jax.lax.scan(act, carry, keys)[0])
    state, _, _ = run((buffer.init(example), obs, env_state), keys)
    return jr.inspect(buffer, state)


RECIPES = {
    "gymnasium": [gymnasium_next_step, gymnasium_same_step],
    "envpool": [envpool],
    "gymnax": [gymnax],
    "brax": [brax],
    "mujoco_playground": [playground],
    "jumanji": [jumanji],
    "craftax": [craftax],
    "jaxmarl": [jaxmarl],
    "pettingzoo": [pettingzoo],
}


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-steps", type=int, default=400, help="of each env")
    options = parser.parse_args(args)
    for library, recipes in RECIPES.items():
        if importlib.util.find_spec(library) is None:
            print(f"{library:24}is not installed")
            continue
        for recipe in recipes:
            found = recipe(options.num_steps)
            ends = f"{found.episodes['whole']} episodes, {found.episodes['terminated']} terminated"
            doubts = [line for line in found.suspicious if "looks wrong" in line]
            print(f"{recipe.__name__:24}{ends}; {' '.join(doubts) or 'resets as declared'}")


if __name__ == "__main__":
    main()
