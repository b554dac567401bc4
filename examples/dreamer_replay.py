"""DreamerV3's replay, without the agent, checked draw by draw against lists.

    python examples/dreamer_replay.py   # 20 seconds on two CPU cores; writes out/dreamer_replay.png

Copy `BUFFER` and `iteration`. Each new sequence is trained on once, soon after it was added. The
rest of a batch is uniform in the paper; its published code can also sample by priority and by
recency, as here. The world model's latent states go back into the rows, and its losses become
priorities. All of it runs in one compiled loop.

Afterwards a replay of lists goes through what the loop saw: that each batch begins with the new
sequences in their order, that every latent is the last one written to its step, and that the other
items are as probable as the loop was told.

References:
  Hafner et al., "Mastering Diverse Domains through World Models" (2023), where new sequences do
  not overlap; here each start gives one.
"""

import sys
import time

import _common as common
import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr

NUM_ENVS, LENGTH, BATCH_SIZE, CAPACITY = 8, 16, 16, 8_192
TRAIN_EVERY = 2  # steps of every env: as many new sequences as a batch has items
EPISODE = 0.005  # probability that a step ends its episode
FRACTIONS = {"uniform": 0.5, "priority": 0.25, "recent": 0.25}
PARTS = {
    "uniform": jr.Uniform(),
    "priority": jr.Prioritized(alpha=0.8, new_priority=1.0),
    "recent": jr.Recent(decay=0.999),
}
SAMPLER = jr.blend(**{name: (PARTS[name], FRACTIONS[name]) for name in PARTS})
BUFFER = jr.sequences(
    capacity=CAPACITY,
    num_envs=NUM_ENVS,
    batch_size=2 * BATCH_SIZE,
    length=LENGTH,
    sampler=jr.OnlineQueue(sampler=SAMPLER),
    allow_write=True,
    autoreset="same_step_no_final_obs",
)


def step_of(key, time):
    """Return a step of every env. Its observation is its number."""
    number = time * NUM_ENVS + jnp.arange(NUM_ENVS)
    ended = jax.random.bernoulli(key, EPISODE, (NUM_ENVS,))
    none = jnp.zeros(NUM_ENVS)
    flags = {"terminated": ended, "truncated": jnp.zeros_like(ended)}
    return jr.Step(number, none, none, **flags, extras={"latent": none})


def iteration(state, given):
    """Add steps, train on a batch, write its latents back. Return what the batch had."""
    time, key = given
    ended = []
    for number, key_of_step in enumerate(jax.random.split(key, TRAIN_EVERY)):
        step = step_of(key_of_step, time * TRAIN_EVERY + number)
        state = BUFFER.add(state, step)
        ended.append(step.terminated)
    sample_key, model_key = jax.random.split(jax.random.fold_in(key, 1))
    state, batch = BUFFER.pop(state, sample_key)
    t = batch.experience
    latent = jax.random.uniform(model_key, t.mask.shape)  # stands for the world model
    loss = jnp.where(t.mask, latent, 0).sum(axis=1)
    state = BUFFER.write(state, t.index, {"extras": {"latent": latent}})
    state = BUFFER.update_priorities(state, batch.index, loss)
    seen = {"obs": t.obs[:, :LENGTH], "mask": t.mask, "latent": t.extras["latent"], "new": latent}
    share = jnp.where(batch.is_valid, 1 / (BUFFER.size(state) * batch.probability), 0)
    return state, {**seen, "is_valid": batch.is_valid, "share": share, "ended": jnp.stack(ended)}


@jax.jit
def run(keys):
    """Return what each iteration saw, leaves [iterations, ...]."""
    example = jax.tree.map(lambda leaf: leaf[0], step_of(keys[0], 0))
    times = jnp.arange(len(keys))
    return jax.lax.scan(iteration, BUFFER.init(example), (times, keys))[1]


class Lists:
    """The starts of sequences that were not given yet, of each env, and each step's latent."""

    def __init__(self):
        self.waiting = [[] for _ in range(NUM_ENVS)]  # for the rest of their sequence
        self.new = [[] for _ in range(NUM_ENVS)]
        self.latent = {}
        self.num_steps = 0

    def add(self, ended):
        for env in range(NUM_ENVS):
            mine = self.waiting[env]
            mine.append(self.num_steps * NUM_ENVS + env)
            is_known = len(mine) if ended[env] else len(mine) - LENGTH
            self.new[env] += mine[: max(is_known, 0)]
            del mine[: max(is_known, 0)]
        self.num_steps += 1

    def take(self):
        """Return the new starts of a batch: envs take turns, and a batch is ordered by env."""
        taken = [[] for _ in range(NUM_ENVS)]
        for env in list(range(NUM_ENVS)) * BUFFER.batch_size:
            if self.new[env] and sum(map(len, taken)) < BUFFER.batch_size:
                taken[env].append(self.new[env].pop(0))
        return [start for mine in taken for start in mine]


def check(seen):
    """Go through what the loop saw. Return the number of new sequences of each batch, int[N], and
    the mean ages in steps of new ones and of the others, float[N]."""
    lists, num_new, ages = Lists(), [], []
    for number, mask in enumerate(seen["mask"]):
        for ended in seen["ended"][number]:
            lists.add(ended)
        obs, expected = seen["obs"][number], lists.take()
        assert obs[: len(expected), 0].tolist() == expected  # in this order
        names = obs[mask].tolist()
        known = np.float32([lists.latent.get(name, 0) for name in names])
        np.testing.assert_array_equal(seen["latent"][number][mask], known)
        lists.latent.update(zip(names, seen["new"][number][mask], strict=True))
        age = lists.num_steps - 1 - obs[:, 0] // NUM_ENVS
        num_new.append(len(expected))
        ages.append(
            [part.mean() if len(part) else np.nan for part in np.split(age, [len(expected)])]
        )
    return np.array(num_new), np.array(ages).T


def main(argv=None):
    args = common.parser(__doc__, out="out/dreamer_replay.png", steps=40_000).parse_args(argv)
    began = time.perf_counter()
    num_iterations = args.steps // (NUM_ENVS * TRAIN_EVERY)
    keys = jax.random.split(jax.random.key(args.seed), num_iterations)
    seen = jax.device_get(run(keys))
    seconds = time.perf_counter() - began
    num_new, (age_of_new, age_of_others) = check(seen)
    # If the probabilities P(i) are right, the mean of 1 / (n P(i)) over sampled rows is 1.
    is_other = np.arange(BUFFER.batch_size) >= num_new[:, None]
    share = seen["share"][is_other & seen["is_valid"]]
    error = (share.mean() - 1) / (share.std() / np.sqrt(len(share)))
    steps = np.arange(num_iterations) * NUM_ENVS * TRAIN_EVERY
    ages = {"new sequences": (steps, age_of_new), "the others": (steps, age_of_others)}
    running = np.cumsum(np.where(is_other, seen["share"], 0).sum(1)) / np.cumsum(is_other.sum(1))
    common.plot(
        args.out,
        {"title": "Mean age of a batch's sequences, in steps", "curves": ages, "yscale": "log"},
        {"title": "Mean of 1 / (n P(i)) so far", "curves": {"others": (steps, running)}},
    )
    return common.report(
        bool(abs(error) < 4 and np.nanmean(age_of_new) < 2 * LENGTH),
        env_steps=num_iterations * NUM_ENVS * TRAIN_EVERY,
        new_sequences=int(num_new.sum()),
        age_of_new_sequences=round(float(np.nanmean(age_of_new)), 1),
        age_of_the_others=round(float(np.nanmean(age_of_others)), 1),
        mean_of_shares=round(float(share.mean()), 4),
        standard_errors_off=round(float(error), 2),
        seconds=round(seconds, 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: sequences came late, or not as probable")
