"""Nodes in `flax.serialization`, for programs that use flax, which is never imported here."""

import dataclasses
import functools
import sys
from typing import Any

from jaxreplay._util.struct import NODES


def tell_flax() -> None:
    """Register all classes of nodes with `flax.serialization`, if the program has imported it.

    It is called when jaxreplay is imported, and by `init`.
    """
    if hasattr(flax := sys.modules.get("flax.serialization"), "register_serialization_state"):
        for kind in NODES:
            _register(flax, kind)


@functools.cache
def _register(flax: Any, kind: type) -> None:
    names = {
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if "static" not in field.metadata
    }

    def to_dict(node: Any) -> dict[str, Any]:
        return {name: flax.to_state_dict(getattr(node, name)) for name in names}

    def from_dict(node: Any, state: dict[str, Any]) -> Any:
        if state.keys() != names:
            raise ValueError(
                f"{kind.__name__}, at {flax.current_path()}: expected the fields "
                f"{', '.join(sorted(names))}, got {', '.join(sorted(map(str, state)))}"
            )
        return dataclasses.replace(
            node,
            **{
                name: flax.from_state_dict(getattr(node, name), value, name=name)
                for name, value in state.items()
            },
        )

    flax.register_serialization_state(kind, to_dict, from_dict)
