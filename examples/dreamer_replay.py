"""DreamerV3's replay at its own train ratio, without the agent, checked draw by draw against lists.

    python examples/dreamer_replay.py   # 20 seconds on two CPU cores; writes out/dreamer_replay.png

Copy `BUFFER` and `iteration`. Each env gives a new sequence every `LENGTH` steps, which is trained
on once, soon after it was added. The rest of a batch is uniform over all starts. The world model's
latent states go back into the rows. All of it runs in one compiled loop.

Afterwards a replay of lists goes through what the loop saw: that each batch begins with the new
sequences in their order, and that every latent is the last one written to its step. The ages of the
sequences are printed beside those that a plain reading of DreamerV3's rule gives, by NumPy.

References:
  Hafner et al., "Mastering Diverse Domains through World Models" (2023)
"""

import sys
import time

import _common as common
import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr

NUM_ENVS, LENGTH, BATCH_SIZE, CAPACITY = 8, 64, 16, 16_384
TRAIN_RATIO = 32  # steps in batches for each step of an env
TRAIN_EVERY = BATCH_SIZE * LENGTH // TRAIN_RATIO // NUM_ENVS  # steps of every env
EPISODE = 0.005  # probability that a step ends its episode
BUFFER = jr.sequences(
    capacity=CAPACITY,
    num_envs=NUM_ENVS,
    batch_size=BATCH_SIZE,
    length=LENGTH,
    cross_episodes=True,
    sampler=jr.OnlineQueue(period=LENGTH),
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
    for number, key_of_step in enumerate(jax.random.split(key, TRAIN_EVERY)):
        state = BUFFER.add(state, step_of(key_of_step, time * TRAIN_EVERY + number))
    sample_key, model_key = jax.random.split(jax.random.fold_in(key, 1))
    state, batch = BUFFER.pop(state, sample_key)
    t = batch.experience
    latent = jax.random.uniform(model_key, t.mask.shape)  # stands for the world model
    state = BUFFER.write(state, t.index, {"extras": {"latent": latent}})
    seen = {"obs": t.obs[:, :LENGTH], "mask": t.mask, "latent": t.extras["latent"], "new": latent}
    return state, seen


@jax.jit
def run(keys):
    """Return what each iteration saw, leaves [iterations, ...]."""
    example = jax.tree.map(lambda leaf: leaf[0], step_of(keys[0], 0))
    times = jnp.arange(len(keys))
    return jax.lax.scan(iteration, BUFFER.init(example), (times, keys))[1]


class Rule:
    """A plain reading of DreamerV3's rule. A step of an env completes the sequence that ends with
    it. Every `LENGTH`-th sequence of an env waits in a queue, from which batches begin; their other
    items are any stored sequences. Here a sequence is complete a step later: it has the observation
    after its last step, too."""

    def __init__(self, rng):
        self.rng, self.num_steps, self.queue = rng, 0, []

    def add(self):
        start = self.num_steps - LENGTH
        if start >= 0 and start % LENGTH == 0:
            self.queue += [(start, env) for env in range(NUM_ENVS)]
        self.num_steps += 1

    def take(self):
        """Return the new sequences of a batch, and others, as (first step, env)."""
        new, self.queue = self.queue[:BATCH_SIZE], self.queue[BATCH_SIZE:]
        oldest = max(self.num_steps - CAPACITY // NUM_ENVS, 0)
        starts = (oldest, max(self.num_steps - LENGTH, oldest + 1))
        num_others = BATCH_SIZE - len(new)
        others = self.rng.integers(*starts, num_others), self.rng.integers(0, NUM_ENVS, num_others)
        return new, [*zip(*others, strict=True)]


def check(seen):
    """Go through what the loop saw. Return the number of new sequences of each batch, int[N], and
    the mean ages in steps of new ones, of the others, and of the rule's others, float[N]."""
    rule, latents, num_new, ages = Rule(np.random.default_rng(0)), {}, [], []
    for number, mask in enumerate(seen["mask"]):
        for _ in range(TRAIN_EVERY):
            rule.add()
        new, others = rule.take()
        obs, expected = seen["obs"][number], [start * NUM_ENVS + env for start, env in new]
        # of several new sequences those of the first env come first
        assert obs[: len(new), 0].tolist() == sorted(expected, key=lambda name: name % NUM_ENVS)
        names = obs[mask].tolist()
        known = np.float32([latents.get(name, 0) for name in names])
        np.testing.assert_array_equal(seen["latent"][number][mask], known)
        latents.update(zip(names, seen["new"][number][mask], strict=True))
        age = rule.num_steps - 1 - obs[:, 0] // NUM_ENVS
        of_rule = [rule.num_steps - 1 - start for start, _ in others]
        num_new.append(len(new))
        parts = [*np.split(age, [len(new)]), of_rule]
        is_there = mask.any()  # from the first sequence on
        ages.append([np.mean(part) if len(part) and is_there else np.nan for part in parts])
    return np.array(num_new), np.array(ages).T


def main(argv=None):
    args = common.parser(__doc__, out="out/dreamer_replay.png", steps=40_000).parse_args(argv)
    began = time.perf_counter()
    num_iterations = args.steps // (NUM_ENVS * TRAIN_EVERY)
    keys = jax.random.split(jax.random.key(args.seed), num_iterations)
    seen = jax.device_get(run(keys))
    seconds = time.perf_counter() - began
    num_new, (age_of_new, age_of_others, of_rule) = check(seen)
    steps = np.arange(num_iterations) * NUM_ENVS * TRAIN_EVERY
    curves = {"new": age_of_new, "the others": age_of_others, "the others, by the rule": of_rule}
    curves = {name: (steps, values) for name, values in curves.items()}
    title = "Mean age of a batch's sequences, in steps of an env"
    common.plot(args.out, {"title": title, "curves": curves, "yscale": "log"})
    age, expected = np.nanmean(age_of_others), np.nanmean(of_rule)
    return common.report(
        bool(abs(age / expected - 1) < 0.05 and np.nanmax(age_of_new) < LENGTH + 2 * TRAIN_EVERY),
        env_steps=num_iterations * NUM_ENVS * TRAIN_EVERY,
        new_sequences=int(num_new.sum()),
        age_of_new_sequences=round(float(np.nanmean(age_of_new)), 1),
        age_of_the_others=round(float(age), 1),
        age_by_the_rule=round(float(expected), 1),
        seconds=round(seconds, 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: sequences came late, or are of another age")
