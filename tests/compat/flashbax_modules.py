"""Modules of flashbax, as its tests import them: our adapter, and the functions of its modules
written with it."""

from typing import Any, NamedTuple

import jax

import jaxreplay.compat.flashbax as fbx

LENGTH = 5  # `sample_sequence_length` of the tests that call a module's own functions


def _sizes(state: Any) -> dict[str, int]:
    layout = state.rows.streams.layout
    return {"add_batch_size": layout.num_envs, "max_length_time_axis": layout.length}


def _trajectories(sizes, batch_size=1, length=LENGTH, period=1, minimum=1) -> Any:
    return fbx.make_trajectory_buffer(
        sample_batch_size=batch_size,
        sample_sequence_length=length,
        period=period,
        min_length_time_axis=minimum,
        **sizes,
    )


def init(experience, add_batch_size, max_length_time_axis):
    sizes = {"add_batch_size": add_batch_size, "max_length_time_axis": max_length_time_axis}
    return _trajectories(sizes).init(experience)


def add(state, batch):
    return _trajectories(_sizes(state)).add(state, batch)


def sample(state, key, batch_size, sequence_length, period):
    return _trajectories(_sizes(state), batch_size, sequence_length, period).sample(state, key)


def can_sample(state, minimum):
    return _trajectories(_sizes(state), minimum=minimum).can_sample(state)


def _prioritised(sizes, batch_size=1, length=LENGTH, period=1, exponent=0.6) -> Any:
    return fbx.make_prioritised_trajectory_buffer(
        sample_batch_size=batch_size,
        sample_sequence_length=length,
        period=period,
        min_length_time_axis=1,
        priority_exponent=exponent,
        **sizes,
    )


def prioritised_init(experience, add_batch_size, max_length_time_axis, period):
    sizes = {"add_batch_size": add_batch_size, "max_length_time_axis": max_length_time_axis}
    return _prioritised(sizes, period=period).init(experience)


def prioritised_add(state, batch, sequence_length, period, device):
    return _prioritised(_sizes(state), 1, sequence_length, period).add(state, batch)


def prioritised_sample(state, key, batch_size, sequence_length, period):
    return _prioritised(_sizes(state), batch_size, sequence_length, period).sample(state, key)


def set_priorities(state, indices, priorities, exponent, device):
    period = 3  # of the one test that calls this
    buffer = _prioritised(_sizes(state), period=period, exponent=exponent)
    return buffer.set_priorities(state, indices, priorities)


def _queue(sizes, add_length=1, sample_length=1) -> Any:
    return fbx.make_trajectory_queue(
        add_sequence_length=add_length, sample_sequence_length=sample_length, **sizes
    )


def queue_init(experience, add_batch_size, max_length_time_axis):
    sizes = {"add_batch_size": add_batch_size, "max_length_time_axis": max_length_time_axis}
    return _queue(sizes).init(experience)


def queue_add(state, batch):
    return _queue(_sizes(state)).add(state, batch)


def queue_sample(state, sequence_length):
    return _queue(_sizes(state), sample_length=sequence_length).sample(state)


def queue_can_add(state, add_sequence_length, max_length_time_axis):
    return _queue(_sizes(state), add_length=add_sequence_length).can_add(state)


def queue_can_sample(state, sample_sequence_length, max_length_time_axis):
    return _queue(_sizes(state), sample_length=sample_sequence_length).can_sample(state)


class Tree(NamedTuple):
    """The part of flashbax's tree that its tests read."""

    state: Any
    indices: jax.Array
    nodes: jax.Array
    max_recorded_priority: jax.Array


def _tree(state: Any) -> Tree:
    sampler, layout = state.rows.sampler, state.rows.streams.layout
    leaves = sampler.tree.sums[0]
    total = sampler.tree.sums[-1].sum(-1, keepdims=True)
    return Tree(state, leaves, total, sampler.max_priority**layout.alpha)


def get(tree: Tree, indices: jax.Array) -> jax.Array:
    """Return the mass of each item: float32[B]. Leaves are ordered by time, then env."""
    layout = tree.state.rows.streams.layout
    period = 3 if layout.window.after == LENGTH - 1 else 1
    env, position = layout.split(indices * period)
    return tree.indices[position * layout.num_envs + env]


_MAKERS = {name: getattr(fbx, name) for name in fbx.__all__}
_MODULES: dict[str, dict[str, Any]] = {
    "flat_buffer": _MAKERS,
    "item_buffer": _MAKERS,
    "mixer": _MAKERS,
    "prioritised_flat_buffer": _MAKERS,
    "prioritised_item_buffer": _MAKERS,
    "trajectory_buffer": _MAKERS
    | {"init": init, "add": add, "sample": sample, "can_sample": can_sample},
    "prioritised_trajectory_buffer": _MAKERS
    | {
        "prioritised_init": prioritised_init,
        "prioritised_add": prioritised_add,
        "prioritised_sample": prioritised_sample,
        "set_priorities": set_priorities,
    },
    "trajectory_queue": _MAKERS
    | {
        "init": queue_init,
        "add": queue_add,
        "sample": queue_sample,
        "can_add": queue_can_add,
        "can_sample": queue_can_sample,
    },
    "sum_tree": {"get": get},
}


def modules() -> dict[str, dict[str, Any]]:
    """Return the members of each module, and add what the tests want of JAX and of our states."""
    jax.tree_map = jax.tree.map  # type: ignore[attr-defined]  # newer JAX has none
    fbx.PrioritisedTrajectoryBufferState.sum_tree_state = property(_tree)  # type: ignore
    return _MODULES
