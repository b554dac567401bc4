"""States, samples and items for `jax.export`: an exported program that takes or returns them can be written to a file, and read again.

Their configuration, the static part, is written as JSON.
"""

import dataclasses
import json
from typing import Any

import numpy as np
from jax import export

from jaxreplay.advantages import Advantages
from jaxreplay.drawable import ReplayState
from jaxreplay.episode_table import EpisodeState
from jaxreplay.layout import Layout
from jaxreplay.leaves import Narrow, Parted
from jaxreplay.mixture import MixedSample
from jaxreplay.rollouts import RolloutState
from jaxreplay.samplers.prioritized import PrioritizedState
from jaxreplay.samplers.queue import QueueState
from jaxreplay.samplers.rank_based import RankBasedState
from jaxreplay.samplers.without_replacement import WithoutReplacementState
from jaxreplay.streams import Heads, Streams
from jaxreplay.sum_tree import SumTreeState
from jaxreplay.types import Index, Sample, Step, Transition
from jaxreplay.views.future import Pair
from jaxreplay.views.sequence import Sequence
from jaxreplay.window import Window

_STATES = (ReplayState, Streams, Heads, EpisodeState, RolloutState, SumTreeState)
_OF_SAMPLERS = (PrioritizedState, QueueState, RankBasedState, WithoutReplacementState)
NODES = (*_STATES, *_OF_SAMPLERS, Narrow, Parted, Step, Transition, Sequence, Pair, Index, Sample, MixedSample)
TUPLES = (Advantages,)
_STATIC = {kind.__name__: kind for kind in (Layout, Window)}


def register() -> None:
    """Once, as the library is imported."""
    for node in NODES:
        export.register_pytree_node_serialization(
            node, serialized_name=_name(node), serialize_auxdata=_written, deserialize_auxdata=_read_again
        )
    for node in TUPLES:
        export.register_namedtuple_serialization(node, serialized_name=_name(node))


def _name(node: type) -> str:
    return f"jaxreplay.{node.__name__}"


def _written(static: Any) -> bytes:
    return json.dumps(_plain(static)).encode()


def _read_again(content: bytes) -> Any:
    return _made(json.loads(bytes(content)))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _made(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return np.dtype(content) if kind == "dtype" else _STATIC[kind](**{name: _made(one) for name, one in content.items()})
    return tuple(map(_made, value)) if isinstance(value, list) else value
