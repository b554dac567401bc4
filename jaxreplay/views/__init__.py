"""Views: what is read around a drawn row."""

from jaxreplay.views.row_reader import RowReader as RowReader
from jaxreplay.views.view import View as View, WrappedView as WrappedView
