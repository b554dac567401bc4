"""What a view is: how far it looks, and what it makes of a row."""

from typing import Any, Generic

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.struct import Static
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.types import T
from jaxreplay.views.row_reader import RowReader


class View(Static, Generic[T]):
    """A frozen, hashable configuration with `read`, written for one row; the buffer maps it over a
    batch.

    What a view leaves out is as here.
    """

    @property
    def window(self) -> Window:
        """The rows that it reads around its row: a row is sampleable when these are known. By
        default none."""
        return Window()

    @property
    def needs_steps(self) -> bool:
        """Whether it reads the fields of a `Step`; otherwise any pytree may be stored."""
        return True

    @property
    def is_random(self) -> bool:
        """Whether it reads the reader's random bits, so that `get` needs a key."""
        return False

    @property
    def reads_any_row(self) -> bool:
        """Whether it reads rows outside of its window: any that are stored."""
        return False

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        """A ValueError where it cannot read such steps. `example`: shapes and dtypes of one env's
        step."""
        del where, layout, example

    def read(self, reader: RowReader) -> T:
        """The item of one row."""
        raise NotImplementedError(f"{type(self).__name__} is a view, and must have read(reader)")


class WrappedView(View[T]):
    """A view that changes what another one, `inner`, reads. It forwards what a subclass does not
    override."""

    inner: View[Any]

    @property
    def window(self) -> Window:
        return self.inner.window

    @property
    def needs_steps(self) -> bool:
        return self.inner.needs_steps

    @property
    def is_random(self) -> bool:
        return self.inner.is_random

    @property
    def reads_any_row(self) -> bool:
        return self.inner.reads_any_row

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        self.inner.check(where, layout, example)
