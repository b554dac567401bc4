"""What a view is: how far it looks, and what it makes of a row."""

from typing import Any

from jaxreplay._util.struct import Static
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.views.row_reader import Anchor


class View(Static):
    """A frozen, hashable configuration with `read`, written for one row; the buffer maps it over a batch.

    What a view leaves out is as here.
    """

    @property
    def window(self) -> Window:
        """The rows that it reads around its anchor: a row is drawable when these are known. By default none."""
        return Window()

    @property
    def needs_steps(self) -> bool:
        """Whether it reads the fields of a `Step`; otherwise any pytree may be stored."""
        return True

    @property
    def draws(self) -> bool:
        """Whether it reads the anchor's random bits, so that `get` needs a key."""
        return False

    @property
    def roams(self) -> bool:
        """Whether it reads rows outside of its window: any that are stored."""
        return False

    def check(self, where: str, layout: Layout, example: Any) -> None:
        """A ValueError where it cannot read such steps. `example`: shapes and dtypes of one env's step."""
        del where, layout, example

    def read(self, anchor: Anchor) -> Any:
        """The item of one row."""
        raise NotImplementedError(f"{type(self).__name__} is a view, and must have read(anchor)")


class WrappedView(View):
    """A view that changes what another one, `of`, reads. It forwards what a subclass does not override."""

    of: View

    @property
    def window(self) -> Window:
        return self.of.window

    @property
    def needs_steps(self) -> bool:
        return self.of.needs_steps

    @property
    def draws(self) -> bool:
        return self.of.draws

    @property
    def roams(self) -> bool:
        return self.of.roams

    def check(self, where: str, layout: Layout, example: Any) -> None:
        self.of.check(where, layout, example)
