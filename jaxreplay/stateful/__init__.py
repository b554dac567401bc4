"""A buffer with a state of its own, for loops that are not jitted."""
