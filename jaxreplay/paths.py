"""Leaves by name: the key path of each, as errors, files and tables write it, such as `streams.steps.obs.image`."""

from typing import Any

import jax


def name_of(path: Any) -> str:
    """Of a JAX key path; a tree that is one leaf has none."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf with its name, in the tree's order."""
    return [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
