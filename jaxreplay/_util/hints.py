"""Texts of errors for unknown names, with the right name for those of other libraries."""

import difflib
from collections.abc import Iterable
from typing import Any

# Arguments of buffers in other libraries, and here.
_OTHER_ARGUMENTS = {
    "discount": "gamma",
    "discount_factor": "gamma",
    "n_steps": "n_step",
    "nstep": "n_step",
    "n": "n_step",
    "max_length": "capacity",
    "max_size": "capacity",
    "size": "capacity",
    "buffer_size": "capacity",
    "replay_capacity": "capacity",
    "max_length_time_axis": "capacity",
    "min_length": "min_size",
    "min_replay_size": "min_size",
    "learning_starts": "min_size",
    "sample_batch_size": "batch_size",
    "add_batch_size": "num_envs",
    "n_envs": "num_envs",
    "env_num": "num_envs",
    "exponent": "alpha",
    "priority_exponent": "alpha",
    "importance_sampling_exponent": "beta",
    "sample_sequence_length": "length",
    "sequence_length": "length",
}
# What takes an argument that a buffer does not take.
_TAKERS = (
    dict.fromkeys(("alpha", "beta", "stratified", "new_priority"), "jaxreplay.prioritized")
    | dict.fromkeys(("length", "burn_in", "period"), "jaxreplay.sequences")
    | dict.fromkeys(("device", "framework", "rows", "seed"), "jaxreplay.Replay")
    | dict.fromkeys(
        ("autoreset", "track_episodes", "num_agents"), "a buffer of steps, as jaxreplay.uniform,"
    )
    | {"sampler": "jaxreplay.transitions", "view": "jaxreplay.ReplayBuffer", "example": "init"}
)
# Methods of buffers in other libraries, and here.
_OTHER_METHODS = dict.fromkeys(("push", "insert", "store", "append", "put"), "add") | {
    "set_priorities": "update_priorities"
}


_DONE = (
    "done is two flags here: terminated, if the task itself ended, so that the value after it is "
    "0, and truncated, if the episode was cut, such as by a time limit"
)
_NEXT = (
    "leave out the next observation: it is the obs of the next row. After an episode's last step "
    'it is final_obs, with autoreset="same_step", or the obs of the next row, with "next_step"'
)
# Fields of a step in other libraries, and how to write them here.
_OTHER_STEP_FIELDS = (
    dict.fromkeys(("done", "dones", "is_done"), _DONE)
    | dict.fromkeys(("next_obs", "next_observation", "next_observations", "next_state"), _NEXT)
    | dict.fromkeys(("observation", "observations", "state"), "the observation is called obs")
    | dict.fromkeys(
        ("mask", "priority"),
        "mask and priority are arguments of add and extend: add(..., mask=mask)",
    )
    | {"actions": "the action is called action", "rewards": "the reward is called reward"}
    | {
        "terminal": "a terminal flag is called terminated",
        "terminations": "a terminal flag is called terminated",
    }
    | {
        "timeout": "a time limit's flag is called truncated",
        "truncations": "a time limit's flag is called truncated",
    }
)
# Fields of a batch's items in other libraries, and here.
_OTHER_ITEM_FIELDS = {
    "second": "next_obs",
    "observation": "obs",
    "observations": "obs",
    "next_observation": "next_obs",
    "next_observations": "next_obs",
    "actions": "action",
    "rewards": "reward",
    "done": "discount, which is 0 where an episode was terminated",
    "dones": "discount, which is 0 where an episode was terminated",
}
# Fields of a batch in other libraries, and here.
_OTHER_FIELDS = {
    "items": "batch.experience",
    "first": "batch.experience",
    "indices": "batch.index",
    "idx": "batch.index",
    "probabilities": "batch.probability",
    "weights": "batch.weight",
    "mask": "batch.is_valid",
}


def unknown_arguments(where: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return the text for unknown arguments of `where`. `known`: the arguments that it takes."""
    known = list(known)
    lines = []
    for name in unknown:
        meant = _OTHER_ARGUMENTS.get(name, name)
        close = [meant] if meant in known else difflib.get_close_matches(meant, known, 1, 0.7)
        if meant in _TAKERS and meant not in known:
            hint = f"{_TAKERS[meant]} takes {'it' if meant == name else meant}"
        elif close:
            hint = f"did you mean {close[0]}?"
        else:
            hint = f"it takes {', '.join(known) or 'no arguments'}"
        lines.append(f"{where} takes no {name}; {hint}")
    return "\n  ".join(lines)


def unknown_attribute(value: Any, name: str) -> str:
    """Return the text for an unknown method, or field, of a value."""
    kind, fields = type(value), getattr(type(value), "__dataclass_fields__", ())
    known = [*dir(kind), *fields]
    meant = _OTHER_METHODS.get(name)
    close = [meant] if meant in known else difflib.get_close_matches(name, known, 1, 0.7)
    return f"a {kind.__name__} has no {name}" + (f"; did you mean {close[0]}?" if close else "")


def no_attribute(value: Any, name: str) -> Any:
    """Raise the AttributeError of an unknown method, or field, of a buffer."""
    raise AttributeError(unknown_attribute(value, name))


def no_state_attribute(state: Any, name: str) -> Any:
    """Raise the AttributeError of an unknown field of a state."""
    what = unknown_attribute(state, name)
    raise AttributeError(f"{what}; methods are the buffer's: buffer.add(state, ...)")


def no_items(value: Any, key: Any) -> Any:
    """Raise the TypeError for a batch that is unpacked, or read by key."""
    raise TypeError(
        f"a {type(value).__name__} has fields, and no items: write batch.experience.obs, not "
        "batch[...] or obs, ... = batch"
    )


def step_fields(unknown: Iterable[str]) -> list[str]:
    """Return how to write unknown fields of a step here, a line each, for those of other
    libraries."""
    known = (_OTHER_STEP_FIELDS[name] for name in unknown if name in _OTHER_STEP_FIELDS)
    return [*dict.fromkeys(known)]


def unknown_field(name: str, experience: Any) -> str:
    """Return the text for an unknown field of a batch. `experience`: the batch's items."""
    field = _field_of(experience, name)
    meant = f"batch.experience.{field}" if field else _OTHER_FIELDS.get(name)
    return f"a Sample has no {name}" + (f"; did you mean {meant}?" if meant else "")


def no_item_field(item: Any, name: str) -> Any:
    """Raise the AttributeError of an unknown field of a batch's items."""
    field = _field_of(item, name)
    hint = f"; did you mean {field}?" if field else ""
    raise AttributeError(f"a {type(item).__name__} has no {name}{hint}")


def _field_of(items: Any, name: str) -> str | None:
    """Return how the field that is called so, here or in other libraries, is called in items."""
    fields = getattr(items, "__dataclass_fields__", {})
    field = name if name in fields else _OTHER_ITEM_FIELDS.get(name, "")
    return field if field.partition(",")[0] in fields else None
