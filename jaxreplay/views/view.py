"""What a view is: how far it looks, and what it makes of a row."""

from typing import Any, Protocol

from jaxreplay.views.anchor import Anchor


class View(Protocol):
    """A frozen, hashable configuration with one method, written for one row; the buffer maps it over a batch."""

    @property
    def lookahead(self) -> int:
        """Rows that it reads after its anchor: a row is drawable when these are known, or its episode ended before."""
        ...

    @property
    def needs_steps(self) -> bool:
        """Whether it reads the fields of a `Step`; otherwise any pytree may be stored."""
        ...

    def read(self, anchor: Anchor) -> Any:
        """The item of one row."""
        ...
