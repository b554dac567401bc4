"""The row itself."""

import dataclasses
from typing import Any

import jax

from jaxreplay.views.anchor import Anchor


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """What was stored, as it was stored: drawable at once."""

    @property
    def lookahead(self) -> int:
        return 0

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, anchor: Anchor) -> Any:
        return anchor.item()
