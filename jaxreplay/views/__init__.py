"""Views: what is read around a drawn row."""

from jaxreplay.views.anchor import Anchor
from jaxreplay.views.frame_stack import FrameStack
from jaxreplay.views.future import FutureView, Pair
from jaxreplay.views.hindsight import Hindsight
from jaxreplay.views.item import Item
from jaxreplay.views.sequence import Sequence, SequenceView
from jaxreplay.views.transformed import Transformed
from jaxreplay.views.transition import TransitionView
from jaxreplay.views.view import View

__all__ = [
    "Anchor",
    "FrameStack",
    "FutureView",
    "Hindsight",
    "Item",
    "Pair",
    "Sequence",
    "SequenceView",
    "Transformed",
    "TransitionView",
    "View",
]
