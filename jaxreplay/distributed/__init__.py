"""One buffer over the devices of a mesh."""

from jaxreplay.distributed.shard import Shard
from jaxreplay.distributed.sharded import Sharded, sharded

__all__ = ["Shard", "Sharded", "sharded"]
