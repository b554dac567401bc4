"""A replay buffer in one file, to copy into a project. It needs JAX alone. Apache 2.0.

    config = Config(capacity=100_000, num_envs=8, autoreset="next_step", prioritized=True)
    state = init(config, obs, action)  # of one env; any pytrees

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, key, ...):
        state = add(state, obs, action, reward, terminated, truncated)  # of all envs
        batch = sample(state, key, batch_size=256)
        t = batch.transition  # the target is t.reward + t.discount * value(t.next_obs)
        ...  # multiply each item's loss by batch.weight
        return update_priorities(state, batch.index, jnp.abs(td_error) + 1e-3)

What it does. `State` is an immutable pytree, and all functions are pure: they work in `jit`, `scan`
and `vmap`, and update a donated state in place. Items are n-step transitions, sampled uniformly or
by priority. An observation is stored once, with its own dtype. At a time limit, `next_obs` is the
true final observation. Each env has a ring of its own, so that some envs may take no step.

What it lacks. Sequences, frame stacks and hindsight goals. Checkpoints. Rows on the host or on a
disk. Several agents or devices. Stratified, FIFO and recent samples. Adding many steps at once.
Array layouts for GPUs and TPUs. Checks of shapes, and warnings of a wrong `autoreset`. Threads,
actors in processes, PyTorch. Import jaxreplay (https://github.com/jaxreplay/jaxreplay) if you need
one of these. Its tests compare this file with the package, row by row.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STEP, TERMINATED, FINAL = np.uint8(0), np.uint8(1), np.uint8(2)  # kinds of rows
AUTORESETS = ("next_step", "same_step", "same_step_no_final_obs")
FAN_OUT = 16  # children of a node in the sum tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What a buffer is: hashable, and a static part of the state.

    `autoreset` says what the envs do when an episode ends. "next_step": the step after a done
    ignores its action, and its `obs` is the final observation (Gymnasium 1.x). "same_step": a done
    returns the next episode's first observation, and the final one beside it (gymnax).
    "same_step_no_final_obs": the same, but the final observation is lost (Brax).
    """

    capacity: int  # number of rows of all envs; a final observation takes a row, too
    num_envs: int  # E
    autoreset: str
    n_step: int = 1  # steps of a transition
    gamma: float = 0.99  # discount of a step
    prioritized: bool = False  # sample by priority, instead of uniformly
    alpha: float = 0.6  # exponent of priorities

    def __post_init__(self):
        if self.autoreset not in AUTORESETS:
            raise ValueError(f"autoreset must be one of {AUTORESETS}, got {self.autoreset!r}")
        if self.n_step < 1 or self.length <= self.n_step or self.capacity % self.num_envs:
            raise ValueError(f"capacity must be num_envs times more than n_step rows, got {self}")

    @property
    def length(self) -> int:
        """Number of rows of each env, L. Row `env * L + position` has this position in its ring."""
        return self.capacity // self.num_envs


@dataclasses.dataclass(frozen=True)
class State:
    config: Config
    # Rows.
    obs: Any  # leaves [capacity, ...]
    action: Any  # leaves [capacity, ...]
    reward: jax.Array  # float32[capacity]
    kind: jax.Array  # uint8[capacity]: STEP, TERMINATED or FINAL
    number: jax.Array  # int32[capacity]: candidates that the env wrote before it, modulo L + 1
    # Counters of each env.
    head: jax.Array  # int32[E]: position of the next row
    lap: jax.Array  # uint32[E]: how often the ring was filled
    ends_next: jax.Array  # bool[E]: the next row is a final row, with "next_step"
    pending: jax.Array  # int32[E]: newest rows whose windows are incomplete, at most n_step
    next_number: jax.Array  # int32[E]: number of the next row
    # What can be sampled. A row's mass is its priority ** alpha.
    order: Any  # int32[E, L + 1]: position of the candidate of each number; None if prioritized
    tree: Any  # sum tree over the masses of the sampleable rows; None if uniform
    waiting: Any  # float32[E, n_step + 1]: masses of the newest rows, the newest last; or None
    max_priority: jax.Array  # float32[]: the largest priority so far; set it to 1 to forget it


jax.tree_util.register_dataclass(State, [*State.__dataclass_fields__][1:], ["config"])


class Transition(NamedTuple):
    """n-step transitions, leaves [B, ...]."""

    obs: Any
    action: Any
    reward: jax.Array  # float32[B]: sum of gamma**k * reward over the m <= n_step steps
    discount: jax.Array  # float32[B]: gamma**m, or 0 after a termination
    next_obs: Any  # the observation after the m steps


class Index(NamedTuple):
    """Rows that were sampled. The lap tells whether a row was overwritten since."""

    row: jax.Array  # int32[B]; capacity for invalid items
    lap: jax.Array  # uint32[B]


class Sample(NamedTuple):
    """A batch. Until something can be sampled, all items are invalid, with weight 0."""

    transition: Transition
    index: Index
    probability: jax.Array  # float32[B]: probability with which one item is this row
    weight: jax.Array  # float32[B]: importance weight, at most 1
    is_valid: jax.Array  # bool[B]


def init(config: Config, obs: Any, action: Any) -> State:
    """Return an empty state, from the shapes and dtypes of one env's observation and action.

    Whatever else belongs to a step can be in the tree of the action.
    """
    num_envs, capacity, by_priority = config.num_envs, config.capacity, config.prioritized
    empty = lambda leaf: jnp.zeros((capacity, *jnp.shape(leaf)), jnp.asarray(leaf).dtype)
    zeros = lambda dtype: jnp.zeros(num_envs, dtype)
    return State(
        config=config,
        obs=jax.tree.map(empty, obs),
        action=jax.tree.map(empty, action),
        reward=jnp.zeros(capacity, jnp.float32),
        kind=jnp.zeros(capacity, jnp.uint8),
        head=zeros(jnp.int32),
        lap=zeros(jnp.uint32),
        ends_next=zeros(bool),
        pending=zeros(jnp.int32),
        number=jnp.zeros(capacity, jnp.int32),
        next_number=zeros(jnp.int32),
        order=None if by_priority else jnp.zeros((num_envs, config.length + 1), jnp.int32),
        tree=_tree_init(capacity) if by_priority else None,
        waiting=jnp.zeros((num_envs, config.n_step + 1), jnp.float32) if by_priority else None,
        max_priority=jnp.float32(1),
    )


# Adding. A row has an observation, and what was done there. The next observation is that of the
# env's next row, so that each is stored once. Where an episode ends, the next observation belongs
# to no step: the *final row* has it alone. Without it, the last transition of an episode would
# bootstrap from the first observation of the next one: a wrong target, and no error.


def add(state, obs, action, reward, terminated, truncated, final_obs=None, mask=None) -> State:
    """Add one step of each env. Return the new state.

    Donate the state, and add before you sample. Then no read of the old rows comes before the
    write in a program, and XLA writes in place. Otherwise it copies the buffer.

    Args:
      state: The state.
      obs: Observations that the actions were chosen from, leaves [E, ...].
      action: Actions, leaves [E, ...].
      reward: float[E].
      terminated: bool[E]: the episode ended, and what comes after has no value.
      truncated: bool[E]: the episode was cut, for instance by a time limit.
      final_obs: Final observations, leaves [E, ...], read where an episode ended. For "same_step".
      mask: bool[E], False where an env took no step. Default: all took one.
    """
    how, num_envs = state.config.autoreset, state.config.num_envs
    if (how == "same_step") != (final_obs is not None):
        raise ValueError('autoreset="same_step" needs final_obs, and the others have none')
    terminated, truncated = jnp.asarray(terminated, bool), jnp.asarray(truncated, bool)
    taken = jnp.ones(num_envs, bool) if mask is None else jnp.asarray(mask, bool)
    done = taken & (terminated | truncated)
    kind = jnp.where(terminated, TERMINATED, STEP)
    if how == "next_step":  # the row after a done is its final row, whatever its own flags say
        is_final = state.ends_next
        kind = jnp.where(is_final, FINAL, kind)
        state = dataclasses.replace(state, ends_next=jnp.where(taken, done & ~is_final, is_final))
    elif how == "same_step_no_final_obs":
        # The observation after a truncated step is lost, and with it this transition. The last
        # observation that is known becomes the final row: shorter windows bootstrap from it.
        kind = jnp.where(truncated & ~terminated, FINAL, kind)
    state = _append(state, obs, action, reward, kind, taken)
    if how == "same_step":  # the action and the reward of a final row are never read
        state = _append(state, final_obs, action, reward, jnp.full_like(kind, FINAL), done)
    return state


def _append(state, obs, action, reward, kind, where) -> State:
    """Write one row of each env, [E, ...], at the head of its ring, where `where` is True."""
    config, length = state.config, state.config.length
    env = jnp.arange(config.num_envs, dtype=jnp.int32)
    row = jnp.where(where, env * length + state.head, config.capacity)
    put = lambda stored, new: stored.at[row].set(new, mode="drop")
    # A window is complete with its last step, or where its episode ends. So a row that ends an
    # episode completes all windows before it, and a final row is never pending itself.
    pending = jnp.where(kind == STEP, jnp.minimum(state.pending + 1, config.n_step), 0)
    pending = jnp.where(where, pending, state.pending)
    if config.prioritized:
        more = _became_sampleable(state, kind, pending, where)
    else:  # for any row, since no candidate has the next number yet
        more = {"order": state.order.at[env, state.next_number].set(state.head)}
    head = state.head + where
    return dataclasses.replace(
        state,
        obs=jax.tree.map(put, state.obs, obs),
        action=jax.tree.map(put, state.action, action),
        reward=put(state.reward, jnp.asarray(reward, jnp.float32)),
        kind=put(state.kind, kind),
        number=put(state.number, state.next_number),
        head=jnp.where(head == length, 0, head),
        lap=state.lap + (head == length),
        pending=pending,
        next_number=(state.next_number + (where & (kind != FINAL))) % (length + 1),
        **more,
    )


def _became_sampleable(state, kind, pending, where):
    """Put rows into the tree whose windows are complete now. Return fields of the new state.

    A new row gets the largest priority so far. Its mass waits for its window, since a row with mass
    in the tree may be sampled at once. `kind`, `where` and `pending`, [E], are those of the write.
    """
    config, num_envs = state.config, state.config.num_envs
    mass = jnp.where(kind == FINAL, 0, _mass(config, state.max_priority))
    waiting = jnp.concatenate([state.waiting[:, 1:], mass[:, None]], axis=1)
    waiting = jnp.where(where[:, None], waiting, state.waiting)
    age = jnp.arange(config.n_step, -1, -1, dtype=jnp.int32)  # rows that were written after
    row = jnp.arange(num_envs, dtype=jnp.int32)[:, None] * config.length
    row += (state.head[:, None] - age) % config.length
    is_complete = (age >= pending[:, None]) & (age <= state.pending[:, None])
    # The new row is written in any case, since the leaf still has the mass of the replaced row.
    row = jnp.where(where[:, None] & (is_complete | (age == 0)), row, state.tree[0].size)
    mass = jnp.where(is_complete, waiting, 0)
    return {"waiting": waiting, "tree": _tree_set(state.tree, row.ravel(), mass.ravel())}


# Reading. A row can be sampled if it is a candidate (it is written, and no final row) and its
# window is complete. So the same row gives the same target whenever it is sampled.


def is_sampleable(state: State, row: jax.Array) -> jax.Array:
    """Return whether each row, int32[...] in [0, capacity), can be sampled: bool[...]."""
    env, age = row // state.config.length, _age(state, row)
    is_written = (state.lap[env] > 0) | (age < state.head[env])
    return is_written & (state.kind[row] != FINAL) & (age >= state.pending[env])


def _age(state, row):
    """Return the number of rows that the env wrote after each row."""
    return (state.head[row // state.config.length] - 1 - row) % state.config.length


def _lap_of(state, row):
    """Return how often the ring had been filled when each row was written."""
    env, position = row // state.config.length, row % state.config.length
    return state.lap[env] - (position >= state.head[env])


def get(state: State, row: jax.Array) -> Transition:
    """Return the transitions of rows, int32[B], for which `is_sampleable` is True."""
    length, n_step = state.config.length, state.config.n_step
    env, position = row // length, row % length
    ahead = lambda k: env * length + (position + k) % length
    rows = ahead(np.arange(n_step, dtype=np.int32)[:, None])  # [n_step, B]
    kind = state.kind[rows]
    # The window continues past a step unless that terminated, or the next row is a final row.
    continues = (kind[:-1] != TERMINATED) & (kind[1:] != FINAL)
    is_inside = jnp.cumprod(jnp.concatenate([jnp.ones_like(kind[:1], bool), continues]), axis=0) > 0
    num_steps = is_inside.sum(axis=0, dtype=jnp.int32)
    terminates = (is_inside & (kind == TERMINATED)).any(axis=0)
    powers = np.float32(state.config.gamma ** np.arange(n_step + 1))
    # A select, not a product with 0: a NaN behind the window must not reach the sum.
    reward = jnp.where(is_inside, state.reward[rows] * powers[:-1, None], 0).sum(axis=0)
    # After a termination the final row may come later, or never. No target depends on it.
    has_final = state.config.autoreset != "same_step_no_final_obs"
    is_known = ~terminates | (has_final & (_age(state, row) >= num_steps))
    next_row = ahead(jnp.where(is_known, num_steps, num_steps - 1))
    read = lambda stored, row: jax.tree.map(lambda leaf: leaf[row], stored)
    discount = jnp.where(terminates, 0, jnp.asarray(powers)[num_steps])
    obs, next_obs = read(state.obs, row), read(state.obs, next_row)
    return Transition(obs, read(state.action, row), reward, discount, next_obs)


def size(state: State) -> jax.Array:
    """Return the number of rows that can be sampled: int32[]."""
    return _counts(state)[1].sum(dtype=jnp.int32)


def _counts(state):
    """Return each env's first candidate, by its number, and how many can be sampled: int32[E]."""
    length, env = state.config.length, jnp.arange(state.config.num_envs, dtype=jnp.int32)
    first = state.number[env * length + jnp.where(state.lap > 0, state.head, 0)]  # oldest row
    return first, (state.next_number - first) % (length + 1) - state.pending


def sample(state: State, key: jax.Array, batch_size: int, beta: Any = 0.4) -> Sample:
    """Sample with replacement, uniformly or in proportion to priority ** alpha.

    `beta` is the exponent of importance weights: 0 corrects nothing, 1 corrects all.
    """
    if state.config.prioritized:
        row, mass = _tree_find(state.tree, key, batch_size)
        is_valid, total = mass > 0, state.tree[-1].sum()
        probability = mass / jnp.where(total > 0, total, 1)
    else:
        row = _uniform(state, key, batch_size)
        is_valid = jnp.broadcast_to(size(state) > 0, row.shape)
        probability = is_valid / jnp.maximum(size(state), 1).astype(jnp.float32)
    # (n P)**-beta over the batch's largest (https://arxiv.org/abs/1511.05952, 3.4): n cancels.
    smallest = jnp.min(jnp.where(is_valid, probability, jnp.inf))
    weight = jnp.where(is_valid, (smallest / probability) ** beta, 0)
    index = Index(jnp.where(is_valid, row, state.config.capacity), _lap_of(state, row))
    return Sample(get(state, row), index, probability, weight, is_valid)


def _uniform(state, key, batch_size):
    """Return sampleable rows, int32[B], each with the same probability; any row if there are none.

    Pending rows are the newest candidates, so the sampleable ones are consecutive in `order`.
    """
    length, (first, count) = state.config.length, _counts(state)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    nth = jax.random.randint(key, (batch_size,), 0, jnp.maximum(ends[-1], 1), jnp.int32)
    env = jnp.minimum(jnp.searchsorted(ends, nth, side="right"), state.config.num_envs - 1)
    number = (first[env] + nth - (ends - count)[env]) % (length + 1)
    return env * length + state.order[env, number]


def update_priorities(state: State, index: Index, priority: jax.Array) -> State:
    """Set the priorities, float[B], of sampled rows.

    One that is NaN, infinite or negative is ignored, and so is that of a row which was overwritten
    since. If a row comes twice, its largest priority counts. With priority 0 it is never sampled.
    """
    config, priority = state.config, jnp.asarray(priority, jnp.float32)
    row = jnp.clip(index.row, 0, config.capacity - 1)
    is_live = (row == index.row) & (_lap_of(state, row) == index.lap) & is_sampleable(state, row)
    # One NaN would reach the root, and make every later sample wrong.
    is_accepted = is_live & jnp.isfinite(priority) & (priority >= 0)
    priority = jnp.where(is_accepted, priority, 0)
    row = jnp.where(is_accepted, row, state.tree[0].size)
    largest = jnp.maximum(state.max_priority, priority.max())
    tree = _tree_set(state.tree, row, _mass(config, priority))
    return dataclasses.replace(state, tree=tree, max_priority=largest)


def _mass(config, priority):
    """Return priority ** alpha, within bounds that keep probabilities positive and sums finite."""
    return jnp.where(priority > 0, jnp.clip(priority**config.alpha, 2.0**-50, 2.0**50), 0)


# The sum tree: its leaves are the masses. A node is computed from its FAN_OUT children, never by a
# difference. Rounding errors of differences add up, until rows without mass are sampled.


def _tree_init(num_leaves):
    """Return the levels, leaves first: float32[m, FAN_OUT] has the children of m nodes."""
    sizes = [-(-num_leaves // FAN_OUT)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // FAN_OUT))
    return tuple(jnp.zeros((size, FAN_OUT), jnp.float32) for size in sizes)


def _tree_set(tree, leaf, mass):
    """Set leaves, int32[B], to masses, float32[B]. A leaf of `tree[0].size` is ignored."""
    # XLA writes in place only where the write depends on all reads of the old values. So it depends
    # on the root, by a condition that is always True. Otherwise a second call in a program copies.
    node = jnp.where(tree[-1][0, 0] >= 0, leaf, tree[0].size)
    cell = lambda level: level.at[node // FAN_OUT, node % FAN_OUT]
    # If a leaf comes twice, its largest mass counts, in any order of the writes.
    cleared = cell(tree[0]).set(0, mode="drop")
    levels = [cell(cleared).max(mass, mode="drop")]
    for parents in tree[1:]:
        node = node // FAN_OUT
        total = levels[-1].at[node].get(mode="fill", fill_value=0).sum(axis=1)
        levels.append(cell(parents).set(total, mode="drop"))
    return tuple(levels)


def _tree_find(tree, key, batch_size):
    """Return leaves in proportion to their masses, int32[B], and the masses; 0 in an empty tree.

    Each level chooses one of a node's children by a random number of its own. A single float32 has
    too few bits to reach each of a million leaves evenly.
    """
    node, mass = jnp.zeros(batch_size, jnp.int32), jnp.zeros(batch_size, jnp.float32)
    numbers = jax.random.uniform(key, (len(tree), batch_size), jnp.float32)
    for level, number in zip(reversed(tree), numbers, strict=True):
        children = level[node]  # [B, FAN_OUT]
        ends = jnp.cumsum(children, axis=1)
        target = (number * ends[:, -1])[:, None]
        # The last child with mass that begins at or before the target, whatever the rounding.
        can_be = (children > 0) & (ends - children <= target)
        child = jnp.where(can_be, np.arange(FAN_OUT, dtype=np.int32), 0).max(axis=1)
        mass = jnp.take_along_axis(children, child[:, None], axis=1)[:, 0]
        node = node * FAN_OUT + child
    return node, mass
