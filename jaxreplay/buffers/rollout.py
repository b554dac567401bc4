"""The on-policy buffer: the steps that one policy took, learned from a few times and then
dropped."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay import autoreset, targets
from jaxreplay._util import checks
from jaxreplay._util.aliases import Autoreset, Key, PyTree
from jaxreplay._util.names import has_shapes, named, short_bytes
from jaxreplay._util.struct import Node, Static
from jaxreplay.buffers import memory, step_checks
from jaxreplay.buffers.state_checks import as_arrays, check_not_deleted, warn_of_copy
from jaxreplay.buffers.trajectories import CHUNK_BYTES, check_trajectories, write_trajectories
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.types import Step

_LARGEST = np.iinfo(np.int32).max
_MOST_ROWS = 2**30  # they are numbered by int32, and a block may reach past the end


class RolloutState(Node):
    """What a rollout holds; T time, E env. `add`, `extend`, `from_trajectories` and `clear` take it
    over: donate it to them."""

    steps: PyTree  # as stored, leaves [T, E, ...]; `rollout.steps(state)` reads them
    # bool[T, E]: True for a step; False for a final observation, and where nothing is written
    mask: jax.Array
    position: jax.Array  # int32[], in [0, T]: rows of time written
    # int32[]: rows of time that came when there was no room, since `init`; it stops at its largest
    # value
    num_dropped: jax.Array
    # uint8[E], flags of the newest row (`storage/row_flags.py`); None unless "next_step": no row
    # depends on it
    last: jax.Array | None

    def __repr__(self) -> str:
        """`RolloutState(128 rows x 4 envs, obs f32[3], 16 kB)`; of a population, how many first."""
        if not has_shapes(self):
            return super().__repr__()
        *population, length, num_envs = self.mask.shape
        sizes = " x ".join(
            [*map(str, population), f"{length} rows", f"{num_envs} env{'s' * (num_envs != 1)}"]
        )
        row = stored_arrays.short_rows(self.steps.obs, self.mask.ndim)
        return f"RolloutState({sizes}, obs {row}, {short_bytes(self)})"


class Rollout(Static):
    """`length` steps of `num_envs` envs, in preallocated arrays `[time, num_envs, ...]`. Static
    configuration with pure methods.

    Act and `add` until it is full, learn from `steps`, `bootstrap` and minibatches, then `clear`
    and go on. Jit `add`, `extend` and `clear` with `donate_argnums=0`: then they change the arrays
    in place.

    The value of an episode's final observation, where the episode was truncated, comes from where
    `autoreset` says (`bootstrap`):

    - `"next_step"`: the row after a done is the final observation: a row of the rollout whose
      `mask` is False.
    - `"same_step"`: the learner brings it, as `final_value`, computed from `final_obs`.
    - `"same_step_no_final_obs"`: the learner may bring it, computed while acting and carried in
      `extras`. Else the truncated step is left out of learning, and its own observation's value
      stands in for what the step before it led to: one step is given up rather than a wrong target
      made.

    Args:
      length: rows of time, final observations included. num_envs: envs that step together.
      autoreset: what the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs"; see `jaxreplay.autoreset`.
    """

    length: int
    num_envs: int
    autoreset: Autoreset | None = None

    def _check(self) -> None:
        checks.check_size("Rollout", "length", self.length)
        checks.check_size("Rollout", "num_envs", self.num_envs)
        if self.length * self.num_envs > _MOST_ROWS:
            raise ValueError(
                f"Rollout: length * num_envs = {self.length * self.num_envs} is too large: it "
                f"must be at most {_MOST_ROWS}"
            )
        form = autoreset.checked("Rollout", self.autoreset)
        object.__setattr__(self, "autoreset", form)

    def init(self, example: PyTree) -> RolloutState:
        """An empty rollout.

        Args:
          example: one env's step, leaves without leading axes: arrays or `jax.ShapeDtypeStruct`s;
            with `final_obs`, if steps bring it.

        Raises:
          ValueError: the example is no step, or a flag is not bool. MemoryError: the device cannot
            hold the rollout.
        """
        example = self._example("init", example)
        if not isinstance(jnp.zeros(()), Tracer):  # while tracing, nothing is allocated yet
            memory.check_fits("init", self.memory(example))
        return self._init(example)

    def memory(self, example: PyTree) -> memory.Memory:
        """The bytes that `init(example)` will take, leaf by leaf, with nothing allocated."""
        example = self._example("memory", example)
        return memory.memory_of(
            jax.eval_shape(lambda: self._init(example)), self.length * self.num_envs
        )

    def add(self, state: RolloutState, step: PyTree) -> RolloutState:
        """Append one step of every env, leaves `[num_envs, ...]`. Where there is no room it is
        dropped, and counted in `num_dropped`."""
        state = self._take_over("add", state)
        step = self._checked(
            "add", state, step, (), "one step of every env, leaves [num_envs, ...]"
        )
        return self._write(state, jax.tree.map(lambda leaf: leaf[None], step))

    def extend(self, state: RolloutState, steps: PyTree) -> RolloutState:
        """Append a block of steps, leaves `[time, num_envs, ...]`, as `lax.scan` stacks them: the
        same as `add` for each, oldest first."""
        state = self._take_over("extend", state)
        first = jax.tree.leaves(steps)[:1]
        time = (jnp.shape(first[0]) or (0,))[:1] if first else (0,)
        steps = self._checked(
            "extend", state, steps, time, "a block of steps, leaves [time, num_envs, ...]"
        )
        return self._write(state, steps) if time[0] else state

    def from_trajectories(
        self, state: RolloutState, trajectories: Iterable[Any], *, chunk_bytes: int = CHUNK_BYTES
    ) -> RolloutState:
        """Put trajectories of any lengths into the rollout, in place of what it held. `state` is
        donated. Not for use under `jit`.

        They lie one after the other in the one stream of a rollout with `num_envs=1` and
        `autoreset="next_step"`. All are checked before the first is written. Beside the rollout
        this takes one chunk of memory, and compiles once, whatever the lengths. Beside its bytes
        each trajectory costs some 0.1 ms: with many tiny ones that is most of the time.

        A trajectory is an episode, or a part of one. Where it ends with neither flag, it is
        truncated there. Where it does not end in a termination and the final observation is not
        known, its last step becomes that observation, and is given up. One without a step leaves no
        row.

        Args:
          trajectories: steps or mappings of NumPy arrays `[L, ...]`, L different in each; those of
            obs may be `[L + 1, ...]`, the last being the final observation, and then those of
            extras too. An iterator is read to its end first.
          chunk_bytes: memory on the host for one chunk; on an accelerator it is taken there too.

        Raises:
          ValueError: names the trajectory and the leaf; nothing was written.
        """
        if (self.num_envs, self.autoreset) != (1, "next_step"):
            raise ValueError(
                f"from_trajectories: needs a rollout of one stream, got num_envs={self.num_envs}, "
                f"autoreset={self.autoreset!r}; make it "
                'with num_envs=1, autoreset="next_step", and length = all steps together, and a '
                "final observation for each trajectory"
            )
        checks.check_size("from_trajectories", "chunk_bytes", chunk_bytes)
        state = self._check_state("from_trajectories", state)
        checked = check_trajectories(trajectories, _row_of(state), self.length)
        state = _clear(self, state)
        steps, mask = write_trajectories((state.steps, state.mask), checked, chunk_bytes)
        position = jnp.int32(sum(trajectory.num_rows for trajectory in checked))
        # As if a final row had been written: what `add` brings next opens an episode.
        return state.replace(
            steps=steps,
            mask=mask,
            position=position,
            last=jnp.full((1,), row_flags.FINAL, jnp.uint8),
        )

    def clear(self, state: RolloutState) -> RolloutState:
        """Begin the next rollout; donates `state`. Stored steps stay where they are, unread.

        Where a done still owes its final observation (`autoreset="next_step"`), the next row is
        still that.
        """
        state = self._check_state("clear", state)
        last = None if state.last is None else row_flags.after_clear("next_step", state.last)
        return state.replace(
            mask=jnp.zeros_like(state.mask), position=jnp.zeros_like(state.position), last=last
        )

    def can_add(self, state: RolloutState, num_steps: int = 1) -> jax.Array:
        """Whether there is room for so many more steps of every env: bool[]."""
        state = self._check_state("can_add", state)
        return state.position + num_steps <= self.length

    def steps(self, state: RolloutState) -> Step:
        """What was added, leaves `[time, num_envs, ...]`. From `state.position` on it is old, or
        zeros, and `state.mask` False."""
        state = self._check_state("steps", state)
        return stored_arrays.tree_map(stored_arrays.values, state.steps)

    def bootstrap(
        self, state: RolloutState, value: Any, last_value: Any, final_value: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """What each step led to, and which steps can be learned from: `next_value` and `mask` for
        `gae` and `vtrace`.

        Args:
          value: float[T, E], the critic's, of each row's obs, final observations among them.
          last_value: float[E], of the observation that came after the newest row. After
            `from_trajectories` nothing did: zeros.
          final_value: float[T, E], of each step's own final observation, read only where it was
            truncated. Must be given for "same_step", may be for "same_step_no_final_obs".

        Returns:
          next_value: float[T, E]. mask: bool[T, E]; False for final observations, rows not written,
            and truncated steps given up.
        """
        state = self._check_state("bootstrap", state)
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
        axes = (self.length, self.num_envs)
        given = {"value": value, "last_value": last_value} | (
            {} if final_value is None else {"final_value": final_value}
        )
        for name, array in given.items():
            expected = axes[1:] if name == "last_value" else axes
            if jnp.shape(array) != expected:
                raise ValueError(
                    f"bootstrap: {name}: got {list(jnp.shape(array))}, expected {list(expected)}, "
                    "one value for each observation"
                )
        value = jnp.asarray(value)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"bootstrap: value: got {value.dtype.name}, expected floating values, as the "
                "critic gives them"
            )
        last_value = jnp.asarray(last_value).astype(value.dtype)
        # the first row not written, if there is one
        value = value.at[state.position].set(last_value, mode="drop")
        if final_value is not None:
            return targets.next_values(
                value, last_value, state.steps.truncated, final_value
            ), state.mask
        is_cut = state.steps.truncated & ~state.steps.terminated
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
        """Compute advantages and value targets of the steps held, by `gae`.

        Args:
          value, last_value, final_value: as for `bootstrap`.
          gamma: number[] in [0, 1], the discount factor.
          lambda_: number[] in [0, 1]: 0 looks one step ahead, 1 to the episode's end.

        Returns:
          advantages: `advantage` and `target`, float[T, E] each. mask: bool[T, E]; the steps to
            learn from.

        Example:
          >>> import jax, jax.numpy as jnp, jaxreplay as jr
          >>> rollout = jr.rollout(length=3, num_envs=1, autoreset="next_step")
          >>> zeros = jnp.zeros((3, 1))
          >>> steps = jr.Step(zeros, zeros, zeros + 1, terminated=zeros > 0, truncated=zeros > 0)
          >>> state = rollout.extend(rollout.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
          >>> value, last_value = zeros, jnp.array([8.0])  # the critic's
          >>> found, mask = rollout.advantages(state, value, last_value, gamma=0.5, lambda_=1.0)
          >>> found.target[:, 0].tolist()
          [2.75, 3.5, 5.0]
        """
        next_value, mask = self.bootstrap(state, value, last_value, final_value)
        steps = self.steps(state)
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
        """Where a recurrent policy's memory starts anew: bool[T, E]. Before the first row, it is
        the one kept while acting: False."""
        # a final observation is the last of its episode
        is_over = state.steps.terminated | state.steps.truncated | ~state.mask
        return state.mask & jnp.concatenate([jnp.zeros((1, self.num_envs), bool), is_over[:-1]])

    def mean_reward(self, state: RolloutState) -> jax.Array:
        """Mean reward of the steps held, 0 where there are none: floating[...], of the trailing
        axes of a reward."""
        reward = self.steps(state).reward
        mask = state.mask.reshape(state.mask.shape + (1,) * (reward.ndim - 2))
        reward = reward.astype(jnp.promote_types(reward.dtype, jnp.float32))
        return jnp.where(mask, reward, 0).sum(axis=(0, 1)) / jnp.maximum(self.num_steps(state), 1)

    def num_steps(self, state: RolloutState) -> jax.Array:
        """Steps held, of all envs together, final observations not counted: int32[]."""
        return state.mask.sum(dtype=jnp.int32)

    def minibatches(self, key: Key, *, num_epochs: int, num_minibatches: int) -> jax.Array:
        """Shuffled rows for epochs of minibatches of single steps: each row exactly once in an
        epoch, in an order of its own.

        Args:
          key: consumed.

        Returns:
          int32[num_epochs * num_minibatches, length * num_envs / num_minibatches], in the order of
            use, for `minibatch`: scan over it.
        """
        return shuffled(
            "minibatches",
            key,
            self.length * self.num_envs,
            "length * num_envs",
            num_epochs,
            num_minibatches,
        )

    def env_minibatches(self, key: Key, *, num_epochs: int, num_minibatches: int) -> jax.Array:
        """Shuffled envs for epochs of minibatches of whole streams, for recurrent policies; see
        `is_first`.

        Returns:
          int32[num_epochs * num_minibatches, num_envs / num_minibatches], in the order of use, for
            `env_minibatch`.
        """
        return shuffled(
            "env_minibatches", key, self.num_envs, "num_envs", num_epochs, num_minibatches
        )

    def minibatch(self, tree: PyTree, index: jax.Array) -> Any:
        """The rows of one minibatch, `[B, ...]`, of leaves `[time, num_envs, ...]`. `index`:
        int32[B], one row of `minibatches`."""
        self._check_axes("minibatch", tree)
        rows = self.length * self.num_envs
        return jax.tree.map(
            lambda leaf: stored_arrays.read(leaf.reshape((rows, *leaf.shape[2:])), index), tree
        )

    def env_minibatch(self, tree: PyTree, index: jax.Array) -> Any:
        """The streams of one minibatch, `[time, B, ...]`, of leaves `[time, num_envs, ...]`.
        `index`: one row of `env_minibatches`."""
        self._check_axes("env_minibatch", tree)
        return jax.tree.map(lambda leaf: leaf.at[:, index].get(mode="promise_in_bounds"), tree)

    def _example(self, where: str, example: PyTree) -> Step:
        step_checks.check_flags(
            where, example := step_checks.step_of(where, example, self.autoreset)
        )
        return checks.specs(where, example)

    def _init(self, example: Step) -> RolloutState:
        rows = lambda leaf: stored_arrays.zeros(
            self.length, jax.ShapeDtypeStruct((self.num_envs, *leaf.shape), leaf.dtype)
        )
        # As if a final row had been written: the first row opens an episode.
        last = jnp.full((self.num_envs,), row_flags.FINAL, jnp.uint8)
        return RolloutState(
            steps=jax.tree.map(rows, example),
            mask=jnp.zeros((self.length, self.num_envs), bool),
            position=jnp.int32(0),
            num_dropped=jnp.int32(0),
            last=last if self.autoreset == "next_step" else None,
        )

    def _take_over(self, where: str, state: RolloutState) -> RolloutState:
        state = self._check_state(where, state)
        warn_of_copy(self, where, state, stacklevel=4)
        return state

    def _check_state(self, where: str, state: RolloutState) -> RolloutState:
        """The state, with JAX's arrays in place of NumPy's; a ValueError, where it is of another
        rollout."""
        if not isinstance(state, RolloutState):
            raise ValueError(
                f"{where}: the state must be what init gave or the last call returned, got a "
                f"{type(state).__name__}"
            )
        check_not_deleted(where, state)
        hint = f"The state is not of this rollout: {self}"
        checks.check_leaves(where, state, jax.eval_shape(self._init, _row_of(state)), hint)
        return as_arrays(state)

    def _write(self, state: RolloutState, steps: Step) -> RolloutState:
        """Leaves `[K, E, ...]`, checked."""
        num_steps, mask, last = len(steps.terminated), jnp.ones(steps.terminated.shape, bool), None
        if state.last is not None:
            flags, _ = row_flags.rows_of(
                "next_step", steps.terminated, steps.truncated, mask, state.last
            )
            mask, last = (flags & row_flags.FINAL) == 0, flags[-1]
        row = state.position + ring.arange(num_steps)  # those past the end are dropped
        put = lambda leaf, values: stored_arrays.write(leaf, row, values)
        num_dropped = jnp.maximum(state.position + num_steps - self.length, 0)
        return state.replace(
            steps=stored_arrays.tree_map(put, state.steps, steps),
            mask=put(state.mask, mask),
            position=jnp.minimum(state.position + num_steps, self.length),
            num_dropped=state.num_dropped + jnp.minimum(num_dropped, _LARGEST - state.num_dropped),
            last=last,
        )

    def _checked(
        self, where: str, state: RolloutState, steps: PyTree, time: tuple[int, ...], what: str
    ) -> Step:
        steps = step_checks.step_of(where, steps, self.autoreset)
        axes = (*time, self.num_envs)
        expected = stored_arrays.tree_map(
            lambda leaf: jax.ShapeDtypeStruct(axes + leaf.shape[2:], leaf.dtype), state.steps
        )
        checks.check_leaves(
            where,
            steps,
            expected,
            f"{where} takes {what}, here {list(axes)}, as the example given to init has them.",
        )
        return jax.tree.map(jnp.asarray, steps)

    def _check_axes(self, where: str, tree: PyTree) -> None:
        axes = (self.length, self.num_envs)
        bad = [
            f"{name}: got {list(jnp.shape(leaf))}"
            for name, leaf in named(tree)
            if jnp.shape(leaf)[:2] != axes
        ]
        if bad:
            raise ValueError(
                "\n  ".join([f"{where}:", *bad])
                + f"\nleaves must begin with [time, num_envs], here {list(axes)}"
            )


# a leaf that is not read is reused all the same
@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _clear(rollout: Rollout, state: RolloutState) -> RolloutState:
    return rollout.clear(state)


def _row_of(state: RolloutState) -> Step:
    """One env's step, from the stored ones: shapes and dtypes."""
    return stored_arrays.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), state.steps
    )


def shuffled(
    where: str, key: Key, num_items: int, name: str, num_epochs: int, num_minibatches: int
) -> jax.Array:
    """Numbers of things, int32[num_epochs * num_minibatches, num_items / num_minibatches], in the
    order of use.

    Args:
      where: for errors. key: consumed. name: what `num_items` is, for errors.

    Raises:
      ValueError: the things do not divide into so many minibatches; it names the nearest numbers
        that they do divide into.
    """
    checks.check_size(where, "num_epochs", num_epochs)
    checks.check_size(where, "num_minibatches", num_minibatches)
    size, rest = divmod(num_items, num_minibatches)
    if rest or not size:
        divisors = sorted(
            {
                d
                for low in range(1, math.isqrt(num_items) + 1)
                if not divmod(num_items, low)[1]
                for d in (low, num_items // low)
            }
        )
        nearest = [d for d in divisors if d < num_minibatches][-1:] + [
            d for d in divisors if d > num_minibatches
        ][:1]
        raise ValueError(
            f"{where}: {name} = {num_items} does not divide into "
            f"num_minibatches={num_minibatches} equal ones; the nearest that do: "
            f"{' and '.join(map(str, nearest))}"
        )
    order = jax.vmap(lambda key: jax.random.permutation(key, ring.arange(num_items)))(
        jax.random.split(key, num_epochs)
    )
    return order.reshape(num_epochs * num_minibatches, size)
