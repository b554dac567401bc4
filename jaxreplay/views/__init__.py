"""Views: what is read around a drawn row."""

from jaxreplay.views.anchor import Anchor as Anchor
from jaxreplay.views.view import View as View, WrappedView as WrappedView
