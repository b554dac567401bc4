"""The protocol of a view: the rows that it needs around a sampled row, and the item that it makes
of them."""

from typing import Any, Generic

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.struct import Static
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.types import T
from jaxreplay.views.row_reader import RowReader


class View(Static, Generic[T]):
    """Base class of views. A view turns each sampled row into an item of the batch.

    A subclass must have `read`. If `read` uses rows other than the sampled one, the subclass must
    override `window`. The other members have defaults.

    A view is a frozen, hashable configuration. Annotated fields of a subclass become keyword
    arguments and hold plain Python values. `jit` compiles once for each different value. A call of
    `buffer.sample` may give those that `takes` names; `self.given` has this item's, traced or not.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> class Velocity(jr.views.View):
      ...     time_step: float = 1.0
      ...     window = jr.views.Window(before=1)  # the row before, in the same episode
      ...
      ...     def read(self, reader):
      ...         change = (reader.obs(0) - reader.obs(-1)) / self.time_step
      ...         # Before an episode's first row lies another episode.
      ...         return {"obs": reader.obs(0), "v": jnp.where(reader.is_first(0), 0.0, change)}
      >>> buffer = jr.ReplayBuffer(
      ...     capacity=8,
      ...     batch_size=4,
      ...     sampler=jr.Uniform(),
      ...     view=Velocity(time_step=0.5),
      ...     autoreset="next_step",
      ... )
      >>> step = jr.Step(
      ...     obs=jnp.float32(0),
      ...     action=jnp.int32(0),
      ...     reward=jnp.float32(0),
      ...     terminated=jnp.bool_(False),
      ...     truncated=jnp.bool_(False),
      ... )
      >>> steps = jax.tree.map(lambda leaf: jnp.full((3, 1), leaf), step)  # [T, E]
      >>> steps = steps.replace(obs=jnp.array([[3.0], [4.0], [6.0]]))
      >>> buffer = jr.jit(buffer)
      >>> state = buffer.extend(buffer.init(step), steps)
      >>> buffer.get(state, jnp.arange(3)).experience["v"].tolist()
      [0.0, 2.0, 4.0]
    """

    @property
    def window(self) -> Window:
        """Rows around the sampled row that `read` needs, in time. Default: `Window()`, no others.

        A row is sampled only while its window is known: each row of the window is stored, or lies
        beyond the start or the end of the episode. Rows beyond it may hold another episode, or
        nothing yet: `read` must mask their values. After a terminated step this holds for the final
        row, too, unless `needs_final_obs=True`.

        `Window(before=1, after=3)` allows offsets from -1 to 3. A subclass may set a class
        attribute instead of a property: `window = Window(after=1)`.
        """
        return Window()

    @property
    def needs_steps(self) -> bool:
        """True if rows must be `Step`s, as for `reader.obs`. Default: True.

        If False, the buffer stores any pytree, which `reader.item` returns. Such a buffer has no
        `autoreset`, no episodes and no flags.
        """
        return True

    @property
    def is_random(self) -> bool:
        """True if `read` uses `reader.random_words` or `reader.random_row`. Default: False.

        `ReplayBuffer.get` then needs a key.
        """
        return False

    @property
    def reads_any_row(self) -> bool:
        """True if `read` uses rows outside of its window, by `reader.random_row`. Default: False.

        `frame_stack` refuses such a view, because frames before these rows may be overwritten.
        """
        return False

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        """Check at `init` that the view can read the rows that will be stored.

        The default accepts all rows.

        Args:
          where: Name of the called method, such as "init". Begin an error's text with it.
          layout: Configuration of the state, such as `layout.autoreset`, `layout.num_envs` and
            `layout.length`, the number of rows in each env's ring.
          example: One env's `Step`, or one item: a pytree with leaves `jax.ShapeDtypeStruct`,
            without env and batch axes.

        Raises:
          ValueError: To be raised by an override if rows lack something that `read` needs.
        """
        del where, layout, example

    def read(self, reader: RowReader) -> T:
        """Make the item of one sampled row.

        The method is pure and is traced. The buffer maps it over a batch by `jax.vmap`, so `reader`
        and the item have no batch axis. It also runs for items with `is_valid=False`, whose
        rows hold any stored values or zeros: return finite values for them, too.

        Args:
          reader: The sampled row and its neighbours. Arrays that `read` does not ask for are never
            gathered.

        Returns:
          The item: any pytree of arrays. `Sample.experience` stacks the items of a batch, leaves
          [B, ...].

        Raises:
          NotImplementedError: The subclass has no `read`.
        """
        raise NotImplementedError(f"{type(self).__name__} is a view, and must have read(reader)")


class WrappedView(View[T]):
    """Base class of views that change what another view, `inner`, reads or returns.

    A subclass must have `read`. It either calls `inner.read` with a `WrappedReader` around its own
    reader, or changes the item that `inner.read` returns. All other members forward to `inner`. An
    override of `window` must contain the window of `inner`; one of `check` calls `super().check`.

    Args:
      inner: The view that is wrapped, such as a `TransitionView`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> class HalfPrecision(jr.views.WrappedView):
      ...     def read(self, reader):
      ...         half = lambda x: x.astype(jnp.float16) if x.dtype == jnp.float32 else x
      ...         return jax.tree.map(half, self.inner.read(reader))
      >>> buffer = jr.ReplayBuffer(
      ...     capacity=8,
      ...     batch_size=4,
      ...     sampler=jr.Uniform(),
      ...     view=HalfPrecision(inner=jr.views.Item()),
      ... )
      >>> buffer = jr.jit(buffer)
      >>> state = buffer.add(buffer.init(jnp.zeros(3)), jnp.ones((1, 3)))
      >>> buffer.get(state, jnp.arange(1)).experience.dtype
      dtype('float16')
    """

    inner: View[Any]

    @property
    def window(self) -> Window:
        """Window of `inner`."""
        return self.inner.window

    @property
    def needs_steps(self) -> bool:
        """True if `inner` reads `Step`s."""
        return self.inner.needs_steps

    @property
    def is_random(self) -> bool:
        """True if `inner` is random."""
        return self.inner.is_random

    @property
    def reads_any_row(self) -> bool:
        """True if `inner` uses rows outside of its window."""
        return self.inner.reads_any_row

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        """Check that `inner` can read the rows that will be stored."""
        self.inner.check(where, layout, example)


class Outline(View[Any]):
    """A view of the same rows as another one, without its functions. It makes no items.

    Args:
      rows: The other view's window.
      reads_steps: The other view's `needs_steps`.
    """

    rows: Window
    reads_steps: bool

    @property
    def window(self) -> Window:
        """Window of the other view."""
        return self.rows

    @property
    def needs_steps(self) -> bool:
        """True if the other view reads `Step`s."""
        return self.reads_steps


def zeroed(tree: PyTree, keep: jax.Array) -> Any:
    """Return the leaves with 0 where `keep`, bool over their first axes, is False."""

    def zero(leaf):
        return jnp.where(
            keep.reshape(keep.shape + (1,) * (leaf.ndim - keep.ndim)), leaf, jnp.zeros_like(leaf)
        )

    return jax.tree.map(zero, tree)
