"""A DQN whose four actors are processes: each with envs of its own, and the newest parameters.

    python examples/actors_dqn.py         # half a minute on two cores; writes out/actors_dqn.png
    python examples/actors_dqn.py --ray   # the same actors on a Ray cluster, or one started here

Copy `act` and the loop of `train`. Each actor sends blocks of 64 steps of its 4 envs. A thread adds
them to the buffer, which is on the learner's device, and holds the actors back or the learner so
that 8 items are sampled for each step. The actors explore by different amounts, as in Ape-X.

References:
  Horgan et al., "Distributed Prioritized Experience Replay" (2018).
  van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning" (2016).
"""

import sys
import time

import _common as common
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jaxreplay as jr

ENV, NUM_ACTORS, NUM_ENVS = "CartPole-v1", 4, 16
BATCH_SIZE, SAMPLES_PER_INSERT = 128, 8
PUBLISH_PERIOD = 10  # updates
OPTIMIZER = optax.adam(1e-3)


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    he = jax.nn.initializers.he_normal()
    return {
        "w1": he(k1, (4, 128)),
        "b1": jnp.zeros(128),
        "w2": he(k2, (128, 128)),
        "b2": jnp.zeros(128),
        "w3": he(k3, (128, 2)),
    }


@jax.jit
def q(params, obs):
    x = jax.nn.relu(obs @ params["w1"] + params["b1"])
    return jax.nn.relu(x @ params["w2"] + params["b2"]) @ params["w3"]


def act(actor):
    """Take steps in the envs of one actor, with the newest parameters. Runs in its process."""
    envs = gymnasium.make_vec(ENV, num_envs=actor.num_envs)
    random = np.random.default_rng(actor.seed)
    epsilon = 0.4 ** (1 + 7 * actor.index / max(actor.num_actors - 1, 1))
    obs, _ = envs.reset(seed=actor.seed)
    while actor.running:
        greedy = np.asarray(q(actor.params(), obs)).argmax(-1)
        explores = random.random(actor.num_envs) < epsilon
        action = np.where(explores, random.integers(2, size=actor.num_envs), greedy)
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        actor.add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        obs = next_obs


def loss(params, target_params, batch):
    t = batch.experience
    best = q(params, t.next_obs).argmax(-1, keepdims=True)
    value = jnp.take_along_axis(q(target_params, t.next_obs), best, 1)[:, 0]
    td_error = (
        t.reward
        + t.discount * value
        - jnp.take_along_axis(q(params, t.obs), t.action[:, None], 1)[:, 0]
    )
    return jnp.mean(batch.weight * optax.huber_loss(td_error)), td_error


@jax.jit
def update(params, target_params, opt_state, batch):
    grads, td_error = jax.grad(loss, has_aux=True)(params, target_params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    target_params = optax.incremental_update(params, target_params, 0.01)
    return params, target_params, opt_state, jnp.abs(td_error) + 1e-3


def train(steps, seed, on, act=act, published=jax.device_get):
    """Return the best parameters, their evaluations, and figures of the actors. `published` returns
    what is published of parameters."""
    buffer = jr.prioritized(
        capacity=50_000,
        num_envs=NUM_ENVS,
        batch_size=BATCH_SIZE,
        min_size=1_000,
        n_step=3,
        autoreset="next_step",
        allow_mask=True,  # each env has a write position of its own
    )
    params = init(jax.random.key(seed))
    target_params, opt_state = params, OPTIMIZER.init(params)
    best, history, num_updates = params, [], steps * SAMPLES_PER_INSERT // BATCH_SIZE
    period = max(num_updates // 20, 1)
    with jr.Replay(
        buffer, seed=seed, samples_per_insert=SAMPLES_PER_INSERT, prefetch=1, timeout=120
    ) as replay:
        actors = replay.start(act, NUM_ACTORS, params=published(params), seed=seed, on=on)
        bar = tqdm(total=num_updates, unit="update")
        for number, batch in enumerate(replay, 1):
            params, target_params, opt_state, priority = update(
                params, target_params, opt_state, batch
            )
            replay.update_priorities(batch.index, priority)
            if number // PUBLISH_PERIOD * PUBLISH_PERIOD == number:
                actors.publish(published(params))
            bar.update()
            if number // period * period == number:
                figures = actors.metrics()
                history.append((figures["steps"], evaluate(params, seed + number, episodes=10)))
                bar.set_postfix({"mean return": f"{history[-1][1]:.0f}"})
                if history[-1][1] >= max(found for _, found in history):
                    best = params
            if number == num_updates:
                break
        bar.close()
    return best, history, figures


def evaluate(params, seed, episodes):
    """Return the mean return of the first episode of each env."""
    envs = gymnasium.make_vec(ENV, num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    total, is_over = np.zeros(episodes), np.zeros(episodes, bool)
    while not is_over.all():
        obs, reward, terminated, truncated, _ = envs.step(np.asarray(q(params, obs)).argmax(-1))
        total += np.where(is_over, 0, reward)
        is_over |= terminated | truncated
    envs.close()
    return float(total.mean())


def main(argv=None, doc=__doc__, name="actors_dqn", on=None, **options):
    parser = common.parser(doc, out=f"out/{name}.png", steps=300_000)
    if on is None:
        parser.add_argument("--ray", action="store_true", help="actors on a Ray cluster")
    parser.add_argument("--target", type=float, default=450.0, help="of the mean return")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    if on is None:
        on = jr.actors.ray(num_cpus=0.25) if args.ray else jr.actors.local()
    best, history, figures = train(args.steps, args.seed, on, **options)
    final = round(evaluate(best, args.seed + 1_000, episodes=100), 1)
    common.plot(
        args.out,
        {"title": "Return, mean of 10 episodes", "curves": {"DQN": tuple(np.array(history).T)}},
    )
    return common.report(
        final >= args.target,
        env_steps=int(figures["steps"]),
        evaluation_return=final,
        staleness=round(figures["staleness"], 1),
        waiting=round(figures["waiting"], 2),
        seconds=round(time.perf_counter() - began, 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")
