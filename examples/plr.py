"""Prioritized level replay (Jiang et al., 2021, https://arxiv.org/abs/2010.03934).

    python examples/plr.py   # 10 seconds on two CPU cores

Copy all above `train`, for curricula as jaxued has them. A row is a level, its priority the score.
In the demonstration, levels are bandits of two arms, few of which the student cannot play yet.
"""

import jax
import jax.numpy as jnp

import jaxreplay as jr


class PLR(jr.samplers.Sampler):
    """Sample levels with P = (1 - staleness) P_score + staleness P_time.

    P_score is in proportion to h ** (1 / temperature), where h is 1 / rank, or the score if
    `by_rank` is False. P_time is in proportion to the number of scores set since the level's own.
    """

    temperature: float = 0.1
    staleness: float = 0.1
    by_rank: bool = True

    def init(self, layout):
        return {
            "score": jnp.full(layout.capacity, -jnp.inf),  # -inf where the row is free
            "time": jnp.zeros(layout.capacity, jnp.uint32),  # when the score was set
            "now": jnp.uint32(0),  # number of scores that were set, modulo 2^32
        }

    def size(self, state, sampleable):
        return (state["score"] > -jnp.inf).sum(dtype=jnp.int32)

    def sample(self, state, sampleable, key, batch_size):
        p = self.probability(state, sampleable, jnp.arange(sampleable.layout.capacity))
        row = jax.random.choice(key, len(p), (batch_size,), p=p)
        return jr.samplers.Draw(state, row, p[row])

    def probability(self, state, sampleable, row):
        score, is_level = state["score"], state["score"] > -jnp.inf

        def shares(weight):  # equal ones if all weights are 0
            weight = jnp.where(is_level, weight, 0.0)
            weight = jnp.where(weight.any(), weight, is_level)
            return weight / jnp.maximum(weight.sum(), 1)

        h = 1 / (1 + jnp.argsort(jnp.argsort(-score)))  # of equal scores, the first row's is larger
        if not self.by_rank:
            h = jnp.maximum(score, 0) / jnp.maximum(score.max(), 1e-30)
        by_score, by_time = h ** (1 / self.temperature), state["now"] - state["time"]
        return ((1 - self.staleness) * shares(by_score) + self.staleness * shares(by_time))[row]

    def update(self, state, sampleable, index, priority):
        row, is_live = sampleable.live(index)
        is_live &= jnp.isfinite(priority)
        row = jnp.where(is_live, row, sampleable.layout.capacity)  # or none
        now = state["now"] + len(priority)
        score = state["score"].at[row].set(-jnp.inf).at[row].max(priority)  # the largest counts
        return {"score": score, "time": state["time"].at[row].set(now), "now": now}


def init(buffer, example):
    """Return a state whose rows are all free. The example is {"level": level}, or has more."""
    free = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(buffer.capacity, 1, *x.shape)), example)
    return buffer.extend(buffer.init(example), free)


def insert(buffer, state, items, score):
    """Insert items one by one, leaves [M, ...]; return the state, and the row of each or -1.

    A level takes its own row if it is stored, else a free one or, if its score is larger, that of
    the least probable level, which an earlier sample's index of that row means from then on."""

    def one(state, new):
        (item, score), held = new, state.sampler["score"]
        stored = buffer.get(state, jnp.arange(buffer.capacity))
        equal = jax.vmap(lambda old: jax.tree.map(jnp.array_equal, old, item["level"]))
        same = jax.tree.reduce(jnp.logical_and, equal(stored.experience["level"]), held > -jnp.inf)
        lowest = jnp.argmin(jnp.where(held > -jnp.inf, stored.probability, -1))
        row = jnp.where(same.any(), same.argmax(), lowest)
        row = jnp.where(jnp.isfinite(score) & (same.any() | (score > held[row])), row, -1)
        index = jr.types.Index(row=row[None], lap=stored.index.lap[row][None])
        state = buffer.write(state, index, jax.tree.map(lambda leaf: leaf[None], item))
        return buffer.update_priorities(state, index, score[None]), row

    return jax.lax.scan(one, state, (items, score))


def train(by_plr, key):
    """Return the part of hard levels in all batches, and the regret on hard levels at last."""
    buffer = jr.items(capacity=256, batch_size=16, sampler=PLR(), allow_write=True)
    hard_key, level_key, key = jax.random.split(key, 3)
    is_hard = jax.random.bernoulli(hard_key, 0.05, (4_096,))
    regret = lambda student, level: jax.nn.sigmoid(-student[level])  # P of the wrong arm

    def iteration(carry, now):
        (student, state), (level, key) = carry, now
        if by_plr:
            state, _ = insert(buffer, state, {"level": level}, regret(student, level))
            batch = buffer.sample(state, key)
            level = batch.experience["level"]
            state = buffer.update_priorities(state, batch.index, regret(student, level))
        student -= 4 * jax.grad(lambda student: regret(student, level).sum())(student)
        return (student, state), is_hard[level].mean()

    start = jnp.where(is_hard, -4.0, 4.0), init(buffer, {"level": jnp.int32(0)})
    new = jax.random.randint(level_key, (500, 16), 0, 4_096), jax.random.split(key, 500)
    (student, _), hard = jax.lax.scan(iteration, start, new)
    return hard.mean(), regret(student, jnp.arange(4_096)).mean(where=is_hard)


if __name__ == "__main__":
    seeds = jax.jit(jax.vmap(train, in_axes=(None, 0)), static_argnums=0)
    for name in ("uniform", "PLR"):
        hard, regret = map(jnp.mean, seeds(name == "PLR", jax.random.split(jax.random.key(0))))
        print(f"{name:8}{hard:.2f} of a batch are hard levels; the regret on them: {regret:.2f}")
    raise SystemExit(0 if regret < 0.5 else "not reached: much regret is left")
