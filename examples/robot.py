"""A robot's run: demonstrations of a LeRobot dataset, an actor in another process, and a learner.

    python examples/robot.py             # two minutes on two cores; writes out/robot.png
    python examples/robot.py --folder out/run7   # with checkpoints, to go on from

Copy `act`, `buffers` and the loop of `train`. In the manner of SERL: half of each batch is online,
half of an expert; images are cropped at random as they are sampled, and stored once; the actor
streams steps, and gets parameters. Where the arm goes astray, an operator takes over: these steps
have a priority, so that the expert's half samples them, too, and they are stored once. One
checkpoint has the learner, both buffers, and how far the actor came: run it again after any process
was killed, and it goes on.

The claim: an arm with two velocities, which sees its target in the image alone and gets 1 where it
arrives, arrives in at least 95 of 100 tests, for each of the seeds 0, 1 and 2. The demonstrations
are made here, by an operator who is not steady, and written in LeRobot's format.

References:
  Luo et al., "SERL: A Software Suite for Sample-Efficient Robotic Reinforcement Learning" (2024),
  and "Precise and Dexterous Robotic Manipulation via Human-in-the-Loop RL" (2024).
  Kostrikov et al., "Image Augmentation Is All You Need" (2020): DrQ.
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import time

import _common as common
import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as parquet
from gymnasium.vector import SyncVectorEnv
from PIL import Image
from tqdm import tqdm

import jaxreplay as jr
from jaxreplay import datasets

SIDE, PAD, TIME_LIMIT = 24, 2, 20  # pixels, pixels, steps
BATCH_SIZE, UPDATES_PER_STEP, GAMMA = 128, 2, 0.95
NUM_DEMOS, ASSISTED = 20, 2_000  # episodes; first steps of an actor in which an operator helps
OPTIMIZER = optax.adam(1e-3)
OBS = {"image": np.zeros((SIDE, SIDE, 3), np.uint8), "state": np.zeros(2, np.float32)}
EXAMPLE = jr.Step(
    OBS, np.zeros(2, np.float32), np.float32(0), terminated=False, truncated=False
)  # of one env


class Reach(gymnasium.Env):
    """An arm in [-1, 1]^2, seen from above: red, with its target in green."""

    observation_space = gymnasium.spaces.Dict(
        image=gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8),
        state=gymnasium.spaces.Box(-1, 1, (2,)),
    )
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.arm, self.target = self.np_random.uniform(-1, 1, (2, 2))
        self.time = 0
        return self.obs(), {}

    def step(self, action):
        self.arm = np.clip(self.arm + 0.2 * np.clip(action, -1, 1), -1, 1)
        self.time += 1
        arrived = bool(np.linalg.norm(self.arm - self.target) < 0.15)
        return self.obs(), float(arrived), arrived, self.time >= TIME_LIMIT, {}

    def obs(self):
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        for channel, place in enumerate((self.arm, self.target)):
            row, column = ((place + 1) / 2 * (SIDE - 3)).round().astype(int)
            image[row : row + 3, column : column + 3, channel] = 255
        return {"image": image, "state": self.arm.astype(np.float32)}

    def operator(self, noise):
        """Return what an operator would do, who is not steady."""
        way = (self.target - self.arm) / 0.2 + noise * self.np_random.normal(size=2)
        return np.clip(way, -1, 1).astype(np.float32)


def buffers():
    """Return the mixture of the run's rows and the demonstrations."""
    shared = {"gamma": GAMMA, "n_step": 3, "autoreset": "next_step", "batch_size": BATCH_SIZE}
    # an operator's steps have priority 1, and others 0
    operator = jr.Prioritized(alpha=1.0, beta=0.0)
    sampler = jr.blend(all=(jr.Uniform(), 0.8), operator=(operator, 0.2))
    online = jr.transitions(
        capacity=20_000, min_size=200, sampler=sampler, allow_mask=True, **shared
    )
    demos = jr.uniform(capacity=1_000, **shared)
    half = BATCH_SIZE // 2
    return jr.mix(
        online=(jr.transform(online, cropped), half + half // 4),  # half // 4 by an operator
        demos=(jr.transform(demos, cropped), half - half // 4),
    )


def cropped(item, key):
    """Move both images of a transition by up to `PAD` pixels, each by its own."""

    def moved(obs, key):
        sides = ((PAD, PAD), (PAD, PAD), (0, 0))
        image = jnp.pad(obs["image"], sides, mode="edge")
        row, column = jax.random.randint(key, (2,), 0, 2 * PAD + 1)
        return obs | {"image": jax.lax.dynamic_slice(image, (row, column, 0), obs["image"].shape)}

    keys = jax.random.split(key)
    return item.replace(obs=moved(item.obs, keys[0]), next_obs=moved(item.next_obs, keys[1]))


class Encoder(nn.Module):
    """Obs -> features, float32[B, 64]."""

    @nn.compact
    def __call__(self, obs):
        x = obs["image"] / 255.0 - 0.1
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3), (2, 2))(x))
        x = nn.Dense(64)(x.reshape(*x.shape[:-3], -1))
        return jnp.concatenate([jnp.tanh(nn.LayerNorm()(x)), obs["state"]], axis=-1)


class Actor(nn.Module):
    """Features -> mean and log of the standard deviation of the action before tanh."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Dense(128)(x))
        mean, log_std = jnp.split(nn.Dense(4)(x), 2, axis=-1)
        return mean, jnp.clip(log_std, -5, 2)


class Critics(nn.Module):
    """Features, action -> values of two critics, float32[B, 2]."""

    @nn.compact
    def __call__(self, x, action):
        x, values = jnp.concatenate([x, action], axis=-1), []
        for _ in range(2):
            y = x
            for _ in range(2):
                y = nn.relu(nn.LayerNorm()(nn.Dense(128)(y)))
            values.append(nn.Dense(1)(y))
        return jnp.concatenate(values, axis=-1)


ENCODER, ACTOR, CRITICS = Encoder(), Actor(), Critics()


def init(key):
    keys = jax.random.split(key, 3)
    params = {"encoder": ENCODER.init(keys[0], OBS), "log_alpha": jnp.log(0.1)}
    features = ENCODER.apply(params["encoder"], OBS)
    params |= {"actor": ACTOR.init(keys[1], features)}
    params |= {"critics": CRITICS.init(keys[2], features, jnp.zeros(2))}
    return {
        "params": params,
        "target": {name: params[name] for name in ("encoder", "critics")},
        "optimizer": OPTIMIZER.init(params),
        "key": key,
        "number": jnp.int32(0),  # of updates
    }


def chosen(actor, features, key):
    """Return random actions in [-1, 1], and the logarithms of their probability densities."""
    mean, log_std = ACTOR.apply(actor, features)
    noise = jax.random.normal(key, mean.shape)
    before = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    log_slope = 2 * (jnp.log(2) - before - jax.nn.softplus(-2 * before))  # of tanh
    return jnp.tanh(before), (log_prob - log_slope).sum(-1)


@jax.jit
def policy(params, obs, key):
    """Return random actions, and the best ones."""
    features = ENCODER.apply(params["encoder"], obs)
    return chosen(params["actor"], features, key)[0], jnp.tanh(
        ACTOR.apply(params["actor"], features)[0]
    )


def loss(params, target, batch, key):
    """Return the sum of three losses, float32[], each of which changes its own parameters."""
    t, (next_key, key) = batch.experience, jax.random.split(key)
    alpha, stop = jnp.exp(params["log_alpha"]), jax.lax.stop_gradient
    next_features = ENCODER.apply(params["encoder"], t.next_obs)
    next_action, _ = chosen(params["actor"], next_features, next_key)
    next_value = CRITICS.apply(
        target["critics"], ENCODER.apply(target["encoder"], t.next_obs), next_action
    )
    goal = stop(t.reward + t.discount * next_value.min(-1))
    features = ENCODER.apply(params["encoder"], t.obs)
    error = CRITICS.apply(params["critics"], features, t.action) - goal[:, None]

    features = stop(features)
    action, log_prob = chosen(params["actor"], features, key)
    value = CRITICS.apply(stop(params["critics"]), features, action).min(-1)
    temperature = -alpha * stop(log_prob - 2.0)  # minus the number of action dimensions
    each = (error**2).sum(-1) + stop(alpha) * log_prob - value + temperature
    return (batch.weight * each).mean()  # an item that is not valid weighs 0


@jax.jit
def update(learner, batch):
    key, loss_key = jax.random.split(learner["key"])
    gradient = jax.grad(loss)(learner["params"], learner["target"], batch, loss_key)
    updates, optimizer = OPTIMIZER.update(gradient, learner["optimizer"])
    params = optax.apply_updates(learner["params"], updates)
    new = {name: params[name] for name in learner["target"]}
    target = optax.incremental_update(new, learner["target"], 0.01)
    own = {"params": params, "target": target, "optimizer": optimizer}
    return own | {"key": key, "number": learner["number"] + 1}


def act(actor):
    """Move the arm, with the newest parameters, and the operator's help. Runs in its process."""
    envs = SyncVectorEnv([Reach])
    (env,), random = envs.envs, np.random.default_rng(actor.seed)
    key = jax.random.key(actor.seed)
    obs, _ = envs.reset(seed=actor.seed)
    is_astray, number = False, 0
    while actor.running:
        key, own = jax.random.split(key)
        action = np.asarray(policy(actor.params(), obs, own)[0])
        if env.time == 0:  # an operator sees half of the episodes, and is patient for a while
            is_watched, is_astray = number < ASSISTED and random.random() < 0.5, False
        is_astray |= is_watched and env.time == TIME_LIMIT // 2
        if is_astray:
            action = env.operator(0.3)[None]
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        actor.add(
            obs=obs,
            action=action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            priority=np.float32([is_astray]),
        )
        obs, number = next_obs, number + 1


def train(folder, dataset, steps, seed):
    """Train from the newest checkpoint on. Return the learner, and [updates, share of tests that
    arrive] of each evaluation."""
    mixture, learner = buffers(), init(jax.random.key(seed))
    demos = mixture.members[1][1]
    names = {"obs": {"image": "observation.images.front", "state": "observation.state"}}
    rows = datasets.from_arrays(datasets.open_lerobot(dataset), demos, EXAMPLE, names=names)
    total, history = steps * UPDATES_PER_STEP, np.full((10, 2), np.nan)
    with jr.Replay(
        mixture,
        seed=seed,
        example=EXAMPLE,
        state={"demos": rows},
        samples_per_insert=BATCH_SIZE * UPDATES_PER_STEP,
        prefetch=1,
        timeout=120,
    ) as replay:
        with contextlib.suppress(FileNotFoundError):  # there is no checkpoint yet
            learner, history = replay.load(folder / "replay", extras=(learner, history))
        params = jax.device_get(learner["params"])
        actors = replay.start(
            act, 1, params=params, block_length=8, seed=seed, member="online", max_restarts=10
        )
        bar = tqdm(total=total, initial=int(learner["number"]), unit="update")
        while (number := int(learner["number"])) < total:
            learner = update(learner, replay.sample())
            bar.update()
            if number // 10 * 10 == number:
                actors.publish(jax.device_get(learner["params"]))
            evaluation, rest = divmod((number + 1) * len(history), total)
            if rest < len(history):
                history[evaluation - 1] = number + 1, arriving(learner["params"], seed + evaluation)
                bar.set_postfix(arriving=history[evaluation - 1, 1])
                replay.save(folder / "replay", extras=(learner, history))
        bar.close()
        figures = actors.metrics()
    return learner, history, figures


def arriving(params, seed, episodes=100):
    """Return the share of episodes in which the arm arrives, without noise."""
    envs = SyncVectorEnv([Reach] * episodes)
    obs, _ = envs.reset(seed=seed)
    arrived = np.zeros(episodes, bool)
    for _ in range(TIME_LIMIT):
        action = np.asarray(policy(params, obs, jax.random.key(0))[1])
        obs, _, terminated, _, _ = envs.step(action)
        arrived |= terminated
    return float(arrived.mean())


def write_demos(root, seed):
    """Write episodes of an unsteady operator as a LeRobot dataset of version 3."""
    env, rows, episodes = Reach(), [], []
    for index in range(NUM_DEMOS):
        obs, is_over, start = env.reset(seed=1_000 * seed + index)[0], False, len(rows)
        while not is_over:
            file, action = io.BytesIO(), env.operator(1.0)
            Image.fromarray(obs["image"]).save(file, "png")
            row = {"observation.images.front": {"bytes": file.getvalue(), "path": None}}
            row |= {"observation.state": obs["state"], "action": action}
            obs, reward, terminated, truncated, _ = env.step(action)
            is_over = terminated or truncated
            row |= {"next.reward": reward, "next.done": is_over, "next.success": terminated}
            row |= {"timestamp": (env.time - 1) / 10, "frame_index": env.time - 1}
            row |= {"episode_index": index, "task_index": 0, "index": len(rows)}
            rows.append(row)
        about = {"episode_index": index, "length": len(rows) - start, "dataset_from_index": start}
        episodes.append(about | {"data/chunk_index": 0, "data/file_index": 0})
    kinds = {name: "int64" if name.endswith("index") else "float32" for name in rows[0]}
    kinds |= dict.fromkeys(("next.done", "next.success"), "bool")
    kinds |= {"observation.images.front": "image"}
    info = {"codebase_version": "v3.0", "fps": 10, "data_path": "data/{file_index:03d}.parquet"}
    info |= {"features": {name: {"dtype": kind} for name, kind in kinds.items()}}
    for name, table in (
        ("meta/episodes/000", episodes),
        ("meta/tasks", [{"task_index": 0, "task": "move the arm to the target"}]),
        ("data/000", rows),
    ):
        path = root / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(table), path)
    (root / "meta" / "info.json").write_text(json.dumps(info))  # the last: the dataset is complete


def main(argv=None):
    parser = common.parser(__doc__, out="out/robot.png", steps=6_000)
    parser.add_argument("--dataset", type=pathlib.Path, help="of LeRobot; default: made here")
    parser.add_argument("--folder", type=pathlib.Path, help="for a run that can be resumed")
    parser.add_argument("--target", type=float, default=0.95, help="share of tests that arrive")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as new:
        folder = args.folder or pathlib.Path(new)
        dataset = args.dataset or folder / "demos"
        if not (dataset / "meta" / "info.json").exists():
            write_demos(dataset, args.seed)
        learner, history, figures = train(folder, dataset, args.steps, args.seed)
    final = arriving(learner["params"], args.seed + 1_000)
    curves = {"half of each batch is an expert's": tuple(history.T)}
    common.plot(args.out, {"title": "Share of tests that arrive", "curves": curves})
    return common.report(
        final >= args.target,
        online_steps=int(figures["steps"]),
        updates=int(learner["number"]),
        arriving=final,
        waiting=round(figures["waiting"], 2),
        seconds=round(time.perf_counter() - began, 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: too few tests arrive")
