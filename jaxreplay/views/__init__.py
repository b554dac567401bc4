"""Views: what is read around a drawn row."""

from jaxreplay.views.anchor import Anchor
from jaxreplay.views.item import Item
from jaxreplay.views.transition import TransitionView
from jaxreplay.views.view import View

__all__ = ["Anchor", "Item", "TransitionView", "View"]
