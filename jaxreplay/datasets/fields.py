"""Which array of a file holds which field of a step."""

from collections.abc import Iterable, Mapping

# the usual names of each field in files, the first that is there
_NAMES = {
    "obs": ("observations", "obs", "observation"),
    "action": ("actions", "action"),
    "reward": ("rewards", "reward"),
    "terminated": ("terminations", "terminated", "terminals", "dones", "done"),
    "truncated": ("truncations", "truncated", "timeouts"),
    "next_obs": ("next_observations", "next_obs"),
}
_OPTIONAL = ("reward", "truncated", "next_obs")


def found(where: str, members: Iterable[str], names: Mapping[str, str] | None) -> dict[str, str]:
    """Return the names of a file's arrays by field.

    Args:
      where: Name of the called function, for errors.
      members: Names of the file's arrays.
      names: Names by field, where they are not the usual ones, or None.

    Raises:
      ValueError: An array is missing, or a key of `names` is no field.
    """
    names, members = names or {}, set(members)
    if unknown := names.keys() - _NAMES.keys():
        raise ValueError(
            f"{where}: names has {', '.join(sorted(unknown))}; its keys are {', '.join(_NAMES)}"
        )
    chosen = {}
    for field, usual in _NAMES.items():
        wanted = (names[field],) if field in names else usual
        present = [name for name in wanted if name in members]
        if present:
            chosen[field] = present[0]
        elif field in names or field not in _OPTIONAL:
            raise ValueError(
                f"{where}: there is no array {' or '.join(wanted)} for {field}; the file has "
                f"{', '.join(sorted(members))}; pass names={{{field!r}: ...}}"
            )
    return chosen
