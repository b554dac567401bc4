"""Buffers: the pure functions over a state, the named ones, and what wraps them."""
