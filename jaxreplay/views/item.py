"""The row itself."""

from typing import Any

from jaxreplay.views.row_reader import Anchor
from jaxreplay.views.view import View


class Item(View):
    """What was stored, as it was stored: drawable at once."""

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, anchor: Anchor) -> Any:
        return anchor.item()
