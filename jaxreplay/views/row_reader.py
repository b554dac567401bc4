"""A sampled row and its neighbours in time, read lazily: arrays that a view does not ask for are
never gathered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxreplay._util import random
from jaxreplay._util.aliases import PyTree
from jaxreplay.storage import row_flags, stored_arrays
from jaxreplay.storage.episodes import Episodes
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Step
from jaxreplay.views.agents import Agents

_FLAGS = {
    "terminated": row_flags.TERMINATED,
    "truncated": row_flags.TRUNCATED,
    "final": row_flags.FINAL,
    "first": row_flags.FIRST,
}


@dataclasses.dataclass(frozen=True)
class RowReader:
    """A sampled row, and access to the rows around it in its env's ring. `View.read` gets one.

    Most methods take an `offset`: the number of rows forward in time from the sampled row. 0 is the
    row itself, -1 the row before it. An offset is a Python int or an int32 array of any shape, from
    `-length` to `length - 1`, where `length` is the number of rows in the ring. An array reads one
    row for each offset. Results have the axes of `offset` first, written [...] below; there is no
    batch axis.

    Observations are stored once: the observation after the step at offset `t` is `obs(t + 1)`. An
    episode ends with a final row, which holds the final observation (`termination_has_final_row`
    names the exception). A final row is no transition: do not use its action, reward and extras.

    Methods do not check offsets. Even within the view's window, a neighbour may belong to another
    episode or may not be written yet, and then `read` must mask its values. To find the episode's
    start, use `rows_before` or `is_first`. To find its end, use `is_terminated` and `is_final`. To
    find the newest row, use `rows_after`.

    Attributes:
      state: The buffer's state.
      row: int32[]; number of the sampled row in the buffer: env * length + position in the ring.
      bits: uint32[2]; random bits of this item alone, for views with `is_random`. Default: no bits.
      is_valid: bool[]; `Sample.is_valid` of this item. If False, a mask in the item must be False
        too, for losses that use the mask alone. Default: True.
    """

    state: ReplayState
    row: jax.Array  # int32[]
    bits: jax.Array | None = None  # uint32[2]
    is_valid: jax.Array | bool = True

    def read(self, name: str, offset: ArrayLike) -> PyTree:
        """Return a part of rows. All other methods that return what rows hold call it, so that a
        reader that changes one part overrides this method alone.

        Args:
          name: "obs", "action", "reward" or "extras", as in a `Step`, extras None if steps have
            none; "terminated", "truncated", "final" or "first", bool[...], flags of the rows;
            "agents", an `Agents` of bool[..., A], or None without `num_agents`; or "item", the rows
            as they are stored, where these are no steps.
          offset: int or int32[...]; rows forward in time.

        Returns:
          Pytree with leaves [...] followed by the leaf's own axes.
        """
        row, rows = self.state.layout.ahead(self.row, offset), self.state.rows
        if name in _FLAGS:
            return (stored_arrays.read(rows.flags, row) & _FLAGS[name]) != 0
        stored = rows.steps
        if name != "item":
            stored = getattr(stored, "terminated" if name == "agents" else name)
        found = stored_arrays.tree_map(lambda leaf: stored_arrays.read(leaf, row), stored)
        return found if name != "agents" or found is None else Agents.of(found)

    def item(self, offset: ArrayLike = 0) -> PyTree:
        """Return rows as they were added, a `Step` or an item: a pytree with leaves [...], without
        env and batch axes.

        Args:
          offset: int or int32[...]; rows forward in time. Default: 0, the sampled row.
        """
        is_item = self.state.layout.autoreset is None
        return self.read("item", offset) if is_item else self.step(offset)

    def obs(self, offset: ArrayLike) -> PyTree:
        """Return observations: pytree as `Step.obs`, leaves [...] followed by the leaf's own axes.

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("obs", offset)

    def action(self, offset: ArrayLike) -> PyTree:
        """Return actions: pytree as `Step.action`, leaves [...] followed by the leaf's own axes.

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("action", offset)

    def reward(self, offset: ArrayLike) -> PyTree:
        """Return rewards: pytree as `Step.reward`, leaves [...] followed by the leaf's own axes.

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("reward", offset)

    def extras(self, offset: ArrayLike) -> PyTree:
        """Return extras: pytree as `Step.extras`, leaves [...] followed by the leaf's own axes.

        The result is None if steps have no extras.

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("extras", offset)

    def is_terminated(self, offset: ArrayLike) -> jax.Array:
        """Return True where a step terminated its episode: bool[...].

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("terminated", offset)

    def is_truncated(self, offset: ArrayLike) -> jax.Array:
        """Return True where a step truncated its episode: bool[...].

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("truncated", offset)

    def is_final(self, offset: ArrayLike) -> jax.Array:
        """Return True for final rows: bool[...]. A final row holds an episode's final observation.

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("final", offset)

    def is_first(self, offset: ArrayLike) -> jax.Array:
        """Return True for the first row of each episode: bool[...].

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("first", offset)

    def agents(self, offset: ArrayLike) -> Agents | None:
        """Return the flags of several agents, bool[..., A]; None without `num_agents`.

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        return self.read("agents", offset)

    def step(self, offset: ArrayLike) -> Step:
        """Return a `Step` without `final_obs`, leaves [...] followed by the leaf's own axes.

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        names = ("obs", "action", "reward", "terminated", "truncated", "extras")
        step = Step(**{name: self.read(name, offset) for name in names})
        of_agents = self.read("agents", offset)
        if of_agents is None:
            return step
        return step.replace(terminated=of_agents.terminated, truncated=of_agents.truncated)

    def next_obs(self, offset: ArrayLike) -> PyTree:
        """Return the observations after steps: pytree as `Step.obs`, leaves [...].

        Where it is not known, because the step is the newest one, or terminated and its final
        observation is not stored, it is the observation of the step.

        Args:
          offset: int or int32[...]; rows forward in time.
        """
        offset = jnp.asarray(offset, jnp.int32)
        has_next = (self.rows_after() > offset) & (
            ~self.is_terminated(offset) | self.termination_has_final_row
        )
        return self.obs(jnp.where(has_next, offset + 1, offset))

    def rows_before(self, offset: ArrayLike, most: int) -> jax.Array:
        """Return the number of rows before a row in its episode, 0 to `most`: int32[...].

        It is 0 for the first row of an episode.

        Args:
          offset: int or int32[...]; rows forward in time.
          most: Number of rows that are examined, at least 0. They must be in the view's window.
        """
        return self.state.rows_before(self.state.layout.ahead(self.row, offset), most)

    def rows_after(self) -> jax.Array:
        """Return the number of rows written after the sampled row: int32[], 0 for the newest row.

        Rows of later episodes count. `obs(t)` with `t > 0` is written if `t <= rows_after()`.
        """
        return self.state.age(self.row)

    @property
    def episodes(self) -> Episodes:
        """Look-ups of episodes by row, such as `episodes.steps_to_end(reader.row)`: int32[].

        They need a view whose window has `before=None`, `after=None` or `needs_episodes=True`.
        """
        return Episodes(self.state)

    @property
    def termination_has_final_row(self) -> bool:
        """True if a terminated row is followed by a final row, once that is written.

        It is False with `autoreset="same_step_no_final_obs"`: a terminated row is then followed by
        the next episode. A Python bool.
        """
        return self.state.layout.termination_has_final_row

    def random_words(self, purpose: int) -> tuple[jax.Array, jax.Array]:
        """Return 64 random bits of this item: two words, uint32[] each. Needs `is_random`.

        Args:
          purpose: Number of the random choice, at least 0. Other numbers give other bits; the same
            number gives the same bits.
        """
        assert self.bits is not None
        return random.remix(self.bits[0], self.bits[1], jnp.uint32(purpose))

    def random_row(self, purpose: int) -> "RowReader":
        """Return a reader of a row that is chosen uniformly among all stored rows of all envs.

        Final rows are among them. The view needs `is_random` and `reads_any_row`.

        Args:
          purpose: Number of the random choice, as for `random_words`, at least 0.
        """
        return self.at(row=self.state.random_row(*self.random_words(purpose)))

    def at(self, **changes: Any) -> "RowReader":
        """Return a reader of another row, or with other random bits.

        Args:
          changes: New values of attributes: `row`, int32[], or `bits`, uint32[2].
        """
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class WrappedReader(RowReader):
    """Base class of readers that change what another reader, `inner`, reads for a `WrappedView`.

    A subclass overrides `read` alone, and calls `super().read` for the values to be changed. All
    other methods follow, but `rows_before`, which reads the stored flags. It is made by `around`.

    Attributes:
      state: The buffer's state.
      row: int32[]; number of the sampled row in the buffer.
      bits: uint32[2]; random bits of this item alone. Default: no bits.
      is_valid: bool[]; `Sample.is_valid` of this item. Default: True.
      inner: The reader that is wrapped; `around` sets it. Default: none, and the methods that
        forward to it fail.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> class ClippedReader(jr.views.WrappedReader):
      ...     def read(self, name, offset):
      ...         value = super().read(name, offset)
      ...         return jnp.clip(value, -1, 1) if name == "reward" else value
      >>> class Clipped(jr.views.WrappedView):
      ...     def read(self, reader):
      ...         return self.inner.read(ClippedReader.around(reader))
      >>> buffer = jr.ReplayBuffer(
      ...     capacity=8,
      ...     batch_size=4,
      ...     sampler=jr.Uniform(),
      ...     autoreset="next_step",
      ...     view=Clipped(inner=jr.views.TransitionView(n_step=2, gamma=1.0)),
      ... )
      >>> step = jr.Step(
      ...     obs=jnp.float32(0),
      ...     action=jnp.int32(0),
      ...     reward=jnp.float32(9),
      ...     terminated=jnp.bool_(False),
      ...     truncated=jnp.bool_(False),
      ... )
      >>> steps = jax.tree.map(lambda leaf: jnp.full((4, 1), leaf), step)  # [T, E]
      >>> buffer = jr.jit(buffer)
      >>> state = buffer.extend(buffer.init(step), steps)
      >>> buffer.get(state, jnp.arange(1)).experience.reward.tolist()
      [2.0]
    """

    inner: RowReader | None = None

    @classmethod
    def around(cls, inner: RowReader, **fields: Any) -> PyTree:
        """Return a reader of this class around another reader, at the same row.

        Args:
          inner: The reader to be wrapped.
          fields: Values of the fields that the subclass adds. Such a subclass is decorated with
            `dataclasses.dataclass(frozen=True)`, and its fields have defaults.
        """
        shared = {field.name: getattr(inner, field.name) for field in dataclasses.fields(RowReader)}
        return cls(**shared, inner=inner, **fields)

    def read(self, name: str, offset: ArrayLike) -> PyTree:
        return self._inner.read(name, offset)

    def at(self, **changes: Any) -> RowReader:
        return dataclasses.replace(self, inner=self._inner.at(**changes), **changes)

    @property
    def _inner(self) -> RowReader:
        assert self.inner is not None
        return self.inner
