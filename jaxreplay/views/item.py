"""A view of the sampled row alone."""

from jaxreplay._util.aliases import PyTree
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import View


class Item(View[PyTree]):
    """Return each sampled row as it was stored: any pytree. Rows are sampleable at once."""

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, reader: RowReader) -> PyTree:
        return reader.item()
