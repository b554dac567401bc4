"""The buffers of flashbax, over this library's storage.

`import jaxreplay.compat.flashbax as fbx` in place of `import flashbax as fbx` is the only line that
changes. Modules, types, arguments, methods and fields of samples have the names of flashbax 0.1.3:
`from jaxreplay.compat.flashbax.buffers.trajectory_buffer import TrajectoryBufferState`. Axes: E is
`add_batch_size`, T time, L `sample_sequence_length`, B batch.

>>> import jax, jax.numpy as jnp
>>> import jaxreplay.compat.flashbax as fbx
>>> buffer = fbx.make_flat_buffer(max_length=8, min_length=1, sample_batch_size=2)
>>> state = buffer.init({"obs": jnp.float32(0)})
>>> for obs in (3.0, 4.0):
...     state = buffer.add(state, {"obs": jnp.float32(obs)})
>>> pairs = buffer.sample(state, jax.random.key(0)).experience
>>> pairs.first["obs"].tolist(), pairs.second["obs"].tolist()
([3.0, 3.0], [4.0, 4.0])
"""

from jaxreplay.compat.flashbax import utils as utils
from jaxreplay.compat.flashbax.buffers import (
    flat_buffer as flat_buffer,
    item_buffer as item_buffer,
    make_flat_buffer as make_flat_buffer,
    make_item_buffer as make_item_buffer,
    make_mixer as make_mixer,
    make_prioritised_flat_buffer as make_prioritised_flat_buffer,
    make_prioritised_item_buffer as make_prioritised_item_buffer,
    make_prioritised_trajectory_buffer as make_prioritised_trajectory_buffer,
    make_trajectory_buffer as make_trajectory_buffer,
    make_trajectory_queue as make_trajectory_queue,
    mixer as mixer,
    prioritised_flat_buffer as prioritised_flat_buffer,
    prioritised_item_buffer as prioritised_item_buffer,
    prioritised_trajectory_buffer as prioritised_trajectory_buffer,
    trajectory_buffer as trajectory_buffer,
    trajectory_queue as trajectory_queue,
)
