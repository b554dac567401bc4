"""Views make the items of a batch from sampled rows and the rows around them."""

from jaxreplay.storage.layout import Window as Window
from jaxreplay.views.chunk import ChunkView as ChunkView
from jaxreplay.views.frame_stack import FrameStack as FrameStack
from jaxreplay.views.future import FutureView as FutureView
from jaxreplay.views.hindsight import Hindsight as Hindsight
from jaxreplay.views.item import Item as Item
from jaxreplay.views.relabelled import Relabelled as Relabelled
from jaxreplay.views.row_reader import RowReader as RowReader, WrappedReader as WrappedReader
from jaxreplay.views.sequence import SequenceView as SequenceView
from jaxreplay.views.transformed import Transformed as Transformed
from jaxreplay.views.transition import TransitionView as TransitionView
from jaxreplay.views.view import View as View, WrappedView as WrappedView
