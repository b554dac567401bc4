"""Views: what is read around a drawn row."""

from jaxreplay.views.row_reader import Anchor as Anchor
from jaxreplay.views.view import View as View, WrappedView as WrappedView
