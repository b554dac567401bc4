"""The on-policy buffer: the steps of one policy, used for a few epochs and then cleared."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import autoreset, targets
from jaxreplay._util import checks
from jaxreplay._util.aliases import Autoreset, Key, PyTree
from jaxreplay._util.names import has_shapes
from jaxreplay._util.serialization import tell_flax
from jaxreplay._util.struct import Node, Static
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.memory import Memory, check_fits, memory_of
from jaxreplay.buffers.state_checks import check_state, row_of
from jaxreplay.buffers.trajectories import CHUNK_BYTES, check_trajectories, write_trajectories
from jaxreplay.samplers.sampler import plus
from jaxreplay.storage import agents, ring, row_flags, stored_arrays
from jaxreplay.types import Step

_MOST_ROWS = 2**30  # row numbers are int32, and a block of steps may reach past the end


class RolloutState(Node):
    """State of a rollout. T is time, E env.

    `add`, `extend`, `from_trajectories` and `clear` donate it: use the state that they return.

    Attributes:
      steps: Stored steps, pytree with leaves [T, E, ...]. Read them with `rollout.steps(state)`.
      mask: bool[T, E], True for a step, False for a final row and for rows that are not written.
        With `num_agents` bool[T, E, A], True where the agent acted.
      position: int32[], in [0, T]; number of rows of time that are written.
      num_dropped: int32[], number of rows of time that were dropped since `init`, because the
        rollout was full. It stops at 2^31 - 1.
      last: uint8[E], flags of each env's newest row with `autoreset="next_step"`; else None.
      has_ended: bool[E, A], agents that ended in the env's episode before the next step; None
        without `num_agents`. Default: None.
    """

    steps: PyTree
    mask: jax.Array  # bool[T, E] or bool[T, E, A]
    position: jax.Array  # int32[]
    num_dropped: jax.Array  # int32[]
    last: jax.Array | None  # uint8[E], flags of `storage/row_flags.py`
    has_ended: jax.Array | None = None  # bool[E, A]

    def __repr__(self) -> str:
        """Return `RolloutState(4 envs x 128 rows, obs f32[3], 16 kB)`, for example. Under `vmap`,
        the sizes of the leading axes come first."""
        if not has_shapes(self):
            return super().__repr__()
        shape = self.mask.shape if self.has_ended is None else self.mask.shape[:-1]
        *population, length, num_envs = shape
        sizes = num_envs, length
        return stored_arrays.shown(self, population, sizes, "obs", self.steps.obs, num_axes=2)


class Rollout(Static):
    """Buffer for on-policy learning: preallocated arrays of `length` rows of time by `num_envs`.

    The rollout is static configuration, hashable and without arrays; the state has all arrays. Its
    methods are pure functions of the state. Axes: T time (`length`), E env (`num_envs`), B items
    of a minibatch.

    Act and `add` until it is full, learn from `steps`, `advantages` and minibatches, then `clear`
    and repeat. Jit `add`, `extend` and `clear` with `donate_argnums=0`, as `jaxreplay.jit` does:
    then they change the arrays in place.

    A truncated step is bootstrapped from the value of its episode's final observation. `autoreset`
    decides where that value comes from:

    - `"next_step"`: The row after a done is the final row. `value` has its value, and `mask` is
      False there.
    - `"same_step"`: Pass `final_value`, the critic's value of `final_obs`.
    - `"same_step_no_final_obs"`: Pass `final_value` if you computed it while acting, and stored it
      in `extras`. Without it, the truncated step is masked, because its next observation is
      unknown. The step before it is bootstrapped from the truncated step's own observation.

    Args:
      length: Number of rows of time. With `autoreset="next_step"`, final rows take some of them.
      num_envs: Number of parallel envs.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Default: an error that explains the three.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]: they may end one by
        one. Values, rewards, advantages and the mask are [T, E, A] then. Default: one flag for each
        env.

    Raises:
      ValueError: `length` or `num_envs` is less than 1, their product exceeds 2^30, or `autoreset`
        is missing or unknown.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> rollout = jr.Rollout(length=3, num_envs=1, autoreset="same_step_no_final_obs")
      >>> zeros = jnp.zeros(1)
      >>> step = jr.Step(zeros, zeros, zeros + 1, terminated=zeros > 0, truncated=zeros > 0)
      >>> state = rollout.init(jax.tree.map(lambda x: x[0], step))
      >>> state = rollout.add(rollout.add(state, step), step)
      >>> int(rollout.num_steps(state)), bool(rollout.can_add(state, 2))
      (2, False)
    """

    length: int
    num_envs: int
    autoreset: Autoreset | None = None
    num_agents: int | None = None
    _kind = RolloutState  # of its states

    def _check(self) -> None:
        checks.check_size("Rollout", "length", self.length)
        checks.check_size("Rollout", "num_envs", self.num_envs)
        if self.num_agents is not None:
            checks.check_size("Rollout", "num_agents", self.num_agents)
        if self.length * self.num_envs > _MOST_ROWS:
            raise ValueError(
                f"Rollout: length * num_envs = {self.length * self.num_envs} is too large: it "
                f"must be at most {_MOST_ROWS}"
            )
        form = autoreset.checked("Rollout", self.autoreset)
        object.__setattr__(self, "autoreset", form)

    def init(self, example: PyTree) -> RolloutState:
        """Make an empty state.

        Args:
          example: One env's step (a `Step`, or a mapping, dataclass or NamedTuple with its fields),
            leaves without the env axis. Arrays or `jax.ShapeDtypeStruct`s: only structure, shapes
            and dtypes are read. With `autoreset="same_step"` it has `final_obs`.

        Returns:
          The state, on JAX's default device.

        Raises:
          ValueError: `example` is not a step, or a flag is not bool.
          MemoryError: The device has too little memory for the rollout.
        """
        tell_flax()
        example = self._example("init", example)
        if not checks.is_tracing():  # while tracing, nothing is allocated yet
            check_fits("init", self.memory(example))
        return self._empty(example)

    def memory(self, example: PyTree) -> Memory:
        """Return the memory in bytes that `init` will take, leaf by leaf, and allocate nothing.

        Args:
          example: One env's step, as for `init`.
        """
        example = self._example("memory", example)
        return memory_of(jax.eval_shape(self._empty, example), self.length * self.num_envs)

    def add(self, state: RolloutState, step: PyTree) -> RolloutState:
        """Append one step of every env.

        If the rollout is full, the step is dropped and counted in `state.num_dropped`.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole rollout is copied.
          step: A `Step`, or a mapping, dataclass or NamedTuple with its fields; leaves [E, ...]
            with the dtypes of the example.

        Returns:
          The new state.
        """
        state = check_state("add", self, state)
        block, _ = step_checks.checked_steps("add", self, step, row_of(state.steps))
        return self._write(state, jax.tree.map(lambda leaf: leaf[None], block))

    def extend(self, state: RolloutState, steps: PyTree) -> RolloutState:
        """Append a block of steps, as `lax.scan` stacks them.

        The result equals that of one `add` for each step, oldest first.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole rollout is copied.
          steps: As for `add`, with one more axis in front: time, of any length.

        Returns:
          The new state.
        """
        state = check_state("extend", self, state)
        block, (num_steps, _) = step_checks.checked_steps(
            "extend", self, steps, row_of(state.steps), is_block=True
        )
        return self._write(state, block) if num_steps else state

    def from_trajectories(
        self, state: RolloutState, trajectories: Iterable[Any], *, chunk_bytes: int = CHUNK_BYTES
    ) -> RolloutState:
        """Replace the contents of the rollout by trajectories of any lengths. Call it outside of
        `jit`.

        The rollout must have `num_envs=1` and `autoreset="next_step"`. Trajectories are stored one
        after the other. All are checked before the first is written. The call needs one chunk of
        memory in addition to the rollout, and compiles once for all lengths. Each trajectory costs
        about 0.1 ms in addition to copying its bytes, which dominates if there are many tiny ones.

        A trajectory is an episode or a part of one. If its last step has neither flag, it is
        truncated there. If it does not end in a termination and has no final observation, its last
        step becomes the final row, and is not learned from. Without steps, it adds no row.

        Args:
          state: Donated: use the returned state instead.
          trajectories: `Step`s or mappings of NumPy arrays, leaves [L, ...]; L may differ between
            trajectories. Leaves of `obs` may be [L + 1, ...], with the final observation at the
            end; then leaves of `extras` may be, too. An iterator is read to its end first.
          chunk_bytes: Bytes of host memory for one chunk. On an accelerator, the chunk takes as
            much device memory. Default: 16 MiB.

        Returns:
          The new state.

        Raises:
          ValueError: The rollout has another form, or a trajectory does not fit; the error names
            the trajectory and the leaf. Nothing is written then.
        """
        if (self.num_envs, self.autoreset, self.num_agents) != (1, "next_step", None):
            raise ValueError(
                f"from_trajectories: needs a rollout of one env, got num_envs={self.num_envs}, "
                f"autoreset={self.autoreset!r}; make it with "
                'num_envs=1, autoreset="next_step", no num_agents, and length = number of all '
                "steps + number of trajectories, for their final observations"
            )
        checks.check_size("from_trajectories", "chunk_bytes", chunk_bytes)
        state = check_state("from_trajectories", self, state)
        checked = check_trajectories(trajectories, row_of(state.steps, 2), self.length)
        state = _clear(self, state)
        steps, mask = write_trajectories((state.steps, state.mask), checked, chunk_bytes)
        position = jnp.int32(sum(trajectory.num_rows for trajectory in checked))
        # As after a final row: the next step that is added begins an episode.
        return state.replace(
            steps=steps,
            mask=mask,
            position=position,
            last=jnp.full((1,), row_flags.FINAL, jnp.uint8),
        )

    def clear(self, state: RolloutState) -> RolloutState:
        """Remove all steps, to begin the next rollout.

        Episodes continue. With `autoreset="next_step"`, if the newest row was a done, the next row
        is its final row.

        Args:
          state: Donated: use the returned state instead.

        Returns:
          The new state.
        """
        state = check_state("clear", self, state)
        last = None if state.last is None else row_flags.after_clear("next_step", state.last)
        return state.replace(
            mask=jnp.zeros_like(state.mask), position=jnp.zeros_like(state.position), last=last
        )

    def can_add(self, state: RolloutState, num_steps: int = 1) -> jax.Array:
        """Return whether there is room for more steps of every env: bool[].

        Args:
          state: The rollout's state.
          num_steps: Number of steps of every env. Default: 1.
        """
        state = check_state("can_add", self, state)
        return state.position + num_steps <= self.length

    def steps(self, state: RolloutState) -> Step:
        """Return the steps, leaves [T, E, ...].

        From row `state.position` on, they are old steps or zeros, and `state.mask` is False.

        Args:
          state: The rollout's state.
        """
        state = check_state("steps", self, state)
        return stored_arrays.tree_map(stored_arrays.values, state.steps)

    def bootstrap(
        self, state: RolloutState, value: Any, last_value: Any, final_value: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Compute `next_value` and `mask` for `gae` and `vtrace`, with correct bootstrapping at
        truncations.

        Args:
          state: The rollout's state.
          value: float[T, E], the critic's value of each row's observation, final rows included.
          last_value: float[E], the critic's value of the observation after the newest row. After
            `from_trajectories` there is none: pass zeros.
          final_value: float[T, E], the critic's value of each step's final observation, read only
            where the step was truncated. Required with "same_step"; optional with
            "same_step_no_final_obs". Default: none.

        Returns:
          `next_value`, float[T, E], and `mask`, bool[T, E], True for the steps to learn from. It is
          False for final rows, for rows that are not written, and for truncated steps of
          "same_step_no_final_obs" without `final_value`.

        Raises:
          ValueError: An array has another shape, `value` is not floating, or `final_value` is
            missing with "same_step" or given with "next_step".
        """
        state = check_state("bootstrap", self, state)
        if self.autoreset == "next_step" and final_value is not None:
            raise ValueError(
                'bootstrap: with autoreset="next_step" final observations are rows like any '
                "other; leave out final_value"
            )
        if self.autoreset == "same_step" and final_value is None:
            raise ValueError(
                "bootstrap: this rollout keeps final_obs; pass "
                "final_value=critic(rollout.steps(state).final_obs)"
            )
        rows = {"value": value} | ({} if final_value is None else {"final_value": final_value})
        checks.check_shapes("bootstrap", state.mask.shape, **rows)
        checks.check_shapes("bootstrap", state.mask.shape[1:], last_value=last_value)
        value = jnp.asarray(value)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"bootstrap: value: got {value.dtype.name}, expected floating values, as the "
                "critic gives them"
            )
        last_value = jnp.asarray(last_value).astype(value.dtype)
        # the first row that is not written; dropped if the rollout is full
        value = value.at[state.position].set(last_value, mode="drop")
        is_cut = state.steps.truncated
        if self.num_agents is not None:  # the env goes on where other agents do
            done: Any = is_cut | state.steps.terminated
            is_cut = is_cut & jnp.all(done, axis=-1, keepdims=True)
        if final_value is not None:
            return targets.next_values(value, last_value, is_cut, final_value), state.mask
        is_cut &= ~state.steps.terminated
        is_given_up = is_cut & (self.autoreset == "same_step_no_final_obs")
        return targets.next_values(value, last_value), state.mask & ~is_given_up

    def advantages(
        self,
        state: RolloutState,
        value: Any,
        last_value: Any,
        final_value: Any = None,
        *,
        gamma: Any,
        lambda_: Any = 0.95,
    ) -> tuple[targets.Advantages, jax.Array]:
        """Compute advantages and value targets of all steps, by generalized advantage estimation.

        Args:
          state: The rollout's state.
          value: float[T, E], the critic's value of each row's observation, final rows included.
          last_value: float[E], the critic's value of the observation after the newest row. After
            `from_trajectories` there is none: pass zeros.
          final_value: float[T, E], the critic's value of each step's final observation, read only
            where the step was truncated. Required with "same_step"; optional with
            "same_step_no_final_obs". Default: none.
          gamma: float[] in [0, 1], the discount of one step; or float[T, E], that of each.
          lambda_: float[] in [0, 1]: 0 looks one step ahead, 1 to the episode's end. Default: 0.95.

        Returns:
          An `Advantages` with `advantage` and `target`, float[T, E] each, and `mask`, bool[T, E],
          True for the steps to learn from.

        Raises:
          ValueError: As for `bootstrap`; or rewards are not one array.

        Example:
          >>> import jax, jax.numpy as jnp, jaxreplay as jr
          >>> rollout = jr.rollout(length=3, num_envs=1, autoreset="next_step")
          >>> zeros = jnp.zeros((3, 1))
          >>> steps = jr.Step(zeros, zeros, zeros + 1, terminated=zeros > 0, truncated=zeros > 0)
          >>> state = rollout.extend(rollout.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
          >>> value, last_value = zeros, jnp.array([8.0])  # the critic's values
          >>> found, mask = rollout.advantages(state, value, last_value, gamma=0.5, lambda_=1.0)
          >>> found.target[:, 0].tolist()
          [2.75, 3.5, 5.0]
        """
        next_value, mask = self.bootstrap(state, value, last_value, final_value)
        steps = self.steps(state)
        if not jax.tree_util.all_leaves([steps.reward]):
            raise ValueError(
                f"advantages: rewards are a {type(steps.reward).__name__}, and each needs a value "
                "of its own: next_value, mask = rollout.bootstrap(state, value, last_value), then "
                "jaxreplay.gae(reward, value, next_value, ..., mask=mask)"
            )
        found = targets.gae(
            steps.reward,
            value,
            next_value,
            terminated=steps.terminated,
            truncated=steps.truncated,
            gamma=gamma,
            lambda_=lambda_,
            mask=mask,
        )
        return found, mask

    def is_first(self, state: RolloutState) -> jax.Array:
        """Return True where a step begins an episode, so that a recurrent policy resets its memory
        before it: bool[T, E]. Agents of an env begin together.

        Row 0 is False: it continues from the memory that was kept while acting.

        Args:
          state: The rollout's state.
        """
        # the row after a final row begins an episode
        is_over: Any = state.steps.terminated | state.steps.truncated
        mask = state.mask
        if self.num_agents is not None:
            is_over, mask = is_over.all(axis=-1), mask.any(axis=-1)
        is_over |= ~mask
        return mask & jnp.concatenate([jnp.zeros((1, self.num_envs), bool), is_over[:-1]])

    def num_steps(self, state: RolloutState) -> jax.Array:
        """Return the number of steps of all envs, and of all agents, without final rows: int32[].

        Args:
          state: The rollout's state.
        """
        return state.mask.sum(dtype=jnp.int32)

    def minibatches(
        self, key: Key, *, num_epochs: int, num_minibatches: int, chunk_length: int | None = None
    ) -> jax.Array:
        """Return shuffled numbers of steps, single ones or in chunks, for epochs of minibatches.

        Each epoch has every row once, in a new order. Final rows and rows that are not written are
        among them: multiply the loss by the mask. Scan over the result and call `minibatch`.

        Args:
          key: Random key, consumed.
          num_epochs: Number of passes over all rows.
          num_minibatches: Number of minibatches in an epoch. It must divide `length * num_envs`,
            or the number of chunks.
          chunk_length: Number of consecutive steps of one env in a chunk, for recurrent policies;
            it must divide `length`, which itself keeps whole envs together. Default: single steps.

        Returns:
          int32[num_epochs * num_minibatches, B], in the order of use, with
          B = `length * num_envs / num_minibatches`. With `chunk_length` L, int32[..., L, B], where
          B is the number of chunks: each column has the steps of one.

        Raises:
          ValueError: A number does not divide the other; the error names the nearest that do.
        """
        checks.check_size("minibatches", "num_epochs", num_epochs)
        checks.check_size("minibatches", "num_minibatches", num_minibatches)
        num_items, name = self.length * self.num_envs, "length * num_envs"
        if chunk_length is not None:
            checks.check_size("minibatches", "chunk_length", chunk_length)
            _quotient("minibatches", "length", self.length, "chunk_length", chunk_length)
            num_items, name = num_items // chunk_length, "chunks"
        size = _quotient("minibatches", name, num_items, "num_minibatches", num_minibatches)
        order = jax.vmap(lambda key: jax.random.permutation(key, ring.arange(num_items)))(
            jax.random.split(key, num_epochs)
        )
        order = order.reshape(num_epochs * num_minibatches, size)
        if chunk_length is None:
            return order
        chunk, env = jnp.divmod(order[:, None], self.num_envs)
        return (chunk * chunk_length + ring.arange(chunk_length)[:, None]) * self.num_envs + env

    def minibatch(self, tree: PyTree, index: jax.Array) -> Any:
        """Return the steps of one minibatch, leaves [B, ...], or its chunks, leaves [L, B, ...].

        A recurrent policy begins each chunk with the memory of its first step, which was stored in
        `extras` while acting, and resets it where `is_first` says so.

        Args:
          tree: Pytree with leaves [T, E, ...], such as steps, advantages and the mask.
          index: int32[B] or int32[L, B], one row of `minibatches`: numbers of steps,
            time * num_envs + env.
        """
        like = lambda leaf: jax.ShapeDtypeStruct(
            (self.length, self.num_envs, *jnp.shape(leaf)[2:]), jnp.result_type(leaf)
        )
        hint = "leaves must begin with [time, num_envs]"
        checks.check_leaves("minibatch", tree, jax.tree.map(like, tree), hint)
        row = jnp.asarray(index)
        flat = lambda leaf: leaf.reshape((self.length * self.num_envs, *leaf.shape[2:]))
        return jax.tree.map(lambda leaf: stored_arrays.read(flat(leaf), row), tree)

    def _example(self, where: str, example: PyTree) -> Step:
        return step_checks.as_example(where, example, self.autoreset, self.num_agents)

    def _empty(self, example: Step) -> RolloutState:
        rows = lambda leaf: stored_arrays.zeros(
            self.length, jax.ShapeDtypeStruct((self.num_envs, *leaf.shape), leaf.dtype)
        )
        # As after a final row: the first row begins an episode.
        last = jnp.full((self.num_envs,), row_flags.FINAL, jnp.uint8)
        per_env = self.num_envs, *example.terminated.shape
        return RolloutState(
            steps=jax.tree.map(rows, example),
            mask=jnp.zeros((self.length, *per_env), bool),
            position=jnp.int32(0),
            num_dropped=jnp.int32(0),
            last=last if self.autoreset == "next_step" else None,
            has_ended=None if self.num_agents is None else jnp.zeros(per_env, bool),
        )

    def _empty_like(self, state: RolloutState) -> RolloutState:
        """Return an empty state for the same leaves."""
        return self._empty(row_of(state.steps, 2))

    def _write(self, state: RolloutState, steps: Step) -> RolloutState:
        """Write checked steps, leaves [K, E, ...]."""
        of_env, num_steps = (steps.terminated, steps.truncated), len(steps.terminated)
        written = jnp.ones(steps.terminated.shape[:2], bool)
        mask, last, has_ended, bits = written, None, state.has_ended, None
        if has_ended is not None:
            bits = agents.bytes_of(*of_env, written, has_ended, state.last)
            of_env, has_ended = agents.flags_of_env(bits), agents.ended(bits[-1])
        if state.last is not None:
            flags, _ = row_flags.rows_of("next_step", *of_env, written, state.last)
            mask, last = (flags & row_flags.FINAL) == 0, flags[-1]
        if bits is not None:
            mask = mask[..., None] & ((bits & agents.GONE) == 0)
        row = state.position + ring.arange(num_steps)  # rows past the end are dropped
        put = lambda leaf, values: stored_arrays.write(leaf, row, values)
        num_dropped = jnp.maximum(state.position + num_steps - self.length, 0)
        return state.replace(
            steps=stored_arrays.tree_map(put, state.steps, steps),
            mask=put(state.mask, mask),
            position=jnp.minimum(state.position + num_steps, self.length),
            num_dropped=plus(state.num_dropped, num_dropped),
            last=last,
            has_ended=has_ended,
        )


# `keep_unused`: otherwise leaves that are not read are not donated
@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _clear(rollout: Rollout, state: RolloutState) -> RolloutState:
    return rollout.clear(state)


def _quotient(where: str, name: str, number: int, of: str, divisor: int) -> int:
    """Return `number / divisor`, or raise a ValueError that names both and the nearest divisors."""
    quotient, rest = divmod(number, divisor)
    if rest or not quotient:
        divisors = [d for d in range(1, number + 1) if not divmod(number, d)[1]]
        nearest = [d for d in divisors if d < divisor][-1:] + [d for d in divisors if d > divisor][
            :1
        ]
        raise ValueError(
            f"{where}: {name} = {number} does not divide into {of}={divisor} equal ones; the "
            f"nearest that do: {' and '.join(map(str, nearest))}"
        )
    return quotient
