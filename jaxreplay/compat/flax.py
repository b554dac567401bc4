"""`flax.serialization` of states: import this module once before you use it.

>>> import flax.serialization, jax.numpy as jnp, jaxreplay as jr
>>> import jaxreplay.compat.flax
>>> buffer = jr.items(capacity=4, batch_size=2)
>>> state = buffer.add(buffer.init(jnp.int32(0)), jnp.array([7]))
>>> written = flax.serialization.to_bytes(state)
>>> restored = flax.serialization.from_bytes(buffer.init(jnp.int32(0)), written)
>>> int(buffer.size(restored))
1
"""

import dataclasses
from typing import Any

from flax import serialization

from jaxreplay._util.struct import Node, on_new_node


def _register(kind: Any) -> None:
    names = {field.name for field in dataclasses.fields(kind) if "static" not in field.metadata}

    def to_dict(node: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(node, name)) for name in names}

    def from_dict(node: Any, state: dict[str, Any]) -> Any:
        if state.keys() != names:
            raise ValueError(
                f"{kind.__name__}, at {serialization.current_path()}: expected the fields "
                f"{', '.join(sorted(names))}, got {', '.join(sorted(map(str, state)))}"
            )
        return node.replace(
            **{
                name: serialization.from_state_dict(getattr(node, name), value, name=name)
                for name, value in state.items()
            }
        )

    serialization.register_serialization_state(kind, to_dict, from_dict)


def _register_below(kind: Any) -> None:
    for child in kind.__subclasses__():
        _register(child)
        _register_below(child)


_register_below(Node)
on_new_node.append(_register)
