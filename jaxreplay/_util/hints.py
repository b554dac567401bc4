"""What users of other libraries call an argument, and what it is called here."""

import difflib
from collections.abc import Iterable

_OTHER_NAMES = {
    "discount": "gamma",
    "discount_factor": "gamma",
    "n_steps": "n_step",
    "nstep": "n_step",
    "n": "n_step",
    "max_length": "capacity",
    "max_size": "capacity",
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


def unknown_arguments(where: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return the text for arguments that `where` does not take. `known`: those that it takes."""
    known = list(known)
    lines = []
    for name in unknown:
        close = _OTHER_NAMES.get(name) or next(
            iter(difflib.get_close_matches(name, known, 1)), None
        )
        hint = f"; did you mean {close}?" if close else f"; it takes {', '.join(known)}"
        lines.append(f"{where} takes no {name}{hint}")
    return "\n  ".join(lines)
