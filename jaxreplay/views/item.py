"""The row itself."""

from jaxreplay._util.aliases import PyTree
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import View


class Item(View[PyTree]):
    """What was stored, as it was stored: sampleable at once."""

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, reader: RowReader) -> PyTree:
        return reader.item()
