"""One buffer over the devices of a mesh."""

from jaxreplay.distributed.local import Local
from jaxreplay.distributed.sharded import Sharded, sharded

__all__ = ["Local", "Sharded", "sharded"]
