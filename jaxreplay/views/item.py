"""The row itself."""

from typing import Any

from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import View


class Item(View):
    """What was stored, as it was stored: sampleable at once."""

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, reader: RowReader) -> Any:
        return reader.item()
